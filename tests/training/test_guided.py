"""The profile is collected once, kept with the run, and used by every later start."""

import dataclasses

import jax
import pytest

from scmoe.blocks.schedule import OverlapConfig
from scmoe.training.guided import GuidedStep

ON = OverlapConfig(profile_guided=True, profile_runs=2)


@dataclasses.dataclass
class FakeStep:
  """Stands for a jitted step: remembers with which options it was compiled, and every call."""

  program: str = "program"
  compiles: list = dataclasses.field(default_factory=list)
  calls: list = dataclasses.field(default_factory=list)

  def lower(self, *args):
    return self

  def as_text(self):
    return self.program

  def compile(self, compiler_options):
    self.compiles.append(compiler_options)
    return lambda x: self.calls.append(len(self.compiles)) or x + 1

  def __call__(self, x):
    self.calls.append("plain")
    return x + 1


@pytest.fixture
def traces(monkeypatch):
  """Start and stop of the profiler, recorded."""
  log = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: log.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append("stop"))
  return log


def guided(step, directory, overlap=ON, **options):
  options = {"platform": "gpu", "processes": 1, "say": lambda line: None} | options
  return GuidedStep(step, overlap, directory, collect=lambda d: b"latencies", **options)


def test_profiles_once_and_compiles_again(tmp_path, traces):
  step = FakeStep()
  run = guided(step, tmp_path)
  assert [run(x) for x in range(5)] == [1, 2, 3, 4, 5]
  # One warm-up and two profiled steps with the first program, the rest with the second.
  assert step.calls == [1, 1, 1, 2, 2]
  assert traces == ["start", "stop"]
  first, second = step.compiles
  assert first["xla_gpu_enable_command_buffer"] == ""
  assert "fdo_profile" not in first
  assert second["fdo_profile"] == b"latencies"
  assert [f.read_bytes() for f in tmp_path.iterdir()] == [b"latencies"]


def test_a_later_start_does_not_profile(tmp_path, traces):
  run = guided(FakeStep(), tmp_path)
  for x in range(4):
    run(x)
  traces.clear()
  step = FakeStep()
  guided(step, tmp_path)(0)
  assert traces == []
  assert [c["fdo_profile"] for c in step.compiles] == [b"latencies"]


def test_another_program_needs_another_profile(tmp_path, traces):
  run = guided(FakeStep(), tmp_path)
  for x in range(4):
    run(x)
  step = FakeStep(program="another")
  guided(step, tmp_path)(0)
  assert "fdo_profile" not in step.compiles[0]


def test_without_a_gpu_the_step_is_called_as_it_is(tmp_path, traces):
  step = FakeStep()
  assert guided(step, tmp_path, platform="cpu")(1) == 2
  assert (step.calls, step.compiles, traces) == (["plain"], [], [])


def test_switched_off_it_only_sets_the_options(tmp_path, traces):
  step = FakeStep()
  run = guided(step, tmp_path, OverlapConfig())
  for x in range(5):
    run(x)
  assert len(step.compiles) == 1
  assert traces == []


def test_several_processes_collect_nothing(tmp_path, traces):
  step = FakeStep()
  run = guided(step, tmp_path, processes=2)
  for x in range(5):
    run(x)
  assert len(step.compiles) == 1
  assert list(tmp_path.iterdir()) == []


def test_an_empty_profile_is_said_and_ignored(tmp_path, traces):
  said, step = [], FakeStep()
  run = GuidedStep(
    step, ON, tmp_path, platform="gpu", processes=1, collect=lambda d: b"", say=said.append
  )
  for x in range(5):
    run(x)
  assert len(step.compiles) == 1
  assert "going on without it" in said[0]


def test_a_running_trace_is_waited_for(tmp_path, monkeypatch):
  running = [True, False]

  def start(directory):
    if running.pop(0):
      raise RuntimeError("only one profile may be run at a time")

  monkeypatch.setattr(jax.profiler, "start_trace", start)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
  step = FakeStep()
  run = guided(step, tmp_path)
  for x in range(6):
    run(x)
  assert step.calls == [1, 1, 1, 1, 2, 2]
