"""Grouped products on any device: one dense product per row tile, by XLA.

    R  rows of the padded layout      K, N  widths      G  groups      I  row tiles

The cost follows the rows (at most one part-filled tile per group), unlike the masked dense
expansion behind `jax.lax.ragged_dot`, whose cost is multiplied by G. Tiles run one after the
other, so the tile must be large enough to fill the device, and small enough to waste little memory:
`choose_tile`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels.grouped_matmul.activations import Activation, activate, activation_vjp
from scmoe.kernels.grouped_matmul.layout import GroupLayout, take_rows


def choose_tile(num_rows: int, num_groups: int) -> int:
  """Rows of a tile: a sixteenth of a balanced group, but of small groups up to a quarter.

  The layout has room for a part-filled tile of every group, so this bounds what padding adds to the
  memory: 6 %, and up to 25 % where 64 rows, which a product should have, are more. A multiple of 8.
  """
  group = -(-num_rows // max(num_groups, 1))
  rows = max(group / 16, min(group / 4, 64))
  return min(max(math.ceil(rows / 8) * 8, 8), 512)


def accumulation_type(*dtypes) -> jnp.dtype:
  """float32, or float64 when an operand is."""
  result = jnp.dtype(jnp.float32)
  for dtype in dtypes:
    result = jnp.promote_types(result, dtype)
  return result


def grouped_rows(
  lhs_XK: jax.Array,
  rhs_GKN: jax.Array,
  layout: GroupLayout,
  *,
  index_R: jax.Array | None = None,
  transpose_rhs: bool = False,
  bias_GN: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """out[r] = lhs[r] @ rhs[group of r], or @ rhs[group of r].T, and + bias[group of r] if given.

  Args:
    lhs_XK: R rows, or any number of rows when `index_R` says which is read where.
    rhs_GKN: one matrix a group; [G, N, K] with `transpose_rhs`.
    layout: the tiles of R.
    index_R: row of lhs behind each row of the layout, negative for padding (reads as zero).
    transpose_rhs: contract the last dimension of rhs.
    bias_GN: added before the result is rounded.
    out_dtype: type of the result, by default the accumulation type.
    precision: as in `jax.lax.dot_general`.
    num_sms: ignored; the kernels use it.
  """
  del num_sms
  dtype = accumulation_type(lhs_XK.dtype, rhs_GKN.dtype)
  lhs_RK = lhs_XK if index_R is None else take_rows(lhs_XK, index_R)
  lhs_IBK = lhs_RK.reshape(-1, layout.tile, lhs_RK.shape[1])

  def one_tile(arguments):
    lhs_BK, group = arguments
    rhs = lax.dynamic_index_in_dim(rhs_GKN, group, keepdims=False)
    out_BN = lax.dot_general(
      lhs_BK,
      rhs,
      (((1,), (1 if transpose_rhs else 0,)), ((), ())),
      precision=precision,
      preferred_element_type=dtype,
    )
    if bias_GN is not None:
      out_BN += lax.dynamic_index_in_dim(bias_GN, group).astype(dtype)
    return out_BN.astype(out_dtype or dtype)

  out_IBN = lax.map(one_tile, (lhs_IBK, layout.tile_group_I))
  return out_IBN.reshape(lhs_RK.shape[0], out_IBN.shape[-1])


def grouped_weights(
  lhs_XK: jax.Array,
  rhs_XN: jax.Array,
  layout: GroupLayout,
  *,
  lhs_index_R: jax.Array | None = None,
  rhs_index_R: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """out[g] = lhs[rows of g].T @ rhs[rows of g]; exactly zero for an empty group.

  Padding rows must be zero in at least one operand and finite in the other. The indices are those
  of `grouped_rows`, one for each operand.
  """
  del num_sms
  dtype = accumulation_type(lhs_XK.dtype, rhs_XN.dtype)
  lhs_RK = lhs_XK if lhs_index_R is None else take_rows(lhs_XK, lhs_index_R)
  rhs_RN = rhs_XN if rhs_index_R is None else take_rows(rhs_XN, rhs_index_R)
  lhs_IBK = lhs_RK.reshape(-1, layout.tile, lhs_RK.shape[1])
  rhs_IBN = rhs_RN.reshape(-1, layout.tile, rhs_RN.shape[1])
  used_I = jnp.arange(lhs_IBK.shape[0]) < layout.num_tiles[0]

  def one_tile(total_GKN, arguments):
    lhs_BK, rhs_BN, group, used = arguments
    product_KN = lax.dot_general(
      lhs_BK, rhs_BN, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=dtype
    )
    # A tile that is not in use must add nothing, whatever lies in it.
    product_KN = jnp.where(used, product_KN, 0)
    old_KN = lax.dynamic_index_in_dim(total_GKN, group, keepdims=False)
    return lax.dynamic_update_index_in_dim(total_GKN, old_KN + product_KN, group, 0), None

  zeros = jnp.zeros((layout.num_groups, lhs_RK.shape[1], rhs_RN.shape[1]), dtype)
  total_GKN, _ = lax.scan(one_tile, zeros, (lhs_IBK, rhs_IBN, layout.tile_group_I, used_I))
  return total_GKN.astype(out_dtype or dtype)


def up_activate(
  x_XD: jax.Array,
  up_weights: tuple[jax.Array, ...],
  biases: tuple[jax.Array | None, ...],
  layout: GroupLayout,
  activation: Activation,
  *,
  index_R: jax.Array | None = None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Pre-activations and activation of every row: the first half of the expert.

  Args:
    x_XD: rows, read through `index_R` if that is given.
    up_weights: (gate_GDF, up_GDF) for gated activations, (up_GDF,) otherwise.
    biases: as many [G, F] biases, or None in their place.
    layout: the tiles of R.
    activation: the kind.
    index_R: as in `grouped_rows`.
    precision: as in `jax.lax.dot_general`.
    num_sms: ignored; the kernels use it.

  Returns:
    The pre-activations [R, F], in the order of the weights, and a_RF, in the type of x.
  """
  x_RD = x_XD if index_R is None else take_rows(x_XD, index_R)
  pre = []
  for weight_GDF, bias_GF in zip(up_weights, biases):
    h_RF = grouped_rows(x_RD, weight_GDF, layout, precision=precision)
    if bias_GF is not None:
      h_RF = h_RF + per_row(bias_GF, layout).astype(h_RF.dtype)
    # Rounded before the activation, so that the backward recomputes the same value.
    pre.append(h_RF.astype(x_XD.dtype))
  return tuple(pre), activate(activation, tuple(pre)).astype(x_XD.dtype)


