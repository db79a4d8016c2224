"""The dropless transport: it sends all rows, in rounds over a buffer of fixed size for each peer.

XLA wants static shapes, and a buffer per peer for the worst case, all rows to one of the W ranks,
would be W times as large as the balanced share, T·K / W of a rank's T·K choices. So each rank keeps
one queue per peer, itself included, sorted by expert, and a round or a chunk of it moves at most P
rows of every queue; in the first round P is the balanced share times `dispatch.slack`, divided by
the number of chunks and rounded up, or less if it is known that queues are shorter (`longest`).
Balanced routing takes one round; skew adds *overflow rounds*, not memory. The first round can
overlap with dense work like any other exchange. Overflow rounds run in a loop, forward and
backward, whose trip count the ranks agree on. They have about a quarter of the first round's rows,
because their temporaries exist beside what the first round keeps, and because a small round leaves
less of its buffer empty. No row is dropped, unless `Dropless.first_round` leaves overflow rounds
out.

Worked example: two ranks, two experts each (0 and 1 on rank 0, 2 and 3 on rank 1), and P = 2, which
is less than a slack of 1 gives. Five tokens of rank 0 choose the experts 2, 0, 3, 2, 2. Its queue
for itself holds token 1; its queue for rank 1, sorted by expert, holds tokens 0, 3, 4 (expert 2)
and token 2 (expert 3). The first round sends positions [0, 2) of each queue: token 1 and an empty
row to rank 0, tokens 0 and 3 to rank 1. Two overflow rounds of one row each send the rest, token 4
and then token 2. Such a range of positions is a *window* of the queue. Rank 1 knows from the counts
alone (three rows for expert 2, one for expert 3) that the row of the window [2, 3) is for expert 2
and that of [3, 4) for expert 3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from scmoe.base.options import check_type
from scmoe.kernels.grouped_matmul import RowLayout, arrived_layout
from scmoe.kernels.permute import (
  Permutation,
  gather_rows,
  make_permutation,
  permutation_of,
  sum_chunks,
  sum_rows,
  weigh_rows,
)
from scmoe.moe.dispatch.positions import queue_positions
from scmoe.moe.types import Dispatched, Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import Exchange, largest
from scmoe.parallel.mesh import TOKEN_AXES

# An overflow round has room for 1/4 of the first round's rows, rounded up. Most of its time does
# not depend on its rows: on two GPUs with 16 MiB of rows each, a round takes 0.13 ms with 1/8 as
# with 1/4 (differences of experiments/dispatch/results/results_two_gpus.json). So fewer, larger
# ones are faster.
OVERFLOW = 4
# The axes of tokens over which this transport exchanges no rows. Devices that differ in one of
# these axes alone dispatch their own tokens to the same experts.
BESIDE_EXPERT = tuple(axis for axis in TOKEN_AXES if axis != "expert")


def buffer_rows(choices: float, *, slack: float, peers: int, chunks: int = 1) -> int:
  """Rows for each peer in one chunk of the first round; all choices if there is one rank only.

  With several ranks the number is rounded up, and at least 1. It is P unless `Dropless.longest`
  needs fewer.

  Args:
    choices: T·K of one device, or the number of rows that its queues are expected to have.
    slack: ratio of the first round's rows for a peer, in all chunks together, to the balanced
      share, which is choices / peers.
    peers: W, the number of ranks, this one included.
    chunks: number of parts of the round.
  """
  if peers == 1:
    return math.ceil(choices)
  return max(1, math.ceil(slack * choices / peers / chunks))


def overflow_rows(first_rows: int) -> int:
  """Rows for each peer in an overflow round: first round / `OVERFLOW`, rounded up; at least 1.

  Args:
    first_rows: rows per peer in the first round, all chunks together.
  """
  return max(1, -(-first_rows // OVERFLOW))


@dataclasses.dataclass(frozen=True)
class Dropless:
  """The transport that sends all rows, in rounds over a fixed buffer; it needs an exchange.

  Without an exchange, `Local` drops nothing either.

  Attributes:
    exchange: the all-to-all between the ranks of the expert axis.
    slack: ratio of the first round's rows for a peer, in all chunks together, to the balanced
      share; at least 1, by default 1.25.
    chunks: number of parts of the first round that travel, and are computed, one after the other.
    order: the order of a queue's choices of one expert; see `queue_positions`.
    longest: an upper bound of a queue's length, if one is known (`Packed`). The first round is no
      larger than so many rows need; if it has room for them, overflow rounds are left out of the
      program.
    first_round: leave overflow rounds out in any case. Rows without room in the first round then
      add nothing to the output, and `Dispatched.rounds` > 1 says that a rank has such rows.
  """

  exchange: Exchange
  slack: float = 1.25
  chunks: int = 1
  order: str = "choice"
  longest: int | None = None
  first_round: bool = False
  delivers: ClassVar[bool] = False  # whether `_send` itself brings the rows to their experts
  weighs: ClassVar[bool] = True  # whether the tokens' device multiplies the outputs by the weights

  @property
  def sends_ahead(self) -> bool:
    """Whether rows travel to other devices, or would but for the ablation `silent`.

    See `Transport`.
    """
    return self.exchange.size > 1

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """Sends the first round of rows; before that it runs the overflow rounds, if it has `experts`.

    `longest` or `first_round` can leave the overflow rounds out of the program.

    XLA runs no exchange beside a loop that contains exchanges, even if the loop runs zero times. So
    the loop ends before the first round's exchange begins: dense work can then hide that exchange.
    Each chunk of the first round moves at most P rows of every queue. If the experts are not at
    hand yet (`overlap.ahead`), `overflow` runs the loop later.

    Args:
      x_TD: tokens of this device.
      routing: their choices.
      experts: `(rows, layout) -> rows`, for the rows of overflow rounds: an nnx.Module, or a
        function that is not differentiated with respect to arrays that it captures. None:
        `overflow` has to be called with the result, if that has `queues`.

    Returns:
      `Dispatched` with rows [W·P, D] in each chunk, source rank by source rank (`Put`: the experts'
      tiles). With experts it holds the overflow rounds' output, without them the queues, unless
      `longest` or `first_round` leaves such rounds out.

    Raises:
      ConfigError: `routing` is no `Routing`, or `order` is unknown; see also `Put`.
    """
    check_type("routing", routing, Routing)
    size, bound = self._rows(routing), self._longest(routing)
    queues, first = self._queues(routing), size * self.chunks
    dropped, rounds = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    rounds_after = lambda longest: -(-jnp.maximum(0, longest - first) // overflow_rows(first))
    overflow_TD = left_over = None
    if self.first_round:
      rounds += rounds_after(queues.longest)
    elif bound is None or first < bound:
      # All devices of the mesh run the loop equally often, as the longest queue of any of them
      # requires, also those that this exchange does not reach: devices that share an expert gather
      # its weights, or each other's rows, within the loop.
      longest = largest(queues.longest, BESIDE_EXPERT, "counts")
      rounds += rounds_after(checkpoint_name(longest, "moe_rows"))
      if experts is None:
        left_over = queues
      else:
        overflow_TD = self._overflow(x_TD, routing, queues, rounds, experts)
    rows, layouts, windows, plans = [], [], [], []
    for chunk in range(self.chunks):
      # The overflow rounds' result, if any, is computed before the first chunk's exchange begins.
      before = overflow_TD if chunk == 0 else None
      sent, queues, before = self._send(x_TD, routing, queues, chunk, size, before)
      overflow_TD = before if chunk == 0 else overflow_TD
      rows_RD = sent.rows_RD
      if not self.delivers:
        packed = rows_RD.reshape(self.exchange.size, size, -1)
        rows_RD = self.exchange.to_experts(packed, chunk).reshape(rows_RD.shape)
      # With `train.remat` dots or full, `jax.checkpoint` keeps the values named "moe_rows": the
      # backward pass exchanges no row of the first round again.
      sent = dataclasses.replace(sent, rows_RD=checkpoint_name(rows_RD, "moe_rows"))
      arrived, layout = self._arrived(sent, queues, chunk * size, size)
      rows.append(arrived.rows_RD)
      layouts.append(layout)
      windows.append(arrived.window)
      plans.append(arrived.plan)
    if overflow_TD is not None:
      # In the backward pass, this barrier makes the overflow rounds, and the exchange of the first
      # chunk's gradient, wait until the experts have computed that gradient.
      rows[0], overflow_TD = barrier((rows[0], overflow_TD), "backward")
      overflow_TD = checkpoint_name(overflow_TD, "moe_rows")
    weight_TK = routing.weight_TK if self.weighs else None
    kept = tuple(windows), weight_TK, overflow_TD, left_over, tuple(plans)
    return Dispatched(tuple(rows), tuple(layouts), dropped, rounds, *kept)

  def overflow(
    self, x_TD: Float[Array, "T D"], routing: Routing, sent: Dispatched, experts: Any
  ) -> Dispatched:
    """Runs the overflow rounds that `dispatch` left out; returns `sent` with their output.

    Args:
      x_TD, routing, experts: as for `dispatch`.
      sent: what `dispatch` returned without experts; its `queues` must not be None.
    """
    overflow_TD = self._overflow(x_TD, routing, sent.queues, sent.rounds, experts)
    overflow_TD = checkpoint_name(overflow_TD, "moe_rows")
    return dataclasses.replace(sent, overflow_TD=overflow_TD, queues=None)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """Brings the first round's outputs back and adds up those of each token, weighted: [T, D].

    To this sum it adds the part of the output that overflow rounds have computed, if there is one.
    """
    check_type("sent", sent, Dispatched)
    back = []
    for rows_RD, plan in zip(sent.rows, sent.plans, strict=True):
      rows_RD = self._returning(rows_RD, plan)
      packed = rows_RD.reshape(self.exchange.size, -1, rows_RD.shape[-1])
      ours_RD = self.exchange.all_to_all(packed).reshape(rows_RD.shape)
      back.append(self.exchange.arrived(checkpoint_name(ours_RD, "moe_rows")))
    return self._added_up(sent, back)

  def _added_up(self, sent: Dispatched, back: list[Array]) -> Array:
    """Adds up the weighted outputs in all chunks, and the overflow rounds' part if any: [T, D].

    Args:
      sent: the result of `dispatch`.
      back: for each chunk, the experts' outputs in the rows of this device's send buffer.
    """
    y_TD = sum_chunks(tuple(back), sent.weight_TK, sent.permutations)
    return y_TD if sent.overflow_TD is None else y_TD + sent.overflow_TD.astype(y_TD.dtype)

  def _send(
    self, x_TD: Array, routing: Routing, queues: Any, chunk: int, size: int, before: Array | None
  ) -> tuple[Chunk, Any, Array | None]:
    """Packs one chunk of the first round: `size` positions of every queue, from chunk · size on.

    Args:
      x_TD: tokens of this device.
      routing: their choices.
      queues: of their choices.
      chunk: which chunk.
      size: P.
      before: a value that has to be computed before the rows leave; None: no such value.

    Returns:
      The chunk with the rows that leave, or with those that arrive if the transport `delivers`; the
      queues, tied by a barrier to the rows that leave (but see `Put`); and `before`, tied to both.
    """
    given_TK, multiplies_input = used_weights(routing)
    sent, queues = self._pack(x_TD, given_TK, multiplies_input, queues, chunk * size, size)
    if before is not None:
      rows_RD, queues, before = barrier((sent.rows_RD, queues, before), "forward")
      sent = dataclasses.replace(sent, rows_RD=rows_RD)
    return sent, queues, before

  # The methods below are what differs between this transport and others with the same rounds.

  def _queues(self, routing: Routing) -> Any:
    """The queues of this device's choices; a pytree with the array `longest` of `Queues`."""
    priority_T = priorities(routing, self.order)
    taken_TK, count_E = routing.taken_TK, routing.count_E
    return make_queues(
      routing.expert_TK, taken_TK, count_E, self.exchange, self.order, priority_T=priority_T
    )

  def _pack(
    self, x_TD: Array, given_TK: Array, multiplies_input: bool, queues: Any, low: Any, size: int
  ) -> tuple[Chunk, Any]:
    """Packs the rows at positions [low, low + size) of every queue.

    Args:
      x_TD: tokens of this device.
      given_TK: the weights of their choices.
      multiplies_input: whether these weights multiply the experts' input, or their output.
      queues: of their choices.
      low: the first position; may be traced.
      size: number of positions.

    Returns:
      The rows that leave, and the queues, tied to these rows by a barrier.
    """
    window = make_window(queues, low, size)
    rows_RD = gather_rows(x_TD, window, sent=True)
    if multiplies_input:
      rows_RD = weigh_rows(rows_RD, given_TK, window)
    # The layout of the arriving rows is computed from the returned queues: not before the buffer is
    # full, but perhaps beside the exchange.
    queues, rows_RD = barrier((queues, rows_RD))
    return Chunk(rows_RD, window), queues

  def _arrived(self, sent: Chunk, queues: Any, low: Any, size: int) -> tuple[Chunk, RowLayout]:
    """The rows as the experts get them, and their layout.

    Args:
      sent: rows that have arrived, from positions [low, low + size) of each rank's queue for this
        device.
      queues, low, size: as for `_pack`.
    """
    return sent, _layout_of_window(queues, low, size)

  def _returning(self, rows_RD: Array, plan: Any) -> Array:
    """The rows that go back to their tokens' devices, made of the experts' outputs for a chunk.

    Args:
      rows_RD: the outputs.
      plan: that of the chunk that `_arrived` returned.
    """
    del plan
    return rows_RD

  def _longest(self, routing: Routing) -> int | None:
    """An upper bound of a queue's length; None: no bound is known."""
    del routing
    return self.longest

  def _expected(self, routing: Routing) -> float:
    """The expected number of rows in all queues of a device together, for a balanced router."""
    return routing.expert_TK.size

  def _rows(self, routing: Routing) -> int:
    """Rows for each peer in one chunk of the first round (P); no more than `_longest` needs."""
    peers, chunks, longest = self.exchange.size, self.chunks, self._longest(routing)
    rows = buffer_rows(self._expected(routing), slack=self.slack, peers=peers, chunks=chunks)
    return rows if longest is None else min(rows, -(-longest // chunks))

  def _overflow(
    self, x_TD: Array, routing: Routing, queues: Queues, rounds: Array, experts: Any
  ) -> Array:
    """The output's part [T, D] from the rounds after the first; 0 if one round is enough.

    The backward pass runs the same rounds again, each with its own vector-Jacobian product. So
    neither pass needs more memory for more rounds. The outputs of all rounds are added up in the
    type of x; that loses little precision, since a token has rows in at most K rounds.
    """
    peers = self.exchange.size
    first = self.chunks * self._rows(routing)
    size = overflow_rows(first)
    given_TK, multiplies_input = used_weights(routing)
    graph, state = nnx.split(experts) if isinstance(experts, nnx.Module) else (None, ())

    def run_round(index, x_TD, given_TK, state, queues):
      low = first + (index - 1) * size
      with jax.named_scope("dispatch"):
        sent, queues = self._pack(x_TD, given_TK, multiplies_input, queues, low, size)
        rows = self.exchange.to_experts(sent.rows_RD.reshape(peers, size, -1))
        sent = dataclasses.replace(sent, rows_RD=rows.reshape(sent.rows_RD.shape))
      run = experts if graph is None else nnx.merge(graph, state)
      with jax.named_scope("experts"):
        arrived, layout = self._arrived(sent, queues, low, size)
        done_RD = run(arrived.rows_RD, layout)
      with jax.named_scope("combine"):
        done_RD = self._returning(done_RD, arrived.plan)
        ours = self.exchange.all_to_all(done_RD.reshape(peers, size, -1))
        weight_TK = None if multiplies_input or not self.weighs else given_TK
        return sum_rows(ours.reshape(done_RD.shape), weight_TK, sent.window)

    return _sum_of_rounds(run_round, x_TD, given_TK, state, queues, rounds)


@dataclasses.dataclass(frozen=True)
class Chunk:
  """The rows of one chunk of the first round, or of one overflow round, and whose they are.

  Attributes:
    rows_RD: the rows that leave this device, or that have arrived if the transport `delivers`; from
      `_arrived` the rows as the experts get them.
    window: which choice of this device fills which row of its send buffer [W·P].
    plan: what `combine` needs beside rows and window; None: it needs nothing else.
  """

  rows_RD: Array
  window: Permutation
  plan: Any = None


def used_weights(routing: Routing) -> tuple[Array, bool]:
  """The weights of the choices, and whether they multiply the experts' input or their output.

  The loop of overflow rounds gets, and differentiates, only this one array of weights.
  """
  if routing.input_weight_TK is None:
    return routing.weight_TK, False
  return routing.input_weight_TK, True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_rounds(run_round, x_TD, weight_TK, state, queues, end):
  """Σ over index in [1, end) of run_round(index, ...), added up in the type of x.

  The backward pass adds up the rounds' gradients in float32 at least.
  """

  def body(index, y_TD):
    return y_TD + run_round(index, x_TD, weight_TK, state, queues).astype(y_TD.dtype)

  return jax.lax.fori_loop(1, end, body, jnp.zeros_like(x_TD))


def _sum_of_rounds_fwd(run_round, x_TD, weight_TK, state, queues, end):
  y_TD = _sum_of_rounds(run_round, x_TD, weight_TK, state, queues, end)
  return y_TD, (x_TD, weight_TK, state, queues, end)


def _sum_of_rounds_bwd(run_round, residuals, y_bar_TD):
  x_TD, weight_TK, state, queues, end = residuals

  def body(index, total):
    run = lambda x_TD, weight_TK, state: run_round(index, x_TD, weight_TK, state, queues)
    added_TD, pull = jax.vjp(run, x_TD, weight_TK, state)
    gradients = pull(y_bar_TD.astype(added_TD.dtype))
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients)

  primals = (x_TD, weight_TK, state)
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  total = jax.lax.fori_loop(1, end, body, jax.tree.map(wide, primals))
  narrow = jax.tree.map(lambda t, p: t.astype(p.dtype), total, primals)
  return (*narrow, None, None)


_sum_of_rounds.defvjp(_sum_of_rounds_fwd, _sum_of_rounds_bwd)


# -- queues of choices, one for each peer ---------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queues:
  """One queue per peer, with this device's taken choices of that peer's experts, expert by expert.

  Attributes:
    peer_TK: int32, the peer that has each choice's expert; a taken choice stands in its queue.
    rank_TK: int32, the choice's position in that queue; 2³¹ - 1, past every queue, for a choice
      that is not taken.
    order_N: int32, all queues one after the other: the choice t·K + k at each position; -1 behind
      the last queue.
    start_W, length_W: int32, where each queue begins in order_N, and its length.
    longest: int32 scalar, length of the longest queue of any rank of the exchange.
    counts_WWe: int32 [source rank, rank, expert of that rank], the number of choices that the
      source sends to the expert.
    received_We: int32 [source rank, expert of this device], the part of `counts_WWe` that this
      device receives.

  Rank 0 of the example at the top of this file has peer_TK = 1 0 1 1 1, rank_TK = 0 0 3 1 2,
  order_N = 1 0 3 4 2, start_W = 0 1 and length_W = 1 4.
  """

  peer_TK: Array
  rank_TK: Array
  order_N: Array
  start_W: Array
  length_W: Array
  longest: Array
  counts_WWe: Array
  received_We: Array


def priorities(routing: Routing, order: str) -> Array | None:
  """The tokens' priorities for `queue_positions`; None if `order` is not `priority`."""
  return routing.probs_TE.max(-1) if order == "priority" else None


def make_queues(
  expert_TK: Array,
  taken_TK: Array,
  count_E: Array,
  exchange: Exchange,
  order: str,
  *,
  priority_T: Array | None = None,
) -> Queues:
  """Makes the queues of this device's choices, one per peer.

  One small all-gather of the counts tells every rank both how many rows it will receive and how
  long the longest queue of any rank is.

  Args:
    expert_TK: int32, the experts that are chosen, E / W of them on each rank.
    taken_TK: bool, True for choices that stand in a queue.
    count_E: int32, number of these choices of each expert.
    exchange: between the W ranks.
    order, priority_T: see `queue_positions`.
  """
  assert exchange.axis is not None
  num_experts, ranks = count_E.size, exchange.size
  position_TK, _ = queue_positions(
    expert_TK, num_experts, 1, taken_TK, order=order, priority_T=priority_T
  )
  sent_We = count_E.reshape(ranks, num_experts // ranks)
  with jax.named_scope("counts"):
    everyone_WWe = jax.lax.all_gather(sent_We, exchange.axis)
    # The counts are named like the rows, so that a backward pass that recomputes the forward pass
    # does not gather them again.
    everyone_WWe = checkpoint_name(everyone_WWe, "moe_rows")
  length_W = sent_We.sum(1)
  start_W = jnp.cumsum(length_W) - length_W
  # For each expert, the number of choices of the experts before it on the same peer.
  before_E = (jnp.cumsum(sent_We, 1) - sent_We).reshape(-1)
  peer_TK = expert_TK // (num_experts // ranks)
  rank_TK = before_E[expert_TK] + position_TK
  nowhere = jnp.iinfo(jnp.int32).max
  behind_TK = jnp.where(taken_TK, start_W[peer_TK] + rank_TK, nowhere)
  return Queues(
    peer_TK=peer_TK,
    rank_TK=jnp.where(taken_TK, rank_TK, nowhere),
    order_N=make_permutation(behind_TK, expert_TK.size).copy_R,
    start_W=start_W,
    length_W=length_W,
    longest=everyone_WWe.sum(-1).max(),
    counts_WWe=everyone_WWe,
    received_We=everyone_WWe[:, jax.lax.axis_index(exchange.axis)],
  )


def make_window(queues: Queues, low: Any, rows: int) -> Permutation:
  """The permutation that fills a send buffer with positions [low, low + rows) of each queue.

  In the example at the top of this file, the window [0, 2) of rank 0's queues has copy_R = 1 -1 0 3
  and row_TK = 2 0 4 3 4, where 4 stands for no row.

  Args:
    queues: of this device's choices.
    low: the first position; may be traced.
    rows: P.
  """
  total = queues.start_W.shape[0] * rows
  inside_TK = (queues.rank_TK >= low) & (queues.rank_TK < low + rows)
  row_TK = jnp.where(inside_TK, queues.peer_TK * rows + queues.rank_TK - low, total)
  rank_1P = low + jnp.arange(rows, dtype=jnp.int32)[None, :]
  copy_WP = queues.order_N[jnp.minimum(queues.start_W[:, None] + rank_1P, row_TK.size - 1)]
  copy_WP = jnp.where(rank_1P < queues.length_W[:, None], copy_WP, -1)
  return permutation_of(row_TK, copy_WP.reshape(-1))


def in_window(counts: Array, low: Any, size: int) -> tuple[Array, Array]:
  """The place in a window of a queue where each expert's rows begin, and how many lie in it.

  For example, a queue holds 3 rows for expert 0 and 1 for expert 1. In its window [2, 4) expert 0
  has 1 row, at 0, and expert 1 has 1 row, at 1.

  Args:
    counts: int32 [..., experts], how many rows each queue holds for each expert, in this order.
    low, size: the window is [low, low + size).

  Returns:
    Two arrays like `counts`: the first row, counted from `low`, and the number of rows.
  """
  end = jnp.cumsum(counts, -1)
  start, end = (jnp.clip(a - low, 0, size) for a in (end - counts, end))
  return start, end - start


def _layout_of_window(queues: Queues, low: Any, rows: int) -> RowLayout:
  """The layout of rows that arrive here from positions [low, low + rows) of all ranks' queues.

  It says each row's expert, the row's position among the rows that arrive for that expert from all
  ranks' windows, and how many such rows each expert has. Experts are numbered from 0 on each
  device. The queue of source rank s for this device holds the rows for expert 0, then those for
  expert 1, ...: the counts alone tell which of these rows lie in the window. An expert's rows from
  rank 0 have the first positions, then those from rank 1, ...

  Rank 1 of the example at the top of this file, where rank 1 sends itself one row for each of its
  two experts: received_We = [[3, 1], [1, 1]]. In the window [0, 2) it receives two rows from each
  rank. They are for its experts 0 0 | 0 1, at the positions 0 1 | 2 0: three rows for expert 0, one
  for expert 1.
  """
  start_We, inside_We = in_window(queues.received_We, low, rows)
  end_We = start_We + inside_We
  earlier_We = jnp.cumsum(inside_We, 0) - inside_We  # rows from lower source ranks
  index_P = jnp.arange(rows, dtype=jnp.int32)
  expert_WP = (index_P[None, :, None] >= end_We[:, None, :]).sum(-1, dtype=jnp.int32)
  # One more column, for rows of no expert, whose position nobody reads.
  first_We = jnp.pad(earlier_We - start_We, ((0, 0), (0, 1)))
  position_WP = jnp.take_along_axis(first_We, expert_WP, 1) + index_P
  return arrived_layout(
    expert_WP.reshape(-1), position_WP.reshape(-1), inside_We.sum(0, dtype=jnp.int32)
  )
