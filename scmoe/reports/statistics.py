"""Statistics of studies: paired tests, equivalence, several comparisons, curves of the loss.

Runs are paired: seed s of every variant has the same batches in the same order, so the difference
of two runs of one seed spreads less than the runs themselves. All functions compute in float64.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from scipy import optimize, special


@dataclasses.dataclass(frozen=True)
class PairedTest:
  """Student's t-test of paired differences against 0, two-sided.

  Attributes:
    count: pairs n.
    mean: mean of the differences.
    std: sample standard deviation (n - 1); None for one pair.
    low, high: confidence interval of the mean; None for one pair.
    p: probability of a mean at least as far from 0 if the true one is 0; None for one pair.
  """

  count: int
  mean: float
  std: float | None = None
  low: float | None = None
  high: float | None = None
  p: float | None = None


def t_tail(t: float, freedom: int) -> float:
  """P(T > t) of Student's t with `freedom` degrees of freedom."""
  return float(special.stdtr(freedom, -t))


def t_quantile(probability: float, freedom: int) -> float:
  """The t with P(T <= t) = probability."""
  return float(special.stdtrit(freedom, probability))


def paired_test(differences: Sequence[float], confidence: float = 0.95) -> PairedTest:
  """The t-test of n paired differences.

  Equal differences have no spread: p is then 0, or 1 where all of them are 0.

  Raises:
    ValueError: there are no differences, or one is not finite.
  """
  mean, std, error = _spread(differences)
  n = len(differences)
  if std is None:
    return PairedTest(n, mean)
  half = t_quantile(0.5 + confidence / 2, n - 1) * error
  p = min(1.0, 2 * t_tail(abs(mean) / error, n - 1)) if error else float(mean == 0)
  return PairedTest(n, mean, std, mean - half, mean + half, p)


def equivalence(differences: Sequence[float], margin: float) -> float | None:
  """p of two one-sided t-tests (TOST) that the mean lies strictly within -margin .. margin.

  The larger p of the tests against -margin and against +margin (Schuirmann 1987). A p below 0.05
  says the same as a 90 % confidence interval that lies within the margins.

  Args:
    differences: paired, n of them.
    margin: above 0, named before the runs.

  Returns:
    p; None for one pair.

  Raises:
    ValueError: the margin is not above 0, or see `paired_test`.
  """
  if not margin > 0:
    raise ValueError(f"the margin of an equivalence test is {margin}; use a number above 0")
  mean, std, error = _spread(differences)
  if std is None:
    return None
  if not error:
    return float(abs(mean) >= margin)
  freedom = len(differences) - 1
  return max(t_tail((mean + margin) / error, freedom), t_tail((margin - mean) / error, freedom))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
  """Holm's step-down adjustment of the p-values of one family of tests (Holm 1979).

  A None, a test that could not be made, stays None and counts as a member of the family, since the
  family was chosen before the runs.
  """
  size = len(p_values)
  known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
  adjusted: list[float | None] = [None] * size
  largest = 0.0
  for rank, (p, i) in enumerate(known):
    largest = max(largest, min(1.0, (size - rank) * p))
    adjusted[i] = largest
  return adjusted


def _spread(differences: Sequence[float]) -> tuple[float, float | None, float]:
  """Mean, sample deviation (None for one value), and standard error of the mean."""
  if not differences or not all(map(math.isfinite, differences)):
    raise ValueError(f"a test needs finite differences, got {list(differences)}")
  mean = statistics.fmean(differences)
  if len(differences) == 1:
    return mean, None, 0.0
  std = statistics.stdev(differences)
  return mean, std, std / math.sqrt(len(differences))


# --- curves of the loss ---------------------------------------------------------------------------


class Curve(Protocol):
  """The loss in nats per token as a function of the training tokens D."""

  def loss(self, tokens: float) -> float:
    """L(D)."""
    ...

  def tokens(self, loss: float) -> float:
    """D with L(D) = loss; infinite for a loss that the curve never reaches."""
    ...


@dataclasses.dataclass(frozen=True)
class LossCurve:
  """L(D) = floor + scale · D^-exponent: the loss in nats per token after D training tokens."""

  floor: float
  scale: float
  exponent: float

  def loss(self, tokens: float) -> float:
    """L(D)."""
    return self.floor + self.scale * tokens**-self.exponent

  def tokens(self, loss: float) -> float:
    """D with L(D) = loss; infinite for a loss that the curve never reaches."""
    if loss <= self.floor or not self.scale:
      return math.inf
    return (self.scale / (loss - self.floor)) ** (1 / self.exponent)


