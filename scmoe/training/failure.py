"""A run that non-finite steps or spikes end: its error, and the files to repeat the last step.

`python -m scmoe.replay WORKDIR/replay` runs the step again from these files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scmoe.base.batch import Batch
from scmoe.base.errors import NonFiniteError, StorageError
from scmoe.base.stored import write_json
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.distributed import is_first
from scmoe.training.interfaces import Trainable
from scmoe.training.options import CheckpointConfig

REPLAY = "replay"  # the folder, within the run's folder, into which `write_replay` writes
_NUMBERS = ("objective", "loss", "grad_norm", "skipped", "skipped_in_row", "loss_scale", "spike")


def write_replay(
  folder: Path,
  save: Callable[[Checkpointer], None],
  batch: Batch | None,
  how: Mapping[str, Any],
  values: Mapping[str, Any],
) -> str:
  """Writes state, batch and numbers of the step that ended the run; all processes call it.

  Args:
    folder: emptied first.
    save: writes the state after the step. The step was skipped, so its parameters are those that
      the step read.
    batch: this process's part of the step's batch.
    how: JSON-able: the step's number, the seed, and how the step was run.
    values: figures of the step; those of `_NUMBERS` are written.

  Returns:
    words for the error's message: the command that repeats the step, or why the files could not be
    written.

  Raises:
    Exception: those of `save` that are neither a StorageError nor an OSError.
  """
  try:
    if is_first():
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
    keeper = Checkpointer(folder, CheckpointConfig(async_save=False))
    save(keeper)
    keeper.close()
    stored = {name: x for name, x in vars(batch).items() if x is not None}
    np.savez(folder / f"batch_{jax.process_index()}.npz", **stored)  # pyright: ignore
    if is_first():
      numbers = {name: str(values[name]) for name in _NUMBERS if name in values}
      write_json(folder / "failure.json", dict(how) | numbers)
  except (OSError, StorageError) as error:
    return f"{folder} could not be written ({error})"
  return f"python -m scmoe.replay {folder} repeats the step"


def not_finite(step: int, values: Mapping[str, Any], built: Trainable, left: str) -> NonFiniteError:
  """The error of a run that a spike (`train.spike_action=stop`) or skipped steps in a row end.

  Args:
    step: number of the last step.
    values: its figures.
    built: the run's options.
    left: the words that `write_replay` returned.
  """
  train = built.train
  if values.get("spike") and train.spike_action == "stop":
    return NonFiniteError(
      f"step {step}: loss {values['objective']:.4f} and gradient norm {values['grad_norm']:.3g} "
      f"are a spike (train.spike_sigma={train.spike_sigma:g}); {left}. Look at its batch, "
      "or set train.spike_action=skip"
    )
  clip = built.config.get("optimizer", {}).get("clip_norm", 0)
  limit = f"lower optimizer.clip_norm={clip:g}" if clip else "set optimizer.clip_norm=1"
  spikes = f", or a spike (train.spike_sigma={train.spike_sigma:g})" if train.spike_sigma else ""
  return NonFiniteError(
    f"{values['skipped_in_row']} steps in a row up to step {step} had a non-finite loss or "
    f"gradient{spikes} (train.max_skipped_in_row={train.max_skipped_in_row}); {left}. "
    f"Lower optimizer.learning_rate, {limit}, or look at the data"
  )
