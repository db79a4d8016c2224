"""Combinations of factors that cover every pair of their values, in place of the whole product.

Most faults of options need two of them to meet. Of three factors with 3, 2 and 2 values, 6 of the
12 combinations hold all 16 pairs.
"""

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
  """Combinations of two or more factors, such that each pair of two factors' values is in one.

  Each time it takes the combination with the most pairs that are missing, the first in the order
  of `itertools.product` among equals: the same call gives the same list.
  """
  product = list(itertools.product(*map(list, factors)))
  missing = set().union(*map(_pairs, product))
  found = []
  while missing:
    best = max(product, key=lambda combination: len(missing & _pairs(combination)))
    missing -= _pairs(best)
    found.append(best)
  return found


def _pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
  """Each two values of a combination, with the numbers of their factors."""
  return set(itertools.combinations(enumerate(combination), 2))
