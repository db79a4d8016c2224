"""The place of every choice among the experts' tiles, and the tiles, in one kernel on Hopper.

    N  choices      G  groups (experts)      R  rows of the tiles      I  tiles

XLA computes the sums over groups, the groups' order by size and the scatter in a dozen kernels.
This kernel needs one launch, because no thread block waits for another: every block adds up the
groups' tiles for itself, and then writes its share of the result.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline, ptx
from scmoe.kernels.launch import compiled, resolve_num_sms, varying_as

_THREADS = 512  # Threads of a block.
_MOST = 1024  # The most groups that the kernel takes.
_WORD = 4  # Bytes of an int32.


def takes(num_choices: int, num_groups: int) -> bool:
  """Whether the kernel takes these sizes: 1 to 2²⁸ - 1 choices, and 1 to 1024 groups."""
  return 0 < num_choices < 2**28 and 0 < num_groups <= _MOST


def sorted_rows_kernel(
  sizes_G: jax.Array,
  group_KM: jax.Array,
  position_KM: jax.Array,
  num_tiles: int,
  tile: int,
) -> tuple[jax.Array, ...]:
  """The arrays of a `TiledRows`: each group's tiles, and the permutation of choices to their rows.

  Args:
    sizes_G: int32, choices of each group.
    group_KM: int32, group of each choice: all rows' first choices, then all second ones, and so on;
      an id outside [0, G) is that of a choice of no group.
    position_KM: int32, position of each choice among those of its group.
    num_tiles: I, the static bound of the number of tiles.
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
    program = _Program(groups, copies, rows, num_tiles, tile, blocks)
    inline.run(program.text(), refs[:-1], refs[-1:])

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


# The inline code's operands: three inputs, eight outputs, and the block's shared memory.
_SIZES, _GROUP, _POSITION = "$0", "$1", "$2"
_TILE_STARTS, _TILES, _BY_SIZE, _NUM_TILES, _TILE_GROUP = "$3", "$4", "$5", "$6", "$7"
_ROW, _COPY, _TOKEN = "$8", "$9", "$10"
_SHARED = "$11"


