"""Moments in a file: the steps and checkpoints of moments in memory; kills, full disks, figures."""

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from drawn import drawn_init
from moment_places import (
  MODEL,
  PLACES,
  STEPS,
  advanced,
  begun,
  built,
  named_bits,
  step_of,
  stepped,
)

from scmoe.base.errors import ConfigError, StorageError
from scmoe.models.stacked import is_apart
from scmoe.run import host_memory, summary
from scmoe.run.dry_run import dry_run
from scmoe.run.host_memory import Away, check_host_memory
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.compile_only import compile_only
from scmoe.training.filed import FileShard, Passage, Room
from scmoe.training.kept import Kept, is_kept
from scmoe.training.options import CheckpointConfig, OptimizerConfig
from scmoe.training.pieced import is_pieced
from scmoe.training.step import init_state

SAVED = 2  # the step that the run which is killed has saved
KILLED = """
import os, signal, sys
from moment_places import advanced, begun, step_of
from scmoe.training import filed
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import CheckpointConfig
own = step_of("filed")[0]
state = begun(own)
for number in range(2):
  state, _ = advanced("filed", state, number)
keeper = Checkpointer(sys.argv[1], CheckpointConfig())
keeper.save_now(2, state.for_checkpoint(), {}, {"config": own.config})
write, count = filed.Room.write, [0]
def dying(room, *given):
  write(room, *given)
  count[0] += 1
  if count[0] == 30:
    os.kill(os.getpid(), signal.SIGKILL)
filed.Room.write = dying
advanced("filed", state, 2)
"""


def held(state):
  """The arrays of a state that the host keeps."""
  return [x for x in jax.tree.leaves((state.params, state.opt_state)) if is_kept(x)]


def restored(keeper, abstract):
  found = keeper.restore_latest_valid(abstract.for_checkpoint())
  return found.step, found.state.like(abstract).placed(abstract)


def test_the_steps_are_those_of_moments_in_memory_bit_for_bit():
  """With clipping, a skipped step, an average and moments that ranks share."""
  own, state, good = stepped("filed")
  _, want, same = stepped("computed")
  assert good == same
  assert not all(good)
  assert named_bits(state.for_checkpoint()) == named_bits(want.for_checkpoint())
  assert all(x.in_file for x in held(state))
  assert len(held(state)) == len(held(want))
  assert not any(is_kept(x) and x.in_file for x in jax.tree.leaves(want))
  size = sum(shard.nbytes for x in held(state) for shard in x.shards)
  assert size == 4 * dry_run(own.run).away.total, "each of the four devices has shards of its own"


