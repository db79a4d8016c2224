"""Measures how much communication computation hides, by stage and direction.

Stages are the code's named scopes (route, dispatch, experts, combine, attention, mlp),
found in the op_name of the compiled program's instructions (`scmoe.profiling.wire`).
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping

from scmoe.profiling.trace import Event, by_device, length, shared, union


@dataclasses.dataclass(frozen=True)
class Overlap:
  """Communication and computation of one step: medians over devices, milliseconds.

  Attributes:
    communication: time during which at least one transfer between devices ran.
    computation: time during which at least one computing kernel ran.
    hidden: the part of `communication` during which a computing kernel ran.
    elapsed: from the first event to the last.
    fastest: the shortest `communication` of any device: NCCL time includes waiting for the
      slowest rank, so the fastest device comes closest to the time of the transfer alone.
  """

  communication: float
  computation: float
  hidden: float
  elapsed: float
  fastest: float

  @property
  def exposed(self) -> float:
    """The part of `communication` during which no computing kernel ran."""
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


# Named scopes of a pair's stages, of a step's other parts, and of collectives that send no rows.
STAGES = ("attention", "mlp", "route", "dispatch", "experts", "combine", "add")
STAGES += ("embedding", "loss", "cast", "optimizer", "clip", "accumulate", "stack")
STAGES += ("counts", "weights", "tensor", "gradients", "statistics")
ALL_REDUCE = "all-reduce"  # a sum over devices outside any named scope
OTHER = "other"


def stage_of(op_name: str) -> str:
  """The innermost stage that an op_name contains; `ALL_REDUCE` or `OTHER` if it contains none."""
  parts = op_name.split("/")
  if parts[-1] == "add":  # the HLO operation, not the stage of that name
    parts.pop()
  for part in reversed(parts):
    for stage in STAGES:
      if re.fullmatch(rf"(\w+\()*{stage}\)*", part):
        return stage
  return ALL_REDUCE if re.search(r"psum|all[-_]reduce", op_name) else OTHER


def direction_of(op_name: str) -> str:
  """ "backward" for operations that differentiation transposed, else "forward"."""
  return "backward" if "transpose(" in op_name else "forward"


@dataclasses.dataclass(frozen=True)
class StageTime:
  """One stage in one direction on one device: milliseconds per step.

  Attributes:
    stage: one of `STAGES`, `ALL_REDUCE` or `OTHER`.
    direction: "forward" or "backward".
    computation: time of its kernels.
    communication, hidden: time of its transfers, and the part during which any kernel computed.
  """

  stage: str
  direction: str
  computation: float
  communication: float
  hidden: float


def stage_times(
  events: Iterable[Event], names: Mapping[str, str], steps: int = 1
) -> list[StageTime]:
  """Times by stage and direction of the first device, longest first.

  Args:
    events: kernels and copies of `steps` steps.
    names: op_name of each instruction (`Program.names`).
    steps: number of steps in the trace.
  """
  devices = by_device(events)
  if not devices:
    return []
  own = next(iter(devices.values()))
  computing = union((e.start, e.end) for e in own if not e.is_communication)
  groups: dict[tuple[str, str], list[Event]] = {}
  for event in own:
    groups.setdefault(_stage_and_direction(event, names), []).append(event)
  ms = lambda ns: ns / 1e6 / steps
  result = []
  for (stage, direction), group in groups.items():
    compute = union((e.start, e.end) for e in group if not e.is_communication)
    sending = union((e.start, e.end) for e in group if e.is_communication)
    hidden = shared(sending, computing)
    sizes = (ms(length(compute)), ms(length(sending)), ms(hidden))
    result.append(StageTime(stage, direction, *sizes))
  return sorted(result, key=lambda t: -(t.computation + t.communication))


def _stage_and_direction(event: Event, names: Mapping[str, str]) -> tuple[str, str]:
  op_name = names.get(event.op, event.op)
  return stage_of(op_name), direction_of(op_name)


def slow_down(overlapped: Overlap, alone: Overlap) -> float:
  """Computation time with communication beside it over the time `alone`; 1: no slow-down."""
  return overlapped.computation / alone.computation


def stage_table(times: Iterable[StageTime]) -> str:
  """The stages as a text table, in milliseconds."""
  line = "{:11s} {:9s}{:>10s}{:>10s}{:>8s}{:>10s}".format
  lines = [line("stage", "direction", "compute", "comm", "hidden", "exposed")]
  for t in times:
    share = f"{100 * t.hidden / t.communication:.0f} %" if t.communication else "–"
    exposed = t.communication - t.hidden
    numbers = (f"{t.computation:.3f}", f"{t.communication:.3f}", share, f"{exposed:.3f}")
    lines.append(line(t.stage, t.direction, *numbers))
  return "\n".join(lines)
