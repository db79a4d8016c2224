"""Free pages of a pool, the memory for pages, and the widths for which programs are compiled."""

from __future__ import annotations

from typing import Any

# The largest share of a device's free memory that pages and their copies get if no option says how
# much.
FREE_SHARE = 0.9


def copied(most: int, layers: int) -> int:
  """Estimates the bytes that a step copies at once if no kernel reads pages in place.

  A layer's attention copies the pages of that layer (`scmoe.layers.pages.read`); the copies of the
  next layer may exist at the same time.

  Args:
    most: bytes of the pages that the slots of one device can have, in all layers.
    layers: number of layers.

  Returns:
    Bytes.
  """
  return 2 * most // layers


class FreePages:
  """The free pages of one part's pool; the pages that were freed last are taken first.

  Args:
    count: pages of the pool.
  """

  def __init__(self, count: int):
    self._free = list(range(count - 1, -1, -1))
    self.count = count

  def __len__(self) -> int:
    return len(self._free)

  def take(self, count: int) -> list[int] | None:
    """Takes `count` pages and returns their numbers; None, and none is taken, if fewer are free."""
    if count > len(self._free):
      return None
    return [self._free.pop() for _ in range(count)]

  def free(self, pages: list[int]) -> None:
    """Makes pages free again, and empties the list `pages`."""
    self._free += reversed(pages)
    pages.clear()


def free_bytes(device: Any) -> int | None:
  """Bytes that JAX may still take of a `jax.Device`'s memory; None if the device does not say."""
  known = device.memory_stats() or {}
  return known["bytes_limit"] - known["bytes_in_use"] if "bytes_limit" in known else None


def widths(most: int, steps: int, factor: int, least: int = 1) -> list[int]:
  """Ascending numbers, at most `steps`: `most` is the last, each other one is the next / `factor`.

  Quotients are rounded up. For each width of a table, in pages, and of a piece, in tokens, XLA
  compiles programs; so there must be few.

  >>> widths(16, 3, 2)
  [4, 8, 16]
  >>> widths(256, 2, 4, 16)
  [64, 256]

  Args:
    most: the largest number.
    steps: how many numbers at most.
    factor: quotient of neighbours.
    least: no number is smaller, except `most`.
  """
  found = [most]
  while len(found) < steps and -(-found[0] // factor) >= least and found[0] > 1:
    found.insert(0, -(-found[0] // factor))
  return found


def smallest(among: list[int], needed: int) -> int:
  """The smallest of ascending numbers that is at least `needed`; the last one if none is."""
  return next((size for size in among if size >= needed), among[-1])
