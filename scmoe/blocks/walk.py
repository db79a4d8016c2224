"""One batch on its way through a pair: the values between two steps, and a method per step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.blocks import schedule as words
from scmoe.blocks.schedule import Step, turns_of
from scmoe.blocks.wiring import Tap
from scmoe.moe.dispatch import overflow
from scmoe.moe.experts import ExpertSource, LayerExperts, OnDevice
from scmoe.moe.layer import MoECall, RoutedTokens
from scmoe.moe.types import RouterSums
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import arrivals, waiting

# The names of steps in profiles, where they differ from the schedule's.
SCOPES = {words.PROJECTIONS: "attention", words.MIXING: "attention", words.SHARED: "mlp"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
  """Arguments of one pass that every pair reads.

  A *gating* is one choice of experts for all tokens: most units have one, DGMoE's have two.

  Attributes:
    positions_BS: int32 position of each token in its document; 0, 1, ... if None.
    segments_BS: int32 document of each token: attention stays inside it. None: the whole row.
    mask_BS: bool, True for tokens, False for padding; None: no padding.
    keys: random keys of the gates' noise and jitter, [units, gatings]; None outside training.
    bias_E: float32 balancing bias, added to scores for the choice of experts only; or None.
    gate: index of the gate that chooses, where there are several, or an array [B] with the index of
      each row's gate (`router.tasks`); may be traced.
    no_drop: experts have room for every token.
    experts: where the experts are.
    kept: experts that the device keeps between passes (`LayerExperts.kept`), or None.
    begins: the attentions' caches are empty, and the tokens are the first of their rows.
    hidden: whether to return the residual stream after every block.
    before: number of pairs and dense layers before this pair; may be traced.
  """

  positions_BS: Int[Array, "B S"] | None = None
  segments_BS: Int[Array, "B S"] | None = None
  mask_BS: Bool[Array, "B S"] | None = None
  keys: Array | None = None
  bias_E: Float[Array, " E"] | None = None
  gate: int | Array = 0
  no_drop: bool = dataclasses.field(default=False, metadata={"static": True})
  experts: ExpertSource = dataclasses.field(default=OnDevice(), metadata={"static": True})
  kept: Any = None
  begins: bool = dataclasses.field(default=False, metadata={"static": True})
  hidden: bool = dataclasses.field(default=False, metadata={"static": True})
  before: int | Array = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Begun:
  """Tokens that a pair has sent to the experts of the next pair (`overlap.ahead`).

  Attributes:
    tapped_BSD: the normalised value that the experts read.
    routed: the same tokens, after dispatch.
  """

  tapped_BSD: Float[Array, "B S D"]
  routed: RoutedTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairOutput:
  """The result of a pair.

  Attributes:
    h_BSD: the residual stream.
    sums: router sums of all gatings of the pair, over this device's tokens; None without experts.
    handed_BSD: the value that the next pair's experts read, where `is_handed_over`, or its first
      attention, where the wiring `skips`; else None.
    caches: updated caches of the attentions [units][blocks], or None.
    kept: experts that the device keeps (`LayerExperts.kept`), or None.
    hidden: the residual stream after every block, in order; None unless asked for.
    begun: what this pair has begun of the next one; None unless that was asked for.
  """

  h_BSD: Float[Array, "B S D"]
  sums: RouterSums | None
  handed_BSD: Float[Array, "B S D"] | None = None
  caches: list[list[Any]] | None = None
  kept: Any = None
  hidden: list[Float[Array, "B S D"]] | None = None
  begun: Begun | None = None


def begin(pair: Any, context: Context, handed_BSD: Float[Array, "B S D"]) -> Begun:
  """Runs route and dispatch of a pair that no other precedes, to be the `begun` of its `PairWalk`.

  Args:
    pair: a `BlockPair` whose schedule `begins_next`.
    context: see `Context`.
    handed_BSD: the value that its experts read, as a pair before it would hand it over.
  """
  walk = PairWalk(pair, handed_BSD, context, following=(pair, context))
  walk.main = walk.next_handed_BSD = handed_BSD
  for step in pair.schedule.of(begun=True, begins_next=True):
    if step.ahead and step.operation != words.BARRIER:
      getattr(walk, step.operation)(step)
  return Begun(walk.next_input_BSD, walk.next_routed)


class PairWalk:
  """One batch on its way through a pair: the values between two steps, and a method per step.

  `scmoe.blocks.schedule` says in which order the steps run. `in_turns` yields each step with the
  method of its name, and `BlockPair.__call__` or `run_trunks` calls that method.

  Args:
    pair: the `scmoe.blocks.pair.BlockPair`, whose modules the steps run.
    h_BSD, context, handed_BSD, caches: see `BlockPair.__call__`.
    begun: `PairOutput.begun` of the pair before. This pair then neither routes nor dispatches its
      own tokens, and does not read `handed_BSD`.
    following: the next pair, of which this one runs route and dispatch, and its context. Only its
      gate and the norm before it are read. None: nothing is begun. Both `begun` and `following`
      are for pairs whose schedule `begins_next`, and for experts that are on the device.

  Attributes:
    main: the value that the main path's next step reads: the residual stream, or an attention's
      queries, keys and values.
    live: the values that the batch has computed when it pauses; `in_turns` ties them to those of
      another batch by a barrier. After the last step: the `PairOutput`.
  """

  main: Any
  live: Any

  def __init__(
    self,
    pair: Any,
    h_BSD: Float[Array, "B S D"],
    context: Context = Context(),
    handed_BSD: Float[Array, "B S D"] | None = None,
    caches: list[list[Any]] | None = None,
    *,
    begun: Begun | None = None,
    following: tuple[Any, Context] | None = None,
  ):
    if h_BSD.ndim != 3 or h_BSD.shape[-1] != pair.config.width:
      raise ConfigError(
        f"the block pair reads [batch, sequence, width {pair.config.width}], got "
        f"{list(h_BSD.shape)}"
      )
    positions_BS = context.positions_BS
    if positions_BS is None:
      positions_BS = jnp.broadcast_to(jnp.arange(h_BSD.shape[1]), h_BSD.shape[:2])
    self.pair, self.context, self.positions_BS = pair, context, positions_BS
    # The dense wiring has no MoE, and no step that needs one.
    self.moe: Any = pair.moe
    self.layer_experts: LayerExperts | Any = None
    if pair.moe is not None:
      self.layer_experts = context.experts.of_layer(pair.moe.experts, context.kept)
    self.handed_BSD, self.caches = handed_BSD, caches
    self.begun, self.following = begun, following
    # The normalised value that the next pair's experts read.
    self.next_input_BSD: Any = None
    # The next pair's tokens, after its route step and then after its dispatch step.
    self.next_routed: Any = None
    self.new_caches: list[list[Any]] = []
    self.hidden: list[Array] = []
    self.sums: RouterSums | None = None
    self.unit_number = -1
    self.dispatched: Any = None
    self.live = h_BSD, None

  @property
  def output(self) -> PairOutput:
    """The pair's result, after the last step."""
    if self.following is None:
      return self.live
    # `live` is without the rows on their way: no other batch has to wait for them.
    return dataclasses.replace(self.live, begun=Begun(self.next_input_BSD, self.next_routed))

  # -- between steps ------------------------------------------------------------------------------

  @property
  def turns(self) -> list[list[Step]]:
    """The steps of all units, cut where the batch pauses (`turns_of`)."""
    schedule = self.pair.schedule
    begun, begins_next = self.begun is not None, self.following is not None
    return turns_of(schedule.of(begun=begun, begins_next=begins_next) * len(self.pair.units))

  def resume(self) -> None:
    """Goes on from `live`, which a barrier may have tied to another batch's values by now."""
    self.main, _ = self.live
    if self.unit_number < 0:
      self._begin_unit()

  def pause(self) -> None:
    """Puts the computed values into `live`.

    After a dispatch this includes the layout of the rows that were sent. Without it XLA merges the
    batches' exchanges of counts, and their products that share an operand, so that the first
    batch's rows wait for the last batch's routing. Before a combine the experts' rows are not
    included, because a barrier of the schedule ties them to `main` already.
    """
    self.live, self.dispatched = (self.main, self.dispatched), None

  def finish(self) -> None:
    """Makes the output after the last step, and puts it into `live`."""
    kept = None if self.layer_experts is None else self.layer_experts.kept
    self.live = PairOutput(
      self.main,
      self.sums,
      self.handed_BSD,
      None if self.caches is None else self.new_caches,
      kept,
      self.hidden if self.context.hidden else None,
    )

  def _begin_unit(self) -> None:
    """Enters the next unit: resets the values that belong to one unit."""
    self.unit_number += 1
    self.unit = self.pair.units[self.unit_number]
    passed = self.pair.passed_on
    start_BSD = None if passed is None else self.unit.hand_over(Tap.BLOCK_INPUT, self.main)
    self.handed_BSD = start_BSD if self.handed_BSD is None else self.handed_BSD
    # The value for the next unit; `mixing` or `add` replaces it if the tap is inside this unit.
    self.next_handed_BSD = start_BSD
    # The residual stream before an attention's output is added.
    self.h_BSD: Any = None
    self.shared_BSD: Array | None = None
    self.new_caches.append([])
    # For each gating, and each chunk but the first, the value for which the chunk's exchange waits.
    self.waits: dict[int, dict[int, Any]] = {}
    # For each gating, the normalised value that it reads.
    self.inputs: dict[int, Any] = {}
    self.routed: dict[int, RoutedTokens] = {}
    # For each gating, the rows that have come back, chunk by chunk; empty without an exchange.
    self.back: dict[int, list[Array]] = {}
    self.results: dict[int, tuple[Array, RouterSums]] = {}
    if self.begun is not None:
      self.inputs[0], self.routed[0] = self.begun.tapped_BSD, self._arrived(self.begun.routed)

  @jax.named_scope(words.DISPATCH)
  def _arrived(self, routed: RoutedTokens) -> RoutedTokens:
    """Tokens that the pair before has sent, with the outputs of their overflow rounds, if any.

    XLA runs no exchange beside the loop of these rounds. The barrier puts the loop before
    everything else of this pair and, in the backward pass, behind it: no rows travel then.
    """
    apply = self.layer_experts.of(0)
    sent = overflow(routed.transport, routed.x_TD, routed.routing, routed.arrived, apply)
    if sent.overflow_TD is not None:
      self.main, rows, overflow_TD = barrier((self.main, sent.rows, sent.overflow_TD))
      sent = dataclasses.replace(sent, rows=rows, overflow_TD=overflow_TD)
    return dataclasses.replace(routed, sent=sent)

  # -- the main path's steps ----------------------------------------------------------------------

  @jax.named_scope(SCOPES[words.PROJECTIONS])
  def projections(self, step: Step) -> None:
    """The first half of an attention; a unit's first one reads `handed_BSD` if the pair `skips`."""
    self.h_BSD = self.main
    if step.block:
      self.hidden.append(self.main)
    unrouted = self.pair.skips and step.block == 0
    read_BSD: Any = self.handed_BSD if unrouted else self.main
    self.kind = self.pair.config.kind_of_layer(self.context.before, self.unit_number, step.block)
    block = self.unit.blocks[step.block]
    self.main = block.project(read_BSD, self.positions_BS, **self.kind)

  @jax.named_scope(SCOPES[words.MIXING])
  def mixing(self, step: Step) -> None:
    """The second half of an attention, added to the residual stream."""
    context, block = self.context, self.unit.blocks[step.block]
    cache = None if self.caches is None else self.caches[self.unit_number][step.block]
    given = self.h_BSD, self.main, self.positions_BS, context.segments_BS, cache
    self.main, cache = block.mix(*given, begins=context.begins, **self.kind)
    self.new_caches[-1] += [] if cache is None else [cache]
    if self.pair.passed_on is Tap.ATTENTION:
      self.next_handed_BSD = self.unit.hand_over(Tap.ATTENTION, self.main)

  @jax.named_scope(words.MLP)
  def mlp(self, step: Step) -> None:
    """A dense MLP, added to the residual stream."""
    block = self.unit.blocks[step.block]
    self.main = block.added(self.main, block.dense(self._fed))

  @jax.named_scope(SCOPES[words.SHARED])
  def shared_expert(self, step: Step) -> None:
    """Computes the shared expert, whose output the step `add` adds to the residual stream."""
    self.shared_BSD = self.unit.blocks[step.block].dense(self._fed)

  @property
  def _fed(self) -> Any:
    """The residual stream that an MLP or shared expert reads: behind its block's attention.

    If the pair `skips`, it is the stream before that attention.
    """
    return self.h_BSD if self.pair.skips else self.main

  # -- the MoE's steps ----------------------------------------------------------------------------

  @jax.named_scope(words.ROUTE)
  def route(self, step: Step) -> None:
    """The gate chooses the experts of all tokens: this pair's gate, or the next one's."""
    if step.ahead:
      assert self.following is not None
      moe: Any = self.following[0].moe
      self.next_input_BSD = self._next_tapped()
      self.next_routed = moe.route(self.next_input_BSD, self._call(0, self.following[1]))
      return
    g = step.gating
    if g not in self.inputs:
      self.inputs[g] = self._tapped(g)
    self.routed[g] = self.moe.route(self.inputs[g], self._call(g, self.context))
    self.main = self.layer_experts.chosen(g, self.routed[g].routing, self.main)

  @jax.named_scope(words.DISPATCH)
  def dispatch(self, step: Step) -> None:
    """Rows travel to their experts, in this pair or in the next one.

    The rows of a chunk are sent only when `main` has come to the chunk's step. The transport makes
    all chunks in one call, at the last chunk's step. So the steps of the chunks after the first
    note `main` in `waits`, and in that call each of these chunks' exchanges waits for the value
    that its step has noted. The first chunk's exchange waits for none.
    """
    if step.ahead:
      routed = self.next_routed
      sent = routed.transport.dispatch(routed.x_TD, routed.routing, None)
      self.next_routed = dataclasses.replace(routed, sent=sent)
      self.dispatched = sent.layouts, sent.permutations
      return
    g, waits = step.gating, self.waits.setdefault(step.gating, {})
    if step.chunk:
      waits[step.chunk] = self.main
    if step.chunk is not None and step.chunk < self.pair.chunks - 1:
      return
    routed, experts = self.routed[g], self.layer_experts.of(g)
    with waiting(waits):
      sent = routed.transport.dispatch(routed.x_TD, routed.routing, experts)
    if step.chunk:
      self.main = waits[step.chunk]
    self.routed[g] = dataclasses.replace(routed, sent=sent)
    self.dispatched = sent.layouts, sent.permutations

  @jax.named_scope(words.EXPERTS)
  def experts(self, step: Step) -> None:
    """The experts compute the rows that have arrived, or those of the step's chunk."""
    g, arrived = step.gating, self.routed[step.gating].arrived
    rows = list(arrived.rows)
    self.main = self.layer_experts.ready(g, self.main)
    apply = self.layer_experts.of(g)
    for i in step.chunks_of(rows):
      rows[i] = apply(rows[i], arrived.layouts[i])
    self.routed[g] = self.routed[g].with_rows(tuple(rows))

  @jax.named_scope(words.COMBINE)
  def combine(self, step: Step) -> None:
    """Rows travel back and are added up for each token."""
    g, routed = step.gating, self.routed[step.gating]
    with arrivals() as self.back[g]:
      y_TD = routed.transport.combine(routed.arrived)
    y_TD, sums = self.moe.completed(routed, y_TD)
    self.results[g] = y_TD.reshape(*self.inputs[g].shape[:-1], -1), sums

  @jax.named_scope(words.BARRIER)
  def barrier(self, step: Step) -> None:
    """Ties the main path to the gating's newest value: its result, its rows, or its input.

    The two do not depend on each other, so without the tie XLA may place the main path's steps
    anywhere. With it, a later step reads neither value before both are computed, and so the
    exchange keeps beside it the steps that hide it. If the step is `ahead`, the value is the input
    of the next pair's experts. If it has a chunk and stands behind the combine, the main path waits
    until this chunk's rows are back, if the transport made so many chunks.
    """
    tie, g = functools.partial(barrier, direction=step.direction), step.gating
    if step.ahead:
      self.next_input_BSD, self.main = tie((self._next_tapped(), self.main))
    elif g in self.results and step.chunk is not None:
      for rows in self.back[g][step.chunk : step.chunk + 1]:
        _, self.main = tie((jax.lax.stop_gradient(rows), self.main))
    elif g in self.results:
      y_BSD, sums = self.results[g]
      y_BSD, self.main = tie((y_BSD, self.main))
      self.results[g] = y_BSD, sums
    elif g in self.routed:
      rows = list(self.routed[g].arrived.rows)
      for i in step.chunks_of(rows):
        rows[i], self.main = tie((rows[i], self.main))
      self.routed[g] = self.routed[g].with_rows(tuple(rows))
    else:
      self.inputs[g], self.main = tie((self._tapped(g), self.main))

  @jax.named_scope(words.ADD)
  def add(self, step: Step) -> None:
    """The end of a unit: adds the experts' outputs, if any, to the residual stream.

    It also fixes what the unit hands over, and enters the pair's next unit, if there is one.
    """
    del step
    if self.results:
      total_BSD, sums = self._all_gatings()
      added = lambda routed: self.unit.add(
        self.main, self.shared_BSD, routed, self.inputs[0], self._fed
      )
      if self.pair.skips:
        nothing = self.shared_BSD is None
        self.next_handed_BSD = self.main if nothing else added(jnp.zeros_like(total_BSD))
      self.main = added(total_BSD)
      self.sums = sums if self.sums is None else jax.tree.map(jnp.add, self.sums, sums)
    elif self.pair.skips:  # a unit without experts hands over the whole stream
      self.next_handed_BSD = self.main
    self.handed_BSD = self.next_handed_BSD
    self.hidden.append(self.main)
    if self.unit_number + 1 < len(self.pair.units):
      self._begin_unit()

  def _all_gatings(self) -> tuple[Array, RouterSums]:
    """The sum of all gatings' outputs, and their router sums with `shortcut_square` and
    `main_square` set."""
    (total_BSD, sums), *others = self.results.values()
    for y_BSD, other in others:
      total_BSD = total_BSD + y_BSD
      sums = jax.tree.map(jnp.add, sums, other)
    square = lambda a: jnp.square(jax.lax.stop_gradient(a).astype(jnp.float32)).sum()
    squares = {"shortcut_square": square(total_BSD), "main_square": square(self.main)}
    return total_BSD, dataclasses.replace(sums, **squares)

  def _tapped(self, gating: int) -> Any:
    """The normalised value that this gating of the unit reads."""
    return self.unit.tapped(self.pair.wiring.taps[gating], self.main, self.handed_BSD)

  def _next_tapped(self) -> Any:
    """The normalised value that the next pair's experts read."""
    if self.next_input_BSD is not None:  # the step `barrier` has computed and tied it
      return self.next_input_BSD
    assert self.following is not None
    (unit,), (tap,) = self.following[0].units, self.pair.wiring.taps
    return unit.tapped(tap, self.main, self.next_handed_BSD)

  def _call(self, gating: int, context: Context) -> MoECall:
    """The arguments of a gating's call.

    If the wiring is `distinct`, a unit's second gating avoids the expert of its first one.
    """
    avoid_T = None
    if self.pair.wiring.distinct and gating > 0:
      avoid_T = self.routed[0].routing.expert_TK[:, 0]
    return MoECall(
      mask=context.mask_BS,
      key=None if context.keys is None else context.keys[self.unit_number, gating],
      bias_E=context.bias_E,
      avoid_T=avoid_T,
      gate=context.gate,
      no_drop=context.no_drop,
    )
