"""Where the expert stage sits among the dense operations: the slot. Pure Python.

Two streams: the main path with its dense operations, and the MoE with route, dispatch, experts and
combine. All-to-alls (dispatch, combine) run beside computation; computation never runs beside
computation. Routing goes to the earliest point, the weighted sum of the routed rows to the latest,
so the one free choice is the slot: the number of dense operations between the shortcut and the
experts (paper §3.2, whose K is the slot + 1). Halves lie inside an attention, which has a natural
seam behind its projections: where operations are few, whole slots divide the window too coarsely.

  makespan(slot) = route + max(pre, dispatch) + experts + max(post, combine) + add

with pre and post the dense time before and after the experts. It has the same argmin as the paper's
Eq. 11, since max(a, b) = ½ (a + b + |a - b|) and pre + post does not depend on the slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from scmoe.errors import ConfigError
from scmoe.options import option

FREE = -2  # of `backward_slot`
ATTENTION = "attention"  # the dense operation that has half slots


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
  """How communication is laid beside the dense path."""

  slot: float = option(
    -1.0,
    "dense operations between the shortcut and the expert stage; -1 for the last slot before the "
    "routed output is needed; a half lies inside an attention, after its projections",
    minimum=-1,
  )
  backward_slot: float = option(
    -1.0,
    "the same for the backward pass, counted in forward order; -1 for the mirror image of the "
    "forward pass, -2 to leave the backward pass to XLA",
    minimum=FREE,
  )
  barriers: bool = option(
    False, "tie the order of the schedule with optimization barriers, so that XLA cannot move it"
  )
  sequential: bool = option(
    False, "no dense operation beside the MoE's stages: the control arm of a measurement"
  )
  unroll: int = option(
    1,
    "stages per step of the scan over layers; 0: all. XLA moves no collective across a step",
    minimum=0,
  )
  latency_hiding: bool = option(
    True, "GPU: XLA's latency-hiding scheduler, for the training step only"
  )
  profile_guided: bool = option(
    False,
    "GPU: profile the first steps and compile again with measured latencies; the profile is kept "
    "in WORKDIR/profile_guided and used by every later start of the run",
  )
  profile_runs: int = option(3, "steps that are profiled for it", minimum=1)
  command_buffers: bool = option(
    False,
    "GPU: record kernels into CUDA graphs. Off: graphs hide operations from the profile and were "
    "slower beside collectives",
  )
  copy_engines: bool = option(
    False,
    "GPUs of one host, jax >= 0.11: all-to-alls by the GPUs' copy engines, which take no "
    "multiprocessor from the computation; slower below about 64 MiB per exchange",
  )
  gradients: str = option(
    "microbatch",
    "when dense gradients are summed over devices: in every microbatch, where XLA places it; or "
    "once per step, each device adding up its own (needs mesh.tensor=1)",
    choices=("microbatch", "step"),
  )
  gradient_dtype: str = option(
    "float32",
    "in which gradients travel with gradients='step'; they are added up in float32",
    choices=("float32", "bfloat16"),
  )

  def compiler_options(self, *, gpu: bool, profiling: bool = False) -> dict[str, Any]:
    """XLA options of one jitted step, for `jax.jit(..., compiler_options=)`; none but on a GPU.

    Args:
      gpu: whether the program runs on NVIDIA GPUs.
      profiling: the program is run to collect a profile; a CUDA graph would name no operation.
    """
    if not gpu:
      return {}
    options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": self.latency_hiding}
    if profiling or not self.command_buffers:
      options["xla_gpu_enable_command_buffer"] = ""
    return options


def slot_count(window: int) -> int:
  """Slots of the expert stage beside `window` dense operations (paper §3.2: Pos-2 has 3 and 4)."""
  return window + 1


def slots(dense: Sequence[str]) -> list[float]:
  """All slots beside dense operations of these names: those of the paper, and the halves."""
  whole = range(slot_count(len(dense)))
  return sorted([*whole, *(i + 0.5 for i, name in enumerate(dense) if name == ATTENTION)])


def resolve_slot(slot: float, window: int) -> float:
  """The slot asked for, or the last one for -1; never beyond the window."""
  return window if slot < 0 else min(slot, window)


def resolve_backward_slot(overlap: OverlapConfig, window: int) -> float:
  """Slot of the experts' backward pass in forward order; beyond every window where XLA is free."""
  if overlap.backward_slot == FREE:
    return window + 2
  if overlap.backward_slot == -1:
    return resolve_slot(overlap.slot, window)
  return resolve_slot(overlap.backward_slot, window)


