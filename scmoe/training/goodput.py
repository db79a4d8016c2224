"""Goodput: the share of wall-clock time in which a run did steps that it kept.

Everything else counts as lost: starting, with the first step's compilation; saving, evaluating,
steps that were done again after the run died, and time in which it did not run. What a later step
compiles, such as the candidates of `train.tune`, counts as a part of that step. metrics.jsonl has
all that this needs: lines of kind `start` for the run's starts, and lines of kind `train`, most
with a mean of the seconds per step. Lines of steps that are done again are removed when the run
resumes, so these steps count once.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

START = "start"  # kind of the line of metrics.jsonl that each start writes, with its `time`


@dataclasses.dataclass(frozen=True)
class Goodput:
  """How a run has spent its time since its first start with a usable time.

  Attributes:
    trained: seconds in kept steps.
    wall: seconds since the first start that `starts` counts.
    starts: number of starts whose lines are still there and have a usable time. A resumed run
      removes the lines of starts at later steps than its own.
  """

  trained: float
  wall: float
  starts: int

  @property
  def share(self) -> float:
    """Share of the wall-clock time that went into kept steps, 0 to 1."""
    return min(1.0, self.trained / self.wall) if self.wall > 0 else 0.0

  @property
  def words(self) -> str:
    """A text such as: goodput 83.5 %: 50.1 of 60.0 s trained since the run began, in 2 starts."""
    starts = f"in {self.starts} starts" if self.starts > 1 else "in one start"
    return (
      f"goodput {100 * self.share:.1f} %: {self.trained:.1f} of {self.wall:.1f} s trained since "
      f"the run began, {starts}"
    )


def goodput(
  starts: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], now: float
) -> Goodput | None:
  """The goodput up to `now`; None if no line has a usable time of a start, as in older records.

  A line stands for all steps since the line before it. If it has no time per step, as after the
  first step of a start, its steps count with the median of the other lines' times (0 without any).

  Args:
    starts: lines of kind `start`, oldest first: `step`, after which the run started, and `time`.
    lines: lines of kind `train`, oldest first: `step` and `seconds_per_step`.
    now: seconds since 1970.
  """
  known = [start for start in starts if _number(start.get("time"))]
  if not known:
    return None
  began, done = known[0]["time"], known[0]["step"]
  lines = [line for line in lines if line["step"] > done]
  timed = [line["seconds_per_step"] for line in lines if _number(line.get("seconds_per_step"))]
  typical, trained = statistics.median(timed) if timed else 0.0, 0.0
  for line in lines:
    seconds = line.get("seconds_per_step")
    trained += (line["step"] - done) * (seconds if _number(seconds) else typical)
    done = line["step"]
  return Goodput(trained, max(0.0, now - began), len(known))


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
