"""Says where the time is that a step pays for its exchanges: in waiting, or in slower kernels.

A trace of the step is laid beside a trace of the same step without exchanges. On one device,

  step - step without = computation beside exchanges that takes longer
                      + time in which only transfers run (bare)
                      + time in which nothing runs

and the first is split by kernel: kernels that other kernels' multiprocessors are taken from become
slower, and the table names them. Another table has the stages that send, as `scmoe.profile` prints
them; the sums of gradients, which the step without exchanges has too, are among them.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from shared_state import StepArm

from scmoe.profiling.overlap import StageTime, device_overlap, stage_table, stage_times
from scmoe.profiling.program import traced
from scmoe.profiling.trace import Event, by_device, shared, union

STEPS = 2  # that one trace covers
ROWS = 24  # kernels that a table names


@dataclasses.dataclass(frozen=True)
class Kernel:
  """All calls of one kernel in a step: milliseconds.

  Attributes:
    calls: how often the step runs it, with exchanges.
    ms: its time with exchanges.
    without: its time in the step without exchanges.
    beside: the part of `ms` during which a transfer ran.
  """

  calls: float
  ms: float
  without: float
  beside: float


@dataclasses.dataclass(frozen=True)
class Where:
  """The parts of the paid time, milliseconds per step of the first device.

  Attributes:
    computation, bare, idle: of the step with exchanges.
    computation_without, bare_without, idle_without: of the step without them.
    kernels: by name, those whose times differ most first.
    sending: the stages that send, of the step with exchanges; the longest first.
  """

  computation: float
  bare: float
  idle: float
  computation_without: float
  bare_without: float
  idle_without: float
  kernels: dict[str, Kernel]
  sending: list[StageTime]

  @classmethod
  def of(cls, step: StepArm, without: StepArm) -> Where:
    """Traces `STEPS` calls of both steps, which were compiled and called before."""
    both = []
    for arm in (step, without):
      devices = by_device(traced(lambda arm=arm: arm(STEPS)))
      both.append(next(iter(devices.values()), []))
    parts = [value for events in both for value in _parts(events)]
    assert step.step.program is not None, "it was called"
    stages = stage_times(both[0], step.step.program.names, STEPS)
    sending = [s for s in stages if s.communication]
    return cls(*parts, kernels=_kernels(*both), sending=sending)

  def as_json(self) -> dict[str, Any]:
    """Milliseconds, for a results file."""
    values = dataclasses.asdict(self)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}

  def __str__(self) -> str:
    slower = self.computation - self.computation_without
    bare, idle = self.bare - self.bare_without, self.idle - self.idle_without
    head = f"slower kernels {slower:.1f} ms, bare transfers {bare:.1f}, nothing runs {idle:.1f}"
    line = "{:56s}{:>7s}{:>10s}{:>10s}{:>9s}{:>9s}".format
    rows = [line("kernel", "calls", "ms", "without", "more", "beside")]
    for name, k in list(self.kernels.items())[:ROWS]:
      more = f"{k.ms - k.without:+.2f}"
      numbers = (f"{k.calls:.0f}", f"{k.ms:.2f}", f"{k.without:.2f}", more, f"{k.beside:.2f}")
      rows.append(line(name[:55], *numbers))
    return "\n".join([head, stage_table(self.sending), *rows])


def _parts(events: list[Event]) -> tuple[float, float, float]:
  """Computation, bare transfers and idle time of one device; zeros without events."""
  if not events:
    return 0.0, 0.0, 0.0
  own = device_overlap(events, STEPS)
  return own.computation, own.exposed, own.elapsed - own.computation - own.exposed


def _kernels(events: list[Event], without: list[Event]) -> dict[str, Kernel]:
  sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
  sending = union((e.start, e.end) for e in events if e.is_communication)
  for event in events:
    own = sums[_family(event)]
    own[0] += 1 / STEPS
    own[1] += (event.end - event.start) / 1e6 / STEPS
    if not event.is_communication:
      own[3] += shared([(event.start, event.end)], sending) / 1e6 / STEPS
  for event in without:
    sums[_family(event)][2] += (event.end - event.start) / 1e6 / STEPS
  order = sorted(sums, key=lambda name: -abs(sums[name][1] - sums[name][2]))
  return {name: Kernel(*(round(v, 3) for v in sums[name])) for name in order}


def _family(event: Event) -> str:
  """A kernel's name without the numbers that XLA gives to equal fusions."""
  return re.sub(r"[_.]\d+(?=$|_|\.)", "", event.name)
