"""A block pair cut out of a trace, by hand."""

import pytest

from scmoe.blocks import timeline
from scmoe.profiling import pair
from scmoe.profiling.pair import COMPUTE, LINK, pair_bars
from scmoe.profiling.trace import Event, is_communication, is_container

NAMES = {
  "route.1": "jit(f)/route/top_k",
  "send.1": "jit(f)/dispatch/all_to_all",
  "mlp.1": "jit(f)/mlp/dot_general",
  "back.1": "jit(f)/transpose(jvp(mlp))/dot_general",
  "adam.1": "jit(f)/optimizer/mul",
}


def event(op, start, end, name="gemm"):
  return Event("gpu", "s", name, start * 1e6, end * 1e6, op)


def pairs(*begin):
  """A pair of 10 ms each: it routes, sends from 4 to 6, computes from 3 to 7."""
  events = []
  for at in begin:
    events += [event("route.1", at + 1, at + 2), event("send.1", at + 4, at + 6, "ncclSend")]
    events.append(event("mlp.1", at + 3, at + 7))
  return sorted(events, key=lambda e: e.start)


def spans(bars):
  return [(bar.stage, bar.start, bar.end) for bar in bars]


def test_a_pair_is_cut_out_around_its_dispatch():
  bars = pair_bars(pairs(0, 10, 20), NAMES)
  assert spans(bars[LINK]) == [("dispatch", 3, 5)]
  assert spans(bars[COMPUTE]) == [("route", 0, 1), ("mlp", 2, 6)]


def test_the_pair_is_that_of_middle_length():
  bars = pair_bars(pairs(0, 50, 60, 72), NAMES)  # the first waits for kernels to load
  assert max(bar.end for bar in bars[COMPUTE]) < 12


def test_what_a_step_does_once_and_the_backward_pass_are_left_out():
  events = [*pairs(0, 10), event("back.1", 7, 8), event("adam.1", 8, 9)]
  bars = pair_bars(sorted(events, key=lambda e: e.start), NAMES)
  assert {bar.stage for bar in bars[COMPUTE]} == {"route", "mlp"}


def test_a_pair_has_its_own_combine_however_late_it_comes():
  events = []
  for at in (0, 10, 20, 30):
    events += [event("route.1", at + 1, at + 2), event("send.1", at + 2, at + 8, "ncclSend")]
    events += [event("mlp.1", at + 8, at + 9), event("back.2", at + 9, at + 10, "ncclSend")]
  names = {**NAMES, "back.2": "jit(f)/combine/all_to_all"}
  bars = pair_bars(events, names)
  assert spans(bars[LINK]) == [("dispatch", 1, 7), ("combine", 8, 9)]
  assert spans(bars[COMPUTE]) == [("route", 0, 1), ("mlp", 7, 8)]


def test_chunks_of_one_exchange_are_one_pair():
  events = [*pairs(0, 10), event("send.1", 7, 8, "ncclSend"), event("send.1", 17, 18, "ncclSend")]
  bars = pair_bars(sorted(events, key=lambda e: e.start), NAMES)
  assert spans(bars[LINK]) == [("dispatch", 3, 5), ("dispatch", 6, 7)]


def test_neighbours_of_one_stage_are_one_bar_that_counts_them():
  events = [*pairs(0, 10), event("mlp.1", 7.05, 8)]
  bars = pair_bars(sorted(events, key=lambda e: e.start), NAMES)
  assert bars[COMPUTE][-1].about == "2 operations, 4.95 ms of them busy"
  assert spans(bars[COMPUTE])[-1] == pytest.approx(("mlp", 2, 7))


def test_one_pair_is_no_period():
  assert not any(pair_bars(pairs(0), NAMES).values())
  assert not any(pair_bars([], NAMES).values())


def test_the_streams_have_the_names_of_the_schedule():
  assert (pair.COMPUTE, pair.LINK) == (timeline.COMPUTE, timeline.LINK)


@pytest.mark.parametrize("name", ["all-to-all.22", "all-reduce", "reduce-scatter-start.1"])
def test_collectives_of_simulated_devices_are_communication(name):
  assert is_communication(name, name)


@pytest.mark.parametrize("name", ["all_reduce_fusion.2", "fusion.3", "while.1"])
def test_computation_of_simulated_devices_is_not(name):
  assert not is_communication(name, name)


def test_loops_and_calls_hold_what_is_counted():
  assert is_container("while.270")
  assert is_container("call.1")
  assert not is_container("while_fusion.3")
