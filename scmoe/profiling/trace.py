"""Reads a profiler trace (`*.xplane.pb`) as a list of events: which kernel ran where and when.

It uses `jax.profiler.ProfileData`, and needs neither TensorBoard nor XProf.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator

from scmoe.base.errors import DataError

# NCCL kernels, the kernel of `dispatch.transport=put`, and the copy engines' transfers between
# GPUs. Copies inside one GPU (MemcpyD2D) are communication only where an all-to-all operation
# issued them: see `is_communication`.
_COLLECTIVE = re.compile(
  r"nccl|put_rows_mosaic|memcpy\s*p2p|memcpy\s*peer|peer.to.peer", re.IGNORECASE
)
_COPY = re.compile(r"memcpy\s*d(evice)?\s*2\s*d|memcpy.?d2d", re.IGNORECASE)
_COLLECTIVE_OP = re.compile(
  r"all[-_]to[-_]all|all[-_]reduce|all[-_]gather|reduce[-_]scatter|collective[-_]permute|\bsend\b"
)
# A simulated device's events have the names of instructions. A collective's instruction, and an
# instruction that contains others:
_COLLECTIVE_THUNK = re.compile(rf"({_COLLECTIVE_OP.pattern})(-start|-done)?(\.\d+)?")
_CONTAINER = re.compile(r"(while|call|conditional|async-start|async-done)(\.\d+)*")


@dataclasses.dataclass(frozen=True)
class Event:
  """One kernel or copy.

  Attributes:
    device: e.g. "/device:GPU:0".
    stream: the trace's name of the stream.
    name: name of the kernel or copy.
    start, end: nanoseconds.
    op: the HLO instruction that issued it; "" if the trace lacks it.
    module: the HLO module; "" if the trace lacks it.
  """

  device: str
  stream: str
  name: str
  start: float
  end: float
  op: str = ""
  module: str = ""

  @property
  def is_communication(self) -> bool:
    """True if this event moves data between devices."""
    return is_communication(self.name, self.op)


def is_communication(name: str, op: str = "") -> bool:
  """True if a kernel or copy of this name, issued by this instruction, is communication."""
  if _COLLECTIVE.search(name) or _COLLECTIVE_THUNK.fullmatch(name):
    return True
  return bool(_COPY.search(name) and _COLLECTIVE_OP.search(op))


def is_container(op: str) -> bool:
  """True if an instruction only contains others; counting it would count their times twice."""
  return bool(_CONTAINER.fullmatch(op))


def find_trace(directory: str, suffix: str = ".xplane.pb") -> str:
  """The newest file with this suffix under a directory.

  Raises:
    DataError: there is none.
  """
  files = glob.glob(os.path.join(directory, "**", f"*{suffix}"), recursive=True)
  if not files:
    raise DataError(f"{directory} holds no *{suffix}; was the profiler running?")
  return max(files, key=os.path.getmtime)


def read_events(path: str) -> list[Event]:
  """All kernels and copies of all GPUs in an `xplane.pb`, ordered by start; none without a GPU."""
  import jax  # the rest of this file works on events without jax

  events = []
  for plane in jax.profiler.ProfileData.from_file(path).planes:
    if "GPU" not in plane.name:
      continue
    for line in plane.lines:
      # The trace's other lines show the same time again, by steps, modules and operations.
      if (line.name or "").startswith("Stream"):
        events.extend(_line_events(plane.name, line))
  return sorted(events, key=lambda e: e.start)


def read_simulated(path: str) -> list[Event]:
  """The events of the CPU's simulated devices, ordered by start; empty for a trace of GPUs.

  Simulated devices share the CPU's cores and memory, so a collective is a copy and a wait.
  """
  import jax

  events = []
  for plane in jax.profiler.ProfileData.from_file(path).planes:
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if "device_ordinal" not in stats or event.name.startswith("end: "):
          continue
        op, end = str(stats.get("hlo_op", "")), event.start_ns + event.duration_ns
        if op and not is_container(op):
          device, module = (
            f"simulated device {stats['device_ordinal']}",
            stats.get("hlo_module", ""),
          )
          events.append(
            Event(device, line.name or "", event.name, event.start_ns, end, op, str(module))
          )
  return sorted(events, key=lambda e: e.start)


def _line_events(device: str, line) -> Iterator[Event]:
  for event in line.events:
    stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module")}
    yield Event(
      device,
      line.name,
      event.name,
      event.start_ns,
      event.start_ns + event.duration_ns,
      str(stats.get("hlo_op", "")),
      str(stats.get("hlo_module", "")),
    )


def by_device(events: Iterable[Event]) -> dict[str, list[Event]]:
  """Events of each device, in the order of the devices' names."""
  devices: dict[str, list[Event]] = {}
  for event in events:
    devices.setdefault(event.device, []).append(event)
  return dict(sorted(devices.items()))


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """Disjoint, ordered intervals that cover the same time."""
  merged: list[list[float]] = []
  for start, end in sorted(intervals):
    if merged and start <= merged[-1][1]:
      merged[-1][1] = max(merged[-1][1], end)
    else:
      merged.append([start, end])
  return [(start, end) for start, end in merged]


def length(intervals: Iterable[Interval]) -> float:
  """Total length of disjoint intervals."""
  return sum(end - start for start, end in intervals)


def shared(a: list[Interval], b: list[Interval]) -> float:
  """Length of the intersection of two lists of disjoint, ordered intervals."""
  total, i, j = 0.0, 0, 0
  while i < len(a) and j < len(b):
    total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return total
