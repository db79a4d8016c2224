"""Whole runs of the loop: resume, skipped steps, being stopped, outputs that fail."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from training_fakes import Iterator, Objective, Poisoned, Setup, Source, bits, trainer

from scmoe import train
from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, DataError, NonFiniteError, Preempted, StorageError
from scmoe.training import card
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.failure import not_finite
from scmoe.training.guided import GuidedStep
from scmoe.training.metrics import MetricsFile, TensorBoard, read_metrics
from scmoe.training.options import CheckpointConfig, TrainConfig
from scmoe.training.restore import list_steps, read_meta
from scmoe.training.resume import check_config, check_data
from scmoe.training.signals import Watchdog
from scmoe.training.workdir import RunLock, identity, prepare_workdir


def losses(workdir):
  return [(line["step"], line["loss"]) for line in read_metrics(workdir)]


def evaluate(state, stopping):
  assert not stopping()
  return {"loss": float(np.asarray(state.params["embed"]).sum())}


@pytest.fixture(scope="module")
def whole(mesh8, tmp_path_factory):
  """(workdir, final state) of 20 uninterrupted steps."""
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, trainer(mesh8, workdir, evaluate=evaluate, eval_every=8).run()


@pytest.fixture(scope="module")
def stopped(mesh8, tmp_path_factory):
  """Workdir of a run that was stopped after step 8, evaluation of step 8 included."""
  workdir = tmp_path_factory.mktemp("stopped")
  with pytest.raises(Preempted, match="stopped at step 8 of 20 and saved") as caught:
    trainer(mesh8, workdir, evaluate=evaluate, eval_every=8, stop_after=8).run()
  assert caught.value.code == 75
  return workdir


def test_training_learns(whole):
  values = [loss for _, loss in losses(whole[0])]
  assert len(values) == 20
  assert values[-1] < values[0] - 0.1


def test_stop_and_resume_is_bitwise_equal(whole, stopped, mesh8):
  state = trainer(mesh8, stopped, evaluate=evaluate, eval_every=8).run()
  assert bits(state) == bits(whole[1])
  assert losses(stopped) == losses(whole[0])
  assert read_metrics(stopped, "eval") == read_metrics(whole[0], "eval")
  assert list_steps(stopped / "checkpoints") == [10, 15, 20]
  # Once more: nothing left to do, nothing written twice.
  again = trainer(mesh8, stopped, evaluate=evaluate, eval_every=8).run()
  assert bits(again) == bits(state)
  assert losses(stopped) == losses(whole[0])


def test_what_a_line_and_a_checkpoint_say(whole):
  line = read_metrics(whole[0])[-1]
  for name in ("loss", "lr", "grad_norm", "tokens_per_second", "drop", "imbalance", "tokens"):
    assert isinstance(line[name], float | int)
  assert line["tokens"] == 20 * 64
  assert line["layers"]["max_violation"]
  meta = read_meta(whole[0])
  assert meta["config"]["train"]["steps"] == 20
  assert meta["data_fingerprint"]["source"] == "stride"
  assert (meta["mesh"]["data"], meta["mesh"]["expert"]) == (2, 4)
  assert meta["tokens"] == 1280
  assert json.loads((whole[0] / "config.json").read_text())["optimizer"]["warmup_steps"] == 2
  assert [line["step"] for line in read_metrics(whole[0], "eval")] == [8, 16, 20]


def test_safe_change_continues_and_is_printed(stopped, mesh_of, capsys):
  """Another mesh and more steps than the finished run had; one line of difference each."""
  mesh = mesh_of(2)
  config = {"mesh": {"data": 2}}
  state = trainer(mesh, stopped, steps=21, config=config, log_every=2).run()
  assert int(state.step) == 21
  shown = capsys.readouterr().out
  assert "train.steps: 20 -> 21" in shown
  assert "mesh.data: (not set) -> 2" in shown
  # It compiles, once, while the arrays are read, and says before that what it resumes.
  told = [x for x in shown.splitlines() if x.startswith(("resuming", "compiling"))]
  assert told[0].startswith("resuming from step ")
  assert [x.split(":")[0] for x in told[1:]] == [
    "compiling the training step ...",
    "compiling the training step",
  ]


def test_unsafe_change_is_refused(whole, mesh8):
  with pytest.raises(ConfigError, match=r"train\.batch_size: 8 -> 16") as caught:
    trainer(mesh8, whole[0], batch_size=16).run()
  assert caught.value.code == 2
  assert "allow_config_change" in str(caught.value)
  with pytest.raises(ConfigError, match=r"model\.width: \(not set\) -> 4"):
    trainer(mesh8, whole[0], config={"model": {"width": 4}}).run()


def test_a_permission_is_suggested_only_where_it_helps(whole, mesh8):
  """A model of another shape does not load, whatever is allowed."""
  other = Setup(mesh8).abstract
  fewer = {name: leaf for name, leaf in other.params.items() if name != "router"}
  abstract = dataclasses.replace(other, params=fewer)
  for allowed in (False, True):
    checkpoint = CheckpointConfig(every=5, allow_config_change=allowed)
    run = trainer(mesh8, whole[0], config={"model": {"wiring": "top2"}}, checkpoint=checkpoint)
    run.built = dataclasses.replace(run.built, state=abstract)
    with pytest.raises(ConfigError, match=r"model\.wiring: \(not set\) -> top2") as caught:
      run.run()
    assert "do not fit" in str(caught.value)
    assert "allow_config_change" not in str(caught.value)
  assert list_steps(whole[0] / "checkpoints") == [10, 15, 20]


@pytest.mark.parametrize("fits", [True, False])
def test_so_it_is_for_weights_alone(mesh8, tmp_path, fits):
  """`scmoe.convert` writes parameters and a part of the router's state."""
  params = Setup(mesh8).state().params
  stored = {"params": params if fits else {"embed": params["embed"]}, "router": {}}
  keeper = Checkpointer(tmp_path, CheckpointConfig(async_save=False))
  meta = {"config": {}, "processes": 1, WEIGHTS_ONLY: True}
  keeper.save_now(0, stored, {}, meta)
  keeper.close()
  run = trainer(mesh8, tmp_path, config={"router": {"gate": "cosine"}})
  with pytest.raises(ConfigError, match="written with another configuration") as caught:
    run.run()
  assert ("allow_config_change" in str(caught.value)) is fits
  assert ("do not fit" in str(caught.value)) is not fits


