"""Processes that die: at random moments, again and again; one of two, and a slow one."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from covering import night
from training_fakes import bits, trainer
from workers import Worker, pair

from scmoe.training.checkpoint import Checkpointer
from scmoe.training.metrics import read_metrics
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import list_steps

STEPS = 20
CHECKPOINT = CheckpointConfig(every=2)


def losses(workdir):
  return [(line["step"], line["loss"]) for line in read_metrics(workdir)]


@pytest.fixture(scope="module")
def whole(mesh8, tmp_path_factory):
  """(workdir, final state) of the unbroken run."""
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, trainer(mesh8, workdir, steps=STEPS, checkpoint=CHECKPOINT).run()


@pytest.mark.parametrize("kills", [night(2), night(50)])
def test_killed_at_random_moments_it_ends_bitwise_equal(mesh8, tmp_path, whole, kills):
  """kill -9 anywhere: in a step, in a save, in the start; what is left is always enough."""
  draw, workdir, done = random.Random(kills), tmp_path / "run", []
  steps = STEPS if kills < 10 else 10 * STEPS
  for _ in range(kills):
    worker = Worker(workdir, slow=0.02, every=2, train={"steps": steps})
    if draw.random() < 0.9 and done[-1:] != [steps]:  # in its steps; else wherever its start is
      worker.wait_for("batch ")
    time.sleep(draw.uniform(0, 0.4))
    worker.process.kill()
    worker.process.wait()
    done.append(max(list_steps(workdir / "checkpoints"), default=0))
  assert done == sorted(done), "no kill took a finished checkpoint away"
  state = trainer(mesh8, workdir, steps=steps, checkpoint=CHECKPOINT).run()
  want, found = whole
  if steps != STEPS:
    want = tmp_path / "whole"
    found = trainer(mesh8, want, steps=steps, checkpoint=CHECKPOINT).run()
  assert bits(state) == bits(found)
  assert losses(workdir) == losses(want)
  assert not [p for p in (workdir / "checkpoints").iterdir() if "tmp" in p.name]
  assert not [p for p in (workdir / "checkpoints").iterdir() if "bad" in p.name]


@pytest.mark.parametrize("then", ["one", night("two")], ids=["one goes on", "two go on"])
def test_a_peer_that_is_killed_ends_the_other_and_leaves_a_good_checkpoint(
  tmp_path, mesh8, whole, then
):
  workdir = tmp_path / "run"
  workers = pair(workdir, slow=0.05, heartbeat=10, every=2, train={"steps": STEPS})
  try:
    workers[1].wait_for("batch 6\n")
    workers[1].process.kill()
    assert workers[0].end(100) not in (0, None), "it noticed"
  finally:
    for worker in workers:
      worker.kill()
  assert list_steps(workdir / "checkpoints"), "what was saved stays"
  if then == "one":
    trainer(mesh8, workdir, steps=STEPS, checkpoint=CHECKPOINT).run()
  else:
    workers = pair(workdir, every=2, train={"steps": STEPS})
    try:
      assert [w.end(100) for w in workers] == [0, 0]
    finally:
      for worker in workers:
        worker.kill()
  np.testing.assert_allclose(
    [loss for _, loss in losses(workdir)], [loss for _, loss in losses(whole[0])], rtol=1e-5
  )


@pytest.mark.nightly
def test_a_collective_that_fails_since_a_peer_was_killed_is_one_line(tmp_path):
  """Between processes of one device each, the collective fails at once.

  By itself jax would print a traceback, and wait for the heartbeat of the killed process.
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  fields = {"mesh.data": 1, "mesh.expert": 2, "train.steps": 5000, "train.log_every": 1}
  fields |= {"train.eval_every": 0, "checkpoint.every": 0}
  command = [sys.executable, "-m", "scmoe.train", "--config", "quickstart", "--smoke"]
  command += ["--workdir", str(tmp_path / "run")]
  command += [f"--config.{name}={value}" for name, value in fields.items()]
  own = {"XLA_FLAGS": "", "SCMOE_COORDINATOR": f"127.0.0.1:{port}", "SCMOE_NUM_PROCESSES": "2"}
  both = [
    subprocess.Popen(
      command,
      env=os.environ | own | {"SCMOE_PROCESS_ID": str(i)},
      stdout=subprocess.DEVNULL,
      stderr=open(tmp_path / f"{i}.err", "w"),  # noqa: SIM115
    )
    for i in range(2)
  ]
  try:
    end = time.monotonic() + 90
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 3:
      assert time.monotonic() < end
      assert both[0].poll() is None, (tmp_path / "0.err").read_text()
      time.sleep(0.1)
    both[1].kill()
    assert both[0].wait(20) == 86
  finally:
    for process in both:
      process.kill()
  said = (tmp_path / "0.err").read_text()
  assert "Traceback" not in said
  (line,) = [x for x in said.splitlines() if "PeerLost" in x]
  assert "process 0 of 2: another process has ended" in line


