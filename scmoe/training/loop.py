"""The training loop: restore or initialise, step, log, save, evaluate, stop. Read `Trainer.run`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from scmoe.blocks.schedule import OverlapConfig
from scmoe.errors import (
  ConfigError,
  DataError,
  NonFiniteError,
  Preempted,
  ScmoeError,
  StorageError,
)
from scmoe.options import check_options
from scmoe.parallel.mesh import batch_parts, batch_sharding
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.distributed import all_agree, first_decides, is_first
from scmoe.training.guided import GuidedStep
from scmoe.training.health import CollapseAlarm
from scmoe.training.metrics import Bar, Meter, Metrics, console_line, short_lists
from scmoe.training.optimizer import Optimizer, decay_mask, make_optimizer
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig
from scmoe.training.resume import check_config, check_data
from scmoe.training.signals import StopRequest, Watchdog
from scmoe.training.step import (
  Init,
  Objective,
  TrainState,
  abstract_state,
  init_state,
  make_train_step,
  shardings_of,
)
from scmoe.training.variants import Variant, tuned_step
from scmoe.training.workdir import RunLock, prepare_workdir, warn, write_json

CONFIG = "config.json"
PROFILES = "profile_guided"  # measured latencies of the step; see `GuidedStep`
REPLAY = "replay"
Poll = Callable[[], bool]


class Batches(Protocol):
  """Microbatches of this process: dicts of numpy arrays [B / processes, ...]."""

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...
  def __next__(self) -> dict[str, np.ndarray]: ...
  def state(self) -> dict[str, Any]:
    """JSON-able position: what `__next__` gives next."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a position that `state` gave."""
    ...


class Data(Protocol):
  """The training data, by shape only: this package knows no source of them."""

  def train(self) -> Batches:
    """The microbatches from the beginning."""
    ...

  def fingerprint(self) -> dict[str, Any]:
    """JSON-able identity of the data and their order."""
    ...


