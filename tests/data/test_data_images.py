"""Images from Parquet, folders and drawings: their order, their division, and what is refused."""

import io
import json
import sys
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scmoe.base.errors import ConfigError, DataError
from scmoe.data.config import DataConfig
from scmoe.data.images import made
from scmoe.data.images.pipeline import open_images

NAMES = ["cat", "dog"]


def encoded(value, kind="PNG", size=(4, 4)):
  out = io.BytesIO()
  Image.new("RGB", size, (value, value, value)).save(out, kind)
  return out.getvalue()


def write_table(path, values, labels, *, names=None):
  rows = [{"bytes": encoded(v), "path": f"{v}.png"} for v in values]
  table = pa.table({"img": rows, "label": pa.array(labels, pa.int64())})
  if names:
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    meta = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = table.replace_schema_metadata(meta)
  pq.write_table(table, path)


@pytest.fixture
def folder(tmp_path):
  """Parquet as Hugging Face stores it: pixel value = number of the image."""
  write_table(tmp_path / "train-00000.parquet", range(10), [v % 2 for v in range(10)], names=NAMES)
  write_table(tmp_path / "test-00000.parquet", range(100, 103), [0, 1, 0], names=NAMES)
  return tmp_path


def opened(path, batch_size=4, **options):
  cfg = DataConfig(source="images", path=str(path), cache_dir=str(path / "cache"))
  given: dict[str, Any] = {"size": 4, "channels": 3, "classes": 2, "seed": 0} | options
  return open_images(cfg, batch_size=batch_size, **given)


def values(batch):
  return batch.images[:, 0, 0, 0].tolist()


def test_parquet_in_the_layout_of_hugging_face(folder):
  for data in (opened(folder), opened(folder)):  # the second reads what the first has decoded
    assert data.images.names == tuple(NAMES)
    assert sorted(data.images.train.images[:, 0, 0, 0]) == list(range(10))
    assert data.images.train.labels.tolist() == [v % 2 for v in range(10)]
    held = list(data.validation())
    assert sorted(v for b in held for v, w in zip(values(b), b.weights) if w) == [100, 101, 102]
    assert sum(b.weights.sum() for b in held) == 3


def test_class_folders(tmp_path):
  for split, name, value in (("train", "a", 1), ("train", "b", 2), ("val", "b", 3)):
    place = tmp_path / split / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "x.png").write_bytes(encoded(value, size=(9, 5)))
    (place / "notes.txt").write_text("no image")
  data = opened(tmp_path, batch_size=2)
  assert data.images.names == ("a", "b")
  assert data.images.train.labels.tolist() == [0, 1]
  assert data.images.validation.images[0, 0, 0, 0] == 3
  assert data.images.train.images.shape == (2, 4, 4, 3)


def test_a_test_split_beside_a_validation_split_is_not_trained_on(tmp_path):
  for split, value in (("train", 1), ("validation", 2), ("test", 3)):
    place = tmp_path / split / "a"
    place.mkdir(parents=True)
    (place / "x.png").write_bytes(encoded(value))
  data = opened(tmp_path, batch_size=1)
  assert data.images.train.images[:, 0, 0, 0].tolist() == [1]
  assert data.images.validation.images[:, 0, 0, 0].tolist() == [2]


def test_every_epoch_has_every_image_once_and_a_position_is_found_again(folder):
  data = opened(folder, batch_size=5, partners=True)
  batches = data.train()
  first = [next(batches) for _ in range(2)]
  assert sorted(values(first[0]) + values(first[1])) == list(range(10))
  assert [b.draws[:, 0].tolist() for b in first] == [[0] * 5] * 2
  position = json.loads(json.dumps(batches.state()))
  later = next(batches)
  again = data.train()
  again.restore(position)
  for a, b in zip(vars(later).values(), vars(next(again)).values()):
    np.testing.assert_array_equal(a, b)
  assert (later.draws[:, 0] == 1).all()
  with pytest.raises(DataError, match="next_index"):
    again.restore({"next_index": -1})


def test_batches_cross_epochs_and_processes_share_them(folder):
  whole = opened(folder, batch_size=4, partners=True).train()
  parts = [
    opened(folder, batch_size=4, partners=True, process_index=i, process_count=2).train()
    for i in range(2)
  ]
  for _ in range(6):
    want, own = next(whole), [next(part) for part in parts]
    for name, x in vars(want).items():
      np.testing.assert_array_equal(x, np.concatenate([getattr(b, name) for b in own]))


def test_without_names_the_content_divides(tmp_path):
  write_table(tmp_path / "all.parquet", range(100), [0] * 100)
  cfg = DataConfig(source="images", path=str(tmp_path / "all.parquet"), validation_fraction=0.2,
                   cache_dir=str(tmp_path / "cache"))  # fmt: skip
  data = open_images(cfg, size=4, channels=1, classes=2, batch_size=4, seed=0)
  assert 5 < len(data.images.validation) < 40
  assert len(data.images.train) + len(data.images.validation) == 100


