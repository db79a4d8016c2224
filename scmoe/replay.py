"""python -m scmoe.replay: repeats the step with which a run failed, from the bundle that it left.

  python -m scmoe.replay runs/a/replay

The bundle holds the step's state, batch and numbers. On the same hardware and versions the numbers
come out bitwise the same, so the failure can be debugged here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.base.arrays import read_npz
from scmoe.base.errors import CheckpointError, ConfigError, run_main
from scmoe.base.stored import Maybe, StoredError, read_json
from scmoe.parallel.mesh import batch_sharding
from scmoe.run import placement
from scmoe.run.adapters import build_training
from scmoe.run.base import arrays_given
from scmoe.run.command_line import ALLOW_IMPORT, HELP, SIMULATE, Flag, help_text, parse, simulate
from scmoe.run.config import RunConfig
from scmoe.run.opened import open_run
from scmoe.run.start import set_up_jax
from scmoe.run.teacher import open_teacher
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.decisions import stored_variant
from scmoe.training.fastest import Steps
from scmoe.training.interfaces import Trainable
from scmoe.training.options import CheckpointConfig
from scmoe.training.step import TrainState
from scmoe.training.variants import Variant

FAILURE = "failure.json"
NUMBERS = ("objective", "grad_norm", "loss_scale")  # are compared as texts with all their digits
_SHAPE = {"step": int, "variant": dict, "looped": Maybe(bool)} | dict.fromkeys(NUMBERS, Maybe(str))
FLAGS = (
  Flag("bundle", str, "", "folder that the failed run left: WORKDIR/replay", required=True),
  SIMULATE,
  ALLOW_IMPORT,
  HELP,
)


def main(argv: list[str]) -> None:
  """Repeats the step and prints its numbers then and now."""
  if argv and not argv[0].startswith("--"):
    argv = ["--bundle", *argv]
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  simulate(values["simulate"])
  bundle = Path(values["bundle"])
  _failure(bundle)  # before anything else, so that another folder is named as what it is
  stored = open_run(str(bundle), None, values["allow_import"])
  set_up_jax(stored.run)
  run: RunConfig = placement.on_mesh(stored.run)
  workdir = bundle.absolute().parent
  teacher = open_teacher(run, workdir, values["allow_import"])
  built = build_training(run, teacher=teacher and teacher.run)
  load = functools.partial(teacher.load, built.teacher) if teacher and built.teacher else None
  given = arrays_given(built, workdir, load)
  found, same = replay(built, bundle, given and given())
  print(found)
  print("bitwise the same" if same else "not the same: do hardware, versions and mesh agree?")


def replay(built: Trainable, bundle: Path, teacher: Any = None) -> tuple[str, bool]:
  """Repeats the step of a bundle.

  Args:
    built: the run.
    bundle: the folder.
    teacher: `TrainState.teacher`, for a run that has one.

  Returns:
    A table of the numbers then and now, and whether all are equal, bit by bit.

  Raises:
    CheckpointError: the bundle is damaged or incomplete.
    ConfigError: a different number of processes wrote it.
  """
  failure, variant = _failure(bundle)
  if len(list(bundle.glob("batch_*.npz"))) != jax.process_count():
    raise ConfigError(
      f"{bundle} was written by {len(list(bundle.glob('batch_*.npz')))} processes, but this is one "
      f"of {jax.process_count()}; start as many"
    )
  abstract = built.abstract_state()
  restored = Checkpointer(bundle, CheckpointConfig()).restore_latest_valid(
    abstract.for_checkpoint()
  )
  if restored is None:
    raise CheckpointError(f"{bundle} holds no state")
  batch = _stored_batch(built, bundle / f"batch_{jax.process_index()}.npz")
  sharding = batch_sharding(built.mesh, leading=1)
  put = lambda x: jax.make_array_from_process_local_data(sharding, x)
  step = Steps(built, abstract, bundle)(variant)
  step.go_on({"pace": {"looped": failure.get("looped", False)}})
  state = before(restored.state, failure).like(abstract).placed(abstract)
  state = dataclasses.replace(state, teacher=teacher)
  _, scalars, _ = step(state, jax.tree.map(put, batch))
  now = {name: str(np.asarray(x).item()) for name, x in scalars.items()}
  names = [name for name in NUMBERS if name in failure and name in now]
  lines = [f"{'step ' + str(failure['step']):12}{'then':>24}{'now':>24}"]
  lines += [f"{name:12}{failure[name][:80]:>24}{now[name]:>24}" for name in names]
  return "\n".join(lines), all(failure[name] == now[name] for name in names)


def _failure(bundle: Path) -> tuple[dict[str, Any], Variant]:
  """The step and its numbers, and the variant of the step that ran.

  Raises:
    CheckpointError: the file is missing, or not one that a run wrote.
  """
  path = bundle / FAILURE
  try:
    failure = read_json(path, _SHAPE)
    if not 0 < failure["step"] < 2**31:
      raise StoredError(f"{path} cannot be used: 'step' is {failure['step']}, not 1 to {2**31 - 1}")
    if "loss_scale" in failure:
      float(failure["loss_scale"])
    return failure, stored_variant(failure["variant"], str(path))
  except (FileNotFoundError, StoredError, ValueError) as error:
    raise CheckpointError(
      f"{bundle} is not a run's replay bundle: {error}; give the folder WORKDIR/replay of a "
      "run that ended with exit code 4"
    ) from None


def _stored_batch(built: Trainable, path: Path) -> Any:
  """The batch of the step.

  Raises:
    CheckpointError: the file is damaged, or its shapes are not those of the run's batches.
  """
  own = lambda x: x.update(shape=(x.shape[0], x.shape[1] // jax.process_count(), *x.shape[2:]))
  like = jax.tree.map(own, built.batch_shapes)
  fields = dataclasses.fields(like)
  largest = max(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(like))
  try:
    # The headers of a .npz are small.
    batch = type(like)(**read_npz(path, len(fields) * (largest + 4096)))
  except (ValueError, TypeError) as error:
    raise CheckpointError(str(error)) from None
  for field in fields:
    stored, wanted = getattr(batch, field.name), getattr(like, field.name)
    have, want = (None if x is None else (x.shape, x.dtype.name) for x in (stored, wanted))
    if have != want:
      raise CheckpointError(
        f"{path} has {field.name} {have}, a step of this run {want}; it belongs to another run"
      )
  return batch


def before(state: TrainState, failure: dict[str, Any]) -> TrainState:
  """The state before the failed step, from the bundle's state, which was stored after it.

  The optimizer skipped the failed step, so only step counter and loss scale have changed; `failure`
  has their values from before.
  """
  place = lambda value, like: jax.device_put(jnp.asarray(value, like.dtype), like.sharding)
  state = dataclasses.replace(state, step=place(failure["step"] - 1, state.step))
  if state.scale is None:
    return state
  factor = place(float(failure["loss_scale"]), state.scale["factor"])
  return dataclasses.replace(state, scale={**state.scale, "factor": factor})


if __name__ == "__main__":
  run_main(main)
