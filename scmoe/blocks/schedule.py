"""The order of a block pair's steps: one list, executed, printed and tested. Pure Python.

The list has the steps of one unit; a pair of two units (dgmoe_share) runs it once for each. Two
streams: the main path with its dense steps, and the MoE with route, dispatch, experts and combine.
All-to-alls (dispatch, combine) run beside computation; computation never runs beside
computation. Routing goes to the earliest point, the sum with the routed output to the latest, so
the one free choice is the *slot*: after which dense step the experts stand
(`scmoe.blocks.timeline` computes the best one from times). Pos-2, with the experts inside the
second attention, after its projections:

  attention 0 | route | dispatch | mlp 0 | attention 1: projections | experts | combine |
  attention 1: mixing | shared expert | add

Where rows travel in chunks, the experts are one step per chunk, each with a slot of its own. The
second chunk's rows arrive while the experts compute the first chunk, and the first chunk's results
leave while they compute the second. (With `overlap.schedule=off` one step computes all chunks.)

With barriers, and one batch at a time, each chunk's dispatch can be a step too. XLA runs one
exchange at a time and places operations from the end of the program backward: it would give every
product that may stand beside either exchange to the last one, and the first would stand bare. So
the second chunk is sent behind the steps that stand beside the first (`_sent_behind`):

  route | dispatch: chunk 1 | mlp 0 | dispatch: chunk 2 | experts: chunk 1 | attention 1: ...

On the way back a barrier holds the shared expert until all chunks but the last are back
(`_Place.back_before`). So the last chunk's combine has the shared expert beside it, and that of the
chunk before has the last chunk's experts and what stands between these and the shared expert.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type, check_whole
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.wiring import Tap, Wiring, is_handed_over, tap_index

# Dense steps. An attention is two, so that the experts can stand behind its projections.
PROJECTIONS, MIXING, MLP, SHARED = "projections", "mixing", "mlp", "shared expert"
# Steps of the MoE, and the end of the pair.
ROUTE, DISPATCH, EXPERTS, COMBINE, ADD = "route", "dispatch", "experts", "combine", "add"
# A step that computes nothing: what follows it waits for the main path's value and for the MoE's.
BARRIER = "barrier"


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of a unit.

  Attributes:
    operation: one of the words above.
    block: of a dense step: which block of the unit.
    gating: of a step of the MoE: which of the unit's gatings.
    direction: of a barrier: "forward" or "backward" for one pass only.
    chunk: of dispatch, experts and their barriers: which chunk of the rows; None: all of them.
    ahead: of route, dispatch and their barrier: they are the next pair's (`Schedule.of`).
  """

  operation: str
  block: int = 0
  gating: int = 0
  direction: str = ""
  chunk: int | None = None
  ahead: bool = False

  @property
  def name(self) -> str:
    """The step's name: `attention 1: projections`, `mlp 0`, `experts: chunk 1`, `next route`."""
    if self.operation in (PROJECTIONS, MIXING):
      return f"attention {self.block}: {self.operation}"
    if self.operation == MLP:
      return f"{MLP} {self.block}"
    name = "next " * self.ahead + self.operation + (f" {self.gating + 1}" if self.gating else "")
    return name if self.chunk is None else f"{name}: chunk {self.chunk + 1}"

  def chunks_of(self, rows: Sequence[Any]) -> range:
    """The chunks that the step computes, of the chunks `rows` that the transport made.

    A step without `chunk` computes all of them. If the transport made one chunk only, the steps for
    the others compute none.
    """
    if self.chunk is None:
      return range(len(rows))
    return range(self.chunk, min(self.chunk + 1, len(rows)))


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The steps of a pair of one unit, in the order in which they are issued.

  A pair of two units issues them once for each unit. Where a pair begins the next pair's route and
  dispatch, `steps` has those of both pairs. A pair runs the steps that `of` picks. Pos-2 with one
  block per pair:

    steps     route | dispatch | attention 0 | next route | next dispatch | shared expert | ...
    first     route | dispatch | attention 0 | next route | next dispatch | shared expert | ...
    between                      attention 0 | next route | next dispatch | shared expert | ...
    last                         attention 0 | shared expert | ...

  Attributes:
    steps: of the forward pass, with the barriers that tie their order, if any.
    backward: names of the backward pass' steps, in its order, of a pair between two others. Where
      XLA decides (`overlap.ablation.backward=free`), they are those of the mirror image.
    earlier: names of the steps of the pair before beside which route and dispatch can run too; see
      `earlier_steps`.
  """

  steps: tuple[Step, ...]
  backward: tuple[str, ...]
  earlier: tuple[str, ...] = ()

  @property
  def begins_next(self) -> bool:
    """Whether a pair that another one follows begins that pair's route and dispatch."""
    return any(step.ahead for step in self.steps)

  def of(self, *, begun: bool, begins_next: bool) -> tuple[Step, ...]:
    """The steps of one pair.

    Args:
      begun: the pair before has begun this one's route and dispatch.
      begins_next: this pair begins those of the next one.
    """
    return _picked(self.steps, begun, begins_next)

  @property
  def forward(self) -> tuple[str, ...]:
    """Names of the forward pass' steps, of a pair between two others."""
    steps = self.of(begun=self.begins_next, begins_next=self.begins_next)
    return tuple(step.name for step in steps if step.operation != BARRIER)

  def __str__(self) -> str:
    lines = [f"forward:  {' | '.join(joined(self.forward))}"]
    if self.earlier:
      how = "which begins route and dispatch" if self.begins_next else (
        "where one step of the scan has both pairs (overlap.unroll)")  # fmt: skip
      lines.append(f"earlier:  {' | '.join(joined(self.earlier))} of the pair before, {how}")
    return "\n".join([*lines, f"backward: {' | '.join(joined(self.backward))}"])


