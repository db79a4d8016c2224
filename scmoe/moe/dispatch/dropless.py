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

from scmoe.moe.dispatch import header, local
from scmoe.moe.types import Dispatched, Routing, Rows, Tokens
from scmoe.parallel.collectives import Exchange, all_to_all

FURTHER = 8  # a further round moves 1/8 of the first round's rows

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

  What the receiver must know, how many rows of each queue are for which expert and how long the
  longest queue is, travels as a header behind the first chunk's rows.

  Args:
    x_TD: tokens of this device.
    routing: their choices, in one capacity group.
    slack: room over the balanced share, in (1, W] usually 1.25.
    exchange: the devices on the expert axis.
    chunks: parts that travel and are computed one after the other.

  Returns:
    Dispatched with rows [W·P, D] sorted by local expert in each chunk. `slot_TK` and `source_R`
    describe the chunks' send buffers one behind the other; each peer's block in the first one ends
    with the rows of its header. Without an exchange: the tokens themselves, in one chunk.
  """
  if exchange.size == 1:
    # Only weights that come after the experts can wait for their sum.
    stay = routing.input_weight_TK is None
    return tokens_here(x_TD, routing) if stay else rows_here(x_TD, routing)
  choices, width = routing.expert_TK.size, x_TD.shape[1]
  rows = buffer_rows(choices, slack=slack, peers=exchange.size, chunks=chunks)
  queues = _queues(routing, exchange)
  longest_W1 = jnp.full((exchange.size, 1), queues.bounds_WN[:, -1].max())
  counts_WC = jnp.concatenate([queues.bounds_WN, longest_W1], 1)
  spare = header.header_rows(counts_WC.shape[1], width, x_TD.dtype)
  arrived, slots, sources, begin = [], [], [], 0
  for chunk in range(chunks):
    block = rows if chunk else rows + spare
    slot_TK, source_R = _window(queues, chunk * rows, rows, block)
    rows_RD = local.fill_rows(x_TD, slot_TK, source_R, routing.input_weight_TK)
    rows_WBD = rows_RD.reshape(exchange.size, block, width)
    if chunk == 0:
      rows_WBD = header.write_header(rows_WBD, counts_WC)
    arrived.append(all_to_all(rows_WBD, exchange))
    slots.append(jnp.where(slot_TK < source_R.size, slot_TK + begin, -1))
    sources.append(source_R)
    begin += source_R.size
  arrived_WC = header.read_header(arrived[0], counts_WC.shape[1])
  # Named like the rows: for the counts alone, rematerialisation would send the rows again.
  arrived_WC = checkpoint_name(arrived_WC, "moe_rows")
  bounds_WN, longest = arrived_WC[:, :-1], _agreed(arrived_WC[:, -1].max())
  parts = [_sort(part, bounds_WN, chunk * rows, rows) for chunk, part in enumerate(arrived)]
  slot_TK = functools.reduce(jnp.maximum, slots)  # each choice is in one chunk at most
  slot_TK = jnp.where(slot_TK < 0, begin, slot_TK)
  left = jnp.maximum(0, longest - rows * chunks)
  rounds = 1 + -(-left // further_rows(rows * chunks))
  none = jnp.zeros((), jnp.int32)
  return Dispatched(tuple(parts), none, rounds, slot_TK, jnp.concatenate(sources), bounds_WN)


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
  before the experts of the first round: the number has come with its rows, and behind the experts
  the host would wait for those as well.

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

  def one(index, x_TD, given_TK, weights, queues, bounds_WN):
    low = first + (index - 1) * rows
    slot_TK, source_R = _window(queues, low, rows, rows)
    # One kind of weights is always 1: the loop is given, and differentiates, the other.
    ones_TK = jnp.ones_like(given_TK)
    input_TK, weight_TK = (given_TK, ones_TK) if before else (None, given_TK)
    rows_RD = local.fill_rows(x_TD, slot_TK, source_R, input_TK)
    arrived_WPD = all_to_all(rows_RD.reshape(peers, rows, -1), exchange)
    part = experts(_sort(arrived_WPD, bounds_WN, low, rows), weights)
    return local.sum_rows(_bring_back(part, exchange), weight_TK, slot_TK, source_R)

  plan = _queues(routing, exchange), sent.bounds_WN
  given_TK = routing.weight_TK if routing.input_weight_TK is None else routing.input_weight_TK
  more_TD = _loop(one, x_TD, given_TK, weights, plan, sent.rounds)
  arrived, more_TD = jax.lax.optimization_barrier(([part.rows for part in sent.chunks], more_TD))
  parts = tuple(dataclasses.replace(p, rows=r) for p, r in zip(sent.chunks, arrived, strict=True))
  return dataclasses.replace(sent, chunks=parts), more_TD


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loop(one, x_TD, weight_TK, weights, plan, end):
  """Σ over index in [1, end) of one(index, ...), added up in the type of x."""

  def body(index, y_TD):
    return y_TD + one(index, x_TD, weight_TK, weights, *plan).astype(y_TD.dtype)

  return jax.lax.fori_loop(1, end, body, jnp.zeros_like(x_TD))


def _loop_fwd(one, x_TD, weight_TK, weights, plan, end):
  y_TD = _loop(one, x_TD, weight_TK, weights, plan, end)
  return y_TD, (x_TD, weight_TK, weights, plan, end)


def _loop_bwd(one, residuals, y_bar_TD):
  x_TD, weight_TK, weights, plan, end = residuals

  def body(index, total):
    run = lambda x_TD, weight_TK, weights: one(index, x_TD, weight_TK, weights, *plan)
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
    start_W1: int32, where each queue begins in `order_R`.
    bounds_WN: int32, N = E / W + 1: where each expert's choices begin in the queue of its peer, and
      where the last one's end.
  """

  peer_TK: Array
  rank_TK: Array
  order_R: Array
  start_W1: Array
  bounds_WN: Array


