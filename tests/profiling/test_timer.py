"""Arms take turns, medians, and ratios of the same round."""

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.profiling.timer import (
  Timing,
  alone,
  around_median,
  calls_in,
  interleave,
  repeated,
  speed_up,
)


class Clock:
  """Advances only when an arm runs."""

  def __init__(self):
    self.now, self.order = 0.0, []

  def arm(self, name, seconds):
    def run(calls):
      self.order.append(name)
      self.now += calls * seconds

    return run

  def __call__(self):
    return self.now


def test_arms_take_turns_in_changing_order():
  clock = Clock()
  arms = {"a": clock.arm("a", 2.0), "b": clock.arm("b", 1.0)}
  timings = interleave(arms, rounds=8, calls={"a": 4, "b": 2}, clock=clock)
  turns = [tuple(clock.order[i : i + 2]) for i in range(0, 16, 2)]
  assert set(turns) == {("a", "b"), ("b", "a")}
  assert timings == {"a": Timing((2.0,) * 8, 4), "b": Timing((1.0,) * 8, 2)}
  assert speed_up(timings["a"], timings["b"]) == 2


def test_a_function_alone_is_timed_without_what_empties_the_cache():
  function = jax.jit(lambda x: x @ x)
  timing = alone(function, jnp.ones((256, 256)), rounds=2)
  assert len(timing.seconds) == 2
  assert timing.calls >= 1
  assert calls_in(repeated(function, jnp.ones((8, 8))), seconds=0.0) == 3


def test_after_the_deadline_no_round_begins_but_every_arm_has_one():
  clock = Clock()
  arms = {"a": clock.arm("a", 2.0), "b": clock.arm("b", 1.0)}
  timings = interleave(arms, rounds=9, calls=1, deadline=1.0, clock=clock)
  assert [len(t.seconds) for t in timings.values()] == [1, 1]


def test_median_and_spread():
  timing = Timing((1.0, 9.0, 2.0, 3.0, 2.0), 1)
  assert timing.median == 2
  assert timing.spread == 0.25  # quartiles 2 and 3
  assert Timing((1.0, 2.0), 1).spread == 0
  assert timing.as_json()["ms"] == 2000


def test_a_ratio_is_taken_within_a_round():
  # The machine slowed down by half in round 2: the ratio does not see it.
  assert speed_up(Timing((2.0, 4.0, 2.0), 1), Timing((1.0, 2.0, 1.0), 1)) == 2


def test_the_median_of_a_distribution_lies_around_that_of_its_sample():
  """The places are those of the tables of order statistics; skewed times are covered, too."""
  places = {n: around_median(range(1, n + 1)) for n in (1, 3, 5, 6, 9, 20, 60)}
  assert places == {
    1: (1, 1), 3: (1, 3), 5: (1, 5), 6: (1, 6), 9: (2, 8), 20: (6, 15), 60: (22, 39),
  }  # fmt: skip
  low, high = around_median(range(1, 2001))
  assert (low, high) == (956, 1045), "more tosses than a float can count"
  rng = np.random.default_rng(0)
  ends = np.array([around_median(rng.exponential(size=9)) for _ in range(4000)])
  covered = ((ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1])).mean()
  assert 0.95 <= covered <= 0.97  # 1 - 2 * 10 / 512 = 0.961
