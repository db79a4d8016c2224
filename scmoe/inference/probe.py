"""Statistics of routers' choices over text or images, by gating, domain and class.

A gating is one use of a gate; some wirings gate twice in a layer. The probe runs the model's own
modules on one device, pair by pair instead of by a scan, and records what each router chooses and
what the norms before attention and feed-forward sublayers read and return (`Listener`). It also
compares neighbouring values on the main path. A `Reading` says how a kind of model embeds a batch,
and which domain and class each token of the batch has.
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

from scmoe.base.errors import ConfigError
from scmoe.inference.listening import Heard, Layout, walk
from scmoe.inference.reading import Begun, Reading
from scmoe.inference.similarity import cosine, counted, gram, hsic
from scmoe.moe.losses import statistics

PARTS = 8  # of a row, as equal as its length allows: entropy and confidence are also given by part


@dataclasses.dataclass(frozen=True)
class Probe:
  """Statistics of a model's routing, and of its main path, over some batches.

  A gating is one use of a gate; the model has G gatings. A pair is the blocks around one MoE; P
  pairs have experts. Gatings and pairs are in the order in which tokens meet them. E counts zero
  experts too. Unless an attribute says otherwise, only tokens that count (`Begun.mask_BS`) do so
  here, and shares and means are over the tokens of all batches at once.

  Attributes:
    gatings: name of each gating, e.g. "layer 1" or "layer 1, preceding".
    load_GE: float [G, E], share of a gating's choices that fell on each expert.
    domain_load_GDE: float [G, domains, E], the same among the choices of each domain's tokens; NaN
      for a domain without tokens.
    class_load_GCE: float [G, classes, E], the same among the choices of each class's tokens; NaN
      for a class without tokens.
    neighbours_GEE: float [G - 1, E, E], share of the tokens whose first choice was e in one gating
      and f in the next; NaN if the next one has other tokens (a later stage of a Swin).
    entropy_G: mean entropy of a token's probabilities, divided by ln E.
    confidence_G: mean of a token's largest probability.
    repeated_G: share of tokens whose best expert, by logit, is their first choice in the layer's
      earlier gating; with the wirings that forbid this (`Wiring.distinct`) such a token visits
      another expert. NaN for a layer's first gating.
    as_current_G: share of tokens whose best expert, by logit, stays the same if the gate reads the
      current representation instead of the shortcut; NaN for gatings that read the current
      representation, and with `Wiring.skips`, where no feed-forward sublayer reads it.
    drop_P: share of the choices that were dropped, in each pair: the mean of the batches' shares.
    shortcut_ratio_P: |output of the routed experts| / |main path|, in each pair, over all tokens,
      even those that do not count: the mean of the batches' ratios.
    points: name of each value on the main path, in order. The values are the residual stream before
      each sublayer, "3 in" before layer 3's attention and "3 attention" before its feed-forward
      sublayer; at the end of a Swin's stage, "4 merged"; and at the end, "out". In `farskip` those
      before sublayers are the values that the sublayers read. If the number of recorded values
      differs from that of these names, the names are numbers.
    similarity_V: mean cosine between each value on the main path and the next, [points - 1]; NaN
      where a Swin merges four tokens into one between them.
    alignment_V: linear CKA of the same values, estimated from at most 1,024 tokens of each batch
      (`scmoe.inference.similarity`); NaN there too. It may be NaN or infinite where the estimate
      for a value with itself is not above 0, as from batches of fewer than 4 tokens.
    entropy_GQ: `entropy_G` of the tokens in each of the `PARTS` parts of a row, the first tokens in
      part 0; NaN for a part without tokens.
    confidence_GQ: `confidence_G` in the same parts.
    tokens: number of tokens that were read and count; in a Swin those of the first stage.
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
  alignment_V: np.ndarray
  entropy_GQ: np.ndarray
  confidence_GQ: np.ndarray
  tokens: int

  @property
  def dead_G(self) -> np.ndarray:
    """Share of the experts that no token chose, for each gating."""
    return (self.load_GE == 0).mean(-1)

  @property
  def by_domain_G(self) -> np.ndarray:
    """How much the experts' load differs between domains, for each gating; see `specialisation`."""
    return specialisation(self.domain_load_GDE, self.load_GE)

  @property
  def by_class_G(self) -> np.ndarray:
    """How much the experts' load differs between classes, for each gating; see `specialisation`."""
    return specialisation(self.class_load_GCE, self.load_GE)

  @property
  def overlap_G(self) -> np.ndarray:
    """How far a token's first choice in a gating follows from that in the gating before: [G - 1].

    It is I(e; f) / H(f), with e a token's first choice in one gating and f that in the next: 0 if
    they are independent, 1 if e determines f. It is also 0 if f is the same for all tokens, and NaN
    where `neighbours_GEE` is.
    """
    joint = self.neighbours_GEE
    first, second = joint.sum(-1, keepdims=True), joint.sum(-2, keepdims=True)
    known = _xlogx(joint).sum((-1, -2)) - _xlogx(first).sum((-1, -2)) - _xlogx(second).sum((-1, -2))
    return known / np.maximum(-_xlogx(second).sum((-1, -2)), 1e-12)


