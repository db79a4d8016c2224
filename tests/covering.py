"""Which combinations of factors a test runs by day (`make test`), and which by night.

Most faults of options need two of them to meet. Of three factors with 3, 2 and 2 values, 6 of the
12 combinations hold all 16 pairs, and 3 hold each value. The tests' time is compilation: where a
combination takes seconds, the day runs each value once, and the night the rest of the product.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Fits = Callable[..., bool]


def night(*values: Any) -> Any:
  """A test's parameters that `make test` leaves to the night."""
  return pytest.param(*values, marks=pytest.mark.nightly)


def pairwise(*factors: Iterable[Any], fits: Fits = lambda *_: True) -> list[tuple[Any, ...]]:
  """Combinations of two or more factors, such that each pair of two factors' values is in one.

  Each time it takes the combination with the most pairs that are missing, the first in the order
  of `itertools.product` among equals: the same call gives the same list.

  Args:
    *factors: the values of each factor.
    fits: whether a combination exists; a pair that occurs in none that does is not covered.
  """
  return _covering(_product(factors, fits), size=2)


def each_value(*factors: Iterable[Any], fits: Fits = lambda *_: True) -> list[tuple[Any, ...]]:
  """Combinations such that each value of each factor is in one; the arguments of `pairwise`.

  Among combinations with equally many values that are missing it takes one with the most pairs
  that are, so that the others' values meet in as many ways as there are combinations for.
  """
  return _covering(_product(factors, fits), size=1)


def by_day_and_night(*factors: Iterable[Any], fits: Fits = lambda *_: True) -> list[Any]:
  """The product as a test's parameters: `each_value`'s in `make test`, the rest marked nightly."""
  by_day = each_value(*factors, fits=fits)
  return [pytest.param(*c) if c in by_day else night(*c) for c in _product(factors, fits)]


def pairs_by_day_and_night(*factors: Iterable[Any], fits: Fits = lambda *_: True) -> list[Any]:
  """`pairwise` as a test's parameters: `each_value`'s in `make test`, the rest marked nightly."""
  by_day, pairs = each_value(*factors, fits=fits), pairwise(*factors, fits=fits)
  return [pytest.param(*c) for c in by_day] + [night(*c) for c in pairs if c not in by_day]


def _covering(product: list[tuple[Any, ...]], size: int) -> list[tuple[Any, ...]]:
  """Combinations of the product that hold all tuples of `size` values that occur in it."""
  missing = {n: set().union(*(_tuples(c, n) for c in product)) for n in (size, 2)}
  found = []
  while missing[size]:
    gain = lambda c: [len(missing[n] & _tuples(c, n)) for n in (size, 2)]
    best = max(product, key=gain)
    for n in missing:
      missing[n] -= _tuples(best, n)
    found.append(best)
  return found


def _product(factors: Iterable[Iterable[Any]], fits: Fits) -> list[tuple[Any, ...]]:
  return [c for c in itertools.product(*map(list, factors)) if fits(*c)]


def _tuples(combination: tuple[Any, ...], size: int) -> set[tuple[tuple[int, Any], ...]]:
  """Each `size` values of a combination, with the numbers of their factors."""
  return set(itertools.combinations(enumerate(combination), size))
