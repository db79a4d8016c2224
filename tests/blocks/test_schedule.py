"""The list of steps, the slot, its makespan and its timeline, on examples of the paper's size."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import itertools

import pytest

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapAblation, OverlapConfig
from scmoe.blocks.schedule import (
  ADD,
  BARRIER,
  COMBINE,
  DISPATCH,
  EXPERTS,
  ROUTE,
  Step,
  dense_steps,
  joined,
  make_schedule,
  slot_names,
)
from scmoe.blocks.timeline import (
  COMPUTE,
  LINK,
  Span,
  Times,
  best_chunks,
  best_slot,
  best_slots,
  chunk_slots,
  chunked_timeline,
  describe,
  draw,
  hidden_share,
  length,
  makespan,
  sequential_makespan,
  timeline,
  unit_times,
)
from scmoe.blocks.wiring import WIRINGS

INSIDE = "attention 1: projections"
ATTENTION_0 = (("attention 0: projections", 3.0), ("attention 0: mixing", 3.0))
MLP, SHARED = ("mlp 0", 8.0), ("shared expert", 8.0)
ATTENTION = ((INSIDE, 3.0), ("attention 1: mixing", 3.0))
WINDOWS = {  # paper §3.1: what runs beside the routed experts
  "pos1": (*ATTENTION, SHARED),
  "pos2": (MLP, *ATTENTION, SHARED),
  "pos3": (*ATTENTION_0, MLP, *ATTENTION, SHARED),
}


def times(window, dispatch=7.0, combine=7.0, **other):
  return Times(
    WINDOWS[window], dispatch=dispatch, combine=combine, **{"route": 2, "experts": 8} | other
  )


def names(window):
  return [name for name, _ in WINDOWS[window]]


# -- the list -------------------------------------------------------------------------------------


def listed(wiring, blocks=2, **overlap):
  schedule = make_schedule(WIRINGS[wiring], blocks, OverlapConfig(**overlap))
  return " | ".join(joined(schedule.forward)), " | ".join(joined(schedule.backward))


def test_the_list_of_pos2():
  assert listed("scmoe_pos2") == (
    "attention 0 | route | dispatch | mlp 0 | attention 1 | shared expert | experts | combine | "
    "add",
    "add | combine | experts | shared expert | attention 1 | mlp 0 | dispatch | route | "
    "attention 0",
  )
  assert listed("scmoe_pos2", schedule=INSIDE)[0] == (
    "attention 0 | route | dispatch | mlp 0 | attention 1: projections | experts | combine | "
    "attention 1: mixing | shared expert | add"
  )


@pytest.mark.parametrize(
  ("wiring", "want"),
  [
    ("dense", "attention 0 | mlp 0 | attention 1 | mlp 1 | add"),
    ("top2", "attention 0 | mlp 0 | attention 1 | route | dispatch | experts | combine | add"),
    (
      "scmoe_pos1",
      "attention 0 | mlp 0 | route | dispatch | attention 1 | shared expert | experts | combine | "
      "add",
    ),
    (
      "scmoe_pos3",
      "route | dispatch | attention 0 | mlp 0 | attention 1 | shared expert | experts | combine | "
      "add",
    ),
    (
      "dgmoe",
      "attention 0 | route | dispatch | mlp 0 | attention 1 | experts | combine | route 2 | "
      "dispatch 2 | experts 2 | combine 2 | add",
    ),
  ],
)
def test_the_list_of_every_wiring(wiring, want):
  assert listed(wiring)[0] == want


def test_nothing_beside_the_moe_is_the_control():
  forward, backward = listed("scmoe_pos2", schedule="off")
  assert "| route | dispatch | experts | combine | mlp 0 |" in forward
  assert "| mlp 0 | combine | experts | dispatch | route |" in backward
  steps = make_schedule(WIRINGS["scmoe_pos2"], 2, OverlapConfig(schedule="off")).steps
  operations = [step.operation for step in steps]
  assert operations.index(BARRIER) == operations.index(ROUTE) - 1
  assert operations.count(BARRIER) == 2  # nothing moves in or out


def test_the_backward_pass_may_have_a_slot_of_its_own():
  forward, backward = listed(
    "scmoe_pos2", schedule="mlp 0", ablation=OverlapAblation("attention 1")
  )
  assert "mlp 0 | experts" in forward
  assert backward.startswith("add | shared expert | combine | experts | attention 1 | mlp 0")
  mirrored = listed("scmoe_pos2", schedule="mlp 0")[1]
  assert "attention 1 | combine | experts | mlp 0" in mirrored


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("order", ["xla", "barriers"])
def test_every_list_is_possible(wiring, blocks, order):
  """All dense steps in order, each gating's steps in order, in every slot that there is."""
  rule = WIRINGS[wiring]
  dense = dense_steps(rule, blocks)
  for slot in ["auto", "off", *slot_names([step.name for step in dense])]:
    overlap = OverlapConfig(schedule=slot, order=order)
    schedule = make_schedule(rule, blocks, overlap)
    alone = schedule.of(begun=False, begins_next=False)
    steps = [step for step in alone if step.operation != BARRIER]
    assert [s for s in steps if s in dense] == dense
    for gating in range(len(rule.taps)):
      own = [s.operation for s in steps if s.gating == gating and s not in dense]
      assert own[:4] == [ROUTE, DISPATCH, EXPERTS, COMBINE]
    assert schedule.backward == tuple(reversed(schedule.forward))
    barriers = sum(step.operation == BARRIER for step in schedule.steps)
    assert (barriers > 0) == (bool(rule.taps) and (order == "barriers" or slot == "off"))


