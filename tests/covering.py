"""Combinations of factors that cover every pair of their values, in place of the whole product.

Most faults of options need two of them to meet. Of three factors with 3, 2 and 2 values, 6 of the
12 combinations hold all 16 pairs.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def pairwise(
  *factors: Iterable[Any], fits: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
  """Combinations of two or more factors, such that each pair of two factors' values is in one.

  Each time it takes the combination with the most pairs that are missing, the first in the order
  of `itertools.product` among equals: the same call gives the same list.

  Args:
    *factors: the values of each factor.
    fits: whether a combination exists; a pair that occurs in none that does is not covered.
  """
  product = _product(factors, fits)
  missing = set().union(*map(_pairs, product))
  found = []
  while missing:
    best = max(product, key=lambda combination: len(missing & _pairs(combination)))
    missing -= _pairs(best)
    found.append(best)
  return found


def by_day_and_night(
  *factors: Iterable[Any], fits: Callable[..., bool] = lambda *_: True
) -> list[Any]:
  """The product as a test's parameters: `pairwise`'s in `make test`, the rest marked nightly."""
  by_day = pairwise(*factors, fits=fits)
  night = lambda combination: () if combination in by_day else (pytest.mark.nightly,)
  return [pytest.param(*c, marks=night(c)) for c in _product(factors, fits)]


def _product(factors: Iterable[Iterable[Any]], fits: Callable[..., bool]) -> list[tuple[Any, ...]]:
  return [c for c in itertools.product(*map(list, factors)) if fits(*c)]


def _pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
  """Each two values of a combination, with the numbers of their factors."""
  return set(itertools.combinations(enumerate(combination), 2))
