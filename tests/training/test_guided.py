"""The profile is collected once, kept with the run, and used by every later start."""

import dataclasses

import jax
import pytest

from scmoe.blocks.options import OverlapAblation, OverlapConfig
from scmoe.training.guided import PATIENCE, GuidedStep

ON = OverlapConfig(ablation=OverlapAblation(profile_runs=2))
OFF = OverlapConfig(ablation=OverlapAblation(profile_guided=False))


@dataclasses.dataclass
class FakeStep:
  """Stands for a jitted step: remembers with which options it was compiled, and every call."""

  program: str = "program"
  compiles: list = dataclasses.field(default_factory=list)
  calls: list = dataclasses.field(default_factory=list)

  def trace(self, *args):
    return self

  def lower(self):
    return self

  def as_text(self):
    return self.program

  def compile(self, compiler_options):
    self.compiles.append(compiler_options)
    number = len(self.compiles)
    return lambda x: self.calls.append(number) or x + 1


@pytest.fixture(autouse=True)
def no_program_is_kept(monkeypatch):
  """A `FakeStep` has no jaxpr by which a lowered program is kept (`test_lowered.py`)."""
  monkeypatch.setattr("scmoe.training.guided.lower", lambda step, traced, args, gpu: traced.lower())


@pytest.fixture
def traces(monkeypatch):
  """Start and stop of the profiler, recorded."""
  log = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: log.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append("stop"))
  return log


def guided(step, directory, overlap=ON, **options):
  options = {"gpu": True, "collect": lambda d, p: b"latencies", "say": lambda line: None} | options
  return GuidedStep(step, overlap, directory, **options)


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


def test_without_a_gpu_the_step_is_compiled_as_it_is(tmp_path, traces):
  step = FakeStep()
  run = guided(step, tmp_path, gpu=False)
  assert [run(x) for x in range(5)] == [1, 2, 3, 4, 5]
  assert (step.compiles, traces) == ([{}], [])
  assert list(tmp_path.iterdir()) == []


def test_it_says_which_call_compiles(tmp_path, traces):
  """The first, unless it was compiled before, and the one behind those that were profiled."""
  compiling = lambda run: [(run.compiles_next, run(x))[0] for x in range(5)]
  assert compiling(guided(FakeStep(), tmp_path / "a")) == [True, False, False, True, False]
  ahead = guided(FakeStep(), tmp_path / "b")
  ahead.compile(0)
  assert compiling(ahead) == [False, False, False, True, False]
  assert compiling(guided(FakeStep(), tmp_path / "c", OFF)) == [True] + 4 * [False]


def test_switched_off_it_only_sets_the_options(tmp_path, traces):
  step = FakeStep()
  run = guided(step, tmp_path, OFF)
  for x in range(5):
    run(x)
  assert len(step.compiles) == 1
  assert traces == []


def test_an_empty_profile_is_said_and_ignored(tmp_path, traces):
  said, step = [], FakeStep()
  run = guided(step, tmp_path, collect=lambda d, p: b"", say=said.append)
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


def test_a_trace_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
  def start(directory):
    raise RuntimeError("only one profile may be run at a time")

  monkeypatch.setattr(jax.profiler, "start_trace", start)
  said, step = [], FakeStep()
  run = guided(step, tmp_path, say=said.append)
  for x in range(40):
    run(x)
  assert run.settled
  assert step.calls == [1] * 40
  assert "another trace is running" in said[0]


def test_a_trace_that_is_given_up_begins_anew(tmp_path, traces):
  """jax takes one trace at a time, and another program's steps do not belong in this one."""
  step = FakeStep()
  run = guided(step, tmp_path)
  run.give_up_trace()
  assert traces == [], "nothing was under way"
  for x in range(2):
    run(x)
  run.give_up_trace()
  assert traces == ["start", "stop"]
  for x in range(3):
    run(x)
  assert traces == ["start", "stop"] * 2
  assert step.calls == [1, 1, 1, 1, 2]


def test_a_step_whose_traces_are_given_up_goes_on_without_a_profile(tmp_path, traces):
  said, step = [], FakeStep()
  run = guided(step, tmp_path, say=said.append)
  for x in range(2 * PATIENCE):
    run(x)
    run.give_up_trace()
  assert run.settled
  assert traces == ["start", "stop"] * PATIENCE
  assert said == [
    "profile-guided scheduling: other programs ran while it was profiled; going on without a "
    "profile"
  ]


def test_no_call_profiles_while_the_users_trace_runs(tmp_path, traces):
  """However long it is: refusals of another's trace are counted, and end the attempts."""
  step = FakeStep()
  run = guided(step, tmp_path)
  run(0)
  run.hold_profiling(True)
  for x in range(2 * PATIENCE):
    run(x)
  assert traces == []
  assert not run.settled
  run.hold_profiling(False)
  for x in range(3):
    run(x)
  assert traces == ["start", "stop"]
  assert step.calls[-1] == 2


def test_a_trace_that_cannot_be_ended_is_a_warning(tmp_path, monkeypatch, capsys):
  def stop():
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
  monkeypatch.setattr(jax.profiler, "stop_trace", stop)
  run = guided(FakeStep(), tmp_path)
  for x in range(2):
    run(x)
  run.give_up_trace()
  assert run.trace is None
  assert "No space left" in capsys.readouterr().err
  step, said = FakeStep(), []
  run = guided(step, tmp_path, say=said.append)
  assert [run(x) for x in range(5)] == [1, 2, 3, 4, 5]
  assert step.calls == [1] * 5, "it goes on with the program that it has"
  assert "No space left" in capsys.readouterr().err
  assert said == ["profile-guided scheduling: the profile is empty; going on without it"]
