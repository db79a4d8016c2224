"""The per-rank transport: a token's row travels once to each rank that has experts of its choice.

`Dropless` sends a row for each choice. With K = 8 choices on W = 2 ranks, a token has about four on
each rank, so the same row travels to each four times, and four outputs come back. Here a row
travels once to each rank, as with DeepEP (deepseek-ai/DeepEP) and Megatron-LM's
`--moe-token-dispatcher-type flex`. One exchange before the first rows carries, for all chunks,
which experts of the receiving rank each token chose, and with what weights. The receiving rank
computes as `Local` does: its experts gather the rows, weigh the outputs and add up those of each
row. One row for each that came goes back, and the token's device adds up at most W of them.

The rounds are those of `Dropless`, with one place in a rank's queue for each token that has a
choice there. A balanced router sends the share `reached_share` of a device's T tokens to a rank;
the first round has room for `dispatch.slack` times as many in each queue, but for T at most. With
room for T there is nothing to queue: every token goes to every rank, also to one that has none of
its experts, where the numbers beside it name none. Token t has the place t in each queue, no count
is exchanged, and the program has no overflow rounds. With a slack of 1.25 that is so for K = 8 and
up to W = 4 ranks.

The price is memory at the experts. Each of the W·P rows that a rank receives in a chunk may have
all K choices there, or one of each of the rank's E / W experts if these are fewer. So the experts'
buffers have room for W·P·min(K, E / W) choices, used or not: for W = 2 and K = 8 twice the T·K
choices that are expected, where `Dropless` has room for `dispatch.slack` times as many. While P = T
the room grows as W; beyond that P shrinks, and the room approaches slack·K²·T, 80 T for K = 8, if
the experts are many. With one expert a rank it is at most that of `Dropless`. The rows themselves
need less, 2 T of them instead of 10 T for W = 2.

Worked example: two ranks, two experts each (0 and 1 on rank 0, 2 and 3 on rank 1). Three tokens of
rank 0 with two choices each chose the experts [2, 3], [0, 2] and [1, 0]. Rank 0's queue for itself
holds the tokens 1 and 2, its queue for rank 1 the tokens 0 and 1: four rows, where `Dropless` sends
six. With room for two rows (fewer than any slack gives three tokens), rank 1 gets token 0 with
[0, 1], both of its experts, and token 1 with [2, 0]: 2 is no expert of a rank with two. With a
slack of 1.25 there is room for three; each rank then gets the tokens 0, 1 and 2, and rank 1 the
choices [0, 1], [2, 0] and [2, 2].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from scmoe.kernels.grouped_matmul import RowLayout, choices_layout
from scmoe.kernels.permute import Permutation, gather_rows, permutation_of, sum_rows, take_rows
from scmoe.moe.dispatch.dropless import (
  Chunk,
  Dropless,
  Queues,
  make_queues,
  make_window,
  priorities,
  used_weights,
)
from scmoe.moe.dispatch.local import weighted_rows
from scmoe.moe.types import Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import Exchange


@dataclasses.dataclass(frozen=True)
class PerRank(Dropless):
  """The transport that sends a token once to each rank with experts that it chose; drops nothing.

  Methods, rounds and arguments are those of `Dropless`; a queue holds tokens instead of choices,
  and `longest` is not read: no queue is longer than T. `dispatch` returns rows [W·P, D] in each
  chunk, with the layout of tokens in place (`choices_layout`) and min(K, E / W) choices each. If
  weights multiply the experts' input, it returns a weighted row for each of these choices instead,
  [W·P·min(K, E / W), D], sorted by expert. The taken choices of a token have to be of different
  experts, as those of `route` are.
  """

  weighs: ClassVar[bool] = False

  def _longest(self, routing: Routing) -> int:
    """T, the length of a queue that has all tokens."""
    return routing.expert_TK.shape[0]

  def _expected(self, routing: Routing) -> float:
    """W · T · `reached_share`."""
    (tokens, choices), ranks = routing.expert_TK.shape, self.exchange.size
    return ranks * tokens * reached_share(ranks, routing.num_experts, choices)

  def _queues(self, routing: Routing) -> TokenQueues:
    """The queues of this device's tokens, one for each rank."""
    ranks, num_experts = self.exchange.size, routing.num_experts
    expert_TK = jnp.where(routing.taken_TK, routing.expert_TK, num_experts)
    local, multiplies_input = num_experts // ranks, routing.input_weight_TK is not None
    if self._rows(routing) * self.chunks >= self._longest(routing):
      return TokenQueues(expert_TK, None, local, multiplies_input)
    rank_W = jnp.arange(ranks, dtype=jnp.int32)
    goes_TW = (expert_TK[:, :, None] // local == rank_W).any(1)
    queues = make_queues(
      jnp.broadcast_to(rank_W, goes_TW.shape),
      goes_TW,
      goes_TW.sum(0, dtype=jnp.int32),
      self.exchange,
      self.order,
      priority_T=priorities(routing, self.order),
    )
    return TokenQueues(expert_TK, queues, local, multiplies_input)

  def _send(
    self,
    x_TD: Array,
    routing: Routing,
    queues: TokenQueues,
    chunk: int,
    size: int,
    before: Array | None,
  ) -> tuple[Chunk, TokenQueues, Array | None]:
    """Exchanges the choices of all chunks' rows before the first chunk; see `Dropless._send`.

    Only the rows of later chunks wait for other values (`scmoe.parallel.collectives.waiting`).
    Their choices must not. If the choices waited for these values, the dense step beside the rows'
    exchange would wait for the choices. If each chunk exchanged its choices by itself and waited
    for nothing, XLA could place that exchange between those of rows, and delay them. So all choices
    leave at once, where the first chunk's would, and
    the later chunks exchange rows alone. Like the first chunk's rows, they leave behind `before`.
    """
    if chunk == 0:
      window = queues.window(0, size * self.chunks, self.exchange.size)
      given = _sent_choices(used_weights(routing)[0], queues, window, self.exchange.size)
      if before is not None:
        given, before = barrier((given, before), "forward")
      queues = dataclasses.replace(queues, arrived=self._exchange_choices(given))
    return super()._send(x_TD, routing, queues, chunk, size, before)

  def _pack(
    self,
    x_TD: Array,
    given_TK: Array,
    multiplies_input: bool,
    queues: TokenQueues,
    low: Any,
    size: int,
  ) -> tuple[Chunk, TokenQueues]:
    """Packs the rows, with their choices that have arrived; see `Dropless._pack`.

    An overflow round exchanges its choices here. They travel before the rows, so that the layout of
    the arriving rows can be computed beside the rows' exchange; the queues, which that layout does
    not read, have no barrier.
    """
    del multiplies_input
    ranks = self.exchange.size
    window = queues.window(low, size, ranks)
    rows_RD = gather_rows(x_TD, window)
    if queues.arrived is None:
      arrived = self._exchange_choices(_sent_choices(given_TK, queues, window, ranks))
    else:
      arrived = _Choices(*(a[:, low : low + size] for a in queues.arrived))
    choices = _Choices(*(a.reshape(ranks * size, -1) for a in arrived))
    rows_RD, choices = barrier((rows_RD, choices), "forward")
    return Chunk(rows_RD, window, choices), queues

  def _exchange_choices(self, given: _Choices) -> _Choices:
    """Sends the choices of the rows that leave; returns those of the rows that arrive, [W, P, K].

    If `jax.checkpoint` keeps the rows that arrive, it keeps their choices too.
    """
    return _Choices(*checkpoint_name(_exchanged(self.exchange, *given), "moe_rows"))

  def _arrived(
    self, sent: Chunk, queues: TokenQueues, low: Any, size: int
  ) -> tuple[Chunk, RowLayout]:
    """The rows, or the weighted row of each choice, with their layout; see `Dropless._arrived`.

    The plan becomes which choice fills which weighted row; None without such rows.
    """
    del low, size
    (expert_MK, weight_MK), local = sent.plan, queues.local
    if not queues.multiplies_input:
      layout = choices_layout(expert_MK, weight_MK, local)
      return dataclasses.replace(sent, plan=None), layout
    rows_RD, layout, permutation = weighted_rows(sent.rows_RD, expert_MK, weight_MK, local)
    return Chunk(rows_RD, sent.window, permutation), layout

  def _returning(self, rows_RD: Array, plan: Permutation | None) -> Array:
    """One row for each that arrived; the experts have added them up unless there is a plan."""
    return rows_RD if plan is None else sum_rows(rows_RD, None, plan)


def reached_share(ranks: int, num_experts: int, choices: int) -> float:
  """The expected share of a device's tokens that have a choice on one rank.

  A balanced router chooses K different experts of E. They all miss the E / W experts of a rank with
  the probability (E - E/W) / E · (E - E/W - 1) / (E - 1) · ..., K factors. With W = 2, E = 128 and
  K = 8 the share is 0.997, with W = 8, E = 8 and K = 2 it is 2 / 8.

  Args:
    ranks: W.
    num_experts: E.
    choices: K.
  """
  others = num_experts - num_experts // ranks
  missed = (max(0, others - i) / (num_experts - i) for i in range(min(choices, num_experts)))
  return 1 - math.prod(missed)


def _sent_choices(
  given_TK: Array, queues: TokenQueues, window: Permutation, ranks: int
) -> _Choices:
  """The choices of the rows in a window's send buffer, [W, P, K], with the receiver's numbers.

  Args:
    given_TK: the weights of the tokens' choices.
    queues: of the tokens.
    window: which token has which row.
    ranks: W.
  """
  local, weight_RK = queues.local, gather_rows(given_TK, window)
  expert_RK = take_rows(queues.expert_TK, window.token_R)
  # Experts are numbered from 0 on each rank; `local` stands for a choice of another rank's expert,
  # one that is not taken, or one of an empty row.
  rank_R1 = jnp.arange(ranks, dtype=jnp.int32).repeat(expert_RK.shape[0] // ranks)[:, None]
  expert_RK = expert_RK - rank_R1 * local
  here_RK = (expert_RK >= 0) & (expert_RK < local) & (window.token_R >= 0)[:, None]
  expert_RK = jnp.where(here_RK, expert_RK, local)
  if local < expert_RK.shape[1]:
    expert_RK, weight_RK = _by_expert(expert_RK, weight_RK, local)
  return _Choices(*(a.reshape(ranks, -1, a.shape[1]) for a in (expert_RK, weight_RK)))


def _by_expert(
  expert_RK: Int[Array, "R K"], weight_RK: Float[Array, "R K"], experts: int
) -> tuple[Int[Array, "R e"], Float[Array, "R e"]]:
  """A row's choices with a column for each of a rank's experts, where these are fewer than K.

  With K = 3 and two experts, the choices [2, 1, 2] with the weights [.5, .3, .2] become [2, 1] with
  [0, .3]: expert 0 is not chosen. Two choices of one expert become one, with the sum of their
  weights.

  Args:
    expert_RK: the experts, from 0 on; `experts` for none.
    weight_RK: the weight of each choice.
    experts: e, number of the rank's experts.
  """
  expert_e = jnp.arange(experts, dtype=expert_RK.dtype)
  chosen_RKe = expert_RK[:, :, None] == expert_e
  weight_Re = jnp.where(chosen_RKe, weight_RK[:, :, None], 0).sum(1)
  return jnp.where(chosen_RKe.any(1), expert_e, experts), weight_Re


class _Choices(NamedTuple):
  """The choices of rows that leave or have arrived, [W, P, K] or [W·P, K].

  Here, and wherever such choices are exchanged or kept, K stands for min(K, E / W).

  Attributes:
    expert: int32, experts of the rank to which the rows travel, from 0 on; the number of these
      experts for none.
    weight: the weight of each choice; that of no expert may be anything finite.
  """

  expert: Array
  weight: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(
  exchange: Exchange, expert_WPK: Int[Array, "W P K"], weight_WPK: Float[Array, "W P K"]
) -> tuple[Int[Array, "W P K"], Float[Array, "W P K"]]:
  """Exchanges the rows' experts and weights, as integers in one all-to-all.

  The gradient of the weights is exchanged as it is.
  """
  number = jnp.dtype(f"int{8 * weight_WPK.dtype.itemsize}")
  bits_WPK = jax.lax.bitcast_convert_type(weight_WPK, number)
  arrived = exchange.all_to_all(jnp.concatenate([expert_WPK.astype(number), bits_WPK], -1))
  expert_WPK, bits_WPK = jnp.split(arrived, 2, -1)
  weight_WPK = jax.lax.bitcast_convert_type(bits_WPK, weight_WPK.dtype)
  return expert_WPK.astype(jnp.int32), weight_WPK


_exchanged.defvjp(
  lambda exchange, *given: (_exchanged(exchange, *given), None),
  lambda exchange, _, bars: (None, exchange.all_to_all(bars[1])),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenQueues:
  """One queue per rank, with the tokens of this device that have a choice there.

  Attributes:
    expert_TK: int32, the tokens' choices; E for one that is not taken.
    queues: the queues; "choice" w of a token stands in the queue of rank w. None: all tokens stand
      in each queue, token t at position t.
    local: number of experts of each rank, static.
    multiplies_input: whether weights multiply the experts' input; static.
    arrived: the choices [W, C·P, K] of the rows that come here in the first round's C chunks; None
      before they have arrived, and in overflow rounds.
  """

  expert_TK: Array
  queues: Queues | None
  local: int = dataclasses.field(metadata={"static": True})
  multiplies_input: bool = dataclasses.field(metadata={"static": True})
  arrived: _Choices | None = None

  @property
  def longest(self) -> Array:
    """int32 scalar, length of the longest queue of any rank of the exchange."""
    if self.queues is None:
      return jnp.asarray(self.expert_TK.shape[0], jnp.int32)
    return self.queues.longest

  def window(self, low: Any, size: int, ranks: int) -> Permutation:
    """The permutation of a send buffer with positions [low, low + size) of each queue.

    Without `queues`, two ranks and three tokens, the window [2, 4) has copy_R = 4 -1 5 -1: row 0 is
    token 2 for rank 0, row 2 token 2 for rank 1, and row_TW = [[4, 4], [4, 4], [0, 2]], where 4
    stands for no row.
    """
    if self.queues is not None:
      return make_window(self.queues, low, size)
    tokens = self.expert_TK.shape[0]
    rank_W = jnp.arange(ranks, dtype=jnp.int32)
    place_T1 = jnp.arange(tokens, dtype=jnp.int32)[:, None] - low
    inside_T1 = (place_T1 >= 0) & (place_T1 < size)
    row_TW = jnp.where(inside_T1, rank_W * size + place_T1, ranks * size)
    token_P = low + jnp.arange(size, dtype=jnp.int32)
    copy_WP = jnp.where(token_P < tokens, token_P * ranks + rank_W[:, None], -1)
    return permutation_of(row_TW, copy_WP.reshape(-1))
