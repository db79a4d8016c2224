"""Gathers rows straight into the stages of a kernel's ring in shared memory (see `pipeline`).

Hopper's bulk copies (TMA) cannot gather rows by an index array. So the 128 threads of the producer
copy 16 bytes each at a time (`cp.async`, PTX ISA 8.x, section "Data Movement"), to where wgmma
expects them in its swizzled layout. Barriers of this module count the threads whose copies have
arrived: inline code cannot name the Pallas barrier of a stage.

Interpret mode cannot run this inline code. In the simulation XLA gathers the rows before the
kernel.
"""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline, ptx

_THREADS = 128  # Threads of the warpgroup that gathers.
_SWIZZLE_BYTES = 128  # The swizzle permutes the 16-byte pieces of each 128 bytes of a row.
_SWIZZLE_ROWS = 8  # After 8 rows the permutation of the pieces repeats.
_SWIZZLE_BLOCK = _SWIZZLE_ROWS * _SWIZZLE_BYTES  # Bytes of a box: 128 bytes of each of 8 rows.
_COPY_BYTES = 16
_THREADS_PER_ROW = _SWIZZLE_BYTES // _COPY_BYTES
_ROWS_PER_PASS = _THREADS // _THREADS_PER_ROW
_BARRIER = 8  # Bytes of a barrier.
_WORD = 4  # Bytes of an int32.


