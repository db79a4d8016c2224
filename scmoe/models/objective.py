"""What training minimises: cross-entropy of the next token plus the routers' losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output, Pass, run_batches_in_turns
from scmoe.models.gradient_sums import added, large_layers_apart
from scmoe.moe.losses import balance_loss, layer_balance, statistics, update_bias, z_loss
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import RouterSums
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import BATCH_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
  """Sums over the global batch, additive over microbatches: everything that a step reports.

  Attributes:
    nats: Σ weight · cross-entropy.
    correct: Σ weight · [the best guess is right].
    weight: Σ weight, the number of tokens that count.
    loss: Σ of the microbatches' total losses.
    microbatches: number of them.
    router: sums per MoE layer [layers, ...], or None.
    bias_range: Σ of the microbatches' largest minus smallest balancing bias per layer, or None.
    divergence: Σ weight · divergence from a teacher (`scmoe.models.distillation`), or None.
  """

  nats: Array
  correct: Array
  weight: Array
  loss: Array
  microbatches: Array
  router: RouterSums | None
  bias_range: Array | None = None
  divergence: Array | None = None


class LanguageModelObjective:
  """Loss, metrics and router update of a `GPT`, as the training step wants them.

  Args:
    graph: the model's graph definition; `loss` merges it with the parameters it is given.
    router: coefficients of the balancing losses.
    remat: rematerialisation preset (`Pass.remat`).
  """

  def __init__(self, graph: nnx.GraphDef, router: RouterConfig, *, remat: str = "none"):
    self.graph, self.router, self.remat = graph, router, remat

  def loss(
    self,
    params: Any,
    router: Any,
    batch: Batch,
    rng: Array | None,
  ) -> tuple[Array, LossSums]:
    """Total loss of one microbatch, and its sums.

    In the manual region parameters and batch are this device's shares, and the loss is that of the
    global batch on all of them: its gradient is what this device adds to the whole one.

    Args:
      params: the model's parameters.
      router: state that gradients do not train (`GPT.init_router`); None or {} where there is none.
      batch: [B, S].
      rng: random key for gate noise.

    Returns:
      mean cross-entropy (nats per counted token) + balancing losses summed over layers, float32.
    """
    return self.losses([params], router, [batch], [rng])[1][0]

  def losses(
    self,
    params: Sequence[Any],
    router: Any,
    batches: Sequence[Batch],
    rngs: Sequence[Array | None],
    totals: Any = None,
  ) -> tuple[Array, list[tuple[Array, LossSums]]]:
    """The sum of the losses, and `loss`, of several microbatches side by side.

    They run in turns (`scmoe.models.gpt.run_batches_in_turns`), so that one's exchange has
    another's computation beside it.

    Args:
      params: the parameters, once for each microbatch, so that their gradients stay apart.
      router: as of `loss`.
      batches, rngs: of each microbatch.
      totals: of the gradients (`scmoe.models.gradient_sums`); those of `stages` are added layer by
        layer.
    """
    stages = None
    if totals is not None:
      stages = totals["stages"]
      others = lambda tree: {name: tree[name] for name in tree if name != "stages"}
      parts = added([others(own) for own in params], others(totals))
      params = [{**own, **part} for own, part in zip(params, parts)]
    models: list[GPT] = [nnx.merge(self.graph, own) for own in params]
    given = [
      Pass(
        batch.positions,
        batch.segment_ids,
        mask_BS=batch.segment_ids > 0,
        key=rng,
        router=router,
        gate=(router or {}).get("turn", 0),
        remat=self.remat,
        gradient_totals=stages,
      )
      for batch, rng in zip(batches, rngs)
    ]
    outs = run_batches_in_turns(models, [batch.inputs for batch in batches], given)
    own = []
    with jax.named_scope("loss"):
      for model, out, batch in zip(models, outs, batches):
        text = self.of_text(model, out, batch)
        own.append((text | {"weight": batch.weights.astype(jnp.float32).sum()}, out.sums))
      # All microbatches, all layers, all sums: one collective.
      totals = total(own, BATCH_AXES, "statistics")
    bias_LE = (router or {}).get("bias")
    bias_range = None if bias_LE is None else bias_LE.max(-1) - bias_LE.min(-1)
    found = []
    for text, sums in totals:
      loss = text.pop("loss", text["nats"]) / jnp.maximum(text["weight"], 1)
      if sums is not None:
        loss = loss + self.router.balance_loss * balance_loss(sums, self.router.balance)
        loss = loss + self.router.z_loss * z_loss(sums).sum()
      rest = {"loss": loss, "microbatches": jnp.ones(()), "bias_range": bias_range}
      found.append((loss, LossSums(**text, **rest, router=sums)))
    return jnp.stack([loss for loss, _ in found]).sum(), found

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """This device's sums over a microbatch: `nats` and `correct` of `LossSums`.

    A subclass may add `loss`, what is differentiated instead of `nats`, and `divergence`.
    """
    nats, correct = model.embedding.summed_losses(out.h_BSD, batch.targets, batch.weights)
    return {"nats": nats, "correct": correct}

  def lay_out_totals(self, zeros: Any) -> Any:
    """Zeros like the parameters; large layers that are written out have arrays of their own."""
    model: GPT = nnx.merge(self.graph, zeros)
    if not model.written_out:
      return zeros
    return {**zeros, "stages": large_layers_apart(zeros["stages"], model.config.num_pairs)}

  def cast(self, params: Any) -> Any:
    """Parameters as the products read them: in the compute type, once for many microbatches.

    Norms, gates and mixing coefficients stay in float32, in which they are used. The gradient of
    a cast weight has the compute type, as its product gives it.
    """
    model: GPT = nnx.merge(self.graph, params)
    return cast_params(params, model.config.dtype)

  def taught(self, given: Any) -> LanguageModelObjective:
    """Of an objective with a teacher, the one that has its arrays."""
    raise TypeError("only scmoe.models.distillation.Distillation has a teacher")

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """Scalars and per-layer arrays of a step, from the sums over its microbatches.

    Scalars: `loss` (total), `cross_entropy` (nats per token), `accuracy`, `balance_loss`,
    `z_loss` (means over layers), and `drop`, `max_violation`, `imbalance` (the busiest expert's
    load over the mean one), `dead`, `diversity` (the worst or mean layer), and with zero experts
    `zero_share` and `real_experts`. Arrays: the per-layer `statistics` of the routers.
    """
    weight = jnp.maximum(aux.weight, 1)
    scalars = {
      "loss": aux.loss / aux.microbatches,
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

  def update_router(self, router: Any, aux: LossSums) -> Any:
    """Router state after a step, from the loads of the global batch and all its microbatches.

    Of several gates the next one has its turn: each trains in every `router.gates`-th step.
    """
    new = dict(router or {})
    if aux.router is not None and "bias" in new:
      new = update_bias(new, aux.router, self.router)
    if "turn" in new:
      new["turn"] = (new["turn"] + 1) % self.router.gates
    return new


def cast_params(params: Any, dtype: Any) -> Any:
  """Parameters as the products read them; norms, gates and mixing coefficients stay in float32."""

  def cast(path: tuple, leaf: Array) -> Array:
    name = jax.tree_util.keystr(path)
    keep = any(word in name for word in ("norm", "router_gate", "mix"))
    return leaf if keep else leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)
