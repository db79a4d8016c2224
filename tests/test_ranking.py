"""experiments/exchange_cost/ranking.py: how a cut's ranking is compared with the whole step's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from scripts import script

from scmoe.profiling.timer import Timing


@pytest.fixture(scope="module")
def tool() -> Any:
  return script("exchange_cost/ranking.py")


def timings(widths: float, **medians: float) -> dict[str, Timing]:
  """Rounds with these medians and this spread."""
  of = lambda m: Timing((m - 2 * widths, m, m + 2 * widths), 1)
  return {name: of(median) for name, median in medians.items()}


def test_tau_counts_pairs_that_both_rank_alike(tool):
  """By hand: of a < b < c < d the other ranking turns only b and c round, one of six pairs."""
  whole = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
  pairs = list(itertools.combinations(whole, 2))
  turned = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 4.0}
  assert tool.tau(whole, whole, pairs) == 1
  assert tool.tau(turned, whole, pairs) == pytest.approx((5 - 1) / 6)
  assert tool.tau({name: -time for name, time in whole.items()}, whole, pairs) == -1
  assert math.isnan(tool.tau(whole, whole, []))


def test_only_differences_beyond_the_spread_are_decided_and_chosen(tool):
  wide, narrow = timings(0.6, a=10.0, b=9.0, c=7.0), timings(0.1, a=10.0, b=9.0, c=7.0)
  decided = [p for p in itertools.combinations("abc", 2) if tool.apart(wide, p)]
  assert decided == [("a", "c"), ("b", "c")]
  assert tool.apart(narrow, ("b", "a"))
  assert tool.choice({n: wide[n] for n in "ab"}) == "a", "the earlier one stays"
  assert tool.choice({n: narrow[n] for n in "ab"}) == "b"
  assert tool.choice(wide) == "c"


def test_regret_is_what_the_choice_on_a_cut_costs(tool):
  """The cut chooses b, whose whole step takes 9 s; c's takes 7."""
  whole, cut = timings(0.1, a=10.0, b=9.0, c=7.0), timings(0.1, a=5.0, b=4.0, c=4.5)
  found = tool.compared(whole, cut)
  assert found["chosen"] == {"cut": "b", "whole": "c"}
  assert found["regret"] == pytest.approx(9 / 7 - 1)
  assert (found["pairs"], found["decided"]) == (3, 3)
  assert found["tau"] == found["tau_decided"] == pytest.approx(1 / 3)


def test_the_candidates_differ_and_the_first_is_as_configured(tool):
  variants = list(tool.CANDIDATES.values())
  assert len(set(variants)) == len(variants) >= 6
  assert not variants[0].given
