"""Hidden and exposed communication from events that can be added up on paper."""

import pytest

from scmoe.base.errors import DataError
from scmoe.profiling.overlap import (
  Overlap,
  direction_of,
  measure_overlap,
  slow_down,
  stage_of,
  stage_table,
  stage_times,
)
from scmoe.profiling.trace import Event, find_trace, is_communication, length, shared, union

MS = 1_000_000  # nanoseconds


def event(name, start, end, op="", device="/device:GPU:0", stream="Stream #1"):
  return Event(device, stream, name, start * MS, end * MS, op)


STEP = [
  event("nvjet_sm90", 0, 4, "gemm.1"),
  event("ncclDevKernel_SendRecv(x)", 2, 7, "all_to_all.5.1", stream="Stream #2"),
  event("loop_fusion", 5, 6, "fusion.2"),
  event("MemcpyD2D", 7, 8, "copy.3"),
]


def test_intervals():
  assert union([(3, 5), (0, 1), (4, 7), (1, 2)]) == [(0, 2), (3, 7)]
  assert length([(0, 2), (3, 7)]) == 6
  assert shared([(0, 2), (3, 7)], [(1, 4), (6, 9)]) == 3


@pytest.mark.parametrize(
  ("name", "op", "expected"),
  [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce", True),
    ("MemcpyP2P", "", True),
    ("MemcpyD2D", "all-to-all-start.3", True),
    ("MemcpyD2D", "all_to_all.24.1", True),
    ("MemcpyD2D", "copy.4", False),
    ("memcpy128", "command_buffer_3", False),
    ("nvjet_sm90_tst_128x160", "gemm", False),
  ],
)
def test_what_counts_as_communication(name, op, expected):
  assert is_communication(name, op) == expected


def test_hidden_and_exposed():
  found = measure_overlap(STEP)
  assert found == Overlap(communication=5, computation=6, hidden=3, elapsed=8, fastest=5)
  assert found.exposed == 2
  assert found.share_hidden == 0.6


def test_medians_over_devices_and_the_fastest():
  other = [event("nccl", 0, 3, device="/device:GPU:1"), event("k", 0, 9, device="/device:GPU:1")]
  last = [event("nccl", 0, 8, device="/device:GPU:2"), event("k", 0, 9, device="/device:GPU:2")]
  found = measure_overlap([*STEP, *other, *last])
  assert (found.communication, found.hidden, found.fastest) == (5, 3, 3)


def test_no_device_no_overlap():
  assert measure_overlap([]) is None
  assert stage_times([], {}) == []


@pytest.mark.parametrize(
  ("op_name", "stage", "direction"),
  [
    ("jit(step)/shard_map/jvp()/dispatch/all_to_all", "dispatch", "forward"),
    ("jit(step)/transpose(jvp())/mlp/dot_general", "mlp", "backward"),
    ("jit(step)/transpose(jvp(combine))/gather", "combine", "backward"),
    ("jit(step)/shard_map/psum", "all-reduce", "forward"),
    ("jit(step)/multiply", "other", "forward"),
    ("jit(step)/jvp()/add/add", "add", "forward"),
    ("jit(step)/while/body/add", "other", "forward"),
    ("jit(step)/while/body/accumulate/add", "accumulate", "forward"),
    ("jit(step)/optimizer/clip/reduce_sum", "clip", "forward"),
    ("jit(step)/transpose(jvp(stack))/concatenate", "stack", "backward"),
    ("jit(step)/transpose(jvp())/while/body/gradients/psum", "gradients", "backward"),
    ("jit(step)/optimizer/gradients/psum:jit(step)/loss/statistics/psum", "statistics", "forward"),
  ],
)
def test_stage_words_of_op_names(op_name, stage, direction):
  assert (stage_of(op_name), direction_of(op_name)) == (stage, direction)


NAMES = {
  "all_to_all.5.1": "jit(f)/dispatch/a2a",
  "gemm.1": "jit(f)/mlp/dot_general",
  "fusion.2": "jit(f)/experts/mul",
}


def test_stage_times():
  found = {t.stage: t for t in stage_times(STEP, NAMES)}
  assert found["dispatch"].communication == 5
  assert found["dispatch"].hidden == 3
  assert found["mlp"].computation == 4
  assert found["experts"].computation == 1
  assert found["other"].computation == 1
  assert "dispatch" in stage_table(found.values())


def test_slow_down():
  alone = Overlap(0, 4, 0, 4, 0)
  assert slow_down(Overlap(5, 5, 5, 6, 5), alone) == 1.25


def test_a_folder_without_a_trace(tmp_path):
  with pytest.raises(DataError, match=r"holds no \*.xplane.pb"):
    find_trace(str(tmp_path))