@pytest.mark.parametrize(("clip", "remedy"), [(0.5, "lower optimizer.clip_norm=0.5"), (0.0, "set")])
def test_the_remedy_is_one_that_this_run_has(mesh8, tmp_path, clip, remedy):
  run = trainer(
    mesh8, tmp_path, objective=Poisoned(), data=Source(8, bad=(0,)), max_skipped_in_row=0
  )
  run.built.config["optimizer"]["clip_norm"] = clip
  with pytest.raises(NonFiniteError, match=f"learning_rate, {remedy}"):
    run.run()


def test_how_it_runs_may_change_but_not_what_is_computed():
  before = {"dispatch": {"adaptive_r": 1, "chunks": 1}, "overlap": {"schedule": "auto"}}
  after = {"dispatch": {"adaptive_r": 0, "chunks": 1}, "overlap": {"schedule": "mlp 0"}}
  assert len(check_config(before, after)) == 2
  # Buffers are cut into equal parts: more of them may round the capacity up.
  with pytest.raises(ConfigError, match=r"dispatch\.chunks: 1 -> 2"):
    check_config(before, {**before, "dispatch": {"adaptive_r": 1, "chunks": 2}})


def test_other_data_are_refused(whole, mesh8):
  with pytest.raises(DataError, match="seed: 0 -> 1") as caught:
    trainer(mesh8, whole[0], data=Source(8, seed=1)).run()
  assert caught.value.code == 3


def test_another_number_of_processes_reads_the_same_data():
  stored, now = {"seed": 0, "process_count": 4}, {"seed": 0, "process_count": 3}
  assert check_data(stored, now) == ["process_count: 4 -> 3"]
  with pytest.raises(DataError, match="checkpoint: seed: 0 -> 1; its"):
    check_data(stored, now | {"seed": 1})


