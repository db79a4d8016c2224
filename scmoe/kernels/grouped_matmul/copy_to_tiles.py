"""Copies rows to all of their places among the experts' tiles, in one kernel on Hopper.

    M  rows at hand      K  copies of each      D  width      R  rows of the tiles      G  groups

A gather reads a row from global memory once for every copy. This kernel reads it once
(`scmoe/kernels/row_copier.py`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline, ptx
from scmoe.kernels.launch import compiled, resolve_num_sms, varying_as
from scmoe.kernels.row_copier import (
  ALIGNED,
  BARRIER,
  PLACES,
  WARPS,
  WORD,
  RowCopier,
  fits,
  stages_of,
)


def takes(x_MD: jax.Array, num_copies: int) -> bool:
  """Whether the kernel can copy rows of this type and width to `num_copies` places each.

  There must be a row, and a row must have a positive multiple of 128 bytes, at most 22,222, and at
  most 32 places.
  """
  row_bytes = x_MD.shape[1] * x_MD.dtype.itemsize
  return fits(row_bytes, num_copies) and row_bytes % ALIGNED == 0 and x_MD.shape[0] > 0


def copy_rows_to_tiles(
  x_MD: jax.Array,
  row_MK: jax.Array,
  sizes_G: jax.Array,
  starts_G: jax.Array,
  tiles_G: jax.Array,
  num_rows: int,
  tile: int,
) -> jax.Array:
  """Copies x's rows to their places, and zeros to the rest of each group's last tile.

  Args:
    x_MD: rows of a type and width that the kernel `takes`.
    row_MK: int32, the K places of each row; a place outside [0, R) is none, and no other two are
      equal.
    sizes_G: int32, rows of each group.
    starts_G: int32, first tile of each group.
    tiles_G: int32, number of tiles of each group.
    num_rows: R.
    tile: rows of a tile.

  Returns:
    [R, D] in x's type. Tiles of no group are not written.
  """
  copied = _copied_to_tiles(x_MD, row_MK, sizes_G, starts_G, tiles_G, num_rows=num_rows, tile=tile)
  return varying_as(x_MD, copied)


@functools.partial(jax.jit, static_argnames=("num_rows", "tile"))
def _copied_to_tiles(x_MD, row_MK, sizes_G, starts_G, tiles_G, *, num_rows, tile):
  (rows, width), copies, groups = x_MD.shape, row_MK.shape[1], sizes_G.shape[0]
  row_bytes = width * x_MD.dtype.itemsize
  blocks = resolve_num_sms(None)
  sizes = (rows, copies, groups, row_bytes, num_rows, tile, stages_of(row_bytes), blocks)
  program = _Program(*sizes)
  text = program.text()

  def body(*refs):
    inline.run(text, refs[:-1], refs[-1:])

  return compiled(
    body,
    out_type=jax.ShapeDtypeStruct((num_rows, width), x_MD.dtype),
    grid=(blocks,),
    grid_names=("block",),
    num_threads=WARPS // 4,
    thread_name="wg",
    scratch_types=[plgpu.SMEM((-(-program.shared_bytes // 512) * 128,), jnp.int32)],
  )(x_MD, row_MK.reshape(-1), sizes_G, starts_G, tiles_G)


# The inline code's operands after rows and places.
_SIZES, _TILE_STARTS, _TILES, _OUT, _SHARED = (f"${i}" for i in range(2, 7))


@dataclasses.dataclass(frozen=True)
class _Program(RowCopier):
  """The kernel in PTX, step by step.

  Warp w, counted over all blocks, takes rows w, w + warps, w + 2 · warps and so on. While it
  sends one row, it fetches the row that is stages - 1 of its own rows later. Shared memory holds
  each warp's stages, a row of zeros, and a barrier for each stage.
  """

  group_words = (_SIZES, _TILE_STARTS, _TILES)

  @property
  def shared_bytes(self) -> int:
    """Bytes of shared memory that a block needs, with room to align it."""
    stages = WARPS * self.stages
    return (stages + 1) * self.row_bytes + BARRIER * stages + ALIGNED

  def text(self) -> str:
    """The whole kernel as PTX."""
    return ptx.program(
      ptx.registers("pred", "yes, more"),
      ptx.registers(
        "b32", "thread, lane, warp, shared, mine, barriers, zeros, buffer, barrier, nothing"
      ),
      ptx.registers("b32", "row, ahead, stage, before, phase, i, t, to, size, end"),
      ptx.registers("b64", "wide, place"),
      self.find_shared_memory(),
      self.init_barriers(),
      self.write_zeros(),
      ptx.publish_to_copies(own_block_only=True),
      ptx.publish_barriers(),
      ptx.wait_for_block(),
      self.first_row(),
      *(self.fetch_row(stage) for stage in range(self.stages - 1)),
      self.send_zeros(),
      ptx.let("stage", 0),
      ptx.let("before", self.stages - 1),
      ptx.let("phase", 0),
      ptx.while_less(
        "ROWS",
        "row",
        self.rows,
        self.load_place(),
        self.find_stage("stage"),
        ptx.wait_for_barrier("barrier", "phase", "more"),
        self.send_row("yes", "buffer"),
        ptx.close_group(),
        ptx.wait_for_groups(1, read_only=True),  # the row before has left shared memory
        ptx.wait_for_warp(),
        self.fetch_row("before"),
        ptx.add("row", "row", self.warps),
        self.next_stage(),
      ),
      ptx.wait_for_groups(0),
    )

  def find_shared_memory(self) -> str:
    """mine, barriers, zeros = addresses of the warp's stages, their barriers and the row of zeros.

    Also finds the thread's number in its block, its lane and its warp, and sets `nothing` to 0.
    """
    return ptx.lines(
      [
        ptx.thread_of_block("thread"),
        ptx.lane_of_warp("lane"),
        ptx.let("nothing", 0),
        ptx.shift_right("warp", "thread", 5),
        ptx.add("shared", _SHARED, ALIGNED - 1),
        ptx.bit_and("shared", "shared", -ALIGNED),
        ptx.multiply_add("mine", "warp", self.stages * self.row_bytes, "shared"),
        ptx.add("zeros", "shared", WARPS * self.stages * self.row_bytes),
        ptx.add("barriers", "zeros", self.row_bytes),
        ptx.multiply_add("barriers", "warp", BARRIER * self.stages, "barriers"),
      ]
    )

  def first_row(self) -> str:
    """row = ahead = the warp's number in the grid."""
    return ptx.lines(
      [
        ptx.block_of_grid("i"),
        ptx.multiply_add("row", "i", WARPS, "warp"),
        ptx.let("ahead", "row"),
      ]
    )

  def send_row(self, condition: str, source: str) -> str:
    """Starts to copy the row at `source` in shared memory to row `to` of the result.

    It does so only if the predicate `condition` holds.
    """
    return ptx.lines(
      [
        ptx.element_address("wide", _OUT, "to", self.row_bytes, unsigned=True),
        ptx.copy_to_global("wide", source, self.row_bytes, only_if=condition),
      ]
    )

  def send_zero(self) -> str:
    """Starts to copy the row of zeros to row `to` of the result, if `yes` holds."""
    return self.send_row("yes", "zeros")

  def load_place(self) -> str:
    """to = the lane's place of row `row`; yes = whether the lane has one."""
    return ptx.lines(
      [
        ptx.multiply_add("i", "row", self.copies, "lane"),
        ptx.byte_distance("wide", "i", WORD),
        ptx.compare("yes", "lane", "<", self.copies, unsigned=True),
        ptx.let("to", self.num_rows),
        ptx.advance("place", PLACES, "wide"),
        ptx.load_read_only("to", "place", only_if="yes"),
        ptx.compare("yes", "to", "<", self.num_rows, unsigned=True),
      ]
    )

  def next_stage(self) -> str:
    """before = stage; stage = the next one. The barriers' parity `phase` flips with each round."""
    return ptx.lines(
      [
        ptx.let("before", "stage"),
        ptx.add("stage", "stage", 1),
        ptx.compare("yes", "stage", "==", self.stages),
        ptx.let("stage", 0, only_if="yes"),
        ptx.bit_xor("phase", "phase", 1, only_if="yes"),
      ]
    )
