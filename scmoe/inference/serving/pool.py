"""Which pages of a pool are free, and which widths programs are compiled for."""

from __future__ import annotations


class FreePages:
  """The free pages of one part's pool; the page that was freed last is taken first.

  Args:
    count: pages of the pool.
  """

  def __init__(self, count: int):
    self._free = list(range(count - 1, -1, -1))
    self.count = count

  def __len__(self) -> int:
    return len(self._free)

  def take(self, count: int) -> list[int] | None:
    """So many pages, which are then no longer free; None, and none is taken, if there are fewer."""
    if count > len(self._free):
      return None
    return [self._free.pop() for _ in range(count)]

  def free(self, pages: list[int]) -> None:
    """Gives pages back, and empties the list."""
    self._free += reversed(pages)
    pages.clear()


def widths(most: int, steps: int, factor: int, least: int = 1) -> list[int]:
  """`most` and up to `steps` - 1 smaller numbers, each the next one over `factor`, ascending.

  Each program is compiled for each of these numbers of pages or tokens, so that there are few.

  >>> widths(16, 3, 2)
  [4, 8, 16]
  >>> widths(256, 2, 4, 16)
  [64, 256]

  Args:
    most: the largest number.
    steps: how many numbers at most.
    factor: quotient of neighbours.
    least: the smallest number, if `most` is not smaller.
  """
  found = [most]
  while len(found) < steps and -(-found[0] // factor) >= least and found[0] > 1:
    found.insert(0, -(-found[0] // factor))
  return found


def smallest(among: list[int], needed: int) -> int:
  """The smallest of ascending numbers that is at least `needed`, or the last one."""
  return next((size for size in among if size >= needed), among[-1])