def test_skipped_step_is_counted_and_the_run_goes_on(mesh8, tmp_path, capsys):
  trainer(mesh8, tmp_path, objective=Poisoned(), data=Source(8, bad=(3,)), steps=6).run()
  lines = read_metrics(tmp_path)
  assert [line["loss"] is None for line in lines] == [i == 3 for i in range(6)]
  assert [line["skipped"] for line in lines] == [0, 0, 0, 1, 1, 1]
  assert "step 4: loss nan" in capsys.readouterr().err
  assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_too_many_skipped_steps_end_the_run_and_can_be_replayed(mesh8, tmp_path):
  data = Source(8, bad=(6, 7, 8))
  run = trainer(mesh8, tmp_path, objective=Poisoned(), data=data, max_skipped_in_row=2)
  with pytest.raises(NonFiniteError, match="3 steps in a row up to step 9") as caught:
    run.run()
  assert caught.value.code == 4
  assert list_steps(tmp_path / "checkpoints") == [5]
  failure = json.loads((tmp_path / "replay" / "failure.json").read_text())
  assert (failure["step"], failure["loss"]) == (9, "nan")
  setup = Setup(mesh8, Poisoned())
  restored = Checkpointer(tmp_path / "replay", CheckpointConfig()).restore_latest_valid(
    setup.abstract
  )
  assert restored is not None
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(restored.state))
  with np.load(tmp_path / "replay" / "batch_0.npz") as file:
    batch = Batch(**file)
  assert bits(batch) == bits(Batch.stack([data.batch(8)]))
  _, scalars, _ = setup.step(restored.state, batch)
  assert not np.isfinite(scalars["loss"])


def test_a_step_that_ends_a_resumed_run_is_read_before_the_next_one(mesh8, tmp_path):
  """The files for `scmoe.replay` hold the state of that step, not of the good one after it."""
  options = {"objective": Poisoned(), "data": Source(8, bad=(1, 2)), "max_skipped_in_row": 1}
  with pytest.raises(Preempted):
    trainer(mesh8, tmp_path, stop_after=2, **options).run()
  with pytest.raises(NonFiniteError, match="2 steps in a row up to step 3"):
    trainer(mesh8, tmp_path, **options).run()
  assert list_steps(tmp_path / "replay" / "checkpoints") == [3]


class SignalAt(Source):
  """Sends this process a signal while the given microbatch is read."""

  def __init__(self, at, number):
    super().__init__(8)
    self.at, self.number = at, number

  def train(self):
    source = self

    class Noisy(Iterator):
      def __next__(self):
        if self.index == source.at:
          os.kill(os.getpid(), source.number)
        return super().__next__()

    return Noisy(self)


@pytest.fixture
def handled():
  """SIGHUP ends a process, also if these tests were started by nohup, which makes it ignored."""
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(mesh8, tmp_path, whole, number, handled):
  before = signal.getsignal(number)
  at = {"data": SignalAt(6, number)} if number == signal.SIGTERM else {"data": SignalAt(0, number)}
  with pytest.raises(Preempted) as caught:
    trainer(mesh8, tmp_path, **at).run()
  done = 7 if number == signal.SIGTERM else 1
  assert f"stopped at step {done} of 20" in str(caught.value)
  assert list_steps(tmp_path / "checkpoints")[-1] == done
  assert losses(tmp_path) == losses(whole[0])[:done]
  assert signal.getsignal(number) == before
  if number == signal.SIGTERM:
    assert bits(trainer(mesh8, tmp_path).run()) == bits(whole[1])


def test_a_signal_during_compilation_is_obeyed_before_the_first_step(mesh8, tmp_path, whole):
  class Interrupting(Objective):
    def loss(self, params, router, batch, rng):
      os.kill(os.getpid(), signal.SIGTERM)
      return super().loss(params, router, batch, rng)

  with pytest.raises(Preempted, match="stopped at step 0 of 20"):
    trainer(mesh8, tmp_path, objective=Interrupting()).run()
  assert list_steps(tmp_path / "checkpoints") == [0]
  assert bits(trainer(mesh8, tmp_path).run()) == bits(whole[1])


def test_a_tuned_run_computes_what_it_would_without(mesh8, tmp_path, whole, capsys):
  state = trainer(mesh8, tmp_path, tune="chunks=1,2", tune_rounds=1).run()
  assert bits(state) == bits(whole[1])
  # A change that wins on the cut is compared once more, by whole steps. Which candidate wins is
  # chance here: the fake objective computes the same for all three.
  cut, *whole_steps = [x for x in capsys.readouterr().out.splitlines() if "is chosen. " in x]
  for name in ("as configured: ", "chunks=1: ", "chunks=2: "):
    assert name in cut
  assert len(whole_steps) == (0 if "as configured is chosen" in cut else 1)


