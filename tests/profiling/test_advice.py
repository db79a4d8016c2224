"""The advice names the exposed exchange, the figures behind it and the option to change."""

import pytest

from scmoe.profiling.advice import advice
from scmoe.profiling.overlap import StageTime


def stages(dispatch_hidden, *, window=20.0, combine_hidden=10.0):
  return [
    StageTime("attention", "forward", window / 2, 0, 0),
    StageTime("mlp", "forward", window / 2, 0, 0),
    StageTime("mlp", "backward", 90.0, 0, 0),
    StageTime("dispatch", "forward", 1.0, 10.0, dispatch_hidden),
    StageTime("combine", "forward", 1.0, 10.0, combine_hidden),
    StageTime("gradients", "backward", 0.0, 20.0, 18.5),
  ]


def test_nothing_is_said_where_everything_is_hidden():
  assert advice(stages(9.5), 100, shortcut=True) == []


def test_a_little_bare_time_is_not_worth_a_word():
  assert advice(stages(2.0), 10_000, shortcut=True) == []


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ({"shortcut": False}, "model.wiring=scmoe_pos2"),
    (
      {"shortcut": True, "window_share": 0.75},
      "take 20.0 ms, but the dense computation that can run",
    ),
    ({"shortcut": True, "window_share": 0.5, "capacity_factor": 2.0}, "transport=packed"),
    ({"shortcut": True, "window_share": 1.0}, "overlap.order=barriers"),
  ],
)
def test_why_an_exchange_is_exposed(given, words):
  (line,) = advice(stages(1.0, window=21.0), 100, **given)
  assert line.startswith("dispatch forward is exposed for 9.0 of its 10.0 ms: ")
  assert words in line


def test_the_worst_comes_first_and_gradients_have_their_own_reason():
  own = [StageTime("gradients", "backward", 0, 20, 5), *stages(5.0)[:-1]]
  first, second = advice(own, 100, shortcut=True)
  assert first.startswith("gradients backward is exposed for 15.0 of its 20.0 ms")
  assert "overlap.gradient_dtype=bfloat16" in first
  assert second.startswith("dispatch forward")
