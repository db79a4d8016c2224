"""The time of a block pair's steps on two streams: makespan, the best slot, chunks, a drawing.

The main path and the experts' computation share the devices; dispatch and combine share the link.
For experts in a slot, let `before` be the dense time in front of the shortcut, `pre` that from the
shortcut to the experts, and `post` that after them. Then

  makespan(slot) = before + route + max(pre, dispatch) + experts + max(post, combine) + add

It has the same argmin as the paper's Eq. 11, since max(a, b) = ½ (a + b + |a - b|) and pre + post
does not depend on the slot. (The paper's K is the slot's index + 1, of whole operations; between an
attention's two steps there is a slot that it does not have.) Pure Python.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_choice, check_type, check_whole
from scmoe.blocks.schedule import (
  ADD,
  COMBINE,
  DISPATCH,
  EXPERTS,
  PROJECTIONS,
  ROUTE,
  Schedule,
  Step,
  dense_steps,
  earlier_steps,
  slot_names,
  tap_step,
)
from scmoe.blocks.wiring import Wiring, tap_index


@dataclasses.dataclass(frozen=True)
class Times:
  """Durations of one unit's steps, all in one unit of time, whichever that is.

  Attributes:
    dense: (name, time) of the dense steps after the shortcut, in order: the window.
    route, dispatch, experts, combine: the MoE's stages; `route` includes laying out the rows.
    add: the weighted sum at the end.
    before: dense time before the shortcut.
    earlier: (name, time) of `earlier_steps`. No makespan counts on them.
  """

  dense: tuple[tuple[str, float], ...]
  route: float
  dispatch: float
  experts: float
  combine: float
  add: float = 0.0
  before: float = 0.0
  earlier: tuple[tuple[str, float], ...] = ()

  @property
  def window(self) -> float:
    """Dense time beside which communication can run."""
    return sum(time for _, time in self.dense)

  @property
  def communication(self) -> float:
    """Time of dispatch and combine together."""
    return self.dispatch + self.combine

  @property
  def computation(self) -> float:
    """Time of everything but communication; no schedule takes less."""
    return self.before + self.window + self.route + self.experts + self.add

  @property
  def slots(self) -> list[str]:
    """Names of the slots, earliest first."""
    return slot_names([name for name, _ in self.dense])

  def backward(self, factor: float = 2.0) -> Times:
    """The window's times in the backward pass, the mirror image of those in the forward pass.

    Dense steps run from last to first, dispatch and combine have changed places, and so have route
    and add. Computation takes `factor` times as long as in the forward pass, communication as long.
    `before` and `earlier` are left out.

    Args:
      factor: computation of the backward pass over that of the forward pass (two products for one).
    """
    return Times(
      dense=tuple((name, factor * time) for name, time in reversed(self.dense)),
      route=factor * self.add,
      dispatch=self.combine,
      experts=factor * self.experts,
      combine=self.dispatch,
      add=factor * self.route,
      before=0.0,
    )


def unit_times(wiring: Wiring, blocks: int, durations: Mapping[str, float]) -> Times:
  """The times of one unit from those of its operations, measured or modelled.

  Args:
    wiring: of the unit; with a MoE.
    blocks: of the unit.
    durations: of `projections`, `mixing`, `mlp`, `shared`, `route`, `dispatch`, `experts`,
      `combine` and `add`, in any unit of time; `StageSeconds.milliseconds` gives modelled ones.

  Raises:
    ConfigError: the wiring has no MoE, `durations` lacks an operation, or an argument is of another
      type.
  """
  check_type("wiring", wiring, Wiring)
  check_whole("blocks", blocks, 1)
  check_type("durations", durations, Mapping)
  if not wiring.taps:
    raise ConfigError("a wiring without experts has no schedule; use another one than 'dense'")
  before, window = split_window(wiring, blocks)
  operation = lambda step: step.operation.removesuffix(" expert")
  needed = [ROUTE, DISPATCH, EXPERTS, COMBINE, ADD, *map(operation, [*before, *window])]
  if lost := [name for name in needed if name not in durations]:
    raise ConfigError(f"durations has no {lost[0]!r}; give the time of that operation")
  time_of = lambda step: durations[operation(step)]
  stages = {name: durations[name] for name in needed[:5]}
  dense = tuple((step.name, time_of(step)) for step in window)
  earlier = tuple((step.name, time_of(step)) for step in earlier_steps(wiring, blocks))
  return Times(dense, **stages, before=sum(map(time_of, before)), earlier=earlier)


def split_window(wiring: Wiring, blocks: int) -> tuple[list[Step], list[Step]]:
  """Dense steps of a unit before its first shortcut, and those after: the window."""
  dense = dense_steps(wiring, blocks)
  start = tap_step(min(tap_index(tap, blocks) for tap in wiring.taps))
  return dense[:start], dense[start:]


@dataclasses.dataclass(frozen=True)
class Span:
  """One operation on a stream of a timeline (COMPUTE or LINK), with its start and its end."""

  stream: str
  name: str
  start: float
  end: float


COMPUTE, LINK = "compute", "link"


def makespan(times: Times, slot: str) -> float:
  """Time of the unit with the experts in this slot, from its first operation."""
  index = times.slots.index(slot)
  pre, post = (sum(time for _, time in part) for part in (times.dense[:index], times.dense[index:]))
  first = times.before + times.route + max(pre, times.dispatch)
  return first + times.experts + max(post, times.combine) + times.add


def sequential_makespan(times: Times) -> float:
  """Time of the unit with nothing beside the communication."""
  return times.computation + times.communication


def best_slot(times: Times) -> str:
  """The slot of the shortest makespan (paper Eq. 11).

  Among equals a slot between two operations comes before one inside an attention, then the
  earliest.
  """
  return min(times.slots, key=lambda slot: (makespan(times, slot), PROJECTIONS in slot))


def best_slots(times: Times, factor: float = 2.0) -> tuple[str, str]:
  """Best slot of the forward and of the backward pass, both named in forward order.

  Among equals the backward pass takes the mirror image, which needs no barriers of its own.
  """
  backward, slots = times.backward(factor), times.slots
  mirror = lambda index: backward.slots[len(slots) - 1 - index]
  forward = best_slot(times)
  best = min(
    range(len(slots)), key=lambda i: (makespan(backward, mirror(i)), PROJECTIONS in slots[i])
  )
  # A little more than the shortest, because sums in another order round differently.
  least = makespan(backward, mirror(best)) * (1 + 1e-9)
  if makespan(backward, mirror(slots.index(forward))) <= least:
    return forward, forward
  return forward, slots[best]


def hidden_share(times: Times, slot: str) -> float:
  """Share of the communication beside which the schedule computes; 1 where there is none."""
  exposed = makespan(times, slot) - times.computation
  return 1 - exposed / times.communication if times.communication else 1.0


def timeline(times: Times, slot: str) -> list[Span]:
  """The spans of the unit with the experts in `slot`."""
  return chunked_timeline(times, [slot])


def chunked_timeline(times: Times, slots: Sequence[str], overhead: float = 0.0) -> list[Span]:
  """The spans of the unit with the MoE's stream in as many chunks as there are slots.

  The link takes all dispatches, then combines as they become ready. An operation that takes no time
  has no span.

  Args:
    times: of the unit.
    slots: of each chunk's experts, in order.
    overhead: extra time of every chunk of every stage, for its launch.

  Raises:
    ConfigError: `times` is no `Times`, or a slot is not one of `times.slots`.
  """
  check_type("times", times, Times)
  names, chunks = times.slots, len(slots)
  for slot in slots:
    check_choice("slot", slot, names)
  label = lambda name, i: name if chunks == 1 else f"{name} {i + 1}"
  now = times.before + times.route
  spans = [Span(COMPUTE, "before", 0.0, times.before), Span(COMPUTE, "route", times.before, now)]

  def compute(name: str, start: float, time: float) -> float:
    spans.append(Span(COMPUTE, name, start, start + time))
    return start + time

  link, arrivals, back = now, [], []
  for i in range(chunks):
    arrivals.append(link + times.dispatch / chunks + overhead)
    spans.append(Span(LINK, label("dispatch", i), link, arrivals[-1]))
    link = arrivals[-1]
  for index in range(len(names)):
    for i in (i for i, slot in enumerate(slots) if names.index(slot) == index):
      start = max(now, arrivals[i])
      now = compute(label("experts", i), start, times.experts / chunks + overhead)
      link = max(link, now)
      back.append(link)
      link += times.combine / chunks + overhead
      spans.append(Span(LINK, label("combine", i), back[-1], link))
    if index < len(times.dense):
      name, time = times.dense[index]
      now = compute(name, now, time)
  compute("add", max(now, link), times.add)
  return [span for span in spans if span.end > span.start]


def chunk_slots(times: Times, chunks: int) -> tuple[str, ...]:
  """The best slot of each chunk's experts, in order; among equals the earliest.

  For up to four chunks all combinations of slots in order are tried. Of more chunks, neighbours
  share one of four slots.
  """
  apart = min(chunks, 4)
  for_all = lambda slots: tuple(slots[i * apart // chunks] for i in range(chunks))
  choices = map(for_all, itertools.combinations_with_replacement(times.slots, apart))
  return min(choices, key=lambda slots: round(length(chunked_timeline(times, slots)), 9))


def length(spans: Iterable[Span]) -> float:
  """When the last span ends; 0 without spans."""
  return max((span.end for span in spans), default=0.0)


def best_chunks(
  times: Times, overhead: float = 0.0, choices: Sequence[int] = (1, 2, 4, 8)
) -> tuple[int, list[Span]]:
  """The best number of chunks for the MoE's stream, and its timeline.

  It is the smallest number whose timeline is at most 0.1 % longer than the shortest. One chunk, in
  the best slot, is enough while the communication fits the window; more let the experts' own
  computation hide communication too (the paper's fifth timeline, Fig. 7).

  Args:
    times: of the unit.
    overhead: as for `chunked_timeline`; one chunk has none.
    choices: numbers of chunks to compare.
  """
  slots = {n: (best_slot(times),) if n == 1 else chunk_slots(times, n) for n in choices}
  plans = {n: chunked_timeline(times, slots[n], overhead if n > 1 else 0.0) for n in choices}
  least = min(map(length, plans.values()))
  chunks = min(n for n, spans in plans.items() if length(spans) <= 1.001 * least)
  return chunks, plans[chunks]


def draw(spans: Sequence[Span], width: int = 76) -> str:
  """The two streams as text, to scale; `·` where a stream waits.

  >>> print(draw([Span(COMPUTE, "mlp", 0, 2), Span(LINK, "dispatch", 0, 1)], 20))
  compute |mlp-----------------|
  link    |dispatch--··········|

  Raises:
    ConfigError: `spans` is no list of `Span`s.
  """
  check_type("spans", spans, Sequence)
  for span in spans:
    check_type("spans", span, Span)
  end = length(spans)
  if end <= 0:
    return ""
  lines = []
  for stream in (COMPUTE, LINK):
    cells = ["·"] * width
    for span in sorted((s for s in spans if s.stream == stream), key=lambda s: s.start):
      first, last = round(span.start / end * width), round(span.end / end * width)
      if last <= first:
        continue
      body = span.name[: last - first - 1] if last - first > 1 else ""
      cells[first:last] = (
        f"{body:-<{last - first}}" if first == 0 else f"|{body:-<{last - first - 1}}"
      )
    lines.append(f"{stream:8s}|{''.join(cells)}|")
  return "\n".join(lines)


def describe(
  times: Times, schedule: Schedule | None = None, unit: str = "ms", width: int = 76
) -> str:
  """A text: the schedule, if given; sums of times; each slot's makespan; and a timeline.

  Each slot's line also has its hidden share, and the best one's says so unless all are as good. The
  timeline is that of the best number of chunks (`best_chunks`), whose length has a line if they are
  several; it is `width` characters wide without its labels.

  Raises:
    ConfigError: `times` is no `Times`.
  """
  check_type("times", times, Times)
  best, parts = best_slot(times), best_chunks(times)
  totals = {
    "window": times.window,
    "communication": times.communication,
    "computation": times.computation,
    "sequential": sequential_makespan(times),
  }
  lines = [] if schedule is None else [str(schedule)]
  lines.append(", ".join(f"{name} {time:.3g} {unit}" for name, time in totals.items()))
  if times.earlier:
    time = sum(time for _, time in times.earlier)
    lines.append(f"earlier window in the pair before: {time:.3g} {unit}, not counted below")
  differ = len({round(makespan(times, slot), 9) for slot in times.slots}) > 1
  for slot in times.slots:
    mark = " <- best" if slot == best and differ else ""
    lines.append(
      f"experts after {slot}: {makespan(times, slot):.3g} {unit}, "
      f"{100 * hidden_share(times, slot):.0f} % hidden{mark}"
    )
  if parts[0] > 1:
    lines.append(f"in {parts[0]} chunks: {length(parts[1]):.3g} {unit}")
  return "\n".join([*lines, draw(parts[1], width)])
