"""The record of a run: console, metrics.jsonl, TensorBoard, trackers, heartbeats, warnings."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax import Array

from scmoe.base.output import warn
from scmoe.base.sizes import elapsed
from scmoe.base.stored import StoredError
from scmoe.training.console import Bar, console_line
from scmoe.training.distributed import from_all_processes, is_first
from scmoe.training.goodput import START, Goodput, goodput
from scmoe.training.health import CollapseAlarm
from scmoe.training.interfaces import Trainable
from scmoe.training.meters import Means, Meter, memory_in_use
from scmoe.training.metrics import Metrics, metrics_by_kind, short_lists
from scmoe.training.vitals import Vitals, stragglers


class Journal:
  """Writes the record of a run. Process 0 prints and writes metrics; all processes time steps.

  Every process also writes a heartbeat file of its own, and warns if its memory grows.

  Args:
    built: options and sizes of the run.
    workdir: of the run.
    tokens_per_step: tokens of one optimizer step.
    label: stands before every text that `say` prints.
  """

  def __init__(self, built: Trainable, workdir: Path, tokens_per_step: int, label: str = ""):
    self._built, self._train, self._workdir = built, built.train, workdir
    self._tokens_per_step, self._label = tokens_per_step, label
    self._meter, self._means = Meter(), Means()
    self._bar = Bar(0, 0, shown=is_first())
    self._metrics: Metrics | None = None  # process 0 sets it in `open`; None on the others
    self._vitals = Vitals(workdir, jax.process_index())
    self._alarm = CollapseAlarm(built.train.collapse_steps, built.aimed_share)
    self._began = time.time()

  def open(self, step: int) -> None:
    """Opens the progress bar and, on process 0, the outputs.

    Lines of metrics.jsonl and router files of steps after `step` are removed (`Metrics`). Process 0
    writes a line of kind `start` to metrics.jsonl, and, if `step` is not 0, prints the goodput so
    far, if known.

    Args:
      step: optimizer steps that the run has done.

    Raises:
      StoredError, StorageError: as `Metrics`, on process 0.
    """
    if is_first():
      self._metrics = Metrics(
        self._workdir,
        step,
        tensorboard=self._train.tensorboard,
        trackers=self._train.trackers,
        config=self._built.config,
      )
      started = {"time": self._began, "devices": self._built.mesh.size}
      self._metrics.file.write(step, started, START)
    self._bar = Bar(step, self._train.steps, shown=is_first())
    if step and (spent := self._spent()):
      self.say(spent.words)

  def close(self) -> None:
    """Removes the progress bar, and closes TensorBoard's files and the trackers."""
    self._bar.close()
    if self._metrics is not None:
      self._metrics.close()

  # -- lines on the console ---------------------------------------------------------------------

  def say(self, line: str) -> None:
    """Prints a text on the console, on process 0 only."""
    self._bar.print(self._label + line)

  @contextlib.contextmanager
  def said(self, what: str) -> Iterator[None]:
    """Prints the name of a slow part before it begins, and its duration when it has succeeded."""
    self.say(f"{what} ...")
    began = time.perf_counter()
    yield
    self.say(f"{what}: {elapsed(time.perf_counter() - began)}")

  # -- times and figures of steps ---------------------------------------------------------------

  def host_worked(self, seconds: float) -> None:
    """Notes the seconds that this host took to read a step's batch and place it on its devices."""
    self._vitals.worked(seconds)

  def step_dispatched(self) -> None:
    """Notes that a step was dispatched; its results come later (`step_done`)."""
    self._meter.begin()

  def step_done(self, step: int, values: Mapping[str, Any]) -> None:
    """Takes in a step whose results were read: its time, and its figures for the next line's means.

    `Meter` and `Means` say which steps they leave out. Also moves the progress bar on, and writes
    this process's heartbeat where due.
    """
    self._meter.tick()
    self._means.add(dict(values))
    self._bar.advance()
    self._vitals.beat(step, self._meter.percentiles)

  def saving(self) -> None:
    """Notes that a checkpoint begins (`Vitals.saving`)."""
    self._vitals.saving()

  def pause(self) -> None:
    """Leaves out of the times of steps the time from the last results read to the next ones."""
    self._meter.pause()

  def log(self, step: int, values: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Prints one line, writes all figures with `Metrics`, and router arrays where they are due.

    Every process warns if its memory has grown (`Vitals.growth`). Process 0 warns if a router has
    collapsed, or zero experts take the choices of computing ones (`CollapseAlarm`).

    Args:
      step: the number of the step.
      values: the step's figures.
      arrays: statistics of every layer's router; {} without routers.
    """
    train, per_step = self._train, self._meter.take()
    values = values | self._means.take() | memory_in_use()
    values |= {"tokens": step * self._tokens_per_step, "seconds_per_step": per_step}
    rate = values["tokens_per_second"] = self._tokens_per_step / per_step
    peak = self._built.peak_flops * self._built.mesh.size
    if peak and (flops := self._built.flops_per_token(values)):
      values["mfu"] = rate * flops / peak
    values["eta_seconds"] = (train.steps - step) * per_step
    self.say(console_line(step, train.steps, values))
    if grown := self._vitals.growth(values.get("host_memory_bytes", 0)):
      warn(grown)
    if self._metrics is None:
      return
    host = jax.device_get(arrays)
    for line in self._alarm.check(step, host):
      warn(line)
    if host:
      values["layers"] = short_lists(host)
      if train.router_every and step % train.router_every == 0:
        self._metrics.write_router(step, host)
    self._metrics.write(step, values)

  # -- evaluations, comparison of hosts, end of the run -----------------------------------------

  def evaluated(self, step: int, values: Mapping[str, float]) -> None:
    """Writes an evaluation of this step to all outputs of the run and prints it, on process 0.

    The outputs are metrics.jsonl, TensorBoard and the trackers, as far as the run has them.
    """
    if self._metrics is None:
      return
    self._metrics.write(step, dict(values), "eval")
    shown = " | ".join(f"{name} {value:.4f}" for name, value in values.items())
    self.say(f"eval at step {step} | {shown}")

  def has_evaluation(self, step: int) -> bool:
    """True on process 0 if an evaluation of this step was recorded (`MetricsFile.has_eval`)."""
    return self._metrics is not None and self._metrics.file.has_eval(step)

  def compare_hosts(self, step: int) -> None:
    """Writes every process's times to metrics.jsonl and warns of slow hosts; all processes call it.

    With one process it does nothing.
    """
    if jax.process_count() == 1:
      return
    own = self._vitals.times(self._meter.percentiles())
    times = from_all_processes({**own, "host": socket.gethostname()})
    if self._metrics is not None:
      self._metrics.write(step, {"hosts": times}, "hosts")
      if slow := stragglers(times):
        warn(slow)

  def sum_up(self, step: int) -> None:
    """Prints the last lines of a run that is done: time per step, goodput, peak memory, folder.

    Unknown figures are not printed. A line of kind `end` in metrics.jsonl holds the figures, too.
    """
    median, late = self._meter.percentiles()
    if math.isfinite(median):
      self.say(f"seconds per step: median {median:.3g}, 99th percentile {late:.3g}")
    if spent := self._spent():
      self.say(spent.words)
    memory = memory_in_use()
    if "device_memory_bytes" in memory:
      self.say(f"peak memory of a device: {memory['device_memory_bytes'] / 2**30:.2f} GiB")
    if self._metrics is not None:
      timed = {"median_seconds_per_step": median, "p99_seconds_per_step": late}
      if spent:
        timed |= {"goodput": spent.share, "trained_seconds": spent.trained}
        timed["wall_seconds"] = spent.wall
      self._metrics.write(step, timed | memory, "end")
    self.say(f"done: {step} steps; everything is in {self._workdir}")

  def _spent(self) -> Goodput | None:
    """The run's goodput up to now, on process 0.

    None on the other processes, or if metrics.jsonl does not tell it.
    """
    if self._metrics is None:
      return None
    try:
      kinds = metrics_by_kind(self._workdir)
    except (OSError, StoredError):
      return None
    return goodput(kinds.get(START, []), kinds.get("train", []), time.time())