@dataclasses.dataclass(frozen=True)
class JoinedCurve:
  """Measured losses, joined by straight lines over the logarithm of D.

  It assumes no law. Outside the points, the first or last straight line is extended.

  Attributes:
    points: (tokens, loss), at least two, by tokens; the losses fall or stay.
  """

  points: tuple[tuple[float, float], ...]

  def loss(self, tokens: float) -> float:
    """L(D)."""
    later = bisect.bisect_left(self.points, tokens, key=lambda point: point[0])
    (d, loss), (next_d, lower) = self._line(later)
    return loss + (lower - loss) * math.log(tokens / d) / math.log(next_d / d)

  def tokens(self, loss: float) -> float:
    """The least D at which the curve is at `loss` or below.

    Infinite if the last two losses are equal and `loss` lies below them, or if D is too large for a
    float; 0 if the first two are equal and `loss` lies above them.
    """
    lower = bisect.bisect_left(self.points, -loss, key=lambda point: -point[1])
    (d, high), (next_d, low) = self._line(lower)
    if loss == high:
      return d
    if high == low:
      return math.inf if loss < low else 0.0
    steps = (high - loss) / (high - low)
    exponent = math.log(d) + math.log(next_d / d) * steps
    return math.exp(exponent) if exponent < _MOST_EXPONENT else math.inf

  def _line(self, right: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two points whose line holds at a place; `right`: index of the first point behind it."""
    right = min(max(right, 1), len(self.points) - 1)
    return self.points[right - 1], self.points[right]


_MOST_EXPONENT = 700.0  # math.exp of it is still a float


def join_means(tokens: Sequence[float], losses: Sequence[float]) -> JoinedCurve:
  """The mean losses of each number of tokens, joined; one above the mean before it counts as equal.

  Raises:
    ValueError: fewer than two different numbers of tokens.
  """
  at: dict[float, list[float]] = {}
  for d, loss in zip(tokens, losses):
    at.setdefault(float(d), []).append(float(loss))
  if len(at) < 2:
    raise ValueError(f"a curve needs losses at two numbers of tokens, got {list(tokens)}")
  falling = np.minimum.accumulate([statistics.fmean(at[d]) for d in sorted(at)])
  return JoinedCurve(tuple(zip(sorted(at), map(float, falling))))


_EXPONENTS = np.geomspace(0.01, 2.0, 81)


def fit_curve(tokens: Sequence[float], losses: Sequence[float]) -> LossCurve:
  """The least-squares `LossCurve`, with floor and scale at least 0 and 0.01 <= exponent <= 2.

  The points are best the ends of separate runs, each with its own decay of the learning rate: a
  point along one run belongs to another state of its schedule. In the study effective_speedup such
  points lie below the ends of shorter runs.

  Raises:
    ValueError: fewer than three different numbers of tokens, or other than positive finite numbers.
  """
  d, loss = np.asarray(tokens, float), np.asarray(losses, float)
  fit = np.isfinite(d).all() and np.isfinite(loss).all() and (d > 0).all()
  if d.shape != loss.shape or len(set(tokens)) < 3 or not fit:
    raise ValueError(f"a curve needs losses at three numbers of tokens, got {list(tokens)}")
  middle = float(np.exp(np.log(d).mean()))  # keeps D^-exponent near 1 for every exponent

  def solved(exponent: float) -> tuple[float, np.ndarray]:
    columns = np.stack([np.ones_like(d), (d / middle) ** -exponent], axis=1)
    best, residual = optimize.nnls(columns, loss)
    return residual, best

  near = int(np.argmin(_misfits(d / middle, loss)))
  low, high = _EXPONENTS[max(near - 1, 0)], _EXPONENTS[min(near + 1, len(_EXPONENTS) - 1)]
  found = optimize.minimize_scalar(lambda a: solved(a)[0], bounds=(low, high), method="bounded",
                                   options={"xatol": 1e-9})  # fmt: skip
  exponent = float(found.x)  # pyright: ignore[reportAttributeAccessIssue]
  floor, scale = solved(exponent)[1]
  return LossCurve(float(floor), float(scale) * middle**exponent, exponent)


def _misfits(d: np.ndarray, loss: np.ndarray) -> np.ndarray:
  """Sum of squares that the best floor and scale, at least 0, leave for each of `_EXPONENTS`.

  A pair of numbers at least 0 is best without a bound, or where one of the two is 0.
  """
  x = d ** -_EXPONENTS[:, None]
  flat = ((loss - max(loss.mean(), 0.0)) ** 2).sum()  # no scale
  slopes = x @ loss / (x * x).sum(1)  # no floor
  without = ((loss - slopes[:, None] * x) ** 2).sum(1)
  spread = x - x.mean(1, keepdims=True)
  scale = spread @ loss / (spread * spread).sum(1)
  floor = loss.mean() - scale * x.mean(1)
  both = ((loss - floor[:, None] - scale[:, None] * x) ** 2).sum(1)
  inside = (floor >= 0) & (scale >= 0)
  return np.where(inside, both, np.minimum(flat, without))


# Seed -> loss, for each number of training tokens.
Budgets = Mapping[float, Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class Curves:
  """A curve of all runs of a baseline, and curves of resampled ones.

  The spread of `resampled` is the uncertainty that the choice of seeds leaves. That the form of the
  curve is wrong is not in it.
  """

  best: Curve
  resampled: Sequence[Curve]


def curves_of(
  budgets: Budgets,
  fit: Callable[[Sequence[float], Sequence[float]], Curve],
  *,
  draws: int = 2000,
  seed: int = 0,
) -> Curves:
  """The curve of a baseline, and `draws` of them with the seeds of each number of tokens resampled.

  Args:
    budgets: losses of the baseline.
    fit: makes a curve from tokens and losses: `fit_curve` or `join_means`.
    draws, seed: of the resampling.

  Raises:
    ValueError: as `fit`.
  """
  rng = np.random.default_rng(seed)
  tokens = [d for d, found in budgets.items() for _ in found]
  losses = [[*found.values()] for found in budgets.values()]
  again = lambda: [loss for own in losses for loss in rng.choice(own, len(own))]
  best = fit(tokens, [loss for own in losses for loss in own])
  return Curves(best, [fit(tokens, again()) for _ in range(draws)])


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A value with a 95 % interval."""

  value: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Speedup:
  """A variant's effective speed-up: a ratio of training data times a ratio of throughputs.

  Attributes:
    data: Sc, the data that the baseline needs for the variant's loss, over the variant's.
    throughput: tokens per second of the variant over the baseline's.
    effective: Sw = Sc · throughput.
  """

  data: Estimate
  throughput: Estimate
  effective: Estimate


# Few pairs make Student's t wide: with fewer draws an interval's ends would depend on the seed.
_DRAWS = 10


def effective_speedup(
  curves: Curves,
  differences: Sequence[float],
  tokens: float,
  throughputs: Sequence[float],
  *,
  seed: int = 0,
) -> Speedup:
  """Sc, the ratio of throughputs, and Sw, with intervals.

  Sc = curve.tokens(curve.loss(D) + mean difference) / D. For each curve of `curves.resampled`,
  `_DRAWS` times, a mean difference is drawn from Student's t around the measured one, and a ratio
  of throughputs from those measured; the interval is that of these draws from 2.5 to 97.5 %.

  Args:
    curves: of the baseline (`curves_of`).
    differences: loss of the variant less that of the baseline, paired by seed, after D tokens.
    tokens: D.
    throughputs: ratios of throughput, one a measured round; one alone counts as exact.
    seed: of the draws, which are independent of those of `curves_of` with the same seed.

  Raises:
    ValueError: fewer than two differences, or no throughput.
  """
  test = paired_test(differences)
  if test.std is None or not throughputs:
    raise ValueError("an interval needs two paired differences and a throughput")
  saved = lambda curve, change: curve.tokens(curve.loss(tokens) + change) / tokens
  rng, resampled = np.random.default_rng((seed, 1)), [*curves.resampled] * _DRAWS
  draws = len(resampled)
  error = test.std / math.sqrt(test.count)
  changes = test.mean + error * rng.standard_t(test.count - 1, draws)
  data = np.array([saved(c, float(x)) for c, x in zip(resampled, changes)])
  speed = rng.choice(np.asarray(throughputs, float), (draws, len(throughputs))).mean(axis=1)
  best, ratio = saved(curves.best, test.mean), statistics.fmean(throughputs)
  return Speedup(
    _estimate(best, data), _estimate(ratio, speed), _estimate(best * ratio, data * speed)
  )


def _estimate(value: float, draws: np.ndarray) -> Estimate:
  """The interval from 2.5 to 97.5 %, by draws that may be infinite."""
  ordered = np.sort(draws)
  at = lambda share: float(ordered[round(share * (len(ordered) - 1))])
  return Estimate(float(value), at(0.025), at(0.975))
