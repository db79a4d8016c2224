"""A run of four processes loses one, goes on with three, and takes the fourth back."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from scmoe import train
from scmoe.base.errors import Preempted
from scmoe.training.members import FOLDER, member_file, read_plan
from scmoe.training.metrics import metrics_by_kind
from scmoe.training.restore import list_steps

OPTIONS = [
  "--config=quickstart",
  "--smoke",
  "--config.train.batch_size=24",
  "--config.train.steps=100000",
  "--config.train.eval_every=0",
  "--config.train.sample_every=0",
  "--config.train.tensorboard=False",
  "--config.train.log_every=1",
  "--config.checkpoint.every=5",
  "--config.dispatch.capacity_factor=0",  # nothing is dropped, so that all meshes agree
]


class Site:
  """The launcher: processes with a number each, which it starts, kills and starts again."""

  def __init__(self, workdir, count):
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      port = probe.getsockname()[1]
    self.workdir = workdir
    self.common = {"SCMOE_COORDINATOR": f"127.0.0.1:{port}", "SCMOE_NUM_PROCESSES": str(count)}
    self.running = {}
    for number in range(count):
      self.start(number)

  def start(self, number):
    more = [f"--workdir={self.workdir}", "--simulate=2", "--config.mesh.expert=2"]
    more += ["--restarts=5", "--elastic"]
    with open(self.workdir.parent / f"process_{number}.log", "a") as log:
      self.running[number] = subprocess.Popen(
        [sys.executable, "-m", "scmoe.train", *OPTIONS, *more],
        env=os.environ | self.common | {"SCMOE_PROCESS_ID": str(number)},
        stdout=log,
        stderr=log,
      )

  def said(self, number):
    return (self.workdir.parent / f"process_{number}.log").read_text()

  def trained_on(self, devices, seconds=300.0):
    """Waits until the newest start is one on so many devices, and has done a step."""
    end = time.monotonic() + seconds
    while True:
      try:
        kinds = metrics_by_kind(self.workdir)
      except FileNotFoundError:
        kinds = {}
      if starts := kinds.get("start"):
        last, lines = starts[-1], kinds.get("train", [])
        if last["devices"] == devices and lines and lines[-1]["step"] > last["step"]:
          return lines[-1]["step"]
      assert time.monotonic() < end, self.said(0)[-3000:]
      time.sleep(0.05)


def losses(workdir):
  return {line["step"]: line["loss"] for line in metrics_by_kind(workdir)["train"]}


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [3, 0])
def test_three_go_on_and_the_fourth_comes_back(tmp_path, victim):
  """Process 0 is a victim, too: jax's coordinator dies with it."""
  workdir = tmp_path / "run"
  site = Site(workdir, 4)
  try:
    site.trained_on(8)
    while max(list_steps(workdir / "checkpoints"), default=0) < 5:
      time.sleep(0.05)
    site.running[victim].kill()
    killed = time.monotonic()
    site.trained_on(6)
    lost = time.monotonic() - killed
    print(f"process {victim} killed: a step on 6 devices after {lost:.1f} s", flush=True)
    site.start(victim)
    back = time.monotonic()
    site.trained_on(8)
    print(f"started again: a step on 8 devices after {time.monotonic() - back:.1f} s", flush=True)
    for process in site.running.values():
      process.send_signal(signal.SIGTERM)
    assert [p.wait(120) for p in site.running.values()] == [75] * 4
  finally:
    for process in site.running.values():
      process.kill()
  assert lost < 200, (
    "seconds until the loss is certain, then a start; the machine may be busy with other work"
  )
  plan = read_plan(workdir / FOLDER)
  assert (plan.turn, plan.members, plan.data, plan.expert) == (3, (0, 1, 2, 3), 4, 2)
  first = "".join(map(site.said, range(4)))
  assert f"without {victim}: data 3 x expert 2 x tensor 1 on 3 of 4 processes" in first
  assert "goodput " in first
  assert member_file(workdir / FOLDER, victim).exists()

  found = losses(workdir)
  assert list(found) == list(range(1, len(found) + 1)), "each step once"
  unbroken = tmp_path / "unbroken"
  more = ["--config.mesh.expert=2", f"--config.train.stop_after={len(found)}"]
  with pytest.raises(Preempted):
    train.main([*OPTIONS, f"--workdir={unbroken}", *more])
  want = losses(unbroken)
  assert list(want) == list(found)
  np.testing.assert_allclose(list(found.values()), list(want.values()), rtol=1e-4)
