"""Runs a model pair by pair; records each gating's routing and the values on the main path.

The model's own modules run on one device. `Listener`s stand in for each pair's MoE and for the
norms of its blocks, and note what these read or return; `walk` collects it in a `Heard`. `Layout`
names the gatings and the values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.blocks.pair import BlockPair
from scmoe.blocks.walk import Context
from scmoe.blocks.wiring import Tap
from scmoe.inference.reading import Begun
from scmoe.models.trunk import Trunk
from scmoe.moe.layer import MoECall
from scmoe.moe.types import Routing


class Layout:
  """Names and kinds of all gatings, and names of the main path's values, from the model's options.

  Args:
    trunks: the model's trunks, in order.

  Attributes:
    gatings, points: see `scmoe.inference.probe.Probe`.
    second: for each gating, whether an earlier gating of the same layer uses the same experts.
    shortcut: for each gating, whether its gate reads an earlier value than the current
      representation; False with `Wiring.skips` too, where no feed-forward sublayer reads that one.
  """

  def __init__(self, trunks: Sequence[Trunk]):
    self.gatings, self.points, self.second, self.shortcut = [], [], [], []
    layer = 0  # number of the first layer of the pair, or of the dense layer, that is added next
    for number, trunk in enumerate(trunks):
      config, rule = trunk.config, trunk.config.wiring_rule
      per_pair = config.moe_every * rule.units_per_moe
      for run in config.runs:
        for _ in range(run.start, run.stop):
          self._add(config, rule, layer, dense=run.dense)
          layer += 1 if run.dense else per_pair
      self.points.append("out" if number + 1 == len(trunks) else f"{layer} merged")

  def _add(self, config: Any, rule: Any, first: int, *, dense: bool) -> None:
    """Adds the gatings and values of the pair that begins with layer `first`.

    If `dense`, it adds the values of the dense layer `first`, which has no gating.
    """
    if dense:
      self.points += [f"{first} in", f"{first} attention"]
    else:
      for unit in range(rule.units_per_moe):
        last = first + (unit + 1) * config.moe_every - 1
        for g, tap in enumerate(rule.taps):
          word = "" if len(rule.taps) == 1 else (", current" if g else ", preceding")
          self.gatings.append(f"layer {last}{word}")
          self.second.append(g > 0)
          self.shortcut.append(tap is not Tap.CURRENT and not rule.skips)
        for block in range(config.moe_every):
          layer = last - config.moe_every + 1 + block
          self.points += [f"{layer} in", f"{layer} attention"]


class Listener:
  """Stands in for a submodule: forwards every call to it, and reports the calls of one method.

  Args:
    inner: the submodule.
    note: called after each call of that method, with its result and its positional arguments.
    name: the method's name; `__call__` for calls of the submodule itself.
  """

  def __init__(self, inner: Any, note: Any, name: str = "__call__"):
    self._inner, self._note, self._name = inner, note, name

  def __call__(self, *args: Any, **options: Any) -> Any:
    out = self._inner(*args, **options)
    if self._name == "__call__":
      self._note(out, *args)
    return out

  def __getattr__(self, name: str) -> Any:
    value = getattr(self._inner, name)
    if name != self._name:
      return value

    def call(*args: Any, **options: Any) -> Any:
      out = value(*args, **options)
      self._note(out, *args)
      return out

    return call


class Heard:
  """All that `walk` records while a batch passes the trunks, in the order of the pass.

  Attributes:
    routings: the `Routing` of each gating.
    current: for each gating, the `Routing` of the same gate on the current representation, or with
      `Wiring.skips` on the block's input; without an expert to avoid (`MoECall.avoid_T`).
    read: for each gating, the value [B, S, D] that `current` is about, of which only the shape is
      used: a later stage of a Swin has a smaller S.
    values: the values on the main path, [B, S, D] each; `scmoe.inference.probe.Probe.points` names
      them.
    sums: the `RouterSums` of each pair with experts.
  """

  def __init__(self) -> None:
    self.routings: list[Routing] = []
    self.current: list[Routing] = []
    self.read: list[Array] = []
    self.values: list[Array] = []
    self.sums: list[Any] = []


def walk(trunk: Trunk, h_BSD: Array, begun: Begun, router: Any, found: Heard) -> Array:
  """Runs a trunk pair by pair, and appends what it records to the lists of `found`; see `Heard`.

  Listeners on the MoE and on the norms record routings and values. Returns the residual stream at
  the end of the trunk, which is also the last of the trunk's values.
  """
  config, rule = trunk.config, trunk.config.wiring_rule
  stacks = {False: nnx.split(trunk.stages), True: trunk.dense and nnx.split(trunk.dense)}
  handed, mask_BS = None, jnp.broadcast_to(begun.mask_BS, h_BSD.shape[:2])
  order = [(run.dense, i) for run in config.runs for i in range(run.start, run.stop)]
  for before, (dense, i) in enumerate(order):
    graph, params = stacks[dense]
    pair: BlockPair = nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], params))
    pair = pair.as_first() if config.opens_apart and i == 0 else pair
    moe, seen = pair.moe, {}
    # A `Listener` is no nnx module. `object.__setattr__` puts it in a module's place without nnx,
    # which keeps account of a module's attributes. That is safe: this pair is not split again.
    note = lambda flight, *_: found.routings.append(flight.routing)
    if moe is not None:
      object.__setattr__(pair, "moe", Listener(moe, note, "route"))
    for unit in pair.units:
      for block in unit.blocks:
        for name in ("norm_attention", "norm_mlp"):
          norm, key = getattr(block, name), (id(block), name)
          # `setdefault` keeps the first call: for the experts, or for the coefficients of
          # `blocks.mix.Mix`, the pair may apply the norm again, to the same value.
          hear = lambda out, x, key=key, seen=seen: seen.setdefault(key, (x, out))
          object.__setattr__(block, name, Listener(norm, hear))
    bias = router.get("bias")
    context = Context(
      begun.positions_BS,
      begun.segments_BS,
      mask_BS,
      bias_E=None if bias is None or moe is None else bias[i],
      gate=begun.gate,
      before=before,
    )
    out = pair(h_BSD, context, handed_BSD=handed)
    h_BSD, handed = out.h_BSD, out.handed_BSD
    found.sums += [] if out.sums is None else [out.sums]
    for unit in pair.units:
      for block in unit.blocks:
        found.values += [seen[id(block), name][0] for name in ("norm_attention", "norm_mlp")
                         if (id(block), name) in seen]  # fmt: skip
      last = seen[id(unit.blocks[-1]), "norm_mlp"][1]
      for _ in () if moe is None else rule.taps:
        assert moe is not None
        call = MoECall(mask=mask_BS, bias_E=context.bias_E, gate=begun.gate)
        found.current.append(moe.route(last, call).routing)
        found.read.append(last)
  found.values.append(h_BSD)
  return h_BSD
