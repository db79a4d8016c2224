"""Rows of tasks: the plan decides where they lie, the position of each task which they are."""

import dataclasses
import functools

import numpy as np
import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import DataConfig, bigram_bits_per_byte, open_data
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.data.multitask.pipeline import TaskData
from scmoe.data.multitask.plan import make_plan

MIXTURE = DataConfig(
  source="mixture",
  mixture="procedural:markov:4,procedural:arithmetic+recall:1",
  seq_len=16,
  limit_bytes=20000,
  validation_fraction=0.2,
  read_threads=0,
)
TASKS = MultitaskConfig(names="chains,sums", lengths="16,4")


@functools.cache
def whole(index=0, count=1):
  return open_data(MIXTURE, batch_size=8, seed=3, process_index=index, process_count=count)


def data(loads="", kind="elastic", microbatches=2, index=0, count=1, **options):
  """Two tasks, eight rows in a microbatch, on four devices."""
  tasks = dataclasses.replace(TASKS, loads=loads, **options).tasks(MIXTURE)
  planned = lambda: make_plan(
    kind, [t.name for t in tasks], [t.load for t in tasks], devices=4, places=2 * microbatches
  )
  return TaskData(whole(index, count), tasks, planned, microbatches)


def one_step(loads):
  """The tasks on one device, with as many rows in a step as the loads say."""
  rows = sum(loads)
  big = open_data(MIXTURE, batch_size=rows, seed=3)
  planned = lambda: make_plan("elastic", ["chains", "sums"], loads, devices=1, places=rows)
  return TaskData(big, TASKS.tasks(MIXTURE), planned, 1)


def rows_by_task(batches):
  """The inputs of all rows of some batches by task, sorted, without padding."""
  found = {0: [], 1: []}
  for batch in batches:
    for task, row, segments in zip(batch.domain, batch.inputs, batch.segment_ids):
      if segments.any():
        found[int(task)].append(tuple(row))
  return {task: sorted(rows) for task, rows in found.items()}


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def test_a_step_has_the_same_rows_whatever_the_mesh_and_the_plan():
  steps = rows_by_task(take(data().train(), 6))
  assert [len(rows) for rows in steps.values()] == [39, 9]  # 13 and 3 of the 16 rows of a step
  tasks = TASKS.tasks(MIXTURE)
  for devices in (1, 2, 8):
    planned = lambda devices=devices: make_plan(
      "elastic", ["chains", "sums"], [4, 1], devices=devices, places=16 // devices
    )
    other = TaskData(whole(), tasks, planned, 2)
    assert rows_by_task(take(other.train(), 6)) == steps


def test_equal_shares_read_fewer_rows_in_the_same_order():
  own = data(kind="equal")
  assert own.plan.rows_T == (8, 2)
  found, all_rows = rows_by_task(take(own.train(), 6)), rows_by_task(take(data().train(), 12))
  assert [len(rows) for rows in found.values()] == [24, 6]
  for task, rows in found.items():
    assert set(rows) <= set(all_rows[task])


def test_short_sequences_share_a_row_as_documents_of_their_own():
  own = data()
  batch = next(own.train())
  row = list(batch.domain).index(1)
  segments, positions = batch.segment_ids[row], batch.positions[row]
  assert (np.diff(segments) >= 0).all()
  assert segments[-1] >= 4
  for first in range(0, 16, 4):
    assert positions[first] == 0
    assert first == 0 or segments[first] == segments[first - 1] + 1
  assert [own.together(task) for task in range(2)] == [1, 4]


def test_processes_read_slices_of_the_same_batches():
  together = take(data().train(), 3)
  parts = [take(data(index=index, count=2).train(), 3) for index in range(2)]
  for batch, *own in zip(together, *parts):
    for name in ("inputs", "domain", "segment_ids"):
      joined = np.concatenate([getattr(each, name) for each in own])
      np.testing.assert_array_equal(joined, getattr(batch, name))


@pytest.mark.parametrize("taken", [4, 5])  # at the end of a step, and inside of one
def test_a_position_goes_on_with_the_next_row(taken):
  first = data().train()
  take(first, taken)
  state, other = first.state(), data().train()
  other.restore(state)
  for want, got in zip(take(first, 3), take(other, 3)):
    for a, b in zip(dataclasses.astuple(want), dataclasses.astuple(got)):
      np.testing.assert_array_equal(a, b)
  assert other.state() == first.state()


