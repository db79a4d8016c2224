"""The study of upcycling: its starts and students, and what it goes on from."""

import math
from pathlib import Path

import pytest
from scripts import script


@pytest.fixture
def module():
  return script("upcycle/run.py")


def begun(study, name):
  """A folder with a whole checkpoint, as a finished command leaves it."""
  (study.folder / name / "checkpoints/0").mkdir(parents=True)


def test_students_have_their_own_devices_not_the_teachers(module, tmp_path, monkeypatch):
  """Starts are made on one device, and a student has as many data ranks as its task has devices."""
  study = module.Study("gpu_steps", tmp_path, tmp_path / "out", math.inf, 2, [])
  study.result["teacher"] = {"loss": 2.0, "tokens": 8, "active": 1, "total": 1}
  study.result["date"] = "2026-11-28"
  begun(study, "teacher")
  monkeypatch.setattr(module, "shared_out", lambda jobs, tasks: [{"GPU": str(i)} for i in range(2)])
  calls = []

  def call(command, environment=None):
    calls.append((command, environment))
    if command[0] == "scmoe.convert":
      begun(study, next(word for word in command if "--workdir" in word).rpartition("/")[2])
    for word in command:
      if word.startswith("--json="):
        Path(word.removeprefix("--json=")).write_text('{"loss": 2.5}')

  monkeypatch.setattr(study, "call", call)
  study.prepare()
  made = [(command, given) for command, given in calls if command[0] == "scmoe.convert"]
  assert len(made) == 3
  assert all("--mesh=data=1" in command for command, _ in made)
  assert {given["GPU"] for _, given in made} <= {"0", "1"}
  assert list(study.result["starts"].values()) == [2.5] * 3
  fields = {}
  monkeypatch.setattr(study, "train", lambda *given: fields.update(given[4]))
  monkeypatch.setattr(module, "records", lambda *_: [{"step": 1, "loss": 2.1, "tokens": 8}])
  study.student("farskip", "hidden", 0, {"GPU": "1"})
  assert fields["mesh.data"] == "-1"


def test_a_failed_start_begins_no_other(module, tmp_path):
  study = module.Study("cpu", tmp_path, tmp_path / "out", math.inf, 1, [])
  ran = []

  def task(name, environment):
    ran.append(name)
    if name == "first":
      raise SystemExit(3)

  with pytest.raises(SystemExit):
    study.side_by_side(lambda given, n=n: task(n, given) for n in ("first", "second", "third"))
  assert ran == ["first"]


def test_a_folder_that_is_not_there_is_one_line(module, tmp_path):
  study = module.Study("gpu_steps", tmp_path, tmp_path / "out", math.inf, 1, [])
  with pytest.raises(SystemExit, match=r"config\.json is missing: the study makes it"):
    study.times("prefill")
  study.result["teacher"] = {"loss": 2.0}
  with pytest.raises(SystemExit, match=r"has a teacher's loss, but .*teacher holds no checkpoint"):
    study.prepare()


@pytest.mark.parametrize(
  ("what", "commands"),
  [("step", ["profile"]), ("prefill", ["generate"]), ("all", ["profile", "generate"])],
)
def test_a_step_or_prefill_is_timed_alone(module, tmp_path, monkeypatch, what, commands):
  study = module.Study("gpu", tmp_path, tmp_path / "out", math.inf, 1, ["--compare=topk"])
  (tmp_path / "start-scmoe_pos2").mkdir()
  (tmp_path / "start-scmoe_pos2/config.json").write_text('{"model": {"context": 64}}')
  calls = []
  monkeypatch.setattr(study, "call", calls.append)
  monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
  study.times(what)
  assert [call[0].removeprefix("scmoe.") for call in calls] == commands
  assert all(call.index("--compare=topk") > 0 for call in calls)
  assert all(any(word.endswith("-slow.json") for word in call) for call in calls)


def test_a_checkpoint_that_was_cut_off_is_made_again(module, tmp_path, monkeypatch):
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
