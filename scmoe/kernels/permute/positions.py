"""Positions of choices among those of their expert, in one kernel on Hopper.

    N  choices      E  experts      L  E and one more, for no choice, up to a multiple of 32

Every warp has an equal run of the choices and walks it 32 at a time: lanes that hold one expert
find each other by votes on every bit (`match.any` is two to four times slower), and one of them
advances the warp's count of it. Then counts of the warps before, and of the thread blocks before,
are added. Up to eight blocks are one cluster, which can wait for each other and read each other's
shared memory; so there is no second launch, and no atomic whose order could differ.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline
from scmoe.kernels.launch import compiled, varying_as

_LANES = 32
_WARPS = 32  # of a block
_BLOCKS = 8  # of a cluster, as many as every GPU with clusters has
_AHEAD = 8  # choices of a lane that are read together
_MOST = 1024  # experts: counts of every warp stay in shared memory


def takes(num_choices: int, num_experts: int) -> bool:
  """Whether the kernel takes these sizes."""
  return 0 < num_choices < 2**28 and num_experts <= _MOST


def running_positions_kernel(expert_N: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """`running_positions` of a flat int32 array of a size that the kernel `takes`."""
  return varying_as(expert_N, _positions(expert_N, num_experts=num_experts))


@functools.partial(jax.jit, static_argnames=("num_experts",))
def _positions(expert_N: jax.Array, *, num_experts: int) -> tuple[jax.Array, jax.Array]:
  (choices,) = expert_N.shape
  blocks = min(_BLOCKS, -(-choices // (_WARPS * _LANES)))
  padded = (num_experts // _LANES + 1) * _LANES
  counts = _WARPS * padded

  def body(expert, position, count, shared):
    text = _text(choices, num_experts, blocks)
    inline.run(text, [expert, position, count], [shared])

  options = {} if blocks == 1 else {"cluster": (blocks,), "cluster_names": ("block",)}
  return compiled(
    body,
    out_type=(
      jax.ShapeDtypeStruct((choices,), jnp.int32),
      jax.ShapeDtypeStruct((num_experts,), jnp.int32),
    ),
    grid=(1,),
    grid_names=("cluster",),
    num_threads=_WARPS // 4,
    thread_name="wg",
    scratch_types=[plgpu.SMEM((counts + 2 * padded,), jnp.int32)],
    **options,
  )(expert_N)


def _text(choices: int, num_experts: int, blocks: int) -> str:
  """The kernel: `$0` experts, `$1` positions, `$2` counts, `$3` shared memory.

  Shared memory has [warps, L] counts, which become counts of the warps before; [L] of the whole
  block; and [L] of the blocks before.
  """
  padded = (num_experts // _LANES + 1) * _LANES
  row_bytes = 4 * padded
  all_bytes = _WARPS * row_bytes
  threads = _WARPS * _LANES
  steps = -(-choices // (blocks * threads))
  ahead = min(_AHEAD, steps)
  loops = -(-steps // ahead)
  turn = ahead * _LANES

  def read(j: int) -> str:
    return f"""
      add.s32 t, index, {_LANES * j};
      setp.lt.s32 is{j}, t, {choices};
      mov.b32 id{j}, {num_experts};
      @is{j} ld.global.nc.s32 id{j}, [ids+{4 * _LANES * j}];"""

  def agree(j: int, bit: int) -> str:
    """Leaves in `same` the lanes that have the same bit."""
    return f"""
      and.b32 t, id{j}, {bit};
      setp.ne.u32 first, t, 0;
      vote.sync.ballot.b32 t, first, -1;
      @!first not.b32 t, t;
      and.b32 same, same, t;"""

  def count(j: int) -> str:
    return f"""
      min.u32 id{j}, id{j}, {num_experts};
      mov.b32 same, -1;
      {"".join(agree(j, 1 << bit) for bit in range(num_experts.bit_length()))}
      and.b32 earlier, same, lower;
      popc.b32 earlier, earlier;
      popc.b32 same, same;
      mad.lo.s32 slot, id{j}, 4, mine;
      ld.shared.s32 before, [slot];
      setp.eq.s32 first, earlier, 0;
      add.s32 earlier, earlier, before;
      add.s32 same, same, before;
      bar.warp.sync -1;
      @first st.shared.s32 [slot], same;
      bar.warp.sync -1;
      @is{j} st.global.s32 [places+{4 * _LANES * j}], earlier;"""

  def place(j: int) -> str:
    return f"""
      min.u32 id{j}, id{j}, {num_experts};
      mad.lo.s32 slot, id{j}, 4, mine;
      ld.shared.s32 before, [slot];
      mad.lo.s32 slot, id{j}, 4, shared;
      ld.shared.s32 earlier, [slot+{all_bytes + row_bytes}];
      add.s32 before, before, earlier;
      @is{j} ld.global.s32 earlier, [places+{4 * _LANES * j}];
      add.s32 before, before, earlier;
      @is{j} st.global.s32 [places+{4 * _LANES * j}], before;"""

  def walk(label: str, work: str) -> str:
    return f"""
      mov.b32 loop, 0;
      mov.b32 index, start;
      mul.wide.s32 wide, start, 4;
      add.s64 ids, $0, wide;
      add.s64 places, $1, wide;
      {label}:
      {"".join(read(j) for j in range(ahead))}
      {work}
      add.s32 index, index, {turn};
      add.s64 ids, ids, {4 * turn};
      add.s64 places, places, {4 * turn};
      add.s32 loop, loop, 1;
      setp.lt.s32 more, loop, {loops};
      @more bra {label};"""

  def every(label: str, work: str) -> str:
    """Work for every element e of [L], by one thread each; `at` is its address in the first row."""
    return "".join(
      f"""
      add.s32 e, thread, {first};
      setp.ge.s32 more, e, {padded};
      mad.lo.s32 at, e, 4, shared;
      @more bra {label}{first};
      {work}
      {label}{first}:"""
      for first in range(0, padded, threads)
    )

  zero = "".join(f"st.shared.s32 [slot+{4 * e}], nothing;\n" for e in range(0, padded, _LANES))
  over_warps = "mov.b32 sum, 0;" + "".join(
    f"""
      ld.shared.s32 t, [at+{row_bytes * warp}];
      st.shared.s32 [at+{row_bytes * warp}], sum;
      add.s32 sum, sum, t;"""
    for warp in range(_WARPS)
  )
  over_warps += f"st.shared.s32 [at+{all_bytes}], sum;"
  over_blocks = "mov.b32 sum, 0; mov.b32 before, 0;" + "".join(
    f"""
      mapa.shared::cluster.u32 slot, at, {rank};
      ld.shared::cluster.s32 t, [slot+{all_bytes}];
      add.s32 sum, sum, t;
      setp.gt.u32 first, block, {rank};
      @first add.s32 before, before, t;"""
    for rank in range(blocks)
  )
  over_blocks += f"""
      st.shared.s32 [at+{all_bytes + row_bytes}], before;
      setp.lt.s32 first, e, {num_experts};
      setp.eq.and.s32 first, block, 0, first;
      mul.wide.s32 wide, e, 4;
      add.s64 wide, $2, wide;
      @first st.global.s32 [wide], sum;"""
  together = """
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;"""
  return f"""{{
      .reg .pred first, more, {", ".join(f"is{j}" for j in range(ahead))};
      .reg .b32 {", ".join(f"id{j}" for j in range(ahead))};
      .reg .b32 thread, lane, lower, block, warp, shared, mine, slot, nothing, e, at, t;
      .reg .b32 start, index, loop, same, earlier, before, sum;
      .reg .b64 wide, ids, places;
      mov.u32 thread, %tid.x;
      mov.u32 lane, %laneid;
      mov.u32 lower, %lanemask_lt;
      mov.u32 block, %cluster_ctarank;
      mov.b32 shared, $3;
      mov.b32 nothing, 0;
      shr.u32 warp, thread, 5;
      mad.lo.s32 mine, warp, {row_bytes}, shared;
      mad.lo.s32 slot, lane, 4, mine;
      {zero}
      mad.lo.s32 start, block, {_WARPS}, warp;
      mad.lo.s32 start, start, {loops * turn}, lane;
      bar.warp.sync -1;
      {walk("COUNT", "".join(count(j) for j in range(ahead)))}
      bar.sync 0;
      {every("WARPS", over_warps)}
      {together}
      {every("BLOCKS", over_blocks)}
      bar.sync 0;
      {walk("PLACE", "".join(place(j) for j in range(ahead)))}
      {together}
    }}"""
