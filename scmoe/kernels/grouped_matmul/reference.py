"""The specification of the grouped products: plain, slow, float32 (float64 under x64).

    M  rows      K  contracted width      N  output width      G  groups

Costs G dense products and is written to be read. Every backend is tested against it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels.grouped_matmul.activations import activate, get_activation
from scmoe.kernels.grouped_matmul.layout import row_groups


def grouped_matmul_reference(
  lhs_MK: jax.Array,
  rhs_GKN: jax.Array,
  group_sizes_G: jax.Array,
  bias_GN: jax.Array | None = None,
) -> jax.Array:
  """out[m] = lhs[m] @ rhs[group of m] + bias[group of m]; zero for rows of no group.

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


def grouped_ffn_reference(
  rows_MD: jax.Array,
  gate_GDF: jax.Array | None,
  up_GDF: jax.Array,
  down_GFD: jax.Array,
  group_sizes_G: jax.Array,
  *,
  activation: str,
  row_weight_M: jax.Array | None = None,
  gate_bias_GF: jax.Array | None = None,
  up_bias_GF: jax.Array | None = None,
  down_bias_GD: jax.Array | None = None,
) -> jax.Array:
  """rows -> up (and gate) -> activation -> down, times the row's weight; nothing is rounded."""
  kind = get_activation(activation)
  up_MF = grouped_matmul_reference(rows_MD, up_GDF, group_sizes_G, up_bias_GF)
  if kind.gated:
    assert gate_GDF is not None
    gate_MF = grouped_matmul_reference(rows_MD, gate_GDF, group_sizes_G, gate_bias_GF)
    pre = (gate_MF, up_MF)
  else:
    pre = (up_MF,)
  out_MD = grouped_matmul_reference(activate(kind, pre), down_GFD, group_sizes_G, down_bias_GD)
  if row_weight_M is not None:
    out_MD = out_MD * row_weight_M.astype(out_MD.dtype)[:, None]
  return out_MD