@pytest.mark.parametrize(
  ("wiring", "begins_before"),
  [("scmoe_pos1", False), ("scmoe_pos2", True), ("scmoe_pos3", True), ("topk", False)],
)
def test_a_tap_of_the_unit_before_is_not_held_back_to_its_end(wiring, begins_before):
  """With one block per unit Pos-2 reads before the shared expert of the unit before, and may send
  its rows beside that; Pos-1 reads behind it (paper §3.1)."""
  make = lambda **overlap: (
    make_schedule(WIRINGS[wiring], 1, OverlapConfig(ahead=False, **overlap)).steps
  )
  operations = [step.operation for step in make(order="barriers")]
  assert (BARRIER not in operations[: operations.index(ROUTE)]) == begins_before
  assert BARRIER in operations[operations.index(ROUTE) :], "the experts are tied in every wiring"
  alone = [step.operation for step in make(schedule="off")]
  assert BARRIER in alone[: alone.index(ROUTE)], "nothing is beside the control"


@pytest.mark.parametrize(
  ("wiring", "earlier"),
  [
    ("scmoe_pos1", ""),
    ("scmoe_pos2", "shared expert"),
    ("scmoe2", "shared expert"),
    ("scmoe_pos3", "attention 0 | shared expert"),
    ("dgmoe", ""),  # it has no shared expert, so nothing lies behind the tap
    ("topk", ""),
    ("dense", ""),
  ],
)
def test_a_unit_of_one_block_names_what_its_window_has_of_the_unit_before(wiring, earlier):
  """Windows of the paper's §3.1 with a MoE in every block: Pos-1 has this block, Pos-2 the shared
  expert before it too, Pos-3 all of the preceding block."""
  rule = WIRINGS[wiring]
  schedule, held = make_schedule(rule, 1), make_schedule(rule, 1, OverlapConfig(ahead=False))
  assert schedule.begins_next == bool(earlier)
  assert " | ".join(joined(schedule.earlier)) == earlier
  begins = f"earlier:  {earlier} of the pair before, which begins route and dispatch"
  assert (begins in str(schedule)) == bool(earlier)
  assert (f"earlier:  {earlier} of the pair before, where one step" in str(held)) == bool(earlier)
  assert make_schedule(rule, 2).earlier == ()
  assert make_schedule(rule, 1, OverlapConfig(schedule="off")).earlier == ()
  if not rule.taps:
    return
  durations = {"projections": 1, "mixing": 2, "mlp": 4, "shared": 8, "route": 1, "dispatch": 1,
               "experts": 1, "combine": 1, "add": 1}  # fmt: skip
  found = unit_times(rule, 1, durations)
  want = {"": 0, "shared expert": 8, "attention 0 | shared expert": 11}[earlier]
  assert sum(time for _, time in found.earlier) == want
  assert (f"in the pair before: {want} ms" in describe(found)) == bool(want)


