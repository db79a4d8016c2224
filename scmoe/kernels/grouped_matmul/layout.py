"""Where each group's rows lie once groups are padded to whole row tiles.

    M  rows given              R  rows of the padded layout (a multiple of `tile`)
    G  groups (experts)        I  row tiles: R // tile

A tile then belongs to one group, so no kernel has ragged edges: every load and store is full and
the weight gradient is a plain loop over tiles. All sizes are static bounds and all contents are
computed on the device, so nothing waits for the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

KERNEL_ROW_TILE = 128  # rows of a tile in the Mosaic GPU kernels


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
  meta_fields=["tile", "runs"],
)
@dataclasses.dataclass(frozen=True)
class GroupLayout:
  """Tiles of each group.

  Attributes:
    group_sizes_G: int32, rows of each group without padding.
    tile_starts_G: int32, first tile of each group.
    tiles_G: int32, number of tiles of each group (0 for an empty one).
    tile_group_I: int32, group of each tile; tiles past `num_tiles` repeat the last group.
    num_tiles: int32 [1], tiles in use.
    by_size_G: int32, groups by falling number of tiles, equal ones in order.
    tile: rows of a tile, static.
    runs: static; with more than one, all groups are of one size and every run of the rows holds an
      equal part of each, in their order (rows as several devices sent them).
  """

  group_sizes_G: jax.Array
  tile_starts_G: jax.Array
  tiles_G: jax.Array
  tile_group_I: jax.Array
  num_tiles: jax.Array
  by_size_G: jax.Array
  tile: int
  runs: int = 1

  @property
  def num_rows(self) -> int:
    """R: rows of the padded layout, a static bound."""
    return self.tile_group_I.shape[0] * self.tile

  @property
  def num_groups(self) -> int:
    """G."""
    return self.group_sizes_G.shape[0]

  @property
  def run_tiles(self) -> int:
    """Tiles of one group in one of several runs."""
    return self.tile_group_I.shape[0] // (self.runs * self.num_groups)


def max_tiles(num_rows: int, num_groups: int, tile: int) -> int:
  """The most tiles that `num_rows` rows in `num_groups` groups can need."""
  # Every non-empty group wastes at most tile - 1 rows, and there are at most num_rows such groups.
  return max((num_rows + min(num_groups, num_rows) * (tile - 1)) // tile, 1)


def make_layout(group_sizes_G: jax.Array, num_rows: int, tile: int) -> GroupLayout:
  """Pads each group to whole tiles.

  Args:
    group_sizes_G: integers; their sum may be below `num_rows`, not above.
    num_rows: M, static.
    tile: rows of a tile, static.
  """
  sizes_G = group_sizes_G.astype(jnp.int32)
  tiles_G = (sizes_G + (tile - 1)) // tile
  ends_G = jnp.cumsum(tiles_G, dtype=jnp.int32)
  index_I = jnp.arange(max_tiles(num_rows, sizes_G.shape[0], tile), dtype=jnp.int32)
  # The last group that is not empty keeps the tiles past the end, so that a kernel which touches
  # one of them reads a valid group.
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


def make_equal_layout(runs: int, num_groups: int, rows: int, tile: int) -> GroupLayout:
  """The layout of rows [runs, G, rows], where each part of a group fills whole tiles.

  Args:
    runs: as in `GroupLayout`.
    num_groups: G.
    rows: of a group in one run; a multiple of `tile`.
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
  )


def _by_falling(value_G: jax.Array) -> jax.Array:
  """`argsort(-value)`, stable, by comparing all pairs: a sort would take more launches."""
  index_G = jnp.arange(value_G.shape[0], dtype=jnp.int32)
  equal_GG = (value_G[None, :] == value_G[:, None]) & (index_G[None, :] < index_G[:, None])
  rank_G = jnp.sum((value_G[None, :] > value_G[:, None]) | equal_GG, axis=1, dtype=jnp.int32)
  found_GG = rank_G[None, :] == index_G[:, None]
  return jnp.sum(jnp.where(found_GG, index_G[None, :], 0), axis=1, dtype=jnp.int32)


def row_groups(group_sizes_G: jax.Array, num_rows: int) -> jax.Array:
  """Group of each of M contiguous rows; G for rows past the sum of the sizes."""
  ends_G = jnp.cumsum(group_sizes_G.astype(jnp.int32), dtype=jnp.int32)
  index_M = jnp.arange(num_rows, dtype=jnp.int32)
  return jnp.sum(index_M[:, None] >= ends_G[None, :], axis=1, dtype=jnp.int32)


def padded_rows_of(layout: GroupLayout, num_rows: int) -> jax.Array:
  """Padded position of each of M contiguous rows; R (out of range) for rows of no group."""
  group_M = row_groups(layout.group_sizes_G, num_rows)
  # Padding only ever moves a row down by what the groups before it were padded with.
  starts_G = jnp.cumsum(layout.group_sizes_G, dtype=jnp.int32) - layout.group_sizes_G
  shift_G = layout.tile_starts_G * layout.tile - starts_G
  shift_G1 = jnp.append(shift_G, 0)
  index_M = jnp.arange(num_rows, dtype=jnp.int32) + shift_G1[group_M]
  return jnp.where(group_M < layout.num_groups, index_M, layout.num_rows)


def source_rows_of(layout: GroupLayout) -> jax.Array:
  """Contiguous row behind each of the R padded rows; -1 for padding."""
  starts_G = jnp.cumsum(layout.group_sizes_G, dtype=jnp.int32) - layout.group_sizes_G
  first_I = (jnp.arange(layout.tile_group_I.shape[0], dtype=jnp.int32)) * layout.tile
  group_I = layout.tile_group_I
  offset_I = first_I - layout.tile_starts_G[group_I] * layout.tile
  offset_IB = offset_I[:, None] + jnp.arange(layout.tile, dtype=jnp.int32)[None, :]
  used_IB = offset_IB < layout.group_sizes_G[group_I][:, None]
  source_IB = jnp.where(used_IB, starts_G[group_I][:, None] + offset_IB, -1)
  return source_IB.reshape(-1)


def inverse_places(place_M: jax.Array, num_places: int) -> jax.Array:
  """The row that stands at each of R places, which differ; -1 for none. Places past R are none."""
  nobody_R = jnp.full((num_places,), -1, jnp.int32)
  index_M = jnp.arange(place_M.shape[0], dtype=jnp.int32)
  return nobody_R.at[place_M].set(index_M, mode="drop")


def take_rows(x_MN: jax.Array, index_R: jax.Array) -> jax.Array:
  """Rows of x by index; zeros where the index is outside [0, M)."""
  # A negative index would count from the end, which is why it is moved past it.
  index_R = jnp.where(index_R < 0, x_MN.shape[0], index_R)
  return jnp.take(x_MN, index_R, axis=0, mode="fill", fill_value=0)


def pad_rows(x_MN: jax.Array, layout: GroupLayout) -> jax.Array:
  """Contiguous rows to the padded layout, zeros between."""
  return take_rows(x_MN, source_rows_of(layout))


def unpad_rows(x_RN: jax.Array, layout: GroupLayout, num_rows: int) -> jax.Array:
  """The inverse of `pad_rows`; rows of no group are zero."""
  return take_rows(x_RN, padded_rows_of(layout, num_rows))