def specialisation(kinds_GKE: np.ndarray, load_GE: np.ndarray) -> np.ndarray:
  """How much the load of each kind of token differs from the load of all tokens, on average: [G].

  For each kind of token (a domain, a class) it is the total variation distance of the two loads:
  the share of the kind's choices that would have to go to other experts for its load to be that of
  all tokens. So it is 0 if all kinds choose alike. Kinds without tokens are left out of the mean;
  NaN if no kind has tokens. Kinds with few tokens have a larger distance by chance.
  """
  distances = np.abs(kinds_GKE - load_GE[:, None]).sum(-1) / 2
  found = np.isfinite(distances)
  total = np.where(found, distances, 0).sum(-1)
  return np.where(found.any(-1), total / np.maximum(found.sum(-1), 1), np.nan)


def _xlogx(p: np.ndarray) -> np.ndarray:
  return p * np.log(np.where(p > 0, p, 1))


def probe(
  model: Any,
  batches: Iterable[Any],
  *,
  num_domains: int,
  num_classes: int,
  reading: Reading,
) -> Probe:
  """Runs the model over batches; returns statistics of its routing and of its main path.

  Args:
    model: a model on one device.
    batches: the text or images.
    num_domains: number of domains in the batches.
    num_classes: number of classes that `reading` gives to tokens.
    reading: how this kind of model reads, with the run's router state.

  Raises:
    ConfigError: the model has no routed experts, or the batches have no token that counts; or see
      `reading.begin`.
  """
  listened = Layout(reading.trunks(model))
  if not listened.gatings:
    raise ConfigError("model.wiring='dense' has no router to inspect; give a run with experts")
  counts_of = nnx.jit(
    lambda model, batch: _counts(model, reading, listened, num_domains, num_classes, batch)
  )
  total: Any = None
  for batch in batches:
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), counts_of(model, batch))
    total = found if total is None else jax.tree.map(np.add, total, found)
  if total is None or not total["tokens"]:
    raise ConfigError("the validation data are empty; give more of them")
  return _finished(listened, total)


def _counts(
  model: Any,
  reading: Reading,
  layout: Layout,
  num_domains: int,
  num_classes: int,
  batch: Any,
) -> dict[str, Array]:
  """One batch's sums by name; `_finished` makes the `Probe` from their totals over all batches.

  Most are sums over the batch's tokens, or numbers of tokens that divide such sums. `drop` and
  `shortcut_ratio` are the batch's own shares and ratios: `_finished` divides their sums by the
  number of batches, to which each batch adds the 1 in `batches`. `hsic` of each value on the main
  path and `hsic_next` of each value and the next are estimates, from whose sums `_finished` makes
  `alignment_V`.
  """
  begun = reading.begin(model, batch)
  h_BSD, found = begun.h_BSD, Heard()
  for number, trunk in enumerate(reading.trunks(model)):
    if number:
      h_BSD = reading.between(model, number, h_BSD)
    h_BSD = walk(trunk, h_BSD, begun, begun.router[number], found)
  of_tokens = lambda x, like: jnp.broadcast_to(x, like.shape[:2]).reshape(-1)
  mask_T = of_tokens(begun.mask_BS, begun.h_BSD)
  read = [
    (of_tokens(begun.mask_BS, h).astype(jnp.float32), of_tokens(begun.domain_B[:, None], h),
     of_tokens(begun.class_BS, h))
    for h in found.read
  ]  # fmt: skip
  counts = _of_routings(found, read, layout, num_domains, num_classes)
  cosines = [
    cosine(a, b).reshape(-1) @ of_tokens(begun.mask_BS, a).astype(jnp.float32)
    if a.shape == b.shape
    else jnp.nan
    for a, b in itertools.pairwise(found.values)
  ]
  arrays = [statistics(sums) for sums in found.sums]
  grams = [gram(h.reshape(-1, h.shape[-1]), _mask_of(begun, h)) for h in found.values]
  numbers = [counted(_mask_of(begun, h)) for h in found.values]
  return counts | {
    "hsic": jnp.stack([hsic(a, a, n) for a, n in zip(grams, numbers)]),
    "hsic_next": jnp.stack(
      [
        hsic(a, b, n) if a_value.shape == b_value.shape else jnp.nan
        for (a, b), (a_value, b_value), n in zip(
          itertools.pairwise(grams), itertools.pairwise(found.values), numbers
        )
      ]
    ),
    "tokens": mask_T.sum(),
    "similarity": jnp.stack(cosines),
    "similarity_tokens": jnp.stack(
      [of_tokens(begun.mask_BS, a).sum() for a, _ in itertools.pairwise(found.values)]
    ),
    "batches": jnp.ones(()),
    "drop": jnp.stack([a["drop"] for a in arrays]),
    "shortcut_ratio": jnp.stack([a["shortcut_ratio"] for a in arrays]),
  }


def _mask_of(begun: Begun, h_BSD: Array) -> Array:
  """The mask of one value on the main path, float32 [T]: 1 for tokens that count, 0 for padding."""
  return jnp.broadcast_to(begun.mask_BS, h_BSD.shape[:2]).reshape(-1).astype(jnp.float32)


