"""The plan of a step of several tasks, beside an exhaustive search over all plans of tiny sizes."""

import functools
import itertools

import numpy as np
import pytest

from scmoe.base.errors import ConfigError
from scmoe.data.multitask.plan import EMPTY, elastic, make_plan, rows_of

NAMES = ("a", "b", "c", "d")
TINY = [
  (rows, devices)
  for devices in (1, 2, 3)
  for tasks in (2, 3)
  for rows in itertools.combinations_with_replacement(range(1, 7), tasks)
]


@functools.cache
def divisions(count, devices, most):
  """All ways to divide `count` equal rows over devices, at most `most` on each."""
  if devices == 1:
    return [(count,)] if count <= most else []
  return [
    (own, *rest)
    for own in range(min(count, most) + 1)
    for rest in divisions(count - own, devices - 1, most)
  ]


@functools.cache
def best(rows, devices):
  """(rows of the busiest device, pairs of a device and a task that it serves), by trying all."""
  for most in range(1, sum(rows) + 1):
    served = [
      sum(np.count_nonzero(part) for part in each)
      for each in itertools.product(*(divisions(count, devices, most) for count in rows))
      if max(map(sum, zip(*each))) <= most
    ]
    if served:
      return most, min(served)
  raise AssertionError


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_no_plan_has_fewer_rows_on_its_busiest_device(devices):
  for rows, own in TINY:
    if own != devices:
      continue
    found = np.array(elastic(rows, devices))
    most, served = best(rows, devices)
    assert (found.sum(0) == rows).all()
    assert found.sum(1).max() == most, rows
    # Which device serves which task is a bin packing, for which the plan is greedy.
    assert served <= np.count_nonzero(found) <= min(served + 1, len(rows) + devices - 1), rows


def test_a_heavy_task_has_devices_of_its_own_and_light_tasks_share_one():
  plan = make_plan("elastic", NAMES, [5, 1, 0.5, 0.5], devices=7, places=4)
  assert plan.rows_T == (20, 4, 2, 2)
  assert [plan.devices_of(task) for task in range(4)] == [(0, 1, 2, 3, 4), (5,), (6,), (6,)]
  assert plan.filled == 1


def test_equal_shares_leave_places_empty():
  """SE-MoE's batches: 512, 256, 128 and 128 samples of four tasks."""
  elastic_plan = make_plan("elastic", NAMES, [512, 256, 128, 128], devices=8, places=4)
  plan = make_plan("equal", NAMES, [512, 256, 128, 128], devices=8, places=4)
  assert elastic_plan.rows_T == (16, 8, 4, 4)
  assert elastic_plan.filled == 1
  assert plan.rows_T == (8, 4, 2, 2)
  assert plan.filled == 0.5
  assert [plan.devices_of(task) for task in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_equal_shares_of_fewer_devices_than_tasks(devices):
  plan = make_plan("equal", NAMES, [4, 2, 1, 1], devices=devices, places=24)
  served = [plan.devices_of(task) for task in range(4)]
  assert [len(found) for found in served] == [1] * 4
  assert [len(set(served))] == [devices]
  of_devices = np.array(plan.rows_DT).sum(1)
  assert of_devices.max() == 24
  assert plan.rows_T[0] == 4 * plan.rows_T[2]


def test_rows_follow_the_loads():
  for total in range(3, 60):
    loads = np.array([4.0, 2.0, 0.7])
    rows = np.array(rows_of(list(loads), total))
    assert rows.sum() == total
    assert np.abs(rows - loads * total / loads.sum()).max() < 1


@pytest.mark.parametrize("kind", ["elastic", "equal"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_layout_has_the_rows_of_the_plan(kind, microbatches):
  plan = make_plan(kind, NAMES, [4, 2, 1, 1], devices=4, places=8)
  layout = plan.layout(microbatches)
  assert layout.shape == (microbatches, 4 * 8 // microbatches)
  assert layout.dtype == np.int32
  by_device = layout.reshape(microbatches, 4, -1).swapaxes(0, 1).reshape(4, -1)
  for device, rows in enumerate(plan.rows_DT):
    counted = np.bincount(by_device[device][by_device[device] != EMPTY], minlength=4)
    assert tuple(counted) == rows
  for task, rows in enumerate(plan.rows_T):  # every microbatch has its share of every task
    counts = (layout == task).sum(1)
    assert abs(counts - rows / microbatches).max() <= len(plan.devices_of(task))


@pytest.mark.parametrize(
  ("kind", "loads", "devices", "words"),
  [
    ("elastic", [100, 1, 1, 1], 4, "multitask.loads gives task 'b' none of the 16 rows"),
    ("equal", [100, 1, 1, 1], 4, "multitask.loads gives task 'b' none of the 4 rows"),
    ("equal", [1, 1, 1, 1], 6, "multitask.plan='equal' gives each of the 4 tasks as many devices"),
  ],
)
def test_a_plan_that_cannot_be(kind, loads, devices, words):
  with pytest.raises(ConfigError, match=words):
    make_plan(kind, NAMES, loads, devices=devices, places=4)
