"""Statistics of studies against published tables, worked examples and simulated truth."""

import math

import numpy as np
import pytest

from scmoe.reports.statistics import (
  LossCurve,
  PairedTest,
  curves_of,
  effective_speedup,
  equivalence,
  fit_curve,
  holm,
  join_means,
  paired_test,
  t_quantile,
  t_tail,
)


@pytest.mark.parametrize(
  ("probability", "freedom", "t"),
  # Printed tables of Student's t, three decimals.
  [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.95, 4, 2.132), (0.995, 9, 3.250)],
)
def test_quantiles_are_those_of_the_tables(probability, freedom, t):
  assert t_quantile(probability, freedom) == pytest.approx(t, abs=5e-4)
  assert t_tail(t_quantile(probability, freedom), freedom) == pytest.approx(1 - probability)


def test_tails_in_closed_form():
  """One degree of freedom is the Cauchy distribution, two have an algebraic form."""
  for t in (0.0, 0.3, 1.7, -2.5):
    assert t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi)
    assert t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))


def test_paired_test_is_students_sleep_data():
  """Student's own example (1908): ten patients, mean difference 1.58, t = 4.062, p = 0.00283."""
  differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
  found = paired_test(differences)
  assert found.mean == pytest.approx(1.58)
  assert found.std == pytest.approx(1.2299, abs=1e-4)
  assert found.p == pytest.approx(0.002833, abs=1e-6)
  assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)


def test_few_or_equal_differences():
  assert paired_test([0.5]) == PairedTest(1, 0.5)
  assert equivalence([0.0], 0.1) is None
  assert paired_test([0.0, 0.0]).p == 1
  assert paired_test([0.25, 0.25]).p == 0
  assert (equivalence([0.05, 0.05], 0.1), equivalence([0.1, 0.1], 0.1)) == (0, 1)
  for wrong in ([], [0.1, math.nan]):
    with pytest.raises(ValueError, match="finite differences"):
      paired_test(wrong)
  with pytest.raises(ValueError, match="above 0"):
    equivalence([0.1, 0.2], 0)


def test_equivalence_agrees_with_the_90_percent_interval():
  rng, agreed = np.random.default_rng(0), 0
  for _ in range(200):
    differences = list(rng.normal(0.004, 0.006, 5))
    inside = paired_test(differences, 0.9)
    assert inside.low is not None
    assert inside.high is not None
    within = max(abs(inside.low), abs(inside.high)) < 0.01
    assert (equivalence(differences, 0.01) < 0.05) == within
    agreed += within
  assert 20 < agreed < 180  # both answers were seen


def test_tests_are_wrong_as_often_as_they_say():
  """Under the null hypothesis 5 % of the p-values lie below 0.05, and 5 % of intervals miss."""
  rng = np.random.default_rng(1)
  found = [paired_test(list(rng.normal(0, 1, 5))) for _ in range(4000)]
  wrong = np.mean([test.p < 0.05 for test in found])
  assert abs(wrong - 0.05) < 0.012  # 3.5 standard errors
  assert wrong == np.mean([not test.low < 0 < test.high for test in found])
  border = [equivalence(list(rng.normal(0.01, 0.001, 5)), 0.01) for _ in range(4000)]
  assert abs(np.mean([p < 0.05 for p in border]) - 0.05) < 0.012


def test_holm():
  """The example of Holm's procedure for p = 0.01, 0.04, 0.03, 0.005 in any order."""
  assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
  assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
  assert holm([0.02, None, 0.03]) == [pytest.approx(0.06), None, pytest.approx(0.06)]
  assert holm([]) == []


@pytest.mark.parametrize("truth", [LossCurve(1.7, 400.0, 0.34), LossCurve(0.0, 12.0, 0.08)])
def test_a_curve_is_found_again(truth):
  tokens = [1e6, 2e6, 4e6, 1e7, 4e7, 1e8]
  found = fit_curve(tokens, [truth.loss(d) for d in tokens])
  assert found.exponent == pytest.approx(truth.exponent, abs=2e-4)
  assert found.floor == pytest.approx(truth.floor, abs=6e-3)
  for d in (2e6, 5e7):
    assert found.loss(d) == pytest.approx(truth.loss(d), abs=1e-5)
    assert truth.tokens(truth.loss(d)) == pytest.approx(d)
  assert truth.tokens(truth.floor) == math.inf
  with pytest.raises(ValueError, match="three numbers of tokens"):
    fit_curve([1e6, 2e6, 2e6], [3.0, 2.9, 2.9])


