"""The order in which the CTAs of a kernel take its output tiles, and the place of a tile.

Tiles, or pairs of tiles, are numbered, and workers take them by number: a worker is a CTA or a pair
of CTAs, and worker 5 of 132 takes 5, 137, 269 and so on. `banded` and `paired` turn a number into a
row tile and a column tile, so that CTAs at work at the same time share operands in the L2 cache,
and the CTAs of a pair can load some together. `snake` renumbers tiles, so that long and short ones
are shared out more evenly.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from scmoe.kernels.grouped_matmul.pipeline import PAIR, Tiling

_GRANULE = 64  # all widths are multiples of it


def tiles_over(width: int, size: int, multiple: int = 1) -> int:
  """How many tiles of `size` cover `width`, rounded up to a multiple of `multiple`.

  Tiles may overlap: see `first_of`.
  """
  return -(-width // (size * multiple)) * multiple


def first_of(tile: Any, size: int, width: int) -> Any:
  """The first row or column of a tile.

  A tile that would reach past the width ends where the width ends. It computes rows or columns of
  the tile before once more, with the same results: tiles of 128 on a width of 320 begin at 0, 128
  and 192, and a fourth tile, for an even number, at 192 too. The exception is a width that whole
  tiles cover: a further tile for an even number begins where the width ends, and its rows or
  columns are not stored (tiles of 128 on a width of 384: 0, 128, 256 and 384).
  """
  if width % size == 0:
    return tile * size
  return pl.multiple_of(jnp.minimum(tile * size, width - size), _GRANULE)


def banded(tile: Any, row_tiles: Any, col_tiles: int, band: int) -> tuple[Any, Any]:
  """Tile number -> (row tile, column tile), walking `band` row tiles for each column tile.

  CTAs that run at the same time then read few different blocks of either operand, and share them in
  the L2 cache. Tiles taken row by row, or column by column, would read all of one operand again for
  each row or column of tiles. `row_tiles` may be traced.

  Worked example, three row tiles, two column tiles, bands of two: tiles 0 to 5 are (0, 0), (1, 0),
  (0, 1), (1, 1), (2, 0), (2, 1).
  """
  per_band = band * col_tiles
  first = lax.div(tile, jnp.int32(per_band)) * band
  width = jnp.clip(row_tiles - first, 1, band)  # at least 1, to divide by if there is no tile
  inside = lax.rem(tile, jnp.int32(per_band))
  return first + lax.rem(inside, width), lax.div(inside, width)


def paired_tiles(tiling: Tiling, row_tiles: Any, col_tiles: int) -> Any:
  """How many tiles there are, or pairs if the tiling has pairs; `row_tiles` may be traced."""
  if tiling.pair == "rows":
    return lax.div(row_tiles + 1, jnp.int32(2)) * col_tiles
  if tiling.pair == "cols":
    assert col_tiles % 2 == 0, (tiling, col_tiles)
    return row_tiles * (col_tiles // 2)
  return row_tiles * col_tiles


def paired(tile: Any, tiling: Tiling, row_tiles: Any, col_tiles: int) -> tuple[Any, Any, Any]:
  """Number of a tile or pair -> this CTA's row tile and column tile, and the other CTA's row tile.

  Tiles, or pairs, are in the order of `banded`. With pairs of "rows" and an odd number of row
  tiles, both CTAs of a column tile's last pair compute and store the last row tile.

  Returns:
    This CTA's row tile and column tile, and the row tile of the pair's other CTA (without pairs
    of "rows", this CTA's again).
  """
  if tiling.pair == "rows":
    band = max(tiling.band // 2, 1)
    pair, col_tile = banded(tile, lax.div(row_tiles + 1, jnp.int32(2)), col_tiles, band)
    rank = lax.axis_index(PAIR)
    end = jnp.maximum(row_tiles - 1, 0)
    row_tile, other = (jnp.minimum(2 * pair + r, end) for r in (rank, 1 - rank))
    return row_tile, col_tile, other
  if tiling.pair == "cols":
    row_tile, pair = banded(tile, row_tiles, col_tiles // 2, tiling.band)
    return row_tile, 2 * pair + lax.axis_index(PAIR), row_tile
  row_tile, col_tile = banded(tile, row_tiles, col_tiles, tiling.band)
  return row_tile, col_tile, row_tile


def locate_rows(
  tile: Any, tiling: Tiling, group_gmem: Any, row_tiles: Any, col_tiles: int, halves: int = 1
) -> tuple[Any, Any, Any, Any]:
  """Tile or pair number -> row tile, column tile, group, and whether the pair shares rhs.

  The last of these is None if the tiling has no pairs of "rows". It is also None if a pair's two
  row tiles are the halves of one tile of the layout, and so always share rhs.

  Args:
    tile: number of the tile or pair.
    tiling: the launch's tile shape.
    group_gmem: group of each tile of the layout.
    row_tiles, col_tiles: how many there are.
    halves: row tiles (`tiling.rows`) in a tile of the layout.
  """
  row_tile, col_tile, other = paired(tile, tiling, row_tiles, col_tiles)
  if halves > 1:
    return row_tile, col_tile, group_gmem[lax.div(row_tile, jnp.int32(halves))], None
  group = group_gmem[row_tile]
  # The two row tiles of a pair may lie on both sides of a group's end.
  shared = group == group_gmem[other] if tiling.pair == "rows" else None
  return row_tile, col_tile, group, shared


def snake(tile: Any, num_tiles: int, workers: int) -> Any:
  """Tile number -> tile number, with every other full wave of `workers` tiles backwards.

  If tiles are in order of falling work, the worker with the longest tile of a wave then has the
  shortest tile of the next full wave. Eight tiles and three workers: 0 1 2, 5 4 3, 6 7.
  """
  wave, place = lax.div(tile, jnp.int32(workers)), lax.rem(tile, jnp.int32(workers))
  backwards = (lax.rem(wave, jnp.int32(2)) == 1) & ((wave + 1) * workers <= num_tiles)
  return jnp.where(backwards, wave * workers + (workers - 1 - place), tile)