def test_a_run_that_is_killed_in_an_update_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
  """kill -9 after 30 of about 200 writes; the next run reads nothing but the checkpoint."""
  paths = [str(folder) for folder in Path(__file__).parents[:3]]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  command = [sys.executable, "-c", KILLED, str(tmp_path)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
  assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
  own, step, _ = step_of("filed")
  number, state = restored(Checkpointer(tmp_path, CheckpointConfig()), own.abstract_state())
  assert number == SAVED
  step.ahead = 0  # and nothing is read before its turn
  for number in range(SAVED, STEPS):
    state, _ = advanced("filed", state, number)
  step.ahead = 1
  assert named_bits(state.for_checkpoint()) == named_bits(stepped("filed")[1].for_checkpoint())


@pytest.mark.parametrize(("place", "other"), [("filed", "device"), ("computed", "filed")])
def test_a_checkpoint_loads_in_the_other_place(place, other, tmp_path):
  """Also on another mesh, where ranks share nothing."""
  own, state, _ = stepped(place)
  keeper = Checkpointer(tmp_path, CheckpointConfig())
  keeper.save_now(STEPS, state.for_checkpoint(), {}, {"config": own.config})
  abstract = built(other, mode="none", data=1).abstract_state()
  _, got = restored(keeper, abstract)
  keeper.close()
  assert jax.tree.structure(got) == jax.tree.structure(abstract)
  assert named_bits(got.for_checkpoint()) == named_bits(state.for_checkpoint())
  assert bool(held(got)) == (other == "filed")


def test_a_save_reads_one_piece_at_a_time(tmp_path):
  """Memory never holds a whole stack, neither of moments nor of parameters in halves."""
  _, state, _ = stepped("filed")
  stored = state.for_checkpoint()
  assert all(map(is_pieced, jax.tree.leaves(stored.opt_state)[1:]))
  stacks = [x for x in jax.tree.leaves(stored.params) if is_pieced(x) and x.leading]
  assert stacks
  assert {x.read((1,)).shape[0] for x in stacks} == {1}
  assert {len(list(x.places)) for x in stacks} == {MODEL.num_layers}


def test_a_state_to_warm_start_has_moments_of_zero_in_the_file():
  """`train.init_from` replaces the parameters of a state in the form of a checkpoint."""
  own = built("filed")
  abstract = own.abstract_state()
  state = init_state(drawn_init(own), own.optimizer, 0, abstract.for_checkpoint())
  moments = jax.tree.leaves(state.opt_state)[1:]
  assert all(is_pieced(x) and not np.asarray(x).any() for x in moments)
  got = state.like(abstract).placed(abstract)
  assert named_bits(got.for_checkpoint()) == named_bits(begun(own).for_checkpoint())


# -- the file and the order of reads and writes ----------------------------------------------------


def test_the_file_has_no_name_and_ranges_are_used_again(tmp_path):
  room = Room(str(tmp_path))
  assert room.size == 0
  values = np.arange(6, dtype=np.int16).reshape(2, 3)
  first, second = (FileShard(room, (2, 3), np.int16, x) for x in (values, values + 1))
  assert not list(tmp_path.iterdir())
  assert room.size == 24
  np.testing.assert_array_equal(second.read(), values + 1)
  np.testing.assert_array_equal(first.read(), values)
  assert first.read().ctypes.data % 64 == 0
  del first
  third = FileShard(room, (6,), np.int16)
  assert room.size == 24
  assert not third.read().any()
  assert FileShard(room, (), np.float32, np.float32(2)).read() == 2


class Later:
  """A pool that remembers what it is asked to do, and does it when its result is wanted."""

  def __init__(self):
    self.asked = []

  def submit(self, call, *args):
    self.asked.append((call.__self__.name, call.__name__))
    return self

  def result(self):
    return np.zeros(1)


class Shard:
  def __init__(self, name):
    self.name = name

  def read(self): ...

  def write_behind(self, pool, values):
    return pool.submit(self._write, values)

  def _write(self, values): ...


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_layers_are_read_ahead_and_written_behind(ahead):
  """While layer i is updated, layers up to i + ahead have been asked for, and no other."""

  class Holder:
    def __init__(self, name):
      self.shards = [Shard(name)]

  pool = Later()
  passage = Passage([[Holder(i)] for i in range(4)], ahead, pool)
  assert pool.asked == [(i, "read") for i in range(ahead)], "these come beside the program"
  order = []
  for number in range(4):
    passage.arrive(number)
    assert [name for name, what in pool.asked if what == "read"] == [
      *range(min(4, number + 1 + ahead))
    ]
    passage.take(number, 0, jax.devices()[0])
    passage.leave(number, 0, [None])
    order.append(pool.asked[-1])
    assert len(passage._written) <= (2 if ahead else 1)
  assert order == [(i, "_write") for i in range(4)]


# -- figures ---------------------------------------------------------------------------------------


def test_the_model_of_the_disk_by_hand(monkeypatch):
  """Three layers of 4 bytes; the disk has 1 byte/s, host and link need no time."""
  monkeypatch.setattr(host_memory, "DISK_RATE", 1.0)
  of = lambda ahead: Away((4, 4, 4), ahead, 0, (0,) * 3, (0,) * 3, filed=True)
  # Layer 0 was read beside the pass. The disk reads 1 to 4, writes 0 to 8, reads 2 from 4: the
  # update of layer 1 asks for it at 4, behind the write of layer 0, so it comes at 12.
  assert of(1).seconds(1e30) == pytest.approx(12)
  # read 0 to 4, written to 8, read 1 to 12, written to 16, read 2 to 20
  assert of(0).seconds(1e30) == pytest.approx(20)
  assert (of(1).in_memory, of(0).in_memory) == (16, 8)
  assert dataclasses.replace(of(1), together=2).seconds(1e30) == pytest.approx(24)
  assert dataclasses.replace(of(1), filed=False).seconds(1e30) == pytest.approx(0, abs=1e-6)


def test_the_plan_names_files_and_what_a_resumed_run_needs():
  own = built("filed")
  plan, memory = dry_run(own.run).away, dry_run(built("computed").run).away
  assert plan.filed
  assert plan.layers == memory.layers
  stored = own.abstract_state().for_checkpoint()
  sizes = lambda tree: [host_memory._bytes(x) for x in jax.tree.leaves(tree)]
  pinned = [x for x in jax.tree.leaves(stored.params) if x.sharding.memory_kind == "pinned_host"]
  assert plan.saving == sum(sizes(pinned)) + max(sizes(stored.opt_state))
  (line,) = summary._host_lines(own)
  assert re.search(r" in files and .* for each device, .* more when it resumes$", line)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("fields", "options", "words"),
  [
    ({"moments_update": "device"}, {}, r"needs an update by the host"),
    ({"moments_folder": ""}, {}, r"needs a folder, got mesh.moments_folder=''"),
    ({}, {"name": "muon"}, r"got optimizer.name='muon'.* and mesh.moments_in=host$"),
  ],
)
def test_options_that_do_not_go_with_files(fields, options, words, monkeypatch):
  monkeypatch.setitem(PLACES, "filed", PLACES["filed"] | fields)
  with pytest.raises(ConfigError, match=words):
    built("filed", optimizer=OptimizerConfig(**options))


