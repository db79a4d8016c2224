"""Fewer combinations than the product, and in them every pair, or every value."""

import itertools
import math

import pytest
from covering import by_day_and_night, each_value, pairs_by_day_and_night, pairwise


@pytest.mark.parametrize(
  ("sizes", "most"),
  [((2, 2), 4), ((2, 2, 2), 4), ((3, 2, 2), 6), ((4, 3, 2, 2), 12), ((13, 3, 2), 39)],
)
def test_every_pair_is_in_a_combination(sizes, most):
  factors = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes)]
  found = pairwise(*factors)
  for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
    assert {(c[i], c[j]) for c in found} == set(itertools.product(first, second))
  assert len(set(found)) == len(found) <= most <= math.prod(sizes)
  assert set(found) <= set(itertools.product(*factors))
  assert pairwise(*factors) == found


def test_two_factors_are_their_product():
  assert pairwise("ab", "c") == [("a", "c"), ("b", "c")]
  assert pairwise("ab", "") == []


def test_pairs_that_do_not_exist_are_left_out():
  fits = lambda a, b, c: (a, b) != (1, 1)
  found = pairwise((0, 1), (0, 1), (0, 1), fits=fits)
  assert all(fits(*combination) for combination in found)
  assert {c[:2] for c in found} == {(0, 0), (0, 1), (1, 0)}
  assert {c[1:] for c in found} == {(c[0], c[2]) for c in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (5, 2, 2, 2), (4, 1)])
def test_every_value_is_in_a_combination_of_as_few_as_can_be(sizes):
  factors = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes)]
  found = each_value(*factors)
  assert [set(values) for values in zip(*found)] == [set(factor) for factor in factors]
  assert len(found) == max(sizes)


def test_a_factor_of_many_values_meets_the_others_values():
  found = each_value(range(4), "xy", "ab")
  assert {c[1:] for c in found} == set(itertools.product("xy", "ab"))


def test_the_night_runs_what_the_day_leaves():
  factors = (0, 1), (0, 1), (0, 1)
  all_of_them = by_day_and_night(*factors)
  assert [p.values for p in all_of_them] == list(itertools.product(*factors))
  assert [p.values for p in all_of_them if not p.marks] == sorted(each_value(*factors))
  assert {mark.name for p in all_of_them for mark in p.marks} == {"nightly"}


def test_the_night_may_leave_it_at_pairs():
  factors = (0, 1, 2), (0, 1), (0, 1)
  both = pairs_by_day_and_night(*factors)
  assert [p.values for p in both if not p.marks] == each_value(*factors)
  assert {p.values for p in both} == {*pairwise(*factors), *each_value(*factors)}
