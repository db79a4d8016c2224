"""Cuts one block pair out of a trace's forward pass and draws its stages as bars."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from scmoe.profiling.overlap import direction_of, stage_of
from scmoe.profiling.picture import Bar
from scmoe.profiling.trace import Event, length, union

COMPUTE, LINK = "compute", "link"  # the streams, as `scmoe.blocks.schedule` names them
# Stages that a step runs once, outside the pairs.
STEP = ("embedding", "loss", "cast", "optimizer", "clip", "accumulate", "stack", "gradients")
BEFORE = 0.3  # assumed share of a pair before its dispatch, if the trace does not show its start
NEAR = 0.01  # bars of one stage are merged if their gap is below this share of a pair


def pair_bars(events: Sequence[Event], names: Mapping[str, str]) -> dict[str, list[Bar]]:
  """Bars of the pair of median length on the first device; milliseconds since its first event.

  Args:
    events: kernels and copies of some steps, in order of their start.
    names: op_name of each instruction (`Program.names`).

  Returns:
    stream -> bars. Neighbouring operations of one stage become one bar, which tells their number.
    Both streams are empty if the trace has fewer than two pairs.
  """
  bars: dict[str, list[Bar]] = {COMPUTE: [], LINK: []}
  op_name = lambda e: names.get(e.op) or e.op
  device = min((e.device for e in events), default="")
  own = [(stage_of(op_name(e)), e) for e in events
         if e.device == device and direction_of(op_name(e)) == "forward"]  # fmt: skip
  own = [(stage, e) for stage, e in own if stage not in STEP]
  starts = _pair_starts(own)
  if len(starts) < 2:
    return bars
  cuts = _cuts(own, starts)
  period = statistics.median_low(end - begin for begin, end in cuts)
  begin, end = next(cut for cut in cuts if cut[1] - cut[0] == period)
  cut = [(s, e) for s, e in own if begin <= e.start < end]
  zero = min(e.start for _, e in cut)
  for lane in bars:
    found = [(s, e) for s, e in cut if e.is_communication == (lane == LINK)]
    bars[lane] = [_bar(stage, group, zero) for stage, group in _grouped(found, NEAR * period)]
  return bars


def _pair_starts(own: Sequence[tuple[str, Event]]) -> list[float]:
  """Start of each pair's first dispatch. A pair may send several chunks, so only a dispatch that
  follows a route begins a new pair."""
  sends = any(stage == "dispatch" and e.is_communication for stage, e in own)
  starts, routed = [], True
  for stage, event in own:
    if stage == "route":
      routed = True
    elif stage == "dispatch" and routed and event.is_communication == sends:
      starts.append(event.start)
      routed = False
  return starts


def _cuts(own: Sequence[tuple[str, Event]], starts: Sequence[float]) -> list[tuple[float, float]]:
  """Begin and end of each pair: it begins when the combine of the pair before ends."""
  sends = any(stage == "combine" and e.is_communication for stage, e in own)
  arrived = [e.end for stage, e in own if stage == "combine" and e.is_communication == sends]
  between = [[end for end in arrived if a < end <= b] for a, b in itertools.pairwise(starts)]
  if len(starts) > 2 and all(between):
    return list(itertools.pairwise(map(max, between)))
  # The exchanges of neighbouring pairs overlap, or there are only two pairs.
  cuts = []
  for start, after in itertools.pairwise(starts):
    begin = start - BEFORE * (after - start)
    cuts.append((begin, begin + after - start))
  return cuts


def _grouped(found: Sequence[tuple[str, Event]], near: float) -> list[tuple[str, list[Event]]]:
  groups: list[tuple[str, list[Event]]] = []
  for stage, event in found:
    last = groups[-1] if groups else None
    if last and last[0] == stage and event.start - max(e.end for e in last[1]) <= near:
      last[1].append(event)
    else:
      groups.append((stage, [event]))
  return groups


def _bar(stage: str, group: Sequence[Event], zero: float) -> Bar:
  start, end = group[0].start, max(e.end for e in group)
  busy = length(union((e.start, e.end) for e in group)) / 1e6
  count = f"{len(group)} operations, {busy:.3g} ms of them busy"
  about = count if len(group) > 1 else group[0].op or group[0].name
  return Bar(stage, (start - zero) / 1e6, (end - zero) / 1e6, about)
