"""Wall-clock comparison of arms that take turns, so that drift of the machine meets all alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds per call of one arm.

  Attributes:
    seconds: one entry per round, the mean over the calls of that round.
    calls: back-to-back calls per round.
  """

  seconds: tuple[float, ...]
  calls: int

  @property
  def median(self) -> float:
    """Median over rounds, seconds per call."""
    return statistics.median(self.seconds)

  @property
  def spread(self) -> float:
    """Half the distance between the quartiles over the median; 0 with fewer than three rounds."""
    if len(self.seconds) < 3:
      return 0.0
    low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
    return (high - low) / 2 / self.median

  def as_json(self) -> dict[str, float | int | list[float]]:
    """Milliseconds, for a results file."""
    return {
      "ms": round(1e3 * self.median, 4),
      "spread": round(self.spread, 4),
      "calls": self.calls,
      "rounds_ms": [round(1e3 * s, 4) for s in self.seconds],
    }


def interleave(
  arms: Mapping[str, Callable[[int], object]],
  *,
  rounds: int,
  calls: int,
  deadline: float = float("inf"),
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
  """Times arms in turns: A B C, B C A, C A B, ... one round of `calls` calls each.

  Args:
    arms: name -> function that makes the given number of calls and returns when the device is
      done with them. Warm-up and compilation must have happened before.
    rounds: turns of every arm; the first arm of a round changes from round to round.
    calls: calls per turn.
    deadline: of `clock`; no new round begins after it, but every arm gets one.
    clock: seconds.
  """
  seconds: dict[str, list[float]] = {name: [] for name in arms}
  names = list(arms)
  for turn in range(rounds):
    if turn and clock() > deadline:
      break
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
      start = clock()
      arms[name](calls)
      seconds[name].append((clock() - start) / calls)
  return {name: Timing(tuple(times), calls) for name, times in seconds.items()}


def speed_up(baseline: Timing, arm: Timing) -> float:
  """How many times faster `arm` is; the median of the rounds' ratios, since they ran in turns."""
  return statistics.median(b / a for b, a in zip(baseline.seconds, arm.seconds))
