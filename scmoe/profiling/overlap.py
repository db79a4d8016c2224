"""How much communication had computation running beside it, and what that cost the computation."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from scmoe.profiling.trace import Event, by_device, length, shared, union


@dataclasses.dataclass(frozen=True)
class Overlap:
  """Communication and computation of one step: medians over devices, milliseconds.

  Attributes:
    communication: time during which anything was under way between devices.
    computation: time during which any kernel computed.
    hidden: the part of `communication` beside which something computed.
    elapsed: from the first event to the last.
    fastest: the shortest `communication` of any device: NCCL time includes waiting for the
      slowest rank, so that the fastest device is nearest to the transfer itself.
  """

  communication: float
  computation: float
  hidden: float
  elapsed: float
  fastest: float

  @property
  def exposed(self) -> float:
    """Communication beside which nothing computed."""
    return self.communication - self.hidden

  @property
  def share_hidden(self) -> float:
    """hidden / communication; 0 where nothing was sent."""
    return self.hidden / self.communication if self.communication else 0.0

  def as_json(self) -> dict[str, float]:
    """Milliseconds and the share, for a results file."""
    values = {f.name: round(getattr(self, f.name), 4) for f in dataclasses.fields(self)}
    return values | {"share_hidden": round(self.share_hidden, 4)}


def measure_overlap(events: Iterable[Event], steps: int = 1) -> Overlap | None:
  """Overlap per step of a trace of `steps` steps; None where no device has events."""
  devices = [device_overlap(list(own), steps) for own in by_device(events).values()]
  if not devices:
    return None
  middle = lambda name: statistics.median(getattr(d, name) for d in devices)
  fastest = min(d.communication for d in devices)
  return Overlap(
    middle("communication"), middle("computation"), middle("hidden"), middle("elapsed"), fastest
  )


def device_overlap(events: list[Event], steps: int = 1) -> Overlap:
  """Overlap of one device's events (nanoseconds in, milliseconds per step out)."""
  communication = union((e.start, e.end) for e in events if e.is_communication)
  computation = union((e.start, e.end) for e in events if not e.is_communication)
  ms = lambda ns: ns / 1e6 / steps
  total = ms(length(communication))
  elapsed = max(e.end for e in events) - min(e.start for e in events)
  return Overlap(
    total, ms(length(computation)), ms(shared(communication, computation)), ms(elapsed), total
  )
