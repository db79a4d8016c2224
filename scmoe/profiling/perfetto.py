"""Adds stages to the profiler's trace, for ui.perfetto.dev.

The profiler writes Chrome's JSON, in which kernels have the compiler's names. This module adds
each operation's stage, direction and op_name, and three tracks at the top of each device: its
computation by stage, its communication by stage, and the exposed communication.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scmoe.base.errors import StorageError
from scmoe.profiling.overlap import direction_of, stage_of
from scmoe.profiling.trace import Event, by_device, is_container, union

TRACKS = ("compute by stage", "communication by stage", "communication, exposed")
_FIRST = 10_000_000  # first process number of our tracks, above all that the profiler uses


def write_perfetto(source: Path, target: Path, names: Mapping[str, str]) -> Path:
  """Writes the annotated trace.

  Args:
    source: `*.trace.json.gz` of the profiler.
    target: `*.json.gz` to write, e.g. beside a page.
    names: op_name of each instruction (`Program.names`).

  Raises:
    StorageError: the source cannot be read, or the target cannot be written.
  """
  try:
    with gzip.open(source, "rt", encoding="utf-8") as file:
      trace = json.load(file)
    written = json.dumps(annotated(trace, names), separators=(",", ":")).encode()
    target.write_bytes(gzip.compress(written, 6, mtime=0))
  except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
    raise StorageError(f"{target} cannot be written from {source}: {error}") from None
  return target


def annotated(trace: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
  """The trace with stages; both are Chrome's JSON with times in microseconds.

  Leaves out the profiler's `metadata`, which Perfetto does not accept.
  """
  # The profiler's last entry is {}.
  known = [entry for entry in trace.get("traceEvents", []) if "name" in entry]
  places = _places(known)
  events, kept = [], []
  for entry in known:
    op = str(entry.get("args", {}).get("hlo_op", ""))
    device = _device(entry, places)
    if entry.get("ph") != "X" or not op or not device:
      kept.append(entry)
      continue
    op_name = names.get(op, "")
    words = {"stage": stage_of(op_name or op), "direction": direction_of(op_name)}
    kept.append({**entry, "args": {**entry["args"], **words, "op_name": op_name}})
    if not is_container(op) and not entry["name"].startswith("end: "):
      start, end = float(entry["ts"]), float(entry["ts"]) + float(entry.get("dur", 0))
      events.append(Event(device, "", entry["name"], start, end, op))
  events.sort(key=lambda e: e.start)
  rows = []
  for i, (device, own) in enumerate(by_device(events).items()):
    rows += _tracks(_FIRST + i, device, own, names)
  return {"displayTimeUnit": "ns", "traceEvents": rows + kept}


def _places(entries: list[dict[str, Any]]) -> dict[tuple[Any, Any], str]:
  """(process, thread) of every stream of a GPU -> the device."""
  processes = {e["pid"]: e["args"]["name"] for e in entries if e.get("name") == "process_name"}
  return {
    (e["pid"], e["tid"]): str(processes.get(e["pid"], ""))
    for e in entries
    if e.get("name") == "thread_name"
    and "GPU" in str(processes.get(e["pid"], ""))
    and str(e["args"].get("name", "")).startswith("Stream")
  }


def _device(entry: Mapping[str, Any], places: Mapping[tuple[Any, Any], str]) -> str:
  """The device on which an entry ran; "" for the host."""
  if place := places.get((entry.get("pid"), entry.get("tid"))):
    return place
  ordinal = entry.get("args", {}).get("device_ordinal")
  return f"simulated device {ordinal}" if ordinal is not None and not places else ""


def _tracks(
  process: int, device: str, own: list[Event], names: Mapping[str, str]
) -> list[dict[str, Any]]:
  """The three tracks of a device, with their names."""
  label = {"ph": "M", "pid": process}
  rows: list[dict[str, Any]] = [
    {**label, "name": "process_name", "args": {"name": f"scmoe: stages of {device}"}},
    {**label, "name": "process_sort_index", "args": {"sort_index": -1}},
  ]
  for thread, name in enumerate(TRACKS, 1):
    rows.append({**label, "tid": thread, "name": "thread_name", "args": {"name": name}})
    rows.append(
      {**label, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    )
  slices: dict[str, list[tuple[str, float, float]]] = {track: [] for track in TRACKS}
  for event in own:
    op_name = names.get(event.op, event.op)
    track = TRACKS[1] if event.is_communication else TRACKS[0]
    _append(slices[track], f"{stage_of(op_name)}, {direction_of(op_name)}", event.start, event.end)
  computing = union((e.start, e.end) for e in own if not e.is_communication)
  for name, start, end in slices[TRACKS[1]]:
    slices[TRACKS[2]] += [(name, a, b) for a, b in _without(start, end, computing)]
  for thread, track in enumerate(TRACKS, 1):
    rows += [
      {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start, "dur": end - start}
      for name, start, end in slices[track]
    ]
  return rows


def _append(slices: list[tuple[str, float, float]], name: str, start: float, end: float) -> None:
  """Adds a slice after the track's others; merges it with an equal neighbour."""
  last = slices[-1] if slices else ("", start, start)
  start = max(start, last[2])
  if end <= start:
    return
  if last[0] == name and start - last[2] < 1.0:  # µs
    slices[-1] = (name, last[1], end)
  else:
    slices.append((name, start, end))


def _without(
  start: float, end: float, intervals: list[tuple[float, float]]
) -> list[tuple[float, float]]:
  """The parts of [start, end) that no interval covers."""
  left, at = [], start
  for a, b in intervals:
    if b <= at:
      continue
    if a >= end:
      break
    if a > at:
      left.append((at, a))
    at = b
  if at < end:
    left.append((at, end))
  return left
