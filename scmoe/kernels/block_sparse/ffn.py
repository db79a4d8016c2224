"""The experts' network as MegaBlocks' `mlp_impl=sparse` computes it, by block-sparse products.

`model.ffn.impl=block_sparse` selects it. SDD is the product of the rows with the first matrices of
all experts, side by side; it computes only the blocks of each row's own expert. A gated activation
has two such products. Biases and the activation follow. DSD multiplies these blocks by all experts'
second matrices, and the result is dense.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scmoe.kernels.block_sparse.api import BlockSparse, dsd, sdd
from scmoe.kernels.block_sparse.topology import Topology, moe_topology
from scmoe.kernels.grouped_matmul.activations import activate, get_activation
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.ffn import FFNConfig, check_ffn
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE, RowLayout
from scmoe.kernels.grouped_matmul.weights import FFNWeights
from scmoe.kernels.grouped_matmul.xla import per_row
from scmoe.kernels.permute import gather_rows, sum_rows


def block_sparse_ffn(
  rows: jax.Array, weights: FFNWeights, layout: RowLayout, config: FFNConfig = FFNConfig()
) -> jax.Array:
  """The experts' network through block-sparse products; arguments and result as in `expert_ffn`.

  The experts' activations are one matrix [rows, all experts' hidden units], in which a row has its
  own expert's blocks. This function is for comparisons: it gathers the rows first, stores the
  pre-activations as blocks, and adds biases and activates after the products. It uses the
  activation and the backend of `config`, and ignores the other fields. For hidden widths that 128
  does not divide, XLA computes the products with every backend that does not raise.

  Raises:
    ValueError: shapes disagree, or the activation or backend is unknown or does not fit.
  """
  rows_MD = rows.reshape(-1, rows.shape[-1])
  check_ffn(rows_MD, weights, layout, config.activation)
  weights = weights.cast(rows.dtype)
  groups, _, hidden = weights.up_GDF.shape
  backend = resolve_backend(config.backend, rows.dtype, *weights.widths)
  block = _block(hidden)
  if block != KERNEL_ROW_TILE:
    backend = "xla"
  tiles = layout.sorted(block)
  assert tiles.permutation is not None
  topology = moe_topology(tiles.groups, hidden)
  x_RD = gather_rows(rows_MD, tiles.permutation)
  pre = []
  for weight_GDF, bias_GF in zip(weights.up_weights, weights.up_biases):
    columns_DN = jnp.swapaxes(weight_GDF, 0, 1).reshape(weight_GDF.shape[1], -1)
    h = sdd(x_RD, columns_DN, topology, backend=backend).data
    pre.append(h if bias_GF is None else (h + _block_bias(bias_GF, topology)).astype(h.dtype))
  a = activate(get_activation(config.activation), tuple(pre)).astype(rows.dtype)
  down_ND = weights.down_GFD.reshape(groups * hidden, -1)
  y_RD = dsd(BlockSparse(a, topology), down_ND, backend=backend)
  if weights.down_bias_GD is not None:
    y_RD = (y_RD + per_row(weights.down_bias_GD, tiles.groups)).astype(rows.dtype)
  out = sum_rows(y_RD, layout.weight_MK, tiles.permutation)
  return out.reshape(*rows.shape[:-1], out.shape[-1])


def _block(hidden: int) -> int:
  """The side of a block: the largest power of 2 up to 128 that divides the hidden width."""
  side = KERNEL_ROW_TILE
  while hidden % side:
    side //= 2
  return side


def _block_bias(bias_GF: jax.Array, topology: Topology) -> jax.Array:
  """The part of the bias that belongs to each block's columns, [blocks, 1, side]."""
  parts = bias_GF.reshape(-1, topology.block)  # row n·e + c: part c of the n parts of expert e
  return parts[topology.column_indices][:, None, :]
