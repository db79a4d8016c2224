"""Signs of life of an unattended run: a heartbeat, hosts that lag, memory that grows."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scmoe.base.stored import write_json

HEARTBEAT = "heartbeat"
# The least time between two writes of the heartbeat file.
BEAT_SECONDS = 5.0
# A process lags if its own part of a step takes more than LAG times the median process's, and the
# difference is more than SHARE of the step.
LAG, SHARE = 1.5, 0.05
# Memory has grown if it is at least GROWTH times the peak that it had when SETTLED lines had been
# logged, since the start and since the first checkpoint, and at least MARGIN bytes above it. After
# a warning, the size at that warning stands in the place of this peak.
GROWTH, MARGIN = 1.5, 2**30
SETTLED = 20


def heartbeat_file(workdir: Path, process: int) -> Path:
  """The heartbeat file of a run's process."""
  return workdir / HEARTBEAT / f"process_{process}.json"


class Vitals:
  """One process's heartbeat file WORKDIR/heartbeat/process_N.json, its times and its memory.

  Args:
    workdir: of the run.
    process: number of this process.
  """

  def __init__(self, workdir: Path, process: int):
    self.file = heartbeat_file(workdir, process)
    self._last = -BEAT_SECONDS
    self._own: deque[float] = deque(maxlen=1024)
    self._lines = 0
    self._settled = 0
    self._saved = False

  def worked(self, seconds: float) -> None:
    """Records the seconds that this host took to read a step's batch and place it on its devices.

    Whole steps take the same time on all hosts, because these wait for each other.
    """
    self._own.append(seconds)

  def times(self, step: tuple[float, float]) -> dict[str, float]:
    """`step_p50`, `step_p99`, `own_p50`, `own_p99` in seconds, with four significant digits.

    `own` is this host's own part of a step, from the last 1024 calls of `worked`; 0 without any.

    Args:
      step: median and 99th percentile of whole steps, in seconds.
    """
    own = (0.0, 0.0) if not self._own else tuple(map(float, np.percentile(self._own, (50, 99))))
    named = zip(("step_p50", "step_p99", "own_p50", "own_p99"), (*step, *own))
    return {name: float(f"{value:.4g}") for name, value in named}

  def beat(self, step: int, percentiles: Callable[[], tuple[float, float]]) -> None:
    """Writes the heartbeat file, at most once in `BEAT_SECONDS`; a failed write is ignored.

    Args:
      step: number of the last step whose results were read.
      percentiles: returns median and 99th percentile of whole steps, in seconds; called only when a
        write is due.
    """
    now = time.monotonic()
    if now - self._last < BEAT_SECONDS:
      return
    self._last = now
    values: dict[str, Any] = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    values |= {"pid": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
      self.file.parent.mkdir(exist_ok=True)
      times = self.times(percentiles())
      write_json(self.file, values | {k: v for k, v in times.items() if np.isfinite(v)})

  def saving(self) -> None:
    """Notes that a checkpoint begins; the run settles again after the first one.

    A checkpoint is written from a copy of the state in the host's memory, whose pages the driver of
    the GPUs keeps for the next one.
    """
    if not self._saved:
      self._saved, self._lines = True, 0

  def growth(self, size: int) -> str:
    """A warning if memory has grown since the run settled, by half and by 1 GiB at least; else "".

    A run has settled after its first 20 logged lines, and again after the 20 behind its first
    checkpoint; a warning counts as settling again.

    Args:
      size: most bytes of the host's memory that this process has held so far. The method is called
        once per logged line.
    """
    self._lines += 1
    if self._lines <= SETTLED:
      self._settled = max(self._settled, size)
      return ""
    if size < max(GROWTH * self._settled, self._settled + MARGIN):
      return ""
    # The next warning comes when memory has grown from here by half and by 1 GiB at least.
    before, self._settled = self._settled, size
    return (
      f"this process holds {size / 2**30:.1f} GiB of memory, {before / 2**30:.1f} GiB when it had "
      "settled: something grows; a restart of the same command goes on from the last checkpoint"
    )


def stragglers(times: Sequence[dict[str, Any]]) -> str:
  """A warning that names the processes whose own part of a step is slow (`LAG`, `SHARE`), or "".

  Whole steps take the same time everywhere, because all processes wait for the slowest one: only
  their own parts tell which it is.

  Args:
    times: of each process, in their order: `Vitals.times`, and `host`, the name of its host.
  """
  median = statistics.median(t["own_p50"] for t in times)
  slow = [
    (number, t)
    for number, t in enumerate(times)
    if t["own_p50"] > LAG * median and t["own_p50"] - median > SHARE * t["step_p50"]
  ]
  if not slow:
    return ""
  named = ", ".join(f"{n} on {t['host']} ({1e3 * t['own_p50']:.0f} ms)" for n, t in slow)
  return f"slow hosts: process {named}, the median is {1e3 * median:.0f} ms of each step"
