"""Trackers get every figure, resume under one name, and cannot stop a run."""

import json
import sys
import types

import pytest

from scmoe.base.errors import ConfigError
from scmoe.training.metrics import Metrics
from scmoe.training.options import TrainConfig


class Library(types.ModuleType):
  """The interface that wandb and trackio share; fails from the step `fails` on."""

  def __init__(self, name, fails=10**9):
    super().__init__(name)
    self.fails, self.logged, self.started, self.ended = fails, [], [], 0
    self.__spec__ = types.SimpleNamespace(name=name)

  def init(self, **options):
    self.started.append(options)

  def log(self, values, step):
    if step >= self.fails:
      raise ConnectionError("no network")
    self.logged.append((step, values))

  def finish(self):
    self.ended += 1


@pytest.fixture
def libraries(monkeypatch):
  found = {name: Library(name, fails) for name, fails in (("wandb", 3), ("trackio", 10**9))}
  for name, library in found.items():
    monkeypatch.setitem(sys.modules, name, library)
  return found


def test_every_figure_goes_to_all_of_them_and_one_that_fails_is_dropped(
  libraries, tmp_path, capsys
):
  options = {"trackers": "wandb,trackio", "config": {"a": {"b": 1}}}
  metrics = Metrics(tmp_path, 0, tensorboard=False, **options)
  for step in (1, 2, 3, 4):
    metrics.write(step, {"loss": 1 / step, "gap": float("nan"), "layers": {"load": [1.0]}})
  metrics.write(4, {"loss": 0.5}, "eval")
  metrics.close()
  own, other = libraries["wandb"], libraries["trackio"]
  assert own.logged == [(1, {"train/loss": 1.0}), (2, {"train/loss": 0.5})]
  assert other.logged[-1] == (4, {"eval/loss": 0.5})
  assert [step for step, _ in other.logged] == [1, 2, 3, 4, 4]
  assert "Tracker failed and is dropped: ConnectionError: no network" in capsys.readouterr().err
  assert (own.ended, other.ended) == (1, 1)
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert len(lines) == 5  # the record is complete
  again = Metrics(tmp_path, 4, tensorboard=False, **options)
  again.close()
  first, second = own.started
  assert first == second  # the same id
  assert first["resume"] == "allow"
  assert first["config"] == {"a": {"b": 1}}


def test_one_that_cannot_start_is_left_out(tmp_path, monkeypatch, capsys):
  broken = Library("wandb")
  broken.init = lambda **_: (_ for _ in ()).throw(RuntimeError("no key"))
  monkeypatch.setitem(sys.modules, "wandb", broken)
  metrics = Metrics(tmp_path, 0, tensorboard=False, trackers="wandb")
  assert "no wandb: RuntimeError: no key" in capsys.readouterr().err
  metrics.write(1, {"loss": 1.0})
  metrics.close()
  assert (tmp_path / "metrics.jsonl").stat().st_size


def test_names_are_checked_before_anything_runs(libraries, monkeypatch):
  TrainConfig(trackers="wandb,trackio").check_trackers()
  with pytest.raises(
    ConfigError, match=r"train\.trackers='wanda' is unknown; did you mean 'wandb'\?"
  ):
    TrainConfig(trackers="wandb,wanda").check_trackers()
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ConfigError, match="is not installed; pip install wandb"):
    TrainConfig(trackers="wandb").check_trackers()
