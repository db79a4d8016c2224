"""The objective of an image classifier: cross-entropy with soft labels, two accuracies.

A guess counts as right if it is the highest score (`accuracy`) or one of the five highest
(`accuracy_5`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.batch import ImageBatch
from scmoe.models.objective import LossSums, RoutedObjective
from scmoe.models.trunk import Output, Pass, Route
from scmoe.models.vision.augment import AugmentConfig, augmented, partner_part, soft_labels
from scmoe.models.vision.model import VisionModel
from scmoe.models.vision.model import route as model_route
from scmoe.moe.options import RouterConfig

GUESSES = 5  # highest scores among which `accuracy_5` looks for the label


class ClassificationObjective(RoutedObjective):
  """Cross-entropy of changed images with their labels, plus the losses of the routers.

  Args:
    graph, router, remat: see `RoutedObjective`.
    augment: how images and labels are changed.
    seed: the run's seed, from which the random numbers of these changes follow.
  """

  term = "images"

  def __init__(
    self,
    graph: nnx.GraphDef,
    router: RouterConfig,
    *,
    augment: AugmentConfig = AugmentConfig(),
    seed: int | Array = 0,
    remat: str = "none",
  ):
    super().__init__(graph, router, remat=remat)
    self.augment, self.seed = augment, seed

  def seeded(self, seed: Array) -> ClassificationObjective:
    """An objective like this one that changes images by the random numbers of `seed`, int32 []."""
    changes = {"augment": self.augment, "seed": seed}
    return ClassificationObjective(self.graph, self.router, **changes, remat=self.remat)

  def route(
    self,
    models: Sequence[VisionModel],
    batches: Sequence[ImageBatch],
    router: Any,
    rngs: Sequence[Array | None],
    totals: Any = None,
    total_of_rows: Any = None,
  ) -> Route:
    """The way of several microbatches of images, which it changes first, through the model.

    Arguments as of `RoutedObjective.route`.
    """
    with jax.named_scope("augmentation"):
      images = [augmented(batch, self.augment, self.seed) for batch in batches]
    pairs = None if totals is None else models[0].totals_of_pairs(totals)
    given = [
      Pass(
        mask_BS=batch.weights[:, None] > 0,
        key=rng,
        router=router,
        gate=(router or {}).get("turn", 0),
        remat=self.remat,
        gradient_totals=pairs,
      )
      for batch, rng in zip(batches, rngs)
    ]
    return model_route(models, images, given)

  def of_batch(self, model: VisionModel, out: Output, batch: ImageBatch) -> dict[str, Array]:
    """This device's sums over a batch of images: `nats`, `weight`, `correct` and `correct_5`.

    If an image is mixed from two, its label has shares of two classes, and a guess counts with the
    share of the guessed class.
    """
    options = self.augment
    # These are the same random numbers as in `route`: XLA computes them once.
    part_BSS = partner_part(batch, options, self.seed) if options.mixes else None
    classes, weight_B = model.config.vision.classes, batch.weights.astype(jnp.float32)
    label_BV = soft_labels(batch, part_BSS, classes, options.label_smoothing)
    shown_BV = soft_labels(batch, part_BSS, classes, 0.0)
    logits_BV = model.logits(out.h_BSD)
    nats_B = -(label_BV * jax.nn.log_softmax(logits_BV)).sum(-1)
    return {
      "nats": (nats_B * weight_B).sum(),
      "weight": weight_B.sum(),
      "correct": (right_among(logits_BV, shown_BV, 1) * weight_B).sum(),
      "correct_5": (right_among(logits_BV, shown_BV, GUESSES) * weight_B).sum(),
    }

  def counted(self, batch: ImageBatch) -> tuple[Array, Array]:
    """The weights of this device's images, and which images are no padding (weight > 0)."""
    return batch.weights, batch.weights > 0

  def tokens_of_each(self, model: VisionModel) -> Array:
    """Tokens of an image in each MoE layer, [layers]: later stages of a Swin have fewer."""
    return jnp.asarray(model.tokens_of_layers, jnp.float32)

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """The metrics of `RoutedObjective`, and `accuracy_5`: images with their label in the best five.

    `accuracy_5` is a share of the images, weighted like the loss.
    """
    scalars, arrays = super().metrics(aux)
    assert aux.correct_5 is not None
    return scalars | {"accuracy_5": aux.correct_5 / jnp.maximum(aux.weight, 1)}, arrays


def right_among(
  logits_BV: Float[Array, "B V"], label_BV: Float[Array, "B V"], guesses: int
) -> Float[Array, " B"]:
  """The share of each image's label that lies on the classes with its highest scores, float32 [B].

  For a label of one class: 1 if that class is among those of the highest scores, else 0.

  Args:
    logits_BV: scores.
    label_BV: the labels as distributions over the classes.
    guesses: number of highest scores; all classes if there are fewer.
  """
  best_BG = jax.lax.top_k(jax.lax.stop_gradient(logits_BV), min(guesses, logits_BV.shape[-1]))[1]
  return jnp.take_along_axis(label_BV, best_BG, -1).sum(-1)
