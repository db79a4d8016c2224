"""Files that are damaged, foreign, swapped or cut short, and a disk that is full."""

import json
import os
import random
import resource
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from covering import night
from training_fakes import Setup, Source, bits, leaf_files, trainer

from scmoe.base.batch import Batch
from scmoe.base.errors import CheckpointError, ConfigError, StorageError
from scmoe.training import workdir as workdir_module
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.metrics import Metrics
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import load, read_meta
from scmoe.training.workdir import RunLock

CFG = CheckpointConfig()


@pytest.fixture(scope="module")
def setup(mesh8):
  return Setup(mesh8)


@pytest.fixture(scope="module")
def saved(setup, tmp_path_factory):
  """(workdir, bits by step): steps 1 and 2 of a run."""
  workdir = tmp_path_factory.mktemp("saved")
  checkpointer, state, written = Checkpointer(workdir, CFG), setup.state(), {}
  for step in (1, 2):
    state, _, _ = setup.step(state, Batch.stack([Source(8).batch(step)]))
    written[step] = bits(state)
    checkpointer.save(step, state, {"next_index": step}, {"config": {"a": step}})
  checkpointer.close()
  return workdir, written


@pytest.fixture
def run(saved, tmp_path):
  """A copy of the saved run that may be damaged."""
  shutil.copytree(saved[0], tmp_path / "run")
  return tmp_path / "run"


def restore(run, setup):
  restored = Checkpointer(run, CFG).restore_latest_valid(setup.abstract)
  assert restored is not None
  return restored


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.nightly)])
def test_no_byte_of_a_checkpoint_changes_what_is_restored(run, saved, setup, count):
  """Bytes drawn from all files, each inverted: the step is found damaged, or is bitwise as it was.

  Whatever a byte means to orbax, arrays are compared with the fingerprints of what was written, and
  the rest is under a digest.
  """
  step, noticed, read = run / "checkpoints" / "2", 0, 0
  places = [
    (file, at)
    for file in sorted(f for f in step.rglob("*") if f.is_file())
    for at in range(file.stat().st_size)
  ]
  drawn = random.Random(0).sample(places, count)
  for file, at in drawn:
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[at] ^= 0xFF
    file.write_bytes(damaged)
    restored = restore(run, setup)
    assert bits(restored.state) == saved[1][restored.step], (file.name, at)
    # What a process has written before orbax merged it is never read; it is a third to over a half
    # of all bytes, another share every time.
    read += not any(part.startswith("ocdbt.process_") for part in file.parts)
    if file.parent.parent.parent == step and file.parent.name == "d":  # the arrays themselves
      assert restored.step == 1, (file.name, at)
    if restored.step == 1:
      noticed += 1
      next(p for p in step.parent.iterdir() if p.name.startswith("2.bad")).rename(step)
    file.write_bytes(good)
  assert noticed > read // 3


def test_large_leaves_lie_in_files_of_their_own_and_are_covered(tmp_path, mesh1):
  """Above a size orbax leaves a leaf where its process wrote it: this is what large models read."""
  value = jax.device_put(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))
  state = {"params": {"a": value, "b": value + 1}, "step": jax.numpy.zeros((), "int32")}
  checkpointer = Checkpointer(tmp_path, CFG)
  checkpointer.save(1, state, {}, {})
  checkpointer.close()
  everywhere = jax.sharding.NamedSharding(mesh1, jax.sharding.PartitionSpec())
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state
  )
  step = tmp_path / "checkpoints" / "1"
  read = leaf_files(step, abstract)
  large = [file for file in read if "ocdbt.process_0" in file.parts]
  assert large, "not merged, but read"
  draw, found = random.Random(1), 0
  for file in read:
    good = bytearray(file.read_bytes())
    for at in draw.sample(range(len(good)), 5):
      damaged = bytearray(good)
      damaged[at] ^= 1
      file.write_bytes(damaged)
      try:
        assert bits(load(step, abstract, read_meta(tmp_path, 1))) == bits(state)
      except Exception as error:
        assert type(error).__name__ == "Damaged"  # noqa: PT017
        found += 1
    file.write_bytes(good)
  assert found >= 5


def test_files_of_another_step_and_another_leaf_are_found(run, saved, setup):
  """Both are whole files that orbax reads without complaint."""
  shutil.rmtree(run / "checkpoints" / "2" / "params")
  shutil.copytree(run / "checkpoints" / "1" / "params", run / "checkpoints" / "2" / "params")
  restored = restore(run, setup)
  assert restored.step == 1
  assert bits(restored.state) == saved[1][1]


def test_swapped_experts_are_found(run, saved, setup):
  """A repair by hand saves the arrays of a step again, with two experts exchanged."""
  meta = read_meta(run, 2)
  state = load(run / "checkpoints" / "2", setup.abstract, meta)
  experts = np.asarray(state.params["experts"])[[1, 0, 2, 3]]
  place = state.params["experts"].sharding
  state.params["experts"] = jax.device_put(experts, place)
  other = Checkpointer(run.parent / "other", CFG)
  other.save(2, state, {"next_index": 2}, {"config": {"a": 2}})
  other.close()
  shutil.rmtree(run / "checkpoints" / "2" / "params")
  shutil.copytree(
    run.parent / "other" / "checkpoints" / "2" / "params", run / "checkpoints" / "2" / "params"
  )
  assert restore(run, setup).step == 1