def make_schedule(
  wiring: Wiring, blocks: int, overlap: OverlapConfig = OverlapConfig(), chunks: int = 1
) -> Schedule:
  """The `Schedule` of pairs with this wiring: the steps of one unit.

  Args:
    wiring: of the pair.
    blocks: of a unit; the last one has the MoE.
    overlap: where the experts stand, and what ties the order.
    chunks: in which rows travel (`dispatch.chunks`), each with a step of the experts.

  Raises:
    ConfigError: `overlap.schedule` or `overlap.ablation.backward` names no step, or neither one
      step nor one for each chunk; an argument is of another type; or `blocks` or `chunks` is below
      1.
  """
  check_type("wiring", wiring, Wiring)
  check_type("overlap", overlap, OverlapConfig)
  check_whole("blocks", blocks, 1)
  check_whole("chunks", chunks, 1)
  dense = dense_steps(wiring, blocks)
  starts = [tap_step(tap_index(tap, blocks)) for tap in wiring.taps]
  names = tuple(step.name for step in earlier_steps(wiring, blocks))
  ahead = None
  if overlap.ahead and names and len(wiring.taps) == wiring.units_per_moe == 1:
    ahead = len(dense) - len(names)
  earlier = [is_handed_over(tap, blocks) for tap in wiring.taps]
  if overlap.schedule == "off":
    alone = [_Place(start, (start,), (start,)) for start in starts]
    steps = _in_order(dense, alone)
    return Schedule(_alone(steps), _mirror(steps))
  slots = back = (len(dense),) * chunks
  if overlap.schedule != "auto":
    slots = back = _positions(overlap.schedule, "overlap.schedule", dense, blocks, chunks)
  if overlap.ablation.backward not in ("mirror", "free"):
    back = _positions(overlap.ablation.backward, "overlap.ablation.backward", dense, blocks, chunks)
  after = lambda start, slots: tuple(max(start, slot) for slot in slots)
  places = [
    _Place(start, after(start, slots), after(start, back), before, ahead)
    for start, before in zip(starts, earlier)
  ]
  if overlap.order == "barriers" and overlap.flight == 1:
    shared = len(dense) - 1 if wiring.shared_expert else None
    places = [
      dataclasses.replace(place, sent=_sent_behind(place), back_before=shared) for place in places
    ]
  order = ""
  # Batches can take turns only if barriers keep the order (`in_turns`).
  if overlap.order == "barriers" or overlap.flight > 1:
    order = "forward" if overlap.ablation.backward == "free" else "both"
  mirrored = [
    _Place(place.start, place.back, place.back, ahead=ahead, sent=place.sent) for place in places
  ]
  between = _picked(_in_order(dense, mirrored), ahead is not None, ahead is not None)
  return Schedule(_in_order(dense, places, order), _mirror(between), names)


def turns_of(steps: Sequence[Step]) -> list[list[Step]]:
  """Steps cut where a batch pauses for others: behind every dispatch and before every combine."""
  turns: list[list[Step]] = [[]]
  for before, step in itertools.pairwise((None, *steps)):
    assert step is not None
    if step.operation == COMBINE or (before and before.operation == DISPATCH):
      turns.append([])
    turns[-1].append(step)
  return turns


