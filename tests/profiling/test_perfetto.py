"""The annotated trace: stages of every operation, and the tracks above them."""

import gzip
import json

import pytest

from scmoe.base.errors import StorageError
from scmoe.profiling.perfetto import TRACKS, annotated, write_perfetto

NAMES = {
  "gemm.1": "jit(f)/experts/dot_general",
  "send.1": "jit(f)/dispatch/all_to_all",
  "gemm.2": "jit(f)/transpose(jvp(mlp))/dot_general",
}


def meta(name, pid, tid, value):
  return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def ran(pid, tid, name, start, end, **args):
  return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start,
          "args": args}  # fmt: skip


GPU = {
  "metadata": {"highres-ticks": True},
  "traceEvents": [
    meta("process_name", 1, 0, "/device:GPU:0"),
    meta("thread_name", 1, 7, "Stream #14(Compute)"),
    meta("thread_name", 1, 8, "Stream #15(MemcpyP2P)"),
    meta("thread_name", 1, 9, "XLA Ops"),
    meta("process_name", 2, 0, "/host:CPU"),
    ran(1, 7, "gemm", 0, 10, hlo_op="gemm.1"),
    ran(1, 8, "ncclDevKernel_SendRecv", 4, 30, hlo_op="send.1"),
    ran(1, 7, "gemm", 12, 20, hlo_op="gemm.2"),
    ran(1, 9, "gemm.1", 0, 10, hlo_op="gemm.1"),  # the same again, at another level
    ran(2, 3, "python", 0, 50),
    {},  # as the profiler ends its list
  ],
}


def slices(trace, track):
  """(name, start, end) of one of our tracks."""
  places = {(e["pid"], e["tid"]) for e in trace["traceEvents"]
            if e["name"] == "thread_name" and e["args"]["name"] == track}  # fmt: skip
  return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"]
          if e.get("ph") == "X" and (e["pid"], e["tid"]) in places]  # fmt: skip


def test_tracks_of_a_gpu():
  found = annotated(GPU, NAMES)
  assert slices(found, TRACKS[0]) == [("experts, forward", 0, 10), ("mlp, backward", 12, 20)]
  assert slices(found, TRACKS[1]) == [("dispatch, forward", 4, 30)]
  assert slices(found, TRACKS[2]) == [("dispatch, forward", 10, 12), ("dispatch, forward", 20, 30)]


def test_operations_say_their_stage_and_nothing_is_lost():
  found = annotated(GPU, NAMES)
  assert "metadata" not in found
  own = [e for e in found["traceEvents"] if e["pid"] in (1, 2)]
  assert len(own) == len(GPU["traceEvents"]) - 1
  (sent,) = [e for e in own if e["name"].startswith("nccl")]
  assert sent["args"] == {"hlo_op": "send.1", "stage": "dispatch", "direction": "forward",
                          "op_name": "jit(f)/dispatch/all_to_all"}  # fmt: skip


def test_simulated_devices_have_tracks_without_loops_counted_twice():
  trace = {
    "traceEvents": [
      ran(9, 1, "while.1", 0, 100, hlo_op="while.1", device_ordinal="0"),
      ran(9, 1, "gemm.1", 0, 40, hlo_op="gemm.1", device_ordinal="0"),
      ran(9, 1, "end: gemm.1", 40, 41, hlo_op="gemm.1", device_ordinal="0"),
      ran(9, 1, "all-to-all.3", 40, 60, hlo_op="send.1", device_ordinal="0"),
      ran(9, 2, "gemm.1", 5, 45, hlo_op="gemm.1", device_ordinal="1"),
    ]
  }
  found = annotated(trace, NAMES)
  names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
  assert names == [f"scmoe: stages of simulated device {i}" for i in (0, 1)]
  assert slices(found, TRACKS[1]) == slices(found, TRACKS[2]) == [("dispatch, forward", 40, 60)]
  assert ("experts, forward", 0, 40) in slices(found, TRACKS[0])
  assert not any(end == 100 for _, _, end in slices(found, TRACKS[0]))


def test_what_runs_on_two_streams_is_cut_so_that_slices_of_a_track_do_not_cross():
  trace = json.loads(json.dumps(GPU))
  trace["traceEvents"].append(meta("thread_name", 1, 10, "Stream #16(Compute)"))
  trace["traceEvents"].append(ran(1, 10, "gemm", 5, 15, hlo_op="gemm.2"))
  found = slices(annotated(trace, NAMES), TRACKS[0])
  assert found == [("experts, forward", 0, 10), ("mlp, backward", 10, 20)]


def test_written_and_read_back(tmp_path):
  source = tmp_path / "vm.trace.json.gz"
  source.write_bytes(gzip.compress(json.dumps(GPU).encode()))
  target = write_perfetto(source, tmp_path / "top2.trace.json.gz", NAMES)
  assert json.loads(gzip.decompress(target.read_bytes())) == annotated(GPU, NAMES)
  source.write_bytes(b"nothing")
  with pytest.raises(
    StorageError, match=r"top2\.trace\.json\.gz cannot be written from .*vm\.trace"
  ):
    write_perfetto(source, target, NAMES)
