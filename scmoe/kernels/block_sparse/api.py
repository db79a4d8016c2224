"""Block-sparse products: SDD, DSD and DDS.

The three letters say whether output, left and right operand are Sparse or Dense: SDD is a sparse
output of two dense operands.

    Z  blocks      B  side of a block      M x N = (M x K) · (K x N)

The activations of all experts form a block-sparse matrix [rows, all experts' hidden units], in
which a row has only its own expert's blocks. `grouped_matmul` and `grouped_outer` compute products
of topologies made by `moe_topology`; XLA's gathers, dense products and sums compute those of all
other topologies. The products take block rows of `moe_topology` that are not in use as zero. All
three products are differentiable.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scmoe.kernels.block_sparse.topology import Topology
from scmoe.kernels.grouped_matmul.matmul import grouped_matmul, grouped_outer
from scmoe.kernels.grouped_matmul.xla import accumulation_type


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["data", "topology"],
  meta_fields=["transposed"],
)
@dataclasses.dataclass(frozen=True)
class BlockSparse:
  """A block-sparse matrix: the blocks' values, [blocks, side, side], and their positions.

  Transposing flips the flag `transposed` and moves no values: data and topology stay those of the
  untransposed matrix.
  """

  data: jax.Array
  topology: Topology
  transposed: bool = False

  @property
  def shape(self) -> tuple[int, int]:
    """(rows, columns), after the transposition."""
    rows, cols = self.topology.rows, self.topology.cols
    return (cols, rows) if self.transposed else (rows, cols)

  @property
  def T(self) -> "BlockSparse":
    """The transposed matrix, with the same arrays."""
    return dataclasses.replace(self, transposed=not self.transposed)


def to_dense(sparse: BlockSparse) -> jax.Array:
  """The dense matrix, with zeros where there is no block."""
  t = sparse.topology
  blocks = jnp.zeros((t.rows // t.block, t.cols // t.block, t.block, t.block), sparse.data.dtype)
  blocks = blocks.at[t.row_indices, t.column_indices].set(sparse.data)
  dense = blocks.transpose(0, 2, 1, 3).reshape(t.rows, t.cols)
  return dense.T if sparse.transposed else dense


def from_dense(dense_MN: jax.Array, topology: Topology) -> BlockSparse:
  """The topology's blocks of a dense matrix; all other values are dropped.

  Raises:
    ValueError: the matrix does not have the topology's shape.
  """
  t = topology
  if dense_MN.shape != (t.rows, t.cols):
    raise ValueError(
      f"the matrix has shape {dense_MN.shape} but the topology {(t.rows, t.cols)}: they must agree"
    )
  blocks = dense_MN.reshape(t.rows // t.block, t.block, t.cols // t.block, t.block)
  return BlockSparse(blocks.transpose(0, 2, 1, 3)[t.row_indices, t.column_indices], t)


def _check_inner(name: str, left: int, right: int) -> None:
  if left != right:
    raise ValueError(f"{name}: the contracted sizes are {left} and {right}: they must agree")


def sdd(
  lhs_MK: jax.Array, rhs_KN: jax.Array, topology: Topology, *, backend: str = "auto"
) -> BlockSparse:
  """The topology's blocks of lhs @ rhs, as a `BlockSparse`.

  No other block is computed, except by the backend "reference". For a topology of `moe_topology`,
  blocks in block rows that are not in use are zero.

  Args:
    lhs_MK, rhs_KN: dense matrices; [M, N] is the topology's shape.
    topology: which blocks to compute.
    backend: as in `grouped_matmul`, for topologies of `moe_topology`; ignored for others.

  Raises:
    ValueError: the shapes disagree with each other or with the topology; or, for a topology of
      `moe_topology`, the backend is unknown or cannot take the operands.
  """
  _check_inner("sdd", lhs_MK.shape[1], rhs_KN.shape[0])
  t = topology
  if (lhs_MK.shape[0], rhs_KN.shape[1]) != (t.rows, t.cols):
    raise ValueError(
      f"sdd: the product has shape {(lhs_MK.shape[0], rhs_KN.shape[1])} but the topology"
      f" {(t.rows, t.cols)}: they must agree"
    )
  if t.layout is not None:
    weights_GKN = _split_columns(rhs_KN, t.layout.num_groups)
    rows_RF = grouped_matmul(lhs_MK, weights_GKN, _padded_sizes(t), backend=backend)
    return BlockSparse(_rows_to_blocks(rows_RF, t), t)
  k = lhs_MK.shape[1]
  lhs = lhs_MK.reshape(-1, t.block, k)[t.row_indices]
  rhs = rhs_KN.reshape(k, -1, t.block).transpose(1, 0, 2)[t.column_indices]
  wide = accumulation_type(lhs.dtype, rhs.dtype)
  product = jnp.einsum(
    "zik,zkj->zij", lhs, rhs, preferred_element_type=wide, precision=lax.Precision.HIGHEST
  )
  return BlockSparse(product.astype(jnp.promote_types(lhs.dtype, rhs.dtype)), t)


def dsd(sparse: BlockSparse, rhs_KN: jax.Array, *, backend: str = "auto") -> jax.Array:
  """sparse @ rhs, a dense [M, N].

  Args:
    sparse: [M, K], transposed or not.
    rhs_KN: a dense matrix.
    backend: as in `grouped_matmul`, or in `grouped_outer` if `sparse` is transposed, for topologies
      of `moe_topology`; ignored for others.

  Raises:
    ValueError: the contracted sizes disagree; or, for a topology of `moe_topology`, the backend is
      unknown or cannot take the operands.
  """
  _check_inner("dsd", sparse.shape[1], rhs_KN.shape[0])
  t = sparse.topology
  if t.layout is not None:
    rows_RF = _blocks_to_rows(sparse.data, t)
    groups = t.layout.num_groups
    if sparse.transposed:
      out_GFN = grouped_outer(rows_RF, rhs_KN, _padded_sizes(t), backend=backend)
      return out_GFN.reshape(t.cols, rhs_KN.shape[1])
    weights_GFN = rhs_KN.reshape(groups, -1, rhs_KN.shape[1])
    return grouped_matmul(rows_RF, weights_GFN, _padded_sizes(t), backend=backend)
  values, out_block, in_block, blocks = _oriented(sparse)
  width = rhs_KN.shape[1]
  operand = rhs_KN.reshape(rhs_KN.shape[0] // t.block, t.block, width)[in_block]
  wide = accumulation_type(values.dtype, rhs_KN.dtype)
  product = jnp.einsum(
    "zij,zjn->zin", values, operand, preferred_element_type=wide, precision=lax.Precision.HIGHEST
  )
  summed = jax.ops.segment_sum(product, out_block, num_segments=blocks)
  out = summed.reshape(blocks * t.block, width)
  return out.astype(jnp.promote_types(sparse.data.dtype, rhs_KN.dtype))


def dds(lhs_MK: jax.Array, sparse: BlockSparse, *, backend: str = "auto") -> jax.Array:
  """lhs @ sparse, a dense [M, N], as (sparse.T @ lhs.T).T.

  Args:
    lhs_MK: a dense matrix.
    sparse: [K, N], transposed or not.
    backend: as for `dsd` of `sparse.T`.

  Raises:
    ValueError: as for `dsd`.
  """
  _check_inner("dds", lhs_MK.shape[1], sparse.shape[0])
  return dsd(sparse.T, lhs_MK.T, backend=backend).T


def _oriented(sparse: BlockSparse):
  """Each block's values, block row and block column, and the number of block rows.

  Blocks are ordered by block row. If `sparse` is transposed, all four are those of the transposed
  matrix.
  """
  t = sparse.topology
  if not sparse.transposed:
    return sparse.data, t.row_indices, t.column_indices, t.rows // t.block
  order = t.block_offsets_t
  values = jnp.swapaxes(sparse.data[order], 1, 2)
  return values, t.column_indices[order], t.column_indices_t, t.cols // t.block


def _padded_sizes(topology: Topology) -> jax.Array:
  assert topology.layout is not None
  return topology.layout.tiles_G * topology.layout.tile


def _split_columns(w_KN: jax.Array, groups: int) -> jax.Array:
  return w_KN.reshape(w_KN.shape[0], groups, -1).transpose(1, 0, 2)


def _rows_to_blocks(rows_RF: jax.Array, topology: Topology) -> jax.Array:
  block = topology.block
  tiles = rows_RF.reshape(-1, block, rows_RF.shape[1] // block, block)
  return tiles.transpose(0, 2, 1, 3).reshape(-1, block, block)


def _blocks_to_rows(data: jax.Array, topology: Topology) -> jax.Array:
  block = topology.block
  tiles = data.reshape(topology.rows // block, -1, block, block)
  return tiles.transpose(0, 2, 1, 3).reshape(topology.rows, -1)


def random_mask(rows: int, cols: int, block: int, sparsity: float, seed: int) -> np.ndarray:
  """A mask [rows / block, cols / block] in which a share `sparsity`, drawn at random, is False.

  Args:
    rows, cols: sizes of the matrix.
    block: side of a block.
    sparsity: share of blocks that do not exist, rounded to whole blocks.
    seed: of the random draw.

  Raises:
    ValueError: sizes are not multiples of the block, or the sparsity is not in [0, 1].
  """
  if rows % block or cols % block or not 0 <= sparsity <= 1:
    raise ValueError(
      f"rows={rows} and cols={cols} must be multiples of block={block}, sparsity={sparsity} in"
      f" [0, 1]"
    )
  total = (rows // block) * (cols // block)
  mask = np.arange(total) < round(total * (1 - sparsity))
  np.random.default_rng(seed).shuffle(mask)
  return mask.reshape(rows // block, cols // block)
