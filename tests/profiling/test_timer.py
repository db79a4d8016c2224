"""Arms take turns, medians, and ratios of the same round."""

from scmoe.profiling.timer import Timing, interleave, speed_up


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


def test_arms_take_turns_and_the_first_one_changes():
  clock = Clock()
  arms = {"a": clock.arm("a", 2.0), "b": clock.arm("b", 1.0)}
  timings = interleave(arms, rounds=3, calls=4, clock=clock)
  assert clock.order == ["a", "b", "b", "a", "a", "b"]
  assert timings["a"] == Timing((2.0, 2.0, 2.0), 4)
  assert speed_up(timings["a"], timings["b"]) == 2


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