def test_a_signal_in_evaluation_discards_it_and_resume_does_it_again(mesh8, tmp_path, whole):
  polls = []

  def interrupted(state, stopping):
    for _ in range(5):
      polls.append(1)
      if len(polls) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
      if stopping():
        return None
    return evaluate(state, stopping)

  run = {"evaluate": interrupted, "eval_every": 8}
  with pytest.raises(Preempted, match="stopped at step 8 of 20"):
    trainer(mesh8, tmp_path, **run).run()
  assert len(polls) == 3
  assert read_metrics(tmp_path, "eval") == []
  trainer(mesh8, tmp_path, **run).run()
  assert read_metrics(tmp_path, "eval") == read_metrics(whole[0], "eval")


@pytest.mark.parametrize(("every", "steps"), [(0, [3]), (2, [2, 3]), (3, [3])])
def test_the_last_step_has_one_sample(mesh8, tmp_path, capsys, every, steps):
  trainer(mesh8, tmp_path, steps=3, sample_every=every, sample=lambda state: "text").run()
  told = [x for x in capsys.readouterr().out.splitlines() if x.startswith("sample at step")]
  assert told == [f"sample at step {step}:" for step in steps]


def test_a_batch_of_an_evaluation_that_may_compile_gets_the_longer_limit(
  mesh8, tmp_path, monkeypatch
):
  """GPUs that exchange rows compile an evaluation's program again at about its fifth batch."""
  seconds, settled = [], [True, False, False, True]  # before each batch; the first one compiles

  def figures(model, data, *, stopping, prepare, **_):
    while settled:
      prepare.settled = settled.pop(0)
      assert not stopping()
    return {"loss": 1.0}

  modality = types.SimpleNamespace(evaluate=figures, flat=lambda found: found)
  monkeypatch.setattr(train, "Programs", lambda *_: types.SimpleNamespace())
  monkeypatch.setattr(train, "modality_of", lambda run: modality)
  arm = lambda self, given, what: "batch" in what and seconds.append(given)
  monkeypatch.setattr(Watchdog, "arm", arm)
  same = lambda *given: given
  built = types.SimpleNamespace(overlap=None, mesh=None, whole=same, training_model=same)
  built.run = types.SimpleNamespace(train=TrainConfig())
  evaluate = train.evaluation(built, types.SimpleNamespace(validation_domains=["a"]), tmp_path)
  limits = {"watchdog_seconds": 5.0, "first_step_seconds": 60.0}
  trainer(mesh8, tmp_path, evaluate=evaluate, steps=1, **limits).run()
  assert seconds == [60, 60, 60, 5]


@pytest.mark.parametrize("evaluate", [None, lambda *_: {"loss": 1.0}], ids=["never", "in the end"])
def test_a_finished_run_is_sampled_once(mesh8, tmp_path, capsys, evaluate):
  options = {"steps": 3, "sample": lambda state: "text", "evaluate": evaluate}
  for _ in range(2):
    trainer(mesh8, tmp_path, **options).run()
  assert capsys.readouterr().out.count("sample at step") == 1


def test_a_run_that_ends_within_its_trace_writes_it(mesh8, tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  trainer(mesh8, tmp_path, steps=3, profile_step=2, profile_steps=5).run()
  assert calls == [str(tmp_path / "profile"), "stop"]


def test_a_trace_for_which_the_disk_has_no_room_is_a_warning(mesh8, tmp_path, monkeypatch, capsys):
  """jax says RESOURCE_EXHAUSTED of the disk, too, which must not pass for too little memory."""

  folder = tmp_path / "profile" / "plugins" / "profile"

  def full():
    (folder / "2").mkdir(parents=True)
    (folder / "20").mkdir()
    file = folder / "2" / "a.xplane.pb"
    raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {file}; No space left on device")

  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
  monkeypatch.setattr(jax.profiler, "stop_trace", full)
  trainer(mesh8, tmp_path, steps=4, profile_step=2, profile_steps=1).run()
  assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]
  (line,) = [one for one in capsys.readouterr().err.splitlines() if "trace" in one]
  assert line.startswith("WARNING: no trace of steps 2 to 2: the trace in ")
  assert [path.name for path in folder.iterdir()] == ["20"], "the half trace is removed"
  assert "No space left on device" in line


