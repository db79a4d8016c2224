"""experiments/step/run.py: what an arm's words mean, and an arm that fails."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from scripts import script


@pytest.fixture(scope="module")
def tool() -> Any:
  return script("step/run.py")


def test_words_are_fields_flags_and_variables(tool):
  words = (
    "model.wiring=top2 --config.model.num_layers=4 XLA_FLAGS=--xla_a=1 overlap.schedule='a, b'"
  )
  run = tool.configured("--config gpt2_moe_small", words)
  assert (run.model.wiring, run.model.num_layers) == ("top2", 4)
  assert run.overlap.schedule == "a, b"
  assert tool.configured("--config gpt2_moe_small", "--config=quickstart").name == "quickstart"


def test_an_arm_that_fails_is_left_out(tool, tmp_path, monkeypatch, capfd):
  """And the tool's exit code says that one was."""
  out = tmp_path / "out.json"
  flags = ["--folder", str(tmp_path / "kept"), "--json", str(out), "bad: --config=nothing"]
  monkeypatch.setattr(sys, "argv", ["run.py", *flags])
  assert tool.main() == 1
  told = capfd.readouterr().out
  assert told.startswith("bad: left out; the last line of ")
  assert "--config='nothing'" in told
  assert json.loads(out.read_text())["arms"] == {}


def test_what_is_hidden_is_told_by_exchange(tool):
  stage = {"stage": "combine", "direction": "backward", "communication": 20.0, "hidden": 15.0}
  silent = {"stage": "experts", "direction": "backward", "communication": 0.0, "hidden": 0.0}
  whole = {"communication": 20.0, "share_hidden": 0.75, "computation": 100.0}
  told = tool.hidden("pos2", {"overlap": whole, "stages": [silent, stage]}).splitlines()
  assert told[0] == "pos2: 20.0 ms of communication, 75 % hidden; 100.0 of computation"
  assert told[1].split() == [
    "combine",
    "backward",
    "20.00",
    "ms",
    "75",
    "%",
    "hidden",
    "5.00",
    "bare",
  ]
  assert len(told) == 2
