"""`python -m scmoe.bench.layer --fp8` times no kernel that computes something else."""

import pytest

from scmoe.bench import layer as bench

SHAPE = bench.Shape(tokens=64, width=128, hidden=128, experts=4, top_k=2)


def test_both_paths_round_alike():
  found = bench.bench_fp8(SHAPE, seed=0, rounds=1)
  assert 0.03 < found["error"] == pytest.approx(found["error_by_xla"], rel=0.02)


def test_a_path_that_does_not_round_is_not_timed(monkeypatch):
  made = bench.FFNConfig
  plain = lambda backend, fp8: made(backend=backend, fp8=fp8 and backend == "xla")
  monkeypatch.setattr(bench, "FFNConfig", plain)
  with pytest.raises(ValueError, match=r"fp8: [\d.]+ from the network without fp8, and 0\.0"):
    bench.bench_fp8(SHAPE, seed=0, rounds=1)