def test_a_checkpoint_of_another_run_or_a_later_version(run, setup, mesh8, tmp_path):
  foreign = run / "checkpoints" / "2"
  shutil.rmtree(run / "checkpoints" / "1")
  with pytest.raises(ConfigError, match="written with another configuration"):
    trainer(mesh8, run).run()
  meta = json.loads((foreign / "meta" / "metadata").read_text())
  from scmoe.training import description

  data = json.loads((foreign / "data" / "metadata").read_text())
  later = description.sealed({**meta, "schema": 99}, data)
  (foreign / "meta" / "metadata").write_text(json.dumps(later))
  with pytest.raises(CheckpointError, match="schema 99, this version of scmoe reads"):
    restore(run, setup)
  assert foreign.is_dir(), "it is not damaged, and stays"


@pytest.fixture
def limited():
  """limited(n): no file can grow over n bytes, as on a disk that fills up; limited(None): ends."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  change = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n or before[0], before[1]))
  yield change
  change(None)
  signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_at_any_stage_of_a_save(run, saved, setup, limited, capsys):
  """Files fail from the smallest to the largest: markers, manifests, descriptions, arrays."""
  state, results = setup.state(), []
  checkpointer = Checkpointer(run, CheckpointConfig(max_failures=99, async_save=False, keep=99))
  sizes = (1, 30, 80, 97, 120, 300, 500, 900, 1500, 2200, 3000, 4000, 5000, 6000, 10**7)
  for step, size in enumerate(sizes, start=3):
    limited(size)
    results.append(checkpointer.save(step, state, {}, {}))
    limited(None)
    complete = step in checkpointer.steps()
    assert complete == results[-1], "a step is there whole, or not at all"
    if complete:
      assert bits(
        load(run / "checkpoints" / str(step), setup.abstract, read_meta(run, step))
      ) == bits(state)
  assert not results[0]
  assert results[-1]
  assert {1, 2} <= set(checkpointer.steps())
  time.sleep(0.5)  # threads of a failed save write on for a moment
  assert checkpointer.save(99, state, {}, {})
  assert not list((run / "checkpoints").glob("*tmp*")), (
    "a failed save keeps no room from later ones"
  )
  assert "Traceback" not in capsys.readouterr().err


def test_a_disk_that_fills_up_ends_tensorboard_and_not_the_run(tmp_path, limited, capsys):
  """tensorboardX's own thread would end at the error, and the loop wait for it for ever."""
  metrics = Metrics(tmp_path, 0, tensorboard=True)
  limited(20_000)
  for step in range(5):
    metrics.write(step, {f"a{i}": float(i) for i in range(500)})
  limited(None)
  metrics.close()
  assert metrics.sinks == []
  said = capsys.readouterr().err.splitlines()
  assert sum(line.startswith("WARNING: TensorBoard failed and is dropped") for line in said) == 1
  assert all(line.startswith("WARNING: ") for line in said)


def test_a_clock_that_is_set_back_changes_nothing(mesh8, tmp_path, monkeypatch):
  whole = trainer(mesh8, tmp_path / "whole", steps=6).run()
  real, calls = time.time, []

  def back():
    calls.append(1)
    return real() - (3600 if len(calls) > 3 else 0)

  monkeypatch.setattr(time, "time", back)
  state = trainer(mesh8, tmp_path / "run", steps=6).run()
  assert bits(state) == bits(whole)
  # A lock of another host that was touched in what is now the future is not stale.
  (tmp_path / "run" / "run.lock").write_text('{"pid": 1, "host": "elsewhere"}')
  with pytest.raises(ConfigError, match="in use by process 1 on elsewhere"):
    RunLock(tmp_path / "run").__enter__()
  assert workdir_module.FOREIGN_STALE_SECONDS > 2 * workdir_module.TOUCH_SECONDS


def test_a_read_only_checkpoint_directory_is_said_before_the_first_step(mesh8, tmp_path):
  (tmp_path / "checkpoints").write_text("in the way")
  with pytest.raises(StorageError, match="cannot be written"):
    trainer(mesh8, tmp_path).run()
  assert (
    not (tmp_path / "metrics.jsonl").exists() or os.path.getsize(tmp_path / "metrics.jsonl") == 0
  )


CORRUPT_OF_EVERY_RUN = ("metrics.jsonl", "config.json")
CORRUPT = {
  "schedule.json": ['{"chosen": {"chunks": 64}, "for": ', '{"chosen": 3, "for": {}}'],
  "profile_guided/x.pb": ["no profile"],
  "programs/jit_step-cache": ["not a program"],
  "metrics.jsonl": ["\xff\n{", '{"step": "x"}\n'],
  "config.json": ["{"],
}


@pytest.fixture(scope="module")
def whole(mesh8, tmp_path_factory):
  """The final state of four undisturbed steps."""
  return trainer(mesh8, tmp_path_factory.mktemp("whole"), steps=4).run()


@pytest.mark.parametrize(
  ("name", "contents"),
  # Each content of a schedule is a run that is tuned: by day what is cut short, and another type.
  [*CORRUPT.items(), night("schedule.json", ["[]", "\0" * 50])],
  ids=[*CORRUPT, "more of schedule.json"],
)
def test_files_beside_the_checkpoints_may_hold_anything(whole, mesh8, tmp_path, name, contents):
  """The run makes such files again, and its result is that of the undisturbed run."""
  # Only a run that is tuned reads these.
  tuned = {"tune": "chunks=1,2", "tune_rounds": 1} if name not in CORRUPT_OF_EVERY_RUN else {}
  for number, content in enumerate(contents):
    file = tmp_path / f"run{number}" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("latin-1"))
    state = trainer(mesh8, tmp_path / f"run{number}", steps=4, **tuned).run()
    assert bits(state) == bits(whole)
