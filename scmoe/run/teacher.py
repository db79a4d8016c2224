"""Opens and checks the teacher of a distillation, and holds a run to the teacher it began with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, DataError, StorageError
from scmoe.base.paths import at_home
from scmoe.base.sizes import number
from scmoe.base.stored import read_json, write_json
from scmoe.data import Tokenizer
from scmoe.models.flops import count_parameters
from scmoe.pretrained.inference import InferenceFolder
from scmoe.pretrained.inference_files import MANIFEST
from scmoe.run import build
from scmoe.run.adapters import restore_weights
from scmoe.run.config import RunConfig
from scmoe.run.modality import needs_text
from scmoe.run.model import build_model
from scmoe.run.opened import open_named
from scmoe.run.text import load_tokenizer
from scmoe.training.distributed import is_first
from scmoe.training.restore import FOLDER, list_steps, read_meta, with_newest
from scmoe.training.workdir import prepare_workdir

PINNED = "teacher.json"  # file in the run's folder that identifies the teacher


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A stored model from whose scores a run learns.

  Attributes:
    path: `train.teacher`.
    run: its resolved configuration.
    step: step of its checkpoint.
    identity: digest of the checksums of all its weights, those of an adapted base included.
    tokenizer: the tokenizer of its training.
    folder: its inference checkpoint; None if `path` is a run's folder.
  """

  path: str
  run: RunConfig
  step: int
  identity: str
  tokenizer: Tokenizer
  folder: InferenceFolder | None = None

  def load(self, built: build.Built) -> dict[str, Any]:
    """Loads parameters, in the compute type, and router state onto the student's mesh.

    Args:
      built: the teacher's objects: `build.Built.teacher` of its student.

    Raises:
      CheckpointError, DataError: its files are damaged.
    """
    if self.folder is None:
      wanted = {"params": built.shapes, "router": built.router_shapes}
      state = restore_weights(self.path, self.run, wanted, self.step)
      params, router = state["params"], state["router"]
    else:
      self.folder.verify()
      params, router = self.folder.load(built)
    places = jax.tree.map(lambda s: s.sharding, built.shapes)
    cast = jax.jit(built.objective.cast, out_shardings=places, donate_argnums=0)
    return {"params": cast(params), "router": router}

  def header_line(self, run: RunConfig) -> str:
    """The teacher's line in the header of the run that learns from it."""
    model, train = self.run.model, run.train
    total = number(count_parameters(model, build_model(self.run, None)[1]).total)
    if run.data.reads_preferences:
      name, use = "reference", f"rewards with beta {train.preference_beta:g}"
    else:
      heat = train.teacher_temperature
      name, use = "teacher", f"{train.teacher_share:g} of the loss, at temperature {heat:g}"
      if train.teacher_hidden:
        use += f"; hidden states weigh {train.teacher_hidden:g}"
    return (
      f"{name:12} {self.path} at step {self.step}: {total} parameters, {model.num_experts} "
      f"experts; {use}"
    )


def open_teacher(run: RunConfig, workdir: Path, allow_import: Sequence[str] = ()) -> Teacher | None:
  """Opens the teacher that `run.train.teacher` names; None without one.

  A resumed run gets the teacher's step with which it began, even if there is a newer one.

  Args:
    run: resolved configuration of the run that learns.
    workdir: its folder.
    allow_import: see `scmoe.base.extensions.check_allowed`.

  Raises:
    ConfigError: the teacher is the run itself, or has changed since the run began.
    CheckpointError: the teacher's checkpoint does not exist, or no longer.
    DataError: the teacher is an inference checkpoint whose description is damaged.
  """
  path = run.train.teacher
  if not path:
    return None
  if at_home(path).resolve() == workdir.resolve():
    raise ConfigError(f"train.teacher={path!r} is the run itself; give another run's folder")
  pinned = _pinned(workdir)
  if (at_home(path) / MANIFEST).is_file():
    folder = InferenceFolder(path, allow_import)
    found = Teacher(
      path, folder.run, folder.step, _digest(folder.checksums), folder.tokenizer, folder
    )
  else:
    step = pinned.get("step")
    found = with_newest(lambda: _of_run(path, step, allow_import), step)
  if pinned and pinned["identity"] != found.identity:
    raise ConfigError(
      f"train.teacher={path!r} is no longer the model of step {pinned['step']} with which this run "
      "began; restore it, or use another workdir"
    )
  return found


