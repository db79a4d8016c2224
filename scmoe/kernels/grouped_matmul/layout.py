"""The tiles of each group's rows (`GroupLayout`), and the experts of each row (`RowLayout`).

    M  rows given              R  rows of the padded layout (a multiple of `tile`)
    G  groups (experts)        I  row tiles: R // tile

Each group's rows are padded to whole row tiles. So every tile belongs to one group, the kernels
that multiply need no masks, and a matrix's gradient is a plain loop over its group's rows. Sizes of
arrays are static bounds, and the device computes the arrays' contents, so it never waits for the
host.

Worked example: five rows of three groups, 3, 0 and 2 of them, in tiles of two rows.

    tiles_G      = 2 0 1        tile_starts_G = 0 2 2        num_tiles = 3
    tile_group_I = 0 0 2 2      the bound is four tiles; the last is not in use
    rows of the tiles, by the row given that each holds:  0 1 | 2 - | 3 4 | - -
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from scmoe.kernels.grouped_matmul import sorting
from scmoe.kernels.launch import runs_ptx
from scmoe.kernels.permute import Permutation, make_permutation, running_positions, take_rows

# Rows of a tile in layouts for the Mosaic GPU kernels; a kernel may work on halves of a tile.
KERNEL_ROW_TILE = 128


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    "group_sizes_G",
    "tile_starts_G",
    "tiles_G",
    "tile_group_I",
    "num_tiles",
    "by_size_G",
  ],
  meta_fields=["tile", "runs", "one_tile_each"],
)
@dataclasses.dataclass(frozen=True)
class GroupLayout:
  """Which tiles belong to each group of rows.

  Attributes:
    group_sizes_G: int32, rows of each group without padding.
    tile_starts_G: int32, first tile of each group; with several runs, in the first run.
    tiles_G: int32, number of tiles of each group (0 for an empty one).
    tile_group_I: int32, group of each tile; tiles past `num_tiles` have group G - 1.
    num_tiles: int32 [1], tiles in use.
    by_size_G: int32, groups by falling number of tiles, equal ones in order.
    tile: rows of a tile, static.
    runs: static. With more than one, all groups have the same size, and each run of rows holds an
      equal part of every group, group by group. Each run is what one source rank sent.
    one_tile_each: static, set by `make_equal_layout` alone: whether every group is exactly one
      tile, so that one batched product can serve all groups.
  """

  group_sizes_G: jax.Array
  tile_starts_G: jax.Array
  tiles_G: jax.Array
  tile_group_I: jax.Array
  num_tiles: jax.Array
  by_size_G: jax.Array
  tile: int
  runs: int = 1
  one_tile_each: bool = False

  @property
  def num_rows(self) -> int:
    """R: rows of the padded layout, a static bound."""
    return self.tile_group_I.shape[0] * self.tile

  @property
  def num_groups(self) -> int:
    """G, the number of groups."""
    return self.group_sizes_G.shape[0]

  @property
  def run_tiles(self) -> int:
    """Tiles of one group in one run; only for layouts of equal groups (`make_equal_layout`)."""
    return self.tile_group_I.shape[0] // (self.runs * self.num_groups)


def max_tiles(num_rows: int, num_groups: int, tile: int) -> int:
  """The most tiles that `num_rows` rows in `num_groups` groups can need, but at least 1."""
  # Every non-empty group wastes at most tile - 1 rows, and there are at most num_rows such groups.
  return max((num_rows + min(num_groups, num_rows) * (tile - 1)) // tile, 1)


def make_layout(group_sizes_G: jax.Array, num_rows: int, tile: int) -> GroupLayout:
  """The layout in which each group is padded to whole tiles.

  Args:
    group_sizes_G: integers; their sum may be below `num_rows`, not above.
    num_rows: M, static.
    tile: rows of a tile, static.
  """
  sizes_G = group_sizes_G.astype(jnp.int32)
  tiles_G = (sizes_G + (tile - 1)) // tile
  ends_G = jnp.cumsum(tiles_G, dtype=jnp.int32)
  index_I = jnp.arange(max_tiles(num_rows, sizes_G.shape[0], tile), dtype=jnp.int32)
  # Tiles past the end get group G - 1, so that a kernel which touches one of them reads a valid
  # group.
  group_I = jnp.sum(index_I[:, None] >= ends_G[None, :], axis=1, dtype=jnp.int32)
  return GroupLayout(
    group_sizes_G=sizes_G,
    tile_starts_G=ends_G - tiles_G,
    tiles_G=tiles_G,
    tile_group_I=jnp.minimum(group_I, sizes_G.shape[0] - 1),
    num_tiles=ends_G[-1:],
    by_size_G=_by_falling(tiles_G),
    tile=tile,
  )


def with_spare_tiles(layout: GroupLayout, spare: int) -> GroupLayout:
  """The layout, of one run, with `spare` more tiles after all others, which hold no group's rows.

  As tiles after the last one in use they count as group G - 1 in `tile_group_I`.
  """
  assert layout.runs == 1
  group_I = jnp.pad(layout.tile_group_I, (0, spare), constant_values=layout.num_groups - 1)
  return dataclasses.replace(layout, tile_group_I=group_I)


def make_equal_layout(runs: int, num_groups: int, rows: int, tile: int) -> GroupLayout:
  """The layout of rows [runs, G, rows], where the rows of a group in a run fill whole tiles.

  Worked example: two source ranks, two experts, four rows for each from each, tiles of two rows:
  tile_group_I = 0 0 1 1 0 0 1 1, as the rows lie; every group has four tiles, two in each run.

  Args:
    runs: how many runs of rows there are, as in `GroupLayout`.
    num_groups: G.
    rows: rows of a group in one run; a multiple of `tile`.
    tile: rows of a tile.
  """
  assert rows % tile == 0, (rows, tile)
  run_tiles = rows // tile
  index_I = jnp.arange(runs * num_groups * run_tiles, dtype=jnp.int32)
  index_G = jnp.arange(num_groups, dtype=jnp.int32)
  return GroupLayout(
    group_sizes_G=jnp.full_like(index_G, runs * rows),
    tile_starts_G=index_G * run_tiles,
    tiles_G=jnp.full_like(index_G, runs * run_tiles),
    tile_group_I=index_I // run_tiles % num_groups,
    num_tiles=jnp.full((1,), index_I.size, jnp.int32),
    by_size_G=index_G,
    tile=tile,
    runs=runs,
    one_tile_each=runs == 1 and run_tiles == 1,
  )


def _by_falling(value_G: jax.Array) -> jax.Array:
  """`argsort(-value)`, stable, by comparing all pairs: a sort would take more launches."""
  index_G = jnp.arange(value_G.shape[0], dtype=jnp.int32)
  equal_GG = (value_G[None, :] == value_G[:, None]) & (index_G[None, :] < index_G[:, None])
  rank_G = jnp.sum((value_G[None, :] > value_G[:, None]) | equal_GG, axis=1, dtype=jnp.int32)
  found_GG = rank_G[None, :] == index_G[:, None]
  return jnp.sum(jnp.where(found_GG, index_G[None, :], 0), axis=1, dtype=jnp.int32)


def row_groups(group_sizes_G: jax.Array, num_rows: int) -> jax.Array:
  """The group of each of `num_rows` rows that lie group after group; G behind the last group."""
  ends_G = jnp.cumsum(group_sizes_G.astype(jnp.int32), dtype=jnp.int32)
  index_M = jnp.arange(num_rows, dtype=jnp.int32)
  return jnp.sum(index_M[:, None] >= ends_G[None, :], axis=1, dtype=jnp.int32)


def padded_rows_of(layout: GroupLayout, num_rows: int) -> jax.Array:
  """For each row given, its row in the layout's tiles; `layout.num_rows` for a row of no group.

  The rows given lie group after group, without padding, and those of no group after them. The
  layout has one run. In the example at the top: 0 1 2 4 5.
  """
  group_M = row_groups(layout.group_sizes_G, num_rows)
  # A row moves down by the padding of the groups before it.
  starts_G = jnp.cumsum(layout.group_sizes_G, dtype=jnp.int32) - layout.group_sizes_G
  shift_G = layout.tile_starts_G * layout.tile - starts_G
  shift_G1 = jnp.append(shift_G, 0)
  index_M = jnp.arange(num_rows, dtype=jnp.int32) + shift_G1[group_M]
  return jnp.where(group_M < layout.num_groups, index_M, layout.num_rows)


def source_rows_of(layout: GroupLayout) -> jax.Array:
  """For each row of the layout's tiles, the row given that it holds; -1 if it holds none.

  The rows given lie group after group, without padding. The layout has one run. In the example at
  the top: 0 1 2 -1 3 4 -1 -1.
  """
  starts_G = jnp.cumsum(layout.group_sizes_G, dtype=jnp.int32) - layout.group_sizes_G
  first_I = (jnp.arange(layout.tile_group_I.shape[0], dtype=jnp.int32)) * layout.tile
  group_I = layout.tile_group_I
  offset_I = first_I - layout.tile_starts_G[group_I] * layout.tile
  offset_IB = offset_I[:, None] + jnp.arange(layout.tile, dtype=jnp.int32)[None, :]
  used_IB = offset_IB < layout.group_sizes_G[group_I][:, None]
  source_IB = jnp.where(used_IB, starts_G[group_I][:, None] + offset_IB, -1)
  return source_IB.reshape(-1)


def pad_rows(x_MN: jax.Array, layout: GroupLayout) -> jax.Array:
  """Moves rows that lie group after group to their places in the layout; padding rows are zero.

  The layout has one run.
  """
  return take_rows(x_MN, source_rows_of(layout))


def unpad_rows(x_RN: jax.Array, layout: GroupLayout, num_rows: int) -> jax.Array:
  """Moves the layout's rows back, group after group without padding; rows of no group are zero.

  The layout has one run.
  """
  return take_rows(x_RN, padded_rows_of(layout, num_rows))


# -- how a transport describes the rows that it gives to the experts ------------------------------


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["sizes_G", "group_MK", "position_MK", "weight_MK", "tiles"],
  meta_fields=["padded"],
)
@dataclasses.dataclass(frozen=True)
class RowLayout:
  """Which experts the rows at hand are for: each of a row's K copies is for at most one.

      M  rows at hand      K  copies of each      G  groups: the experts of this device

  There are four kinds. *Tokens in place* have K copies each, with weights, and the experts' network
  adds up a token's copies (`choices_layout`). In the other kinds a row has one copy, without a
  weight. *Loose rows* lie in no tiles (`arrived_layout`, `sorted_layout`). *Tiled rows* were put
  into the experts' tiles by the transport (`tiled_layout`). *Padded experts* have equal room
  (`padded_layout`): C rows for each expert from each of W source ranks. The place of a row then
  tells its expert, and the arrays are None. Worked example of the first kind, three tokens with two
  choices among experts 0, 1, 2:

      group_MK     = [[1, 0], [1, 2], [0, 3]]      the last choice is not made: 3 is no expert
      position_MK  = [[0, 1], [1, 0], [0, 0]]      token 1 is the second row of expert 1
      sizes_G      = [2, 2, 1]

  Attributes:
    sizes_G: int32, how many copies are for each expert.
    group_MK: int32, expert of each copy; an id outside [0, G) for none.
    position_MK: int32, position of each copy among those for its expert.
    weight_MK: float32 (or wider), the factor of each copy's result when a row's copies are added
      up; None: all factors are 1, and K is 1.
    padded: static (W, G, C) of padded experts, M = W·G·C; None otherwise.
    tiles: the experts' tiles, for rows that have arrived in them: M = R, the padding rows of tiles
      in use are zero, and tiles that are not in use may hold anything. None in the other kinds.
  """

  sizes_G: jax.Array | None
  group_MK: jax.Array | None
  position_MK: jax.Array | None
  weight_MK: jax.Array | None = None
  padded: tuple[int, int, int] | None = None
  tiles: GroupLayout | None = None

  @property
  def num_groups(self) -> int:
    """G, the number of experts."""
    if self.padded is not None:
      return self.padded[1]
    assert self.sizes_G is not None
    return self.sizes_G.shape[0]

  @property
  def num_copies(self) -> int:
    """M·K, the number of copies of all rows."""
    if self.padded is not None:
      ranks, groups, rows = self.padded
      return ranks * groups * rows
    assert self.group_MK is not None
    return self.group_MK.size

  def sorted(self, tile: int) -> TiledRows:
    """The tiles of the copies sorted by expert, and which row of the tiles holds each copy.

    Each expert's copies are padded to whole tiles. Worked example, tiles of two rows: five rows for
    experts 0, 2, 0, 0, 2 have the tiles of the example at the top. The permutation has
    row_TK = 0 4 1 2 5 and copy_R = 0 2 3 -1 1 4 -1 -1.
    """
    sizes_G, group_MK, position_MK = self.places()
    if runs_ptx() and sorting.takes(self.num_copies, self.num_groups):
      return _sorted_by_kernel(sizes_G, group_MK, position_MK, tile)
    groups = make_layout(sizes_G, self.num_copies, tile)
    # The last entry is for copies of no expert: they start behind all rows.
    starts_G1 = jnp.append(groups.tile_starts_G * tile, groups.num_rows)
    # The lookup takes all rows' first copies, then all second ones. `choices_layout` counts
    # positions in this order, so XLA transposes nothing.
    row_MK = starts_G1[group_MK.T].T + position_MK
    row_MK = jnp.where(group_MK < self.num_groups, row_MK, groups.num_rows)
    return TiledRows(groups, make_permutation(row_MK, groups.num_rows))

  def renamed(self, name_G: jax.Array, num_groups: int) -> RowLayout:
    """The same rows with the experts numbered anew; an expert without rows may be left out.

    The result has `sizes_G`, `group_MK` and `position_MK` also for padded experts; its `padded` and
    `tiles` are None.

    Args:
      name_G: int32, new name of each expert; `num_groups` for one that is not there and has no row.
      num_groups: G of the new names.
    """
    sizes_G, group_MK, position_MK = self.places()
    name_G1 = jnp.append(name_G, num_groups).astype(jnp.int32)
    sizes = jnp.zeros((num_groups,), jnp.int32).at[name_G].add(sizes_G, mode="drop")
    return RowLayout(sizes, name_G1[group_MK], position_MK, self.weight_MK)

  def in_place(self, tile: int) -> TiledRows:
    """The tiles of padded experts where their rows lie; `tile` must divide `padded[2]`."""
    assert self.padded is not None
    return TiledRows(make_equal_layout(*self.padded, tile), None)

  def places(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """sizes_G, group_MK and position_MK, also for padded experts; every id of no expert becomes G.

    Two source ranks, two padded experts of one row each, (W, G, C) = (2, 2, 1): sizes 2 2, groups
    0 1 0 1, positions 0 0 1 1.
    """
    if self.padded is None:
      assert self.sizes_G is not None
      assert self.group_MK is not None
      assert self.position_MK is not None
      group_MK, none = self.group_MK, self.num_groups
      group_MK = jnp.where((group_MK >= 0) & (group_MK < none), group_MK, none)
      return self.sizes_G, group_MK, self.position_MK
    ranks, groups, rows = self.padded
    rank, group, row = jnp.indices(self.padded, jnp.int32, sparse=True)
    shape = (ranks, groups, rows)
    flat = lambda a: jnp.broadcast_to(a, shape).reshape(-1, 1)
    return jnp.full((groups,), ranks * rows, jnp.int32), flat(group), flat(rank * rows + row)


def _sorted_by_kernel(
  sizes_G: jax.Array, group_MK: jax.Array, position_MK: jax.Array, tile: int
) -> TiledRows:
  """The result of `RowLayout.sorted`, computed by one kernel."""
  bound = max_tiles(group_MK.size, sizes_G.size, tile)
  *groups, row_KM, copy_R, token_R = sorting.sorted_rows_kernel(
    sizes_G, group_MK.T, position_MK.T, bound, tile
  )
  starts_G, tiles_G, by_size_G, num_tiles, tile_group_I = groups
  layout = GroupLayout(sizes_G, starts_G, tiles_G, tile_group_I, num_tiles, by_size_G, tile)
  return TiledRows(layout, Permutation(row_KM.T, copy_R, token_R))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledRows:
  """The tiles of every expert, and which row of them holds which copy.

  Attributes:
    groups: the tiles of each expert.
    permutation: between the copies of the rows at hand and the rows of the tiles; None if the rows
      lie in tiles already, or do once `ffn._by_expert` has reordered them.
  """

  groups: GroupLayout
  permutation: Permutation | None


def choices_layout(expert_TK: jax.Array, weight_TK: jax.Array, num_experts: int) -> RowLayout:
  """The layout of tokens in place, with K weighted choices each.

  An id outside [0, num_experts) is no expert.

  Raises:
    ValueError: the two arrays do not have one shape [tokens, K], or the ids are not integers.
  """
  if expert_TK.ndim != 2 or weight_TK.shape != expert_TK.shape:
    raise ValueError(
      f"expert has shape {expert_TK.shape} and weight {weight_TK.shape}: expected [T, K] for both"
    )
  # Positions are counted in the order in which the router's kernel writes the choices, all first
  # ones before all second ones, so that XLA transposes nothing.
  position_KT, count_E = running_positions(expert_TK.T, num_experts)
  return RowLayout(count_E, expert_TK.astype(jnp.int32), position_KT.T, weight_TK)


def arrived_layout(group_M: jax.Array, position_M: jax.Array, sizes_G: jax.Array) -> RowLayout:
  """The layout of rows in any order, one copy each; a group outside [0, G) stands for no expert."""
  return RowLayout(sizes_G, group_M[:, None], position_M[:, None])


def tiled_layout(groups: GroupLayout) -> RowLayout:
  """The layout of rows that arrived in tiles of one run, one copy each; padding has no expert."""
  index_R = jnp.arange(groups.num_rows, dtype=jnp.int32)
  group_R = groups.tile_group_I[index_R // groups.tile]
  position_R = index_R - groups.tile_starts_G[group_R] * groups.tile
  used_R = index_R < groups.num_tiles[0] * groups.tile
  used_R &= position_R < groups.group_sizes_G[group_R]
  group_R = jnp.where(used_R, group_R, groups.num_groups)
  layout = arrived_layout(group_R, position_R, groups.group_sizes_G)
  return dataclasses.replace(layout, tiles=groups)


def sorted_layout(sizes_G: jax.Array, num_rows: int) -> RowLayout:
  """The layout of `num_rows` rows sorted by expert; rows after all experts' rows have no expert."""
  sizes_G = sizes_G.astype(jnp.int32)
  group_M = row_groups(sizes_G, num_rows)
  starts_G1 = jnp.append(jnp.cumsum(sizes_G) - sizes_G, 0)
  position_M = jnp.arange(num_rows, dtype=jnp.int32) - starts_G1[group_M]
  return arrived_layout(group_M, position_M, sizes_G)


def padded_layout(ranks: int, experts: int, rows: int) -> RowLayout:
  """The layout of padded experts: from each source rank, `rows` rows for each expert in turn."""
  return RowLayout(None, None, None, padded=(ranks, experts, rows))