def _of_routings(
  heard: Heard,
  read: list[tuple[Array, Array, Array]],
  layout: Layout,
  num_domains: int,
  num_classes: int,
) -> dict[str, Array]:
  """The figures of each gating, summed over one batch's tokens; `_finished` makes means of them.

  Args:
    heard: what the listeners heard.
    read: for each gating, its tokens' mask float32 [T] (1 for tokens that count, else 0), domain
      int [T] and class int [T].
    layout: names and kinds of the gatings.
    num_domains, num_classes: as for `probe`.

  Returns:
    Arrays [G, ...] by name, with `gating_tokens` the number of tokens that count in each gating.
    `neighbours`, of each gating and the next, is [G - 1, E, E]; those with `in_parts` in their
    names are [G, PARTS], with `tokens_in_parts` the number of tokens.
  """
  routings, current = heard.routings, heard.current
  num_experts = routings[0].probs_TE.shape[1]  # number of experts, zero experts included
  load, domains, classes, neighbours, entropy, confidence, repeated, same = ([] for _ in range(8))
  in_parts: dict[str, list[Array]] = {"entropy": [], "confidence": [], "tokens": []}
  for g, (routing, now, (mask_T, domain_T, class_T)) in enumerate(zip(routings, current, read)):
    chosen_TE = jax.nn.one_hot(routing.expert_TK, num_experts).sum(1) * mask_T[:, None]
    load.append(chosen_TE.sum(0))
    domains.append(jnp.zeros((num_domains, num_experts)).at[domain_T].add(chosen_TE))
    classes.append(jnp.zeros((num_classes, num_experts)).at[class_T].add(chosen_TE))
    p_TE = routing.probs_TE
    safe = jnp.where(p_TE > 0, p_TE, 1)
    entropy_T, confidence_T = -(p_TE * jnp.log(safe)).sum(-1), p_TE.max(-1)
    entropy.append(entropy_T @ mask_T)
    confidence.append(confidence_T @ mask_T)
    length = heard.read[g].shape[1]
    part_T = jnp.arange(len(mask_T)) % length * PARTS // length
    for name, x_T in (("entropy", entropy_T), ("confidence", confidence_T), ("tokens", 1)):
      in_parts[name].append(jnp.zeros(PARTS).at[part_T].add(x_T * mask_T))
    best_T = routing.logits_TE.argmax(-1)
    before = routings[g - 1].expert_TK[:, 0] if layout.second[g] else best_T
    repeated.append((best_T == before) @ mask_T)
    same.append((now.logits_TE.argmax(-1) == best_T) @ mask_T)
    if g and mask_T.shape != read[g - 1][0].shape:
      neighbours.append(jnp.full((num_experts, num_experts), jnp.nan))
    elif g:
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
    "gating_tokens": jnp.stack([mask_T.sum() for mask_T, _, _ in read]),
    **{f"{name}_in_parts": jnp.stack(found) for name, found in in_parts.items()},
  }


def _finished(layout: Layout, total: dict[str, np.ndarray]) -> Probe:
  tokens, num_experts = float(total["tokens"]), total["load"].shape[-1]
  with np.errstate(invalid="ignore", divide="ignore"):
    share = lambda x: x / x.sum(-1, keepdims=True)
    domains, classes = share(total["domains"]), share(total["classes"])
  of_gating, in_parts = total["gating_tokens"], total["tokens_in_parts"]
  with np.errstate(invalid="ignore", divide="ignore"):
    own = total["hsic"]
    alignment = total["hsic_next"] / np.sqrt(np.maximum(own[:-1] * own[1:], 0))
    entropy_GQ = total["entropy_in_parts"] / in_parts / max(np.log(num_experts), 1e-9)
    confidence_GQ = total["confidence_in_parts"] / in_parts
  only = lambda x, where: np.where(where, x / of_gating, np.nan)
  points = tuple(layout.points)
  # A value that no norm has read is missing from the record; all values then have numbers as names.
  if len(total["similarity"]) != len(points) - 1:
    points = tuple(str(i) for i in range(len(total["similarity"]) + 1))
  return Probe(
    gatings=tuple(layout.gatings),
    load_GE=share(total["load"]),
    domain_load_GDE=domains,
    class_load_GCE=classes,
    neighbours_GEE=total["neighbours"] / of_gating[1:, None, None],
    entropy_G=total["entropy"] / of_gating / max(np.log(num_experts), 1e-9),
    confidence_G=total["confidence"] / of_gating,
    repeated_G=only(total["repeated"], layout.second),
    as_current_G=only(total["same"], layout.shortcut),
    drop_P=total["drop"] / total["batches"],
    shortcut_ratio_P=total["shortcut_ratio"] / total["batches"],
    points=points,
    similarity_V=total["similarity"] / total["similarity_tokens"],
    alignment_V=alignment,
    entropy_GQ=entropy_GQ,
    confidence_GQ=confidence_GQ,
    tokens=int(tokens),
  )
