"""Runs in processes of their own: killed, stopped, stuck, and two of them together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from covering import night
from training_fakes import trainer
from workers import Worker, pair

from scmoe.base.errors import ConfigError
from scmoe.kernels.grouped_matmul import tiles, tuned
from scmoe.parallel.mesh import MeshConfig, make_mesh
from scmoe.training.fingerprint import survey
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import list_steps


def losses(workdir):
  return [(line["step"], line["loss"]) for line in read_metrics(workdir)]


@pytest.fixture(scope="module")
def reference(mesh8, tmp_path_factory):
  """Losses of 20 steps in one process with eight devices."""
  workdir = tmp_path_factory.mktemp("reference")
  trainer(mesh8, workdir).run()
  return losses(workdir)


# (step, milliseconds after it) of each kill.
@pytest.mark.parametrize("kills", [((10, 0),), night(((10, 0), (15, 20)))], ids=len)
def test_terminated_and_killed_again_and_again_ends_bitwise_equal(
  tmp_path, mesh8, reference, kills
):
  workdir = tmp_path / "run"
  first = Worker(workdir, slow=0.05)
  first.wait_for("batch 3\n")
  first.process.send_signal(signal.SIGTERM)
  assert first.end() == 75
  message = first.err.read_text()
  assert re.search(r"Preempted: stopped at step [345] of 20 and saved; run the same", message)
  assert "Traceback" not in message
  stopped = list_steps(workdir / "checkpoints")
  for step, milliseconds in kills:
    killed = Worker(workdir, slow=0.03)
    killed.wait_for(f"batch {step}\n")  # its checkpoint has just been started
    time.sleep(milliseconds / 1000)
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL
    assert (workdir / "run.lock").exists()
  assert stopped != list_steps(workdir / "checkpoints")
  trainer(mesh8, workdir).run()
  assert losses(workdir) == reference
  assert list_steps(workdir / "checkpoints")[-1] == 20
  assert not [p for p in (workdir / "checkpoints").iterdir() if "tmp" in p.name]


def test_watchdog_ends_a_stuck_step_but_not_a_long_compilation(tmp_path):
  # The step sleeps for 100 s. No upper bound is nearer: the machine may be busy with other work.
  train = {"watchdog_seconds": 4.0, "first_step_seconds": 120.0}
  worker = Worker(tmp_path / "run", compile_seconds=5, sleep_at=3, train=train)
  worker.wait_for("batch 3\n")
  started = time.monotonic()
  assert worker.end() == 86
  assert time.monotonic() - started < 80
  message = worker.err.read_text()
  assert "watchdog: step 4 took longer than 4 s; the stacks of all threads:" in message
  assert "worker.py" in message
  assert "__next__" in message


@pytest.mark.parametrize("then", ["one", night("two")], ids=["one goes on", "two go on"])
def test_two_processes_stop_together_and_equal_one(tmp_path, mesh8, reference, then):
  workdir = tmp_path / "run"
  workers = pair(workdir, slow=0.05)
  try:
    workers[1].wait_for("batch 3\n")
    workers[1].process.send_signal(signal.SIGTERM)
    assert [w.end(60) for w in workers] == [75, 75]
  finally:
    for worker in workers:
      worker.kill()
  pattern = r"stopped at step (\d+) of 20"
  steps = {int(re.search(pattern, w.err.read_text()).group(1)) for w in workers}
  assert len(steps) == 1
  assert list_steps(workdir / "checkpoints")[-1:] == list(steps)
  assert losses(workdir)[-1][0] == steps.pop()
  assert "processes 2" in workers[0].out.read_text()
  assert "step" not in workers[1].out.read_text()
  if then == "one":
    trainer(mesh8, workdir).run()
  else:
    workers = pair(workdir)
    try:
      assert [w.end(60) for w in workers] == [0, 0]
    finally:
      for worker in workers:
        worker.kill()
  assert [step for step, _ in losses(workdir)] == list(range(1, 21))
  np.testing.assert_allclose(
    [loss for _, loss in losses(workdir)], [loss for _, loss in reference], rtol=1e-5
  )


@pytest.mark.nightly  # by day test_search.py, in one process
def test_two_processes_search_together_and_decide_once(tmp_path, reference):
  """Every program with process 0's profile, one decision, the losses of a run without a search."""
  workdir = tmp_path / "run"

  def run(code, **train):
    workers = pair(workdir, search=True, train=train)
    try:
      assert [w.end(90) for w in workers] == [code, code]
    finally:
      for worker in workers:
        worker.kill()
    return [re.findall(r"compiled with '(.*)'", w.out.read_text()) for w in workers]

  first, second = run(75, stop_after=18)
  assert first == second
  assert set(first) == {"", "profile of process 0"}
  assert [p.read_text() for p in (workdir / "profile_guided").glob("*.pb")] == [first[-1]]
  decision = json.loads((workdir / "schedule.json").read_text())
  assert decision["tried"][0]["variant"] == {}
  assert decision["chosen"] in [t["variant"] for t in decision["tried"]]
  assert decision["for"]["processes"] == 2
  again = run(0)
  assert again == [["profile of process 0"]] * 2, "neither a search nor a profile is repeated"
  np.testing.assert_allclose(
    [loss for _, loss in losses(workdir)], [loss for _, loss in reference], rtol=1e-6
  )