@dataclasses.dataclass(frozen=True)
class _Place:
  """The position of one gating, as numbers of dense steps before it in forward order.

  Attributes:
    start: before route and dispatch.
    experts: before the experts, for each chunk.
    back: before the backward pass of the experts, for each chunk.
    handed_over: whether the unit before hands the tap over. Routing then needs nothing of this
      unit, so no barrier holds it behind the end of that unit (`earlier_steps`).
    ahead: before the next unit's route and dispatch; None: this unit does not begin them.
    sent: before the dispatch of each chunk, the first at `start`; (): all are sent at `start`.
    back_before: before the shared expert, which waits in the forward pass until all chunks but the
      last are back, if all experts stand before it, chunk by chunk; None: it does not wait.
  """

  start: int
  experts: tuple[int, ...]
  back: tuple[int, ...]
  handed_over: bool = False
  ahead: int | None = None
  sent: tuple[int, ...] = ()
  back_before: int | None = None

  def steps(self, gating: int, position: int, tied: str) -> list[Step]:
    """This gating's steps behind `position` dense steps; `tied` as in `_in_order`."""
    apart = tied == "both" and self.back != self.experts
    direction = "forward" if apart or tied == "forward" else ""
    steps: list[Step] = []
    if position == self.start:
      steps += [Step(BARRIER, gating=gating)] * (bool(tied) and not self.handed_over)
      steps.append(Step(ROUTE, gating=gating))
      steps += [] if self.sent else [Step(DISPATCH, gating=gating)]
    sent_here = [chunk for chunk, behind in enumerate(self.sent) if behind == position]
    steps += [Step(DISPATCH, gating=gating, chunk=chunk) for chunk in sent_here]
    if position == self.ahead:
      steps += [Step(BARRIER, ahead=True)] * bool(tied)
      steps += [Step(ROUTE, ahead=True), Step(DISPATCH, ahead=True)]
    for number, (experts, back) in enumerate(zip(self.experts, self.back)):
      chunk = number if len(self.experts) > 1 else None
      of = lambda operation, way="", c=chunk: Step(operation, gating=gating, direction=way, chunk=c)
      if apart and position == back < experts:
        steps.append(of(BARRIER, "backward"))
      if position == experts:
        barrier = [of(BARRIER, direction)] * bool(tied)
        steps += [*barrier, of(EXPERTS), *barrier]
      if apart and position == back > experts:
        steps.append(of(BARRIER, "backward"))
    # The backward pass' barrier ties the experts' rows, so combine comes behind it.
    if position == max((*self.experts, *self.back) if apart else self.experts):
      steps.append(Step(COMBINE, gating=gating))
    chunks = len(self.experts)
    in_order = chunks > 1 and list(self.experts) == sorted(self.experts)
    if in_order and max(*self.experts, *self.back) <= position == self.back_before:
      steps.append(Step(BARRIER, gating=gating, direction="forward", chunk=chunks - 2))
    return steps


