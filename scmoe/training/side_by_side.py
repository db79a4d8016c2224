"""Runs that differ only in name and seed, trained side by side by one compiled program.

One program is compiled and started for all. Its step of S seeds is `jax.vmap` of the step of one,
over state, batch and seed, so each kernel has S times the work, which fills a device that a very
small model leaves idle. It is not always faster (experiments/seeds):

    state [S, ...]  batch [S, A, B, ...]  seed [S]  ->  state [S, ...], scalars [S], arrays [S, ...]

XLA computes what scmoe's own kernels and cuDNN's attention compute in a run alone: under `jax.vmap`
the kernels were not tried on a GPU, and cuDNN's attention fails with a mask (`without_kernels`).
Otherwise each run is like one that `Trainer.run` trains alone: it has its own folder, metrics,
checkpoints, initial weights and order of the data. Such a folder can be resumed alone, and runs
that were begun alone can go on side by side if they have reached the same step.

A run that fails with `NonFiniteError` ends no other. Its steps are still computed, but it is no
longer logged, saved, evaluated or sampled. Any other error ends all runs. Every run's metrics give
the seconds of the program's step, which is a step of all runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from scmoe.base import output
from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, NonFiniteError, Preempted
from scmoe.base.output import warn
from scmoe.kernels.launch import without_kernels
from scmoe.parallel.mesh import manual, replicated, shardings_of
from scmoe.training import masters
from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.distributed import OnFirst
from scmoe.training.fastest import PROFILES
from scmoe.training.guided import GuidedStep
from scmoe.training.loop import Run, Trainer
from scmoe.training.optimizer import Optimizer
from scmoe.training.signals import StopRequest, Watchdog
from scmoe.training.step import Objective, TrainState, make_local_step
from scmoe.training.workdir import RunLock, prepare_workdir

_SEEDS = 2**31  # seeds below it fit into int32, so device and host make the same keys of them


def train_side_by_side(trainers: Sequence[Trainer]) -> list[TrainState]:
  """Trains several runs by one program; each goes on from its newest valid checkpoint, if any.

  Args:
    trainers: of runs that differ in name and seed only, on one device.

  Returns:
    the final state of each run, as a checkpoint holds it.

  Raises:
    ConfigError: the runs cannot share a program, share a folder, or have reached different steps;
      or as `Trainer.run`.
    NonFiniteError: a run failed, and none was stopped; raised when the others are done.
    Preempted: asked to stop; every run that has not failed has saved.
    DataError, CheckpointError, StorageError: as `Trainer.run`.
  """
  check_side_by_side([trainer.built for trainer in trainers])
  workdirs = [prepare_workdir(trainer.workdir) for trainer in trainers]
  if len(set(workdirs)) < len(workdirs):
    raise ConfigError(f"several runs share the folder {workdirs[0]}; give each its own")
  with contextlib.ExitStack() as stack:
    stack.enter_context(output.optional())
    for workdir in workdirs:
      stack.enter_context(OnFirst(RunLock(workdir)))
    stop, watchdog = stack.enter_context(StopRequest()), stack.enter_context(Watchdog())
    stack.enter_context(kept_programs(workdirs[0] / PROGRAMS))
    stack.enter_context(without_kernels())
    lanes = [
      Lane(trainer, workdir, trainer.check(), stop, watchdog, f"seed {trainer.built.train.seed}: ")
      for trainer, workdir in zip(trainers, workdirs)
    ]
    try:
      together = _Together(lanes)
      stack.callback(together.step_fn.give_up_trace)
      return together.run()
    finally:
      for lane in lanes:
        lane.close()


def check_side_by_side(builts: Sequence[Any]) -> None:
  """Checks that one program can train these runs.

  Args:
    builts: the `Trainable` of each.

  Raises:
    ConfigError: they differ in more than name and seed, two have the same seed, a seed is too
      large, they use several devices or processes, or an option (tuner, teacher, adapters, moments
      off the device, backend mosaic_gpu) works for one run at a time only.
  """
  first = builts[0]
  if first.mesh.size > 1 or jax.process_count() > 1:
    raise ConfigError(
      f"seeds side by side run on one device, got a mesh of {first.mesh.size}; set mesh.data=1 and "
      "mesh.expert=1, or train them one by one"
    )
  rank = first.config.get("lora", {}).get("rank", 0)
  alone = {"train.tune": first.train.tune, "train.teacher": first.train.teacher, "lora.rank": rank}
  for name, value in alone.items():
    if value:
      raise ConfigError(
        f"{name}={value!r} needs a program of its own for every seed; leave it out, or train the "
        "seeds one by one"
      )
  if (place := first.config.get("mesh", {}).get("moments_in", "device")) != "device":
    raise ConfigError(
      f"mesh.moments_in={place!r} streams the moments of one run; set mesh.moments_in=device, or "
      "train the seeds one by one"
    )
  backend = first.config.get("model", {}).get("ffn", {}).get("backend", "auto")
  if backend == "mosaic_gpu":
    raise ConfigError(
      "model.ffn.backend='mosaic_gpu' was not tried for several seeds at once; set "
      "model.ffn.backend=auto, or train the seeds one by one"
    )
  seeds = [built.train.seed for built in builts]
  if len(set(seeds)) < len(seeds) or max(seeds) >= _SEEDS:
    raise ConfigError(f"seeds side by side must differ and be below {_SEEDS}, got {seeds}")
  wanted = _without_seed(first.config)
  for built in builts[1:]:
    found = _without_seed(built.config)
    if odd := next((name for name in wanted if found.get(name) != wanted[name]), None):
      raise ConfigError(
        f"runs side by side may differ in train.seed only, but {odd} is {wanted[odd]!r} in one and "
        f"{found.get(odd)!r} in another; train these one by one"
      )


def _without_seed(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Dotted name -> value of a configuration, without the name of the run and its seed."""
  found: dict[str, Any] = {}
  for name, value in config.items():
    path = f"{prefix}{name}"
    if isinstance(value, dict):
      found |= _without_seed(value, f"{path}.")
    elif path not in ("name", "train.seed"):
      found[path] = value
  return found


