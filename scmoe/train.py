"""python -m scmoe.train: trains a model, or resumes a run.

  python -m scmoe.train
  python -m scmoe.train --config quickstart --config.model.wiring=top2 --workdir runs/top2
  python -m scmoe.train --config configs/gpt2_moe_medium.py --config.mesh.expert=8 --dry_run
  python -m scmoe.train --config shapes_vit --workdir runs/seed-0 --beside 1=runs/seed-1

Without arguments it trains configs/quickstart.py into runs/quickstart. The same command again
resumes the run where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.extensions import remember
from scmoe.base.output import optional, say, warn
from scmoe.models.flops import count_parameters
from scmoe.run import build
from scmoe.run.adapters import BuiltAdapters, build_training, restore_weights
from scmoe.run.base import arrays_given, header_line, router_of_base, with_base
from scmoe.run.cluster import CLUSTER_FLAGS, Cluster
from scmoe.run.command_line import (
  HELP,
  TRAIN_FLAGS,
  VERSION,
  at_least,
  default_workdir,
  help_text,
  list_configs,
  parse,
  run_config,
  simulate,
)
from scmoe.run.config import RunConfig, imports_of, to_dict, to_json
from scmoe.run.dry_run import dry_run
from scmoe.run.dry_run_text import report
from scmoe.run.elastic import member_of
from scmoe.run.modality import modality_of
from scmoe.run.model import build_model
from scmoe.run.names import check_run_name, check_workdir
from scmoe.run.opened import open_named
from scmoe.run.programs import Programs
from scmoe.run.start import set_up_jax
from scmoe.run.summary import check_memory, header, out_of_memory
from scmoe.run.teacher import Teacher, check_tokenizer, load_teacher, open_teacher, remember_teacher
from scmoe.training import distributed, elastic
from scmoe.training.compile_only import compile_only
from scmoe.training.loop import Poll, Trainer
from scmoe.training.restarts import supervise
from scmoe.training.restore import FOLDER, list_steps, with_newest
from scmoe.training.side_by_side import train_side_by_side
from scmoe.training.step import TrainState

_LAST = (VERSION, HELP)
FLAGS = (*(flag for flag in TRAIN_FLAGS if flag not in _LAST), *CLUSTER_FLAGS, *_LAST)


def main(argv: list[str]) -> None:
  """Runs the command line: trains, or prints a configuration, a dry run or a list."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  if values["list_configs"]:
    return print(list_configs())
  at_least(values, 0, "restarts")
  cluster = Cluster.of_flags(values["host_devices"], values["network"])
  changed = [flag.name for flag in CLUSTER_FLAGS if values[flag.name] != flag.default]
  if changed and not values["dry_run"]:
    raise ConfigError(f"--{changed[0]} has no effect without --dry_run; add it, or leave this out")
  if values["elastic"] and not values["restarts"]:
    raise ConfigError("--elastic restarts a run that lost a process; add --restarts=5, or so")
  only_shown = values["print_config"] or values["dry_run"]
  if values["restarts"] > 0 and not only_shown:
    raise SystemExit(supervised(argv, values, run_config(values, given)))
  simulate(values["simulate"])
  run = run_config(values, given)
  check_run_name(run.name, "name")
  workdir = check_workdir(default_workdir(values, run))
  if only_shown:
    vocabulary = build.vocab_size(run.data)
    planned = run.resolve(num_devices=run.mesh.planned_size, vocab_size=vocabulary)
    if values["print_config"]:
      return print(to_json(dataclasses.replace(planned, mesh=run.mesh)), end="")
    return print(report(dry_run(planned), cluster))
  others = beside(run, values["beside"])
  if values["compile_only"] and others:
    raise ConfigError("--compile_only compiles one run's step; leave --beside out")
  with optional():
    if values["compile_only"]:
      compile_step(run, workdir)
    elif others:
      train_seeds([(run, workdir), *others])
    else:
      train(run, workdir)


def supervised(argv: Sequence[str], values: dict[str, Any], run: RunConfig) -> int:
  """Runs this command as a child, again when it dies; returns its last exit code.

  Args:
    argv: of this command.
    values: its flags; `elastic` chooses between `restarts.supervise` and `elastic.supervise`.
    run: not resolved.

  Raises:
    ConfigError, StorageError, Unavailable: as `scmoe.run.elastic.member_of`.
  """
  folder = check_workdir(default_workdir(values, run))
  command = [sys.executable, "-m", "scmoe.train", *argv, "--restarts=0"]
  limit = values["restarts"]
  if values["elastic"]:
    command += ["--elastic=false"]
    how = {"restarts": limit, "simulated": values["simulate"], "ahead": values["compile_ahead"]}
    return elastic.supervise(member_of(run, folder, command, **how))
  return supervise(command, limit, lambda: max(list_steps(folder / FOLDER), default=0))