def test_the_step_gives_up_its_trace_before_the_users_begins(mesh8, tmp_path, monkeypatch, capsys):
  """jax takes one trace at a time, and would refuse the second by an error."""
  calls = []
  hold = lambda step, held: calls.append("held" if held else "free")
  monkeypatch.setattr(GuidedStep, "hold_profiling", hold)
  monkeypatch.setattr(GuidedStep, "give_up_trace", lambda step: calls.append("given up"))
  monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  trainer(mesh8, tmp_path, steps=4, profile_step=3, profile_steps=1).run()
  assert calls == ["held", str(tmp_path / "profile"), "stop", "free", "given up"]
  assert f"trace of steps 3 to 3: {tmp_path / 'profile'}" in capsys.readouterr().out


def test_checkpoint_comes_before_an_evaluation_that_fails(mesh8, tmp_path):
  def fails(state, stopping):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    trainer(mesh8, tmp_path, evaluate=fails, steps=2).run()
  assert list_steps(tmp_path / "checkpoints") == [2]
  assert not (tmp_path / "run.lock").exists()


def test_a_sink_that_raises_is_dropped_and_the_record_is_complete(
  mesh8, tmp_path, monkeypatch, capsys
):
  def fail(self, step, scalars):
    raise OSError("no space")

  monkeypatch.setattr(TensorBoard, "write", fail)
  trainer(mesh8, tmp_path, steps=4, tensorboard=True).run()
  assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]
  assert capsys.readouterr().err.count("TensorBoard failed and is dropped") == 1


def test_tensorboard_is_given_no_number_that_is_not_finite(tmp_path):
  board = TensorBoard(tmp_path, 4)
  board.write(5, {"loss": 2.0, "eta_seconds": float("nan"), "text": "a"})
  board.write(6, {"loss": 1.5, "tokens": 3})
  board.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  data, events = file.read_bytes(), []
  while data:  # a record: its length in 8 bytes, a sum of 4, the event, a sum of 4
    length = int.from_bytes(data[:8], "little")
    events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  first, start, *written = events
  assert first.file_version == "brain.Event:2"
  assert (start.step, start.session_log.status) == (5, event_pb2.SessionLog.START)
  found = [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in written]
  assert found == [(5, {"loss": 2.0}), (6, {"loss": 1.5, "tokens": 3.0})]


def test_tensorboard_and_router_files(mesh8, tmp_path):
  trainer(mesh8, tmp_path, steps=4, tensorboard=True, router_every=2).run()
  assert list((tmp_path / "tensorboard").glob("events*"))
  files = sorted(p.name for p in (tmp_path / "router").iterdir())
  assert files == ["step_00000002.npz", "step_00000004.npz"]
  with np.load(tmp_path / "router" / files[0]) as arrays:
    assert arrays["load"].shape == (1, 4)
    assert arrays["load"].sum() == pytest.approx(1)


def test_partial_last_line_and_later_lines_are_cut(tmp_path):
  first = MetricsFile(tmp_path, 0)
  for step in (1, 2, 3):
    first.write(step, {"loss": float("nan") if step == 2 else 1.5})
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "lo')
  again = MetricsFile(tmp_path, 2)
  again.write(3, {"loss": 2.5})
  assert losses(tmp_path) == [(1, 1.5), (2, None), (3, 2.5)]


def test_lines_wait_for_a_full_disk(tmp_path, monkeypatch, capsys):
  file = MetricsFile(tmp_path, 0)
  file.write(1, {"loss": 1.0})

  def full(*args, **kwargs):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr("builtins.open", full)
    file.write(2, {"loss": 2.0})
    file.write(3, {"loss": 3.0})
  file.write(4, {"loss": 4.0})
  assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]
  assert capsys.readouterr().err.count("cannot be written") == 1


def test_data_that_end(mesh8, tmp_path):
  class Short(Source):
    def batch(self, index):
      if index == 2:
        raise StopIteration
      return super().batch(index)

  with pytest.raises(DataError, match="data ended at step 2"):
    trainer(mesh8, tmp_path, data=Short(8)).run()


