"""PTX steps of two kernels on Hopper that bring a row to shared memory and send it on.

    grouped_matmul/copy_to_tiles.py   sends a row to its places among this device's tiles
    put/kernel.py                     sends a row to its places on any GPU of a mesh axis

    M  rows at hand      K  copies of each      D  width      R  rows of the result      G  groups

A warp brings a row to shared memory. For each of the row's places, at most K, a different lane of
the warp sends the row there by a bulk copy (`cp.async.bulk`, PTX ISA 8.x). The warp's next rows are
on their way meanwhile.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from scmoe.kernels import ptx

LANES = 32
WARPS = 4  # Warps of a block.
ALIGNED = 128  # The first stage begins at a multiple of so many bytes.
WORD = 4  # Bytes of an int32.
BARRIER = 8  # Bytes of a barrier.
STAGES = 8  # The most rows of a warp in shared memory; fewer where rows are wide.
_ROOM = 200_000  # Bytes of shared memory for the stages and the row of zeros.

# The first operands of both kernels' inline code.
X, PLACES = "$0", "$1"


def fits(row_bytes: int, num_copies: int) -> bool:
  """Whether rows have 1 to 22,222 bytes (at least two stages a warp) and at most 32 places each."""
  return 0 < row_bytes <= _ROOM // (2 * WARPS + 1) and num_copies <= LANES


def stages_of(row_bytes: int) -> int:
  """The number of stages of a warp for rows of so many bytes."""
  return min(STAGES, (_ROOM // row_bytes - 1) // WARPS)


@dataclasses.dataclass(frozen=True)
class RowCopier(abc.ABC):
  """Sizes of a kernel that copies rows, and steps that such kernels have in common.

  A stage is room for one row in shared memory. The register `row` holds the row that the warp sends
  next, and `ahead` the row that it fetches next; `mine`, `barriers` and `zeros` hold addresses in
  shared memory: of the warp's stages, of their barriers, and of a row of zeros.

  Attributes:
    rows, copies, groups: M, K and G.
    row_bytes: bytes of a row.
    num_rows: R.
    tile: rows of a tile.
    stages: stages of a warp.
    blocks: blocks of the grid.
  """

  # The operands that hold, for each group: number of rows, first tile, number of tiles.
  group_words: ClassVar[tuple[str, str, str]]

  rows: int
  copies: int
  groups: int
  row_bytes: int
  num_rows: int
  tile: int
  stages: int
  blocks: int

  @property
  def warps(self) -> int:
    """Number of warps in all blocks together."""
    return self.blocks * WARPS

  @property
  def limit(self) -> str | int:
    """The number of rows to fetch, or the register that holds it."""
    return self.rows

  def init_barriers(self) -> str:
    """The warp's first lane initialises the warp's barriers, one for each stage."""
    return ptx.lines(
      [
        ptx.compare("yes", "lane", "==", 0, unsigned=True),
        *(ptx.init_barrier("barriers", BARRIER * s, 1, only_if="yes") for s in range(self.stages)),
      ]
    )

  def write_zeros(self) -> str:
    """All threads of the block together fill the row of zeros."""
    return ptx.lines(
      [
        ptx.let("i", "thread"),
        ptx.label("ZEROS"),
        ptx.multiply_add("t", "i", WORD, "zeros"),
        ptx.compare("more", "i", "<", self.row_bytes // WORD),
        ptx.store_shared("t", "nothing", kind="b32", only_if="more"),
        ptx.add("i", "i", WARPS * LANES),
        ptx.jump("ZEROS", only_if="more"),
      ]
    )

  def find_stage(self, stage: str | int) -> str:
    """buffer = the address of one of the warp's stages; barrier = that of the stage's barrier."""
    return ptx.lines(
      [
        ptx.multiply_add("buffer", stage, self.row_bytes, "mine"),
        ptx.multiply_add("barrier", stage, BARRIER, "barriers"),
      ]
    )

  def fetch_row(self, stage: str | int) -> str:
    """Starts to copy row `ahead`, if there is one, to a stage; ahead = the warp's row after it."""
    return ptx.lines(
      [
        self.find_stage(stage),
        ptx.compare("yes", "ahead", "<", self.limit),
        ptx.compare("yes", "lane", "==", 0, and_="yes", unsigned=True),
        ptx.element_address("wide", X, "ahead", self.row_bytes),
        ptx.arrive_and_expect("barrier", self.row_bytes, only_if="yes"),
        ptx.copy_to_shared("buffer", "wide", self.row_bytes, "barrier", only_if="yes"),
        ptx.add("ahead", "ahead", self.warps),
      ]
    )

  @abc.abstractmethod
  def send_zero(self) -> str:
    """Starts to copy the row of zeros to row `to` of this device's result, if `yes` holds."""

  def send_zeros(self) -> str:
    """Starts to copy zeros to the rows of groups' last tiles that no row fills.

    A group has fewer such rows than a tile has rows. So a number i stands for a group, i // tile,
    and one of `tile` candidates, t = i % tile: row size + t of the group. The row exists if the
    group's tiles have it. With tiles of four rows and a group of six rows, in two tiles, candidates
    0 and 1 are rows 6 and 7, and candidates 2 and 3 do not exist. Neighbouring i go to different
    warps.
    """
    group_word = lambda to, array: ptx.lines(
      [
        ptx.advance("place", array, "wide"),
        ptx.load_read_only(to, "place"),
      ]
    )
    rows = ptx.while_less(
      "RESTS",
      "i",
      self.groups * self.tile,
      ptx.divide("t", "i", self.tile),
      ptx.byte_distance("wide", "t", WORD),
      ptx.multiply("t", "t", self.tile),
      ptx.subtract("t", "i", "t"),
      *map(group_word, ("size", "to", "end"), self.group_words),
      ptx.multiply("end", "end", self.tile),
      ptx.add("t", "t", "size"),
      ptx.compare("yes", "t", "<", "end"),
      ptx.multiply_add("to", "to", self.tile, "t"),
      self.send_zero(),
      ptx.add("i", "i", LANES * self.warps),
    )
    return ptx.lines(
      [
        ptx.multiply_add("i", "lane", self.warps, "row"),
        rows,
        ptx.wait_for_warp(),
        ptx.close_group(),
      ]
    )
