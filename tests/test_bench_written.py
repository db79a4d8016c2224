"""scmoe.bench.layer says that its file cannot be written, and that a call is too short to time."""

import errno
import json
import os
from pathlib import Path

import pytest

from scmoe.base.errors import run_main
from scmoe.bench import layer
from scmoe.profiling.timer import Timing

WORDS = ["--layer", "--shape", "64,32,32,4,1"]


def full(*_):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(capsys, words):
  """The line with which the command ends, and its exit code."""
  with pytest.raises(SystemExit) as ended:
    run_main(layer.main, words)
  (said,) = capsys.readouterr().err.splitlines()
  return said, ended.value.code


def test_a_full_disk_is_found_before_anything_is_measured(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(layer, "bench_layer", lambda *_, **options: pytest.fail("measured"))
  monkeypatch.setattr(Path, "write_bytes", full)
  out = tmp_path / "x.json"
  line = f"StorageError: {out} cannot be written: No space left on device; give another --json"
  assert told(capsys, [*WORDS, f"--json={out}"]) == (line, 6)
  assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_while_it_measures(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(layer, "bench_layer", lambda *_, **options: {"name": "a"})
  monkeypatch.setattr(layer, "print_layer", lambda result: None)
  out = tmp_path / "x.json"
  layer.main([*WORDS, f"--json={out}"])
  assert json.loads(out.read_text())["layer"] == [{"name": "a"}]
  monkeypatch.setattr(layer, "write_json", full)
  line = f"StorageError: {out} cannot be written: No space left on device; give another --json"
  assert told(capsys, [*WORDS, f"--json={out}"]) == (line, 6)


def test_a_place_where_no_file_can_be(tmp_path, capsys):
  out = tmp_path / "none/x.json"
  line = f"ConfigError: --json='{out}': there is no folder {out.parent}"
  assert told(capsys, [*WORDS, f"--json={out}"]) == (line, 2)
  line = "ConfigError: --json='/dev/null' is no regular file; give a file"
  assert told(capsys, [*WORDS, "--json=/dev/null"]) == (line, 2)


def test_a_time_below_its_own_noise_is_not_printed(capsys, monkeypatch):
  """Neither a negative time nor one that its rounds do not agree about."""
  seconds = {"noise": (-12e-3, 3e-3, -20e-3), "doubt": (1e-3, 9e-3, -8e-3)}
  for name, rounds in (seconds | {"plain": (2e-3, 2.1e-3, 1.9e-3)}).items():
    monkeypatch.setattr(layer, "alone", lambda *_, rounds, taken=rounds: Timing(taken, 1))
    found = layer.by_itself(lambda: None, rounds=3)
    assert found == (pytest.approx(2.0) if name == "plain" else None), name
  monkeypatch.setattr(layer, "by_itself", lambda *_, rounds: None)
  shape = layer.Shape(64, 32, 32, 4, 1)
  result = layer.bench_layer(shape, 0, "xla", 1)
  layer.print_layer(result)
  printed = capsys.readouterr().out
  assert printed.count("in turns (by itself too short to tell from the zeroing of the cache)") == 2
  assert "-" not in printed.replace("e-", "")
  for name in ("forward", "forward+backward"):
    assert result[name]["ms"] is None
    assert result[name]["too_short"]
    assert result[name]["tflops"] > 0