def test_second_run_on_one_directory_is_refused(mesh8, tmp_path, capsys):
  # Our own number would count as left behind by an earlier process that had it.
  (tmp_path / "run.lock").write_text(json.dumps(identity(os.getppid())))
  with pytest.raises(ConfigError, match=f"in use by process {os.getppid()}"):
    trainer(mesh8, tmp_path).run()
  (tmp_path / "run.lock").write_text(json.dumps(identity(os.getppid()) | {"pid": 2**22 + 1}))
  with RunLock(tmp_path):
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
  assert "breaking the lock that process 4194305" in capsys.readouterr().err
  (tmp_path / "run.lock").write_text('{"pid": 1, "host": "elsewhere"}')
  with pytest.raises(ConfigError, match="in use by process 1 on elsewhere"), RunLock(tmp_path):
    pass
  os.utime(tmp_path / "run.lock", (1, 1))
  with RunLock(tmp_path):
    pass
  with pytest.raises(StorageError, match="gone cannot be opened"), RunLock(tmp_path / "gone"):
    pass


def test_a_card_notes_changed_files_of_the_whole_package(tmp_path, monkeypatch):
  git = lambda *words: subprocess.run(
    ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words], check=True
  )
  (tmp_path / "scmoe" / "moe").mkdir(parents=True)
  (tmp_path / "scmoe" / "moe" / "layer.py").write_text("x = 1\n")
  git("init", "-q")
  git("add", "-A")
  git("commit", "-qm", "one")
  monkeypatch.setattr(card, "PACKAGE", tmp_path / card.PACKAGE.name)
  card.write_card(tmp_path)
  assert card.read_card(tmp_path)["git"]["changed"] is False
  (tmp_path / "scmoe" / "moe" / "layer.py").write_text("x = 2\n")
  card.write_card(tmp_path)
  assert card.read_card(tmp_path)["git"]["changed"] is True


def test_unusable_workdir_is_said_before_anything_runs(tmp_path, mesh8):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="is a file"):
    prepare_workdir(tmp_path / "file" / "run")
  for name in ("", "a\0b", "x" * 300):
    with pytest.raises(ConfigError, match="not a usable path"):
      prepare_workdir(name)
  with pytest.raises(ConfigError, match="names a user that this machine does not have"):
    prepare_workdir("~no-such-user/a")
  assert prepare_workdir(tmp_path / "missing" / "parents").is_dir()
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "checkpoints").write_text("")
  with pytest.raises(StorageError, match="checkpoints cannot be written"):
    trainer(mesh8, tmp_path / "run").run()
  if os.geteuid():  # root may write anywhere
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="cannot be written"):
      prepare_workdir(tmp_path / "locked" / "run")
    (tmp_path / "locked").chmod(0)  # nor may its entries be looked at
    with pytest.raises(StorageError, match="cannot be written"):
      prepare_workdir(tmp_path / "locked" / "run")


def test_batch_must_fit_the_mesh(mesh8, tmp_path):
  with pytest.raises(ConfigError, match=r"batch_size=12 is not divisible by .* = 8; use 16"):
    trainer(mesh8, tmp_path / "a", batch_size=12).run()
  with pytest.raises(ConfigError, match="tokens_per_step=65 is not a multiple"):
    trainer(mesh8, tmp_path / "a", tokens_per_step=65).run()
  assert not (tmp_path / "a").exists()


def test_accumulated_run_reads_all_its_microbatches(mesh8, tmp_path):
  trainer(mesh8, tmp_path, steps=3, tokens_per_step=128).run()
  restored = Checkpointer(tmp_path, CheckpointConfig()).restore_latest_valid(Setup(mesh8).abstract)
  assert restored is not None
  assert restored.data_state == {"next_index": 6}
  assert read_metrics(tmp_path)[-1]["tokens"] == 3 * 128


def test_the_watchdog_needs_no_stderr(monkeypatch):
  """Python sets `sys.stderr` to None in a process whose standard error is closed."""
  monkeypatch.setattr(sys, "stderr", None)
  with Watchdog() as watchdog:
    watchdog.arm(600.0, "step")


def test_the_error_of_skipped_spikes_names_no_cure_that_was_taken():
  train = TrainConfig(spike_sigma=6.0, spike_action="skip", max_skipped_in_row=1)
  built = types.SimpleNamespace(train=train, config={})
  values = {"spike": 1.0, "skipped_in_row": 2, "objective": 9.0, "grad_norm": 3.0}
  text = str(not_finite(7, values, built, "nothing was written"))
  assert "or a spike (train.spike_sigma=6)" in text
  assert "spike_action" not in text
