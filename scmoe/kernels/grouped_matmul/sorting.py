"""The place of every choice among the experts' tiles, and the tiles, in one kernel on Hopper.

    N  choices      G  groups (experts)      R  rows of the tiles      I  tiles

XLA makes sums over groups, ranks, a scatter, and what stands around them in a dozen kernels, each
of which takes longer to launch than to run. Here every thread block makes the sums over groups for
itself, and then its part of everything.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline
from scmoe.kernels.launch import compiled, resolve_num_sms, varying_as

_THREADS = 512
_MOST = 1024  # groups


def takes(num_choices: int, num_groups: int) -> bool:
  """Whether the kernel takes these sizes."""
  return 0 < num_choices < 2**28 and 0 < num_groups <= _MOST


def sorted_rows_kernel(
  sizes_G: jax.Array,
  group_KM: jax.Array,
  position_KM: jax.Array,
  num_tiles: int,
  tile: int,
) -> tuple[jax.Array, ...]:
  """All of a `TiledRows` but what is static.

  Args:
    sizes_G: int32, choices of each group.
    group_KM: int32, group of each choice, first choices first; outside [0, G) for none.
    position_KM: int32, of each choice among its group's.
    num_tiles: I, the bound.
    tile: rows of a tile.

  Returns:
    tile_starts_G, tiles_G, by_size_G, num_tiles [1] and tile_group_I of the layout; row_KM, copy_R
    and token_R of the permutation.
  """
  made = _sorted(sizes_G, group_KM, position_KM, num_tiles=num_tiles, tile=tile)
  return varying_as(group_KM, made)


@functools.partial(jax.jit, static_argnames=("num_tiles", "tile"))
def _sorted(sizes_G, group_KM, position_KM, *, num_tiles, tile):
  (groups,), (copies, rows) = sizes_G.shape, group_KM.shape
  blocks = resolve_num_sms(None)

  def body(*refs):
    text = _text(groups, copies, rows, num_tiles, tile, blocks)
    inline.run(text, refs[:-1], refs[-1:])

  shapes = [(groups,)] * 3 + [(1,), (num_tiles,), (copies * rows,)] + [(num_tiles * tile,)] * 2
  outs = compiled(
    body,
    out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
    grid=(blocks,),
    grid_names=("block",),
    num_threads=_THREADS // 128,
    thread_name="wg",
    scratch_types=[plgpu.SMEM((3 * groups + 1,), jnp.int32)],
  )(sizes_G, group_KM.reshape(-1), position_KM.reshape(-1))
  return *outs[:5], outs[5].reshape(copies, rows), *outs[6:]


def _text(groups: int, copies: int, rows: int, num_tiles: int, tile: int, blocks: int) -> str:
  """The kernel: `$0` to `$2` what is given, `$3` to `$10` what is made, in the order of
  `sorted_rows_kernel`; `$11` shared memory: sizes, tiles and first tiles of the groups, and the
  number of tiles in all."""
  near, far = 4 * groups, 8 * groups
  everyone = blocks * _THREADS

  def loop(label: str, first: str, end: int | str, stride: int, work: str) -> str:
    """for i in range(first, end, stride)."""
    return f"""
      mov.b32 i, {first};
      bra {label}_TEST;
      {label}:
      {work}
      add.s32 i, i, {stride};
      {label}_TEST:
      setp.lt.s32 more, i, {end};
      @more bra {label};"""

  def store(out: int, index: str, value: str, guard: str = "") -> str:
    return f"""
      mul.wide.s32 wide, {index}, 4;
      add.s64 wide, ${out}, wide;
      {guard} st.global.s32 [wide], {value};"""

  tiles = f"""
      mul.wide.s32 wide, i, 4;
      add.s64 wide, $0, wide;
      ld.global.nc.s32 size, [wide];
      mad.lo.s32 at, i, 4, shared;
      st.shared.s32 [at], size;
      add.s32 t, size, {tile - 1};
      div.u32 t, t, {tile};
      st.shared.s32 [at+{near}], t;"""
  sums = f"""
      mad.lo.s32 at, i, 4, shared;
      ld.shared.s32 mine, [at+{near}];
      mov.b32 before, 0;
      mov.b32 all, 0;
      mov.b32 place, 0;
      mov.b32 j, 0;
      mov.b32 other, shared;
      OTHERS:
      ld.shared.s32 t, [other+{near}];
      add.s32 all, all, t;
      setp.lt.s32 yes, j, i;
      @yes add.s32 before, before, t;
      setp.eq.and.s32 yes, t, mine, yes;
      setp.gt.or.s32 yes, t, mine, yes;
      @yes add.s32 place, place, 1;
      add.s32 other, other, 4;
      add.s32 j, j, 1;
      setp.lt.s32 yes, j, {groups};
      @yes bra OTHERS;
      st.shared.s32 [at+{far}], before;
      st.shared.s32 [shared+{far + near}], all;
      setp.eq.u32 yes, block, 0;
      {store(3, "i", "before", "@yes")}
      {store(4, "i", "mine", "@yes")}
      {store(5, "place", "i", "@yes")}
      setp.eq.and.s32 yes, i, 0, yes;
      @yes st.global.s32 [$6], all;"""
  choices = f"""
      mul.wide.s32 wide, i, 4;
      add.s64 wide, $1, wide;
      ld.global.nc.s32 size, [wide];
      mul.wide.s32 wide, i, 4;
      add.s64 wide, $2, wide;
      ld.global.nc.s32 place, [wide];
      setp.lt.u32 yes, size, {groups};
      mov.b32 t, {num_tiles * tile};
      mad.lo.s32 at, size, 4, shared;
      @yes ld.shared.s32 t, [at+{far}];
      @yes mad.lo.s32 t, t, {tile}, place;
      {store(8, "i", "t")}
      div.u32 j, i, {rows};
      mul.lo.s32 before, j, {rows};
      sub.s32 before, i, before;
      mad.lo.s32 j, before, {copies}, j;
      {store(9, "t", "j", "@yes")}
      {store(10, "t", "before", "@yes")}"""
  # The rest of each group's last tile, by a thread for each row that a tile can lack.
  rests = f"""
      div.u32 j, i, {tile};
      mul.lo.s32 t, j, {tile};
      sub.s32 place, i, t;
      mad.lo.s32 at, j, 4, shared;
      ld.shared.s32 size, [at];
      ld.shared.s32 all, [at+{near}];
      ld.shared.s32 before, [at+{far}];
      add.s32 place, place, size;
      mul.lo.s32 all, all, {tile};
      setp.lt.s32 yes, place, all;
      mad.lo.s32 t, before, {tile}, place;
      {store(9, "t", "nobody", "@yes")}
      {store(10, "t", "nobody", "@yes")}"""
  after = store(9, "i", "nobody") + store(10, "i", "nobody")
  group_of_tile = f"""
      mov.b32 place, 0;
      mov.b32 j, 0;
      mov.b32 other, shared;
      GROUPS:
      ld.shared.s32 t, [other+{near}];
      ld.shared.s32 before, [other+{far}];
      add.s32 t, t, before;
      setp.ge.s32 yes, i, t;
      @yes add.s32 place, place, 1;
      add.s32 other, other, 4;
      add.s32 j, j, 1;
      setp.lt.s32 yes, j, {groups};
      @yes bra GROUPS;
      min.s32 place, place, {groups - 1};
      {store(7, "i", "place")}"""
  return f"""{{
      .reg .pred more, yes;
      .reg .b32 thread, block, own, shared, nobody, i, j, t, at, other, size;
      .reg .b32 mine, before, all, place;
      .reg .b64 wide;
      mov.u32 thread, %tid.x;
      mov.u32 block, %ctaid.x;
      mad.lo.s32 own, block, {_THREADS}, thread;
      mov.b32 shared, $11;
      mov.b32 nobody, -1;
      {loop("TILES", "thread", groups, _THREADS, tiles)}
      bar.sync 0;
      {loop("SUMS", "thread", groups, _THREADS, sums)}
      bar.sync 0;
      {loop("CHOICES", "own", copies * rows, everyone, choices)}
      {loop("RESTS", "own", groups * tile, everyone, rests)}
      ld.shared.s32 all, [shared+{far + near}];
      mad.lo.s32 all, all, {tile}, own;
      {loop("AFTER", "all", num_tiles * tile, everyone, after)}
      {loop("OF_TILES", "own", num_tiles, everyone, group_of_tile)}
    }}"""
