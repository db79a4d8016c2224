"""The dropless transport: rows in rounds over a fixed per-peer buffer. Nothing is ever dropped.

XLA wants static shapes, and a buffer for the worst case, all tokens to one expert, would be W times
too large. So each device keeps one queue per peer, sorted by expert, and a round moves at most P
rows of every queue: P is a small factor over the balanced share. Balanced routing takes one round;
skew adds rounds, and never memory. The first round goes through the stages like any other
transport, so that it overlaps with dense work. Further rounds run in a loop whose trip count the
devices agree on, forward and backward; they are smaller, because their temporaries exist beside
what the first round keeps, and because a small round leaves less of its buffer empty.

Where the experts are not spread over devices there is nothing to exchange: the tokens stay where
they are, and the experts' kernels gather, weigh and add up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from scmoe.moe.dispatch import local
from scmoe.moe.types import Dispatched, Routing, Rows, Tokens
from scmoe.parallel.collectives import Exchange, all_to_all

# A further round moves 1/4 of the first round's rows. Each costs about 0.1 ms of launches on four
# GPUs; half of the rows would add to the peak memory of a compiled layer (experiments/dispatch).
FURTHER = 4

# (rows, weights) -> rows: the expert stage on one chunk, as the layer runs it.
Experts = Callable[[Rows, Any], Rows]


def buffer_rows(choices: int, *, slack: float, peers: int, chunks: int = 1) -> int:
  """P: rows for each peer in one chunk of a round.

  Args:
    choices: t·K of one device.
    slack: room over the balanced share choices / peers.
    peers: W.
    chunks: parts of a round.
  """
  if peers == 1:
    return choices
  return max(1, math.ceil(slack * choices / peers / chunks))


def further_rows(first_rows: int) -> int:
  """P of a further round, from the rows per peer of the first one."""
  return max(1, -(-first_rows // FURTHER))


def dispatch(
  x_TD: Array, routing: Routing, *, slack: float, exchange: Exchange, chunks: int = 1
) -> Dispatched:
  """Sends the first round: up to P rows to every peer, in `chunks` parts.

  Args:
    x_TD: tokens of this device.
    routing: their choices, in one capacity group.
    slack: room over the balanced share, in (1, W] usually 1.25.
    exchange: the devices on the expert axis.
    chunks: parts that travel and are computed one after the other.

  Returns:
    Dispatched with rows [W·P, D] in the order of their senders in each chunk. `slot_TK` and
    `source_R` describe the chunks' send buffers one behind the other. Without an exchange: the
    tokens themselves, in one chunk.
  """
  if exchange.size == 1:
    # Only weights that come after the experts can wait for their sum.
    stay = routing.input_weight_TK is None
    return tokens_here(x_TD, routing) if stay else rows_here(x_TD, routing)
  choices = routing.expert_TK.size
  rows = buffer_rows(choices, slack=slack, peers=exchange.size, chunks=chunks)
  queues = _queues(routing, exchange, None)
  parts, slots, sources, input_TK = [], [], [], routing.input_weight_TK
  for chunk in range(chunks):
    low = chunk * rows
    slot_TK, source_R = _window(queues, low, rows, exchange)
    parts.append(_send(x_TD, input_TK, queues, slot_TK, source_R, low, rows, exchange))
    slots.append(jnp.where(slot_TK < source_R.size, slot_TK + chunk * source_R.size, -1))
    sources.append(source_R)
  slot_TK = functools.reduce(jnp.maximum, slots)  # each choice is in one chunk at most
  slot_TK = jnp.where(slot_TK < 0, chunks * exchange.size * rows, slot_TK)
  longest = _agreed(queues.longest)
  left = jnp.maximum(0, longest - rows * chunks)
  rounds = 1 + -(-left // further_rows(rows * chunks))
  none = jnp.zeros((), jnp.int32)
  return Dispatched(
    tuple(parts), none, rounds, slot_TK, jnp.concatenate(sources), queues.received_We
  )


def combine(dispatched: Dispatched, weight_TK: Array, *, exchange: Exchange) -> Array:
  """Brings the first round's rows back and adds them up, weighted: y_TD of this round."""
  first = dispatched.chunks[0]
  if isinstance(first, Tokens):
    return first.rows  # weighted and added up by the experts
  parts = cast(tuple[Rows, ...], dispatched.chunks)
  rows_RD = jnp.concatenate([_bring_back(part, exchange) for part in parts])
  rows_RD = checkpoint_name(rows_RD, "moe_rows")  # what travelled is not sent again by remat
  return local.sum_rows(rows_RD, weight_TK, dispatched.slot_TK, dispatched.source_R)


