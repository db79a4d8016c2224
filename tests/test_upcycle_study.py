"""A study of upcycling that was cut off begins again at whole checkpoints alone."""

import importlib.util
import math
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "experiments/upcycle/run.py"


def test_a_checkpoint_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
  spec = importlib.util.spec_from_file_location("upcycle_study", FILE)
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, "upcycle_study", module)
  spec.loader.exec_module(module)
  study = module.Study("cpu", tmp_path, tmp_path / "out", math.inf, 1, [])
  start = tmp_path / "start-farskip"
  called = []

  def call(command, environment):
    called.append(command[0])
    assert not start.exists()  # the conversion refuses a folder with files of another one
    (start / "checkpoints/0").mkdir(parents=True)
    (start / "checkpoints/0/weights").write_text("whole")

  monkeypatch.setattr(study, "call", call)
  monkeypatch.setattr(study, "evaluated", lambda name, environment: 1.0)
  (start / "checkpoints/0.orbax-checkpoint-tmp").mkdir(parents=True)
  (start / "config.json").write_text("{}")
  study.begin("farskip", {})
  study.begin("farskip", {})
  assert called == ["scmoe.convert"]

  def train(workdir, *_):
    assert (workdir / "checkpoints/0/weights").read_text() == "whole"
    (workdir / "metrics.jsonl").write_text(
      '{"kind": "eval", "step": 1, "loss": 2}\n{"kind": "train", "step": 1, "tokens": 8}\n'
    )

  monkeypatch.setattr(study, "train", train)
  (tmp_path / "farskip-text-0/checkpoints").mkdir(parents=True)  # a copy that was cut off
  study.student("farskip", "text", 0, {})
  assert study.result["runs"][0]["losses"] == [[1, 2]]