def _agreed(longest: Array) -> Array:
  """The most over the devices that this exchange does not reach but that share the loop."""
  apart = tuple(axis for axis in ("data", "shard") if jax.lax.axis_size(axis) > 1)
  return jax.lax.pmax(longest, apart) if apart else longest


def _queues(routing: Routing, exchange: Exchange) -> _Queues:
  """The queues of this device."""
  count_E = routing.count_GE.sum(0)
  count_We = count_E.reshape(exchange.size, -1)
  bounds_WN = local.sums_before(count_We)
  before_E = bounds_WN[:, :-1].reshape(count_E.shape)  # earlier experts of the same peer
  rank_TK = before_E[routing.expert_TK] + routing.place_TK
  return _Queues(
    peer_TK=routing.expert_TK // count_We.shape[1],
    rank_TK=jnp.where(routing.live_T[:, None], rank_TK, jnp.iinfo(jnp.int32).max),
    order_R=routing.order_R,
    start_W1=local.sums_before(bounds_WN[:, -1])[:-1, None],
    bounds_WN=bounds_WN,
  )


def _window(queues: _Queues, low: Any, rows: int, block: int) -> tuple[Array, Array]:
  """Positions [low, low + P) of every queue, as a send buffer of W blocks.

  Args:
    queues: of this device.
    low, rows: the window; rows is P.
    block: rows of a block, at least P; those behind the window are empty.

  Returns:
    slot_TK (W·block for choices outside the window) and source_R (T·K for empty rows).
  """
  peers = queues.bounds_WN.shape[0]
  inside_TK = (queues.rank_TK >= low) & (queues.rank_TK < low + rows)
  slot_TK = jnp.where(inside_TK, queues.peer_TK * block + queues.rank_TK - low, peers * block)
  place_B = jnp.arange(block, dtype=jnp.int32)
  filled_WB = (place_B < rows) & (low + place_B < queues.bounds_WN[:, -1:])
  nobody = queues.order_R.size
  index_WB = jnp.where(filled_WB, queues.start_W1 + low + place_B, nobody)
  source_R = queues.order_R.at[index_WB.reshape(-1)].get(mode="fill", fill_value=nobody)
  return slot_TK, source_R


