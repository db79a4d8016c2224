"""Grouped matrix products with gradients, on whichever backend the device has.

M  rows      K  contracted width      N  output width      G  groups
D  model width      F  expert width      R  rows of the padded layout
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.kernels.grouped_matmul import reference, xla
from scmoe.kernels.grouped_matmul.backend import implementation, resolve_backend
from scmoe.kernels.grouped_matmul.ffn import (
  FFNConfig,
  FFNWeights,
  check_ffn,
  ffn_backward,
  ffn_forward,
)
from scmoe.kernels.grouped_matmul.layout import (
  KERNEL_ROW_TILE,
  GroupLayout,
  inverse_places,
  make_layout,
  padded_rows_of,
  row_groups,
  source_rows_of,
  take_rows,
  unpad_rows,
)


@dataclasses.dataclass(frozen=True)
class _MatmulConfig:
  backend: str
  out_dtype: str
  precision: str | None
  num_sms: int | None


def grouped_matmul(
  lhs_MK: jax.Array,
  rhs_GKN: jax.Array,
  group_sizes_G: jax.Array,
  *,
  bias_GN: jax.Array | None = None,
  preferred_element_type=None,
  precision: str | None = None,
  backend: str = "auto",
  num_sms: int | None = None,
) -> jax.Array:
  """Ragged matrix product: each group of rows times its own matrix.

  The counterpart of `jax.lax.ragged_dot(lhs, rhs, group_sizes)`, with the same arguments and
  result, at a cost that does not grow with the number of groups, in the forward and in both
  gradients.

  Args:
    lhs_MK: rows, sorted by group: the first `group_sizes[0]` belong to group 0, and so on.
    rhs_GKN: one matrix for each group.
    group_sizes_G: integers of any size, zero included; their sum is at most M.
    bias_GN: added to the rows of each group, if given.
    preferred_element_type: type of the result; by default the common type of lhs and rhs.
      Products are accumulated in float32 whatever it is (float64 for float64 operands).
    precision: for float32 operands, as in `jax.lax.dot_general`; by default "highest", which is
      exact float32. "default" lets the device use tf32.
    backend: "auto" (kernels on Hopper, XLA elsewhere), "mosaic_gpu", "xla" or "reference".
    num_sms: how many multiprocessors the kernels may use; by default all of them. Leave some to a
      collective that runs at the same time.

  Returns:
    out_MN. Rows past the sum of the group sizes are zero and receive a zero gradient; the matrix
    and the bias of an empty group receive exactly zero gradients.

  Raises:
    ValueError: shapes disagree, or `backend` is unknown or cannot take the operands.
  """
  _check_matmul(lhs_MK, rhs_GKN, group_sizes_G, bias_GN)
  out_dtype = preferred_element_type or jnp.promote_types(lhs_MK.dtype, rhs_GKN.dtype)
  common = jnp.promote_types(lhs_MK.dtype, rhs_GKN.dtype)
  config = _MatmulConfig(
    backend=resolve_backend(backend, common, rhs_GKN.shape[1], rhs_GKN.shape[2]),
    out_dtype=jnp.dtype(out_dtype).name,
    precision=precision or "highest",
    num_sms=num_sms,
  )
  if config.backend == "reference":
    out_MN = reference.grouped_matmul_reference(lhs_MK, rhs_GKN, group_sizes_G, bias_GN)
    return out_MN.astype(out_dtype)
  return _grouped_matmul(
    lhs_MK.astype(common), rhs_GKN.astype(common), bias_GN, group_sizes_G, config
  )


def _check_matmul(lhs_MK, rhs_GKN, group_sizes_G, bias_GN) -> None:
  if lhs_MK.ndim != 2 or rhs_GKN.ndim != 3:
    raise ValueError(
      f"lhs must be [M, K] and rhs [G, K, N], got shapes {lhs_MK.shape} and {rhs_GKN.shape}"
    )
  if lhs_MK.shape[1] != rhs_GKN.shape[1]:
    raise ValueError(
      f"lhs has K={lhs_MK.shape[1]} but rhs has K={rhs_GKN.shape[1]}: they must agree"
    )
  if group_sizes_G.shape != rhs_GKN.shape[:1]:
    raise ValueError(
      f"group_sizes has shape {group_sizes_G.shape} but rhs has {rhs_GKN.shape[0]} groups: expected"
      f" ({rhs_GKN.shape[0]},)"
    )
  if not jnp.issubdtype(group_sizes_G.dtype, jnp.integer):
    raise ValueError(f"group_sizes must be integers, got {group_sizes_G.dtype}")
  if bias_GN is not None and bias_GN.shape != (rhs_GKN.shape[0], rhs_GKN.shape[2]):
    raise ValueError(
      f"bias has shape {bias_GN.shape} but rhs has shape {rhs_GKN.shape}: expected"
      f" {(rhs_GKN.shape[0], rhs_GKN.shape[2])}"
    )


def _layout_for(backend: str, group_sizes_G: jax.Array, num_rows: int) -> GroupLayout:
  num_groups = group_sizes_G.shape[0]
  tile = KERNEL_ROW_TILE if backend == "mosaic_gpu" else xla.choose_tile(num_rows, num_groups)
  return make_layout(group_sizes_G, num_rows, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped_matmul(lhs_MK, rhs_GKN, bias_GN, group_sizes_G, config):
  return _grouped_matmul_fwd(lhs_MK, rhs_GKN, bias_GN, group_sizes_G, config)[0]


def _grouped_matmul_fwd(lhs_MK, rhs_GKN, bias_GN, group_sizes_G, config):
  num_rows = lhs_MK.shape[0]
  layout = _layout_for(config.backend, group_sizes_G, num_rows)
  out_RN = implementation(config.backend).grouped_rows(
    lhs_MK,
    rhs_GKN,
    layout,
    index_R=source_rows_of(layout),
    out_dtype=config.out_dtype,
    precision=config.precision,
    num_sms=config.num_sms,
  )
  out_MN = unpad_rows(out_RN, layout, num_rows)
  if bias_GN is not None:
    bias_MN = take_rows(bias_GN, row_groups(group_sizes_G, num_rows))
    out_MN = (out_MN + bias_MN).astype(config.out_dtype)
  return out_MN, (lhs_MK, rhs_GKN, bias_GN, group_sizes_G)


def _grouped_matmul_bwd(config, residuals, dout_MN):
  lhs_MK, rhs_GKN, bias_GN, group_sizes_G = residuals
  num_rows = lhs_MK.shape[0]
  layout = _layout_for(config.backend, group_sizes_G, num_rows)
  ops = implementation(config.backend)
  options = {"precision": config.precision, "num_sms": config.num_sms}
  # Padded once and used twice; zero padding is what lets the weight gradient ignore group edges.
  # The operands of a product share one type, which may be narrower than dout's.
  index_R = source_rows_of(layout)
  dout_RN = take_rows(dout_MN.astype(lhs_MK.dtype), index_R)
  dlhs_RK = ops.grouped_rows(
    dout_RN, rhs_GKN, layout, transpose_rhs=True, out_dtype=lhs_MK.dtype, **options
  )
  drhs_GKN = ops.grouped_weights(
    lhs_MK, dout_RN, layout, lhs_index_R=index_R, out_dtype=rhs_GKN.dtype, **options
  )
  dbias_GN = None
  if bias_GN is not None:
    dbias_GN = xla.group_sums(take_rows(dout_MN, index_R), layout).astype(bias_GN.dtype)
  dlhs_MK = unpad_rows(dlhs_RK, layout, num_rows)
  return dlhs_MK, drhs_GKN, dbias_GN, _no_gradient(group_sizes_G)


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def _no_gradient(x: jax.Array):
  """The cotangent of an integer array."""
  return np.zeros(x.shape, jax.dtypes.float0)


def grouped_outer(
  lhs_MK: jax.Array,
  rhs_MN: jax.Array,
  group_sizes_G: jax.Array,
  *,
  preferred_element_type=None,
  precision: str | None = None,
  backend: str = "auto",
  num_sms: int | None = None,
) -> jax.Array:
  """out[g] = lhs[rows of g].T @ rhs[rows of g]: the form of a weight gradient, differentiable.

  Args:
    lhs_MK: rows sorted by group, as in `grouped_matmul`.
    rhs_MN: rows in the same order.
    group_sizes_G: integers; their sum is at most M.
    preferred_element_type: type of the result; by default the common type of lhs and rhs.
    precision: as in `grouped_matmul`.
    backend: as in `grouped_matmul`; "reference" is plain XLA here.
    num_sms: as in `grouped_matmul`.

  Returns:
    out_GKN, exactly zero for empty groups. Rows past the sum of the sizes are not read.

  Raises:
    ValueError: the row counts disagree, or `backend` does not fit.
  """
  if lhs_MK.ndim != 2 or rhs_MN.ndim != 2 or lhs_MK.shape[0] != rhs_MN.shape[0]:
    raise ValueError(
      f"lhs must be [M, K] and rhs [M, N] with the same M, got {lhs_MK.shape} and {rhs_MN.shape}"
    )
  common = jnp.promote_types(lhs_MK.dtype, rhs_MN.dtype)
  resolved = resolve_backend(backend, common, lhs_MK.shape[1], rhs_MN.shape[1])
  config = _MatmulConfig(
    backend="xla" if resolved == "reference" else resolved,
    out_dtype=jnp.dtype(preferred_element_type or common).name,
    precision=precision or "highest",
    num_sms=num_sms,
  )
  return _grouped_outer(lhs_MK.astype(common), rhs_MN.astype(common), group_sizes_G, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_outer(lhs_MK, rhs_MN, group_sizes_G, config):
  return _grouped_outer_fwd(lhs_MK, rhs_MN, group_sizes_G, config)[0]


def _grouped_outer_fwd(lhs_MK, rhs_MN, group_sizes_G, config):
  layout = _layout_for(config.backend, group_sizes_G, lhs_MK.shape[0])
  index_R = source_rows_of(layout)
  out_GKN = implementation(config.backend).grouped_weights(
    lhs_MK,
    take_rows(rhs_MN, index_R),
    layout,
    lhs_index_R=index_R,
    out_dtype=config.out_dtype,
    precision=config.precision,
    num_sms=config.num_sms,
  )
  return out_GKN, (lhs_MK, rhs_MN, group_sizes_G)


def _grouped_outer_bwd(config, residuals, dout_GKN):
  lhs_MK, rhs_MN, group_sizes_G = residuals
  options = {"precision": config.precision, "backend": config.backend, "num_sms": config.num_sms}
  dout_GKN = dout_GKN.astype(lhs_MK.dtype)
  dlhs_MK = grouped_matmul(rhs_MN, jnp.swapaxes(dout_GKN, 1, 2), group_sizes_G, **options)
  drhs_MN = grouped_matmul(lhs_MK, dout_GKN, group_sizes_G, **options)
  return dlhs_MK, drhs_MN, _no_gradient(group_sizes_G)


_grouped_outer.defvjp(_grouped_outer_fwd, _grouped_outer_bwd)


def grouped_ffn(
  rows_MD: jax.Array,
  gate_GDF: jax.Array | None,
  up_GDF: jax.Array,
  down_GFD: jax.Array,
  group_sizes_G: jax.Array,
  *,
  activation: str = "swiglu",
  row_weight_M: jax.Array | None = None,
  place_M: jax.Array | None = None,
  gate_bias_GF: jax.Array | None = None,
  up_bias_GF: jax.Array | None = None,
  down_bias_GD: jax.Array | None = None,
  precision: str | None = None,
  backend: str = "auto",
  num_sms: int | None = None,
) -> jax.Array:
  """Rows through their experts: up (and gate), activation, down.

      out[m] = row_weight[m] * (act(rows[m] @ gate[g]) * (rows[m] @ up[g])) @ down[g]

  for gated activations, without the gate's factor and with act(rows @ up) otherwise; g is the group
  of row m and each product may have a bias. On the kernels, the activation runs in the epilogue of
  the up-projection and its derivative in the epilogue of the down-projection's gradient. The rows
  and the pre-activations are kept for the backward, and nothing else.

  Args:
    rows_MD: rows sorted by group, as in `grouped_matmul`, or in any order with `place_M`.
    gate_GDF: gate weights, or None if the activation is not gated.
    up_GDF: up weights.
    down_GFD: down weights.
    group_sizes_G: rows of each group; their sum is at most M.
    activation: one of `activation_names()`.
    row_weight_M: scales the output rows (the router's weights); one by default.
    place_M: int32, where each row stands once they are sorted by group; M for a row of no group.
      Rows are then gathered where a sorted copy would be, and the result keeps their order.
    gate_bias_GF: optional bias.
    up_bias_GF: optional bias.
    down_bias_GD: optional bias.
    precision: as in `grouped_matmul`.
    backend: as in `grouped_matmul`.
    num_sms: as in `grouped_matmul`.

  Returns:
    out_MD in the type of `rows`; rows of no group are zero and receive a zero gradient.

  Raises:
    ValueError: shapes disagree, or the activation or the backend is unknown or does not fit.
  """
  dtype = rows_MD.dtype
  weights = FFNWeights(gate_GDF, up_GDF, down_GFD, gate_bias_GF, up_bias_GF, down_bias_GD)
  check_ffn(rows_MD, weights, group_sizes_G.shape[0], activation)
  resolved = resolve_backend(backend, dtype, *up_GDF.shape[1:])
  for name, given in (("row_weight", row_weight_M), ("place", place_M)):
    if given is not None and given.shape != rows_MD.shape[:1]:
      raise ValueError(
        f"{name} has shape {given.shape} but there are {rows_MD.shape[0]} rows: expected"
        f" {rows_MD.shape[:1]}"
      )
  if resolved == "reference":
    if place_M is not None:
      order_M = inverse_places(place_M, rows_MD.shape[0])
      rows_MD = take_rows(rows_MD, order_M)
      row_weight_M = None if row_weight_M is None else take_rows(row_weight_M, order_M)
    out_MD = reference.grouped_ffn_reference(
      rows_MD,
      gate_GDF,
      up_GDF,
      down_GFD,
      group_sizes_G,
      activation=activation,
      row_weight_M=row_weight_M,
      gate_bias_GF=gate_bias_GF,
      up_bias_GF=up_bias_GF,
      down_bias_GD=down_bias_GD,
    )
    out_MD = out_MD if place_M is None else take_rows(out_MD, place_M)
    return out_MD.astype(dtype)
  config = FFNConfig(activation, resolved, precision or "highest", num_sms)
  weights = cast_weights(weights, dtype)
  return _grouped_ffn(rows_MD, weights, row_weight_M, group_sizes_G, place_M, config)


def cast_weights(weights: FFNWeights, dtype) -> FFNWeights:
  """Matrices in the type of the rows; biases as they are, since they are added in float32."""
  cast = lambda w: None if w is None else w.astype(dtype)
  return dataclasses.replace(
    weights,
    gate_GDF=cast(weights.gate_GDF),
    up_GDF=cast(weights.up_GDF),
    down_GFD=cast(weights.down_GFD),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _grouped_ffn(rows_MD, weights, row_weight_M, group_sizes_G, place_M, config):
  return _grouped_ffn_fwd(rows_MD, weights, row_weight_M, group_sizes_G, place_M, config)[0]


def _ffn_plan(group_sizes_G, place_M, num_rows: int, backend: str):
  """The layout, the row behind each of its rows (-1: padding), and where each row is in it (R)."""
  layout = _layout_for(backend, group_sizes_G, num_rows)
  position_M = padded_rows_of(layout, num_rows)
  if place_M is None:
    return layout, source_rows_of(layout), position_M
  nowhere = layout.num_rows
  position_M = position_M.at[place_M].get(mode="fill", fill_value=nowhere)
  return layout, inverse_places(position_M, nowhere), position_M


def _grouped_ffn_fwd(rows_MD, weights, row_weight_M, group_sizes_G, place_M, config):
  layout, index_R, position_M = _ffn_plan(group_sizes_G, place_M, len(rows_MD), config.backend)
  y_RD, pre = ffn_forward(rows_MD, index_R, weights, layout, config)
  out_MD = take_rows(y_RD, position_M)
  if row_weight_M is not None:
    out_MD = (out_MD * row_weight_M[:, None]).astype(rows_MD.dtype)
  return out_MD, (rows_MD, weights, row_weight_M, group_sizes_G, place_M, pre)


def _grouped_ffn_bwd(config, residuals, dout_MD):
  rows_MD, weights, row_weight_M, group_sizes_G, place_M, pre = residuals
  layout, index_R, position_M = _ffn_plan(group_sizes_G, place_M, len(rows_MD), config.backend)
  if row_weight_M is None:
    row_weight_R = (index_R >= 0).astype(xla.accumulation_type(rows_MD.dtype))
  else:
    row_weight_R = take_rows(row_weight_M.astype(xla.accumulation_type(rows_MD.dtype)), index_R)
  dx_RD, gradients, ds_R = ffn_backward(
    rows_MD, index_R, dout_MD, row_weight_R, pre, weights, layout, config
  )
  drows_MD = take_rows(dx_RD, position_M)
  dweight_M = None
  if row_weight_M is not None:
    dweight_M = take_rows(ds_R, position_M).astype(row_weight_M.dtype)
  dplace_M = None if place_M is None else _no_gradient(place_M)
  return drows_MD, gradients, dweight_M, _no_gradient(group_sizes_G), dplace_M


_grouped_ffn.defvjp(_grouped_ffn_fwd, _grouped_ffn_bwd)