def down_backward(
  dy_XD: jax.Array,
  down_GFD: jax.Array,
  pre: tuple[jax.Array, ...],
  row_weight_R: jax.Array,
  layout: GroupLayout,
  activation: Activation,
  *,
  index_R: jax.Array | None = None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
  """From the gradient of y = s * (a @ down) to that of the pre-activations.

  With da' = dy @ down.T: the router weight's gradient is ds = <da', a>, so neither y nor a is kept
  (SonicMoE, arXiv 2512.14080); a is recomputed from `pre`.

  Returns:
    s * a, for the gradient of the down weights; the gradients of `pre`; ds_R in float32.
  """
  da_RF = grouped_rows(
    dy_XD, down_GFD, layout, index_R=index_R, transpose_rhs=True, precision=precision
  )
  weight_R1 = row_weight_R.astype(da_RF.dtype)[:, None]
  a_RF, dpre = activation_vjp(activation, pre, da_RF * weight_R1)
  dtype = pre[0].dtype
  ds_R = jnp.sum(da_RF * a_RF, axis=1)
  return (a_RF * weight_R1).astype(dtype), tuple(d.astype(dtype) for d in dpre), ds_R


def per_row(bias_GN: jax.Array, layout: GroupLayout) -> jax.Array:
  """A group's vector for each of its rows, padding included."""
  return jnp.repeat(bias_GN[layout.tile_group_I], layout.tile, axis=0)


def group_sums(x_RN: jax.Array, layout: GroupLayout) -> jax.Array:
  """Sum of each group's rows (padding must be zero), in the accumulation type."""
  dtype = accumulation_type(x_RN.dtype)
  sums_IN = jnp.sum(x_RN.reshape(-1, layout.tile, x_RN.shape[1]), axis=1, dtype=dtype)
  used_I1 = (jnp.arange(sums_IN.shape[0]) < layout.num_tiles[0])[:, None]
  sums_IN = jnp.where(used_I1, sums_IN, 0)
  ordered = layout.runs == 1
  return jax.ops.segment_sum(
    sums_IN, layout.tile_group_I, num_segments=layout.num_groups, indices_are_sorted=ordered
  )


def up_input_gradient(
  dpre: tuple[jax.Array, ...],
  up_weights: tuple[jax.Array, ...],
  layout: GroupLayout,
  *,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """dx_RD = Σ dpre @ weight.T over the gate and up projections, one rounding at the end."""
  del num_sms
  products = [
    grouped_rows(d_RF, weight_GDF, layout, transpose_rhs=True, precision=precision)
    for d_RF, weight_GDF in zip(dpre, up_weights)
  ]
  return sum(products[1:], products[0]).astype(out_dtype or products[0].dtype)


def up_weight_gradients(
  x_XD: jax.Array,
  dpre: tuple[jax.Array, ...],
  layout: GroupLayout,
  *,
  index_R: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
  """x.T @ dpre for the gate and up projections; the rows of x are read through `index_R`."""
  del num_sms
  x_RD = x_XD if index_R is None else take_rows(x_XD, index_R)
  return tuple(
    grouped_weights(x_RD, d_RF, layout, out_dtype=out_dtype, precision=precision) for d_RF in dpre
  )
