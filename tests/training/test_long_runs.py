"""A run that nobody watches: restarts, heartbeat, slow hosts, spikes, and a step repeated."""

import itertools
import json
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moment_places import built
from training_fakes import Iterator, Objective, Poisoned, Source, bits, trainer

from scmoe import replay as module
from scmoe.base.errors import CheckpointError, NonFiniteError, Preempted
from scmoe.training import journal
from scmoe.training.metrics import read_metrics
from scmoe.training.options import CheckpointConfig
from scmoe.training.restarts import supervise
from scmoe.training.restore import list_steps
from scmoe.training.spikes import LEAST, WINDOW, Spikes
from scmoe.training.vitals import SETTLED, Vitals, stragglers


def script(*lines):
  return [sys.executable, "-c", "\n".join(lines)]


def child(folder, codes):
  """Ends with the next of some codes; a negative one is a signal to itself."""
  return script(
    "import os, pathlib, sys",
    f"count = pathlib.Path({str(folder)!r}, 'count')",
    "n = int(count.read_text()) if count.exists() else 0",
    "count.write_text(str(n + 1))",
    f"code = {codes!r}[n]",
    "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)",
  )


@pytest.mark.parametrize(
  ("codes", "restarts", "end", "starts"),
  [
    ([-9, 86, 1, 0], 3, 0, 4),
    ([-9, -9, -9, 0], 2, 137, 3),  # 128 + SIGKILL
    ([75, 0], 3, 75, 1),  # asked to stop
    ([130, 0], 3, 130, 1),  # interrupted by a second Ctrl-C
    ([-2, 0], 3, 130, 1),  # or before Python had its handler
    ([2, 0], 3, 2, 1),
    ([5, 0], 3, 5, 1),
  ],
)
def test_what_dies_is_started_again(tmp_path, capsys, codes, restarts, end, starts):
  waits = []
  command = child(tmp_path, codes)
  assert supervise(command, restarts, lambda: 0, wait=waits.append) == end
  assert int((tmp_path / "count").read_text()) == starts
  assert waits == [2.0**n for n in range(starts - 1)]
  assert ("giving up" in capsys.readouterr().err) == (end == 137)


def test_progress_gives_the_restarts_back(tmp_path):
  steps = iter(range(100))
  assert (
    supervise(child(tmp_path, [86] * 5 + [0]), 1, lambda: next(steps), wait=lambda _: None) == 0
  )


def signalled(number, folder):
  """Sends this process a signal as soon as the command has begun."""

  def send():
    while not (folder / "up").exists():
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  thread = threading.Thread(target=send)
  thread.start()
  return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ends_it(tmp_path, number):
  """A SIGINT that this process alone gets reaches the command as SIGTERM."""
  command = script(
    "import pathlib, signal, sys, time",
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(86))",
    f"pathlib.Path({str(tmp_path)!r}, 'up').touch()",
    "time.sleep(100)",
  )
  thread = signalled(number, tmp_path)
  assert supervise(command, 9, lambda: 0) == 86
  thread.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_command_can_save(tmp_path, number, code):
  begun = f"pathlib.Path({str(tmp_path)!r}, 'up').touch()"
  thread = signalled(number, tmp_path)
  assert supervise(script("import pathlib, time", begun, "time.sleep(100)"), 9, lambda: 0) == code
  thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_pause_ends_it_at_once(tmp_path, monkeypatch, number):
  slept = []

  def sleep(seconds):
    slept.append(seconds)
    os.kill(os.getpid(), number)

  monkeypatch.setattr(time, "sleep", sleep)
  assert supervise(child(tmp_path, [-9, -9]), 9, lambda: 0) == 75
  assert len(slept) == 1
  assert (tmp_path / "count").read_text() == "1"


def test_train_runs_itself_as_a_child(tmp_path, monkeypatch):
  from scmoe import train

  given = []
  monkeypatch.setattr(train, "supervise", lambda *args: given.append(args) or 86)
  with pytest.raises(SystemExit) as caught:
    train.main(["--restarts", "3", "--config", "quickstart", "--workdir", str(tmp_path / "a")])
  assert caught.value.code == 86
  ((command, restarts, progress),) = given
  assert command[1:4] == ["-m", "scmoe.train", "--restarts"]
  assert command[-1] == "--restarts=0", "the child is no supervisor"
  assert restarts == 3
  assert progress() == 0
  (tmp_path / "a" / "checkpoints" / "7" / "params").mkdir(parents=True)
  assert progress() == 7