def test_positions_with_a_moe_in_every_block_have_lists_of_their_own():
  """Pos-2 reads behind the attention of the block before, Pos-3 before it (paper §3.1): there they
  begin the route and dispatch of the next pair. Pos-1 reads at the end of the block."""
  assert [listed(f"scmoe_pos{i}", 1) for i in (1, 2, 3)] == [
    (
      "route | dispatch | attention 0 | shared expert | experts | combine | add",
      "add | combine | experts | shared expert | attention 0 | dispatch | route",
    ),
    (
      "attention 0 | next route | next dispatch | shared expert | experts | combine | add",
      "add | combine | experts | shared expert | next dispatch | next route | attention 0",
    ),
    (
      "next route | next dispatch | attention 0 | shared expert | experts | combine | add",
      "add | combine | experts | shared expert | attention 0 | next dispatch | next route",
    ),
  ]
  late = listed("scmoe_pos2", 1, schedule="attention 0")[0]
  assert "attention 0 | next route | next dispatch | experts | combine | shared expert" in late
  held = listed("scmoe_pos2", 1, ahead=False)
  assert held == listed("scmoe_pos1", 1)
  assert "next" not in " ".join(listed("scmoe_pos2", 1, schedule="off"))


def test_the_first_and_the_last_pair_have_lists_of_their_own():
  schedule = make_schedule(WIRINGS["scmoe_pos2"], 1)
  names = lambda **which: " | ".join(joined(step.name for step in schedule.of(**which)))
  between = names(begun=True, begins_next=True)
  assert between == " | ".join(joined(schedule.forward))
  assert names(begun=False, begins_next=True) == f"route | dispatch | {between}"
  assert names(begun=True, begins_next=False) == (
    "attention 0 | shared expert | experts | combine | add"
  )
  held = make_schedule(WIRINGS["scmoe_pos2"], 1, OverlapConfig(ahead=False))
  assert schedule.of(begun=False, begins_next=False) == held.steps


@pytest.mark.parametrize("wiring", ["dgmoe", "dgmoe_share", "topk", "scmoe_pos1"])
def test_wirings_that_begin_nothing_of_the_next_pair(wiring):
  """DGMoE's second gating avoids the expert of the first, which is then known in one pair only."""
  assert not make_schedule(WIRINGS[wiring], 1).begins_next
  assert not make_schedule(WIRINGS["scmoe_pos2"], 2).begins_next


def test_each_chunk_has_a_step():
  make = lambda slots, chunks=2: make_schedule(
    WIRINGS["scmoe_pos2"], 2, OverlapConfig(schedule=slots, order="barriers"), chunks
  )
  assert " | ".join(joined(make("mlp 0, attention 1").forward)) == (
    "attention 0 | route | dispatch: chunk 1 | mlp 0 | dispatch: chunk 2 | experts: chunk 1 | "
    "attention 1 | experts: chunk 2 | combine | shared expert | add"
  )
  assert make("mlp 0").forward == make("mlp 0, mlp 0").forward
  barriers = [step.chunk for step in make("mlp 0").steps if step.operation == BARRIER]
  assert barriers == [None, 0, 0, 1, 1, 0]  # the last one: the first chunk is back
  with pytest.raises(ConfigError, match=r"names 2 slots for dispatch.chunks=3; use one, or one f"):
    make("mlp 0, attention 1", 3)


def test_the_shared_expert_waits_until_all_chunks_but_the_last_are_back():
  """The last chunk's combine then has this step beside it, which XLA might give to the others."""

  def waiting(slots, chunks, wiring="scmoe_pos2", **overlap):
    overlap = OverlapConfig(schedule=slots, **{"order": "barriers", **overlap})
    steps = make_schedule(WIRINGS[wiring], 2, overlap, chunks).steps
    back = [step.operation for step in steps].index("combine")
    held = [i for i, step in enumerate(steps) if i > back and step.operation == BARRIER]
    return [(steps[i].chunk, steps[i].direction, steps[i + 1].name) for i in held]

  seam = "attention 1: projections"
  assert waiting(f"mlp 0, {seam}", 2) == [(0, "forward", "shared expert")]
  assert waiting("mlp 0", 4) == [(2, "forward", "shared expert")]
  assert waiting(f"mlp 0, {seam}", 2, order="xla") == []
  assert waiting(f"mlp 0, {seam}", 2, flight=2) == []
  assert waiting(seam, 1) == []
  assert waiting("shared expert", 2) == []  # no dense step is behind the experts
  assert waiting(f"{seam}, mlp 0", 2) == [], "the first chunk would be back last"
  assert waiting("mlp 0", 2, "farskip_routed") == [], "no shared expert"


