"""How a model is executed changes nothing: slots, barriers, unrolling and rematerialisation."""

import functools

import harness
import numpy as np
import pytest

from scmoe.blocks.schedule import OverlapConfig, resolve_slot, slot_count
from scmoe.errors import ConfigError
from scmoe.moe.dispatch import DispatchConfig

DROPS = DispatchConfig(capacity_factor=1.0, groups=2)
PLAIN = OverlapConfig()
WINDOWS = {"scmoe_pos1": 2, "scmoe_pos2": 3, "scmoe_pos3": 4, "dgmoe": 2}  # dense operations


@functools.cache
def executed(wiring, overlap=PLAIN, remat="none"):
  config = harness.tiny(wiring=wiring)
  graph, params = harness.parts(config, transport=DROPS, overlap=overlap)
  return harness.run(graph, params, remat=remat)


def assert_same_run(got, expected):
  harness.assert_same(got, expected, rtol=1e-6)
  np.testing.assert_array_equal(got.aux["sums"].dropped, expected.aux["sums"].dropped)


def each_slot():
  for wiring, window in WINDOWS.items():
    for slot in range(slot_count(window)) if wiring == "scmoe_pos2" else (0, window):
      yield pytest.param(wiring, slot, id=f"{wiring}-{slot}")


@pytest.mark.parametrize(("wiring", "slot"), each_slot())
def test_overlapped_equals_sequential(wiring, slot):
  """Values, every gradient and drops, with the order tied forward and backward."""
  overlap = OverlapConfig(slot=slot, barriers=True)
  sequential = executed(wiring, OverlapConfig(sequential=True, barriers=True))
  assert_same_run(executed(wiring, overlap), sequential)
  assert sequential.aux["sums"].dropped.sum() > 0


def test_a_backward_slot_of_its_own_and_unrolled_stages_change_nothing():
  overlap = OverlapConfig(slot=2, backward_slot=1, barriers=True, unroll=0)
  assert_same_run(executed("scmoe_pos2", overlap), executed("scmoe_pos2"))


@pytest.mark.parametrize("remat", ["dots", "moe", "full"])
def test_what_is_recomputed_changes_no_gradient(remat):
  assert_same_run(executed("scmoe_pos2", remat=remat), executed("scmoe_pos2"))


def test_unknown_remat():
  with pytest.raises(ConfigError, match=r"train.remat='some' is unknown; one of: none, dots"):
    executed("scmoe_pos2", remat="some")


def test_a_slot_beyond_the_window_is_its_end():
  assert [resolve_slot(slot, 3) for slot in (-1, 0, 2, 3, 9)] == [3, 0, 2, 3, 3]
