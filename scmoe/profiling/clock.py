"""The cost of a program's exchanges, as the clock sees it.

A trace tells during which part of an exchange some kernel computed. That does not say what the
exchange cost: beside it, the computation itself may run slower, because NCCL's kernels take
multiprocessors and memory bandwidth from it. The clock sees both. Three programs are timed in turns
(`scmoe.profiling.timer`): the program, the same without its exchanges
(`dispatch.ablation.silent`), and its exchanges alone (`scmoe.profiling.exchanges`).

  paid = (program - program without exchanges) / exchanges alone

Worked example: six pairs take 33.2 ms, without their exchanges 31.1 ms, and the exchanges alone
2.9 ms. So 2.1 of 2.9 ms are paid, 72 %: the pairs save 28 % of what waiting for every exchange
would cost, whatever share of it a trace shows as hidden.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from scmoe.profiling.timer import Timing, around_median, half_range


def percent(share: float, interval: Sequence[float]) -> str:
  """A share with the interval of its median (`around_median`), for example "72 % (69 to 75)"."""
  low, high = interval
  return f"{100 * share:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


@dataclasses.dataclass(frozen=True)
class Paid:
  """The cost of a program's exchanges, from three arms of one comparison in turns.

  Attributes:
    program: times of the program.
    without: times of the same program without its exchanges.
    alone: times of its exchanges alone, forward and backward.
  """

  program: Timing
  without: Timing
  alone: Timing

  @property
  def seconds(self) -> float:
    """Time that the exchanges add to the program: the median over rounds of program - without.

    Below 0 if the program was faster than without exchanges, as noise can make it.
    """
    rounds = zip(self.program.seconds, self.without.seconds)
    return statistics.median(program - without for program, without in rounds)

  @property
  def share(self) -> float:
    """The median over rounds of (program - without) / alone: 0 if all are hidden, 1 if none is.

    Above 1 if waiting for every exchange would be faster. The three times of one round are
    neighbours, so a drift of the GPU's clock from round to round does not change their share.
    """
    return statistics.median(self.shares)

  @property
  def spread(self) -> float:
    """Half the distance between the quartiles of `shares`; 0 with fewer than three rounds."""
    return half_range(self.shares)

  @property
  def interval(self) -> tuple[float, float]:
    """Two of `shares` between which their median lies; see `around_median`."""
    return around_median(self.shares)

  @property
  def shares(self) -> list[float]:
    """The paid part of each round's exchanges alone, as a share."""
    rounds = zip(self.program.seconds, self.without.seconds, self.alone.seconds)
    return [(program - without) / alone for program, without, alone in rounds]

  def as_json(self) -> dict[str, Any]:
    """Milliseconds and shares, for a results file."""
    return {
      "paid_ms": round(1e3 * self.seconds, 4),
      "share_paid": round(self.share, 4),
      "spread": round(self.spread, 4),
      "interval": [round(share, 4) for share in self.interval],
      "without": self.without.as_json(),
      "alone": self.alone.as_json(),
    }

  def __str__(self) -> str:
    ms = lambda seconds: f"{1e3 * seconds:.3f} ms"
    return (
      f"exchanges, by the clock: {ms(self.seconds)} of {ms(self.alone.median)} are paid, "
      f"{percent(self.share, self.interval)}; without exchanges {ms(self.without.median)}"
    )
