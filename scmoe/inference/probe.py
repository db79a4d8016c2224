"""Counts a trained router's choices over a text, by gating, domain and class of token.

A gating is one use of a gate; some wirings gate twice in a layer. The probe runs the model's own
modules on one device, pair by pair instead of by a scan, and records the results of each router and
of each norm on the main path (`_Listener`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.blocks.pair import BlockPair, Context
from scmoe.blocks.wiring import Tap
from scmoe.models.gpt import GPT
from scmoe.moe.layer import MoECall
from scmoe.moe.losses import statistics
from scmoe.moe.types import Routing


@dataclasses.dataclass(frozen=True)
class Probe:
  """Counts and means over a text. Its G gatings are in the order in which a token meets them.

  Attributes:
    gatings: name of each gating, e.g. "layer 1" or "layer 1, preceding".
    load_GE: float [G, E], share of the choices that fell on each expert.
    domain_load_GDE: float [G, domains, E], the same for the tokens of each domain; NaN for a domain
      without tokens.
    class_load_GCE: float [G, classes, E], the same for the tokens of each class.
    neighbours_GEE: float [G - 1, E, E], share of the tokens whose first choice was e in one gating
      and f in the next.
    entropy_G: mean entropy of a token's probabilities, divided by ln E.
    confidence_G: mean of a token's largest probability.
    repeated_G: share of tokens whose best expert is the one that the earlier gating of the same
      experts chose, where DGMoE takes the second best; NaN for a layer's first gating.
    as_current_G: share of tokens whose best expert stays the same if the gate reads the current
      representation instead of the shortcut; NaN for gatings that read the current one.
    drop_P: share of the choices that were dropped, in each pair.
    shortcut_ratio_P: |output of the routed experts| / |main path|, in each pair.
    points: name of each value on the main path, in order.
    similarity_V: mean cosine between each value on the main path and the next, [points - 1].
    tokens: number of tokens that were read.
  """

  gatings: tuple[str, ...]
  load_GE: np.ndarray
  domain_load_GDE: np.ndarray
  class_load_GCE: np.ndarray
  neighbours_GEE: np.ndarray
  entropy_G: np.ndarray
  confidence_G: np.ndarray
  repeated_G: np.ndarray
  as_current_G: np.ndarray
  drop_P: np.ndarray
  shortcut_ratio_P: np.ndarray
  points: tuple[str, ...]
  similarity_V: np.ndarray
  tokens: int

  @property
  def dead_G(self) -> np.ndarray:
    """Share of the experts that no token chose."""
    return (self.load_GE == 0).mean(-1)

  @property
  def overlap_G(self) -> np.ndarray:
    """[G - 1]: I(e; f) / H(f), the share of a gating's entropy that the gating before explains."""
    joint = self.neighbours_GEE
    first, second = joint.sum(-1, keepdims=True), joint.sum(-2, keepdims=True)
    known = _xlogx(joint).sum((-1, -2)) - _xlogx(first).sum((-1, -2)) - _xlogx(second).sum((-1, -2))
    return known / np.maximum(-_xlogx(second).sum((-1, -2)), 1e-12)


def _xlogx(p: np.ndarray) -> np.ndarray:
  return p * np.log(np.where(p > 0, p, 1))


def probe(
  model: GPT,
  batches: Iterable[Batch],
  *,
  num_domains: int,
  classes_V: np.ndarray,
  num_classes: int,
  router: Any = None,
) -> Probe:
  """Runs the model over batches of text and counts its routers' choices.

  Args:
    model: a model on one device.
    batches: the text.
    num_domains: number of domains in the batches.
    classes_V: int [V], class of each token id.
    num_classes: number of classes.
    router: the run's router state (balancing biases), if it has any.

  Raises:
    ConfigError: the wiring has no routed experts, or the batches have no tokens.
  """
  if not model.config.wiring_rule.taps:
    raise ConfigError("model.wiring='dense' has no router to inspect; give a run with experts")
  listened = _Layout(model)
  counts_of = nnx.jit(
    lambda model, *args: _counts(model, listened, num_domains, num_classes, *args)
  )
  total: Any = None
  table = jnp.asarray(classes_V, jnp.int32)
  for batch in batches:
    found = jax.tree.map(
      lambda x: np.asarray(x, np.float64), counts_of(model, router or {}, batch, table)
    )
    total = found if total is None else jax.tree.map(np.add, total, found)
  if total is None or not total["tokens"]:
    raise ConfigError("the validation text is empty; give more of it")
  return _finished(listened, total)


