"""The training loop: restore or initialise, step, log, save, evaluate, stop. Read `Trainer.run`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from scmoe.base import output
from scmoe.base.batch import Batch
from scmoe.base.errors import (
  CheckpointError,
  ConfigError,
  DataError,
  NonFiniteError,
  Preempted,
  ScmoeError,
  StorageError,
)
from scmoe.base.output import warn
from scmoe.base.stored import write_json
from scmoe.parallel.mesh import batch_sharding
from scmoe.training.card import write_card
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.description import WEIGHTS_ONLY, misfit
from scmoe.training.distributed import all_agree, first_decides, from_all_processes, is_first
from scmoe.training.health import CollapseAlarm
from scmoe.training.metrics import (
  Bar,
  Means,
  Meter,
  Metrics,
  console_line,
  duration,
  memory_in_use,
  short_lists,
)
from scmoe.training.options import CheckpointConfig
from scmoe.training.resume import architecture, check_config, check_data
from scmoe.training.search import Searchable, fastest_step
from scmoe.training.signals import StopRequest, Watchdog
from scmoe.training.step import TrainState, init_state
from scmoe.training.vitals import Vitals, stragglers
from scmoe.training.workdir import RunLock, prepare_workdir

CONFIG = "config.json"
REPLAY = "replay"
Poll = Callable[[], bool]


class Batches(Protocol):
  """The microbatches of this process: `Batch`es, or `ImageBatch`es, of numpy arrays.

  Their leaves are [B / processes, ...].
  """

  def __iter__(self) -> Iterator[Batch]: ...
  def __next__(self) -> Batch: ...
  def state(self) -> dict[str, Any]:
    """JSON-able position of the next microbatch."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a position that `state` returned."""
    ...


class Data(Protocol):
  """The part of the training data's interface that the loop uses; for sources see `scmoe.data`."""

  def train(self) -> Batches:
    """The microbatches from the beginning."""
    ...

  def fingerprint(self) -> dict[str, Any]:
    """JSON-able identity of the data and their order."""
    ...


class Trainable(Searchable, Protocol):
  """The model and options that the loop needs; the commands pass a `run.build.Built`.

  Attributes:
    checkpoint: options.
    sequence_length: tokens per sequence.
    batch_shapes: one step's batch as `jax.ShapeDtypeStruct`s [A, B, ...], of all processes.
    peak_flops: FLOP/s of one device; 0: no MFU.
  """

  @property
  def checkpoint(self) -> CheckpointConfig: ...
  @property
  def sequence_length(self) -> int: ...
  @property
  def batch_shapes(self) -> Any: ...
  @property
  def peak_flops(self) -> float: ...
  def flops_per_token(self, figures: Mapping[str, Any]) -> float:
    """Training FLOPs of a token in a step with these figures; 0: no MFU."""
    ...


class Trainer:
  """One training run. `run` trains; a new one of the same arguments resumes.

  Args:
    built: the model and its options.
    data: the training data.
    workdir: of the run.
    evaluate: `(state, stopping)` -> scalars. It calls `stopping()` before every batch and returns
      None once that is true. Runs after the step's checkpoint, so that a failure loses nothing.
    sample: `state` -> text; runs after the step's checkpoint too.
    header: printed first.
    card: this start's arguments for `scmoe.training.card.write_card`; None: no card.
    warm_start: puts other weights into the state of a new run, before its first step.
    teacher: makes `TrainState.teacher`; called at every start, since checkpoints omit it.
  """

  def __init__(
    self,
    built: Trainable,
    data: Data,
    workdir: str | os.PathLike[str],
    *,
    evaluate: Callable[[TrainState, Poll], dict[str, float] | None] | None = None,
    sample: Callable[[TrainState], str] | None = None,
    header: str = "",
    card: dict[str, Any] | None = None,
    warm_start: Callable[[TrainState], TrainState] | None = None,
    teacher: Callable[[], Any] | None = None,
  ):
    self.built, self.data, self.workdir = built, data, workdir
    self.evaluate, self.sample = evaluate, sample
    self.header, self.card, self.warm_start = header, card, warm_start
    self.teacher = teacher

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
    train, accumulation = self.built.train, self._check()
    workdir = prepare_workdir(self.workdir)
    with (
      output.optional(),
      _FirstProcess(RunLock(workdir)),
      StopRequest() as stop,
      Watchdog() as watchdog,
      kept_programs(workdir / PROGRAMS),
    ):
      run = _Run(self, workdir, accumulation, stop, watchdog)
      try:
        run.start()
        if run.step < train.steps and not run.interrupted():
          run.arm("compilation", allowance=True)
          with run.said("compiling the training step"):
            run.step_fn.compile(run.abstract, run.abstract_batch)
        while run.step < train.steps and not run.interrupted():
          run.one_step()
          if run.due(self.built.checkpoint.every):
            run.save()
          if run.due(train.eval_every):
            run.evaluate()
          if run.due(train.sample_every):
            run.sample()
        return run.finish()
      finally:
        run.close()

  def _check(self) -> int:
    """Checks what depends on several sections; returns the number of microbatches."""
    train, shards = self.built.train, self.built.mesh.size // self.built.mesh.shape["tensor"]
    train.check_mesh(shards, jax.process_count())
    if shards % jax.process_count():
      raise ConfigError(
        f"mesh.data x mesh.expert = {shards} does not give each of {jax.process_count()} processes "
        "its own part of the batch; make mesh.tensor smaller"
      )
    return train.microbatches(self.built.sequence_length)


