"""A unit of transformer blocks with one MoE, executed in scheduled order.

With the usual two blocks per unit this is the paper's pair, Block-MLP + Block-MoE. Pos-2 with
the expert stage in slot 2 runs as

  main     attention 0 | MLP 0 | attention 1 |         | shared expert | add
  MoE      route, dispatch ----------------> | experts | -- combine -> |

Dense operations are listed once; the wiring says before which of them the MoE starts, the slot
before which of them, or inside which attention, its experts run. Order changes no value: sequential
and overlapped executions are the same function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.blocks.mix import Mix
from scmoe.blocks.schedule import OverlapConfig, resolve_backward_slot, resolve_slot
from scmoe.blocks.wiring import Tap, Wiring, dense_operations, is_handed_over, tap_index
from scmoe.layers.attention import Attention, KeyValues, Projected
from scmoe.layers.mlp import MLP
from scmoe.layers.norm import Norm
from scmoe.moe.layer import InFlight, MoE
from scmoe.moe.types import RouterSums

SHORTCUT_NORMS = ("shared", "own", "megatron")
# What the main path carries: its value, or the queries, keys and values inside an attention.
Main = TypeVar("Main", bound=Array | Projected)


@dataclasses.dataclass(frozen=True)
class Call:
  """What a forward pass hands to every unit.

  Attributes:
    positions_BS, segments_BS: see `Attention`.
    live_BS: bool, tokens that are not padding; None: all.
    no_drop: experts have room for every token.
    top_k: experts per token, for wirings that leave it open.
    overlap: slot and barriers.
    gate: index of the gate that chooses, where there are several.
    bias_E: balancing bias of this layer's experts, or None.
    one_round: the dropless transport makes no further rounds (`MoE.start`).
    recompute_experts: the backward pass computes the experts' activations again.
  """

  positions_BS: Array
  segments_BS: Array | None
  live_BS: Array | None
  no_drop: bool
  top_k: int
  overlap: OverlapConfig
  gate: int = 0
  bias_E: Array | None = None
  one_round: bool = False
  recompute_experts: bool = False


class Block(nnx.Module):
  """One transformer block: attention and, where `mlp` is given, a feed-forward sublayer.

  `mlp` is the dense MLP, the shared expert, or None where only routed experts follow attention.
  """

  def __init__(self, norm_attention: Norm, attention: Attention, norm_mlp: Norm, mlp: MLP | None):
    self.norm_attention, self.attention = norm_attention, attention
    self.norm_mlp, self.mlp = norm_mlp, mlp


class Unit(nnx.Module):
  """`moe_every` blocks; the last one ends in the expert stage.

  Args:
    blocks: the transformer blocks.
    wiring: what the routed experts read.
    shortcut_norm: "shared": the norm of the sublayer that reads the same value (LongCat-Flash);
      "own": a norm of its own; "megatron": its own, and another on shared + routed before the
      residual addition (Megatron-LM ShortcutMoE). Only for wirings with a shortcut.
    norms: the shortcut's own norm and the norm after the addition, where they are used.
    mix: how shared and routed output are added; None without a shared expert.
    mix_reads_shortcut: the coefficients read the shortcut's input instead of the current one.
  """

  def __init__(
    self,
    blocks: list[Block],
    wiring: Wiring,
    *,
    shortcut_norm: str,
    norms: tuple[Norm | None, Norm | None],
    mix: Mix | None,
    mix_reads_shortcut: bool,
  ):
    self.blocks = nnx.List(blocks)
    self.wiring = wiring
    self.shortcut_norm = shortcut_norm
    self.own_norm, self.post_norm = norms
    self.mix, self.mix_reads_shortcut = mix, mix_reads_shortcut

  def __call__(
    self,
    h_BSD: Array,
    moe: MoE | None,
    handed: Array | None,
    caches: list[KeyValues] | None,
    keys: Array | None,
    call: Call,
  ) -> tuple[Array, Array | None, list[KeyValues] | None, RouterSums | None]:
    """Runs the unit.

    Args:
      h_BSD: main path.
      moe: its experts; None for the dense wiring.
      handed: the preceding unit's tap, where `is_handed_over`.
      caches: key-value caches, one per block, or None.
      keys: one random key per gating for gate noise, or None.
      call: see `Call`.

    Returns:
      The main path, the tap for the next unit, the updated caches, and the sums of all gatings
      (leading dimension: batch shards).
    """
    run = _UnitRun(self, moe, handed, caches, keys, call)
    h_BSD = run(h_BSD)
    return h_BSD, run.hand_over, run.new_caches, run.sums()


class _UnitRun:
  """One execution of a unit: the dense operations in order, the MoE's stages between them."""

  def __init__(self, unit: Unit, moe: MoE | None, handed, caches, keys, call: Call):
    self.unit, self.moe, self.handed, self.caches, self.call = unit, moe, handed, caches, call
    self.keys = keys
    self.new_caches: list[KeyValues] | None = None if caches is None else []
    self.hand_over: Array | None = None
    self.flights: dict[int, InFlight] = {}
    self.shortcut_input: Array | None = None
    self.outputs: list[tuple[Array, RouterSums]] = []

  def __call__(self, h_BSD: Array) -> Array:
    unit, last = self.unit, 2 * len(self.unit.blocks) - 1
    for index in range(last):
      h_BSD = self.stages_before(index, h_BSD)
      block = unit.blocks[index // 2]
      if index % 2 == 0:
        h_BSD = self.attend(index, block, h_BSD)
      else:
        h_BSD = h_BSD + self.feed(block, h_BSD)
    h_BSD = self.stages_before(last, h_BSD)
    end = unit.blocks[-1]
    dense_BSD = None if end.mlp is None else self.feed(end, h_BSD)
    h_BSD = self.stages_before(last + 1, h_BSD)
    return self.add_up(h_BSD, dense_BSD)

  # -- dense operations ---------------------------------------------------------------------------

  def attend(self, index: int, block: Block, h_BSD: Array) -> Array:
    with jax.named_scope("attention"):
      cache = None if self.caches is None else self.caches[len(self.new_caches or [])]
      y_BSD, cache = block.attention(
        block.norm_attention(h_BSD),
        self.call.positions_BS,
        segments_BS=self.call.segments_BS,
        cache=cache,
        projected=lambda qkv: self.experts_at(index + 0.5, qkv),
      )
      if self.new_caches is not None and cache is not None:
        self.new_caches.append(cache)
      return h_BSD + y_BSD

  def feed(self, block: Block, h_BSD: Array) -> Array:
    assert block.mlp is not None
    with jax.named_scope("mlp"):
      return block.mlp(block.norm_mlp(h_BSD))

  # -- stages of the MoE --------------------------------------------------------------------------

  def stages_before(self, index: int, h_BSD: Array) -> Array:
    """Starts, computes or finishes the flights whose time is before dense operation `index`."""
    blocks, sequential = len(self.unit.blocks), self.call.overlap.sequential
    self.keep_for_next(index, h_BSD)
    for gating, tap in enumerate(self.unit.wiring.taps):
      if index == tap_index(tap, blocks):
        h_BSD = self.start(gating, tap, h_BSD)
        if sequential:
          h_BSD = self.run_alone(gating, h_BSD)
    h_BSD = self.experts_at(index, h_BSD)
    if index == 2 * blocks and not sequential:
      self.outputs += [self.finish(gating) for gating in self.flights]
    return h_BSD

  def experts_at(self, place: float, main: Main) -> Main:
    """Computes, or ties to the main path, the flights whose slot is here.

    Args:
      place: number of dense operations of this unit so far; a half inside an attention.
      main: what the main path's next operation reads.
    """
    overlap, blocks = self.call.overlap, self.unit.blocks
    if overlap.sequential:
      return main
    for gating in self.flights:
      start = tap_index(self.unit.wiring.taps[gating], len(blocks))
      window = len(dense_operations(self.unit.wiring, len(blocks))) - start
      slot = start + resolve_slot(overlap.slot, window)
      backward = start + resolve_backward_slot(overlap, window)
      if place == backward < slot:
        main = self.tie_rows(gating, main, only="backward")
      if place == slot:
        main = self.compute(gating, main, both_ways=slot == backward)
      if place == backward > slot:
        main = self.tie_rows(gating, main, only="backward")
    return main

  def start(self, gating: int, tap: Tap, h_BSD: Array) -> Array:
    assert self.moe is not None
    wiring, call = self.unit.wiring, self.call
    x_BSD = self.tap_input(tap, h_BSD)
    if gating == 0:
      self.shortcut_input = x_BSD
    x_BSD, h_BSD = self.tie(x_BSD, h_BSD)
    self.flights[gating] = self.moe.start(
      x_BSD,
      k=wiring.routed_per_gating(call.top_k),
      key=None if self.keys is None else self.keys[gating],
      no_drop=call.no_drop,
      live_BS=call.live_BS,
      avoid=self.flights[0] if wiring.distinct and gating > 0 else None,
      gate=call.gate,
      bias_E=call.bias_E,
      one_round=call.one_round,
    )
    return h_BSD

  def compute(self, gating: int, main: Main, *, both_ways: bool) -> Main:
    """The experts, between the end of the dispatch and the start of the combine."""
    assert self.moe is not None
    only = "" if both_ways else "forward"
    main = self.tie_rows(gating, main, only=only)  # the dispatch has ended
    self.run_experts(gating)
    return self.tie_rows(gating, main, only=only)  # the combine starts

  def run_experts(self, gating: int) -> None:
    assert self.moe is not None
    flight = self.flights[gating]
    self.flights[gating] = self.moe.compute(flight, recompute=self.call.recompute_experts)

  def finish(self, gating: int) -> tuple[Array, RouterSums]:
    assert self.moe is not None
    return self.moe.finish(self.flights[gating])

  def run_alone(self, gating: int, h_BSD: Array) -> Array:
    """All stages at once, no dense operation beside them: the control of every measurement."""
    assert self.moe is not None
    self.run_experts(gating)
    y_BSD, sums = self.finish(gating)
    y_BSD, h_BSD = jax.lax.optimization_barrier((y_BSD, h_BSD))
    self.outputs.append((y_BSD, sums))
    return h_BSD

  def tie_rows(self, gating: int, main: Main, *, only: str = "") -> Main:
    """Ties the rows of a flight to the main path; see `tie`."""
    flight = self.flights[gating]
    rows, rest = _split_floats(flight.dispatched)
    rows, main = self.tie(rows, main, only=only)
    self.flights[gating] = dataclasses.replace(flight, dispatched=rest(rows))
    return main

  def tie(self, moe_stream: Any, main: Main, *, only: str = "") -> tuple[Any, Main]:
    """Neither stream's next operation starts before both streams have come here.

    The transpose of a barrier is a barrier, so that the backward pass has the mirror image of the
    schedule. `only` = "forward" or "backward" ties one of the two passes.
    """
    if not (self.call.overlap.barriers or self.call.overlap.sequential):
      return moe_stream, main
    barrier = {"": jax.lax.optimization_barrier, "forward": _tie_forward, "backward": _tie_backward}
    return barrier[only]((moe_stream, main))

  def tap_input(self, tap: Tap, h_BSD: Array) -> Array:
    """The normalised value that the routed experts read."""
    unit, blocks = self.unit, len(self.unit.blocks)
    if is_handed_over(tap, blocks):
      assert self.handed is not None
      return self.handed if unit.own_norm is None else unit.own_norm(self.handed)
    if tap is Tap.CURRENT:
      return unit.blocks[-1].norm_mlp(h_BSD)
    if unit.own_norm is not None:
      return unit.own_norm(h_BSD)
    return self.next_norm(tap_index(tap, blocks))(h_BSD)

  def next_norm(self, index: int) -> Norm:
    """The norm of dense operation `index`, the first one that reads the tapped value."""
    block = self.unit.blocks[index // 2]
    return block.norm_attention if index % 2 == 0 else block.norm_mlp

  def keep_for_next(self, index: int, h_BSD: Array) -> None:
    """With one block per unit, the next unit's experts read a value of this one."""
    unit = self.unit
    tap = unit.wiring.taps[0] if unit.wiring.taps else None
    if tap is None or not is_handed_over(tap, len(unit.blocks)):
      return
    if index == (1 if tap is Tap.ATTENTION else 0):
      self.hand_over = h_BSD if unit.own_norm is not None else self.next_norm(index)(h_BSD)

  # -- the end of the unit ------------------------------------------------------------------------

  def add_up(self, h_BSD: Array, dense_BSD: Array | None) -> Array:
    """Residual + shared + routed, mixed and normalised as configured."""
    unit = self.unit
    if not self.outputs:
      return h_BSD if dense_BSD is None else h_BSD + dense_BSD
    total_BSD = self.outputs[0][0]
    for routed_BSD, _ in self.outputs[1:]:
      total_BSD = total_BSD + routed_BSD
    self.measure_shortcut(h_BSD, total_BSD)
    if dense_BSD is not None and unit.mix is not None:
      current = unit.blocks[-1].norm_mlp(h_BSD)
      reads = self.shortcut_input if unit.mix_reads_shortcut else current
      assert reads is not None
      total_BSD = unit.mix(dense_BSD, total_BSD, reads)
    return h_BSD + (total_BSD if unit.post_norm is None else unit.post_norm(total_BSD))

  def measure_shortcut(self, h_BSD: Array, routed_BSD: Array) -> None:
    """Adds the sizes of routed output and main path to the sums of the first gating."""
    y_BSD, sums = self.outputs[0]
    shards = sums.tokens.shape[0]
    square = lambda a: jnp.square(jax.lax.stop_gradient(a).astype(jnp.float32))
    per_shard = lambda a: square(a).reshape(shards, -1).sum(1)
    sums = dataclasses.replace(
      sums, shortcut_square=per_shard(routed_BSD), main_square=per_shard(h_BSD)
    )
    self.outputs[0] = (y_BSD, sums)

  def sums(self) -> RouterSums | None:
    """The sums of all gatings of this unit."""
    if not self.outputs:
      return None
    total = self.outputs[0][1]
    for _, other in self.outputs[1:]:
      total = jax.tree.map(jnp.add, total, other)
    return total


@jax.custom_vjp
def _tie_forward(streams: Any) -> Any:
  """A barrier that the backward pass does not have."""
  return jax.lax.optimization_barrier(streams)


@jax.custom_vjp
def _tie_backward(streams: Any) -> Any:
  """Nothing in the forward pass; a barrier on the cotangents."""
  return streams


_tie_forward.defvjp(lambda s: (jax.lax.optimization_barrier(s), None), lambda _, bar: (bar,))
_tie_backward.defvjp(lambda s: (s, None), lambda _, bar: (jax.lax.optimization_barrier(bar),))


def _split_floats(tree: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
  """The arrays that carry gradients, and how to put them back."""
  leaves, structure = jax.tree.flatten(tree)
  where = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

  def put_back(floats: list[Array]) -> Any:
    new = dict(zip(where, floats))
    return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

  return [leaves[i] for i in where], put_back
