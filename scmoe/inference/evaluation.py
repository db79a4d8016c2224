"""Validation metrics of a language model: loss, accuracy and others, in all and by domain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import DataError
from scmoe.models.gpt import GPT, Pass
from scmoe.models.gradient_totals import ready_beside_pairs
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import BATCH_AXES, TOKEN_AXES, batch_sharding, manual
from scmoe.parallel.sequence import own_tokens
from scmoe.parallel.shares import stored_specs

COUNTED = ("nats", "tokens", "bytes", "correct")


def evaluate(
  model: GPT,
  data: Any,
  *,
  mesh: Mesh,
  router: Any = None,
  max_batches: int | None = None,
  stopping: Callable[[], bool] | None = None,
  prepare: Callable[[Any], Any] | None = None,
) -> dict[str, Any] | None:
  """Evaluates a language model on validation text, without gate noise.

  As in training, choices may be dropped. Bits per byte is the total cost of all counted tokens, in
  bits, over the bytes of text that they stand for. It is comparable between tokenizers.

  Args:
    model: the model to evaluate.
    data: a `scmoe.data.Data`.
    mesh: the devices that hold the model.
    router: the training run's router state (balancing biases), if it has any.
    max_batches: limit on the number of batches; None: all validation text.
    stopping: called before every batch; if it returns True, the evaluation stops. None: it does not
      stop early.
    prepare: turns a jitted function into a program (`scmoe.run.programs`); None calls it as it is.

  Returns:
    `loss` (nats per token), `perplexity`, `bits_per_byte`, `accuracy` (share of tokens that are the
    model's first guess), `drop` (share of the routing choices that were dropped), `batches`,
    `tokens`, `bytes`, and `domains`: by name of each domain with counted tokens, the same figures
    without `drop` and `batches`. None if it was stopped.

  Raises:
    DataError: there is no validation text, `max_batches` is below 1, or no token that was read has
      a weight.
    ConfigError: a device's part of each row is longer than the model's context, devices cannot
      divide the rows evenly (`mesh.sequence`), or the model has tasks and the batches do not name
      them.
  """
  sizes_V = np.asarray(data.tokenizer.token_bytes(), np.int32)
  sharding = batch_sharding(mesh)
  graph, params = nnx.split(model)
  counts_of = _make_counts(graph, mesh, len(data.domains))
  if prepare is not None:
    counts_of = prepare(counts_of)
  sums = np.zeros((len(data.domains), len(COUNTED)))
  dropped = choices = 0.0
  batches = 0
  for batch in data.validation(max_batches=max_batches):
    if stopping is not None and stopping():
      return None
    put = lambda x: jax.make_array_from_process_local_data(sharding, x)
    counts, sent = counts_of(params, router, jax.tree.map(put, batch), sizes_V)
    sums += np.asarray(counts, np.float64)
    dropped, choices = dropped + float(sent[0]), choices + float(sent[1])
    batches += 1
  total = _figures(sums.sum(0))
  if total is None:
    raise DataError("the validation text has no token with a weight; give more validation text")
  domains = {name: _figures(row) for name, row in zip(data.domains, sums)}
  return {
    **total,
    "drop": dropped / max(choices, 1.0),
    "batches": batches,
    "domains": {name: figures for name, figures in domains.items() if figures is not None},
  }


def flat_scalars(figures: dict[str, Any]) -> dict[str, float]:
  """The metrics of `evaluate` that go into a line of metrics.jsonl, by name.

  They are loss, bits per byte, accuracy and drop of all text; if several domains have counted
  tokens, also `bits_per_byte/NAME` of each.
  """
  flat = {name: figures[name] for name in ("loss", "bits_per_byte", "accuracy", "drop")}
  if len(figures["domains"]) > 1:
    for name, of_domain in figures["domains"].items():
      flat[f"bits_per_byte/{name}"] = of_domain["bits_per_byte"]
  return flat


@functools.cache
def _make_counts(graph: nnx.GraphDef, mesh: Mesh, num_domains: int) -> Any:
  """Makes a jitted (params, router, batch, sizes_V) -> (sums by domain, numbers of choices).

  The sums are those in `COUNTED` over each domain's tokens in the global batch, float32 [domains,
  len(COUNTED)]. The numbers are those of the dropped and of all routing choices, an array [2].
  `sizes_V` is the number of bytes of each token id. The results are the same on all devices.
  """

  def local(params, router, batch, sizes_V):
    model: GPT = nnx.merge(graph, ready_beside_pairs([params])[0])
    batch = own_tokens(batch)
    mask_BS = batch.segment_ids > 0
    options = {"mask_BS": mask_BS, "router": router, "gate": model.gates_of(batch)}
    given = Pass(batch.positions, batch.segment_ids, **options)
    out = model(batch.inputs, given)
    nats_BS, correct_BS = model.embedding.token_losses(out.h_BSD, batch.targets)
    weight_BS = batch.weights
    bytes_BS = sizes_V[batch.targets] * (weight_BS > 0)
    rows = jnp.stack(
      [a.sum(1) for a in (nats_BS * weight_BS, weight_BS, bytes_BS, correct_BS * weight_BS)], 1
    )
    counts = jnp.zeros((num_domains, len(COUNTED)), jnp.float32).at[batch.domain].add(rows)
    sent = jnp.zeros(2)
    if out.sums is not None:
      sent = jnp.stack([out.sums.dropped.sum(), out.sums.choices.sum()])
    return total((counts, sent), TOKEN_AXES, "statistics")

  def program(params, router, batch, sizes_V):
    specs = (stored_specs(params), P(), P(BATCH_AXES), P())
    return manual(local, mesh, specs, P())(params, router, batch, sizes_V)

  return jax.jit(program)


def _figures(sums: np.ndarray) -> dict[str, float] | None:
  """Metrics by name from sums in the order of `COUNTED`; None if no token is counted.

  The perplexity of a loss above 700 nats is exp(700). Bits per byte are infinite if the tokens
  stand for no bytes.
  """
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