def further_rounds(
  sent: Dispatched,
  x_TD: Array,
  routing: Routing,
  weights: Any,
  *,
  slack: float,
  exchange: Exchange,
  experts: Experts,
) -> tuple[Dispatched, Array]:
  """What the rounds after the first one add to y_TD; no work where one was enough.

  The backward pass runs the same rounds again, each with its own vector-Jacobian product, so that
  memory does not depend on their number either.

  A GPU's host reads the number of rounds before it can launch anything behind them. So they come
  before the experts of the first round, where the exchange of the first round is under way and
  hides that (experiments/dispatch: 6 to 8 % of dispatch and combine).

  Args:
    sent: the first round; all devices agree on its `rounds`.
    x_TD: tokens of this device.
    routing: their choices.
    weights: the experts' weights.
    slack, exchange: as in `dispatch`.
    experts: the expert stage; captures no traced values.

  Returns:
    `sent`, whose rows nothing reads before the further rounds are over, and their sum [T, D] in the
    type of x: a further round adds to it in that type, no token is in more than K rounds.
  """
  choices, peers, chunks = routing.expert_TK.size, exchange.size, len(sent.chunks)
  first = chunks * buffer_rows(choices, slack=slack, peers=peers, chunks=chunks)
  rows = further_rows(first)

  before = routing.input_weight_TK is not None

  def one(index, x_TD, given_TK, weights, queues):
    low = first + (index - 1) * rows
    slot_TK, source_R = _window(queues, low, rows, exchange)
    # One kind of weights is always 1: the loop is given, and differentiates, the other.
    ones_TK = jnp.ones_like(given_TK)
    input_TK, weight_TK = (given_TK, ones_TK) if before else (None, given_TK)
    sent = _send(x_TD, input_TK, queues, slot_TK, source_R, low, rows, exchange)
    part = experts(sent, weights)
    return local.sum_rows(_bring_back(part, exchange), weight_TK, slot_TK, source_R)

  queues = _queues(routing, exchange, sent.received_We)
  given_TK = routing.weight_TK if routing.input_weight_TK is None else routing.input_weight_TK
  more_TD = _loop(one, x_TD, given_TK, weights, queues, sent.rounds)
  arrived, more_TD = jax.lax.optimization_barrier(([part.rows for part in sent.chunks], more_TD))
  parts = tuple(dataclasses.replace(p, rows=r) for p, r in zip(sent.chunks, arrived, strict=True))
  return dataclasses.replace(sent, chunks=parts), more_TD


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loop(one, x_TD, weight_TK, weights, queues, end):
  """Σ over index in [1, end) of one(index, ...), added up in the type of x."""

  def body(index, y_TD):
    return y_TD + one(index, x_TD, weight_TK, weights, queues).astype(y_TD.dtype)

  return jax.lax.fori_loop(1, end, body, jnp.zeros_like(x_TD))


def _loop_fwd(one, x_TD, weight_TK, weights, queues, end):
  y_TD = _loop(one, x_TD, weight_TK, weights, queues, end)
  return y_TD, (x_TD, weight_TK, weights, queues, end)


