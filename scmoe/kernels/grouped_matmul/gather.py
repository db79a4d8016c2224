"""Gathering rows straight into a kernel's operand stage.

Hopper's bulk copies (TMA) cannot gather rows, so the producer warpgroup does it with one 16-byte
asynchronous copy per thread and step (`cp.async`, PTX ISA 8.x, section "Data Movement"), written in
the swizzled layout that wgmma reads. Their arrival is counted by barriers of our own: `cp.async`
can signal an mbarrier, but the Pallas barrier of the stage cannot be named from inline code.

These functions have no interpretation on a CPU; there, the rows are gathered before the kernel.
"""

from typing import Any, cast

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline

_THREADS = 128
_SWIZZLE_BYTES = 128
_COPY_BYTES = 16


def barrier_memory(stages: int) -> Any:
  """Shared memory for one mbarrier (8 bytes) a stage."""
  return plgpu.SMEM((2 * stages,), jnp.int32)


def init_barriers(barriers: Any, stages: int) -> None:
  """Makes the barriers; to be run by the whole CTA before it splits into roles."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def run(_, memory):
    inits = "".join(
      f"@first mbarrier.init.shared::cta.b64 [$0+{8 * i}], {_THREADS};\n" for i in range(stages)
    )
    text = f"""{{
      .reg .pred first;
      .reg .b32 thread;
      mov.u32 thread, %tid.x;
      setp.eq.u32 first, thread, 0;
      {inits}
      fence.proxy.async;
      bar.sync 0;
    }}"""
    inline.ptx(text, [inline.shared_address(memory)], "r")

  cast(Any, run)(barriers)


def start_gather(
  x: Any,
  index: Any,
  ring: Any,
  barriers: Any,
  *,
  stage: Any,
  first_row: Any,
  first_col: Any,
  prefetch: int = 0,
) -> None:
  """Starts copying x[index[first_row + r], first_col + c] to ring[stage, r, c].

  To be run by one whole warpgroup. Rows with a negative index become zero.

  Args:
    x: GMEM ref [rows, width], 2-byte elements.
    index: GMEM ref, int32.
    ring: swizzled SMEM ref [stages, block rows, block columns].
    barriers: what `init_barriers` made; the stage's one completes when the rows are there.
    stage: which stage.
    first_row: first entry of `index`.
    first_col: first column of x.
    prefetch: entries of `index` ahead of first_row to bring into the L1 cache, for callers whose
      next steps read other rows: the copies cannot start before their index is there.
  """
  _, block_rows, block_cols = ring.shape
  itemsize = jnp.dtype(x.dtype).itemsize
  row_bytes = x.shape[-1] * itemsize
  col_blocks = block_cols * itemsize // _SWIZZLE_BYTES
  threads_per_row = _SWIZZLE_BYTES // _COPY_BYTES
  rows_per_pass = _THREADS // threads_per_row
  from scmoe.kernels.grouped_matmul.pipeline import swizzled

  transforms = swizzled(block_cols, x.dtype)

  @plgpu.inline_mgpu(
    arg_types=(
      plgpu.RefType(),
      plgpu.RefType(),
      plgpu.RefType(transforms),
      plgpu.RefType(),
      inline.SCALAR,
      inline.SCALAR,
      inline.SCALAR,
    )
  )
  def run(_, x_ref, index_ref, ring_ref, barrier_ref, stage_, first_row_, first_col_):
    passes = block_rows // rows_per_pass
    # Every 8 rows of one swizzle width are 1 KiB; the row's low bits permute its 16-byte pieces.
    loads, copies = [], []
    for j in range(passes):
      loads.append(f"ld.global.nc.s32 i{j}, [entry+{4 * rows_per_pass * j}];")
      copies += [
        f"setp.ge.s32 used, i{j}, 0;",
        f"selp.b32 size, {_COPY_BYTES}, 0, used;",
        f"max.s32 i{j}, i{j}, 0;",
        f"mad.wide.s32 source, i{j}, {row_bytes}, base;",
      ]
      for block in range(col_blocks):
        target = (j * rows_per_pass // 8 * col_blocks + block) * 1024
        copies.append(
          f"cp.async.cg.shared.global.L2::128B [target+{target}],"
          f" [source+{block * _SWIZZLE_BYTES}], {_COPY_BYTES}, size;"
        )
    ahead = f"prefetch.global.L1 [entry+{4 * prefetch}];" if prefetch else ""
    text = f"""{{
      .reg .pred used;
      .reg .b32 thread, row, piece, target, part, size, barrier;
      .reg .b32 {", ".join(f"i{j}" for j in range(passes))};
      .reg .b64 base, entry, source, wide;
      mov.u32 thread, %tid.x;
      and.b32 thread, thread, {_THREADS - 1};
      shr.u32 row, thread, 3;
      and.b32 piece, thread, 7;
      mad.lo.s32 part, $5, 1, row;
      mul.wide.s32 wide, part, 4;
      add.s64 entry, $1, wide;
      {" ".join(loads)}
      {ahead}
      shl.b32 part, piece, 4;
      mad.lo.s32 part, $6, {itemsize}, part;
      cvt.s64.s32 wide, part;
      add.s64 base, $0, wide;
      mad.lo.s32 target, $4, {block_rows * block_cols * itemsize}, $2;
      shr.u32 part, row, 3;
      mad.lo.s32 target, part, {1024 * col_blocks}, target;
      and.b32 part, row, 7;
      xor.b32 piece, piece, part;
      mad.lo.s32 target, part, {_SWIZZLE_BYTES}, target;
      mad.lo.s32 target, piece, {_COPY_BYTES}, target;
      {" ".join(copies)}
      mad.lo.s32 barrier, $4, 8, $3;
      cp.async.mbarrier.arrive.noinc.shared::cta.b64 [barrier];
    }}"""
    inline.ptx(
      text,
      [
        inline.global_address(x_ref),
        inline.global_address(index_ref),
        inline.shared_address(ring_ref),
        inline.shared_address(barrier_ref),
        inline.scalar(stage_),
        inline.scalar(first_row_),
        inline.scalar(first_col_),
      ],
      "l,l,r,r,r,r,r",
    )

  cast(Any, run)(x, index, ring, barriers, stage, first_row, first_col)


def wait_rows(barriers: Any, stage: Any, parity: Any) -> None:
  """Waits until the rows of a stage are there and visible to wgmma.

  Args:
    barriers: what `init_barriers` made.
    stage: which stage.
    parity: 0 for the first use of the stage, 1 for the second, 0 for the third ...
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR, inline.SCALAR))
  def run(_, memory, stage_, parity_):
    text = """{
      .reg .pred done;
      .reg .b32 barrier;
      mad.lo.s32 barrier, $1, 8, $0;
      WAIT:
      mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], $2;
      @!done bra WAIT;
      fence.proxy.async.shared::cta;
    }"""
    inline.ptx(
      text, [inline.shared_address(memory), inline.scalar(stage_), inline.scalar(parity_)], "r,r,r"
    )

  cast(Any, run)(barriers, stage, parity)
