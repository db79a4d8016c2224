"""Checkpoints under damage, on other meshes, on bad disks."""

import dataclasses
import json
import re
import resource
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_fakes import Setup, Source, bits, leaf_files

from scmoe.base.batch import Batch
from scmoe.base.errors import CheckpointError, ConfigError, DataError, NonFiniteError, StorageError
from scmoe.training import description
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.fingerprint import survey
from scmoe.training.options import CheckpointConfig
from scmoe.training.pieces import Piece, PiecedArray
from scmoe.training.restore import list_steps, read_meta, restore_params, restore_part

PIECE = re.compile(r"\d+(\.\d+)*")  # zarr's name of a file
CFG = CheckpointConfig()


@pytest.fixture(scope="module")
def setup(mesh8):
  return Setup(mesh8)


@pytest.fixture(scope="module")
def saved(setup, tmp_path_factory):
  """(workdir, bits by step): steps 1 to 3 of a run; copied before it is damaged."""
  workdir = tmp_path_factory.mktemp("saved")
  checkpointer, state, written = Checkpointer(workdir, CFG), setup.state(), {}
  for step in (1, 2, 3):
    state, _, _ = setup.step(state, Batch.stack([Source(8).batch(step)]))
    written[step] = bits(state)
    # The next step is given this state to overwrite while it is still being written.
    assert checkpointer.save(step, state, {"next_index": step}, {"config": {"a": step}})
  checkpointer.close()
  return workdir, written


@pytest.fixture(scope="module")
def read(saved, setup):
  """Files of array data of step 3 that a restore reads, largest first, below its directory."""
  step = saved[0] / "checkpoints" / "3"
  files = [file.relative_to(step) for file in leaf_files(step, setup.abstract)]
  assert {file.parts[0] for file in files} == {"params", "state"}
  return files


@pytest.fixture
def run(saved, tmp_path):
  """A copy of the saved run that may be damaged."""
  shutil.copytree(saved[0], tmp_path / "run")
  return tmp_path / "run"


def names(run):
  return sorted(p.name for p in (run / "checkpoints").iterdir())


def restore(run, setup, **kwargs):
  return Checkpointer(run, CFG).restore_latest_valid(setup.abstract, **kwargs)


def flip(path, where=0.5, bit=1):
  data = bytearray(path.read_bytes())
  data[int(len(data) * where)] ^= bit
  path.write_bytes(data)


@pytest.fixture
def whole(setup, saved):
  """The weights of step 3 by dotted name, as NumPy has them."""
  state = Checkpointer(saved[0], CFG).restore_latest_valid(setup.abstract).state
  return {name: np.array(x) for name, x in description.flatten({"params": state.params}).items()}


def in_pieces(whole):
  """The arrays, and pieces of theirs by their first dimension, the last ones first."""
  arrays = [PiecedArray(n, x.shape, x.dtype, min(1, x.ndim - 1)) for n, x in whole.items()]
  places = [(a.name, (i,) * a.leading) for a in arrays for i in range(a.count)]
  make = lambda name, place: lambda: [Piece(name, place, np.ascontiguousarray(whole[name][place]))]
  return arrays, [make(name, place) for name, place in reversed(places)]


def test_a_step_that_was_written_in_pieces_reads_like_any_other(setup, saved, whole, tmp_path):
  keeper, said = Checkpointer(tmp_path, CFG), []
  arrays, pieces = in_pieces(whole)
  assert any(array.count > 1 for array in arrays)
  ready = lambda: said.append(names(tmp_path))
  keeper.save_pieces(
    0, arrays, pieces, {"next_index": 7}, {"config": {}, "weights_only": True}, ready
  )
  keeper.close()
  assert names(tmp_path) == ["0"]
  assert said == [["0.orbax-checkpoint-tmp-pieces"]]
  restored = restore(tmp_path, setup)
  assert restored is not None
  assert restored.data_state == {"next_index": 7}
  params = restore_params(tmp_path, setup.abstract.params)
  assert bits(params) == bits(restored.state["params"])
  assert bits(params) == [x.tobytes() for x in whole.values()]
  assert read_meta(tmp_path)["leaves"].keys() == whole.keys()
  written = {n: leaf["fingerprint"] for n, leaf in read_meta(tmp_path)["leaves"].items()}
  assert written == dict(zip(whole, survey([jnp.asarray(x) for x in whole.values()])[0]))


def test_weights_in_a_folder_of_their_own_are_found(run, saved, setup):
  """Earlier versions wrote the large weights of a converted model there."""
  step = run / "checkpoints" / "3"
  meta, data = description.read_description(step)
  for name, leaf in meta["leaves"].items():
    if name.startswith("params."):
      leaf["item"] = "params_1"
  (step / "params").rename(step / "params_1")
  (step / "meta" / "metadata").write_text(json.dumps(description.sealed(meta, data)))
  restored = restore(run, setup)
  assert (restored.step, bits(restored.state)) == (3, saved[1][3])


