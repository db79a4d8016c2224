"""Rows to expert order and back: a gather, and a weighted gather-and-sum.

    T  tokens      K  experts per token      D  width      R  rows of the padded layout

Both directions and both gradients are gathers: no atomics, no scatter-add, so results do not depend
on the order in which blocks run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.kernels.grouped_matmul.layout import take_rows
from scmoe.kernels.permute.plan import PermutePlan


@functools.partial(jax.custom_vjp)
def gather_rows(x_TD: jax.Array, plan: PermutePlan) -> jax.Array:
  """x_RD[r] = x[token of r]; padding rows are zero. Its gradient sums each token's K rows."""
  return take_rows(x_TD, plan.token_R)


def _gather_rows_fwd(x_TD, plan):
  return gather_rows(x_TD, plan), plan


def _gather_rows_bwd(plan, dx_RD):
  return sum_rows(dx_RD, plan.row_TK), no_gradient(plan)


gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@functools.partial(jax.custom_vjp)
def combine_rows(y_RD: jax.Array, weight_TK: jax.Array, plan: PermutePlan) -> jax.Array:
  """y_TD[t] = Σ_k weight[t, k] · y[row of (t, k)], summed in float32 in the order of k.

  Choices that went to no expert add nothing.
  """
  return sum_rows(y_RD, plan.row_TK, weight_TK)


def _combine_rows_fwd(y_RD, weight_TK, plan):
  return combine_rows(y_RD, weight_TK, plan), (y_RD, weight_TK, plan)


def _combine_rows_bwd(residuals, dy_TD):
  y_RD, weight_TK, plan = residuals
  weight_R = take_rows(weight_TK.reshape(-1), plan.slot_R)
  dy_RD = (take_rows(dy_TD, plan.token_R) * weight_R[:, None]).astype(y_RD.dtype)
  wide = jnp.promote_types(y_RD.dtype, jnp.float32)
  dweight = [
    jnp.sum(take_rows(y_RD, plan.row_TK[:, k]).astype(wide) * dy_TD.astype(wide), axis=1)
    for k in range(weight_TK.shape[1])
  ]
  return dy_RD, jnp.stack(dweight, axis=1).astype(weight_TK.dtype), no_gradient(plan)


combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)


def sum_rows(y_RD: jax.Array, row_TK: jax.Array, weight_TK: jax.Array | None = None) -> jax.Array:
  """Σ_k weight[t, k] · y[row[t, k]] in the type of y, accumulated in float32 (or wider).

  Rows outside [0, R) add nothing. One term for each k, so that XLA makes one fused loop of K
  gathers instead of a [T, K, D] array.
  """
  wide = jnp.promote_types(y_RD.dtype, jnp.float32)
  total_TD = None
  for k in range(row_TK.shape[1]):
    term_TD = take_rows(y_RD, row_TK[:, k]).astype(wide)
    if weight_TK is not None:
      term_TD = term_TD * weight_TK[:, k : k + 1].astype(wide)
    total_TD = term_TD if total_TD is None else total_TD + term_TD
  assert total_TD is not None, "K must be at least 1"
  return total_TD.astype(y_RD.dtype)


def no_gradient(tree):
  """Cotangents of a tree of integer arrays."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