class _Run:
  """The state of one call of `Trainer.run`: model, data, outputs, and the step it has reached."""

  def __init__(
    self, trainer: Trainer, workdir: Path, accumulation: int, stop: StopRequest, watchdog: Watchdog
  ):
    built = trainer.built
    self.trainer, self.built, self.train = trainer, built, built.train
    self.workdir, self.accumulation = workdir, accumulation
    self.stop, self.watchdog = stop, watchdog
    self.first = is_first()
    self.abstract = built.abstract_state()
    self.batch_sharding = batch_sharding(built.mesh, leading=1)
    self.checkpointer = Checkpointer(workdir, built.checkpoint)
    self.batches = trainer.data.train()
    self.meter, self.means = Meter(), Means()
    self.pending: tuple[int, dict, dict] | None = None  # results of a step, not yet read
    self.batch: Batch | None = None
    self.compiled: set[str] = set()  # kinds of work that have run once: no extra time for compiling
    self.evaluated_step = -1
    self.tracing = False
    self.skipping = False  # the last step whose results were read was skipped
    self.bar = Bar(0, 0, shown=self.first)
    self.step_fn = fastest_step(built, self.abstract, workdir, say=self._say)
    self.metrics: Metrics | None = None  # on process 0
    self.vitals = Vitals(workdir, jax.process_index())
    self.alarm = CollapseAlarm(built.train.collapse_steps)
    self.tokens_per_step = accumulation * built.train.batch_size * built.sequence_length

  @property
  def abstract_batch(self) -> Any:
    """Shapes and shardings of one step's batch."""
    place = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.batch_sharding)
    return jax.tree.map(place, self.built.batch_shapes)

  # -- beginning and end ------------------------------------------------------------------------

  def start(self) -> None:
    """Restores the newest valid checkpoint, or initialises; opens the outputs."""
    built, trainer = self.built, self.trainer
    stored = self.abstract.for_checkpoint()
    restored = self.checkpointer.restore_latest_valid(stored, self._compare)
    make = functools.partial(init_state, built.init, built.optimizer, self.train.seed)
    if restored is None:
      warm = trainer.warm_start
      self.state = warm(make(stored)).like(self.abstract) if warm else make(self.abstract)
      self.step = 0
    elif restored.meta.get(WEIGHTS_ONLY):
      weights = restored.state
      self.state = make(self.abstract, params=weights["params"])
      router = self.state.router | weights["router"]
      self.state, self.step = dataclasses.replace(self.state, router=router), 0
      self.checkpointer.last_saved = None  # step 0 with an optimizer's state is not saved yet
    else:
      self.state, self.step = restored.state.like(self.abstract), restored.step
      self._go_to(restored.data_state)
    if trainer.teacher is not None:
      self.state = dataclasses.replace(self.state, teacher=trainer.teacher())
    if self.first:
      self._write_config()
      if trainer.card is not None:
        write_card(self.workdir, **trainer.card)
      self.metrics = Metrics(
        self.workdir,
        self.step,
        tensorboard=self.train.tensorboard,
        trackers=self.train.trackers,
        config=built.config,
      )
      shown = [trainer.header] if trainer.header else []
      origin = f"resuming from step {self.step} of" if restored else "new run in"
      if restored and restored.meta.get(WEIGHTS_ONLY):
        origin = "starting from the weights in"
      print("\n".join([*shown, f"{origin} {self.workdir}"]), flush=True)
    self.bar = Bar(self.step, self.train.steps, shown=self.first)
    if restored is not None and self.due(self.train.eval_every) and not self._evaluated():
      self.evaluate()  # the run was stopped between this step's checkpoint and its evaluation

  def _go_to(self, position: dict[str, Any]) -> None:
    try:
      self.batches.restore(position)
    except (KeyError, TypeError, ValueError) as error:
      raise CheckpointError(
        f"the position in the data that step {self.step} stores cannot be used: {error!r}; start "
        "anew in another workdir"
      ) from None

  def _write_config(self) -> None:
    path = self.workdir / CONFIG
    try:
      write_json(path, self.built.config)
    except OSError as error:
      raise StorageError(f"{path} cannot be written: {error.strerror}") from None

  @contextlib.contextmanager
  def said(self, what: str) -> Iterator[None]:
    """Prints the name of a slow part before it begins, and its duration after it."""
    self._say(f"{what} ...")
    began = time.perf_counter()
    yield
    self._say(f"{what}: {duration(time.perf_counter() - began)}")

  def finish(self) -> TrainState:
    """Saves; then raises `Preempted` if the run was stopped, or else evaluates and sums up."""
    train = self.train
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
    return self.state.for_checkpoint()

  def close(self) -> None:
    """Closes the outputs and waits for a checkpoint that is being written, however the run ends."""
    self.watchdog.disarm()
    self.bar.close()
    if self.metrics is not None:
      self.metrics.close()
    with contextlib.suppress(StorageError):  # it was warned of already
      self.checkpointer.close()

  def _say(self, line: str) -> None:
    if self.first:
      self.bar.print(line)

  def _sum_up(self) -> None:
    median, late = self.meter.percentiles()
    if math.isfinite(median):
      self.bar.print(f"seconds per step: median {median:.3g}, 99th percentile {late:.3g}")
    memory = memory_in_use()
    if "device_memory_bytes" in memory:
      self.bar.print(f"peak memory of a device: {memory['device_memory_bytes'] / 2**30:.2f} GiB")
    if self.metrics is not None:
      timed = {"median_seconds_per_step": median, "p99_seconds_per_step": late}
      self.metrics.write(self.step, timed | memory, "end")
    self.bar.print(f"done: {self.step} steps; everything is in {self.workdir}")

  def _compare(self, meta: dict[str, Any]) -> None:
    """Refuses a checkpoint of another configuration or other data; prints permitted changes."""
    allow = self.built.checkpoint.allow_config_change
    current, stored = json.loads(json.dumps(self.built.config)), meta.get("config", {})
    if meta.get(WEIGHTS_ONLY):  # nothing was trained: only the architecture is fixed
      check_config(architecture(stored), architecture(current), allow_change=allow)
      return
    fits = not misfit(dataclasses.replace(self.abstract, teacher=None), meta["leaves"])
    lines = check_config(stored, current, allow_change=allow, fits=fits)
    data = json.loads(json.dumps(self.trainer.data.fingerprint()))
    lines += check_data(meta.get("data_fingerprint", {}), data, allow_change=allow)
    if lines and self.first:
      print("changed since the checkpoint was written:", *lines, sep="\n  ", flush=True)

  # -- one step ---------------------------------------------------------------------------------

  def interrupted(self) -> bool:
    """True if the run should stop before the next step."""
    return self.stop.poll() or 0 < self.train.stop_after <= self.step

  def due(self, every: int) -> bool:
    """True if this step is a multiple of `every`; the last step is left to `finish`."""
    return bool(every) and self.step % every == 0 and 0 < self.step < self.train.steps

  def one_step(self) -> None:
    """Dispatches a step; reads and logs the results of the one before while the device works."""
    self._profile()
    self.arm("step", allowance=self.step_fn.compiles_next)
    began = time.perf_counter()
    self.batch = self._next_batch()
    put = lambda x: jax.make_array_from_process_local_data(self.batch_sharding, x)
    batch = jax.tree.map(put, self.batch)
    self.vitals.worked(time.perf_counter() - began)
    self.state, scalars, arrays = self.step_fn(self.state, batch)
    self.meter.begin()
    self.step += 1
    self._flush()
    self.pending = (self.step, scalars, arrays)
    train = self.train
    # If this step may end the run, its results are read before the next step starts: the files for
    # `scmoe.replay` need the state that this step left, which a next step would change.
    critical = self.skipping or not train.max_skipped_in_row
    critical |= bool(train.spike_sigma) and train.spike_action == "stop"
    if critical or self.step in (train.stop_after, train.steps):
      self._flush()

  def _next_batch(self) -> Batch:
    """Microbatches of one optimizer step as one batch [A, B / processes, ...].

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
    return Batch.stack(parts)

  def _flush(self) -> None:
    """Waits for the pending step, if there is one, and logs it where due.

    Raises:
      NonFiniteError: one skipped step too many.
    """
    if self.pending is None:
      return
    (step, scalars, arrays), self.pending, train = self.pending, None, self.train
    values = {name: np.asarray(x).item() for name, x in jax.device_get(scalars).items()}
    self.skipping = bool(values["skipped_in_row"])
    self.meter.tick()
    self.means.add(values)
    self.bar.advance()
    self.vitals.beat(step, self.meter.percentiles)
    if values.get("spike"):
      self._say(
        f"step {step}: loss {values['objective']:.4f}, gradient norm {values['grad_norm']:.3g} are "
        f"over {train.spike_sigma:g} standard deviations from the last steps'; skipped"
      )
    elif not values["finite"] and not self.skipping:
      self._say(
        f"step {step}: an overflow in float16 at loss scale {values['loss_scale']:g}; skipped"
      )
    elif self.skipping and self.first:
      warn(f"step {step}: loss {values['objective']}, gradient norm {values['grad_norm']}; skipped")
    if step % train.log_every == 0 or step == train.steps:
      self._log(step, values, arrays)
    stop = values.get("spike") and train.spike_action == "stop"
    if stop or values["skipped_in_row"] > train.max_skipped_in_row:
      self._give_up(step, values)

  def _log(self, step: int, values: dict[str, Any], arrays: dict[str, Array]) -> None:
    """One line on the console and in metrics.jsonl; router arrays where due."""
    train, per_step = self.train, self.meter.take()
    values = values | self.means.take() | memory_in_use()
    values |= {"tokens": step * self.tokens_per_step, "seconds_per_step": per_step}
    rate = values["tokens_per_second"] = self.tokens_per_step / per_step
    peak = self.built.peak_flops * self.built.mesh.size
    if peak and (flops := self.built.flops_per_token(values)):
      values["mfu"] = rate * flops / peak
    values["eta_seconds"] = (train.steps - step) * per_step
    self.bar.print(console_line(step, train.steps, values))
    if grown := self.vitals.growth(values.get("host_memory_bytes", 0)):
      warn(grown)
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
    """Ends the run and writes the files that reproduce the failure."""
    folder, spike = self.workdir / REPLAY, values.get("spike")
    left = f"python -m scmoe.replay {folder} repeats the step"
    try:
      self._write_bundle(folder, step, values)
    except (OSError, StorageError) as error:
      left = f"{folder} could not be written ({error})"
    if spike:
      raise NonFiniteError(
        f"step {step}: loss {values['objective']:.4f} and gradient norm {values['grad_norm']:.3g} "
        f"are a spike (train.spike_sigma={self.train.spike_sigma:g}); {left}. Look at its batch, "
        "or set train.spike_action=skip"
      )
    raise NonFiniteError(
      f"{values['skipped_in_row']} steps in a row up to step {step} had a non-finite loss or "
      f"gradient (train.max_skipped_in_row={self.train.max_skipped_in_row}); {left}. "
      f"{self._remedy()}, or look at the data"
    )

  def _write_bundle(self, folder: Path, step: int, values: dict[str, Any]) -> None:
    """Writes state, batch and numbers of the step that ended the run, for `scmoe.replay`."""
    if self.first:
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
    keeper = Checkpointer(folder, CheckpointConfig(async_save=False))
    keeper.save_now(self.step, self.state.for_checkpoint(), self.batches.state(), self._meta())
    keeper.close()
    stored = {name: x for name, x in vars(self.batch).items() if x is not None}
    np.savez(folder / f"batch_{jax.process_index()}.npz", **stored)  # pyright: ignore
    if self.first:
      keys = ("objective", "loss", "grad_norm", "skipped", "skipped_in_row", "loss_scale", "spike")
      numbers = {k: str(values[k]) for k in keys if k in values}
      how = {"step": step, "seed": self.train.seed, "variant": self.step_fn.variant.given}
      write_json(folder / "failure.json", how | numbers)

  def _remedy(self) -> str:
    """Advice against numbers that are not finite, with the settings of this run."""
    clip = self.built.config.get("optimizer", {}).get("clip_norm", 0)
    limit = f"lower optimizer.clip_norm={clip:g}" if clip else "set optimizer.clip_norm=1"
    return f"Lower optimizer.learning_rate, {limit}"

  # -- between steps ----------------------------------------------------------------------------

  def save(self, *, final: bool = False) -> None:
    """Starts a checkpoint of this step; `final` waits for it."""
    self._flush()  # its line is in metrics.jsonl before the step counts as done
    self.arm("save", allowance=True)
    arguments = lambda: (self.step, self.state.for_checkpoint(), self.batches.state(), self._meta())
    if final:
      # If `wait` finds that the last save failed, this step does not count as saved.
      if not (self.checkpointer.wait() and self.checkpointer.last_saved == self.step):
        self.checkpointer.save_now(*arguments())
    elif self.checkpointer.last_saved != self.step:
      self.checkpointer.save(*arguments())
    self._compare_hosts()
    self._pause()

  def _compare_hosts(self) -> None:
    """Step times of every host, with a warning about slow ones; all processes call it."""
    if jax.process_count() == 1:
      return
    own = self.vitals.times(self.meter.percentiles())
    times = from_all_processes({**own, "host": socket.gethostname()})
    if self.metrics is not None:
      self.metrics.write(self.step, {"hosts": times}, "hosts")
      if slow := stragglers(times):
        warn(slow)

  def evaluate(self) -> None:
    """Evaluates this step; drops the evaluation if the run is asked to stop meanwhile."""
    if self.trainer.evaluate is None:
      return
    self._flush()
    self.arm("evaluation", allowance=True)
    values = self.trainer.evaluate(self.state.readable(), self._poll_in_evaluation)
    if values is not None and self.metrics is not None:
      self.metrics.write(self.step, values, "eval")
      shown = " | ".join(f"{name} {value:.4f}" for name, value in values.items())
      self.bar.print(f"eval at step {self.step} | {shown}")
    self.evaluated_step = self.step if values is not None else -1
    self._pause()

  def sample(self) -> None:
    """Prints a sample of the model's text. A sample that fails does not stop the run."""
    if self.trainer.sample is None or not self.train.sample_tokens:
      return
    self._flush()
    self.arm("sample", allowance=True)
    try:
      text = self.trainer.sample(self.state.readable())
      self.bar.print(f"sample at step {self.step}:\n{text}")
    except Exception as error:  # any exception of the model or the tokenizer
      warn(f"no sample at step {self.step}: {type(error).__name__}: {error}")
    self._pause()

  def _evaluated(self) -> bool:
    """True if this step needs no evaluation; all processes get the same answer."""
    if self.trainer.evaluate is None or self.evaluated_step == self.step:
      return True
    return first_decides(self.metrics is not None and self.metrics.file.has_eval(self.step))

  def _poll_in_evaluation(self) -> bool:
    self.arm("evaluation batch")
    return self.stop.poll()

  def arm(self, what: str, *, allowance: bool = False) -> None:
    """Arms the watchdog. A kind of work that runs for the first time, and so compiles, gets more
    time (`train.first_step_seconds`), as does work with `allowance`."""
    train = self.train
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
    """Starts jax's profiler before `train.profile_step`, and stops it `train.profile_steps` later.

    The trace is taken in this process, so no port is opened for a profiler's client.
    """
    train = self.train
    if train.profile_step and self.step + 1 == train.profile_step:
      self._flush()
      jax.profiler.start_trace(str(self.workdir / "profile"))
      self.tracing = True
    elif self.tracing and self.step + 1 >= train.profile_step + train.profile_steps:
      self._flush()
      jax.profiler.stop_trace()
      self.tracing = False

  def _meta(self) -> dict[str, Any]:
    """The description that a checkpoint carries beside its arrays."""
    return {
      "config": self.built.config,
      "data_fingerprint": self.trainer.data.fingerprint(),
      "mesh": dict(self.built.mesh.shape),
      "processes": jax.process_count(),
      "tokens": self.step * self.tokens_per_step,
      "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
    }


class _FirstProcess:
  """A context manager that process 0 enters for all; if that fails, every process raises."""

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