def test_damage_to_any_piece_is_seen(setup, whole, tmp_path):
  Checkpointer(tmp_path, CFG).save_pieces(0, *in_pieces(whole), {}, {"config": {}})
  files = [f for f in (tmp_path / "checkpoints/0/params").rglob("*") if PIECE.fullmatch(f.name)]
  assert len(files) == len(in_pieces(whole)[1])
  for file in files:
    sound = file.read_bytes()
    for damage in (flip, lambda file: file.write_bytes(b""), Path.unlink):
      damage(file)  # empty: as a loss of power leaves it; for one that is missing zarr has zeros
      with pytest.raises(CheckpointError, match="no valid checkpoint"):
        restore_params(tmp_path, setup.abstract.params)
    file.write_bytes(sound)
  params = restore_params(tmp_path, setup.abstract.params)
  assert bits(params) == [x.tobytes() for x in whole.values()]


@pytest.fixture
def small_files():
  """Files can not grow over 100 bytes, as on a full disk."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
  yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
  resource.setrlimit(resource.RLIMIT_FSIZE, before)
  signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
  ("trouble", "error"),
  [("source", DataError), ("nan", NonFiniteError), ("last", NonFiniteError), ("few", StorageError)],
)
def test_of_a_step_whose_pieces_stop_coming_nothing_is_left(trouble, error, whole, tmp_path):
  keeper = Checkpointer(tmp_path, CFG)
  arrays, pieces = in_pieces(whole)
  place = len(pieces) - 1 if trouble == "last" else 3

  def bad():
    if trouble == "source":
      raise DataError("a file ended")
    (piece,) = pieces[place]()
    return [piece._replace(value=np.full_like(piece.value, np.nan))]

  coming = [*pieces[:place], *([] if trouble == "few" else [bad]), *pieces[place + 1 :]]
  with pytest.raises(error):
    keeper.save_pieces(0, arrays, coming, {}, {"config": {}})
  keeper.close()
  assert names(tmp_path) == []


def test_nor_of_one_for_which_there_is_no_room(whole, tmp_path, small_files):
  keeper = Checkpointer(tmp_path, CFG)
  with pytest.raises(StorageError, match=r"saving step 0 to .* failed: "):
    keeper.save_pieces(0, *in_pieces(whole), {}, {"config": {}})
  small_files()
  keeper.close()
  assert names(tmp_path) == []


def test_round_trip_is_bitwise_with_data_and_meta(run, saved, setup):
  restored = restore(run, setup)
  assert restored is not None
  assert restored.step == 3
  assert bits(restored.state) == saved[1][3]
  assert restored.data_state == {"next_index": 3}
  assert restored.meta["config"] == {"a": 3}
  assert read_meta(run, 2)["config"] == {"a": 2}
  assert read_meta(run)["step"] == 3
  leaf = restored.meta["leaves"]["params.experts"]
  assert leaf["shape"] == [4, 8, 8]
  assert leaf["dtype"] == "float32"


def test_nothing_there(tmp_path, setup):
  assert restore(tmp_path, setup) is None
  with pytest.raises(CheckpointError, match=r"steps there: none; give the folder of a run"):
    read_meta(tmp_path)


@pytest.mark.parametrize("shape", [(4, 2), (1, 8 // 2), (2, 1), (1, 1)])
def test_other_mesh_is_bitwise(run, saved, mesh_of, shape):
  other = Setup(mesh_of(*shape))
  restored = restore(run, other)
  assert restored is not None
  assert bits(restored.state) == saved[1][3]
  assert restored.state.params["experts"].sharding == other.abstract.params["experts"].sharding
  params = restore_params(run, other.abstract.params, 2)
  assert bits(params) == bits(restore_part(run, {"params": other.abstract.params}, 2)["params"])


def test_expert_parallel_there_and_back(run, saved, setup, mesh_of, tmp_path):
  one = Setup(mesh_of(1))
  middle = Checkpointer(tmp_path / "one", CFG)
  restored = restore(run, one)
  assert middle.save(3, restored.state, {}, {})
  middle.close()
  back = restore(tmp_path / "one", setup)
  assert bits(back.state) == saved[1][3]
  experts = np.asarray(back.state.params["experts"])
  assert len({e.tobytes() for e in experts}) == len(experts)


@pytest.mark.parametrize(("where", "bit"), [(0.5, 1), (0.7, 128)])
def test_flipped_bit_is_detected_and_survived(run, saved, read, setup, capsys, where, bit):
  flip(run / "checkpoints" / "3" / read[0], where, bit)
  restored = restore(run, setup)
  assert restored.step == 2
  assert bits(restored.state) == saved[1][2]
  assert "damaged" in capsys.readouterr().err
  assert [n.split("-")[0] for n in names(run)] == ["1", "2", "3.bad"]


def test_a_flipped_bit_in_any_file_is_detected_or_without_effect(run, saved, setup, capsys):
  del capsys
  step, found = run / "checkpoints" / "3", 0
  for file in [f for f in step.rglob("*") if f.is_file() and f.stat().st_size]:
    good = file.read_bytes()
    flip(file)
    restored = restore(run, setup)
    assert bits(restored.state) == saved[1][restored.step]
    if restored.step == 2:
      found += 1
      next(p for p in step.parent.iterdir() if p.name.startswith("3.bad")).rename(step)
    file.write_bytes(good)
  assert found >= 5  # descriptions, manifests and data; not copies that nothing refers to


def truncate(step, file):
  path = step / file
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(step, file):
  path = step / file
  path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
  "truncated": truncate,
  "deleted": lambda step, file: (step / file).unlink(),
  "zeroed": zero,
  "no weights": lambda step, _: shutil.rmtree(step / "params"),
  "no description": lambda step, _: (step / "meta" / "metadata").unlink(),
  "description": lambda step, _: flip(step / "meta" / "metadata", 0.9),
  "data position": lambda step, _: (step / "data" / "metadata").write_text('{"processes": [{}]}'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_step_is_set_aside_and_the_previous_used(run, saved, read, setup, kind):
  DAMAGE[kind](run / "checkpoints" / "3", read[0])
  restored = restore(run, setup)
  assert restored.step == 2
  assert bits(restored.state) == saved[1][2]
  assert any(n.startswith("3.bad-") for n in names(run))


def test_a_damaged_step_that_cannot_be_renamed_is_one_line(run, read, setup, monkeypatch):
  def refuse(*_):
    raise PermissionError(13, "Permission denied")

  DAMAGE["truncated"](run / "checkpoints" / "3", read[0])
  monkeypatch.setattr("scmoe.training.checkpoint.os.rename", refuse)
  with pytest.raises(StorageError, match=r"3 cannot be renamed \(Permission denied\); make"):
    restore(run, setup)


def test_meanwhile_is_called_for_each_step_whose_arrays_are_read(run, saved, read, setup):
  """Once with the newest step, whose arrays prove damaged, and once with the one before it."""
  DAMAGE["truncated"](run / "checkpoints" / "3", read[0])
  steps, refused = [], []
  restored = restore(run, setup, meanwhile=lambda meta: steps.append(meta["step"]))
  assert (steps, bits(restored.state)) == ([3, 2], saved[1][2])

  def refuse(meta):
    raise ConfigError("another configuration")

  with pytest.raises(ConfigError, match="another configuration"):
    restore(run, setup, check=refuse, meanwhile=refused.append)
  assert refused == []


def test_readers_fall_back_without_touching_the_directory(run, read, setup):
  weights = next(file for file in read if file.parts[0] == "params")
  flip(run / "checkpoints" / "3" / weights)
  before = names(run)
  params = restore_params(run, setup.abstract.params)
  assert bits(params) == bits(restore_params(run, setup.abstract.params, 2))
  with pytest.raises(CheckpointError, match="no valid checkpoint of step 3"):
    restore_params(run, setup.abstract.params, 3)
  assert names(run) == before


def test_all_bad_never_starts_again_from_nothing(run, setup):
  for step in (1, 2, 3):
    for file in (run / "checkpoints" / str(step)).rglob("d/*"):
      file.write_bytes(bytes(file.stat().st_size))
  for _ in range(2):  # the second time only renamed directories are left
    with pytest.raises(CheckpointError, match=r"1\.bad-.* are damaged") as caught:
      restore(run, setup)
    assert caught.value.code == 5


def test_junk_is_ignored_with_a_warning(run, setup, capsys, tmp_path):
  root = run / "checkpoints"
  (root / "99").mkdir()
  (root / "98").write_text("a file")
  (root / "notes").mkdir()
  (root / "007").mkdir()
  (tmp_path / "elsewhere").mkdir()
  shutil.copytree(root / "3", tmp_path / "elsewhere" / "97")
  (root / "97").symlink_to(tmp_path / "elsewhere" / "97")
  (root / "4.orbax-checkpoint-tmp").mkdir()
  checkpointer = Checkpointer(run, CFG)
  restored = checkpointer.restore_latest_valid(setup.abstract)
  assert restored.step == 3
  warnings = capsys.readouterr().err
  assert all(f"checkpoints/{name} is not" in warnings for name in ("99", "98", "97", "notes"))
  assert "4.orbax-checkpoint-tmp" not in names(run)
  # Junk in the way of a later step is moved aside, and what a link points to is left alone.
  for step in (97, 98, 99):
    assert checkpointer.save(step, restored.state, {}, {})
  checkpointer.close()
  assert checkpointer.steps() == [97, 98, 99]
  assert (tmp_path / "elsewhere" / "97" / "params").is_dir()


def test_other_types_and_shapes_are_refused_not_cast(run, setup):
  to_half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
  half = dataclasses.replace(setup.abstract, params=jax.tree.map(to_half, setup.abstract.params))
  refused = r"holds params\.embed as float32\[17, 8\], the configuration asks for bfloat16\[17, 8\]"
  with pytest.raises(ConfigError, match=refused):
    Checkpointer(run, CFG).restore_latest_valid(half)
  fewer = dict(setup.abstract.params)
  del fewer["router"]
  with pytest.raises(ConfigError, match=r"also holds 'params\.router'"):
    Checkpointer(run, CFG).restore_latest_valid(dataclasses.replace(setup.abstract, params=fewer))
  assert names(run) == ["1", "2", "3"]


def test_check_may_refuse_before_arrays_are_read(run, setup):
  def check(meta):
    raise ConfigError(f"a={meta['config']['a']}")

  with pytest.raises(ConfigError, match="a=3"):
    restore(run, setup, check=check)


def test_old_steps_go_and_marked_ones_stay(tmp_path, setup):
  cfg = CheckpointConfig(keep=2, keep_every=4, async_save=False)
  checkpointer = Checkpointer(tmp_path, cfg)
  state = setup.state()
  for step in range(1, 9):
    assert checkpointer.save(step, state, {}, {})
  assert checkpointer.steps() == [4, 7, 8]
  assert names(tmp_path) == ["4", "7", "8"]


def test_non_finite_state_is_never_written(tmp_path, setup):
  state = setup.state()
  bad = dict(state.params, embed=state.params["embed"].at[0, 0].set(jnp.inf))
  checkpointer = Checkpointer(tmp_path, CFG)
  with pytest.raises(NonFiniteError, match=r"params\.embed is not finite"):
    checkpointer.save(1, dataclasses.replace(state, params=bad), {}, {})
  assert checkpointer.steps() == []


def test_full_disk_keeps_the_old_step_and_retries(run, setup, small_files, capsys):
  state = setup.state()
  checkpointer = Checkpointer(run, CheckpointConfig(max_failures=3, async_save=False))
  assert not checkpointer.save(4, state, {}, {})
  assert not checkpointer.save(5, state, {}, {})
  error = capsys.readouterr().err
  assert "saving step 4 to" in error
  assert "GiB free" in error
  assert "Traceback" not in error
  assert checkpointer.steps() == [1, 2, 3]
  small_files()
  assert checkpointer.save(6, state, {}, {})
  assert checkpointer.steps() == [2, 3, 6]


def test_full_disk_for_good_is_a_storage_error(run, setup, small_files, capsys):
  del capsys  # pytest itself must not write to a file here
  checkpointer = Checkpointer(run, CheckpointConfig(max_failures=2))
  with pytest.raises(StorageError, match="gave up after 2 failures in a row") as caught:
    checkpointer.save_now(4, setup.state(), {}, {})
  assert caught.value.code == 6
  assert checkpointer.steps() == [1, 2, 3]
  small_files()


def test_fingerprint_is_of_the_values_not_of_the_mesh(mesh_of):
  value = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)

  def prints(x, mesh=None):
    spec = jax.sharding.PartitionSpec("expert", None, "data")
    place = jax.sharding.NamedSharding(mesh or mesh_of(1), spec)
    return survey([jax.device_put(x, place)])[0][0]

  reference = prints(value)
  assert {prints(value, mesh_of(*s)) for s in ((2, 4), (4, 2), (1, 8), (1, 1))} == {reference}
  swapped = value[[1, 0, *range(2, 8)]]
  ulp = value.copy()
  ulp[3, 2, 1] = np.nextafter(ulp[3, 2, 1], 9, dtype=np.float32)
  signs = value.copy()
  signs[0, 0] *= -1  # four sign bits: a position-weighted sum would not see them
  assert len({reference, *map(prints, (swapped, ulp, signs))}) == 4


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "bfloat16", "float32", "int32"])
def test_fingerprint_of_types(dtype):
  value = jnp.arange(6).reshape(2, 3) % 2
  other = value.at[1, 2].set(0)
  (first, second), finite = survey([value.astype(dtype), other.astype(dtype)])
  assert first != second
  assert all(finite)


def test_steps_are_an_absolute_directory(tmp_path, monkeypatch, setup):
  monkeypatch.chdir(tmp_path)
  checkpointer = Checkpointer("relative", CFG)
  checkpointer.save(1, setup.state(), {}, {})
  checkpointer.close()
  assert list_steps(tmp_path / "relative" / "checkpoints") == [1]
  meta = json.loads((tmp_path / "relative/checkpoints/1/meta/metadata").read_text())
  assert meta["step"] == 1
