"""Measured times of a program's instructions, for XLA's scheduler (a profile).

XLA starts a collective as late as its cost model allows. With measured times (profile-guided
latency estimation) the scheduler plans for the actual machine. jax can convert a trace to a profile
itself, but makes three mistakes, each of which can leave an exchange exposed: it names kernels of a
fusion of slices after their own instruction instead of the fusion that XLA schedules; it takes the
mean over the kernels of an instruction instead of their sum; and it counts a collective's wait for
the slowest device as transfer time.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping

from scmoe.profiling.trace import Event, by_device

# A collective takes longer beside computation than alone: 1.46 ms alone, 1.6 to 2.3 ms beside
# products (2 H200s over a slow link; experiments/LOG.md, 2026-11-22). If XLA assumes too long a
# time, it only places more computation beside it; if too short a time, the device waits.
STRETCH = 1.25


def instruction_costs(events: Iterable[Event], program: str) -> dict[str, float]:
  """Microseconds of one execution of each instruction that the trace or the program names.

  A collective's cost is the smallest of the devices' medians times `STRETCH`: on the other devices
  its time includes waiting for their peers.

  Args:
    events: kernels of one or more runs of the program, on any number of devices.
    program: text of the optimised program.
  """
  found: dict[str, list[float]] = {}
  sends: set[str] = set()
  for own in by_device(events).values():
    kernels: dict[str, dict[str, list[float]]] = {}
    for event in own:
      if event.op:
        kernels.setdefault(event.op, {}).setdefault(event.name, []).append(event.end - event.start)
        if event.is_communication:
          sends.add(event.op)
    for op, names in kernels.items():
      # Each execution of an instruction launches each of its kernels once or more.
      executions = min(map(len, names.values()))
      total = sum(statistics.median(times) * len(times) for times in names.values())
      found.setdefault(op, []).append(total / executions / 1e3)
  cost = lambda op, us: STRETCH * min(us) if op in sends else statistics.median(us)
  costs = {op: cost(op, us) for op, us in found.items()}
  return costs | _fusion_costs(program, costs)


def _fusion_costs(program: str, costs: Mapping[str, float]) -> dict[str, float]:
  """Costs of fusions that the trace does not name, from the instructions that they call."""
  bodies: dict[str, list[str]] = {}
  calls: dict[str, str] = {}
  here = ""
  for line in program.splitlines():
    opened = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
    if opened:
      here = opened.group(1)
      continue
    named = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if named:
      bodies.setdefault(here, []).append(named.group(1))
      called = re.search(r" fusion\(.*calls=%?([\w.\-]+)", line)
      if called and named.group(1) not in costs:
        calls[named.group(1)] = called.group(1)
  inner = lambda body: sum(costs.get(name, 0.0) for name in bodies.get(body, ()))
  return {name: total for name, body in calls.items() if (total := inner(body))}