def test_the_heartbeat_says_how_far_and_how_fast(mesh8, tmp_path):
  trainer(mesh8, tmp_path, steps=3).run()
  beat = json.loads((tmp_path / "heartbeat" / "process_0.json").read_text())
  assert beat["pid"] == os.getpid()
  assert 1 <= beat["step"] <= 3
  assert {"time", "host", "own_p50", "own_p99"} <= set(beat)


def test_slow_hosts_are_named_by_their_own_part():
  host = lambda own, name: {"own_p50": own, "step_p50": 1.0, "host": name}
  assert stragglers([host(0.1, "a"), host(0.11, "b"), host(0.12, "c")]) == ""
  assert stragglers([host(0.001, "a"), host(0.001, "b"), host(0.01, "c")]) == "", "too little"
  assert "process 2 on c (500 ms)" in stragglers([host(0.1, n) for n in "ab"] + [host(0.5, "c")])


def test_memory_that_grows_is_said(tmp_path):
  vitals, gib = Vitals(tmp_path, 0), 2**30
  assert not any(vitals.growth((2 + n / SETTLED) * gib) for n in range(SETTLED))
  assert vitals.growth(int(3.5 * gib)) == ""
  assert "holds 4.6 GiB of memory" in vitals.growth(int(4.6 * gib))
  assert vitals.growth(int(4.7 * gib)) == "", "once"


def test_what_the_first_checkpoint_takes_is_no_growth(tmp_path, mesh8, monkeypatch, capsys):
  """11.4 GiB before it and 19.9 from then on, as 2,000 steps on two GPUs had; then 20 GiB more."""
  sizes = itertools.chain([11.4] * 30, [19.9] * 30, itertools.repeat(40.0))
  reads = lambda: {"host_memory_bytes": int(next(sizes) * 2**30)}
  monkeypatch.setattr(journal, "memory_in_use", reads)
  trainer(mesh8, tmp_path, steps=80, checkpoint=CheckpointConfig(every=30)).run()
  said = [line for line in capsys.readouterr().err.splitlines() if "GiB of memory" in line]
  assert len(said) == 1
  assert "holds 40.0 GiB of memory, 19.9 GiB when it had settled" in said[0]


def test_spikes_on_paper():
  spikes = Spikes(sigma=6.0)
  recent = spikes.init()
  numbers = np.random.default_rng(0).normal([2.0, 1.0], 0.1, (WINDOW + 50, 2)).astype(np.float32)
  for n, (loss, norm) in enumerate(numbers):
    if n < LEAST:
      assert not spikes.seen(recent, jnp.float32(1e6), norm), "nothing to compare with yet"
    recent = spikes.after(recent, loss, norm, jnp.asarray(True))
  last = numbers[-WINDOW:]
  high = lambda which, sigmas: last[:, which].mean() + sigmas * last[:, which].std()
  assert spikes.seen(recent, high(0, 6.1), 1.0)
  assert not spikes.seen(recent, high(0, 5.9), 1.0)
  assert spikes.seen(recent, 2.0, high(1, 6.1))
  assert not spikes.seen(recent, 0.0, 0.0), "falling is no spike"
  after = spikes.after(recent, 99.0, 99.0, jnp.asarray(False))
  assert bits(after) == bits(recent)


class Bursts(Objective):
  """A batch with a token 0 has a hundred times the loss."""

  def loss(self, params, router, batch, rng):
    from scmoe.parallel.collectives import largest
    from scmoe.parallel.mesh import BATCH_AXES

    loss, aux = super().loss(params, router, batch, rng)
    bad = largest((batch.inputs == 0).any().astype(jnp.float32), BATCH_AXES, "statistics")
    return loss * (1 + 99 * bad), aux


AT = 40


