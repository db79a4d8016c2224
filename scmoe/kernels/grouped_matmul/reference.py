"""Specifies grouped products and the experts' network: plain, slow, float32 or wider.

    M  rows      K  contracted width      N  output width      G  groups
    In the network: K  copies of a row      D  model width      F  expert width

Every expert computes every row, so that the code can be read. The kernels and XLA are tested
against it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels.grouped_matmul.activations import activate, get_activation
from scmoe.kernels.grouped_matmul.layout import RowLayout, row_groups
from scmoe.kernels.grouped_matmul.weights import FFNWeights


def grouped_matmul_reference(
  lhs_MK: jax.Array,
  rhs_GKN: jax.Array,
  group_sizes_G: jax.Array,
  bias_GN: jax.Array | None = None,
) -> jax.Array:
  """out[m] = lhs[m] @ rhs[group of m] (+ bias[group of m]); zero for rows of no group.

  Differentiable by plain autodiff. The result has the accumulation type (float32 or float64).
  """
  dtype = jnp.promote_types(jnp.promote_types(lhs_MK.dtype, rhs_GKN.dtype), jnp.float32)
  group_M = row_groups(group_sizes_G, lhs_MK.shape[0])
  out_MN = jnp.zeros((lhs_MK.shape[0], rhs_GKN.shape[2]), dtype)
  for g in range(rhs_GKN.shape[0]):
    product_MN = jnp.dot(
      lhs_MK.astype(dtype), rhs_GKN[g].astype(dtype), precision=lax.Precision.HIGHEST
    )
    if bias_GN is not None:
      product_MN += bias_GN[g].astype(dtype)
    out_MN = jnp.where((group_M == g)[:, None], product_MN, out_MN)
  return out_MN


def expert_ffn_reference(
  rows: jax.Array, weights: FFNWeights, layout: RowLayout, activation: str
) -> jax.Array:
  """`expert_ffn` without fp8, with rows, weights and result in float32 or wider.

  Every expert computes every row. A copy then picks the result of its own expert, and a row's
  copies are added up, weighted if the layout has weights.
  """
  kind = get_activation(activation)
  wide = lambda a: a.astype(jnp.promote_types(rows.dtype, jnp.float32))
  rows_MD = wide(rows.reshape(-1, rows.shape[-1]))

  def product(equation, x, weight, bias):
    y = jnp.einsum(equation, x, wide(weight), precision=lax.Precision.HIGHEST)
    return y if bias is None else y + wide(bias)

  pairs = zip(weights.up_weights, weights.up_biases)
  pre = tuple(product("md,gdf->mgf", rows_MD, *pair) for pair in pairs)
  down = weights.down_GFD, weights.down_bias_GD
  y_MGD = product("mgf,gfd->mgd", activate(kind, pre), *down)
  _, group_MK, _ = layout.places()
  y_MG1D = jnp.pad(y_MGD, ((0, 0), (0, 1), (0, 0)))  # group G, of copies without an expert
  y_MKD = jnp.take_along_axis(y_MG1D, group_MK[:, :, None], axis=1)
  if layout.weight_MK is not None:
    y_MKD = y_MKD * wide(layout.weight_MK)[:, :, None]
  return y_MKD.sum(1).reshape(*rows.shape[:-1], y_MKD.shape[-1])
