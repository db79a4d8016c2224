"""A run that begins with the model of another run: checks of the source, configuration and files.

`scmoe.convert --upcycle`, `--place` and `--prune` make such runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.stored import write_json
from scmoe.data import Tokenizer
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.pretrained.imported import save_start
from scmoe.run import build
from scmoe.run.config import RunConfig, to_dict
from scmoe.run.modality import needs_text
from scmoe.run.text import store_tokenizer
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import TrainConfig

# Files in a run's folder that say how its experts stand to those of the run before it.
PLACED, PRUNED = "placement.json", "pruning.json"
_RESET = ("init_from", "stop_after")
_TEACHER = ("teacher", "teacher_share", "teacher_temperature", "teacher_hidden")


def check_source(run: RunConfig, flag: str) -> None:
  """Checks that a stored run can be the source of another one.

  Raises:
    ConfigError: its model reads images or has gates for several tasks, or the reference of its
      preferences is the base of its adapters, which are merged.
  """
  if run.multitask.names:
    raise ConfigError(
      f"--{flag}: a run of tasks ({run.multitask.names}) has gates of its own for each task and "
      "cannot be a source; give a run without multitask.names"
    )
  needs_text(run, f"scmoe.convert --{flag}")
  train, preferences = run.train, run.data.reads_preferences
  if preferences and run.lora.rank and not train.teacher and not train.reference_free:
    raise ConfigError(
      f"--{flag} merges the adapters into their base, which is the reference of this run's "
      "preferences; give a run with train.teacher or train.reference_free=True"
    )


def successor(
  run: RunConfig, tokenizer: Tokenizer, workdir: Path, *, keep_teacher: bool
) -> RunConfig:
  """The resolved configuration of a run that begins at step 0 with a run's merged weights.

  Args:
    run: the source's configuration with the new model, on the mesh of the conversion.
    tokenizer: of the source.
    workdir: folder of the new run, which will hold the tokenizer.
    keep_teacher: whether `train.teacher` stays. It stays for preferences in any case, whose
      reference it is.

  Raises:
    ConfigError: the fields do not fit each other.
  """
  data, usual = run.data, TrainConfig()
  if isinstance(tokenizer, JsonTokenizer):
    eos = tokenizer.token(tokenizer.eos_id)
    data = dataclasses.replace(data, tokenizer=str(workdir / TOKENIZER), eos_token=eos)
  names = _RESET if keep_teacher or data.reads_preferences else _RESET + _TEACHER
  train = dataclasses.replace(run.train, **{name: getattr(usual, name) for name in names})
  run = dataclasses.replace(run, data=data, train=train, lora=type(run.lora)())
  return run.resolve(num_devices=max(run.mesh.size, 1), vocab_size=0)


def write_successor(
  keeper: Checkpointer,
  workdir: Path,
  built: build.Built,
  leaves: dict[str, Any],
  *,
  source: RunConfig,
  tokenizer: Tokenizer,
) -> None:
  """Writes the new run's tokenizer, its config.json and its step 0.

  The stored configuration has the source's mesh and dispatch: the conversion may run on one device
  and the training on many. If the new model does not fit the source's mesh, the configuration has
  the conversion's mesh.

  Args:
    keeper: of the new run, see `new_run`.
    workdir: its folder.
    built: its model on the mesh of the conversion.
    leaves: its parameters and router state by dotted name.
    source: the source's configuration as its checkpoint stores it.
    tokenizer: of the source.
  """
  run = _as_trained(built.run, source)
  store_tokenizer(tokenizer, workdir)
  write_json(workdir / "config.json", to_dict(run))
  save_start(keeper, built, leaves, run)


def _as_trained(run: RunConfig, source: RunConfig) -> RunConfig:
  wanted = dataclasses.replace(run, mesh=source.mesh, dispatch=source.dispatch)
  try:
    return wanted.resolve(num_devices=max(source.mesh.size, 1), vocab_size=0)
  except ConfigError:
    return run