def beside(run: RunConfig, words: Sequence[str]) -> list[tuple[RunConfig, Path]]:
  """The runs of `--beside`, which differ from `run` in name and seed, with their folders.

  Raises:
    ConfigError: a word is not SEED=FOLDER.
  """
  found = []
  for word in words:
    seed, _, folder = word.partition("=")
    if not seed.isdecimal() or not folder:
      raise ConfigError(f"--beside={word!r} is not SEED=FOLDER; e.g. --beside 1=runs/seed-1")
    workdir = check_workdir(folder)
    check_run_name(workdir.name, "the folder's name in --beside")
    train_options = dataclasses.replace(run.train, seed=int(seed))
    found.append((dataclasses.replace(run, name=workdir.name, train=train_options), workdir))
  return found


def train(run: RunConfig, workdir: Path) -> TrainState:
  """Trains `run` in `workdir`, or resumes the run that is there.

  Raises:
    ScmoeError: see `scmoe.base.errors` and `Trainer.run`.
  """
  start_jax(run)
  prepared = prepare(run, workdir)
  try:
    state = prepared.trainer.run()
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(prepared.built, error) or error from None
  prepared.say_result()
  return state


def train_seeds(runs: Sequence[tuple[RunConfig, Path]]) -> list[TrainState]:
  """Trains runs that differ in name and seed only, each in its folder, in one compiled program.

  Raises:
    ScmoeError: see `scmoe.training.side_by_side.train_side_by_side`.
  """
  start_jax(runs[0][0])
  prepared = [prepare(*one, shown=i == 0) for i, one in enumerate(runs)]
  try:
    states = train_side_by_side([one.trainer for one in prepared])
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(prepared[0].built, error) or error from None
  for one in prepared:
    one.say_result()
  return states


def compile_step(run: RunConfig, workdir: Path) -> None:
  """Compiles the training step of a run for the devices that are here, and trains nothing.

  Raises:
    ConfigError: the sizes do not fit, or the devices cannot hold the training state or a step.
    ScmoeError: see `scmoe.training.compile_only.compile_only`.
  """
  start_jax(run)
  begun = time.monotonic()
  built, _ = build_here(run, workdir)
  check_memory(built)
  try:
    compile_only(built, workdir)
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(built, error) or error from None
  if distributed.is_first():
    say(f"compiled in {time.monotonic() - begun:.0f} s, for a start on {built.run.mesh.words}")


def start_jax(run: RunConfig) -> None:
  """Sets what jax has to know before it finds its devices, and joins the run's other processes."""
  set_up_jax(run)
  distributed.initialize(run.distributed)


class Prepared(NamedTuple):
  """A run whose data are open and whose sizes are checked."""

  built: build.Built
  data: Any
  workdir: Path
  trainer: Trainer

  def say_result(self) -> None:
    """Prints the last evaluation of the run, which is done, on process 0."""
    if distributed.is_first():
      say(modality_of(self.built.run).result(self.data, self.workdir))


def build_here(run: RunConfig, workdir: Path) -> tuple[build.Built, Teacher | None]:
  """Builds a run, which is not resolved, for all processes and devices; opens its teacher."""
  run = run.resolve(
    num_devices=jax.device_count(),
    vocab_size=build.vocab_size(run.data),
    num_processes=jax.process_count(),
  )
  teacher = open_teacher(run, workdir, [*imports_of(run).values()])
  run = with_base(run, workdir)
  return build_training(run, teacher=teacher and teacher.run), teacher


def prepare(run: RunConfig, workdir: Path, *, shown: bool = True) -> Prepared:
  """Opens a run's data, checks its sizes, and makes its `Trainer`.

  Args:
    run: not resolved.
    workdir: of the run.
    shown: whether the run prints its header.
  """
  unresolved = run
  built, teacher = build_here(run, workdir)
  run, allowed = built.run, [*imports_of(built.run).values()]
  taught = (teacher, built.teacher) if teacher and built.teacher else None
  modality = modality_of(run)
  places = {"process_index": jax.process_index(), "process_count": jax.process_count()}
  data = modality.open_data(run, **places)
  if teacher is not None:
    check_tokenizer(teacher, data.tokenizer)
  if distributed.is_first():
    modality.keep(data, workdir)
    if teacher is not None:
      remember_teacher(teacher, workdir)
    if problem := remember(imports_of(run), workdir):
      warn(problem)
  check_memory(built)
  extra = [teacher.header_line(run)] if teacher else []
  extra += [header_line(built)] if isinstance(built, BuiltAdapters) else []
  load = taught and functools.partial(load_teacher, *taught, workdir, allowed)
  trainer = Trainer(
    built,
    data,
    workdir,
    evaluate=evaluation(built, data, workdir),
    sample=modality.sampling(built, data),
    header="\n".join([header(built, data, workdir), *extra] * shown),
    card=card(unresolved, built, data),
    warm_start=beginning(built, workdir),
    teacher=arrays_given(built, workdir, load),
  )
  return Prepared(built, data, workdir, trainer)


