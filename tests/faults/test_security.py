"""Files that strangers put into a run's folder run no code, and a run opens no port to them."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from training_fakes import bits, trainer

from scmoe import evaluate, train
from scmoe.base.arrays import read_npz
from scmoe.base.errors import ConfigError, ScmoeError
from scmoe.run.config import from_json
from scmoe.training.restore import list_steps

SMALL = ["--config", "quickstart", "--smoke", "--config.train.tensorboard=false"]
SMALL += ["--config.train.sample_tokens=0", "--config.mesh.data=1"]


class Bomb:
  """Unpickling it leaves a trace."""

  def __init__(self, canary):
    self.canary = canary

  def __reduce__(self):
    return (Path(self.canary).write_text, ("it ran",))


def listening():
  """Addresses on which this process listens: [(hexadecimal address, port)]."""
  own = set()
  for name in os.listdir("/proc/self/fd"):
    try:
      target = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
      continue
    own |= {target.removeprefix("socket:[").rstrip("]")} if target.startswith("socket:") else set()
  found = []
  for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in Path(table).read_text().splitlines()[1:]:
      parts = line.split()
      if parts[3] == "0A" and parts[9] in own:
        found.append(parts[1])
  return found


def test_a_run_with_a_trace_listens_nowhere(mesh8, tmp_path):
  seen = []

  def evaluating(state, stopping):
    seen.append(listening())
    return {"loss": 0.0}

  before = listening()
  trainer(mesh8, tmp_path, steps=6, profile_step=2, eval_every=3, evaluate=evaluating).run()
  assert list((tmp_path / "profile").rglob("*"))
  assert seen == [before] * len(seen)
  import socket

  with socket.socket() as probe:  # the test sees what it looks for
    probe.bind(("127.0.0.1", 0))
    probe.listen()
    assert len(listening()) == len(before) + 1


def test_nothing_in_a_folder_is_executed(tmp_path, monkeypatch):
  """A config.py, a sitecustomize and pickles in the run's folder, resumed and evaluated."""
  canary, run = tmp_path / "canary", tmp_path / "run"
  train.main([*SMALL, "--workdir", str(run)])
  attack = f"open({str(canary)!r}, 'w').write('it ran')"
  for name in ("config.py", "sitecustomize.py", "conftest.py", "numpy.py"):
    (run / name).write_text(attack)
  step = run / "checkpoints" / str(list_steps(run / "checkpoints")[-1])
  bomb = pickle.dumps(Bomb(canary))
  for place in (run, step, step / "params", step / "state"):
    for name in ("model.pkl", "data.npz", "x.npy", "x.pt"):
      (place / name).write_bytes(bomb)
  np.savez(run / "object.npz", a=np.array([Bomb(canary)], dtype=object))
  train.main([*SMALL, "--workdir", str(run)])
  evaluate.main(["--workdir", str(run), "--max_batches", "1"])
  assert not canary.exists()


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet", "npz"])
def test_a_pickle_for_data_or_a_tokenizer_is_refused_unread(tmp_path, suffix):
  canary, file = tmp_path / "canary", tmp_path / f"data.{suffix}"
  file.write_bytes(pickle.dumps(Bomb(canary)) * 50)
  kind = {"txt": "text", "npz": "text"}.get(suffix, suffix)
  for fields in (
    [f"--config.data.source={kind}", f"--config.data.path={file}"],
    [f"--config.data.tokenizer={file}"],
  ):
    with pytest.raises(ScmoeError) as caught:
      train.main([*SMALL, *fields, "--workdir", str(tmp_path / "run")])
    assert caught.value.code in (2, 3)
  assert not canary.exists()


@pytest.mark.parametrize(
  "text", ['{"a":' * 100_000, "[" * 100_000, '{"name": NaN}', "9" * 5000, '{"name": 1e999}']
)
def test_json_of_a_stranger_is_one_line(text):
  with pytest.raises(ConfigError) as caught:
    from_json(text)
  assert len(str(caught.value)) < 1000
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "name", ["../out", "a/../../out", "~root/x/../../y", "a\0b", "x" * 300, ""]
)
def test_a_folder_cannot_leave_its_root(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ConfigError):
    train.main([*SMALL, f"--config.name={name}"])
  if name:
    with pytest.raises(ConfigError):
      train.main([*SMALL, f"--workdir={name}"])
  assert list(tmp_path.iterdir()) == []


def test_a_linked_workdir_and_a_linked_step_are_refused(tmp_path, mesh8):
  (tmp_path / "target").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "target")
  with pytest.raises(ConfigError, match="is a symbolic link"):
    train.main([*SMALL, "--workdir", str(tmp_path / "link")])
  assert not list((tmp_path / "target").iterdir())
  state = trainer(mesh8, tmp_path / "run", steps=2).run()
  steps = tmp_path / "run" / "checkpoints"
  (steps / "2").rename(tmp_path / "moved")
  (steps / "2").symlink_to(tmp_path / "moved")
  assert list_steps(steps) == []
  again = trainer(mesh8, tmp_path / "run", steps=2).run()
  assert bits(again) == bits(state)
  assert jax.tree.leaves(again)


def _bomb(path):
  np.savez_compressed(path, a=np.zeros(2**24, np.uint8))
  assert path.stat().st_size < 2**16


def _liar(path):
  """A header that asks for 8 TiB, over 3 bytes."""
  header = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    header, {"descr": "|u1", "fortran_order": False, "shape": (2**43,)}
  )
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("a.npy", header.getvalue() + b"abc")


def _torn(path):
  np.savez(path, a=np.arange(4096))
  path.write_bytes(path.read_bytes()[:-4000])


@pytest.mark.parametrize(
  ("make", "reason"),
  [
    (_bomb, "decompresses to 16,777,344 bytes; the limit is 1,048,576"),
    (_liar, "its header implies"),
    (_torn, "not a zip file"),
    (lambda path: np.savez(path, a=np.array([Bomb(path)], dtype=object)), "holds Python objects"),
    (lambda path: path.write_bytes(b"text"), "not a zip file"),
    (lambda path: None, "No such file"),
  ],
  ids=["bomb", "liar", "torn", "objects", "text", "none"],
)
def test_an_archive_of_arrays_is_looked_through_first(tmp_path, make, reason):
  path = tmp_path / "a.npz"
  make(path)
  with pytest.raises(ValueError, match=reason) as caught:
    read_npz(path, 2**20)
  assert "\n" not in str(caught.value)


def test_an_archive_of_arrays_is_read(tmp_path):
  wide = np.arange(12.0).reshape(3, 4)
  np.savez(tmp_path / "a.npz", wide=wide, turned=wide.T, one=np.int32(7))
  found = read_npz(tmp_path / "a.npz", 2**20)
  assert set(found) == {"wide", "turned", "one"}
  np.testing.assert_array_equal(found["wide"], wide)
  np.testing.assert_array_equal(found["turned"], wide.T)
  assert found["one"] == 7
