"""Grouped matrix products with gradients: by the kernels, by XLA, or by the reference.

M  rows      K  contracted width      N  output width      G  groups
R  rows of the padded layout
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from scmoe.kernels.grouped_matmul import reference, xla
from scmoe.kernels.grouped_matmul.backend import implementation, resolve_backend
from scmoe.kernels.grouped_matmul.layout import (
  GroupLayout,
  make_layout,
  row_groups,
  source_rows_of,
  unpad_rows,
)
from scmoe.kernels.launch import varying_as
from scmoe.kernels.permute import take_rows, zero_cotangents


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
  """Ragged matrix product: each group of rows times its own matrix, plus its own bias if given.

  The counterpart of `jax.lax.ragged_dot(lhs, rhs, group_sizes)`. By kernels or XLA, the arithmetic
  of the product and of the gradients of lhs and rhs does not grow with the number of groups, but
  for padding to whole tiles.

  Args:
    lhs_MK: rows, sorted by group: the first `group_sizes[0]` belong to group 0, and so on.
    rhs_GKN: one matrix for each group.
    group_sizes_G: integers from 0 on; their sum is at most M.
    bias_GN: added to the products of each group's rows, if given.
    preferred_element_type: type of the result; by default the common type of lhs and rhs.
      Products are accumulated in float32 whatever it is (float64 for float64 operands).
    precision: for float32 operands, as in `jax.lax.dot_general`; by default "highest", which does
      not round them. "default" lets the device use tf32. The reference ignores it.
    backend: "mosaic_gpu", "xla", "reference", or "auto" (see `resolve_backend`): the kernels on
      Hopper, for bfloat16 or float16 and for K and N that are multiples of 64, and XLA otherwise.
    num_sms: how many multiprocessors the kernels may use, at least two where CTAs work in pairs;
      by default all of them. Leave some to a collective that runs at the same time.

  Returns:
    out_MN. Rows past the sum of the group sizes are zero and receive a zero gradient; the matrix
    and the bias of an empty group receive exactly zero gradients.

  Raises:
    ValueError: shapes are wrong or disagree, the sizes are not integers, or `backend` is unknown or
      cannot take the operands.
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
  if not rhs_GKN.shape[0]:  # no row has a matrix
    return varying_as(lhs_MK, jnp.zeros((lhs_MK.shape[0], rhs_GKN.shape[2]), out_dtype))
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
  tile = implementation(backend).ROW_TILE or xla.choose_tile(num_rows, num_groups)
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
  # Both products read the same padded dout. Its padding rows are zero, so the weight gradient can
  # ignore the groups' ends. Its type is that of lhs, which may be narrower than dout's, since a
  # product's operands must share one type. The bias gradient adds up dout before it is narrowed.
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
  return dlhs_MK, drhs_GKN, dbias_GN, zero_cotangents(group_sizes_G)


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


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
    out_GKN, exactly zero for empty groups. Rows past the sum of the sizes add nothing.

  Raises:
    ValueError: lhs or rhs is no matrix, their row counts disagree, or `backend` is unknown or
      cannot take the operands.
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
  if not group_sizes_G.shape[0]:
    no_matrix = jnp.zeros((0, lhs_MK.shape[1], rhs_MN.shape[1]), config.out_dtype)
    return varying_as(lhs_MK, no_matrix)
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
  return dlhs_MK, drhs_MN, zero_cotangents(group_sizes_G)


_grouped_outer.defvjp(_grouped_outer_fwd, _grouped_outer_bwd)