class _Layout:
  """The names of all gatings and main-path values, derived from the model's options.

  Attributes:
    gatings, points: see `Probe`.
    second: for each gating, whether an earlier gating of the same layer uses the same experts.
    shortcut: for each gating, whether its gate reads the shortcut.
  """

  def __init__(self, model: GPT):
    config, rule = model.config, model.config.wiring_rule
    per_pair = config.moe_every * rule.units_per_moe
    self.gatings, self.points, self.second, self.shortcut = [], [], [], []
    layer = 0  # the first layer of the pair
    for run in config.runs:
      for _ in range(run.start, run.stop):
        self._add(config, rule, layer, dense=run.dense)
        layer += 1 if run.dense else per_pair
    self.points.append("out")

  def _add(self, config: Any, rule: Any, first: int, *, dense: bool) -> None:
    """Adds the names of a pair that begins with layer `first`, or of one layer without a MoE."""
    if dense:
      self.points += [f"{first} in", f"{first} attention"]
    else:
      for unit in range(rule.units_per_moe):
        last = first + (unit + 1) * config.moe_every - 1
        for g, tap in enumerate(rule.taps):
          word = "" if len(rule.taps) == 1 else (", current" if g else ", preceding")
          self.gatings.append(f"layer {last}{word}")
          self.second.append(g > 0)
          self.shortcut.append(tap is not Tap.CURRENT)
        for block in range(config.moe_every):
          layer = last - config.moe_every + 1 + block
          self.points += [f"{layer} in", f"{layer} attention"]