# -- the program that trains several seeds --------------------------------------------------------


def make_seeds_step(
  objective: Objective,
  optimizer: Optimizer,
  abstract: TrainState,
  *,
  gradient_dtype: str = "float32",
  flight: int = 1,
) -> Any:
  """The jitted step of S seeds: (states, batches, seeds) -> (states, scalars, arrays).

  All leaves have a leading dimension S. The given states are donated.

  Args:
    objective: of any of the runs; its `seeded` makes the one of each run.
    optimizer: of all runs.
    abstract: of one run, on a mesh of one device.
    gradient_dtype, flight: as of `make_train_step`.
  """
  mesh: Any = abstract.step.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
  specs = masters.readable(jax.tree.map(lambda s: s.spec, shardings_of(abstract)).params)
  how = {"gradient_dtype": gradient_dtype, "flight": flight}

  def of_one(state: TrainState, batch: Batch, seed: Array) -> tuple[TrainState, dict, dict]:
    return make_local_step(objective.seeded(seed), optimizer, specs, **how)(state, batch)

  def local_step(states: TrainState, batches: Batch, seeds: Array) -> tuple[TrainState, dict, dict]:
    return jax.vmap(of_one)(states, batches, seeds)

  here = replicated(mesh)
  return jax.jit(
    manual(local_step, mesh, (P(), P(), P()), (P(), P(), P())),
    donate_argnums=0,
    in_shardings=(here, here, here),
    out_shardings=(here, here, here),
  )


# -- the runs, and the loop over their steps ------------------------------------------------------


class Lane(Run):
  """One of the runs: from `join` on, its state is one row of the joined states [S, ...]."""

  # Returns a copy of this run's row of the joined states; None before `join`.
  of_all: Callable[[], TrainState] | None = None
  _own: TrainState | None = None
  failed: NonFiniteError | None = None

  @property
  def state(self) -> TrainState:
    """This run's own state before `join`; then a copy of its row of the joined states."""
    if self.of_all is not None:
      return self.of_all()
    assert self._own is not None, "not started"
    return self._own

  @state.setter
  def state(self, state: TrainState) -> None:
    self._own = state

  def compile_early(self) -> None:
    """Does nothing: the program of all seeds is compiled once every run has started, if at all."""

  def join(self, of_all: Callable[[], TrainState]) -> None:
    """Drops this run's own state; from here on `of_all()` returns its row of the joined states."""
    self.of_all, self._own = of_all, None


class _Row:
  """The `Results` of one run: row `row` of `shared`, the results of a step of all runs."""

  def __init__(self, shared: _Shared, row: int):
    self._shared, self._row = shared, row

  def values(self) -> dict[str, Any]:
    """The run's scalars as numbers; the first run that reads its own waits for the step."""
    return {name: x[self._row].item() for name, x in self._shared.scalars.items()}

  @property
  def arrays(self) -> dict[str, Any]:
    """The run's per-layer arrays by name, on the host; waits for the step."""
    return {name: x[self._row] for name, x in self._shared.arrays.items()}


class _Shared:
  """Results of a step of all runs, read from the device once."""

  def __init__(self, scalars: dict[str, Array], arrays: dict[str, Array]):
    self._scalars, self._arrays = scalars, arrays

  @functools.cached_property
  def scalars(self) -> dict[str, np.ndarray]:
    """Scalars [S] on the host; waits for the step."""
    return jax.device_get(self._scalars)

  @functools.cached_property
  def arrays(self) -> dict[str, np.ndarray]:
    """Per-layer arrays [S, ...] on the host; waits for the step."""
    return jax.device_get(self._arrays)