def behind_dispatches(slots, chunks, wiring="scmoe_pos2", blocks=2, **overlap):
  """The dense steps between two chunks' dispatches, which only the first can have beside it."""
  overlap = OverlapConfig(schedule=slots, **{"order": "barriers", **overlap})
  steps = make_schedule(WIRINGS[wiring], blocks, overlap, chunks).steps
  names = [step.name for step in steps if step.operation not in (BARRIER, ROUTE, ADD)]
  at = [i for i, name in enumerate(names) if name.startswith("dispatch")]
  return [names[i + 1 : j] for i, j in zip(at, [*at[1:], names.index("experts: chunk 1")])]


def test_no_chunk_stands_bare_while_a_step_of_its_list_waits():
  """The steps before a chunk's experts are shared among the exchanges up to its own."""
  seam = "attention 1: projections"
  assert behind_dispatches(f"mlp 0, {seam}", 2) == [["mlp 0"], []]
  # Both behind one step: the first has the first half beside it, the second the second half.
  assert behind_dispatches(seam, 2) == [["mlp 0"], [seam]]
  assert behind_dispatches("shared expert", 2) == [
    ["mlp 0", seam], ["attention 1: mixing", "shared expert"],
  ]  # fmt: skip
  three = behind_dispatches("attention 1", 3)
  assert three == [["mlp 0"], [seam], ["attention 1: mixing"]]
  # The second has the first's experts beside it, and the first nothing that could wait.
  assert behind_dispatches("dispatch, shared expert", 2) == [[]]
  # The backward pass has the experts earlier in forward order: no dispatch stands behind them.
  earlier = OverlapAblation("dispatch")
  assert behind_dispatches(f"mlp 0, {seam}", 2, ablation=earlier) == [["mlp 0"]]


def test_where_all_chunks_are_sent_at_once():
  """In turns another batch stands beside them, else XLA, else the steps of the unit before."""
  whole = [["mlp 0"]]
  assert behind_dispatches("mlp 0", 2, flight=2) == whole
  assert behind_dispatches("mlp 0", 2, order="xla") == whole
  assert behind_dispatches("attention 0", 2, blocks=1, ahead=False) == [
    ["attention 0: projections", "attention 0: mixing"]
  ]
  chunked = make_schedule(WIRINGS["scmoe_pos2"], 2, OverlapConfig("mlp 0", order="barriers"), 2)
  back = " | ".join(joined(chunked.backward))
  assert "experts: chunk 1 | dispatch: chunk 2 | mlp 0 | dispatch: chunk 1 | route" in back


def test_a_step_of_a_chunk_takes_what_the_transport_made():
  first, second = Step(EXPERTS, chunk=0), Step(EXPERTS, chunk=1)
  assert [list(step.chunks_of("ab")) for step in (first, second, Step(EXPERTS))] == [
    [0], [1], [0, 1],
  ]  # fmt: skip
  assert (list(first.chunks_of("a")), list(second.chunks_of("a"))) == ([0], [])  # one device


def test_words_that_name_no_step():
  make = lambda **overlap: make_schedule(WIRINGS["scmoe_pos2"], 2, OverlapConfig(**overlap))
  with pytest.raises(ConfigError, match=r"overlap.schedule='mlp0' names no step; did you mean"):
    make(schedule="mlp0")
  with pytest.raises(
    ConfigError, match=r"overlap.ablation.backward='1' names no step; .*after: dispatch"
  ):
    make(ablation=OverlapAblation("1"))
  # A step that another wiring has at its end: the last place here, so that one config serves both.
  late = make_schedule(WIRINGS["topk"], 2, OverlapConfig(schedule="shared expert"))
  assert late == make_schedule(WIRINGS["topk"], 2, OverlapConfig())