@pytest.mark.nightly  # by day a watchdog ends one process, and a peer is killed (test_killed.py)
def test_watchdog_leaves_a_collective_whose_peer_is_frozen(tmp_path):
  train = {"watchdog_seconds": 3.0, "first_step_seconds": 120.0}
  workers = pair(tmp_path / "run", freeze_at=3, train=train)
  try:
    assert workers[0].end(90) == 86
    assert "watchdog: step" in workers[0].err.read_text()
  finally:
    for worker in workers:
      worker.kill()


def test_devices_of_two_processes_do_not_divide_a_row(tmp_path, monkeypatch):
  mesh = make_mesh(MeshConfig(1, 1, 1, sequence=2), jax.devices()[:2])
  run = trainer(mesh, tmp_path)
  run.check()
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match=r"= 1 does not give each of 2 processes .* multiple of 2"):
    run.check()


def said_by_two(code, **own):
  """The last line that each of two connected processes prints; each runs `code` after connecting.

  Args:
    code: Python.
    own: environment variables, each a function of the process's number.
  """
  connect = (
    "from scmoe.training.distributed import initialize\n"
    "from scmoe.training.options import DistributedConfig\n"
    "initialize(DistributedConfig())\n"
  )
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  common = {"SCMOE_COORDINATOR": f"127.0.0.1:{port}", "SCMOE_NUM_PROCESSES": "2"}
  started = [
    subprocess.Popen(
      [sys.executable, "-c", connect + code],
      env=os.environ
      | common
      | {"SCMOE_PROCESS_ID": str(i)}
      | {name: value(i) for name, value in own.items()},
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  return [process.communicate(timeout=300)[0].splitlines()[-1] for process in started]


SHARED = """
from scmoe.kernels.grouped_matmul import tiles
print(tiles.choose("up", 128, 256, gathered=True))
"""


def test_all_processes_use_the_firsts_tilings(tmp_path, monkeypatch):
  """Each has a cache folder of its own: with other tilings they would compile other programs."""
  offered = tiles.variants("up", 128, 256, gathered=True)
  for i in range(2):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(i)))
    monkeypatch.setattr(tuned, "_tables", {})
    own = tuned.Measured(offered[3 + i], 1.0, 2.0, "today")
    tuned.keep(jax.devices()[0].device_kind, {("up", 128, 256, True): own})
  said = said_by_two(SHARED, XDG_CACHE_HOME=lambda i: str(tmp_path / str(i)))
  assert said == [str(offered[3])] * 2


SURVEYED = """
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scmoe.training import fingerprint
from scmoe.training.host_arrays import made_on_host

def on_hosts(values, *spec):
  place = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec(*spec))
  return made_on_host(values.shape, place, lambda index, device: values[index])

fingerprint._survey = None  # it would move the arrays to the devices, all at once
bad = np.ones((4, 2), np.float32)
bad[3, 1] = np.nan
whole = np.arange(6, dtype=np.int16)
halves = np.arange(24, dtype=np.float32).reshape(2, 12)
arrays = [on_hosts(halves, "data"), on_hosts(whole), on_hosts(bad, "data")]
print(fingerprint.survey(arrays))
"""


def test_the_hosts_of_two_processes_read_what_lies_in_their_memory():
  """One array is divided, one is whole on both, one has a NaN that only the second process sees."""
  one_device = lambda i: "--xla_force_host_platform_device_count=1"
  bad = np.ones((4, 2), np.float32)
  bad[3, 1] = np.nan
  halves = np.arange(24, dtype=np.float32).reshape(2, 12)
  want = survey([jax.device_put(x) for x in (halves, np.arange(6, dtype=np.int16), bad)])
  assert want[1] == [True, True, False]
  assert said_by_two(SURVEYED, XLA_FLAGS=one_device) == [str(want)] * 2
