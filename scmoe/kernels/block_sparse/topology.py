"""Which blocks of a block-sparse matrix exist, and how to walk them by rows and by columns.

    rows, cols  of the matrix, multiples of `block`      Z  blocks that are there

The hybrid blocked CSR-COO form of MegaBlocks (arXiv 2211.15841): row offsets as in CSR, the row of
each block as in COO, and transpose indices, so that a product with the transposed matrix reads the
same values through a permutation and never moves them.
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
  """Positions of Z blocks.

  Attributes:
    row_indices: int32 [Z], block row of each block; blocks are ordered by row.
    column_indices: int32 [Z], block column.
    offsets: int32 [rows / block + 1], first block of each block row.
    column_indices_t: int32 [Z], block row of each block, in column order.
    offsets_t: int32 [cols / block + 1], first block of each block column, in column order.
    block_offsets_t: int32 [Z], number of each block in column order.
    layout: the expert layout this topology came from, or None; products then run on the grouped
      kernels.
    rows: of the matrix.
    cols: of the matrix.
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
    """Z."""
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
  """The topology whose blocks are where the mask [block rows, block columns] is true.

  Raises:
    ValueError: the mask is not a matrix.
  """
  mask = np.asarray(mask, bool)
  if mask.ndim != 2:
    raise ValueError(f"a mask must be [block rows, block columns], got shape {mask.shape}")
  row, column = (jnp.asarray(i, jnp.int32) for i in np.nonzero(mask))
  return _complete(row, column, mask.shape[0] * block, mask.shape[1] * block, block, None)


def moe_topology(layout: GroupLayout, hidden: int) -> Topology:
  """The topology of all experts' hidden activations, [R, E·F].

  Each row block belongs to one expert e and has the F / block consecutive blocks from column
  e·F / block. Row blocks past the used ones repeat the last expert and hold zeros: the number of
  blocks is static, so nothing waits for the host.

  Worked example: five rows of three experts, 3, 0 and 2 of them, blocks of two, F = 4. Row blocks
  0 and 1 are of expert 0, row block 2 of expert 2, and row block 3 is not in use: their columns are
  0 1, 0 1, 4 5 and 4 5.

  Args:
    layout: tiles of the rows; the tile is the block.
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
