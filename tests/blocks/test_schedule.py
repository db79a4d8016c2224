"""The slot, its makespan and its timeline, on examples of the paper's size."""

import itertools

import pytest

from scmoe.blocks.schedule import (
  COMPUTE,
  LINK,
  OverlapConfig,
  Span,
  Times,
  best_chunks,
  best_slot,
  best_slots,
  check_slots,
  chunked_timeline,
  describe,
  divide,
  draw,
  hidden_share,
  length,
  makespan,
  resolve_backward_slot,
  resolve_slot,
  sequential_makespan,
  slot_count,
  slots,
  timeline,
)
from scmoe.errors import ConfigError
from scmoe.options import check_options

ATTENTION, MLP, SHARED = ("attention", 6.0), ("mlp", 8.0), ("shared expert", 8.0)
WINDOWS = {  # paper §3.1: what runs beside the routed experts
  "pos1": (ATTENTION, SHARED),
  "pos2": (MLP, ATTENTION, SHARED),
  "pos3": (ATTENTION, MLP, ATTENTION, SHARED),
}


def times(window, dispatch=7.0, combine=7.0, **other):
  return Times(
    WINDOWS[window], dispatch=dispatch, combine=combine, **{"route": 2, "experts": 8} | other
  )


@pytest.mark.parametrize(("window", "count"), [("pos1", 3), ("pos2", 4), ("pos3", 5)])
def test_slots_of_the_paper(window, count):
  assert slot_count(len(WINDOWS[window])) == count


def test_attention_has_a_slot_inside():
  names = {window: [name for name, _ in ops] for window, ops in WINDOWS.items()}
  assert slots(names["pos2"]) == [0, 1, 1.5, 2, 3]
  assert slots(names["pos3"]) == [0, 0.5, 1, 2, 2.5, 3, 4]
  # Window 8 + 6 + 8 and twice 11: each whole slot leaves 3 of them exposed.
  full = times("pos2", 11.0, 11.0)
  assert [makespan(full, slot) - full.computation for slot in (1, 1.5, 2)] == [3, 0, 3]
  assert best_slot(full) == 1.5
  assert best_slots(full) == (1.5, 1.5)
  assert "slot 1.5 (inside attention): 32 ms, 100 % hidden <- best" in describe(full)


def test_slots_that_do_not_exist_are_refused():
  dense = ["mlp", "attention", "shared expert"]
  for slot in (-1, 0, 1.5, 7):
    check_slots(OverlapConfig(slot=slot, backward_slot=slot), dense)
  check_slots(OverlapConfig(backward_slot=-2), dense)
  with pytest.raises(ConfigError, match=r"overlap.slot=1.25 lies inside .*: 0, 1, 1.5, 2, 3$"):
    check_slots(OverlapConfig(slot=1.25), dense)
  with pytest.raises(ConfigError, match=r"overlap.backward_slot=2.5 lies inside"):
    check_slots(OverlapConfig(backward_slot=2.5), dense)


def test_makespan_by_hand():
  pos2 = times("pos2", add=1.0)
  # slot:      before MLP    after MLP      after attention  after the shared expert
  assert [makespan(pos2, s) for s in range(4)] == [
    2 + 7 + 8 + 22 + 1,
    2 + 8 + 8 + 14 + 1,
    2 + 14 + 8 + 8 + 1,
    2 + 22 + 8 + 7 + 1,
  ]
  assert best_slot(pos2) == 1
  assert hidden_share(pos2, 1) == 1
  assert hidden_share(pos2, 0) == pytest.approx(0.5)
  assert sequential_makespan(pos2) == 2 + 22 + 8 + 1 + 14


def test_the_argmin_is_that_of_the_papers_equation_11():
  for dispatch, combine in itertools.product((1.0, 5.0, 9.0, 30.0), repeat=2):
    for window in WINDOWS:
      t = times(window, dispatch, combine)
      mismatches = {}
      for slot in slots([name for name, _ in t.dense]):
        pre, post = (sum(time for _, time in part) for part in divide(t, slot))
        mismatches[slot] = abs(pre - t.dispatch) + abs(post - t.combine)
      assert best_slot(t) == min(mismatches, key=lambda slot: (mismatches[slot], slot % 1))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_timeline_ends_when_the_makespan_says(window):
  for communication in (0.0, 3.0, 12.0, 40.0):
    t = times(window, communication, communication, before=3.0, add=1.0)
    for slot in slots([name for name, _ in t.dense]):
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
  spans = chunked_timeline(t, chunks)
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


def test_the_backward_pass_is_the_mirror_image():
  t = times("pos2", 3.0, 14.0)
  back = t.backward()
  assert [name for name, _ in back.dense] == ["shared expert", "attention", "mlp"]
  assert (back.dispatch, back.combine, back.experts) == (14.0, 3.0, 16)
  for slot in range(4):
    mirrored = len(t.dense) - slot
    pre, post = sum(x for _, x in back.dense[:mirrored]), sum(x for _, x in back.dense[mirrored:])
    assert makespan(back, mirrored) == pytest.approx(16 + 4 + max(pre, 14) + max(post, 3))
  # Equally good slots: the backward pass takes the mirror image.
  assert best_slots(t) == (1, 1)
  assert best_slots(times("pos2", 14.0, 3.0)) == (2, 2)
  # Where the backward pass takes so long that another slot fits both exchanges, it has its own.
  uneven = Times((("a", 2.0), ("b", 9.0)), dispatch=2.0, combine=18.0, route=0, experts=1)
  assert best_slots(uneven) == (0, 1)


def test_slots_of_a_config():
  overlap = OverlapConfig(slot=9)
  assert [resolve_slot(slot, 3) for slot in (9, -1, 1)] == [3, 3, 1]
  assert resolve_backward_slot(overlap, 3) == 3
  assert resolve_backward_slot(OverlapConfig(slot=1, backward_slot=2), 3) == 2
  assert resolve_backward_slot(OverlapConfig(slot=1, backward_slot=-2), 3) > 3
  with pytest.raises(ConfigError, match=r"overlap.backward_slot=-3 is too small; the least is -2"):
    check_options(OverlapConfig(backward_slot=-3), "overlap")


def test_compiler_options():
  overlap = OverlapConfig()
  assert overlap.compiler_options(gpu=False) == {}
  assert overlap.compiler_options(gpu=True) == {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_command_buffer": "",
  }
  graphs = OverlapConfig(command_buffers=True)
  assert "xla_gpu_enable_command_buffer" not in graphs.compiler_options(gpu=True)
  assert "xla_gpu_enable_command_buffer" in graphs.compiler_options(gpu=True, profiling=True)


def test_the_drawing_is_to_scale():
  text = draw([Span(COMPUTE, "mlp", 0, 2), Span(LINK, "dispatch", 0, 1)], 20)
  assert text.splitlines() == [
    "compute |mlp-----------------|",
    "link    |dispatch--··········|",
  ]
  assert draw([]) == ""


def test_the_description_names_the_best_slot():
  text = describe(times("pos3"))
  assert "slot 0 (after the shortcut)" in text
  assert "slot 4 (after shared expert)" in text
  assert text.count("<- best") == 1