def test_what_cannot_be_used_is_one_line(folder, tmp_path):
  with pytest.raises(DataError, match=r"model\.vision\.classes"):
    opened(folder, classes=1)
  with pytest.raises(DataError, match="10 training images"):
    opened(folder, batch_size=12)
  cfg = DataConfig(source="images", path=str(folder), image_field="picture")
  with pytest.raises(DataError, match=r"data\.image_field"):
    open_images(cfg, size=4, channels=3, classes=2, batch_size=4, seed=0)
  with pytest.raises(DataError, match="does not exist"):
    opened(tmp_path / "nowhere")
  with pytest.raises(ConfigError, match="needs a file or folder"):
    DataConfig(source="images").check()


def test_damaged_images_are_left_out_up_to_a_limit(tmp_path):
  rows = [{"bytes": b"no image" if v == 3 else encoded(v), "path": ""} for v in range(8)]
  pq.write_table(pa.table({"image": rows, "label": [0] * 8}), tmp_path / "train.parquet")
  assert opened(tmp_path).images.bad == 1
  cfg = DataConfig(source="images", path=str(tmp_path), max_bad_rows=0)
  with pytest.raises(DataError, match="bad row 1"):
    open_images(cfg, size=5, channels=3, classes=2, batch_size=2, seed=0)


def test_shapes_are_the_same_everywhere():
  cfg = DataConfig(source="shapes")
  data = open_images(cfg, size=16, channels=3, classes=10, batch_size=4, seed=0)
  counts = np.bincount(data.images.train.labels)
  assert len(counts) == 10
  assert counts.min() > 1700
  assert data.fingerprint()["digest"] == "3a5758240f049a552d179516137eb52f"


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "sklearn", None)  # an import now raises ImportError
  with pytest.raises(ConfigError, match="needs the package 'scikit-learn': pip install scikit-"):
    made.digits(8, 1, 0.1)


def digits_of(images, target):
  """A package as far as the source reads it: the arrays of scikit-learn's `load_digits`."""
  found = types.SimpleNamespace(images=np.asarray(images, float), target=np.asarray(target))
  return types.SimpleNamespace(load_digits=lambda: found)


def test_digits_are_scaled_enlarged_and_divided(monkeypatch):
  """Greys of 0 to 16 become bytes, pixels become squares, and the last images are held out."""
  grey = np.random.default_rng(0).integers(0, 17, (20, 8, 8))
  grey[:, 0, 0], grey[:, 7, 7] = 0, 16
  target = np.arange(20) % 10
  monkeypatch.setitem(sys.modules, "sklearn", types.SimpleNamespace())
  monkeypatch.setitem(sys.modules, "sklearn.datasets", digits_of(grey, target))
  found = made.digits(16, 3, 0.25)
  assert (len(found.train), len(found.validation)) == (15, 5)
  assert found.names == tuple("0123456789")
  images = np.concatenate([found.train.images, found.validation.images])
  assert (images.dtype, images.shape) == (np.uint8, (20, 16, 16, 3))
  for y, x in ((0, 0), (0, 1), (1, 0), (1, 1)):  # each pixel is a square of 2 x 2
    for channel in range(3):
      np.testing.assert_array_equal(images[:, y::2, x::2, channel], grey * 255 // 16)
  assert (images[:, 0, 0] == 0).all()
  assert (images[:, 15, 15] == 255).all()
  np.testing.assert_array_equal(found.train.labels, target[:15])
  np.testing.assert_array_equal(found.validation.labels, target[15:])
  assert found.train.labels.dtype == np.int32
  assert made.digits(8, 1, 0.25).digest != found.digest
  assert made.digits(16, 3, 0.25).digest == found.digest


def test_digits_are_read_by_their_name(monkeypatch):
  """Batches of data.source=digits hold the package's images, each with its label."""
  grey = np.repeat(np.arange(12), 64).reshape(12, 8, 8)
  monkeypatch.setitem(sys.modules, "sklearn", types.SimpleNamespace())
  monkeypatch.setitem(sys.modules, "sklearn.datasets", digits_of(grey, np.arange(12) % 10))
  cfg = DataConfig(source="digits", validation_fraction=0.25)
  data = open_images(cfg, size=8, channels=1, classes=10, batch_size=3, seed=0)
  batch = next(data.train())
  value = np.asarray(batch.images)[:, 0, 0, 0].astype(int)
  number = (value * 16 + 254) // 255
  assert set(number) <= set(range(9)), "an image that is held out is trained on"
  np.testing.assert_array_equal(number % 10, batch.labels)
  assert data.fingerprint()["digest"] == data.images.digest