def test_other_loads_go_on_from_the_rows_of_the_position():
  """4 steps of 13 + 3 rows, then 4 of 8 + 8: no row of a task is left out, none comes twice."""
  before, after = data().train(), data(loads="1,1").train()
  rows = take(before, 8)
  after.restore(before.state())
  assert before.state()["visited"] == [52, 12]
  found = rows_by_task(rows + take(after, 8))
  assert after.state()["visited"] == [84, 44]
  assert [len(rows) for rows in found.values()] == [84, 44]
  for task, loads in enumerate(((84, 1), (1, 44))):  # one step with as many rows of this task
    assert rows_by_task([next(one_step(loads).train())])[task] == found[task]
  assert data().fingerprint() == data(loads="1,1", kind="equal").fingerprint()
  assert data().fingerprint() != data(lengths="16,8").fingerprint()


def test_validation_reads_each_task_once():
  own = data()
  batches = list(own.validation())
  counted = sum(batch.weights.sum() for batch in batches)
  expected = sum(domain.validation.size for domain in own.corpus.domains)
  assert counted == expected
  alone = list(own.validation("sums"))
  assert {int(t) for b in alone for t, w in zip(b.domain, b.weights) if w.any()} == {1}
  part = sum(domain.validation.size for domain in own.parts[1].corpus.domains)
  assert sum(batch.weights.sum() for batch in alone) == part
  assert len(own.validation(max_batches=2)) == 2
  assert bigram_bits_per_byte(own.whole).total > 0
  assert own.validation_domains == ("chains", "sums")


def test_summary_and_passes():
  own = data()
  assert "task chains: 80.0% of rows" in own.summary()
  assert own.summary().splitlines()[-1].startswith("plan         a step has chains 13 rows on")
  rows = own.parts[0].training_rows
  assert own.passes(160)["chains"] == pytest.approx(10 * 13 / rows)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"names": "a"}, "names 1 tasks, data.mixture=.* has 2 parts"),
    ({"names": "a,a"}, "has a name twice"),
    ({"names": "a,b c"}, "'b c' is no name"),
    ({"loads": "1"}, "multitask.loads='1' is not one number for each of the 2 tasks"),
    ({"loads": "1,x"}, "multitask.loads='1,x' is not one number"),
    ({"loads": "1,0"}, "0 must be above 0"),
    ({"loads": "1e308,1e308"}, r"1e\+308 must be above 0, and at most 1e\+12"),
    ({"lengths": "16,5"}, "5 does not divide data.seq_len=16"),
  ],
)
def test_mistakes_are_named(fields, words):
  with pytest.raises(ConfigError, match=words):
    dataclasses.replace(TASKS, **fields).tasks(MIXTURE)


def test_short_sequences_need_documents():
  with pytest.raises(ConfigError, match=r"set data.document_mask=True"):
    TASKS.tasks(dataclasses.replace(MIXTURE, document_mask=False))
  with pytest.raises(ConfigError, match="has 0 parts; give each task a part"):
    TASKS.tasks(DataConfig())


def test_a_chat_task_has_whole_rows():
  """A part of one row is shorter than data.seq_len, for which conversations are admitted."""
  mixed = dataclasses.replace(MIXTURE, mixture="stdlib:1,chat:talk.jsonl:1", packing="pack")
  assert MultitaskConfig(names="code,talk", lengths="4,16").tasks(mixed)[1].length == 16
  with pytest.raises(ConfigError, match=r"would cut the conversations of task 'talk', .* after 8"):
    MultitaskConfig(names="code,talk", lengths="16,8").tasks(mixed)


def test_positions_of_other_runs_are_refused():
  for state in ({"next_index": 3}, {"next_index": 1, "visited": [1], "into": 0}, None):
    with pytest.raises(DataError, match="is not one of 2 tasks"):
      data().train().restore(state)
  with pytest.raises(DataError, match="no task 'x' in the data; one of: chains, sums"):
    data().validation("x")
