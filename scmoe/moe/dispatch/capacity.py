"""The capacity transport: fixed [E, C, D] buffers, one dense all-to-all each way.

Every device sends C rows per expert and capacity group to the device that holds the expert.
Choices beyond the C-th of a queue are dropped and counted; with C = tokens of a group nothing can
be. Without an expert axis the buffer stays where it is.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.errors import ConfigError
from scmoe.moe.dispatch import local
from scmoe.moe.types import Dispatched, Routing


def capacity(factor: float, *, tokens: int, num_experts: int, k: int) -> int:
  """Rows of one expert's buffer for a positive capacity factor: k · ⌊factor · ⌈tokens / E⌉⌋.

  Tutel's rule, truncation included (computed in double precision); `tokens` are those of one
  capacity group.

  Raises:
    ConfigError: the factor is not positive, or the capacity rounds to zero.
  """
  if factor <= 0:
    raise ConfigError(f"dispatch.capacity_factor={factor} must be > 0; 1.25 to 2 are usual")
  rows = k * int(factor * math.ceil(tokens / num_experts))
  if rows == 0 and tokens:
    raise ConfigError(
      f"dispatch.capacity_factor={factor} gives {tokens} tokens over {num_experts} experts a "
      f"capacity of 0; use at least {1 / math.ceil(tokens / num_experts):.3g}"
    )
  return rows


def dispatch(
  x_TD: Array, routing: Routing, *, rows_per_expert: int, shards: int, axis: str | None
) -> Dispatched:
  """Sends each kept choice's token to its expert's device.

  Args:
    x_TD: tokens of this device.
    routing: their choices, in G capacity groups.
    rows_per_expert: C, for one capacity group.
    shards: W, devices on the expert axis; E is a multiple of it.
    axis: name of that axis inside `shard_map`; None where W is 1.

  Returns:
    Dispatched with rows [E / W, W·G·C, D].
  """
  groups, num_experts = routing.count_GE.shape
  slot_TK, source_R, dropped = local.buffer_plan(routing, rows_per_expert)
  rows_RD = local.gather_rows(x_TD, slot_TK, source_R)
  rows_ECD = rows_RD.reshape(num_experts, groups * rows_per_expert, x_TD.shape[-1])
  return Dispatched(_to_experts(rows_ECD, shards, axis), slot_TK, source_R, dropped)


def combine(
  rows_eRD: Array, dispatched: Dispatched, weight_TK: Array, *, shards: int, axis: str | None
) -> Array:
  """Sends the experts' rows back and adds each token's choices, weighted: the inverse of dispatch.

  Returns y_TD in the rows' dtype; dropped choices add exactly 0.
  """
  rows_ECD = _to_tokens(rows_eRD, shards, axis)
  rows_RD = rows_ECD.reshape(-1, rows_ECD.shape[-1])
  return local.sum_rows(rows_RD, weight_TK, dispatched.slot_TK, dispatched.source_R)


def _to_experts(rows_ECD: Array, shards: int, axis: str | None) -> Array:
  """[E, C, D] -> [E/W, W·C, D]: the expert dimension is exchanged for the senders' one."""
  if axis is None or shards == 1:
    return rows_ECD
  num_experts, rows, width = rows_ECD.shape
  # Only an all-to-all over the major-most dimension needs no transpose of what travels.
  sent = rows_ECD.reshape(shards, num_experts // shards * rows, width)
  received = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=0, tiled=True)
  by_sender = received.reshape(shards, num_experts // shards, rows, width)
  return jnp.swapaxes(by_sender, 0, 1).reshape(num_experts // shards, shards * rows, width)


def _to_tokens(rows_eRD: Array, shards: int, axis: str | None) -> Array:
  """[E/W, W·C, D] -> [E, C, D]: the inverse of `_to_experts`."""
  if axis is None or shards == 1:
    return rows_eRD
  local_experts, rows, width = rows_eRD.shape
  by_sender = jnp.swapaxes(rows_eRD.reshape(local_experts, shards, rows // shards, width), 0, 1)
  sent = by_sender.reshape(shards, local_experts * rows // shards, width)
  received = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=0, tiled=True)
  return received.reshape(shards * local_experts, rows // shards, width)