@pytest.mark.nightly
def test_a_slow_peer_is_waited_for(tmp_path):
  workdir = tmp_path / "run"
  train = {"steps": 6, "watchdog_seconds": 30.0}
  workers = pair(workdir, slow=0.03, slower=1, train=train)
  try:
    assert [w.end(100) for w in workers] == [0, 0]
  finally:
    for worker in workers:
      worker.kill()
  assert [step for step, _ in losses(workdir)] == list(range(1, 7))


class SignalInSave(Checkpointer):
  """SIGTERM while a checkpoint is being written."""

  def save(self, step, state, data_state, meta):
    started = super().save(step, state, data_state, meta)
    if step == 4:
      os.kill(os.getpid(), signal.SIGTERM)
    return started


def test_terminated_while_it_saves(mesh8, tmp_path, whole, monkeypatch):
  from scmoe.base.errors import Preempted
  from scmoe.training import loop

  monkeypatch.setattr(loop, "Checkpointer", SignalInSave)
  with pytest.raises(Preempted, match="stopped at step 4 of 20 and saved"):
    trainer(mesh8, tmp_path, steps=STEPS, checkpoint=CHECKPOINT).run()
  assert list_steps(tmp_path / "checkpoints")[-1] == 4
  monkeypatch.undo()
  assert bits(trainer(mesh8, tmp_path, steps=STEPS, checkpoint=CHECKPOINT).run()) == bits(whole[1])


@pytest.mark.nightly  # by day test_files.py damages the programs that a run keeps
def test_a_damaged_compilation_cache_costs_time_and_nothing_else(tmp_path, whole):
  """Everything that jax keeps of compiled programs, replaced by other bytes."""
  cache = tmp_path / "programs"
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  for name in ("first", "second"):
    worker = Worker(tmp_path / name, environment, every=2, train={"steps": STEPS})
    assert worker.end() == 0, worker.err.read_text()[-2000:]
    assert losses(tmp_path / name) == losses(whole[0])
    kept = [file for file in cache.rglob("*") if file.is_file()]
    assert kept
    for file in kept:
      file.write_bytes(b"not a program" * 20)


def test_the_same_command_twice_is_the_same_run(mesh8, tmp_path, whole):
  state = trainer(mesh8, tmp_path, steps=STEPS, checkpoint=CHECKPOINT).run()
  assert bits(state) == bits(whole[1])
  assert losses(tmp_path) == losses(whole[0])


def test_deterministic_is_asked_for_before_a_device_is_used(monkeypatch, tmp_path):
  """On a GPU XLA reads the flag when the first device is used; the command sets it first."""
  from scmoe import train

  class Stop(Exception):
    pass

  def initialize(config):
    raise Stop

  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
  monkeypatch.setattr(train.distributed, "initialize", initialize)
  with pytest.raises(Stop):
    train.main(["--config", "quickstart", "--deterministic", "--workdir", str(tmp_path / "a")])
  assert "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