def check_slots(overlap: OverlapConfig, dense: Sequence[str]) -> None:
  """Checks that both slots exist beside the dense operations of these names.

  Raises:
    ConfigError: a slot lies inside an operation that has no seam.
  """
  allowed = slots(dense)
  resolved = {
    "slot": resolve_slot(overlap.slot, len(dense)),
    "backward_slot": min(len(dense), resolve_backward_slot(overlap, len(dense))),
  }
  for name, slot in resolved.items():
    if slot not in allowed:
      raise ConfigError(
        f"overlap.{name}={getattr(overlap, name):g} lies inside an operation that cannot be "
        f"divided; beside {', '.join(dense)} use one of: {', '.join(f'{s:g}' for s in allowed)}"
      )


@dataclasses.dataclass(frozen=True)
class Times:
  """Durations of one unit's operations, any one unit of time.

  Attributes:
    dense: (name, time) of the dense operations after the shortcut, in order: the window.
    route, dispatch, experts, combine: the MoE's stages; `route` includes laying out the rows.
    add: the weighted sum at the end.
    before: dense time before the shortcut.
  """

  dense: tuple[tuple[str, float], ...]
  route: float
  dispatch: float
  experts: float
  combine: float
  add: float = 0.0
  before: float = 0.0

  @property
  def window(self) -> float:
    """Dense time beside which communication can run."""
    return sum(time for _, time in self.dense)

  @property
  def communication(self) -> float:
    """Dispatch and combine."""
    return self.dispatch + self.combine

  @property
  def computation(self) -> float:
    """Everything but communication: no schedule is faster."""
    return self.before + self.window + self.route + self.experts + self.add

  def backward(self, factor: float = 2.0) -> Times:
    """The mirror image: dense operations from last to first, dispatch and combine exchanged.

    Args:
      factor: computation of the backward pass over that of the forward pass (two products for one).
    """
    times = [factor * time for _, time in self.dense]
    names = [name for name, _ in self.dense]
    return Times(
      dense=tuple(zip(reversed(names), reversed(times))),
      route=factor * self.add,
      dispatch=self.combine,
      experts=factor * self.experts,
      combine=self.dispatch,
      add=factor * self.route,
      before=0.0,
    )


@dataclasses.dataclass(frozen=True)
class Span:
  """One operation on one stream of a timeline."""

  stream: str  # COMPUTE or LINK
  name: str
  start: float
  end: float


COMPUTE, LINK = "compute", "link"


def divide(times: Times, slot: float) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
  """The dense operations before and after a slot; a half slot takes an operation's half time."""
  whole = int(slot)
  before, after = list(times.dense[:whole]), list(times.dense[whole:])
  if slot > whole:
    name, time = after[0]
    before, after = [*before, (name, time / 2)], [(name, time / 2), *after[1:]]
  return before, after


def makespan(times: Times, slot: float) -> float:
  """Time of the unit with the experts after `slot` dense operations, from its first operation."""
  pre, post = (sum(time for _, time in part) for part in divide(times, slot))
  first = times.before + times.route + max(pre, times.dispatch)
  return first + times.experts + max(post, times.combine) + times.add


def sequential_makespan(times: Times) -> float:
  """Time of the unit with nothing beside the communication."""
  return times.computation + times.communication


def best_slot(times: Times) -> float:
  """The slot of the shortest makespan (paper Eq. 11); among equals a whole one, the earliest."""
  names = [name for name, _ in times.dense]
  return min(slots(names), key=lambda slot: (makespan(times, slot), slot % 1))


def best_slots(times: Times, factor: float = 2.0) -> tuple[float, float]:
  """Best slot of the forward and of the backward pass, both counted in forward order.

  Among equals the backward pass takes the mirror image, which needs no barriers of its own.
  """
  backward, window = times.backward(factor), len(times.dense)
  forward = best_slot(times)
  mirrored = window - best_slot(backward)
  if makespan(backward, window - forward) <= makespan(backward, window - mirrored):
    return forward, forward
  return forward, mirrored


def hidden_share(times: Times, slot: float) -> float:
  """Share of the communication beside which the schedule computes; 1 where there is none."""
  exposed = makespan(times, slot) - times.computation
  return 1 - exposed / times.communication if times.communication else 1.0