def test_a_folder_that_cannot_take_the_moments_is_refused(monkeypatch, tmp_path):
  check_host_memory(built("filed"))
  away = PLACES["filed"] | {"moments_folder": str(tmp_path / "none")}
  with monkeypatch.context() as patch:
    patch.setitem(PLACES, "filed", away)
    with pytest.raises(ConfigError, match=r"^mesh.moments_folder='.*none' is no folder"):
      check_host_memory(built("filed"))
  own = built("filed")
  need = 4 * dry_run(own.run).away.total
  of = lambda free: lambda folder: type("Usage", (), {"free": free})
  monkeypatch.setattr(host_memory.shutil, "disk_usage", of(need))
  check_host_memory(own)
  monkeypatch.setattr(host_memory.shutil, "disk_usage", of(need - 1))
  with pytest.raises(ConfigError, match=r"needs .* for moments, got .* free; name a folder on"):
    check_host_memory(own)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match=r"is for one process, got 2"):
    check_host_memory(own)


def full(*_):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_ends_the_run_with_one_line(monkeypatch, tmp_path):
  """The line comes as the run takes the room, or in an update, on a disk that promised it."""
  room = Room(str(tmp_path))
  with monkeypatch.context() as patch:
    patch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"no file of 24 bytes can be made: No space left") as it:
      FileShard(room, (6,), np.float32)
  assert it.value.code == 6
  state = begun(step_of("filed")[0])
  with monkeypatch.context() as patch:
    patch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"moments cannot be written: No space left on device"):
      advanced("filed", state, 0)


def test_what_was_not_written_behind_an_update_ends_the_run_at_the_save(monkeypatch, tmp_path):
  """The line names the moments' disk, not that of the checkpoints, and no save is tried again."""
  own, state, _ = stepped("filed")
  keeper = Checkpointer(tmp_path, CheckpointConfig(max_failures=3))
  with monkeypatch.context() as patch:
    patch.setattr(os, "preadv", full)
    with pytest.raises(StorageError, match=r"^mesh.moments_folder=.*cannot be read: No space left"):
      keeper.save(1, state.for_checkpoint(), {}, {"config": own.config})
  assert not list((tmp_path / "checkpoints").iterdir())
  keeper.close()


def test_a_shard_that_the_collector_frees_while_a_range_is_taken_blocks_nobody(
  monkeypatch, tmp_path
):
  room = Room(str(tmp_path))
  shards = [FileShard(room, (6,), np.float32)]
  reserve = os.posix_fallocate
  collect = lambda *given: (shards.clear(), reserve(*given))
  monkeypatch.setattr(os, "posix_fallocate", collect)
  taking = threading.Thread(target=room.take, args=(48,), daemon=True)
  taking.start()
  taking.join(10)
  assert not taking.is_alive()
  assert room.take(24) == (0, False)


def test_a_step_for_moments_in_files_is_compiled_ahead(monkeypatch, tmp_path):
  compiled = []
  step = type("Step", (), {"compile": lambda self, *given: compiled.append(given)})()
  monkeypatch.setattr("scmoe.training.compile_only.fastest_step", lambda *given, **how: step)
  compile_only(built("filed"), tmp_path)
  assert len(compiled) == 1


def test_arrays_keep_one_value_if_a_save_fails(monkeypatch, tmp_path):
  """A failed save leaves no folder, counts like any other, and the next one succeeds."""
  own, state, _ = stepped("filed")
  keeper = Checkpointer(tmp_path, CheckpointConfig(max_failures=2))
  stored, rest = state.for_checkpoint(), ({}, {"config": own.config})
  with monkeypatch.context() as patch:
    patch.setattr(Kept, "on", full)
    assert not keeper.save(1, stored, *rest)
    assert not list((tmp_path / "checkpoints").iterdir())
    with pytest.raises(StorageError, match=r"No space left.*gave up after 2 failures"):
      keeper.save(1, stored, *rest)
  assert keeper.save(1, stored, *rest)
  assert keeper.steps() == [1]
  assert any(map(is_apart, jax.tree.leaves(state.opt_state, is_leaf=is_apart)))
