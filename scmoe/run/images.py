"""Images for the commands: the model of a run, its batches, data and figures (`Modality`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from scmoe.base.batch import ImageBatch
from scmoe.data.images.pipeline import ImageData, open_images
from scmoe.inference.classification import evaluate_images
from scmoe.models.config import ModelConfig
from scmoe.models.vision.model import VisionModel
from scmoe.models.vision.objective import ClassificationObjective
from scmoe.run.config import RunConfig
from scmoe.training.metrics import read_metrics


class Images:
  """See `scmoe.run.modality.Modality`."""

  path_source, noun = "images", "image"

  def make_model(
    self, config: ModelConfig, key: Array, *, partitioned: bool, **options: Any
  ) -> VisionModel:
    """See `Modality.make_model`."""
    del partitioned  # there is no table of tokens
    return VisionModel(config, **options, rngs=nnx.Rngs(params=key))

  def make_objective(self, run: RunConfig, graph: nnx.GraphDef) -> ClassificationObjective:
    """See `Modality.make_objective`."""
    changes = {"augment": run.augment, "seed": run.train.seed}
    return ClassificationObjective(graph, run.router, **changes, remat=run.train.remat)

  def batch_shapes(self, run: RunConfig, rows: tuple[int, ...]) -> ImageBatch:
    """See `Modality.batch_shapes`."""
    of = lambda shape, dtype: jax.ShapeDtypeStruct((*rows, *shape), jnp.dtype(dtype))
    vision = run.model.vision
    images = of((vision.size, vision.size, vision.channels), np.uint8)
    labels = of((), np.int32)
    others = (images, labels) if run.augment.mixes else ()
    return ImageBatch(images, labels, of((), np.float32), of((2,), np.uint32), *others)

  def random_batch(self, run: RunConfig, rows: tuple[int, ...], seed: int) -> ImageBatch:
    """See `Modality.random_batch`."""
    draw = np.random.default_rng(seed).integers
    below = {"uint8": 256, "int32": run.model.vision.classes, "uint32": 1000}
    make = lambda s: (
      np.ones(s.shape, s.dtype)
      if s.dtype == np.float32
      else draw(0, below[s.dtype.name], s.shape, dtype=s.dtype)
    )
    return jax.tree.map(make, self.batch_shapes(run, rows))

  def open_data(self, run: RunConfig, **options: Any) -> ImageData:
    """See `Modality.open_data`."""
    vision = run.model.vision
    return open_images(
      run.data,
      size=vision.size,
      channels=vision.channels,
      classes=vision.classes,
      batch_size=run.train.batch_size,
      seed=run.train.seed,
      partners=run.augment.mixes,
      **options,
    )

  def evaluate(self, model: Any, data: Any, **options: Any) -> dict[str, Any] | None:
    """See `Modality.evaluate`."""
    return evaluate_images(model, data, **options)

  def add_baseline(self, data: Any, figures: dict[str, Any]) -> None:
    """Adds nothing: a guess without looking is right once in as many times as there are classes."""

  def flat(self, figures: Mapping[str, Any]) -> dict[str, float]:
    """See `Modality.flat`."""
    return {name: figures[name] for name in ("loss", "accuracy", "accuracy_5", "drop")}

  def keep(self, data: Any, workdir: Path) -> None:
    """Stores nothing: the configuration says all of a classifier."""

  def load_tokenizer(self, run: RunConfig, workdir: str) -> None:
    """There is none."""

  def card(self, data: ImageData) -> dict[str, Any]:
    """See `Modality.card`."""
    return {"classes": list(data.images.names)}

  def sampling(self, built: Any, data: Any) -> None:
    """There is nothing to sample."""

  def result(self, data: Any, workdir: Path) -> str:
    """See `Modality.result`."""
    lines = []
    if evaluations := read_metrics(workdir, "eval"):
      last = evaluations[-1]
      lines.append(
        f"validation loss {last['loss']:.4f}, accuracy {last['accuracy']:.2%}, of five guesses "
        f"{last['accuracy_5']:.2%}"
      )
      if "ema_accuracy" in last:
        lines.append(f"average of the weights: accuracy {last['ema_accuracy']:.2%}")
    lines.append(f"next: python -m scmoe.evaluate --workdir {workdir}")
    lines.append(f"      python -m scmoe.inspect --workdir {workdir}")
    return "\n".join(lines)