def load_teacher(
  teacher: Teacher, built: build.Built, workdir: Path, allow_import: Sequence[str] = ()
) -> dict[str, Any]:
  """`Teacher.load`, of the newest step if the teacher's run has removed the chosen one meanwhile.

  A new run then remembers that step. A run that goes on needs the step that it began with.

  Args:
    teacher, workdir, allow_import: of `open_teacher`.
    built: see `Teacher.load`.

  Raises:
    CheckpointError, DataError: its files are damaged, or the step that the run began with is gone.
  """
  tried: list[Teacher] = []

  def attempt() -> dict[str, Any]:
    tried.append(_of_run(teacher.path, None, allow_import) if tried else teacher)
    return tried[-1].load(built)

  values = with_newest(attempt, _pinned(workdir).get("step"))
  if tried[-1] is not teacher and is_first():
    remember_teacher(tried[-1], workdir)
  return values


def _of_run(path: str, step: int | None, allow_import: Sequence[str]) -> Teacher:
  """A run as a teacher, at one of its steps; None: the newest."""
  stored = open_named("train.teacher", path, step, allow_import)
  needs_text(stored.run, "train.teacher")
  step = stored.step if step is None else step
  leaves = read_meta(path, step)["leaves"]
  prints = {name: leaf["fingerprint"] for name, leaf in leaves.items() if _is_model(name)}
  if stored.run.lora.rank:
    prints["base"] = stored.run.lora.base
  tokenizer = load_tokenizer(stored.run, path)
  return Teacher(path, stored.run, step, _digest(prints), tokenizer)


def check_tokenizer(teacher: Teacher, tokenizer: Tokenizer) -> None:
  """Checks that teacher and student have the same tokenizer.

  Raises:
    ConfigError: their tokenizers differ.
  """
  if teacher.tokenizer.digest != tokenizer.digest:
    raise ConfigError(
      f"train.teacher={teacher.path!r} was trained with another tokenizer (fingerprint "
      f"{teacher.tokenizer.digest}, data.tokenizer has {tokenizer.digest}); their scores cannot be "
      "compared"
    )


def remember_teacher(teacher: Teacher, workdir: Path) -> None:
  """Records in a new run's folder which teacher it begins with; a resumed run must have the same.

  Raises:
    StorageError: the file cannot be written.
  """
  workdir = prepare_workdir(workdir)
  if _pinned(workdir):
    return
  values = {"teacher": teacher.path, "step": teacher.step, "identity": teacher.identity}
  try:
    write_json(workdir / PINNED, values)
  except OSError as error:
    raise StorageError(f"{workdir / PINNED} cannot be written: {error.strerror or error}") from None


def _pinned(workdir: Path) -> dict[str, Any]:
  """`step` and `identity` of the teacher with which a run began; {} for a new run."""
  path = workdir / PINNED
  if not path.is_file() or not list_steps(workdir / FOLDER):
    return {}
  try:
    values = read_json(path, {"step": int, "identity": str})
  except FileNotFoundError as error:  # deleted since `is_file`
    raise DataError(f"{path} cannot be read: {error}") from None
  return {"step": values["step"], "identity": values["identity"]}


def _is_model(name: str) -> bool:
  return name.partition(".")[0] in ("params", "router")


def _digest(prints: dict[str, Any]) -> str:
  text = json.dumps(prints, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
