"""Rows to all of their places among the experts' tiles, in one kernel on Hopper.

    M  rows at hand      K  copies of each      D  width      R  rows of the tiles      G  groups

A gather reads a row once for every copy. Here every warp brings a row to shared memory once (bulk
copies, PTX ISA 8.x), and each of K lanes sends it to one of its places, while the next rows are on
their way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline
from scmoe.kernels.launch import compiled, resolve_num_sms, varying_as

_LANES = 32
_WARPS = 4  # of a block; eight are no faster
_STAGES = 8  # rows of a warp in shared memory, at most; fewer where they are wide
_ROOM = 200_000  # bytes of shared memory for them
_ALIGNED = 128  # bytes


def takes(x_MD: jax.Array, num_copies: int) -> bool:
  """Whether the kernel can copy rows of this type and width to `num_copies` places each."""
  row_bytes = x_MD.shape[1] * x_MD.dtype.itemsize
  fits = 0 < row_bytes <= _ROOM // (2 * _WARPS + 1) and row_bytes % _ALIGNED == 0
  return fits and x_MD.shape[0] > 0 and num_copies <= _LANES


def copy_rows_to_tiles(
  x_MD: jax.Array,
  row_MK: jax.Array,
  sizes_G: jax.Array,
  starts_G: jax.Array,
  tiles_G: jax.Array,
  num_rows: int,
  tile: int,
) -> jax.Array:
  """[R, D]: x's rows at their places, zeros in the rest of each group's last tile. Tiles that are
  of no group are not written.

  Args:
    x_MD: rows of a type and width that the kernel `takes`.
    row_MK: int32, places of each row, different from each other; outside [0, R) for none.
    sizes_G, starts_G, tiles_G: int32, rows of each group, its first tile, and how many it has.
    num_rows: R.
    tile: rows of a tile.
  """
  made = _spread(x_MD, row_MK, sizes_G, starts_G, tiles_G, num_rows=num_rows, tile=tile)
  return varying_as(x_MD, made)


@functools.partial(jax.jit, static_argnames=("num_rows", "tile"))
def _spread(x_MD, row_MK, sizes_G, starts_G, tiles_G, *, num_rows, tile):
  (rows, width), copies, groups = x_MD.shape, row_MK.shape[1], sizes_G.shape[0]
  row_bytes = width * x_MD.dtype.itemsize
  stages = min(_STAGES, (_ROOM // row_bytes - 1) // _WARPS)
  blocks = resolve_num_sms(None)
  text = _text(rows, copies, groups, row_bytes, num_rows, tile, stages, blocks)

  def body(*refs):
    inline.run(text, refs[:-1], refs[-1:])

  size = (_WARPS * stages + 1) * row_bytes + 8 * _WARPS * stages + _ALIGNED
  return compiled(
    body,
    out_type=jax.ShapeDtypeStruct((num_rows, width), x_MD.dtype),
    grid=(blocks,),
    grid_names=("block",),
    num_threads=_WARPS // 4,
    thread_name="wg",
    scratch_types=[plgpu.SMEM((-(-size // 512) * 128,), jnp.int32)],
  )(x_MD, row_MK.reshape(-1), sizes_G, starts_G, tiles_G)


def _text(
  rows: int,
  copies: int,
  groups: int,
  row_bytes: int,
  num_rows: int,
  tile: int,
  stages: int,
  blocks: int,
) -> str:
  """The kernel: `$0` x, `$1` places, `$2` to `$4` sizes, first tiles and tiles of the groups, `$5`
  the rows of the tiles, `$6` shared memory: each warp's stages, a row of zeros, and a barrier for
  each stage."""
  everyone = blocks * _WARPS

  def bring(stage: str | int) -> str:
    """Begins to bring row `ahead` to a stage, and goes on to the next."""
    return f"""
      mad.lo.s32 buffer, {stage}, {row_bytes}, mine;
      mad.lo.s32 barrier, {stage}, 8, barriers;
      setp.lt.s32 yes, ahead, {rows};
      setp.eq.and.u32 yes, lane, 0, yes;
      mul.wide.s32 wide, ahead, {row_bytes};
      add.s64 wide, $0, wide;
      @yes mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], {row_bytes};
      @yes cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [buffer], [wide], {row_bytes}, [barrier];
      add.s32 ahead, ahead, {everyone};"""

  def read(out: str, array: int) -> str:
    return f"""
      add.s64 place, ${array}, wide;
      ld.global.nc.s32 {out}, [place];"""

  def send(guard: str, source: str) -> str:
    return f"""
      mul.wide.u32 wide, to, {row_bytes};
      add.s64 wide, $5, wide;
      @{guard} cp.async.bulk.global.shared::cta.bulk_group [wide], [{source}], {row_bytes};"""

  # By a lane for each row that a group's last tile can lack; neighbours are in different warps.
  rests = f"""
      mad.lo.s32 i, lane, {everyone}, row;
      bra RESTS_TEST;
      RESTS:
      div.u32 t, i, {tile};
      mul.wide.s32 wide, t, 4;
      mul.lo.s32 t, t, {tile};
      sub.s32 t, i, t;
      {read("size", 2)}
      {read("to", 3)}
      {read("end", 4)}
      mul.lo.s32 end, end, {tile};
      add.s32 t, t, size;
      setp.lt.s32 yes, t, end;
      mad.lo.s32 to, to, {tile}, t;
      {send("yes", "zeros")}
      add.s32 i, i, {_LANES * everyone};
      RESTS_TEST:
      setp.lt.s32 more, i, {groups * tile};
      @more bra RESTS;
      bar.warp.sync -1;
      cp.async.bulk.commit_group;"""
  return f"""{{
      .reg .pred yes, more;
      .reg .b32 thread, lane, warp, shared, mine, barriers, zeros, buffer, barrier, nothing;
      .reg .b32 row, ahead, stage, before, phase, i, t, to, size, end;
      .reg .b64 wide, place;
      mov.u32 thread, %tid.x;
      mov.u32 lane, %laneid;
      mov.b32 nothing, 0;
      shr.u32 warp, thread, 5;
      add.s32 shared, $6, {_ALIGNED - 1};
      and.b32 shared, shared, -{_ALIGNED};
      mad.lo.s32 mine, warp, {stages * row_bytes}, shared;
      add.s32 zeros, shared, {_WARPS * stages * row_bytes};
      add.s32 barriers, zeros, {row_bytes};
      mad.lo.s32 barriers, warp, {8 * stages}, barriers;
      setp.eq.u32 yes, lane, 0;
      {"".join(f"@yes mbarrier.init.shared::cta.b64 [barriers+{8 * s}], 1;" for s in range(stages))}
      mov.b32 i, thread;
      ZEROS:
      mad.lo.s32 t, i, 4, zeros;
      setp.lt.s32 more, i, {row_bytes // 4};
      @more st.shared.b32 [t], nothing;
      add.s32 i, i, {_WARPS * _LANES};
      @more bra ZEROS;
      fence.proxy.async.shared::cta;
      fence.mbarrier_init.release.cluster;
      bar.sync 0;
      mov.u32 i, %ctaid.x;
      mad.lo.s32 row, i, {_WARPS}, warp;
      mov.b32 ahead, row;
      {"".join(bring(stage) for stage in range(stages - 1))}
      {rests}
      mov.b32 stage, 0;
      mov.b32 before, {stages - 1};
      mov.b32 phase, 0;
      bra ROWS_TEST;
      ROWS:
      mad.lo.s32 i, row, {copies}, lane;
      mul.wide.s32 wide, i, 4;
      setp.lt.u32 yes, lane, {copies};
      mov.b32 to, {num_rows};
      add.s64 place, $1, wide;
      @yes ld.global.nc.s32 to, [place];
      setp.lt.u32 yes, to, {num_rows};
      mad.lo.s32 buffer, stage, {row_bytes}, mine;
      mad.lo.s32 barrier, stage, 8, barriers;
      WAIT:
      mbarrier.try_wait.parity.shared::cta.b64 more, [barrier], phase;
      @!more bra WAIT;
      {send("yes", "buffer")}
      cp.async.bulk.commit_group;
      cp.async.bulk.wait_group.read 1;
      bar.warp.sync -1;
      {bring("before")}
      add.s32 row, row, {everyone};
      mov.b32 before, stage;
      add.s32 stage, stage, 1;
      setp.eq.s32 yes, stage, {stages};
      @yes mov.b32 stage, 0;
      @yes xor.b32 phase, phase, 1;
      ROWS_TEST:
      setp.lt.s32 more, row, {rows};
      @more bra ROWS;
      cp.async.bulk.wait_group 0;
    }}"""