class _Listener:
  """Wraps a submodule: forwards every call, and reports the calls of one method.

  Args:
    inner: the submodule.
    note: called with the method's result, followed by its positional arguments.
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


def _counts(
  model: GPT,
  layout: _Layout,
  num_domains: int,
  num_classes: int,
  router: Any,
  batch: Batch,
  classes_V: Array,
) -> dict[str, Array]:
  """The sums over the tokens of one batch, from which `_finished` computes a `Probe`."""
  config, rule = model.config, model.config.wiring_rule
  mask_BS = batch.segment_ids > 0
  segments = batch.segment_ids if config.document_mask else None
  stacks = {False: nnx.split(model.stages), True: model.dense and nnx.split(model.dense)}
  h_BSD = model.embedding(batch.inputs, batch.positions, jnp.dtype(config.dtype))
  handed, flights, values, current, sums = None, [], [], [], []
  for dense, i in ((run.dense, i) for run in config.runs for i in range(run.start, run.stop)):
    graph, params = stacks[dense]
    pair: BlockPair = nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], params))
    moe, seen = pair.moe, {}
    # nnx does not allow an attribute that is not a module, so `object.__setattr__` sets it. That is
    # safe here, because this pair is never split again.
    note = lambda flight, *_: flights.append(flight.routing)
    if moe is not None:
      object.__setattr__(pair, "moe", _Listener(moe, note, "route"))
    for unit in pair.units:
      for block in unit.blocks:
        for name in ("norm_attention", "norm_mlp"):
          norm, key = getattr(block, name), (id(block), name)
          # `setdefault` keeps the first call: a shortcut calls the norm again with the same value.
          hear = lambda out, x, key=key, seen=seen: seen.setdefault(key, (x, out))
          object.__setattr__(block, name, _Listener(norm, hear))
    bias = router.get("bias")
    context = Context(
      batch.positions, segments, mask_BS, bias_E=None if bias is None or dense else bias[i]
    )
    out = pair(h_BSD, context, handed_BSD=handed)
    h_BSD, handed = out.h_BSD, out.handed_BSD
    sums += [] if dense else [out.sums]
    for unit in pair.units:
      for block in unit.blocks:
        values += [seen[id(block), name][0] for name in ("norm_attention", "norm_mlp")
                   if (id(block), name) in seen]  # fmt: skip
      last = seen[id(unit.blocks[-1]), "norm_mlp"][1]
      for _ in () if moe is None else rule.taps:
        assert moe is not None
        call = MoECall(mask=mask_BS, bias_E=context.bias_E)
        current.append(moe.route(last, call).routing)
  values.append(h_BSD)
  flat = lambda x: x.reshape(-1)
  mask_T = flat(mask_BS).astype(jnp.float32)
  domain = jnp.zeros(batch.inputs.shape[0], jnp.int32) if batch.domain is None else batch.domain
  domain_T = flat(jnp.broadcast_to(domain[:, None], batch.inputs.shape))
  found = _of_routings(flights, current, layout, mask_T, domain_T, flat(classes_V[batch.inputs]),
                       num_domains, num_classes)  # fmt: skip
  cosines = [_cosine(a, b).reshape(-1) @ mask_T for a, b in itertools.pairwise(values)]
  arrays = [statistics(s) for s in sums]
  return found | {
    "tokens": mask_T.sum(),
    "similarity": jnp.stack(cosines),
    "batches": jnp.ones(()),
    "drop": jnp.stack([a["drop"] for a in arrays]),
    "shortcut_ratio": jnp.stack([a["shortcut_ratio"] for a in arrays]),
  }


def _of_routings(
  routings: list[Routing],
  current: list[Routing],
  layout: _Layout,
  mask_T: Array,
  domain_T: Array,
  class_T: Array,
  num_domains: int,
  num_classes: int,
) -> dict[str, Array]:
  num_experts = routings[0].probs_TE.shape[1]  # includes zero experts
  load, domains, classes, neighbours, entropy, confidence, repeated, same = ([] for _ in range(8))
  for g, (routing, now) in enumerate(zip(routings, current)):
    chosen_TE = jax.nn.one_hot(routing.expert_TK, num_experts).sum(1) * mask_T[:, None]
    load.append(chosen_TE.sum(0))
    domains.append(jnp.zeros((num_domains, num_experts)).at[domain_T].add(chosen_TE))
    classes.append(jnp.zeros((num_classes, num_experts)).at[class_T].add(chosen_TE))
    p_TE = routing.probs_TE
    safe = jnp.where(p_TE > 0, p_TE, 1)
    entropy.append(-(p_TE * jnp.log(safe)).sum(-1) @ mask_T)
    confidence.append(p_TE.max(-1) @ mask_T)
    best_T = routing.logits_TE.argmax(-1)
    before = routings[g - 1].expert_TK[:, 0] if layout.second[g] else best_T
    repeated.append((best_T == before) @ mask_T)
    same.append((now.logits_TE.argmax(-1) == best_T) @ mask_T)
    if g:
      first = jax.nn.one_hot(routings[g - 1].expert_TK[:, 0], num_experts) * mask_T[:, None]
      neighbours.append(first.T @ jax.nn.one_hot(routing.expert_TK[:, 0], num_experts))
  empty = jnp.zeros((0, num_experts, num_experts))
  return {
    "load": jnp.stack(load),
    "domains": jnp.stack(domains),
    "classes": jnp.stack(classes),
    "neighbours": jnp.stack(neighbours) if neighbours else empty,
    "entropy": jnp.stack(entropy),
    "confidence": jnp.stack(confidence),
    "repeated": jnp.stack(repeated),
    "same": jnp.stack(same),
  }


def _cosine(a: Array, b: Array) -> Array:
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
  return (a * b).sum(-1) / jnp.maximum(norms, 1e-12)


def _finished(layout: _Layout, total: dict[str, np.ndarray]) -> Probe:
  tokens, num_experts = float(total["tokens"]), total["load"].shape[-1]
  with np.errstate(invalid="ignore", divide="ignore"):
    share = lambda x: x / x.sum(-1, keepdims=True)
    domains, classes = share(total["domains"]), share(total["classes"])
  only = lambda x, where: np.where(where, x / tokens, np.nan)
  points = tuple(layout.points)
  if len(total["similarity"]) != len(points) - 1:  # in some wirings the last sublayer has no norm
    points = tuple(str(i) for i in range(len(total["similarity"]) + 1))
  return Probe(
    gatings=tuple(layout.gatings),
    load_GE=share(total["load"]),
    domain_load_GDE=domains,
    class_load_GCE=classes,
    neighbours_GEE=total["neighbours"] / tokens,
    entropy_G=total["entropy"] / tokens / max(np.log(num_experts), 1e-9),
    confidence_G=total["confidence"] / tokens,
    repeated_G=only(total["repeated"], layout.second),
    as_current_G=only(total["same"], layout.shortcut),
    drop_P=total["drop"] / total["batches"],
    shortcut_ratio_P=total["shortcut_ratio"] / total["batches"],
    points=points,
    similarity_V=total["similarity"] / tokens,
    tokens=int(tokens),
  )
