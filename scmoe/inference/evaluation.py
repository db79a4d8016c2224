"""Validation loss, perplexity and bits per byte, over all text and for each domain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from scmoe.errors import DataError
from scmoe.models.gpt import GPT
from scmoe.models.objective import LanguageModelObjective, token_losses
from scmoe.parallel.mesh import batch_sharding, replicated

COUNTED = ("nats", "tokens", "bytes", "correct")


def evaluate(
  objective: LanguageModelObjective,
  params: Any,
  data: Any,
  *,
  mesh: Mesh,
  router: Any = None,
  max_batches: int | None = None,
  stopping: Callable[[], bool] | None = None,
) -> dict[str, Any] | None:
  """Evaluates on the validation text, with the capacity of training and no gate noise.

  Bits per byte is the total cost of all counted tokens, in bits, over the bytes of text that they
  stand for. It can be compared between tokenizers.

  Args:
    objective: whose model is evaluated.
    params: its parameters.
    data: a `scmoe.data.Data`.
    mesh: where the parameters lie.
    router: router state of the training run (balancing biases), if it has any.
    max_batches: at most so many batches; None: all validation text.
    stopping: asked before every batch; True ends the evaluation.

  Returns:
    `loss` (nats per token), `perplexity`, `bits_per_byte`, `accuracy`, `drop` (share of choices
    dropped), `tokens`, `bytes`, and `domains`: the same without `drop` for each domain that was
    seen. None if it was stopped.

  Raises:
    DataError: there is no validation text.
  """
  sizes_V = np.asarray(data.tokenizer.token_bytes(), np.int32)
  sharding = batch_sharding(mesh)
  sums = np.zeros((len(data.domains), len(COUNTED)))
  dropped = choices = 0.0
  for batch in data.validation(max_batches=max_batches):
    if stopping is not None and stopping():
      return None
    placed = {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
    state = (params, router)
    counts, sent = _counts(objective.graph, state, placed, sizes_V, len(data.domains))
    sums += np.asarray(counts, np.float64)
    dropped, choices = dropped + float(sent[0]), choices + float(sent[1])
  total = _figures(sums.sum(0))
  if total is None:
    raise DataError("the validation text has no token that counts; give more of it")
  domains = {name: _figures(row) for name, row in zip(data.domains, sums)}
  return {
    **total,
    "drop": dropped / max(choices, 1.0),
    "domains": {name: figures for name, figures in domains.items() if figures is not None},
  }


def flat_scalars(figures: dict[str, Any]) -> dict[str, float]:
  """What a line of metrics.jsonl holds: loss and bits per byte, in all and for each domain."""
  flat = {name: figures[name] for name in ("loss", "bits_per_byte", "accuracy")}
  if len(figures["domains"]) > 1:
    for name, of_domain in figures["domains"].items():
      flat[f"bits_per_byte/{name}"] = of_domain["bits_per_byte"]
  return flat


@functools.partial(jax.jit, static_argnums=(0, 4))
def _counts(
  graph: nnx.GraphDef, state: Any, batch: dict[str, Array], sizes_V: Array, num_domains: int
) -> tuple[Array, Array]:
  """float32 [domains, len(COUNTED)], and (dropped, choices)."""
  params, router = state
  model: GPT = nnx.merge(graph, params)
  out = model(
    batch["inputs"],
    positions_BS=batch["positions"],
    segments_BS=batch["segment_ids"],
    live_BS=batch["segment_ids"] > 0,
    router=router,
  )
  nats_BS, correct_BS = token_losses(model, out.h_BSD, batch["targets"])
  weight_BS = batch["weights"]
  bytes_BS = sizes_V[batch["targets"]] * (weight_BS > 0)
  rows = jnp.stack(
    [a.sum(1) for a in (nats_BS * weight_BS, weight_BS, bytes_BS, correct_BS * weight_BS)], 1
  )
  counts = jnp.zeros((num_domains, len(COUNTED)), jnp.float32).at[batch["domain"]].add(rows)
  sent = jnp.zeros(2)
  if out.sums is not None:
    sent = jnp.stack([out.sums.dropped.sum(), out.sums.choices.sum()])
  if model.mesh is None:
    return counts, sent
  return jax.lax.with_sharding_constraint((counts, sent), replicated(model.mesh))


def _figures(sums: np.ndarray) -> dict[str, float] | None:
  """Loss, perplexity, bits per byte and accuracy from sums; None without tokens."""
  nats, tokens, size, correct = (float(v) for v in sums)
  if not tokens:
    return None
  loss = nats / tokens
  return {
    "loss": loss,
    "perplexity": math.exp(min(loss, 700.0)),
    "bits_per_byte": nats / math.log(2) / size if size else math.inf,
    "accuracy": correct / tokens,
    "tokens": tokens,
    "bytes": size,
  }
