"""The study of placement records no figure of another day, model or text as one of today."""

import argparse
import json
import shutil

import pytest
from leaving import run_of, write_run
from scripts import script


@pytest.fixture
def study():
  return script("placement/run.py")


@pytest.fixture
def given(tmp_path):
  """The command's flags, with two stored runs and a text."""
  for name in ("base", "tuned"):
    write_run(run_of("topk llama"), tmp_path / name)
  (tmp_path / "text").write_text("a text")
  text = tmp_path / "text"
  return argparse.Namespace(
    scale="cpu", base=text, tuned=text, other=None, runs=tmp_path, batches=2
  )


def test_arms_of_other_runs_are_measured_again(study, given, monkeypatch):
  judged, pruned = [], []
  monkeypatch.setattr(
    "scmoe.evaluate.evaluate_run", lambda *a, **k: judged.append(a) or {"loss": 1}
  )

  def prune(source, to, request, start):
    if len(pruned) == 3:
      raise KeyboardInterrupt
    pruned.append(request)
    return "first line\nparameters 2 to 1"

  monkeypatch.setattr("scmoe.run.rearranged.prune_run", prune)
  with pytest.raises(KeyboardInterrupt):
    study.prune(given)
  left = json.loads((given.runs / "pruned.json").read_text())
  assert list(left["arms"])[1:] == pruned
  first = list(pruned)
  pruned.clear()
  with pytest.raises(KeyboardInterrupt):  # it goes on: three more
    study.prune(given)
  assert not set(first) & set(pruned)

  def begins_again():
    pruned.clear()
    with pytest.raises(KeyboardInterrupt):
      study.prune(given)
    return pruned == first

  given.batches = 3
  assert begins_again()
  (given.runs / "text").write_text("another text")
  assert begins_again()
  shutil.rmtree(given.runs / "tuned")
  write_run(run_of("topk gpt2"), given.runs / "tuned")
  assert begins_again()
  monkeypatch.setattr(study.time, "strftime", lambda _: "2031-01-01")
  assert begins_again()


def test_a_whole_part_leaves_nothing_to_go_on_from(study, given, monkeypatch):
  monkeypatch.setattr("scmoe.evaluate.evaluate_run", lambda *a, **k: {"loss": 1})
  monkeypatch.setattr("scmoe.run.rearranged.prune_run", lambda *a: "first\nsecond")
  found = study.prune(given)
  assert len(found) == 1 + len(study.KEPT) * (2 + len(study.SEEDS))
  assert not (given.runs / "pruned.json").exists()


@pytest.mark.parametrize("content", ["", "{", '{"keep=0.5,by=use": {}}'])
def test_what_an_older_version_or_a_cut_off_write_left_counts_as_none(study, content, tmp_path):
  (tmp_path / "pruned.json").write_text(content)
  assert study.going_on(tmp_path / "pruned.json", {"date": "today"}) == {}
  assert study.going_on(tmp_path / "none.json", {}) == {}


def test_a_training_that_has_ended_is_not_recorded_again(study, given, monkeypatch):
  called = []
  monkeypatch.setattr(study.subprocess, "run", lambda command, **_: called.append(command))
  (given.runs / "base" / "metrics.jsonl").write_text(
    '{"kind": "train", "step": 400}\n{"kind": "eval", "step": 400, "loss": 2}\n'
  )
  with pytest.raises(SystemExit, match="base has ended already, at step 400"):
    study.train(given)
  (given.runs / "tuned" / "metrics.jsonl").write_text('{"kind": "eval", "step": 200, "loss": 2}')
  with pytest.raises(SystemExit, match="tuned has ended already, at step 200"):
    study.tune(given)
  assert not called
