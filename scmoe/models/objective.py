"""The quantity that training minimises: a model's own loss plus the losses of its routers.

`RoutedObjective` has all that concerns routers and gradients. A subclass says how its model reads a
batch, and which sums it computes from the model's output.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.models import gpt
from scmoe.models.gpt import GPT
from scmoe.models.gradient_sums import divided
from scmoe.models.gradient_totals import GradientTotal, ready_beside_pairs
from scmoe.models.row_gradients import table_of, total_by_rows, without_table
from scmoe.models.trunk import Output, Pass, Route, run_trunks
from scmoe.moe.losses import (
  balance_loss,
  balance_part,
  layer_balance,
  statistics,
  update_bias,
  z_loss,
)
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import RouterSums
from scmoe.offload.memory import is_on_host
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import TOKEN_AXES
from scmoe.parallel.sequence import own_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
  """The sums from which a step's metrics are computed, over global microbatches.

  The sums of several microbatches are added up, field by field.

  Attributes:
    nats: Σ weight · cross-entropy, over tokens of text or over images.
    correct: Σ weight · [the best guess is right].
    weight: Σ weight, the number of tokens, or of images, that count.
    microbatches: number of microbatches in the sums.
    router: sums per MoE layer [layers, ...], or None.
    bias_range: Σ over microbatches of (largest - smallest balancing bias), per layer, or None.
    divergence: Σ weight · divergence from a teacher (`scmoe.models.distillation`), or None.
    distance: Σ weight · distance from a teacher's hidden states (`hidden_distance`), or None.
    correct_5: Σ weight · [one of the five best guesses is right], of images, or None.
    preference: sums over pairs of answers by name (`scmoe.models.preference`), or None.
    tasks: `nats` and `weight` of each task, float32 [tasks], by name (`scmoe.models.multitask`), or
      None.
  """

  nats: Array
  correct: Array
  weight: Array
  microbatches: Array
  router: RouterSums | None
  bias_range: Array | None = None
  divergence: Array | None = None
  distance: Array | None = None
  correct_5: Array | None = None
  preference: dict[str, Array] | None = None
  tasks: dict[str, Array] | None = None


class RoutedObjective(abc.ABC):
  """Loss, metrics and router update of a model: a `scmoe.training.step.Objective`.

  Args:
    graph: the model's graph definition; each method merges it with the parameters it gets.
    router: coefficients of the balancing losses.
    remat: rematerialisation preset (`Pass.remat`).
  """

  term = "tokens"  # name of the model's own term of the loss, and of the count that divides it

  def __init__(self, graph: nnx.GraphDef, router: RouterConfig, *, remat: str = "none"):
    self.graph, self.router, self.remat = graph, router, remat

  # -- what a subclass says -----------------------------------------------------------------------

  @abc.abstractmethod
  def route(
    self,
    models: Sequence[Any],
    batches: Sequence[Any],
    router: Any,
    rngs: Sequence[Array | None],
    totals: Any = None,
    total_of_rows: GradientTotal | None = None,
  ) -> Route:
    """The way of several microbatches through the model, for `run_trunks`.

    Args:
      models: one per microbatch, with the same parameters.
      batches, router, rngs: see `losses`.
      totals: of the model's parameters; see `losses`.
      total_of_rows: see `Pass.total_of_rows`.
    """

  def total_of_rows(
    self, params: Sequence[Any], totals: Any, batches: Sequence[Any]
  ) -> GradientTotal | None:
    """The total of a table whose gradients travel as rows (`scmoe.models.row_gradients`), if any.

    Args:
      params, totals, batches: of a group; see `losses`.
    """
    del params, totals, batches
    return None

  def merged(self, params: Any, batch: Any) -> Any:
    """The model with these parameters, ready to read this device's tokens of a microbatch.

    Args:
      params: whole but for those of pairs (`ready_beside_pairs`).
      batch: the microbatch.
    """
    del batch
    return nnx.merge(self.graph, params)

  @abc.abstractmethod
  def of_batch(self, model: Any, out: Output, batch: Any) -> dict[str, Array]:
    """This device's sums over a microbatch, by the names of `LossSums`: nats, correct, weight.

    It may add other fields of `LossSums`, and `loss`, a sum that is then differentiated instead of
    `nats`.

    Args:
      model: the model.
      out: its output for the microbatch.
      batch: the microbatch.
    """

  @abc.abstractmethod
  def counted(self, batch: Any) -> tuple[Array, Array]:
    """Two arrays whose sums over a step divide terms of the loss.

    The first has the weights of the things over which the loss is a mean: tokens, images or pairs.
    The second is True for the tokens or images that are routed, which excludes padding.
    """

  def tokens_of_each(self, model: Any) -> Array | float:
    """Number of tokens that a MoE layer routes for each True of `counted`.

    It is 1 for text. For images it is the number of an image's tokens: a number, or an array with
    one for each layer.
    """
    del model
    return 1.0

  # -- the loss -----------------------------------------------------------------------------------

  def loss(
    self,
    params: Any,
    router: Any,
    batch: Batch,
    rng: Array | None,
  ) -> tuple[Array, LossSums]:
    """Loss of a step of one microbatch, and its sums.

    In the manual region parameters and batch are this device's shares, and the loss is that of the
    global batch. Where devices divide rows (`mesh.sequence`), the batch still has whole rows, and
    this method takes the device's tokens from them. `jax.grad` gives this device's addend to the
    gradient; the gradient is the sum of all devices' addends.

    Args:
      params: the model's parameters.
      router: state that gradients do not train (`GPT.init_router`); None or {} where there is none.
      batch: a microbatch, leaves [B, ...].
      rng: random key for gate noise.

    Returns:
      The loss, float32 [], and the sums. The loss is the model's own mean loss (for text the
      cross-entropy in nats per counted token), plus the balancing loss and the z-loss of the
      routers, summed over layers, with their coefficients.
    """
    (terms,), (sums,) = self.losses([params], router=router, batches=[batch], rngs=[rng])
    return divided(terms, self.counts(jax.tree.map(lambda x: x[None], batch))), sums

  def losses(
    self,
    params: Sequence[Any],
    totals: Any = None,
    *,
    router: Any,
    batches: Sequence[Batch],
    rngs: Sequence[Array | None],
    ahead: RouterSums | None = None,
  ) -> tuple[list[dict[str, Array]], list[LossSums]]:
    """Terms of the loss and `LossSums` of several microbatches side by side.

    They run in turns (`scmoe.models.trunk.run_trunks`), so that one microbatch computes while the
    rows of another travel.

    Args:
      params, totals, router, batches, rngs, ahead: see `scmoe.models.gradient_sums.Losses`.

    Returns:
      Two lists: each microbatch's terms, by the names of `counts`, and its `LossSums`. The term
      named by `self.term` is the weighted cross-entropy (or `loss` of `of_batch`). Models with
      routers add two terms, with their coefficients and summed over layers: "routed", the z-loss,
      and "microbatches", or "steps" if `ahead` is given, the balancing loss.
    """
    batches = [own_tokens(batch) for batch in batches]
    of_rows = self.total_of_rows(params, totals, batches)
    params = ready_beside_pairs(params, totals if of_rows is None else without_table(totals))
    models: list[Any] = [self.merged(own, batch) for own, batch in zip(params, batches)]
    outs = run_trunks(self.route(models, batches, router, rngs, totals, of_rows))
    own = []
    with jax.named_scope("loss"):
      for model, out, batch in zip(models, outs, batches):
        own.append((self.of_batch(model, out, batch), out.sums))
      # One collective sums everything: all sums of all layers and microbatches.
      own = total(own, TOKEN_AXES, "statistics")
    bias_LE = (router or {}).get("bias")
    bias_range = None if bias_LE is None else bias_LE.max(-1) - bias_LE.min(-1)
    terms, found = [], []
    for model, (read, sums) in zip(models, own):
      terms.append({self.term: read.pop("loss", read["nats"])})
      if sums is not None:
        terms[-1] |= self._router_terms(model, sums, ahead)
      rest = {"microbatches": jnp.ones(()), "bias_range": bias_range}
      found.append(LossSums(**read, **rest, router=sums))
    return terms, found

  def _router_terms(
    self, model: Any, sums: RouterSums, ahead: RouterSums | None
  ) -> dict[str, Array]:
    kind, rule = self.router.balance, model.config.wiring_rule
    if ahead is None:
      name, balance = "microbatches", balance_loss(sums, kind)
    else:
      name, balance = "steps", balance_part(sums, ahead, kind)
    # The sums of a pair that gates twice count each token twice.
    routers = rule.units_per_moe * len(rule.taps) * self.tokens_of_each(model)
    routed = self.router.z_loss * (sums.z_square / routers).sum()
    return {name: self.router.balance_loss * balance, "routed": routed}

  def counts(self, batch: Batch) -> dict[str, Array]:
    """The counts of a step by which its terms are divided, float32 [], over all devices.

    Args:
      batch: this device's share of the step's batch, leaves [A, B, ...].

    Returns:
      By name: under `self.term` the sum of the weights; under "routed" the number of tokens or
      images that are no padding; under "microbatches" A; under "steps" 1.
    """
    counted = self.counted(own_tokens(batch))
    own = jnp.stack([each.astype(jnp.float32).sum() for each in counted])
    weight, routed = total(own, TOKEN_AXES, "statistics")
    microbatches = jnp.asarray(batch.weights.shape[0], jnp.float32)
    one = jnp.ones(())
    return {self.term: weight, "routed": routed, "microbatches": microbatches, "steps": one}

  def look_ahead(
    self, params: Any, router: Any, batch: Batch, key_of: Callable[[Any], Array]
  ) -> RouterSums | None:
    """Router sums of a whole step, for a balancing loss of the step (`router.balance_over=step`).

    The gradient of that loss needs the loads of all microbatches, which only a forward pass of each
    can tell. None with `balance_over` microbatch, without a balancing loss, and for a step of one
    microbatch.

    Args:
      params, router: as for `loss`.
      batch: as for `counts`.
      key_of: number of a microbatch -> its key.
    """
    microbatches = batch.weights.shape[0]
    if not self.router.looks_ahead(microbatches):
      return None
    one = jax.tree.map(lambda x: x[0], batch)
    model: Any = self.merged(ready_beside_pairs([params])[0], own_tokens(one))

    def router_sums(item: tuple[Array, Batch]) -> RouterSums | None:
      number, own = item
      return run_trunks(self.route([model], [own_tokens(own)], router, [key_of(number)]))[0].sums

    with jax.named_scope("look_ahead"):
      found = jax.lax.map(router_sums, (jnp.arange(microbatches), batch))
      found = jax.tree.map(lambda x: x.sum(0), found)
      return total(found, TOKEN_AXES, "statistics")

  def lay_out_totals(self, zeros: Any) -> Any:
    """The zeros, with an array of its own for each large layer if layers are written out.

    Args:
      zeros: the totals of the gradients, in a tree like the parameters.
    """
    model: Any = nnx.merge(self.graph, zeros)
    return model.lay_out_totals(zeros)

  def cast(self, params: Any) -> Any:
    """Parameters in the compute dtype, cast once for all microbatches of a step.

    Norms, gates and mixing coefficients stay float32, because they compute in float32. The gradient
    of a cast weight has the compute dtype.
    """
    model: Any = nnx.merge(self.graph, params)
    return cast_params(params, model.config.dtype)

  def taught(self, given: Any) -> RoutedObjective:
    """Raises TypeError: only `scmoe.models.second_model` reads the arrays of a second model."""
    raise TypeError(f"{type(self).__name__} reads no second model's arrays")

  def seeded(self, seed: Array) -> RoutedObjective:
    """Returns this objective: its random numbers follow from the keys of `losses` only."""
    del seed
    return self

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """Scalars and per-layer arrays of a step, from the sums over its microbatches.

    Scalars: `cross_entropy` (nats per token, or per image) and `accuracy`; with routers also
    `drop`, over the choices of all layers; of the worst layer `max_violation`, `imbalance` (the
    busiest expert's load over the mean load), `dead` and `diversity`; means over layers of
    `balance_loss`, `z_loss`, `router_entropy`, `confidence`, `shortcut_ratio`, and with zero
    experts `zero_share` and `real_experts`. Arrays: the per-layer `scmoe.moe.losses.statistics`;
    none without routers.
    """
    weight = jnp.maximum(aux.weight, 1)
    scalars = {
      "cross_entropy": aux.nats / weight,
      "accuracy": aux.correct / weight,
    }
    if aux.router is None:
      return scalars, {}
    bias_range = None if aux.bias_range is None else aux.bias_range / aux.microbatches
    arrays = statistics(aux.router, bias_range)
    scalars |= {
      "balance_loss": layer_balance(aux.router, self.router.balance).mean(),
      "z_loss": z_loss(aux.router).mean(),
      "drop": aux.router.dropped.sum() / jnp.maximum(aux.router.choices.sum(), 1),
      "max_violation": arrays["max_violation"].max(),
      "imbalance": arrays["max_violation"].max() + 1,
      "dead": arrays["dead"].max(),
      "diversity": arrays["diversity"].min(),
      "router_entropy": arrays["entropy"].mean(),
      "confidence": arrays["confidence"].mean(),
      "shortcut_ratio": arrays["shortcut_ratio"].mean(),
    }
    scalars |= {
      name: arrays[name].mean() for name in ("zero_share", "real_experts") if name in arrays
    }
    return scalars, arrays

  def left_over(self, aux: LossSums) -> Array:
    """Whether a layer needed overflow rounds, on any device and in any microbatch: bool []."""
    if aux.router is None:
      return jnp.zeros((), bool)
    return (aux.router.rounds > aux.router.shards).any()

  def update_router(self, router: Any, aux: LossSums) -> Any:
    """Router state after a step, from the loads of all its microbatches and devices.

    It updates the balancing biases, if any. With n > 1 gates (`router.compat.gates`) the next gate
    has its turn, so that each trains in every n-th step.
    """
    new = dict(router or {})
    if aux.router is not None and "bias" in new:
      new = update_bias(new, aux.router, self.router)
    if "turn" in new:
      new["turn"] = (new["turn"] + 1) % self.router.compat.gates
    return new


class LanguageModelObjective(RoutedObjective):
  """Cross-entropy of the next token of a `GPT`, and the losses of its routers.

  Attributes:
    hidden: whether the model's output has the residual stream after every block (`Pass.hidden`).
  """

  hidden = False

  def merged(self, params: Any, batch: Batch) -> GPT:
    """See `RoutedObjective.merged`; data ranks may have gathered what they partition."""
    model: GPT = nnx.merge(self.graph, params)
    return model.ready_for(batch.inputs.size)

  def total_of_rows(
    self, params: Sequence[Any], totals: Any, batches: Sequence[Batch]
  ) -> GradientTotal | None:
    """See `RoutedObjective.total_of_rows`: that of the token embeddings."""
    own = None if totals is None else table_of(totals)
    if own is None or not own.rows:
      return None
    model: GPT = nnx.merge(self.graph, params[0])
    if model.embedding.config.tied or model.embedding.config.partitioned:
      return None
    tokens, dtype = sum(batch.inputs.size for batch in batches), jnp.dtype(model.config.dtype)
    return total_by_rows(own, table_of(params[0]), tokens, dtype)

  def route(
    self,
    models: Sequence[GPT],
    batches: Sequence[Batch],
    router: Any,
    rngs: Sequence[Array | None],
    totals: Any = None,
    total_of_rows: GradientTotal | None = None,
  ) -> Route:
    """See `RoutedObjective.route`."""
    pairs = None if totals is None else models[0].totals_of_pairs(totals)
    given = [
      Pass(
        batch.positions,
        batch.segment_ids,
        mask_BS=batch.segment_ids > 0,
        key=rng,
        router=router,
        gate=model.gates_of(batch, (router or {}).get("turn", 0)),
        remat=self.remat,
        hidden=self.hidden,
        gradient_totals=pairs,
        total_of_rows=total_of_rows,
      )
      for model, batch, rng in zip(models, batches, rngs)
    ]
    return gpt.route(models, [batch.inputs for batch in batches], given)

  def of_batch(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """See `RoutedObjective.of_batch`."""
    return self.of_text(model, out, batch) | {"weight": batch.weights.astype(jnp.float32).sum()}

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """This device's sums over a microbatch: `nats` and `correct` of `LossSums`.

    A subclass may add other fields of `LossSums`, and `loss`, a sum that is then differentiated
    instead of `nats`.
    """
    nats, correct = model.embedding.summed_losses(out.h_BSD, batch.targets, batch.weights)
    return {"nats": nats, "correct": correct}

  def counted(self, batch: Batch) -> tuple[Array, Array]:
    """The weights of the tokens, and which tokens are no padding."""
    return batch.weights, batch.segment_ids > 0


def cast_params(params: Any, dtype: Any) -> Any:
  """Casts parameters to `dtype`, except those of norms, gates and mixing coefficients.

  Those in the host's memory are cast when they have been fetched (`scmoe.models.fetched`).
  """

  def cast(path: tuple, leaf: Array) -> Array:
    name = jax.tree_util.keystr(path)
    keep = any(word in name for word in ("norm", "router_gate", "mix"))
    return leaf if keep or is_on_host(leaf) else leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)