def _loop_bwd(one, residuals, y_bar_TD):
  x_TD, weight_TK, weights, queues, end = residuals

  def body(index, total):
    run = lambda x_TD, weight_TK, weights: one(index, x_TD, weight_TK, weights, queues)
    added_TD, pull = jax.vjp(run, x_TD, weight_TK, weights)
    gradients = pull(y_bar_TD.astype(added_TD.dtype))
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients)

  primals = (x_TD, weight_TK, weights)
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  total = jax.lax.fori_loop(1, end, body, jax.tree.map(wide, primals))
  narrow = jax.tree.map(lambda t, p: t.astype(p.dtype), total, primals)
  return (*narrow, None, None)


_loop.defvjp(_loop_fwd, _loop_bwd)


# ------------------------------------------------------------------------------------- queues


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Queues:
  """One queue per peer: this device's choices in the order of the peer's experts.

  Attributes:
    peer_TK, rank_TK: int32, the queue of each choice and its position there; masked choices stand
      behind every queue.
    order_R: int32, flat choices sorted by queue and position.
    start_W, length_W: int32, where each queue begins in `order_R`, and its length.
    longest: int32 scalar, the longest queue on the exchange.
    received_We: int32, choices per local expert that each peer sends to this device.
  """

  peer_TK: Array
  rank_TK: Array
  order_R: Array
  start_W: Array
  length_W: Array
  longest: Array
  received_We: Array


def _agreed(longest: Array) -> Array:
  """The most over the devices that this exchange does not reach but that share the loop."""
  apart = tuple(axis for axis in ("data", "shard") if jax.lax.axis_size(axis) > 1)
  return jax.lax.pmax(longest, apart) if apart else longest