def test_intervals_of_curve_and_speedup_hold_the_truth():
  """Simulated studies of a known truth: Sc and Sw lie in their intervals about as often as said."""
  rng, curve, d = np.random.default_rng(2), LossCurve(1.5, 300.0, 0.3), 1e8
  change, ratio, std = -0.02, 1.2, 0.004
  truth = curve.tokens(curve.loss(d) + change) / d
  held = {"data": 0, "effective": 0}
  for number in range(40):
    budgets = {
      x: {s: curve.loss(x) + std * rng.normal() for s in range(5)} for x in (1e7, 3e7, 1e8, 3e8)
    }
    differences = [change + std * rng.normal() for _ in range(5)]
    rounds = [ratio + 0.005 * rng.normal() for _ in range(7)]
    curves = curves_of(budgets, fit_curve, draws=60, seed=number)
    found = effective_speedup(curves, differences, d, rounds, seed=100 + number)
    assert found.data.low <= found.data.value <= found.data.high
    held["data"] += found.data.low <= truth <= found.data.high
    held["effective"] += found.effective.low <= truth * ratio <= found.effective.high
  assert all(count >= 31 for count in held.values()), held  # 40 · 0.95 less three deviations, less
  # what percentiles of 60 draws fall short
  assert len({c.tokens(1.9) for c in curves.resampled}) == 60


def test_a_loss_below_the_floor_saves_without_bound():
  budgets = {x: dict.fromkeys(range(2), 2.0 + 10 / x) for x in (1e2, 1e3, 1e4)}
  curves = curves_of(budgets, fit_curve, draws=5)
  found = effective_speedup(curves, [-1.0, -1.0], 1e4, [1.0])
  assert found.data.value == math.inf
  with pytest.raises(ValueError, match="two paired differences"):
    effective_speedup(curves, [-1.0], 1e4, [1.0])


@pytest.mark.parametrize("truth", [LossCurve(1.5, 300.0, 0.3), LossCurve(0.0, 40.0, 0.2)])
def test_a_joined_curve_goes_through_its_points(truth):
  tokens = [1e6, 2e6, 4e6, 8e6]
  found = join_means([*tokens, 2e6], [*map(truth.loss, tokens), truth.loss(2e6) + 0.02])
  for d, more in zip(tokens, (0, 0.01, 0, 0)):
    assert found.loss(d) == pytest.approx(truth.loss(d) + more)
    assert found.tokens(truth.loss(d) + more) == pytest.approx(d)
  # Between two points it is a straight line over log D, and it goes on beyond the last.
  assert found.loss(math.sqrt(32) * 1e6) == pytest.approx(truth.loss(4e6) / 2 + truth.loss(8e6) / 2)
  assert found.loss(16e6) == pytest.approx(2 * truth.loss(8e6) - truth.loss(4e6))
  assert found.tokens(found.loss(16e6)) == pytest.approx(16e6)
  assert found.tokens(found.loss(5e5)) == pytest.approx(5e5)


def test_a_joined_curve_never_rises():
  found = join_means([1.0, 10.0, 100.0], [3.0, 2.0, 2.5])
  assert found.points == ((1.0, 3.0), (10.0, 2.0), (100.0, 2.0))
  assert found.tokens(2.5) == pytest.approx(math.sqrt(10))
  with pytest.raises(ValueError, match="two numbers of tokens"):
    join_means([1.0, 1.0], [3.0, 2.0])


@pytest.mark.parametrize(
  ("losses", "loss", "tokens"),
  [([3, 2, 2, 1], 2.0, 10), ([3, 2, 2, 1], 1.5, 100 * math.sqrt(10)), ([3, 2, 1, 1], 1.0, 100),
   ([3, 2, 1, 1], 0.9, math.inf), ([3, 3, 2, 1], 3.0, 1), ([3, 3, 2, 1], 3.5, 0),
   ([3, 2.5, 2.4999, 2.4998], -1.0, math.inf)],
)  # fmt: skip
def test_tokens_of_a_level_stretch_are_the_least_that_reach_the_loss(losses, loss, tokens):
  found = join_means([1.0, 10.0, 100.0, 1000.0], losses)
  assert found.tokens(loss) == pytest.approx(tokens)


def test_losses_of_no_law_are_worth_what_the_points_say():
  """Losses that fall faster and faster: the fitted law misses them, the joined curve does not."""
  budgets = {1e6 * 2**n: dict.fromkeys(range(3), 5.0 - 0.1 * n**2) for n in range(5)}
  worse = [0.05, 0.05]  # a tenth of what the last doubling before 8e6 tokens brings, 4.6 to 4.1
  curves = lambda fit: curves_of(budgets, fit, draws=20)
  joined = effective_speedup(curves(join_means), worse, 8e6, [1.0])
  assert joined.data.value == pytest.approx(2**-0.1)
  fitted = effective_speedup(curves(fit_curve), worse, 8e6, [1.0])
  assert fitted.data.value < joined.data.value - 0.02
