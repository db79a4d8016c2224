"""Several batches in one pair: the order in which they take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from scmoe.blocks.schedule import Step
from scmoe.parallel.barriers import barrier


class Walk(Protocol):
  """One batch on its way through a pair: `scmoe.blocks.walk.PairWalk`, with a method per step."""

  live: Any

  @property
  def turns(self) -> list[list[Step]]:
    """The steps, cut where the batch pauses."""
    ...

  def resume(self) -> None:
    """Lets the batch go on from the values in `live`."""
    ...

  def pause(self) -> None:
    """Puts the values that the batch has computed into `live`."""
    ...

  def finish(self) -> None:
    """Puts the output into `live`."""
    ...


def in_turns(walks: Sequence[Walk]) -> Iterator[tuple[Callable[[Step], None], Step]]:
  """The steps of several batches in the order in which they run, each with its walk's method.

  A batch pauses after every dispatch and before every combine, and the next batch has its turn. Two
  batches, A and B, of Pos-2 with the experts after `mlp 0`:

      A: attention 0, route, dispatch | B: the same | A: mlp 0, experts | B: the same |
      A: combine, attention 1, shared expert, add | B: the same

  So another batch computes beside every exchange.

  Args:
    walks: one per batch, through pairs with the same schedule.
  """
  turns = walks[0].turns
  for number, turn in enumerate(turns):
    for i, walk in enumerate(walks):
      # The first batch's first turn has no tie: the last batch may still wait for the rows of the
      # pair before, and the first batch must not wait with it.
      if number or i:
        _tie(walks, i)
      walk.resume()
      for step in turn:
        yield getattr(walk, step.operation.replace(" ", "_")), step
      walk.finish() if turn is turns[-1] else walk.pause()


def _tie(walks: Sequence[Walk], i: int) -> None:
  """Lets batch i go on only when the batch whose turn was before it has paused.

  Without this XLA puts equal steps of all batches side by side, so that all wait at once.
  """
  if len(walks) > 1:
    walks[i - 1].live, walks[i].live = barrier((walks[i - 1].live, walks[i].live))