def _queues(routing: Routing, exchange: Exchange, received_We: Array | None) -> _Queues:
  """The queues of this device.

  One small all-gather of the counts tells every device both what it will receive and the longest
  queue of all; unless `received_We` is given from before.
  """
  num_experts = routing.probs_TE.shape[1]
  sent_We = routing.count_GE.sum(0).reshape(exchange.size, num_experts // exchange.size)
  length_W = sent_We.sum(1)
  before_E = (jnp.cumsum(sent_We, 1) - sent_We).reshape(-1)  # earlier experts of the same peer
  rank_TK = before_E[routing.expert_TK] + routing.place_TK
  rank_TK = jnp.where(routing.live_T[:, None], rank_TK, jnp.iinfo(jnp.int32).max)
  if received_We is None:
    assert exchange.axis is not None
    everyone_WWe = jax.lax.all_gather(sent_We, exchange.axis)  # [sender, receiver, expert]
    arriving_We = everyone_WWe[:, jax.lax.axis_index(exchange.axis)]
    longest = everyone_WWe.sum(-1).max()
  else:
    arriving_We, longest = received_We, length_W.max()
  return _Queues(
    peer_TK=routing.expert_TK // (num_experts // exchange.size),
    rank_TK=rank_TK,
    order_R=routing.order_R,
    start_W=jnp.cumsum(length_W) - length_W,
    length_W=length_W,
    longest=longest,
    received_We=arriving_We,
  )


def _window(queues: _Queues, low: Any, rows: int, exchange: Exchange) -> tuple[Array, Array]:
  """Positions [low, low + P) of every queue, as a send buffer of [W·P] rows.

  Returns slot_TK (W·P for choices outside the window) and source_R (T·K for empty rows).
  """
  size = exchange.size * rows
  inside_TK = (queues.rank_TK >= low) & (queues.rank_TK < low + rows)
  slot_TK = jnp.where(inside_TK, queues.peer_TK * rows + queues.rank_TK - low, size)
  position_P = low + jnp.arange(rows, dtype=jnp.int32)
  filled_WP = position_P < queues.length_W[:, None]
  nobody = queues.order_R.size
  index_WP = jnp.where(filled_WP, queues.start_W[:, None] + position_P, nobody)
  source_R = queues.order_R.at[index_WP.reshape(-1)].get(mode="fill", fill_value=nobody)
  return slot_TK, source_R


def _send(
  x_TD: Array,
  input_weight_TK: Array | None,
  queues: _Queues,
  slot_TK: Array,
  source_R: Array,
  low: Any,
  rows: int,
  exchange: Exchange,
) -> Rows:
  """Exchanges one window, and says where what arrives stands in the order of local experts."""
  rows_RD = local.fill_rows(x_TD, slot_TK, source_R, input_weight_TK)
  received = all_to_all(rows_RD.reshape(exchange.size, rows, -1), exchange)
  place_R, group_sizes_e = _places(queues.received_We, low, rows)
  return Rows(received.reshape(rows_RD.shape), group_sizes_e, place_R)


def _bring_back(part: Rows, exchange: Exchange) -> Array:
  """Undoes the exchange: rows of this device's send buffer, [W·P, D]."""
  if exchange.size == 1:
    return part.rows
  sent = part.rows.reshape(exchange.size, -1, part.rows.shape[-1])
  return all_to_all(sent, exchange).reshape(part.rows.shape)


def _places(received_We: Array, low: Any, rows: int) -> tuple[Array, Array]:
  """Where the rows of a received window stand in the order of local experts.

  Sender s's queue holds its rows for expert 0, then expert 1, ...: what falls into the window
  [low, low + P) follows from the counts alone.

  Returns:
    place_R int32 [W·P] (W·P for empty rows) and group_sizes_e, the rows of each expert.
  """
  end_We = jnp.cumsum(received_We, 1)
  start_We = end_We - received_We
  clip = lambda a: jnp.clip(a - low, 0, rows)
  inside_We = clip(end_We) - clip(start_We)
  group_sizes_e = inside_We.sum(0)
  first_We = jnp.cumsum(inside_We, 0) - inside_We + (jnp.cumsum(group_sizes_e) - group_sizes_e)
  index_P = jnp.arange(rows, dtype=jnp.int32)
  ends_We = clip(end_We)
  expert_WP = (index_P[None, :, None] >= ends_We[:, None, :]).sum(-1)
  filled_WP = expert_WP < received_We.shape[1]
  expert_WP = jnp.minimum(expert_WP, received_We.shape[1] - 1)
  pick = lambda table_We: jnp.take_along_axis(table_We, expert_WP, 1)
  place_WP = pick(first_We) + index_P - pick(clip(start_We))
  place_WP = jnp.where(filled_WP, place_WP, place_WP.size)
  return place_WP.reshape(-1), group_sizes_e


def tokens_here(x_TD: Array, routing: Routing) -> Dispatched:
  """Tokens with their choices, for experts on this device: nothing travels, nothing is copied."""
  made_TK = routing.live_T[:, None]
  if routing.present_TK is not None:
    made_TK &= routing.present_TK
  expert_TK = jnp.where(made_TK, routing.expert_TK, routing.probs_TE.shape[1])
  tokens = Tokens(x_TD, expert_TK, routing.weight_TK)
  return Dispatched((tokens,), jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


def rows_here(x_TD: Array, routing: Routing) -> Dispatched:
  """All choices as rows sorted by expert on this device; nothing travels."""
  choices = routing.expert_TK.size
  count_E = routing.count_GE.sum(0)
  start_E = jnp.cumsum(count_E) - count_E
  slot_TK = start_E[routing.expert_TK] + routing.place_TK
  slot_TK = jnp.where(routing.live_T[:, None], slot_TK, choices)
  filled_R = jnp.arange(choices, dtype=jnp.int32) < count_E.sum()
  source_R = jnp.where(filled_R, routing.order_R, choices)
  rows_RD = local.fill_rows(x_TD, slot_TK, source_R, routing.input_weight_TK)
  one, none = jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)
  return Dispatched((Rows(rows_RD, count_E),), none, one, slot_TK, source_R)
