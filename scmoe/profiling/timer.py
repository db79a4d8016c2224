"""Compares functions by wall-clock time, in turns, so that changes of the GPU's clock affect all.

An *arm* of a comparison is a function of a number n: it makes n calls and returns when the device
is done. `repeated` turns a jitted function into an arm. Compile and warm up before comparing.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arm = Callable[[int], object]
# Printed above times that were measured without a GPU.
NO_GPU = "NOTE: there is no GPU here; these are times of simulated devices, not GPU times"
_FLUSH_BYTES = 256 * 2**20  # bytes: more than any L2 cache


def half_range(values: Sequence[float]) -> float:
  """Half the distance between the quartiles; 0 of fewer than three values."""
  if len(values) < 3:
    return 0.0
  low, _, high = statistics.quantiles(values, n=4, method="inclusive")
  return (high - low) / 2


def around_median(values: Sequence[float]) -> tuple[float, float]:
  """The two values between which the median lies with a probability of at least 95 %.

  Of n values, as many are below the median as heads in n tosses of a coin. So the k-th smallest and
  the k-th largest miss it with twice the probability of fewer than k heads, whatever the
  distribution: of 60 values these are the 22nd from both ends, of six to eight the smallest and
  the largest. Of fewer than six they are these too, and miss it more often: of five in 6 %.
  """
  ordered, heads, tosses = sorted(values), 0, 2 ** len(values)
  least, chance = 0, 1
  while 40 * (heads + chance) <= tosses:
    heads, least = heads + chance, least + 1
    chance = math.comb(len(values), least)
  place = max(least - 1, 0)
  return ordered[place], ordered[-1 - place]


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
    return half_range(self.seconds) / self.median

  def as_json(self) -> dict[str, float | int | list[float]]:
    """Milliseconds, for a results file."""
    return {
      "ms": round(1e3 * self.median, 4),
      "spread": round(self.spread, 4),
      "calls": self.calls,
      "rounds_ms": [round(1e3 * s, 4) for s in self.seconds],
    }


def repeated(function: Callable[..., Any], *arguments: Any) -> Arm:
  """The arm that repeats a function on the same arguments."""

  def run(calls: int) -> None:
    result = None
    for _ in range(calls):
      result = function(*arguments)
    jax.block_until_ready(result)

  return run


def interleave(
  arms: Mapping[str, Arm],
  *,
  rounds: int,
  calls: int | Mapping[str, int],
  deadline: float = float("inf"),
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
  """Times arms in turns; in each round every arm makes its calls once.

  An arm's time depends on the arm before it: at its power limit, a GPU runs slower after harder
  work. So the order within a round is random, but the same in every run.

  Args:
    arms: arms by name.
    rounds: number of rounds.
    calls: calls per round, one number for all arms or one for each.
    deadline: time of `clock` after which no round begins; the first always runs.
    clock: gives seconds.
  """
  counts = calls if isinstance(calls, Mapping) else dict.fromkeys(arms, calls)
  seconds: dict[str, list[float]] = {name: [] for name in arms}
  names, order = list(arms), random.Random(0)
  for turn in range(rounds):
    if turn and clock() > deadline:
      break
    for name in order.sample(names, len(names)):
      start = clock()
      arms[name](counts[name])
      seconds[name].append((clock() - start) / counts[name])
  return {name: Timing(tuple(times), counts[name]) for name, times in seconds.items()}


def calls_in(arm: Arm, seconds: float, least: int = 3) -> int:
  """Number of calls that together take `seconds`, at least `least`.

  The host issues many calls while the device runs, so that its work per call is hidden.
  """
  arm(1)
  start = time.perf_counter()
  arm(1)
  return max(least, math.ceil(seconds / (time.perf_counter() - start)))


def alone(function: Callable[..., Any], *arguments: Any, rounds: int) -> Timing:
  """Times one function as `triton.testing.do_bench` does: 20 ms of warm-up, then 150 ms of calls,
  before each of which a buffer larger than the L2 cache is zeroed.

  The time of zeroing is subtracted: a second series of calls with two zeroings each measures it.
  do_bench records events around the call instead.

  Args:
    function: jitted function.
    *arguments: its arguments.
    rounds: number of such measurements, half a second apart.
  """
  flush = jax.jit(lambda: jnp.zeros((_FLUSH_BYTES // 4,), jnp.int32))
  jax.block_until_ready((function(*arguments), flush()))

  def seconds(calls: int, flushes: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
      zeros = [flush() for _ in range(flushes)]
      result = (zeros, function(*arguments))
    jax.block_until_ready(result)
    return time.perf_counter() - start

  once = seconds(5, 1) / 5
  calls, samples = max(1, math.ceil(0.15 / once)), []
  for _ in range(rounds):
    time.sleep(0.5)
    seconds(max(1, math.ceil(0.02 / once)), 1)
    samples.append((2 * seconds(calls, 1) - seconds(calls, 2)) / calls)
  return Timing(tuple(samples), calls)


def speed_up(baseline: Timing, arm: Timing) -> float:
  """Speed-up of `arm` over `baseline`: the median of the ratios of their times in each round."""
  return statistics.median(b / a for b, a in zip(baseline.seconds, arm.seconds))
