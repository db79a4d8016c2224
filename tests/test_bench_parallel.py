"""python -m scmoe.bench.layer --devices: an expert-parallel layer, checked and timed."""

import json

import pytest
from covering import night

from scmoe.base.errors import ConfigError, run_main
from scmoe.bench import layer, parallel


@pytest.mark.parametrize("transport", ["dropless", "per_rank", night("packed")])
def test_a_layer_over_two_devices_is_compared_and_its_exchanges_are_priced(
  tmp_path, capsys, transport
):
  """On simulated devices, where only the order of the figures' parts can be tested."""
  out = tmp_path / "out.json"
  words = ["--layer", "--devices", "2", "--shape", "64,32,64,4,2", "--backend", "xla"]
  layer.main([*words, "--transport", transport, "--rounds", "3", "--json", str(out)])
  (found,) = json.loads(out.read_text())["parallel"]
  assert (found["devices"], found["transport"]) == (2, transport)
  assert found["error"] is None if transport == "packed" else found["error"] < layer.TOLERANCE
  for name in parallel.PASSES:
    cost = found[name]["exchanges"]
    assert found[name]["ms"] > 0
    assert cost["alone"]["ms"] > 0
    assert len(cost["without"]["rounds_ms"]) == 3
  printed = capsys.readouterr().out
  assert "TFLOP/s a device: forward" in printed
  assert printed.count(" are paid, ") == 2


def test_a_layer_without_overflow_rounds_is_timed_where_all_rows_fit(capsys):
  """Every token visits all four experts, so that both devices get equally many rows."""
  words = ["--layer", "--devices", "2", "--shape", "64,32,64,4,4", "--backend", "xla"]
  layer.main([*words, "--overflow", "repeat", "--rounds", "1"])
  assert "2 devices, dropless, no overflow rounds | TFLOP/s" in capsys.readouterr().out


def test_rows_that_are_left_over_show_in_the_error(monkeypatch):
  monkeypatch.setattr(parallel, "TOLERANCE", -1.0)
  shape = layer.Shape(64, 32, 64, 4, 4)
  given = {"devices": 2, "overflow": "repeat"}
  with pytest.raises(ValueError, match="perhaps because rows were left over: not timed"):
    parallel.bench_parallel(shape, 0, "xla", 1, **given)
  with pytest.raises(ConfigError, match="--transport=dropless or per_rank, got packed"):
    parallel.bench_parallel(shape, 0, "xla", 1, transport="packed", **given)


def test_experts_that_do_not_divide_over_the_devices_are_refused():
  shape = layer.Shape(64, 32, 64, 3, 1)
  with pytest.raises(
    ConfigError, match="--devices=2 must be at most the 8 devices here and divide"
  ):
    parallel.bench_parallel(shape, 0, "xla", 1, devices=2)


@pytest.mark.parametrize(
  ("words", "line"),
  [(["--devices", "16", "--shape", "64,32,64,16,1"], "--devices=16 must be at most the 8 devices"),
   (["--shape", "64,32"], "--shape: '64,32' is neither T,D,F,E,K nor one of 7B-256")],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(capsys, words, line):
  with pytest.raises(SystemExit) as ended:
    run_main(layer.main, ["--layer", *words])
  assert ended.value.code == 2
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith(f"ConfigError: {line}")