def _sort(arrived_WBD: Array, bounds_WN: Array, low: Any, rows: int) -> Rows:
  """Sorts what arrived in one window, W blocks of at least P rows, by local expert."""
  peers, block, width = arrived_WBD.shape
  position_R, source_R, group_sizes_e = _sort_plan(bounds_WN, low, rows, block)
  sorted_RD = _permute(arrived_WBD.reshape(peers * block, width), position_R, source_R)
  return Rows(sorted_RD, group_sizes_e, (position_R, source_R))


def _bring_back(part: Rows, exchange: Exchange) -> Array:
  """Undoes the sort and the exchange: the rows of this device's send buffer."""
  if part.arrival is None:
    return part.rows
  position_R, source_R = part.arrival
  by_sender = _permute(part.rows, source_R, position_R)
  sent = by_sender.reshape(exchange.size, -1, by_sender.shape[-1])
  return all_to_all(sent, exchange).reshape(by_sender.shape)


def _sort_plan(bounds_WN: Array, low: Any, rows: int, block: int) -> tuple[Array, Array, Array]:
  """Where the rows of a received window go, so that they are sorted by local expert.

  Sender w's queue holds its rows for expert 0, then expert 1, ...: what falls into the window
  [low, low + P) follows from the bounds alone. What it holds for one expert stays together on the
  way from its block into the sorted order, and so moves by one distance.

  Returns:
    position_R: int32 [W·block], W·P for empty rows.
    source_R: its inverse, int32 [W·P], W·block for empty rows.
    group_sizes_e: int32, the rows of each expert.
  """
  peers, experts = bounds_WN.shape[0], bounds_WN.shape[1] - 1
  place_WN = jnp.clip(bounds_WN - low, 0, rows)  # in the sender's block
  start_We, end_We = place_WN[:, :-1], place_WN[:, 1:]
  # Up to the end of sender w's rows for an expert stand all rows for earlier experts, of any
  # sender, and the rows for this one of the senders up to w.
  sender_W = jnp.arange(peers, dtype=jnp.int32)
  counted_WW1 = (sender_W[:, None] <= sender_W)[:, :, None]  # [which, up to whom]
  last_We = jnp.where(counted_WW1, end_We[:, None], start_We[:, None]).sum(0, dtype=jnp.int32)
  back_We = sender_W[:, None] * block + end_We - last_We  # from the sorted place to the received

  row_WB = jnp.arange(peers * block, dtype=jnp.int32).reshape(peers, block)
  expert_WB = (end_We[:, :, None] <= row_WB[0]).sum(1, dtype=jnp.int32)
  position_WB = row_WB - back_We.at[sender_W[:, None], expert_WB].get(mode="clip")
  position_WB = jnp.where(expert_WB < experts, position_WB, peers * rows)

  row_R = jnp.arange(peers * rows, dtype=jnp.int32)
  expert_R = (last_We[-1][:, None] <= row_R).sum(0, dtype=jnp.int32)
  sender_R = (last_We.at[:, expert_R].get(mode="clip") <= row_R).sum(0, dtype=jnp.int32)
  source_R = row_R + back_We.at[sender_R, expert_R].get(mode="clip")
  source_R = jnp.where(expert_R < experts, source_R, peers * block)
  return position_WB.reshape(-1), source_R, (end_We - start_We).sum(0, dtype=jnp.int32)


def _permute(rows_RD: Array, position_R: Array, source_R: Array) -> Array:
  """Row r moves to position[r]; a gather both ways. `source_R` is the inverse."""
  return local.gather_rows(rows_RD, position_R[:, None], source_R)


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
  start_E = local.sums_before(count_E)[:-1]
  slot_TK = start_E[routing.expert_TK] + routing.place_TK
  slot_TK = jnp.where(routing.live_T[:, None], slot_TK, choices)
  filled_R = jnp.arange(choices, dtype=jnp.int32) < count_E.sum()
  source_R = jnp.where(filled_R, routing.order_R, choices)
  rows_RD = local.fill_rows(x_TD, slot_TK, source_R, routing.input_weight_TK)
  one, none = jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)
  return Dispatched((Rows(rows_RD, count_E),), none, one, slot_TK, source_R)
