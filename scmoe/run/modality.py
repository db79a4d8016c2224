"""The differences between models of text, of images and of several tasks: chosen here, once.

`modality_of(run)` gives `TEXT`, `IMAGES` or `TASKS`. Everything else of a run (mesh, step,
optimizer, checkpoints, loop) knows none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from flax import nnx
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.models.config import ModelConfig
from scmoe.models.objective import RoutedObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig
from scmoe.run.images import Images
from scmoe.run.multitask import Tasks
from scmoe.run.text import Text


class Modality(Protocol):
  """The part of a run that depends on what its model reads.

  Attributes:
    path_source: `data.source` that evaluation gives another `data.path`.
    noun: what a row of a batch is.
  """

  path_source: str
  noun: str

  # -- the model, before anything is allocated ----------------------------------------------------

  def make_model(
    self,
    config: ModelConfig,
    key: Array,
    *,
    router: RouterConfig,
    dispatch: DispatchConfig,
    overlap: OverlapConfig,
    partitioned: bool,
  ) -> nnx.Module:
    """A model with fresh parameters.

    Args:
      config: architecture, resolved.
      key: typed random key of the parameters.
      router, dispatch, overlap: options of routing, transport and schedule.
      partitioned: whether data ranks partition the embedding and the head of a language model.
    """
    ...

  def make_objective(self, run: RunConfig, graph: nnx.GraphDef) -> RoutedObjective:
    """The objective of a resolved run without a teacher."""
    ...

  def batch_shapes(self, run: RunConfig, rows: tuple[int, ...]) -> Any:
    """A training batch with leaves [*rows, ...], as `jax.ShapeDtypeStruct`s."""
    ...

  def random_batch(self, run: RunConfig, rows: tuple[int, ...], seed: int) -> Any:
    """A training batch of these shapes with random values, as numpy arrays."""
    ...

  # -- data and figures ---------------------------------------------------------------------------

  def open_data(self, run: RunConfig, **options: Any) -> Any:
    """The data of a resolved run, which fit its model.

    Args:
      run: resolved.
      **options: `process_index`, `process_count`, `evaluated`, `trained` of
        `scmoe.data.open_data`.

    Raises:
      DataError: they are missing, too few, or do not fit the model.
    """
    ...

  def evaluate(self, model: Any, data: Any, **options: Any) -> dict[str, Any] | None:
    """Figures on the validation data; options as of `scmoe.inference.evaluation.evaluate`."""
    ...

  def add_baseline(self, data: Any, figures: dict[str, Any]) -> None:
    """Adds what a model without learning would reach to the figures of an evaluation."""
    ...

  def flat(self, figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation for a line of metrics.jsonl."""
    ...

  # -- a run's files and words --------------------------------------------------------------------

  def keep(self, data: Any, workdir: Path) -> None:
    """Stores with the run what its model needs of the data later."""
    ...

  def load_tokenizer(self, run: RunConfig, workdir: str) -> Any:
    """The tokenizer that a run was trained with; None if there is none."""
    ...

  def card(self, data: Any) -> dict[str, Any]:
    """Lines of the run's card about the data."""
    ...

  def sampling(self, built: Any, data: Any) -> Callable[[Any], str] | None:
    """A function from a training state to a sample of the model, or None."""
    ...

  def result(self, data: Any, workdir: Path) -> str:
    """A run's last evaluation in words, and what to do next."""
    ...


TEXT: Modality = Text()
IMAGES: Modality = Images()
TASKS: Modality = Tasks()


def modality_of(run: RunConfig) -> Modality:
  """The kind of data that the run's model reads: `TEXT`, `IMAGES`, or text of several `TASKS`."""
  if run.multitask.names:
    return TASKS
  return IMAGES if run.model.reads_images else TEXT


def with_other_data(run: RunConfig, path: str = "") -> RunConfig:
  """A stored run that reads other data than those it was trained on, all of them for validation.

  `data.validation_fraction` is 0, since the stored one splits the training data.

  Args:
    run: of text or images.
    path: the new `data.path`; its kind is found as `Modality.path_source` says.
  """
  fresh = {"source": modality_of(run).path_source, "path": path, "mixture": ""}
  data = dataclasses.replace(run.data, **fresh, validation_fraction=0)
  return dataclasses.replace(run, data=data)


def needs_text(run: RunConfig, command: str) -> None:
  """Refuses a model of images, or of several tasks, where a command reads or writes text.

  Raises:
    ConfigError: names the command and those that do.
  """
  if run.multitask.names:
    raise ConfigError(
      f"{command} reads a model with one gate a layer, got one of the tasks {run.multitask.names}; "
      "scmoe.generate, scmoe.evaluate and scmoe.convert take --task NAME"
    )
  if run.model.reads_images:
    raise ConfigError(
      f"{command} needs a language model, got model.architecture={run.model.architecture!r}, which "
      "classifies images; use scmoe.evaluate or scmoe.inspect"
    )
