"""The local permutation: tokens -> rows in expert order, and its weighted inverse.

Both directions, and both their gradients, are gathers: no scatter, no atomics, so results do not
depend on the order in which a GPU happens to run. `slot_TK` says where each choice's row stands,
`source_R` which choice fills each row; they are inverse to each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.moe.types import Routing


def buffer_plan(routing: Routing, capacity: int) -> tuple[Array, Array, Array]:
  """Slots of all choices in a buffer of [E, G, C] rows, and the choice that fills each row.

  Args:
    routing: the choices of this device's T tokens in G groups.
    capacity: C, rows kept per (expert, group). Choices whose place is >= C are dropped.

  Returns:
    slot_TK int32 in [0, E·G·C], where E·G·C marks a dropped or masked choice; source_R int32 in
    [0, T·K], where T·K marks an empty row; the number of dropped choices, int32.
  """
  groups, num_experts = routing.count_GE.shape
  tokens, k = routing.expert_TK.shape
  group_T1 = (jnp.arange(tokens, dtype=jnp.int32) // max(tokens // groups, 1))[:, None]
  kept_TK = (routing.place_TK < capacity) & routing.live_T[:, None]
  row_TK = (routing.expert_TK * groups + group_T1) * capacity + routing.place_TK
  slot_TK = jnp.where(kept_TK, row_TK, num_experts * groups * capacity)

  count_Q = routing.count_GE.reshape(-1)
  start_EG = (jnp.cumsum(count_Q) - count_Q).reshape(groups, num_experts).T
  place_C = jnp.arange(capacity, dtype=jnp.int32)
  filled_EGC = place_C < routing.count_GE.T[..., None]
  index_EGC = jnp.where(filled_EGC, start_EG[..., None] + place_C, tokens * k)
  source_R = routing.order_R.at[index_EGC.reshape(-1)].get(mode="fill", fill_value=tokens * k)
  dropped = count_Q.sum(dtype=jnp.int32) - kept_TK.sum(dtype=jnp.int32)
  return slot_TK, source_R, dropped


def fill_rows(
  x_TD: Array, slot_TK: Array, source_R: Array, input_weight_TK: Array | None = None
) -> Array:
  """The rows of a send buffer, weighted already if weights come before the experts: [R, D]."""
  rows_RD = gather_rows(x_TD, slot_TK, source_R)
  if input_weight_TK is None:
    return rows_RD
  return weigh_rows(rows_RD, input_weight_TK, slot_TK, source_R)


@jax.custom_vjp
def gather_rows(x_TD: Array, slot_TK: Array, source_R: Array) -> Array:
  """rows[r] = x[source[r] // K], zero where nothing fills the row: [T, D] -> [R, D]."""
  return x_TD.at[source_R // slot_TK.shape[1]].get(mode="fill", fill_value=0)


def _gather_rows_fwd(x_TD, slot_TK, source_R):
  return gather_rows(x_TD, slot_TK, source_R), slot_TK


def _gather_rows_bwd(slot_TK, rows_bar_RD):
  return _sum_slots(rows_bar_RD, slot_TK), None, None


gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@jax.custom_vjp
def weigh_rows(rows_RD: Array, weight_TK: Array, slot_TK: Array, source_R: Array) -> Array:
  """rows[r] · weight of the choice that fills row r; empty rows stay zero. In the rows' dtype."""
  weight_R = weight_TK.reshape(-1).at[source_R].get(mode="fill", fill_value=0)
  return (weight_R[:, None] * rows_RD).astype(rows_RD.dtype)


def _weigh_rows_fwd(rows_RD, weight_TK, slot_TK, source_R):
  return weigh_rows(rows_RD, weight_TK, slot_TK, source_R), (rows_RD, weight_TK, slot_TK, source_R)


def _weigh_rows_bwd(residuals, bar_RD):
  rows_RD, weight_TK, slot_TK, source_R = residuals
  rows_bar_RD = weigh_rows(bar_RD, weight_TK, slot_TK, source_R)
  dot_R = (rows_RD.astype(weight_TK.dtype) * bar_RD.astype(weight_TK.dtype)).sum(-1)
  return rows_bar_RD, dot_R.at[slot_TK].get(mode="fill", fill_value=0), None, None


weigh_rows.defvjp(_weigh_rows_fwd, _weigh_rows_bwd)


@jax.custom_vjp
def sum_rows(rows_RD: Array, weight_TK: Array, slot_TK: Array, source_R: Array) -> Array:
  """y[t] = Σ_k weight[t, k] · rows[slot[t, k]]; a dropped choice adds exactly 0.

  Sums in float32; the result has the rows' dtype.
  """
  return _sum_slots(rows_RD, slot_TK, weight_TK)


def _sum_rows_fwd(rows_RD, weight_TK, slot_TK, source_R):
  return sum_rows(rows_RD, weight_TK, slot_TK, source_R), (rows_RD, weight_TK, slot_TK, source_R)


def _sum_rows_bwd(residuals, y_bar_TD):
  rows_RD, weight_TK, slot_TK, source_R = residuals
  k = weight_TK.shape[1]
  weight_R = weight_TK.reshape(-1).at[source_R].get(mode="fill", fill_value=0)
  y_bar_RD = y_bar_TD.at[source_R // k].get(mode="fill", fill_value=0)
  rows_bar_RD = (weight_R[:, None] * y_bar_RD).astype(rows_RD.dtype)
  weight_bar_TK = jnp.stack(
    [(_take(rows_RD, slot_TK[:, j]).astype(weight_TK.dtype) * y_bar_TD).sum(-1) for j in range(k)],
    axis=1,
  )
  return rows_bar_RD, weight_bar_TK.astype(weight_TK.dtype), None, None


sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)


def _take(rows_RD: Array, index_T: Array) -> Array:
  return rows_RD.at[index_T].get(mode="fill", fill_value=0)


def _sum_slots(rows_RD: Array, slot_TK: Array, weight_TK: Array | None = None) -> Array:
  """Σ_k of the rows at `slot_TK`, weighted if asked, one choice at a time: no [T, K, D] array."""
  wide = jnp.promote_types(rows_RD.dtype, jnp.float32)
  total_TD = jnp.zeros((slot_TK.shape[0], rows_RD.shape[1]), wide)
  for j in range(slot_TK.shape[1]):
    row_TD = _take(rows_RD, slot_TK[:, j]).astype(wide)
    total_TD += row_TD if weight_TK is None else weight_TK[:, j, None].astype(wide) * row_TD
  return total_TD.astype(rows_RD.dtype)
