"""Figures over several steps: means of scalars, seconds per step; and the peak of memory."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import Any

import numpy as np


class Means:
  """Means of the scalars `NAMES` over the steps since the last line that was logged.

  Values that are not finite and skipped steps are left out, with one exception. If a step was
  skipped because its gradients overflowed, and the overflow lowered the loss scale, the step
  counts, as its loss is finite; but not if a step failed earlier in the same row of skipped steps.
  """

  NAMES = ("loss", "cross_entropy", "accuracy", "drop")

  def __init__(self) -> None:
    self._values: dict[str, list[float]] = {}

  def add(self, values: dict[str, Any]) -> None:
    """Notes the values of one step, unless they are left out as the class says."""
    if values.get("skipped_in_row"):
      return
    for name in self.NAMES:
      if name in values and math.isfinite(values[name]):
        self._values.setdefault(name, []).append(values[name])

  def take(self) -> dict[str, float]:
    """Returns the means and starts anew; {} if no step since the last call counted."""
    means = {name: float(np.mean(values)) for name, values in self._values.items()}
    self._values.clear()
    return means


class Meter:
  """Time per step, without the time that `pause` leaves out, such as an evaluation or a save.

  The loop calls `begin` when it has dispatched a step, `tick` when it has read a step's results,
  and `pause` after work that belongs to no step. As a rule it reads the results of step n after it
  has dispatched step n + 1, and the dispatch may last until step n + 1 is almost done. When the
  loop ends or pauses, it then reads the results of step n + 1 at once. So the time between two
  ticks without a `begin` is no step's.
  """

  def __init__(self) -> None:
    self._last: float | None = None
    self._begun = False
    self._mean = math.nan  # the mean that `take` returned when it last had timed steps
    self._interval: list[float] = []
    self._recent: deque[float] = deque(maxlen=4096)

  def begin(self) -> None:
    """Notes that a step was dispatched."""
    self._begun = True

  def tick(self) -> None:
    """Notes that a step's results were read, and how long it took since the last `tick`.

    No time is noted by the first `tick` of all, by the first after `pause`, or without a `begin`
    since the last `tick`.
    """
    now = time.perf_counter()
    if self._last is not None and self._begun:
      self._interval.append(now - self._last)
      self._recent.append(now - self._last)
    self._last, self._begun = now, False

  def pause(self) -> None:
    """Leaves out the time between the last `tick` and the next one."""
    self._last = None

  def take(self) -> float:
    """Mean seconds per step since the last call; the last call's mean if no step was timed since.

    NaN if no step was timed at all.
    """
    if self._interval:
      self._mean = float(np.mean(self._interval))
    self._interval.clear()
    return self._mean

  def percentiles(self) -> tuple[float, float]:
    """Median and 99th percentile of the last 4096 timed steps, in seconds; NaN without any."""
    if not self._recent:
      return math.nan, math.nan
    return float(np.percentile(self._recent, 50)), float(np.percentile(self._recent, 99))


def memory_in_use() -> dict[str, int]:
  """Peak memory in bytes, of this process and of the fullest of its devices.

  Returns:
    `device_memory_bytes`, where jax counts it, and `host_memory_bytes`, where the system tells it.
  """
  import jax

  found = {}
  if peak := max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()):
    found["device_memory_bytes"] = peak
  try:
    import resource
  except ImportError:  # Python on Windows has no module `resource`
    return found
  unit = 1 if sys.platform == "darwin" else 1024
  found["host_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  return found
