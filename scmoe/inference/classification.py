"""Validation metrics of an image classifier: loss, two accuracies and dropped choices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import DataError
from scmoe.models.gradient_totals import ready_beside_pairs
from scmoe.models.trunk import Pass
from scmoe.models.vision.model import VisionModel
from scmoe.models.vision.objective import GUESSES, right_among
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import BATCH_AXES, batch_sharding, manual
from scmoe.parallel.shares import stored_specs

COUNTED = ("nats", "images", "correct", "correct_5", "dropped", "choices")


def evaluate_images(
  model: VisionModel,
  data: Any,
  *,
  mesh: Mesh,
  router: Any = None,
  max_batches: int | None = None,
  stopping: Callable[[], bool] | None = None,
  prepare: Callable[[Any], Any] | None = None,
) -> dict[str, Any] | None:
  """Evaluates a classifier on unaugmented validation images, without gate noise.

  As in training, choices may be dropped.

  Args:
    model: the classifier.
    data: a `scmoe.data.images.pipeline.ImageData`.
    mesh, router, max_batches, stopping, prepare: as for `scmoe.inference.evaluation.evaluate`.

  Returns:
    `loss` (nats per image, without label smoothing), `accuracy` and `accuracy_5` (shares of the
    images whose label is the best guess, and among the five best), `drop` (share of the routing
    choices that were dropped), `batches` and `images` (their numbers), and an empty `domains`.
    Means are over all images at once, not over batches. None if it was stopped.

  Raises:
    DataError: there are no validation images, or `max_batches` is below 1.
    ConfigError: the images have another shape than those of the model.
  """
  sharding = batch_sharding(mesh)
  graph, params = nnx.split(model)
  counts_of = _make_counts(graph, mesh)
  if prepare is not None:
    counts_of = prepare(counts_of)
  sums, batches = np.zeros(len(COUNTED)), 0
  for batch in data.validation(max_batches=max_batches):
    if stopping is not None and stopping():
      return None
    put = lambda x: jax.make_array_from_process_local_data(sharding, x)
    sums += np.asarray(counts_of(params, router, jax.tree.map(put, batch)), np.float64)
    batches += 1
  found = dict(zip(COUNTED, sums.tolist()))
  images = found["images"]
  if not images:
    raise DataError("no validation image counts; give more of them")
  return {
    "loss": found["nats"] / images,
    "accuracy": found["correct"] / images,
    "accuracy_5": found["correct_5"] / images,
    "drop": found["dropped"] / max(found["choices"], 1.0),
    "batches": batches,
    "images": images,
    "domains": {},
  }


@functools.cache
def _make_counts(graph: nnx.GraphDef, mesh: Mesh) -> Any:
  """Makes a jitted (params, router, batch) -> the sums in `COUNTED`, over the global batch.

  They are an array [len(COUNTED)], in the order of `COUNTED`, and the same on all devices.
  """

  def local(params, router, batch):
    model: VisionModel = nnx.merge(graph, ready_beside_pairs([params])[0])
    weight_B = batch.weights
    out = model(batch.images, Pass(mask_BS=weight_B[:, None] > 0, router=router))
    logits_BV = model.logits(out.h_BSD)
    label_BV = jax.nn.one_hot(batch.labels, logits_BV.shape[-1])
    nats_B = -(label_BV * jax.nn.log_softmax(logits_BV)).sum(-1)
    right = [right_among(logits_BV, label_BV, guesses) for guesses in (1, GUESSES)]
    sums = [(a * weight_B).sum() for a in (nats_B, jnp.ones_like(weight_B), *right)]
    sent = [jnp.zeros(()), jnp.zeros(())]
    if out.sums is not None:
      sent = [out.sums.dropped.sum(), out.sums.choices.sum()]
    return total(jnp.stack([*sums, *sent]), BATCH_AXES, "statistics")

  def program(params, router, batch):
    specs = (stored_specs(params), P(), P(BATCH_AXES))
    return manual(local, mesh, specs, P())(params, router, batch)

  return jax.jit(program)
