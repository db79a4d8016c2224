"""The capacity transport: a buffer of C rows for each expert and capacity group, filled or not.

A *capacity group* is a run of consecutive tokens of a device, with queues of its own, one per
expert. Every device sends C rows per expert and group to a device that has the expert, or a part of
it. Choices beyond the C-th of a queue are dropped and counted. If C is the number of tokens of a
group, no choice is dropped. One exchange sends the buffer, or each chunk of it, and another brings
the outputs back. If every device has all experts, nothing is exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type
from scmoe.kernels.grouped_matmul import padded_layout
from scmoe.kernels.permute import (
  Permutation,
  gather_rows,
  make_permutation,
  permutation_of,
  sum_chunks,
  weigh_rows,
)
from scmoe.moe.dispatch.positions import queue_positions
from scmoe.moe.types import Dispatched, Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import Exchange


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
  """The capacity C: rows of an expert's buffer for one capacity group, of T `tokens`.

  With n = ⌈T / E⌉ it is

    factor > 0   k · ⌊factor · n⌋               what does not fit is dropped
    factor = 0   need                           nothing is dropped
    factor < 0   min(need, k · ⌊−factor · n⌋)   dropped only beyond k · ⌊−factor · n⌋

  C is then rounded up to a multiple of `align`; an `align` above 256 is itself first rounded up to
  a multiple of 128. These are Tutel's rules; products are float64 before they are rounded down.
  `rule="megablocks"` takes ⌊|factor| · k · T / E⌋ instead of k · ⌊|factor| · n⌋. Without tokens the
  result is 0.

  Worked example: five tokens, three experts, n = 2. With k = 1 and factor 1 an expert has 2 rows;
  with k = 2 and factor 1.25 it has 2 · ⌊2.5⌋ = 4.

  Args:
    factor: the capacity factor.
    tokens: T, of the group.
    num_experts: E.
    k: choices per token.
    need: the longest queue, `exact_capacity(counts)`. It depends on data, which `jit` does not have
      when it fixes shapes: leave `need` out there. T then takes its place: no queue is longer,
      since no token visits an expert twice.
    align: number of equal parts that the buffer is cut into (Tutel a2a_ffn_overlap_degree).
    rule: `tutel` or `megablocks`.

  Raises:
    ConfigError: there are tokens, and the factor is not 0, but its product rounds down to 0.
  """
  if not tokens:
    return 0
  need = tokens if need is None else need

  def bound(size: float) -> int:
    """The rows that a factor of this size allows, before `need` and `align` count."""
    if rule == "megablocks":
      return int(size * k * tokens / num_experts)
    return k * int(size * math.ceil(tokens / num_experts))

  rows = bound(abs(factor))
  if factor and not rows:
    share = k * tokens / num_experts if rule == "megablocks" else math.ceil(tokens / num_experts)
    thousandths = math.ceil(1000 / share)
    # A product that would be 1 may be below it in floating point: 0.6 times 3 * 15 / 27 is.
    while not bound(thousandths / 1000):
      thousandths += 1
    least = f"{thousandths / 1000:.3f}".rstrip("0").rstrip(".")
    raise ConfigError(
      f"dispatch.capacity_factor={factor} gives {tokens} tokens over {num_experts} experts a "
      f"capacity of 0; use at least {least} in size, or 0 to drop nothing"
    )
  if factor <= 0:
    rows = min(need, rows) if factor else need
  if align > 256:
    align = math.ceil(align / 128) * 128
  return math.ceil(rows / align) * align


def exact_capacity(count_GE: Array) -> int:
  """The length of the longest queue, the least capacity that drops nothing (Tutel's factor 0).

  It reads the counts on the host, so it works on concrete arrays only, not on what `jit` traces.

  Raises:
    ConfigError: called on a traced array.
  """
  if isinstance(count_GE, Tracer):
    raise ConfigError(
      "exact_capacity got traced counts; under jit a buffer's size cannot depend on data: leave "
      "`need` out of capacity(...), or use dispatch.transport=dropless"
    )
  return int(np.asarray(count_GE).max()) if count_GE.size else 0


@dataclasses.dataclass(frozen=True)
class Capacity:
  """The transport with a fixed buffer per expert; a choice without room is dropped and counted.

  Attributes:
    rows: C, rows of each expert's buffer from one capacity group of one device.
    exchange: the all-to-all between the ranks of the expert axis; E is a multiple of their number
      W.
    groups: G, capacity groups of this device.
    chunks: parts of the buffers that travel, and are computed, one after the other (Tutel's overlap
      degree); G·C is a multiple of it.
    order: who is served first; see `queue_positions`.
  """

  rows: int
  exchange: Exchange = Exchange()
  groups: int = 1
  chunks: int = 1
  order: str = "choice"

  @property
  def sends_ahead(self) -> bool:
    """Whether rows travel to other devices, or would but for the ablation `silent`.

    `dispatch` needs no experts. See `Transport`.
    """
    return self.exchange.size > 1

  def dispatch(
    self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any = None
  ) -> Dispatched:
    """Sends a row for each kept choice, its token or the weighted token, to its expert's device.

    A place of the buffer that no choice fills has a row of zeros.

    Args:
      x_TD: the tokens of this device.
      routing: their choices.
      experts: not used.

    Returns:
      `Dispatched` with rows [W, E / W, G·C / chunks, D] in each chunk: from each source rank, for
      each of this device's experts.

    Raises:
      ConfigError: T is not a multiple of G, `order` is unknown, or `routing` is no `Routing`.
    """
    del experts
    check_type("routing", routing, Routing)
    plan, dropped = self.plan(routing)
    ranks, num_experts = self.exchange.size, routing.num_experts
    rows, layouts, permutations = [], [], []
    # Each chunk is gathered by itself, so its exchange need not wait for another chunk's rows.
    for chunk in range(self.chunks):
      permutation = self._chunk(plan, num_experts, chunk)
      rows_RD = gather_rows(x_TD, permutation)
      if routing.input_weight_TK is not None:
        rows_RD = weigh_rows(rows_RD, routing.input_weight_TK, permutation)
      # The barrier ties the permutation to the gathered rows: whatever reads its permutation waits
      # until these rows are gathered. So another batch's turn (`in_turns`), which waits for arrays
      # of this batch, begins after the gather.
      permutation, rows_RD = barrier((permutation, rows_RD), "forward")
      part = rows_RD.reshape(ranks, num_experts // ranks, -1, x_TD.shape[-1])
      # With `train.remat` dots or full, `jax.checkpoint` keeps the values named "moe_rows": the
      # backward pass exchanges no row again.
      rows.append(checkpoint_name(self.exchange.to_experts(part, chunk), "moe_rows"))
      layouts.append(padded_layout(*part.shape[:3]))
      permutations.append(permutation)
    one, sent = jnp.ones((), jnp.int32), tuple(permutations)
    return Dispatched(tuple(rows), tuple(layouts), dropped, one, sent, routing.weight_TK)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """Sends the experts' outputs back and adds up those of each token's choices: [T, D].

    Each is first multiplied by its `weight_TK`. Dropped choices add 0.
    """
    check_type("sent", sent, Dispatched)
    back = []
    for part in sent.rows:
      rows_WeCD = checkpoint_name(self.exchange.all_to_all(part), "moe_rows")
      rows_WeCD = self.exchange.arrived(rows_WeCD)
      back.append(rows_WeCD.reshape(-1, rows_WeCD.shape[-1]))
    return sum_chunks(tuple(back), sent.weight_TK, sent.permutations)

  def _chunk(self, plan: Permutation, num_experts: int, chunk: int) -> Permutation:
    """The permutation of one chunk of the buffer, from `plan`, the permutation of the whole buffer.

    With n = G·C / chunks, the chunk has the rows [chunk · n, (chunk + 1) · n) of each expert's G·C
    rows.
    """
    if self.chunks == 1:
      return plan
    rows = self.groups * self.rows  # rows of one expert in all chunks
    part = rows // self.chunks
    position_TK, nowhere = plan.row_TK % rows - chunk * part, num_experts * part
    inside_TK = (position_TK >= 0) & (position_TK < part) & (plan.row_TK < num_experts * rows)
    row_TK = jnp.where(inside_TK, plan.row_TK // rows * part + position_TK, nowhere)
    copy_R = plan.copy_R.reshape(num_experts, self.chunks, part)[:, chunk].reshape(-1)
    return permutation_of(row_TK, copy_R)

  def plan(self, routing: Routing) -> tuple[Permutation, Array]:
    """Which choice fills which row of the buffer, and how many choices found no room.

    The buffer's rows are [E, G, C]: by expert, capacity group and position. Worked example: three
    tokens with the choices (0, 1), (0, 1), (1, 0), three experts, G = 1 and C = 2. The positions in
    the experts' queues are (0, 1), (1, 2), (0, 2), so the second choices of the last two tokens
    find no room:

        row_TK = [[0, 3], [1, 6], [2, 6]]      6 = E·G·C: no row
        copy_R = [0, 2, 4, 1, -1, -1]          choice t·K + k in each row; -1: an empty row
    """
    tokens, _ = routing.expert_TK.shape
    num_experts, groups = routing.num_experts, self.groups
    position_TK, kept_TK, count_GE = kept_choices(routing, self.rows, groups, self.order)
    group_T1 = (jnp.arange(tokens, dtype=jnp.int32) // max(tokens // groups, 1))[:, None]
    row_TK = (routing.expert_TK * groups + group_T1) * self.rows + position_TK
    size = num_experts * groups * self.rows
    dropped = count_GE.sum(dtype=jnp.int32) - kept_TK.sum(dtype=jnp.int32)
    return make_permutation(jnp.where(kept_TK, row_TK, size), size), dropped


def kept_choices(
  routing: Routing, rows: int, groups: int, order: str
) -> tuple[Array, Array, Array]:
  """Each choice's place in its queue, whether it is taken and kept, and the queues' lengths.

  Args:
    routing: this device's choices.
    rows: C.
    groups: G, capacity groups of this device.
    order: who is served first; see `queue_positions`.

  Returns:
    position_TK int32, the place in the queue (arbitrary for a choice that is not taken); kept_TK
    bool, True for taken choices that are not dropped; and count_GE int32, the lengths of the
    queues, one for each capacity group and expert, before anything is dropped.
  """
  taken_TK = routing.taken_TK
  priority_T = routing.probs_TE.max(-1) if order == "priority" else None
  position_TK, count_GE = queue_positions(
    routing.expert_TK, routing.num_experts, groups, taken_TK, order=order, priority_T=priority_T
  )
  return position_TK, (position_TK < rows) & taken_TK, count_GE