def test_halves_of_an_attention_are_one_where_nothing_stands_between_them():
  halves = ["attention 0: projections", "attention 0: mixing"]
  assert joined([*halves, "mlp 0"]) == ["attention 0", "mlp 0"]
  assert joined(reversed(halves)) == ["attention 0"]
  assert joined([halves[0], "experts", halves[1]]) == [halves[0], "experts", halves[1]]


# -- times ----------------------------------------------------------------------------------------


def test_slots_of_the_paper_and_one_inside_each_attention():
  assert slot_names(names("pos2")) == [DISPATCH, "mlp 0", INSIDE, "attention 1", "shared expert"]
  whole = {window: [s for s in slot_names(names(window)) if ":" not in s] for window in WINDOWS}
  assert {window: len(slots) for window, slots in whole.items()} == {
    "pos1": 3,
    "pos2": 4,
    "pos3": 5,
  }
  # Window 8 + 6 + 8 and twice 11: each whole slot leaves 3 of them exposed.
  full = times("pos2", 11.0, 11.0)
  exposed = [makespan(full, s) - full.computation for s in ("mlp 0", INSIDE, "attention 1")]
  assert exposed == [3, 0, 3]
  assert best_slot(full) == INSIDE
  assert best_slots(full) == (INSIDE, INSIDE)
  assert f"experts after {INSIDE}: 32 ms, 100 % hidden <- best" in describe(full)


def test_makespan_by_hand():
  pos2 = times("pos2", add=1.0)
  # slot:      before MLP    after MLP      after attention  after the shared expert
  whole = [DISPATCH, "mlp 0", "attention 1", "shared expert"]
  assert [makespan(pos2, s) for s in whole] == [
    2 + 7 + 8 + 22 + 1,
    2 + 8 + 8 + 14 + 1,
    2 + 14 + 8 + 8 + 1,
    2 + 22 + 8 + 7 + 1,
  ]
  assert best_slot(pos2) == "mlp 0"
  assert hidden_share(pos2, "mlp 0") == 1
  assert hidden_share(pos2, DISPATCH) == pytest.approx(0.5)
  assert sequential_makespan(pos2) == 2 + 22 + 8 + 1 + 14


def test_the_argmin_is_that_of_the_papers_equation_11():
  for dispatch, combine in itertools.product((1.0, 5.0, 9.0, 30.0), repeat=2):
    for window in WINDOWS:
      t = times(window, dispatch, combine)
      mismatches = {}
      for index, slot in enumerate(t.slots):
        pre, post = (sum(x for _, x in part) for part in (t.dense[:index], t.dense[index:]))
        mismatches[slot] = abs(pre - t.dispatch) + abs(post - t.combine)
      assert best_slot(t) == min(mismatches, key=lambda slot: (mismatches[slot], ":" in slot))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_timeline_ends_when_the_makespan_says(window):
  for communication in (0.0, 3.0, 12.0, 40.0):
    t = times(window, communication, communication, before=3.0, add=1.0)
    for slot in t.slots:
      assert length(timeline(t, slot)) == pytest.approx(makespan(t, slot))


def assert_possible(spans):
  """No stream does two things at once, and each part is sent, computed and sent back in order."""
  for stream in (COMPUTE, LINK):
    own = sorted((s for s in spans if s.stream == stream), key=lambda s: s.start)
    for a, b in itertools.pairwise(own):
      assert a.end <= b.start + 1e-9
  at = {s.name: s for s in spans}
  for name, span in at.items():
    if name.startswith("experts"):
      assert span.start >= at[name.replace("experts", "dispatch")].end - 1e-9
      assert span.end <= at[name.replace("experts", "combine")].start + 1e-9


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("communication", [5.0, 20.0, 60.0])
def test_chunked_timelines_are_possible_and_bounded(chunks, communication):
  t = times("pos2", communication, communication, add=1.0)
  spans = chunked_timeline(t, chunk_slots(t, chunks))
  assert_possible(spans)
  assert sum(s.end - s.start for s in spans if s.stream == LINK) == pytest.approx(t.communication)
  assert t.computation - 1e-9 <= length(spans) <= sequential_makespan(t) + 1e-9


