"""The capacity transport: fixed [E, C, D] buffers, one dense all-to-all each way.

Every device sends C rows per expert and capacity group to the device that holds the expert.
Choices beyond the C-th of a queue are dropped and counted; with C = tokens of a group nothing can
be. Without an expert axis the buffer stays where it is.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from scmoe.errors import ConfigError
from scmoe.moe.dispatch import local
from scmoe.moe.types import Dispatched, Routing, Rows
from scmoe.parallel.collectives import Exchange, all_to_all


def capacity(
  factor: float,
  *,
  tokens: int,
  num_experts: int,
  k: int,
  need: int | None = None,
  align: int = 1,
  rule: str = "tutel",
) -> int:
  """Rows of one expert's buffer, for T `tokens` of one capacity group and n = ⌈T / E⌉.

    factor > 0   k · ⌊factor · n⌋            what does not fit is dropped
    factor = 0   need                        nothing is dropped
    factor < 0   min(need, k · ⌊−factor · n⌋)   dropped only beyond this bound

  Then rounded up to a multiple of `align`, which above 256 is itself first rounded up to a multiple
  of 128 (Tutel's rules; floors truncate a double). `rule="megablocks"` takes ⌊|factor| · k · T / E⌋
  for the middle term instead.

  Args:
    factor: the capacity factor.
    tokens: T; where devices have different numbers of live tokens, the padded, largest one.
    num_experts: E.
    k: choices per token.
    need: the longest queue, `exact_capacity(counts)`. It is data: where shapes must be known before
      (under `jit`), leave it out for the bound T, which loses nothing either, as no token visits an
      expert twice.
    align: number of equal parts that the buffer is cut into (Tutel a2a_ffn_overlap_degree).
    rule: `tutel` or `megablocks`.

  Raises:
    ConfigError: the capacity rounds to zero.
  """
  if not tokens:
    return 0
  need = tokens if need is None else need
  if rule == "megablocks":
    rows = int(abs(factor) * k * tokens / num_experts)
  else:
    rows = k * int(abs(factor) * math.ceil(tokens / num_experts))
  if factor and not rows:
    least = 1 / (
      k * tokens / num_experts if rule == "megablocks" else math.ceil(tokens / num_experts)
    )
    least = math.ceil(1000 * least) / 1000  # up, or the remedy would not do
    raise ConfigError(
      f"dispatch.capacity_factor={factor} gives {tokens} tokens over {num_experts} experts a "
      f"capacity of 0; use at least {least:g} in size, or 0 to drop nothing"
    )
  if factor <= 0:
    rows = min(need, rows) if factor else need
  if align > 256:
    align = math.ceil(align / 128) * 128
  return math.ceil(rows / align) * align


def exact_capacity(count_GE: Array) -> int:
  """The longest queue: the least capacity that drops nothing (Tutel's capacity factor 0).

  It reads the counts on the host, so it works on concrete arrays only, outside `jit`.

  Raises:
    ConfigError: called on a traced array.
  """
  if isinstance(count_GE, Tracer):
    raise ConfigError(
      "exact_capacity got traced counts; under jit a buffer's size cannot depend on data: leave "
      "`need` out of capacity(...), or use dispatch.transport=dropless"
    )
  return int(count_GE.max()) if count_GE.size else 0


def dispatch(
  x_TD: Array, routing: Routing, *, rows_per_expert: int, exchange: Exchange, chunks: int = 1
) -> Dispatched:
  """Sends each kept choice's token to its expert's device.

  Args:
    x_TD: tokens of this device.
    routing: their choices, in G capacity groups.
    rows_per_expert: C, for one capacity group.
    exchange: the devices on the expert axis; E is a multiple of their number W.
    chunks: parts of the buffers that travel, and are computed, one after the other, so that the
      exchange of one can run beside the experts of another (Tutel's overlap degree). G·C is a
      multiple of it.

  Returns:
    Dispatched with rows [W, E / W, G·C / chunks, D] in each chunk, in the order of their senders.
  """
  groups, num_experts = routing.count_GE.shape
  slot_TK, source_R, dropped = local.buffer_plan(routing, rows_per_expert)
  rows_RD = local.fill_rows(x_TD, slot_TK, source_R, routing.input_weight_TK)
  rows_ECD = rows_RD.reshape(num_experts, groups * rows_per_expert, x_TD.shape[-1])
  parts = tuple(Rows(_to_experts(part, exchange)) for part in jnp.split(rows_ECD, chunks, 1))
  return Dispatched(parts, dropped, jnp.ones((), jnp.int32), slot_TK, source_R)


def combine(dispatched: Dispatched, weight_TK: Array, *, exchange: Exchange) -> Array:
  """Sends the experts' rows back and adds each token's choices, weighted: the inverse of dispatch.

  Returns y_TD in the rows' dtype; dropped choices add exactly 0.
  """
  rows_ECD = jnp.concatenate([_to_tokens(part.rows, exchange) for part in dispatched.chunks], 1)
  # Named so that a backward pass that recomputes its forward does not exchange rows again.
  rows_RD = checkpoint_name(rows_ECD.reshape(-1, rows_ECD.shape[-1]), "moe_rows")
  return local.sum_rows(rows_RD, weight_TK, dispatched.slot_TK, dispatched.source_R)


def _to_experts(rows_ECD: Array, exchange: Exchange) -> Array:
  """[E, C, D] -> [W, E/W, C, D]: what each device sent to the experts here."""
  num_experts, rows, width = rows_ECD.shape
  sent = rows_ECD.reshape(exchange.size, num_experts // exchange.size, rows, width)
  return sent if exchange.size == 1 else all_to_all(sent, exchange)


def _to_tokens(rows_WeCD: Array, exchange: Exchange) -> Array:
  """[W, E/W, C, D] -> [E, C, D]: the inverse of `_to_experts`."""
  received = rows_WeCD if exchange.size == 1 else all_to_all(rows_WeCD, exchange)
  shards, experts, rows, width = received.shape
  return received.reshape(shards * experts, rows, width)