def _sent_behind(place: _Place) -> tuple[int, ...]:
  """Numbers of dense steps before the dispatch of each chunk; () if all are sent at once.

  The dense steps before a chunk's experts are shared evenly among the exchanges up to its own. With
  two chunks whose experts stand behind steps 1 and 2, the second chunk is sent behind step 1, as
  also where the experts of both stand behind step 2. No chunk is sent later than the first chunk's
  experts, which stand beside the exchange of the second, nor later than these experts' place in the
  backward pass. A tap that the unit before hands over has that unit's steps beside its exchanges:
  all its chunks are sent at once.
  """
  chunks = len(place.experts)
  if chunks == 1 or place.handed_over:
    return ()
  latest = min(place.experts[0], place.back[0])
  share = lambda chunk: -(-chunk * (place.experts[chunk] - place.start) // chunks)
  sent = tuple(min(latest, place.start + share(chunk)) for chunk in range(chunks))
  return sent if sent[-1] > place.start else ()


def _in_order(dense: Sequence[Step], places: Sequence[_Place], tied: str = "") -> tuple[Step, ...]:
  """All steps, with the barriers that tie the main path to the MoE's values.

  The barriers are on both sides of the experts and before routing, unless the unit before hands the
  tap over; one is before the next unit's routing, if this unit begins it. The transpose of a
  barrier is a barrier, so the backward pass runs the mirror image of the schedule. If the experts
  have another slot in the backward pass, each pass has barriers of its own.

  Args:
    dense: the main path.
    places: of each gating.
    tied: "" without barriers; "forward" or "both": which passes have some.
  """
  steps: list[Step] = []
  for position in range(len(dense) + 1):
    for gating, place in enumerate(places):
      steps += place.steps(gating, position, tied)
    steps += dense[position : position + 1]
  return (*steps, Step(ADD))


def _picked(steps: Sequence[Step], begun: bool, begins_next: bool) -> tuple[Step, ...]:
  """The steps of one pair, out of those that `Schedule.steps` has for two; see `Schedule.of`.

  If `begun`, the pair's route and dispatch are left out. No barrier stands before them, since the
  pair's input was handed over.
  """
  sends = lambda step: step.operation in (ROUTE, DISPATCH)
  left_out = lambda step: not begins_next if step.ahead else begun and sends(step)
  return tuple(step for step in steps if not left_out(step))


def _alone(steps: Sequence[Step]) -> tuple[Step, ...]:
  """The steps with barriers around the MoE: nothing runs beside it. The control of measurements."""
  tied: list[Step] = []
  for step in steps:
    barrier = [Step(BARRIER, gating=step.gating)]
    before, after = step.operation == ROUTE, step.operation == COMBINE
    tied += (barrier if before else []) + [step] + (barrier if after else [])
  return tuple(tied)


def _mirror(steps: Sequence[Step]) -> tuple[str, ...]:
  """Names of the steps, but for barriers, from last to first: their order in the backward pass."""
  return tuple(step.name for step in reversed(steps) if step.operation != BARRIER)


def dense_steps(wiring: Wiring, blocks: int) -> list[Step]:
  """The steps of a unit's main path.

  In a unit with experts the last block has the shared expert in place of its MLP, or neither.
  """
  steps: list[Step] = []
  for block in range(blocks):
    steps += [Step(PROJECTIONS, block), Step(MIXING, block)]
    if block < blocks - 1 or not wiring.taps:
      steps.append(Step(MLP, block))
    elif wiring.shared_expert:
      steps.append(Step(SHARED, block))
  return steps


def earlier_steps(wiring: Wiring, blocks: int) -> list[Step]:
  """Dense steps of the unit before that are part of the first tap's window.

  With one block per unit the preceding block is the unit before. The paper's windows (§3.1) are
  then, in dense steps from the tap to the end of this unit:

    Pos-1                             attention | shared expert
    Pos-2             shared expert | attention | shared expert
    Pos-3 attention | shared expert | attention | shared expert

  The unit before hands the value over. With `overlap.ahead` it begins this unit's route and
  dispatch too, as soon as it has the value. Without, this unit's list begins with them: XLA may
  issue them earlier, but moves no collective across a step of the scan over layers, so that the
  first pair of a step has the window of Pos-1.
  """
  tap = wiring.taps[0] if wiring.taps else Tap.CURRENT
  if not is_handed_over(tap, blocks):
    return []
  return dense_steps(wiring, blocks)[2 if tap is Tap.ATTENTION else 0 :]


def tap_step(operations: int) -> int:
  """Number of dense steps before a tap, from the number of dense operations (`tap_index`).

  Operations alternate between an attention, which is two steps, and an MLP: 0, 1, 2, 3 operations
  are 0, 2, 3, 5 steps.
  """
  return operations + (operations + 1) // 2


def slot_names(dense: Sequence[str]) -> list[str]:
  """Names of all slots beside dense steps of these names: right after dispatch, or after a step."""
  return [DISPATCH, *(name.removesuffix(f": {MIXING}") for name in dense)]


def joined(names: Iterable[str]) -> list[str]:
  """Names with the two steps of an attention joined where they are neighbours."""
  result: list[str] = []
  for name in names:
    whole, _, half = name.partition(": ")
    other = {MIXING: PROJECTIONS, PROJECTIONS: MIXING}.get(half)
    if other and result and result[-1] == f"{whole}: {other}":
      result[-1] = whole
    else:
      result.append(name)
  return result


def _positions(
  names: str, field: str, dense: Sequence[Step], blocks: int, chunks: int
) -> tuple[int, ...]:
  """Numbers of dense steps before the named slots, one for each chunk.

  One name stands for the slots of all chunks.

  Raises:
    ConfigError: a name is of no slot, or their number is neither 1 nor that of the chunks.
  """
  slots = [_position(name.strip(), field, dense, blocks) for name in names.split(",")]
  if len(slots) not in (1, chunks):
    raise ConfigError(
      f"{field}={names!r} names {len(slots)} slots for dispatch.chunks={chunks}; use one, or "
      "one for each chunk"
    )
  return tuple(slots if len(slots) == chunks else slots * chunks)


def _position(name: str, field: str, dense: Sequence[Step], blocks: int) -> int:
  """Number of dense steps before the slot of this name.

  A slot that only other wirings have is the last one here: the number of all dense steps.

  Raises:
    ConfigError: no wiring has a slot of this name.
  """
  own = slot_names([step.name for step in dense])
  if name in own:
    return own.index(name)
  every = dense_steps(Wiring((), shared_expert=True), blocks)
  known = [*slot_names([step.name for step in every]), SHARED]
  if name in known:  # a step at the end of another wiring, which this one lacks
    return len(dense)
  near = difflib.get_close_matches(name, own, n=1)
  hint = f"did you mean {near[0]!r}? " if near else ""
  raise ConfigError(
    f"{field}={name!r} names no step; {hint}the experts can stand after: {', '.join(own)}"
  )