class _Together:
  """The loop over the steps of all runs.

  Args:
    lanes: the runs, not started.
  """

  def __init__(self, lanes: Sequence[Lane]):
    self.lanes, self.built = lanes, lanes[0].built
    overlap, abstract = self.built.overlap, lanes[0].abstract
    how = {"gradient_dtype": overlap.gradient_dtype, "flight": overlap.flight}
    step = make_seeds_step(self.built.objective, self.built.optimizer, abstract, **how)
    folder: Path = lanes[0].workdir / PROFILES
    self.step_fn = GuidedStep(step, overlap, folder, say=lanes[0].journal.say)
    self.here = replicated(self.built.mesh)
    self.seeds = self._placed(np.array([lane.train.seed for lane in lanes], np.int32))
    row = lambda states, i: jax.tree.map(lambda x: x[i], states)
    self._row = jax.jit(row, out_shardings=shardings_of(abstract))

  def run(self) -> list[TrainState]:
    """Trains all runs to the last step, and returns their states; see `train_side_by_side`."""
    first = self.lanes[0]
    for lane in self.lanes:
      lane.start()
    self._join()
    if first.step < first.train.steps and not first.interrupted():
      first.arm("compilation", allowance=True)
      with first.journal.said(f"compiling the training step of {len(self.lanes)} seeds"):
        self.step_fn.compile(self.states, self._abstract_batches(), self.seeds)
    while first.step < first.train.steps and self._active() and not first.interrupted():
      self.one_step()
      if first.due(first.built.checkpoint.every):
        self._each(Lane.save)
      if first.due(first.train.eval_every):
        self._each(Lane.evaluate)
      if first.due(first.train.sample_every):
        self._each(Lane.sample)
    return self._finish()

  def one_step(self) -> None:
    """Dispatches a step of all runs; then calls `Run.stepped` of each that has not failed."""
    first = self.lanes[0]
    first.profile(self.step_fn)
    first.arm("step", allowance=self.step_fn.compiles_next)
    batches = Batch.stack([lane.next_batch() for lane in self.lanes])
    self.states, scalars, arrays = self.step_fn(self.states, self._placed(batches), self.seeds)
    shared = _Shared(scalars, arrays)
    rows = {id(lane): _Row(shared, i) for i, lane in enumerate(self.lanes)}
    self._each(lambda lane: lane.stepped(rows[id(lane)]))

  def _join(self) -> None:
    """Makes one state [S, ...] of all runs' states.

    Raises:
      ConfigError: they have reached different steps.
    """
    steps = {lane.step: lane for lane in self.lanes}
    if len(steps) > 1:
      (low, behind), (high, _) = min(steps.items()), max(steps.items())
      raise ConfigError(
        f"{behind.workdir} is at step {low} and another run at step {high}; runs side by side go "
        f"step by step: train that one alone until then (--config.train.stop_after={high})"
      )
    stack = jax.jit(
      lambda *own: jax.tree.map(lambda *x: jnp.stack(x), *own), out_shardings=self.here
    )
    self.states: TrainState = stack(*(lane.state for lane in self.lanes))
    for i, lane in enumerate(self.lanes):
      lane.join(lambda i=i: self._row(self.states, i))

  def _active(self) -> list[Lane]:
    return [lane for lane in self.lanes if lane.failed is None]

  def _each(self, act: Callable[[Lane], Any]) -> None:
    """Calls `act` for every run that has not failed.

    A run whose call raises `NonFiniteError` has failed, and is left out from then on. Any other
    error ends all runs.
    """
    for lane in self._active():
      try:
        act(lane)
      except NonFiniteError as error:
        lane.failed = error
        warn(f"{lane.workdir}: {error}; the other seeds go on")
    # A failed run's step number goes on with the others': all rows are at the same step.
    for lane in self.lanes:
      lane.step = max(other.step for other in self.lanes)

  def _finish(self) -> list[TrainState]:
    """Ends the runs that have not failed (`Run.finish`); returns all states, or raises.

    Raises:
      Preempted: the runs were stopped; raised when all that have not failed are saved.
      NonFiniteError: a run failed, and none was stopped; raised when the others are done.
      Exception: any other of `Run.finish`; it ends all runs at once.
    """
    states, stopped = [], None
    for lane in self._active():
      try:
        states.append(lane.finish())
      except Preempted as error:
        stopped = error
      except NonFiniteError as error:
        lane.failed = error
    failed = next((lane.failed for lane in self.lanes if lane.failed is not None), None)
    if stopped or failed:
      raise stopped or failed  # pyright: ignore[reportGeneralTypeIssues]
    return states

  def _placed(self, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, self.here), tree)

  def _abstract_batches(self) -> Any:
    count = len(self.lanes)
    place = lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype, sharding=self.here)
    return jax.tree.map(place, self.built.batch_shapes)