def barrier_memory(stages: int) -> Any:
  """Declares shared memory for one barrier for each stage."""
  return plgpu.SMEM((_BARRIER // _WORD * stages,), jnp.int32)


def init_barriers(barriers: Any, stages: int) -> None:
  """Makes a barrier for each stage. The whole CTA runs this before it splits into roles."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def run(_, memory):
    text = ptx.program(
      ptx.registers("pred", "first"),
      ptx.registers("b32", "thread"),
      ptx.thread_of_block("thread"),
      ptx.compare("first", "thread", "==", 0, unsigned=True),
      *(ptx.init_barrier("$0", _BARRIER * i, _THREADS, only_if="first") for i in range(stages)),
      ptx.publish_to_copies(),
      ptx.wait_for_block(),
    )
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

  One whole warpgroup runs this. Rows with a negative index become zero.

  Args:
    x: GMEM ref [rows, width], 2-byte elements.
    index: GMEM ref, int32.
    ring: swizzled SMEM ref [stages, block rows, block columns].
    barriers: what `init_barriers` made. The stage's barrier completes when the rows have arrived.
    stage: which stage.
    first_row: first entry of `index`.
    first_col: first column of x.
    prefetch: the entries of `index` that lie so many entries after the first 16 read here are
      brought into the L1 cache, with the rest of their cache lines. It is for callers that read
      other rows at each step, because a copy cannot start before its index has arrived. 0: none.
  """
  from scmoe.kernels.grouped_matmul.pipeline import swizzled

  _, block_rows, block_cols = ring.shape
  itemsize = jnp.dtype(x.dtype).itemsize
  program = _Gather(block_rows, block_cols, itemsize, x.shape[-1] * itemsize, prefetch)
  in_global = (plgpu.RefType(),) * 2
  in_shared = (plgpu.RefType(swizzled(block_cols, x.dtype)), plgpu.RefType())

  @plgpu.inline_mgpu(arg_types=(*in_global, *in_shared, *(inline.SCALAR,) * 3))
  def run(_, x_ref, index_ref, ring_ref, barrier_ref, *scalars):
    operands = [
      inline.global_address(x_ref),
      inline.global_address(index_ref),
      inline.shared_address(ring_ref),
      inline.shared_address(barrier_ref),
      *map(inline.scalar, scalars),
    ]
    inline.ptx(program.text(), operands, "l,l,r,r,r,r,r")

  cast(Any, run)(x, index, ring, barriers, stage, first_row, first_col)


# The inline code's operands.
_X, _INDEX, _RING, _BARRIERS, _STAGE, _FIRST_ROW, _FIRST_COL = (f"${i}" for i in range(7))


@dataclasses.dataclass(frozen=True)
class _Gather:
  """The copies of one stage in PTX, step by step.

  Eight threads copy a row, 128 bytes at a time, so the 128 threads copy 16 rows in each pass. The
  register `i{j}` holds the index of the thread's row in pass j. Shared memory holds the block as
  boxes of 8 rows and 128 bytes. Inside a box, the 16-byte piece p of row r lies at piece p ^ r.

  Attributes:
    block_rows, block_cols: rows and columns of a stage.
    itemsize: bytes of an element.
    row_bytes: bytes of a row of x.
    prefetch: how many entries of the index lie from a thread's first entry to the one that it
      prefetches; 0: it prefetches none.
  """

  block_rows: int
  block_cols: int
  itemsize: int
  row_bytes: int
  prefetch: int

  @property
  def passes(self) -> int:
    """How many passes copy a stage: in each, a thread copies its pieces of one row."""
    return self.block_rows // _ROWS_PER_PASS

  @property
  def boxes(self) -> int:
    """How many boxes, each 128 bytes wide, lie beside each other in the stage."""
    return self.block_cols * self.itemsize // _SWIZZLE_BYTES

  def text(self) -> str:
    """The PTX by which one thread copies its pieces of one stage: all steps, in order."""
    passes = range(self.passes)
    return ptx.program(
      ptx.registers("pred", "used"),
      ptx.registers("b32", "thread, row, piece, target, part, size, barrier"),
      ptx.registers("b32", ", ".join(f"i{j}" for j in passes)),
      ptx.registers("b64", "base, entry, source, wide"),
      self.find_row_and_piece(),
      self.read_index(),
      self.find_source(),
      self.find_target(),
      *(self.copy_row(j) for j in passes),
      ptx.multiply_add("barrier", _STAGE, _BARRIER, _BARRIERS),
      ptx.arrive_after_pieces("barrier"),
    )

  def find_row_and_piece(self) -> str:
    """row = the thread's row of the 16 of a pass; piece = which 16 bytes of each 128 it copies."""
    return ptx.lines(
      [
        ptx.thread_of_block("thread"),
        ptx.bit_and("thread", "thread", _THREADS - 1),
        ptx.shift_right("row", "thread", 3),
        ptx.bit_and("piece", "thread", _THREADS_PER_ROW - 1),
      ]
    )

  def read_index(self) -> str:
    """Reads the index of each of the thread's rows, and prefetches a later entry if asked to."""
    distance = _WORD * _ROWS_PER_PASS
    steps = [
      ptx.multiply_add("part", _FIRST_ROW, 1, "row"),
      ptx.element_address("entry", _INDEX, "part", _WORD, distance="wide"),
      *(ptx.load_read_only(f"i{j}", "entry", distance * j) for j in range(self.passes)),
    ]
    if self.prefetch:
      steps.append(ptx.prefetch("entry", _WORD * self.prefetch))
    return ptx.lines(steps)

  def find_source(self) -> str:
    """base = where the thread's piece of row 0 of x lies, in the columns from `first_col` on."""
    return ptx.lines(
      [
        ptx.shift_left("part", "piece", 4),
        ptx.multiply_add("part", _FIRST_COL, self.itemsize, "part"),
        ptx.widen("wide", "part"),
        ptx.advance("base", _X, "wide"),
      ]
    )

  def find_target(self) -> str:
    """target = where the thread's piece of its first row lies in the stage, swizzled."""
    stage_bytes = self.block_rows * self.block_cols * self.itemsize
    return ptx.lines(
      [
        ptx.multiply_add("target", _STAGE, stage_bytes, _RING),
        ptx.shift_right("part", "row", 3),
        ptx.multiply_add("target", "part", _SWIZZLE_BLOCK * self.boxes, "target"),
        ptx.bit_and("part", "row", _SWIZZLE_ROWS - 1),
        ptx.bit_xor("piece", "piece", "part"),
        ptx.multiply_add("target", "part", _SWIZZLE_BYTES, "target"),
        ptx.multiply_add("target", "piece", _COPY_BYTES, "target"),
      ]
    )

  def copy_row(self, j: int) -> str:
    """Starts to copy the thread's pieces of its row in pass j; zeros if the index is negative."""
    first_box = j * _ROWS_PER_PASS // _SWIZZLE_ROWS * self.boxes
    return ptx.lines(
      [
        ptx.compare("used", f"i{j}", ">=", 0),
        ptx.select("size", _COPY_BYTES, 0, "used"),
        ptx.at_least(f"i{j}", f"i{j}", 0),
        ptx.row_address("source", "base", f"i{j}", self.row_bytes),
        *(
          ptx.copy_piece(
            "target", (first_box + box) * _SWIZZLE_BLOCK, "source", box * _SWIZZLE_BYTES, "size"
          )
          for box in range(self.boxes)
        ),
      ]
    )


def wait_rows(barriers: Any, stage: Any, parity: Any) -> None:
  """Waits until the rows of a stage have arrived and are visible to wgmma.

  Args:
    barriers: what `init_barriers` made.
    stage: which stage.
    parity: 0 for the first use of the stage, 1 for the second, 0 for the third ...
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR, inline.SCALAR))
  def run(_, memory, stage_, parity_):
    text = ptx.program(
      ptx.registers("pred", "done"),
      ptx.registers("b32", "barrier"),
      ptx.multiply_add("barrier", "$1", _BARRIER, "$0"),
      ptx.wait_for_barrier("barrier", "$2", "done"),
      ptx.publish_to_copies(own_block_only=True),
    )
    operands = [inline.shared_address(memory), inline.scalar(stage_), inline.scalar(parity_)]
    inline.ptx(text, operands, "r,r,r")

  cast(Any, run)(barriers, stage, parity)