def beginning(built: build.Built, workdir: Path) -> Callable[[TrainState], TrainState] | None:
  """A function that gives a new run the parameters of `train.init_from`; None if that is empty.

  A run that trains adapters gets the router state of its base instead.

  Raises:
    CheckpointError: that folder has no checkpoint.
    ConfigError: its model has other shapes, or its tasks other names or another order.
  """
  if isinstance(built, BuiltAdapters):
    return router_of_base(built, workdir)
  folder = built.run.train.init_from
  if not folder:
    return None
  stored = open_named("train.init_from", folder)
  names = built.run.multitask.task_names
  if (other := stored.run.multitask.task_names) != names:
    raise ConfigError(
      f"train.init_from={folder!r} has gates for {_tasks(other)}, this run for {_tasks(names)}; "
      "begin from a run with the same multitask.names in the same order"
    )
  if build_model(stored.run, None)[1] != build_model(built.run, None)[1]:
    raise ConfigError(
      f"train.init_from={folder!r} has parameters of other shapes; give the model section of "
      f"{folder}/config.json, or leave train.init_from empty"
    )

  def start(state: TrainState) -> TrainState:
    wanted = {"params": built.abstract_state().for_checkpoint().params}

    def newest() -> Any:
      found = open_named("train.init_from", folder)
      return restore_weights(folder, found.run, wanted, found.step)["params"]

    params = with_newest(newest)  # that run may train meanwhile
    return state.begun_from(params, built.optimizer)

  return start


def _tasks(names: Sequence[str]) -> str:
  return f"the tasks {','.join(names)}" if names else "no tasks"


def card(unresolved: RunConfig, built: build.Built, data: Any) -> dict[str, Any]:
  """The entries of the run's card that do not change: command, configuration, data, sizes."""
  parameters = count_parameters(built.run.model, built.shapes)
  return {
    "command": [*_program(), *sys.argv[1:]],
    "config": to_dict(unresolved),
    "data": data.fingerprint(),
    **modality_of(built.run).card(data),
    "parameters": {"total": parameters.total, "active": parameters.active},
    "flops_per_token": built.flops_per_token({}),
  }


def _program() -> list[str]:
  """The command that started this process: `python -m scmoe.train` or the console script."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  return [Path(sys.executable).name, "-m", spec.name] if spec else [Path(sys.argv[0]).name]


def evaluation(
  built: build.Built, data: Any, workdir: Path
) -> Callable[[TrainState, Poll], Any] | None:
  """The function that the trainer calls to evaluate; None without validation data."""
  if not data.validation_domains:
    return None
  programs, modality = Programs(built.overlap, workdir), modality_of(built.run)

  def run(state: TrainState, stopping: Poll) -> dict[str, float] | None:
    limit = built.run.train.eval_batches or None
    # While a program is unsettled, the next batch may profile it or compile it a second time.
    poll = lambda: stopping(compiles=not programs.settled)
    options = {"mesh": built.mesh, "max_batches": limit, "stopping": poll, "prepare": programs}
    found: dict[str, float] = {}
    for prefix, params in weights_of(state).items():
      model = built.training_model(built.whole(params(), state.teacher))
      figures = modality.evaluate(model, data, router=state.router, **options)
      if figures is None:
        return None
      found |= {prefix + name: value for name, value in modality.flat(figures).items()}
    return found

  return run


def weights_of(state: TrainState) -> dict[str, Callable[[], Any]]:
  """The weights to evaluate: prefix of their figures' names -> function that gives them.

  With `optimizer.ema` the average of the weights is evaluated beside them, as `ema_`.
  """
  found: dict[str, Callable[[], Any]] = {"": lambda: state.params}
  if state.average is not None:
    found["ema_"] = state.averaged
  return found


if __name__ == "__main__":
  run_main(main)