def _no_variant(variant: Variant) -> Objective:
  raise ConfigError(f"train.tune: this run has no variant {variant}; leave train.tune empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """One training run. Fill in the fields, call `run`; call it again to resume.

  `evaluate(state, stopping)` returns scalars, or None if `stopping()`, which it asks before every
  batch, became true. `sample(state)` returns text. Both run after the checkpoint of their step, so
  that their failure loses nothing.
  """

  objective: Objective
  init: Init  # key -> (params, router); jittable
  shardings: tuple[Any, Any]  # NamedShardings of params and router
  mesh: Mesh
  data: Data
  sequence_length: int
  train: TrainConfig
  optimizer: OptimizerConfig
  checkpoint: CheckpointConfig
  workdir: str | os.PathLike[str]
  config: dict[str, Any]  # the whole resolved configuration, JSON-able; stored and compared
  header: str = ""
  flops_per_token: float = 0.0  # training FLOPs; 0: no MFU
  peak_flops: float = 0.0  # FLOP/s of one device; 0: no MFU
  evaluate: Callable[[TrainState, Poll], dict[str, float] | None] | None = None
  sample: Callable[[TrainState], str] | None = None
  decay_mask: Any = decay_mask  # see `make_optimizer`
  warm_start: Callable[[TrainState], TrainState] | None = None  # weights from elsewhere, at step 0
  variant: Callable[[Variant], Objective] = _no_variant  # what `train.tune` chooses from
  # Its compiler options, and when gradients travel.
  overlap: OverlapConfig = dataclasses.field(default_factory=OverlapConfig)

  def run(self) -> TrainState:
    """Trains to the last step, resuming from the newest valid checkpoint in the workdir.

    Returns:
      the final state.

    Raises:
      ConfigError: a setting is unusable, the workdir is taken, or differs from the stored one.
      DataError: the data ended, or are not those of the checkpoint.
      CheckpointError: there are checkpoints but none is valid.
      StorageError: nothing can be written.
      NonFiniteError: too many steps in a row were not finite.
      Preempted: asked to stop (signal or train.stop_after), and saved.
    """
    accumulation = self._check()
    workdir = prepare_workdir(self.workdir)
    with _FirstProcess(RunLock(workdir)), StopRequest() as stop, Watchdog() as watchdog:
      run = _Run(self, workdir, accumulation, stop, watchdog)
      try:
        run.start()
        while run.step < self.train.steps and not run.interrupted():
          run.one_step()
          if run.due(self.checkpoint.every):
            run.save()
          if run.due(self.train.eval_every):
            run.evaluate()
          if run.due(self.train.sample_every):
            run.sample()
        return run.finish()
      finally:
        run.close()

  def _check(self) -> int:
    """Checks what depends on several sections; returns the number of microbatches."""
    for part, name in ((self.train, "train"), (self.checkpoint, "checkpoint")):
      check_options(part, name)
    shards = batch_parts(self.mesh)
    self.train.check_mesh(shards, jax.process_count())
    if shards % jax.process_count():
      raise ConfigError(
        f"mesh.data x mesh.expert = {shards} does not give each of {jax.process_count()} processes "
        "its own part of the batch; make mesh.tensor smaller"
      )
    return self.train.microbatches(self.sequence_length)


class _Run:
  """The moving parts of `Trainer.run`."""

  def __init__(
    self, spec: Trainer, workdir: Path, accumulation: int, stop: StopRequest, watchdog: Watchdog
  ):
    self.spec, self.workdir, self.accumulation = spec, workdir, accumulation
    self.stop, self.watchdog = stop, watchdog
    self.first = is_first()
    self.optimizer: Optimizer = make_optimizer(spec.optimizer, spec.train.steps, spec.decay_mask)
    self.abstract = abstract_state(spec.init, self.optimizer, spec.mesh, spec.shardings)
    self.step_fn = tuned_step(
      self._make_step, spec.train.tune, spec.train.tune_rounds, say=self._say
    )
    self.batch_sharding = batch_sharding(spec.mesh, leading=1)
    self.checkpointer = Checkpointer(workdir, spec.checkpoint)
    self.batches = spec.data.train()
    self.meter = Meter()
    self.pending: tuple[int, dict, dict] | None = None  # results of a step not yet looked at
    self.batch: dict[str, np.ndarray] = {}
    self.compiled: set[str] = set()  # what ran before, and so needs no allowance for compiling
    self.evaluated_step = -1
    self.tracing = False
    self.skipping = False  # the last step that was looked at was skipped
    self.bar = Bar(0, 0, shown=False)
    self.metrics: Metrics | None = None  # on process 0
    self.alarm = CollapseAlarm(spec.train.collapse_steps)
    self.tokens_per_step = accumulation * spec.train.batch_size * spec.sequence_length

  def _make_step(self, variant: Variant) -> GuidedStep:
    """The step as configured, or a variant of it; variants are compared without profiles."""
    spec, plain = self.spec, variant == Variant()
    overlap = spec.overlap if plain else dataclasses.replace(spec.overlap, profile_guided=False)
    step = make_train_step(
      spec.objective if plain else spec.variant(variant),
      self.optimizer,
      spec.mesh,
      shardings_of(self.abstract),
      gradients=overlap.gradients,
      gradient_dtype=overlap.gradient_dtype,
    )
    return GuidedStep(step, overlap, self.workdir / PROFILES, say=self._say)

  # -- beginning and end ------------------------------------------------------------------------

  def start(self) -> None:
    """Restores the newest valid checkpoint, or initialises; opens the outputs."""
    spec = self.spec
    restored = self.checkpointer.restore_latest_valid(self.abstract, self._compare)
    if restored is None:
      self.state = init_state(spec.init, self.optimizer, spec.train.seed, self.abstract)
      if spec.warm_start is not None:
        self.state = spec.warm_start(self.state)
      self.step = 0
    else:
      self.state, self.step = restored.state, restored.step
      self.batches.restore(restored.data_state)
    if self.first:
      write_json(self.workdir / CONFIG, spec.config)
      self.metrics = Metrics(self.workdir, self.step, tensorboard=spec.train.tensorboard)
      shown = [spec.header] if spec.header else []
      origin = f"resuming from step {self.step} of" if restored else "new run in"
      print("\n".join([*shown, f"{origin} {self.workdir}"]), flush=True)
    self.bar = Bar(self.step, spec.train.steps, shown=self.first)
    if restored is not None and self.due(spec.train.eval_every) and not self._evaluated():
      self.evaluate()  # the run was stopped between this step's checkpoint and its evaluation

  def finish(self) -> TrainState:
    """Saves; then says that it was stopped, or evaluates and sums up."""
    train = self.spec.train
    self._flush()
    self.save(final=True)
    if self.step < train.steps:
      raise Preempted(
        f"stopped at step {self.step} of {train.steps} and saved; run the same command again to "
        "go on"
      )
    if not self._evaluated():
      self.evaluate()
    if self.stop.poll() and not self._evaluated():
      raise Preempted(f"stopped at step {self.step} before its evaluation; run the command again")
    if not train.sample_every or self.step % train.sample_every:
      self.sample()
    self._sum_up()
    return self.state

  def close(self) -> None:
    """Lets a checkpoint in flight finish, however the run ends."""
    self.watchdog.disarm()
    self.bar.close()
    if self.metrics is not None:
      self.metrics.close()
    with contextlib.suppress(StorageError):  # its failure was warned of; the run's own end counts
      self.checkpointer.close()

  def _say(self, line: str) -> None:
    if self.first:
      self.bar.print(line)

  def _sum_up(self) -> None:
    median, late = self.meter.percentiles()
    if math.isfinite(median):
      self.bar.print(f"seconds per step: median {median:.3g}, 99th percentile {late:.3g}")
    peak = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()]
    if max(peak):
      self.bar.print(f"peak memory of a device: {max(peak) / 2**30:.2f} GiB")
    self.bar.print(f"done: {self.step} steps; everything is in {self.workdir}")

  def _compare(self, meta: dict[str, Any]) -> None:
    """Refuses a checkpoint of another configuration or other data; prints what may differ."""
    allow = self.spec.checkpoint.allow_config_change
    current = json.loads(json.dumps(self.spec.config))
    lines = check_config(meta["config"], current, allow_change=allow)
    data = json.loads(json.dumps(self.spec.data.fingerprint()))
    lines += check_data(meta["data_fingerprint"], data, allow_change=allow)
    if lines and self.first:
      print("changed since the checkpoint was written:", *lines, sep="\n  ", flush=True)

  # -- one step ---------------------------------------------------------------------------------

  def interrupted(self) -> bool:
    """Whether to stop before the next step."""
    return self.stop.poll() or 0 < self.spec.train.stop_after <= self.step

  def due(self, every: int) -> bool:
    """Whether something that happens every so many steps follows this one; the end is `finish`."""
    return bool(every) and self.step % every == 0 and 0 < self.step < self.spec.train.steps

  def one_step(self) -> None:
    """Dispatches a step; looks at the results of the one before while the device works."""
    self._profile()
    self._arm("step", allowance=self.step_fn.compiles_next)
    self.batch = self._next_batch()
    put = lambda x: jax.make_array_from_process_local_data(self.batch_sharding, x)
    self.state, scalars, arrays = self.step_fn(self.state, jax.tree.map(put, self.batch))
    self.step += 1
    self._flush()
    self.pending = (self.step, scalars, arrays)
    train = self.spec.train
    # Where the run may be given up do not run ahead: then the state is the one that met the batch.
    critical = self.skipping or not train.max_skipped_in_row
    if critical or self.step in (train.stop_after, train.steps):
      self._flush()

  def _next_batch(self) -> dict[str, np.ndarray]:
    """Microbatches of one optimizer step as arrays [A, B / processes, ...].

    Raises:
      DataError: the data ended.
    """
    try:
      parts = [next(self.batches) for _ in range(self.accumulation)]
    except StopIteration:
      raise DataError(
        f"the training data ended at step {self.step}; use more data, more epochs or fewer "
        "train.steps"
      ) from None
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

  def _flush(self) -> None:
    """Waits for the pending step, if there is one, and logs it where due.

    Raises:
      NonFiniteError: one skipped step too many.
    """
    if self.pending is None:
      return
    (step, scalars, arrays), self.pending = self.pending, None
    values = {name: np.asarray(x).item() for name, x in jax.device_get(scalars).items()}
    self.skipping = bool(values["skipped_in_row"])
    self.meter.tick()
    self.bar.advance()
    if self.skipping and self.first:
      warn(f"step {step}: loss {values['objective']}, gradient norm {values['grad_norm']}; skipped")
    if step % self.spec.train.log_every == 0 or step == self.spec.train.steps:
      self._log(step, values, arrays)
    if values["skipped_in_row"] > self.spec.train.max_skipped_in_row:
      self._give_up(step, values)

  def _log(self, step: int, values: dict[str, Any], arrays: dict[str, Array]) -> None:
    """One line on the console and in metrics.jsonl; router arrays where due."""
    train, per_step = self.spec.train, self.meter.take()
    values = values | {"tokens": step * self.tokens_per_step, "seconds_per_step": per_step}
    rate = values["tokens_per_second"] = self.tokens_per_step / per_step
    peak = self.spec.peak_flops * self.spec.mesh.size
    if peak and self.spec.flops_per_token:
      values["mfu"] = rate * self.spec.flops_per_token / peak
    values["eta_seconds"] = (train.steps - step) * per_step
    self.bar.print(console_line(step, train.steps, values))
    if self.metrics is None:
      return
    host = jax.device_get(arrays)
    if collapsed := self.alarm.check(step, host):
      warn(collapsed)
    if host:
      values["layers"] = short_lists(host)
      if train.router_every and step % train.router_every == 0:
        self.metrics.write_router(step, host)
    self.metrics.write(step, values)

  def _give_up(self, step: int, values: dict[str, Any]) -> None:
    """Leaves what reproduces the failure: the state, the batch, the numbers."""
    folder = self.workdir / REPLAY
    if self.first:
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
    keeper = Checkpointer(folder, CheckpointConfig(async_save=False))
    keeper.save_now(self.step, self.state, self.batches.state(), self._meta())
    keeper.close()
    np.savez(folder / f"batch_{jax.process_index()}.npz", **self.batch)  # type: ignore[arg-type]
    if self.first:
      keys = ("objective", "loss", "grad_norm", "skipped", "skipped_in_row")
      numbers = {k: str(values[k]) for k in keys}
      write_json(folder / "failure.json", {"step": step, "seed": self.spec.train.seed} | numbers)
    raise NonFiniteError(
      f"{values['skipped_in_row']} steps in a row up to step {step} had a non-finite loss or "
      f"gradient (train.max_skipped_in_row={self.spec.train.max_skipped_in_row}); state and batch "
      f"are in {folder}. Lower optimizer.learning_rate or optimizer.clip_norm, or look at the data"
    )

  # -- between steps ----------------------------------------------------------------------------

  def save(self, *, final: bool = False) -> None:
    """Starts a checkpoint of this step; `final` waits for it."""
    self._flush()  # its line is in metrics.jsonl before the step counts as done
    self._arm("save", allowance=True)
    arguments = (self.step, self.state, self.batches.state(), self._meta())
    if final:
      # `wait` may find that the last one failed: then this step is not saved, whatever was started.
      if not (self.checkpointer.wait() and self.checkpointer.last_saved == self.step):
        self.checkpointer.save_now(*arguments)
    elif self.checkpointer.last_saved != self.step:
      self.checkpointer.save(*arguments)
    self._pause()

  def evaluate(self) -> None:
    """Evaluates this step, unless asked to stop meanwhile: then nothing of it is kept."""
    if self.spec.evaluate is None:
      return
    self._flush()
    self._arm("evaluation", allowance=True)
    values = self.spec.evaluate(self.state, self._poll_in_evaluation)
    if values is not None and self.metrics is not None:
      self.metrics.write(self.step, values, "eval")
      shown = " | ".join(f"{name} {value:.4f}" for name, value in values.items())
      self.bar.print(f"eval at step {self.step} | {shown}")
    self.evaluated_step = self.step if values is not None else -1
    self._pause()

  def sample(self) -> None:
    """Prints a sample of the model's text; failing to is no reason to stop."""
    if self.spec.sample is None or not self.spec.train.sample_tokens:
      return
    self._flush()
    self._arm("sample", allowance=True)
    self.bar.print(f"sample at step {self.step}:\n{self.spec.sample(self.state)}")
    self._pause()

  def _evaluated(self) -> bool:
    """Whether this step needs no evaluation (any more); the same answer on all processes."""
    if self.spec.evaluate is None or self.evaluated_step == self.step:
      return True
    return first_decides(self.metrics is not None and self.metrics.file.has_eval(self.step))

  def _poll_in_evaluation(self) -> bool:
    self._arm("evaluation batch")
    return self.stop.poll()

  def _arm(self, what: str, *, allowance: bool = False) -> None:
    """The first time of anything compiles, and saving writes: that may take longer."""
    train = self.spec.train
    if not train.watchdog_seconds:
      return
    known, seconds = what in self.compiled, train.watchdog_seconds
    if allowance or not known:
      seconds = max(seconds, train.first_step_seconds)
    self.compiled.add(what)
    place = f"step {self.step + 1}" if what == "step" else f"{what} after step {self.step}"
    self.watchdog.arm(seconds, place)

  def _pause(self) -> None:
    self.meter.pause()
    self.watchdog.disarm()

  def _profile(self) -> None:
    """Starts and ends the profiler trace; a trace in this process opens no port."""
    train = self.spec.train
    if train.profile_step and self.step + 1 == train.profile_step:
      self._flush()
      jax.profiler.start_trace(str(self.workdir / "profile"))
      self.tracing = True
    elif self.tracing and self.step + 1 >= train.profile_step + train.profile_steps:
      self._flush()
      jax.profiler.stop_trace()
      self.tracing = False

  def _meta(self) -> dict[str, Any]:
    """What a checkpoint says about itself, beside its arrays."""
    return {
      "config": self.spec.config,
      "data_fingerprint": self.spec.data.fingerprint(),
      "mesh": dict(self.spec.mesh.shape),
      "processes": jax.process_count(),
      "tokens": self.step * self.tokens_per_step,
      "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
    }


class _FirstProcess:
  """A context manager that process 0 enters for all; if it cannot, none of them goes on."""

  def __init__(self, inner: RunLock):
    self._inner = inner if is_first() else None

  def __enter__(self) -> None:
    problem: ScmoeError | None = None
    try:
      if self._inner is not None:
        self._inner.__enter__()
    except ScmoeError as error:
      problem = error
    if not all_agree(problem is None):
      raise problem or ConfigError("process 0 could not take the workdir; see its message")

  def __exit__(self, *details: object) -> None:
    if self._inner is not None:
      self._inner.__exit__(*details)
