"""Seconds per step: of whole steps only."""

import math

from scmoe.training import meters
from scmoe.training.meters import Meter


def test_only_times_between_a_dispatch_and_its_results_are_steps(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(meters.time, "perf_counter", lambda: now[0])
  meter = Meter()

  def step(at, *, reads=True):
    now[0] = at
    meter.begin()
    if reads:
      meter.tick()

  step(5.0, reads=False)  # the first dispatch compiles; nothing is pending
  step(6.0)  # results of step 1
  assert math.isnan(meter.take())
  step(7.0)
  step(8.0)
  now[0] = 8.1  # the loop ends: results of the last step, without another dispatch
  meter.tick()
  assert meter.take() == 1.0
  assert meter.take() == 1.0  # no step was timed since
  meter.pause()  # evaluation
  step(20.0)
  step(22.0)
  assert meter.take() == 2.0
