"""Which blocks of a block-sparse matrix exist, in the order of rows and in the order of columns.

    rows, cols  sizes of the matrix, multiples of `block`      Z  blocks that exist

The format is MegaBlocks' hybrid blocked CSR-COO (arXiv 2211.15841): row offsets and the column of
each block as in CSR, the row of each block as in COO, and transpose indices. By the transpose
indices, a product with the transposed matrix reads the same values in another order, so the format
stores them once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.kernels.grouped_matmul.layout import GroupLayout


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    "row_indices",
    "column_indices",
    "offsets",
    "column_indices_t",
    "offsets_t",
    "block_offsets_t",
    "layout",
  ],
  meta_fields=["rows", "cols", "block"],
)
@dataclasses.dataclass(frozen=True)
class Topology:
  """Positions of the Z blocks of a block-sparse matrix.

  Row order sorts the blocks by block row, then by block column. Column order sorts them by block
  column, then by block row.

  Attributes:
    row_indices: int32 [Z], block row of each block, in row order.
    column_indices: int32 [Z], block column of each block, in row order.
    offsets: int32 [rows / block + 1], first block of each block row, in row order; Z at the end.
    column_indices_t: int32 [Z], block row of each block, in column order.
    offsets_t: int32 [cols / block + 1], first block of each block column, in column order; Z at the
      end.
    block_offsets_t: int32 [Z], for each block in column order its index in row order.
    layout: the experts' layout from which `moe_topology` made this topology; products are then
      grouped products. None for a topology from a mask.
    rows, cols: sizes of the matrix.
    block: side of a block.
  """

  row_indices: jax.Array
  column_indices: jax.Array
  offsets: jax.Array
  column_indices_t: jax.Array
  offsets_t: jax.Array
  block_offsets_t: jax.Array
  layout: GroupLayout | None
  rows: int
  cols: int
  block: int

  @property
  def num_blocks(self) -> int:
    """Z, the number of blocks that exist."""
    return self.column_indices.shape[0]


def _check_multiple(name: str, size: int, block: int) -> None:
  if size % block:
    raise ValueError(f"{name}={size} must be a multiple of the block {block}")


def _complete(row_indices, column_indices, rows, cols, block, layout) -> Topology:
  """Adds offsets and transpose indices to blocks that are ordered by row."""
  counts = lambda ids, n: jnp.zeros((n,), jnp.int32).at[ids].add(1)
  offsets = lambda ids, n: jnp.concatenate(
    [jnp.zeros((1,), jnp.int32), jnp.cumsum(counts(ids, n), dtype=jnp.int32)]
  )
  order = jnp.argsort(column_indices, stable=True).astype(jnp.int32)
  return Topology(
    row_indices=row_indices,
    column_indices=column_indices,
    offsets=offsets(row_indices, rows // block),
    column_indices_t=row_indices[order],
    offsets_t=offsets(column_indices, cols // block),
    block_offsets_t=order,
    layout=layout,
    rows=rows,
    cols=cols,
    block=block,
  )


def topology_from_mask(mask: np.ndarray, block: int) -> Topology:
  """The topology with a block wherever the mask [block rows, block columns] is true.

  Raises:
    ValueError: the mask is not a matrix.
  """
  mask = np.asarray(mask, bool)
  if mask.ndim != 2:
    raise ValueError(f"the mask has shape {mask.shape}; it must be [block rows, block columns]")
  row, column = (jnp.asarray(i, jnp.int32) for i in np.nonzero(mask))
  return _complete(row, column, mask.shape[0] * block, mask.shape[1] * block, block, None)


def moe_topology(layout: GroupLayout, hidden: int) -> Topology:
  """The topology of the experts' hidden activations: tiles' rows x hidden units of all experts.

  Each block row belongs to one expert g and has F / block consecutive blocks from block column
  g·F / block on. The number of blocks is static, so that the host need not wait for the routing.
  Block rows that no expert needs are padding: their blocks lie in the columns of the last expert.

  Worked example: three rows of expert 0, none of expert 1, two of expert 2; blocks of two; F = 4.
  Block rows 0 and 1 belong to expert 0, block row 2 to expert 2, and block row 3 is not in use.
  Their block columns are 0 1, 0 1, 4 5 and 4 5.

  Args:
    layout: tiles of the rows, in one run; the tile is the block.
    hidden: F, a multiple of the tile.

  Raises:
    ValueError: F is not a multiple of the tile.
  """
  block = layout.tile
  _check_multiple("hidden width F", hidden, block)
  per_row = hidden // block
  row = jnp.arange(layout.num_rows // block, dtype=jnp.int32)
  column = layout.tile_group_I[:, None] * per_row + jnp.arange(per_row, dtype=jnp.int32)
  return _complete(
    jnp.repeat(row, per_row),
    column.reshape(-1),
    layout.num_rows,
    layout.num_groups * hidden,
    block,
    layout,
  )