def test_a_spike_is_skipped_or_ends_the_run_and_is_repeated_bitwise(mesh8, tmp_path, capsys):
  run = {"objective": Bursts(), "data": Source(8, bad=(AT,)), "steps": AT + 4}
  run |= {"checkpoint": CheckpointConfig(every=0), "spike_sigma": 6.0}
  state = trainer(mesh8, tmp_path / "skip", **run).run()
  lines = read_metrics(tmp_path / "skip")
  assert [line["step"] for line in lines if line["spike"]] == [AT + 1]
  assert int(state.skipped) == 1
  assert f"step {AT + 1}: loss" in capsys.readouterr().out
  with pytest.raises(Preempted):
    trainer(mesh8, tmp_path / "part", stop_after=35, **run).run()
  assert bits(trainer(mesh8, tmp_path / "part", **run).run()) == bits(state)

  stopping = trainer(mesh8, tmp_path / "stop", spike_action="stop", **run)
  with pytest.raises(NonFiniteError, match=rf"step {AT + 1}: .* are a spike .*scmoe\.replay"):
    stopping.run()
  bundle = tmp_path / "stop" / "replay"
  table, same = module.replay(stopping.built, bundle)
  assert same, table
  failure = json.loads((bundle / "failure.json").read_text())
  (bundle / "failure.json").write_text(json.dumps(failure | {"objective": "1.5"}))
  assert not module.replay(stopping.built, bundle)[1], "another number would be seen"


def test_the_step_that_is_no_number_is_repeated(mesh8, tmp_path):
  data = Source(8, bad=(2, 3))
  run = trainer(mesh8, tmp_path, objective=Poisoned(), data=data, max_skipped_in_row=1)
  with pytest.raises(NonFiniteError):
    run.run()
  table, same = module.replay(run.built, tmp_path / "replay")
  assert same
  assert "nan" in table
  with pytest.raises(CheckpointError, match="is not a run's replay bundle"):
    module.replay(run.built, tmp_path)
  stored = tmp_path / "replay" / "batch_0.npz"
  with np.load(stored) as file:
    batch = dict(file)
  np.savez(stored, **{name: x[:, :-1] for name, x in batch.items()})
  with pytest.raises(CheckpointError, match=r"has inputs \(.*\), a step of this run \("):
    module.replay(run.built, tmp_path / "replay")
  stored.write_bytes(b"")
  with pytest.raises(CheckpointError, match=r"batch_0.npz cannot be read"):
    module.replay(run.built, tmp_path / "replay")


def test_a_batch_of_text_is_read_with_its_domains(tmp_path):
  """Every row of text has one, also where the model does not read it."""
  own = built("device")
  batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), own.batch_shapes)
  assert batch.domain is not None
  np.savez(tmp_path / "batch_0.npz", **vars(batch))
  assert bits(module._stored_batch(own, tmp_path / "batch_0.npz")) == bits(batch)


class Endless(Source):
  """Without a list of what was read."""

  def train(self):
    return Iterator(self)


@pytest.mark.nightly
def test_soak(mesh_of, tmp_path):
  """20,000 steps with evaluation, checkpoints and samples: memory and file handles stay flat.

  The second half: until about step 10,000 the allocator still finds its size.
  """
  seen, handles = [], lambda: len(os.listdir("/proc/self/fd"))

  def evaluate(state, stopping):
    size = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: SIM115
    seen.append((int(state.step), size, handles()))
    return {"loss": float(np.asarray(state.params["embed"]).sum())}

  trainer(
    mesh_of(),
    tmp_path,
    data=Endless(8),
    steps=20_000,
    log_every=50,
    eval_every=250,
    sample_every=500,
    sample=lambda state: "a sample",
    evaluate=evaluate,
    checkpoint=CheckpointConfig(every=500, keep=2),
  ).run()
  assert list_steps(tmp_path / "checkpoints")[-1] == 20_000
  half = [s for s in seen if s[0] >= 10_000]
  first, last = (np.median([s[1] for s in part]) for part in (half[:10], half[-10:]))
  print(f"resident: {first / 2**20:.1f} MiB, at the end {last / 2**20:.1f} MiB")
  assert last <= 1.01 * first
  # The least, since a save that is under way has up to thirty of its own; one that stays open is
  # in all of them.
  quiet = min(s[2] for s in half[:10])
  assert min(s[2] for s in half[-10:]) <= quiet
  assert handles() <= quiet  # and nothing is under way any more
