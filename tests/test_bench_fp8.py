"""`python -m scmoe.bench.layer --fp8` times no kernel that computes something else."""

import pytest

from scmoe.bench import layer as bench

SHAPE = bench.Shape(tokens=64, width=128, hidden=128, experts=4, top_k=2)


def test_the_distance_is_that_of_numbers_with_three_bits():
  found = bench.bench_fp8(SHAPE, seed=0, rounds=1)
  assert 0.03 < found["error"] < 0.1
  assert 0.03 < found["error_by_xla"] < 0.1


def test_a_path_that_does_not_round_is_not_timed(monkeypatch):
  made = bench.FFNConfig
  plain = lambda backend, fp8: made(backend=backend, fp8=fp8 and backend == "xla")
  monkeypatch.setattr(bench, "FFNConfig", plain)
  with pytest.raises(ValueError, match=r"fp8: [\d.e-]+ from the network without fp8, 0\.0"):
    bench.bench_fp8(SHAPE, seed=0, rounds=1)


def test_a_path_that_is_as_far_away_in_another_direction_is_not_timed(monkeypatch):
  own = bench.expert_ffn

  def scaled(x, weights, layout, config):
    plain = own(x, weights, layout, bench.FFNConfig(backend="xla"))
    return 1.0667 * plain if config.backend == "auto" else own(x, weights, layout, config)

  monkeypatch.setattr(bench, "expert_ffn", scaled)
  with pytest.raises(ValueError, match=r"apart: not timed"):
    bench.bench_fp8(SHAPE, seed=0, rounds=1)
