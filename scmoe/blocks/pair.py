"""A block pair: transformer blocks and their MoE, executed as the list of its schedule says.

With the usual two blocks per unit this is the paper's pair, Block-MLP + Block-MoE. Order changes no
value: sequential and overlapped executions are the same function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.blocks import schedule as words
from scmoe.blocks.block import Block, BlockConfig
from scmoe.blocks.mix import Mix
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.schedule import make_schedule
from scmoe.blocks.wiring import Tap, is_handed_over
from scmoe.kernels.one_row.norm import Normalised
from scmoe.kernels.one_row.norm import takes as norm_takes
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.experts import Experts
from scmoe.moe.layer import Flight, MoE, MoECall
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import RouterSums
from scmoe.offload.experts import Cached, Guests, Migration
from scmoe.parallel.barriers import barrier

# What profiles call a step, where that is not its own name.
SCOPES = {
  words.PROJECTIONS: "attention",
  words.MIXING: "attention",
  words.SHARED: "mlp",
  words.ADD: "add",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
  """What one pass hands to every pair.

  Attributes:
    positions_BS: int32 position of each token in its document; 0, 1, ... if None.
    segments_BS: int32 document of each token: attention stays inside it. None: the whole row.
    mask_BS: bool, tokens that are not padding; all if None.
    keys: random keys of the gates' noise, [units, gatings]; None outside training.
    bias_E: balancing bias of the choice of experts, or None.
    gate: index of the gate that chooses, where there are several; may be traced.
    no_drop: experts have room for every token.
    recompute_experts: the backward pass computes the experts' activations again.
    migration: how experts come to the device that lie in the host's memory; None where none do.
    cached: what the device keeps of them (`Cached`), or None.
    begins: the attentions' caches are empty, the tokens their rows' first.
    hidden: hand out the main path behind every block.
  """

  positions_BS: Int[Array, "B S"] | None = None
  segments_BS: Int[Array, "B S"] | None = None
  mask_BS: Bool[Array, "B S"] | None = None
  keys: Array | None = None
  bias_E: Float[Array, " E"] | None = None
  gate: int | Array = 0
  no_drop: bool = dataclasses.field(default=False, metadata={"static": True})
  recompute_experts: bool = dataclasses.field(default=False, metadata={"static": True})
  migration: Migration | None = dataclasses.field(default=None, metadata={"static": True})
  cached: Cached | None = None
  begins: bool = dataclasses.field(default=False, metadata={"static": True})
  hidden: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairOutput:
  """What a pair gives.

  Attributes:
    h_BSD: the main path.
    sums: of all gatings of the pair, over this device's tokens; None without experts.
    handed_BSD: what the next pair's experts read, where `is_handed_over`; else None.
    caches: updated caches of the attentions [units][blocks], or None.
    cached: the experts that the device keeps now, or None.
    hidden: the main path behind every block, in order; None unless asked for.
  """

  h_BSD: Float[Array, "B S D"]
  sums: RouterSums | None
  handed_BSD: Float[Array, "B S D"] | None = None
  caches: list[list[Any]] | None = None
  cached: Cached | None = None
  hidden: list[Float[Array, "B S D"]] | None = None


class Unit(nnx.Module):
  """`moe_every` blocks, the last of which ends in the expert stage, and what is around it.

  `shortcut_norm`: "shared": the norm of the sublayer that reads the same value (LongCat-Flash);
  "own": a norm of its own; "megatron": its own, and another on shared + routed before the residual
  addition (Megatron-LM ShortcutMoE). Only for wirings with a shortcut.
  """

  def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
    rule = config.wiring_rule
    dense = [config.mlp_hidden] * config.moe_every
    if rule.taps:
      dense[-1] = config.shared_hidden if rule.shared_expert else 0
    self.blocks = nnx.List([Block(config, hidden, rngs=rngs) for hidden in dense])
    self.shared_norm = config.shortcut_norm == "shared"
    own = rule.is_shortcut and not self.shared_norm
    self.own_norm = config.norm() if own else None
    post = rule.is_shortcut and config.shortcut_norm == "megatron"
    self.post_norm = config.norm() if post else None
    mix = lambda: Mix(config.mix, config.width, init_std=config.init_std, rngs=rngs)
    self.mix = mix() if rule.shared_expert else None

  def tapped(self, tap: Tap, h_BSD: Array, handed_BSD: Array | None) -> Array | Normalised:
    """The normalised value that routed experts read; of a single token that nothing else reads, the
    value and its norm.

    Args:
      tap: which value.
      h_BSD: the main path where the tap is.
      handed_BSD: the preceding unit's tap, where `is_handed_over`.
    """
    blocks = self.blocks
    if is_handed_over(tap, len(blocks)):
      assert handed_BSD is not None
      return handed_BSD if self.own_norm is None else self.own_norm(handed_BSD)
    if tap is Tap.CURRENT:
      norm = blocks[-1].norm_mlp
      alone = self.mix is None and norm_takes(h_BSD)
      return Normalised(h_BSD, norm.normalisation) if alone else norm(h_BSD)
    if self.own_norm is not None:
      return self.own_norm(h_BSD)
    # The norm of the dense operation that reads the same value.
    norms = {
      Tap.BLOCK_INPUT: lambda: blocks[-2].norm_attention,
      Tap.ATTENTION: lambda: blocks[-2].norm_mlp,
      Tap.BLOCK_OUTPUT: lambda: blocks[-1].norm_attention,
    }
    return norms[tap]()(h_BSD)

  def hand_over(self, tap: Tap, h_BSD: Array) -> Array:
    """What the next unit, of one block, reads of this one: the tap, normalised if shared."""
    if not self.shared_norm:
      return h_BSD
    (block,) = self.blocks
    return (block.norm_mlp if tap is Tap.ATTENTION else block.norm_attention)(h_BSD)

  def add(
    self, h_BSD: Array, shared_BSD: Array | None, routed_BSD: Array, read_BSD: Array | Normalised
  ) -> Array:
    """Residual + shared + routed, mixed and normalised as configured.

    Args:
      h_BSD, shared_BSD, routed_BSD: the three.
      read_BSD: what the mixing coefficients read.
    """
    if shared_BSD is not None and self.mix is not None:
      assert isinstance(read_BSD, Array)  # with a shared expert it is made at once
      routed_BSD = self.mix(shared_BSD, routed_BSD, read_BSD)
    return h_BSD + (routed_BSD if self.post_norm is None else self.post_norm(routed_BSD))


class BlockPair(nnx.Module):
  """The blocks around one MoE: a unit, or two that share its experts (dgmoe_share).

  Works on one device as it is, and in the manual region (`scmoe.manual`) on many.

  Args:
    config: wiring and sizes.
    router, dispatch, overlap: options of routing, transport and schedule.
    experts, gates: of one's own; see `MoE`.
    hands_over: of a block without experts: what those of the next one read of it, if anything.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: options do not fit each other, or the schedule names no step.
  """

  def __init__(
    self,
    config: BlockConfig,
    *,
    router: RouterConfig = RouterConfig(),
    dispatch: DispatchConfig = DispatchConfig(),
    overlap: OverlapConfig = OverlapConfig(),
    experts: Experts | None = None,
    gates: list[Any] | None = None,
    hands_over: Tap | None = None,
    rngs: nnx.Rngs,
  ):
    config = config.resolve()
    rule = config.wiring_rule
    self.config, self.wiring, self.hands_over = config, rule, hands_over
    self.schedule = make_schedule(rule, config.moe_every, overlap, dispatch.chunks)
    self.units = nnx.List([Unit(config, rngs=rngs) for _ in range(rule.units_per_moe)])
    moe = config.moe(router, dispatch, copy_engines=overlap.copy_engines)
    self.moe = MoE(moe, experts=experts, gates=gates, rngs=rngs) if rule.taps else None

  def __call__(
    self,
    h_BSD: Float[Array, "B S D"],
    context: Context = Context(),
    *,
    handed_BSD: Float[Array, "B S D"] | None = None,
    caches: list[list[Any]] | None = None,
  ) -> PairOutput:
    """Runs the steps of the schedule, one unit after the other.

    Args:
      h_BSD: the main path.
      context: see `Context`.
      handed_BSD: the preceding pair's `PairOutput.handed_BSD`, where there is one; else the experts
        of the first unit read its own input (the paper's L0 Pos-1).
      caches: of the attentions [units][blocks], as `empty_cache` makes them, or None.
    """
    turns = self.turns(h_BSD, context, handed_BSD=handed_BSD, caches=caches)
    live = next(turns)
    while not isinstance(live, PairOutput):
      live = turns.send(live)
    return live

  def turns(
    self,
    h_BSD: Float[Array, "B S D"],
    context: Context = Context(),
    *,
    handed_BSD: Float[Array, "B S D"] | None = None,
    caches: list[list[Any]] | None = None,
  ) -> Generator[Any, Any, None]:
    """A call in turns, so that several of them can run side by side.

    It pauses at its start, behind every dispatch and before every combine: then it hands out what
    it has computed, and goes on with what it is sent, the same values, perhaps `tied` to another's.
    The last value is a PairOutput. Two batches, A and B, of Pos-2 with the experts after `mlp 0`:

      A: attention 0, dispatch | B: attention 0, dispatch | A: mlp 0, experts | B: mlp 0, experts |
      A: combine, attention 1, shared expert | B: combine, attention 1, shared expert

    so that every exchange has a turn of the other beside it.

    Arguments as of a call.
    """
    if h_BSD.ndim != 3 or h_BSD.shape[-1] != self.config.width:
      raise ConfigError(
        f"the block pair reads [batch, sequence, width {self.config.width}], got "
        f"{list(h_BSD.shape)}"
      )
    h_BSD = yield h_BSD
    wiring, total = self.wiring, None
    positions_BS = context.positions_BS
    if positions_BS is None:
      positions_BS = jnp.broadcast_to(jnp.arange(h_BSD.shape[1]), h_BSD.shape[:2])
    segments_BS, stored = context.segments_BS, caches
    caches = None if stored is None else []
    moe: Any = self.moe  # the dense wiring has none, and no step that needs it
    guests: Any = moe and Guests(self._experts(context), context.migration, context.cached)
    passed, hidden = self.passed_on, []
    for number, unit in enumerate(self.units):
      start_BSD = None if passed is None else unit.hand_over(Tap.BLOCK_INPUT, h_BSD)
      handed_BSD = start_BSD if handed_BSD is None else handed_BSD
      next_BSD = start_BSD  # unless the tap comes later
      new_caches: list[Any] = []
      # What the main path's next step reads: its value, or queries, keys and values.
      main: Any = h_BSD
      inputs: dict[int, Array | Normalised] = {}
      flights: dict[int, Flight] = {}
      routed: dict[int, tuple[Array, RouterSums]] = {}
      shared_BSD = sent = None
      for step in self.schedule.steps:
        block, g = unit.blocks[step.block], step.gating
        if sent is not None or step.operation == words.COMBINE:
          # Outside of the step's scope, which others' steps would be named by. With what a dispatch
          # has computed, or XLA joins products of all batches that have an operand in common, and
          # exchanges of counts, and the first one's rows wait for the last one's routing. Before a
          # combine, `main` is behind a barrier with the experts' rows, which leave anyway.
          main, _ = yield main, sent and (sent.layouts, sent.permutations)
          sent = None
        with jax.named_scope(SCOPES.get(step.operation, step.operation)):
          match step.operation:
            case words.PROJECTIONS:
              h_BSD = main
              hidden += [h_BSD] if step.block else []
              main = block.attention.project(h_BSD, positions_BS, block.norm_attention)
            case words.MIXING:
              cache = None if stored is None else stored[number][step.block]
              y_BSD, cache = block.attention.mix(
                main, positions_BS, segments_BS, cache, begins=context.begins
              )
              main = _made_once(h_BSD + y_BSD)
              new_caches += [] if cache is None else [cache]
              if passed is Tap.ATTENTION:
                next_BSD = unit.hand_over(Tap.ATTENTION, main)
            case words.MLP:
              main = main + block.dense(main)
            case words.SHARED:
              shared_BSD = block.dense(main)
            case words.ROUTE:
              if g not in inputs:
                inputs[g] = unit.tapped(wiring.taps[g], main, handed_BSD)
              call = self._call(context, number, g, flights)
              flights[g] = moe.route(inputs[g], call)
              main = guests.chosen(g, flights[g].routing, main)
            case words.DISPATCH:
              flight = flights[g]
              sent = flight.transport.dispatch(flight.x_TD, flight.routing, guests.experts(g))
              flights[g] = dataclasses.replace(flight, sent=sent)
            case words.EXPERTS:
              layouts, rows = flights[g].arrived.layouts, list(flights[g].arrived.rows)
              main, experts = guests.needed(g, main), guests.experts(g)
              for i in step.chunks_of(rows):
                rows[i] = experts(rows[i], layouts[i])
              flights[g] = flights[g].with_rows(tuple(rows))
            case words.COMBINE:
              y_TD = flights[g].transport.combine(flights[g].arrived)
              y_TD, sums = moe.completed(flights[g], y_TD)
              routed[g] = y_TD.reshape(*inputs[g].shape[:-1], -1), sums
            case words.BARRIER:
              tie = functools.partial(barrier, direction=step.direction)
              if g in routed:
                (y_BSD, main), sums = tie((routed[g][0], main)), routed[g][1]
                routed[g] = y_BSD, sums
              elif g in flights:
                rows = list(flights[g].arrived.rows)
                for i in step.chunks_of(rows):
                  rows[i], main = tie((rows[i], main))
                flights[g] = flights[g].with_rows(tuple(rows))
              else:
                inputs[g], main = tie((unit.tapped(wiring.taps[g], main, handed_BSD), main))
            case words.ADD:
              h_BSD, sums = self._add(unit, main, shared_BSD, inputs, routed)
              total = sums if total is None else jax.tree.map(jnp.add, total, sums)
      handed_BSD = next_BSD
      hidden.append(h_BSD)
      if caches is not None:
        caches.append(new_caches)
    cached, hidden = guests and guests.cached, hidden if context.hidden else None
    yield PairOutput(h_BSD, total, handed_BSD, caches, cached, hidden)

  @property
  def passed_on(self) -> Tap | None:
    """The tap that the next pair reads of this one, with one block per unit; else None."""
    if not self.wiring.taps:
      return self.hands_over
    tap = self.wiring.taps[0]
    return tap if is_handed_over(tap, self.config.moe_every) else None

  def _call(self, context: Context, unit: int, gating: int, flights: dict[int, Flight]) -> MoECall:
    """What one gating of the MoE is given."""
    avoid_T = None
    if self.wiring.distinct and gating > 0:
      avoid_T = flights[0].routing.expert_TK[:, 0]
    return MoECall(
      mask=context.mask_BS,
      key=None if context.keys is None else context.keys[unit, gating],
      bias_E=context.bias_E,
      avoid_T=avoid_T,
      gate=context.gate,
      no_drop=context.no_drop,
    )

  def _experts(self, context: Context) -> Any:
    """The experts, recomputed in the backward pass if that is asked for."""
    if self.moe is None or not context.recompute_experts:
      return None if self.moe is None else self.moe.experts
    experts = self.moe.experts
    # Rows and what was gathered are kept: nothing travels twice.
    return jax.checkpoint(lambda rows, layout: experts(rows, layout), policy=_travelled)

  def _add(
    self,
    unit: Unit,
    h_BSD: Array,
    shared_BSD: Array | None,
    inputs: dict[int, Array | Normalised],
    routed: dict[int, tuple[Array, RouterSums]],
  ) -> tuple[Array, RouterSums | None]:
    """The end of a unit: the main path with everything added, and the sums of all gatings."""
    if not routed:
      return h_BSD, None
    total_BSD, sums = routed[0]
    for y_BSD, other in list(routed.values())[1:]:
      total_BSD = total_BSD + y_BSD
      sums = jax.tree.map(jnp.add, sums, other)
    square = lambda a: jnp.square(jax.lax.stop_gradient(a).astype(jnp.float32)).sum()
    sums = dataclasses.replace(sums, shortcut_square=square(total_BSD), main_square=square(h_BSD))
    current = self.config.mix_input == "current"
    read_BSD = unit.blocks[-1].norm_mlp(h_BSD) if current else inputs[0]
    return _made_once(unit.add(h_BSD, shared_BSD, total_BSD, read_BSD)), sums


def _made_once(h_BSD: Array) -> Array:
  """A single token's residual stream, written to memory: else XLA adds up once more, in each kernel
  that reads it, all parts of the products that have led to it."""
  return jax.lax.optimization_barrier(h_BSD) if h_BSD.size == h_BSD.shape[-1] else h_BSD


def _travelled(primitive: Any, *_: Any, **__: Any) -> bool:
  """A rematerialisation policy: what came from other devices is kept."""
  return primitive.name.startswith("all_gather")


# -- order ----------------------------------------------------------------------------------------


def tied(live: list[Any], i: int) -> Any:
  """What the i-th of several batches goes on with: not before the one before it has paused.

  Left to itself, XLA lays equal steps of all batches side by side; then all wait at once.

  Args:
    live: what each has handed out last (`BlockPair.turns`); the tied values replace two of them.
    i: the one whose turn it is.
  """
  if len(live) > 1:
    live[i - 1], live[i] = barrier((live[i - 1], live[i]))
  return live[i]
