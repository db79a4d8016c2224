"""Comparing benchmark figures with those that are committed."""

import json

from scripts import EXPERIMENTS, script

check = script("bench_check/run.py")


def test_times_are_found_in_what_the_benchmarks_write():
  layer = {"layer": [{"name": "7B", "forward": {"ms": 1.5, "spread": 0.01}, "errors": {"y": 1}}]}
  assert dict(check.times(layer)) == {"layer 7B forward": (1.5, 0.01)}
  step = {"arms": {"top2": {"step_ms": 20, "ms": 3}}}
  assert dict(check.times(step)) == {"arms top2": (20.0, check.UNKNOWN)}
  for name in ("dispatch/results/results.json", "kernels/h200-layer-2026-11-21.json"):
    found = dict(check.times(json.loads((EXPERIMENTS / name).read_text())))
    assert len(found) > 5, name


def test_what_is_slower_by_more_than_the_spread_is_named():
  before = {"a": [10, 0.02], "b": [10, 0.02], "c": [10, 0.0], "gone": [1, 0]}
  now = {"a": [10.3, 0.02], "b": [10.5, 0.02], "c": [9.0, 0.0], "new": [1, 0]}
  lines, slower = check.compare(before, now)
  assert slower == ["b"], "3 % is within 2 % + 2 %, 5 % is not"
  text = "\n".join(lines)
  assert "SLOWER" in text
  assert "faster" in text
  assert "not measured now" in text
  assert check.compare({"c": [10, 0]}, {"c": [10.05, 0]})[1] == [], "under 1 % is noise"