def timeline(times: Times, slot: float) -> list[Span]:
  """The spans of the unit with the experts in `slot`."""
  return chunked_timeline(times, 1, slot)


def chunked_timeline(
  times: Times, chunks: int, slot: float | None = None, overhead: float = 0.0
) -> list[Span]:
  """The spans of the unit with the MoE's stream in `chunks` parts.

  The link takes all dispatches, then combines as they become ready. The main stream computes a part
  of the experts as soon as its rows are there (after `slot` dense operations at the earliest and,
  unless None, at the latest), else the next dense operation.

  Args:
    overhead: extra time of every part of every stage, for its launch.
  """
  spans: list[Span] = []
  now = 0.0

  def compute(name: str, time: float) -> None:
    nonlocal now
    if time > 0:
      spans.append(Span(COMPUTE, name, now, now + time))
    now += time

  compute("before", times.before)
  compute("route", times.route)
  label = lambda name, i: name if chunks == 1 else f"{name} {i + 1}"
  link = now
  arrivals = []
  for i in range(chunks):
    end = link + times.dispatch / chunks + overhead
    spans.append(Span(LINK, label("dispatch", i), link, end))
    arrivals.append(end)
    link = end
  before, after = divide(times, slot or 0)
  dense, done, ready = before + after, 0, []
  while dense or done < chunks:
    reached = len(dense) <= len(after)
    may = done < chunks and (slot is None or reached)
    must = done < chunks and (not dense or (slot is not None and reached))
    if may and (must or arrivals[done] <= now):
      now = max(now, arrivals[done])
      compute(label("experts", done), times.experts / chunks + overhead)
      ready.append(now)
      done += 1
    else:
      compute(*dense.pop(0))
  for i, start in enumerate(ready):
    link = max(link, start)
    spans.append(Span(LINK, label("combine", i), link, link + times.combine / chunks + overhead))
    link = spans[-1].end
  now = max(now, link)
  compute("add", times.add)
  return [span for span in spans if span.end > span.start]


def length(spans: Iterable[Span]) -> float:
  """When the last span ends."""
  return max((span.end for span in spans), default=0.0)


def best_chunks(
  times: Times, overhead: float = 0.0, choices: Sequence[int] = (1, 2, 4, 8)
) -> tuple[int, list[Span]]:
  """How many parts to send and compute the MoE's stream in, and the timeline.

  One part, in the best slot, while the communication fits the window; more parts let the experts'
  own computation hide communication too (the paper's fifth timeline, Fig. 7).
  """
  plans = {1: chunked_timeline(times, 1, best_slot(times), overhead)}
  plans |= {n: chunked_timeline(times, n, None, overhead) for n in choices if n > 1}
  least = min(map(length, plans.values()))
  chunks = min(n for n, spans in plans.items() if length(spans) <= 1.001 * least)
  return chunks, plans[chunks]


def draw(spans: Sequence[Span], width: int = 76) -> str:
  """The two streams as text, to scale; `·` where a stream waits.

  >>> print(draw([Span(COMPUTE, "mlp", 0, 2), Span(LINK, "dispatch", 0, 1)], 20))
  compute |mlp-----------------|
  link    |dispatch--··········|
  """
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


def describe(times: Times, unit: str = "ms", width: int = 76) -> str:
  """Makespan and hidden share of every slot, and the timeline of the best."""
  best, parts = best_slot(times), best_chunks(times)
  totals = {
    "window": times.window,
    "communication": times.communication,
    "computation": times.computation,
    "sequential": sequential_makespan(times),
  }
  lines = [", ".join(f"{name} {time:.3g} {unit}" for name, time in totals.items())]
  names = [name for name, _ in times.dense]
  for slot in slots(names):
    where = f"after {names[int(slot) - 1]}" if slot else "after the shortcut"
    if slot % 1:
      where = f"inside {names[int(slot)]}"
    mark = " <- best" if slot == best else ""
    lines.append(
      f"slot {slot:g} ({where}): {makespan(times, slot):.3g} {unit}, "
      f"{100 * hidden_share(times, slot):.0f} % hidden{mark}"
    )
  if parts[0] > 1:
    lines.append(f"in {parts[0]} chunks: {length(parts[1]):.3g} {unit}")
  return "\n".join([*lines, draw(parts[1], width)])
