"""Fewer combinations than the product, and in them every pair."""

import itertools
import math

import pytest
from covering import pairwise


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