def test_chunks_where_communication_exceeds_the_window():
  # Window 22, communication 40: in one part 2 + 20 + 8 + 20; in parts the experts hide some too.
  t = times("pos2", 20.0, 20.0)
  chunks, spans = best_chunks(t)
  assert chunks > 1
  assert t.route + t.communication <= length(spans) < makespan(t, best_slot(t))
  # Each part costs: with enough overhead one part is best again.
  assert best_chunks(t, overhead=10.0)[0] == 1


def test_many_chunks_share_slots():
  t = times("pos2", 20.0, 20.0)
  slots = chunk_slots(t, 32)  # the most that there may be
  assert len(slots) == 32
  assert len(set(slots)) <= 4
  assert length(chunked_timeline(t, slots)) <= length(chunked_timeline(t, chunk_slots(t, 2)))


def test_the_backward_pass_is_the_mirror_image():
  t = times("pos2", 3.0, 14.0)
  back = t.backward()
  assert [name for name, _ in back.dense] == [name for name, _ in reversed(t.dense)]
  assert (back.dispatch, back.combine, back.experts) == (14.0, 3.0, 16)
  for index in range(len(t.slots)):
    mirrored = len(t.dense) - index
    pre, post = sum(x for _, x in back.dense[:mirrored]), sum(x for _, x in back.dense[mirrored:])
    expected = 16 + 4 + max(pre, 14) + max(post, 3)
    assert makespan(back, back.slots[mirrored]) == pytest.approx(expected)
  # Equally good slots: the backward pass takes the mirror image.
  assert best_slots(t) == ("mlp 0", "mlp 0")
  assert best_slots(times("pos2", 14.0, 3.0)) == ("attention 1", "attention 1")
  # Where the backward pass takes so long that another slot fits both exchanges, it has its own.
  uneven = Times((("a", 2.0), ("b", 9.0)), dispatch=2.0, combine=18.0, route=0, experts=1)
  assert best_slots(uneven) == (DISPATCH, "a")


def test_compiler_options():
  overlap = OverlapConfig()
  assert overlap.compiler_options(gpu=False) == {}
  assert overlap.compiler_options(gpu=True) == {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_command_buffer": "",
  }
  one = OverlapConfig().derived(gpu=True, exchange=False, pairs=1, devices=1)
  assert "xla_gpu_enable_command_buffer" not in one.compiler_options(gpu=True)
  for gpu, devices in ((True, 2), (False, 1)):
    found = OverlapConfig().derived(gpu=gpu, exchange=False, pairs=1, devices=devices)
    assert found.command_buffers == "off"
  graphs = OverlapConfig(command_buffers="on")
  assert "xla_gpu_enable_command_buffer" not in graphs.compiler_options(gpu=True)
  assert "xla_gpu_enable_command_buffer" in graphs.compiler_options(gpu=True, profiling=True)


def test_the_drawing_is_to_scale():
  text = draw([Span(COMPUTE, "mlp", 0, 2), Span(LINK, "dispatch", 0, 1)], 20)
  assert text.splitlines() == [
    "compute |mlp-----------------|",
    "link    |dispatch--··········|",
  ]
  assert draw([]) == ""


def test_the_description_names_the_best_slot_and_prints_the_list_that_runs():
  text = describe(times("pos3"))
  assert "experts after dispatch:" in text
  assert "experts after shared expert:" in text
  assert text.count("<- best") == 1
  schedule = make_schedule(WIRINGS["scmoe_pos3"], 2, OverlapConfig(schedule=INSIDE))
  assert describe(times("pos3"), schedule).startswith(f"{schedule}\n")
  assert "attention 1: projections | experts | combine | attention 1: mixing" in str(schedule)


@pytest.mark.parametrize(
  ("given", "gpu", "exchange", "pairs", "per_step"),
  [
    (-1, True, False, 12, 12),  # GPUs: all written out
    (-1, True, True, 4, 4),
    (-1, True, True, 12, 4),  # compiled twice, and twice as long
    (-1, True, False, 40, 1),  # too many to compile
    (-1, False, True, 4, 1),
    (0, False, False, 3, 3),
    (2, True, True, 12, 2),  # as the user has it
  ],
)
def test_pairs_of_a_step(given, gpu, exchange, pairs, per_step):
  overlap = OverlapConfig(unroll=given).derived(gpu=gpu, exchange=exchange, pairs=pairs)
  assert overlap.pairs_per_step(pairs) == per_step
