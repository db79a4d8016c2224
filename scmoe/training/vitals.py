"""Signs of life of a run that nobody watches: a heartbeat, hosts that lag, memory that grows."""

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

from scmoe.training.workdir import write_json

HEARTBEAT = "heartbeat"
BEAT_SECONDS = 5.0  # least time between two writes of the file
LAG, SHARE = (
  1.5,
  0.05,
)  # a host's own time over the median's, and the least share of a step it costs
GROWTH, MARGIN = 1.5, 2**30  # of memory since the run has settled
SETTLED = 20  # logged lines after which it has


class Vitals:
  """Of one process: WORKDIR/heartbeat/process_N.json, and what its steps cost this host.

  Args:
    workdir: of the run.
    process: number of this process.
  """

  def __init__(self, workdir: Path, process: int):
    self.file = workdir / HEARTBEAT / f"process_{process}.json"
    self._last = -BEAT_SECONDS
    self._own: deque[float] = deque(maxlen=1024)
    self._lines = 0
    self._settled = 0

  def worked(self, seconds: float) -> None:
    """This host needed so long to read a batch and to start a step: the rest of it is shared."""
    self._own.append(seconds)

  def times(self, step: tuple[float, float]) -> dict[str, float]:
    """Median and 99th percentile of whole steps (given) and of this host's own part, in seconds."""
    own = (0.0, 0.0) if not self._own else tuple(map(float, np.percentile(self._own, (50, 99))))
    named = zip(("step_p50", "step_p99", "own_p50", "own_p99"), (*step, *own))
    return {name: float(f"{value:.4g}") for name, value in named}

  def beat(self, step: int, percentiles: Callable[[], tuple[float, float]]) -> None:
    """Says that the run lives, at most every few seconds. A file that cannot be written is none."""
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

  def growth(self, size: int) -> str:
    """A warning when memory has grown by half, and a GiB, since the run settled; else ""."""
    self._lines += 1
    if self._lines <= SETTLED:
      self._settled = max(self._settled, size)
      return ""
    if size < max(GROWTH * self._settled, self._settled + MARGIN):
      return ""
    before, self._settled = self._settled, size  # and again when it has grown by as much again
    return (
      f"this process holds {size / 2**30:.1f} GiB of memory, {before / 2**30:.1f} GiB when it had "
      "settled: something grows; a restart of the same command goes on from the last checkpoint"
    )


def stragglers(times: Sequence[dict[str, Any]]) -> str:
  """A warning that names the processes whose own part of a step lags behind the median's, or "".

  All wait for the slowest: the time of a whole step is the same everywhere and names nobody.
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