@dataclasses.dataclass(frozen=True)
class _Program:
  """The kernel in PTX, step by step.

  Shared memory holds the groups' sizes, then their numbers of tiles, then their first tiles, and
  one word with the number of tiles in all. The register `at` is the address of a group's size. With
  8 groups that of group 5 is 20 bytes from the start of shared memory; `at` + 32 is the address of
  its number of tiles, and `at` + 64 that of its first tile.

  Attributes:
    groups: G.
    copies, rows: K, the choices of a row, and M, the rows with choices; N = K·M.
    num_tiles: I.
    tile: rows of a tile.
    blocks: blocks of the grid.
  """

  groups: int
  copies: int
  rows: int
  num_tiles: int
  tile: int
  blocks: int

  def text(self) -> str:
    """The whole kernel as PTX."""
    groups, tile = self.groups, self.tile
    everyone = self.blocks * _THREADS
    by_block = ("thread", groups, _THREADS)  # each block walks all groups
    return ptx.program(
      ptx.registers("pred", "more, yes"),
      ptx.registers("b32", "thread, block, own, shared, nobody, i, j, t, at, other, size"),
      ptx.registers("b32", "mine, before, all, place"),
      ptx.registers("b64", "wide"),
      self.begin(),
      ptx.for_each("TILES", "i", *by_block, self.count_tiles()),
      ptx.wait_for_block(),
      ptx.for_each("SUMS", "i", *by_block, self.add_up_tiles()),
      ptx.wait_for_block(),
      ptx.for_each("CHOICES", "i", "own", self.copies * self.rows, everyone, self.place_choice()),
      ptx.for_each("RESTS", "i", "own", groups * tile, everyone, self.clear_row_of_last_tile()),
      self.first_row_behind_tiles(),
      ptx.for_each("AFTER", "i", "all", self.num_tiles * tile, everyone, self.clear_row("i")),
      ptx.for_each("OF_TILES", "i", "own", self.num_tiles, everyone, self.find_group_of_tile()),
    )

  @property
  def tiles_at(self) -> int:
    """Bytes from a group's size to its number of tiles."""
    return _WORD * self.groups

  @property
  def starts_at(self) -> int:
    """Bytes from a group's size to its first tile."""
    return 2 * _WORD * self.groups

  @property
  def all_at(self) -> int:
    """Bytes from the start of shared memory to the number of tiles in all."""
    return 3 * _WORD * self.groups

  def begin(self) -> str:
    """own, thread = the thread's numbers in the grid and in its block; block = the block's number.

    Also sets `shared` to the address of shared memory, and `nobody` to -1.
    """
    return ptx.lines(
      [
        ptx.thread_of_block("thread"),
        ptx.block_of_grid("block"),
        ptx.multiply_add("own", "block", _THREADS, "thread"),
        ptx.let("shared", _SHARED),
        ptx.let("nobody", -1),
      ]
    )

  def count_tiles(self) -> str:
    """Writes group i's size and number of tiles, size / tile rounded up, to shared memory."""
    return ptx.lines(
      [
        ptx.element_address("wide", _SIZES, "i", _WORD),
        ptx.load_read_only("size", "wide"),
        ptx.multiply_add("at", "i", _WORD, "shared"),
        ptx.store_shared("at", "size"),
        ptx.add("t", "size", self.tile - 1),
        ptx.divide("t", "t", self.tile),
        ptx.store_shared("at", "t", self.tiles_at),
      ]
    )

  def add_up_tiles(self) -> str:
    """Finds group i's first tile, its place by falling number of tiles, and the tiles in all.

    The thread walks all groups: `before` adds up the tiles of groups in front of i, `all` those of
    all groups, and `place` counts the groups with more tiles, or as many and in front of i. Every
    block keeps `before` and `all` in shared memory. The first block also writes the layout's
    tile_starts_G, tiles_G, by_size_G and num_tiles.
    """
    another = ptx.at_least_once(
      "OTHERS",
      "j",
      self.groups,
      "yes",
      ptx.load_shared("t", "other", self.tiles_at),
      ptx.add("all", "all", "t"),
      ptx.compare("yes", "j", "<", "i"),
      ptx.add("before", "before", "t", only_if="yes"),
      ptx.compare("yes", "t", "==", "mine", and_="yes"),
      ptx.compare("yes", "t", ">", "mine", or_="yes"),
      ptx.add("place", "place", 1, only_if="yes"),
      ptx.add("other", "other", _WORD),
      ptx.add("j", "j", 1),
    )
    return ptx.lines(
      [
        ptx.multiply_add("at", "i", _WORD, "shared"),
        ptx.load_shared("mine", "at", self.tiles_at),
        *(ptx.let(name, 0) for name in ("before", "all", "place", "j")),
        ptx.let("other", "shared"),
        another,
        ptx.store_shared("at", "before", self.starts_at),
        ptx.store_shared("shared", "all", self.all_at),
        ptx.compare("yes", "block", "==", 0, unsigned=True),
        _store(_TILE_STARTS, "i", "before", only_if="yes"),
        _store(_TILES, "i", "mine", only_if="yes"),
        _store(_BY_SIZE, "place", "i", only_if="yes"),
        ptx.compare("yes", "i", "==", 0, and_="yes"),
        ptx.store_global(_NUM_TILES, "all", only_if="yes"),
      ]
    )

  def place_choice(self) -> str:
    """Writes choice i's row t = first tile of its group · tile + position, and at row t the choice.

    A choice of no group gets row R, after all rows, and is written at no row. Choices are numbered
    with all tokens' first choices first: i is choice k = i // M of token m = i % M. At row t,
    copy_R becomes the choice's number in the tokens' order, m·K + k, and token_R becomes m.
    """
    return ptx.lines(
      [
        ptx.element_address("wide", _GROUP, "i", _WORD),
        ptx.load_read_only("size", "wide"),  # the group, in a register that is free here
        ptx.element_address("wide", _POSITION, "i", _WORD),
        ptx.load_read_only("place", "wide"),
        ptx.compare("yes", "size", "<", self.groups, unsigned=True),
        ptx.let("t", self.num_tiles * self.tile),
        ptx.multiply_add("at", "size", _WORD, "shared"),
        ptx.load_shared("t", "at", self.starts_at, only_if="yes"),
        ptx.multiply_add("t", "t", self.tile, "place", only_if="yes"),
        _store(_ROW, "i", "t"),
        ptx.divide("j", "i", self.rows),  # j = which of its token's choices i is
        ptx.multiply("before", "j", self.rows),
        ptx.subtract("before", "i", "before"),  # before = the token of choice i
        ptx.multiply_add("j", "before", self.copies, "j"),
        _store(_COPY, "t", "j", only_if="yes"),
        _store(_TOKEN, "t", "before", only_if="yes"),
      ]
    )

  def clear_row_of_last_tile(self) -> str:
    """Marks one row of a group's last tile that no choice fills, if there is such a row, with -1.

    A group lacks fewer rows than a tile has. So i stands for group j = i // tile and for row
    size + i % tile of that group. With tiles of 4, a group of 5 choices lacks rows 5, 6 and 7 of
    its 8; for i % 4 = 3 there is no row 8, and nothing is marked.
    """
    return ptx.lines(
      [
        ptx.divide("j", "i", self.tile),
        ptx.multiply("t", "j", self.tile),
        ptx.subtract("place", "i", "t"),
        ptx.multiply_add("at", "j", _WORD, "shared"),
        ptx.load_shared("size", "at"),
        ptx.load_shared("all", "at", self.tiles_at),
        ptx.load_shared("before", "at", self.starts_at),
        ptx.add("place", "place", "size"),
        ptx.multiply("all", "all", self.tile),
        ptx.compare("yes", "place", "<", "all"),
        ptx.multiply_add("t", "before", self.tile, "place"),
        self.clear_row("t", only_if="yes"),
      ]
    )

  def first_row_behind_tiles(self) -> str:
    """all = rows of the tiles in use + `own`: the first row behind them that the thread clears."""
    return ptx.lines(
      [
        ptx.load_shared("all", "shared", self.all_at),
        ptx.multiply_add("all", "all", self.tile, "own"),
      ]
    )

  def clear_row(self, row: str, *, only_if: str = "") -> str:
    """Writes -1 as copy and token of a row that no choice fills.

    With a predicate, `only_if`, it writes only where that holds.
    """
    return ptx.lines(_store(out, row, "nobody", only_if=only_if) for out in (_COPY, _TOKEN))

  def find_group_of_tile(self) -> str:
    """Writes tile i's group: how many groups end where it begins or before; at most G - 1."""
    another = ptx.at_least_once(
      "GROUPS",
      "j",
      self.groups,
      "yes",
      ptx.load_shared("t", "other", self.tiles_at),
      ptx.load_shared("before", "other", self.starts_at),
      ptx.add("t", "t", "before"),
      ptx.compare("yes", "i", ">=", "t"),
      ptx.add("place", "place", 1, only_if="yes"),
      ptx.add("other", "other", _WORD),
      ptx.add("j", "j", 1),
    )
    return ptx.lines(
      [
        ptx.let("place", 0),
        ptx.let("j", 0),
        ptx.let("other", "shared"),
        another,
        ptx.at_most("place", "place", self.groups - 1),
        _store(_TILE_GROUP, "i", "place"),
      ]
    )


def _store(out: str, index: str, value: str, *, only_if: str = "") -> str:
  """out[index] = value, in global memory, if the predicate `only_if` holds or is not given."""
  address = ptx.element_address("wide", out, index, _WORD)
  return ptx.lines([address, ptx.store_global("wide", value, only_if=only_if)])
