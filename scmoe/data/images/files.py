"""Encoded images of Parquet files (Hugging Face layout) and of folders of class folders.

Pillow decodes them, once: the pixels are kept in the cache folder. All images of a source are held
in the host's memory, size x size x channels bytes each: 184 MB for the 60,000 of CIFAR-10.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scmoe.base.errors import DataError
from scmoe.base.paths import expanded
from scmoe.base.stored import StoredError, parse_json
from scmoe.data.config import DataConfig
from scmoe.data.corpus import hash_share, split_threshold
from scmoe.data.files import BadRows, read_cached_array, split_name, write_cached_array
from scmoe.data.images.labelled import Images, Labelled
from scmoe.data.packages import need

log = logging.getLogger("scmoe.data")

# Formats that Pillow decodes by itself, by file name. For others, such as EPS, it calls further
# programs.
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF",
           ".webp": "WEBP", ".tif": "TIFF", ".tiff": "TIFF", ".ppm": "PPM"}  # fmt: skip
IMAGE_COLUMNS = ("image", "img")  # of a Parquet file, where data.image_field names no column
VALIDATION = ("validation", "valid", "val", "dev")  # names that a validation split may have


class Encoded(NamedTuple):
  """One encoded image with its label and its split.

  Attributes:
    where: file and row, for messages.
    content: the bytes of a PNG, JPEG, ...
    label: number of its class.
    split: train, validation, valid, val, dev or test, as a file's or folder's name says; or None.
  """

  where: str
  content: bytes
  label: int
  split: str | None


def from_files(cfg: DataConfig, size: int, channels: int) -> Images:
  """The images of `data.path`, decoded and divided into training and validation.

  If names of files or folders say train, images whose names say validation (or valid, val, dev) are
  for validation, and those whose names say test are left out; if none says validation, those whose
  names say test are for validation. All others are for training. If no name says train, or none of
  the others is there, the hash of each image's content divides them, by
  `data.validation_fraction`.

  Args:
    cfg: the `data` section.
    size, channels: of an image as the model reads it; others are cut to a square and resized.

  Raises:
    DataError: nothing is there or can be read, a column is missing or of another type, or more than
      `data.max_bad_rows` images cannot be decoded.
    ConfigError: Pillow is not installed.
  """
  need("PIL.Image", "decoding images")
  root = expanded(cfg.path, "data.path")
  if not root.exists():
    raise DataError(f"data.path={cfg.path!r} does not exist; give a Parquet file or a folder")
  tables = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
  names, encoded = _of_tables(tables, root, cfg) if tables else _of_folders(root, cfg.path)
  splits = {image.split for image in encoded}
  if "train" in splits and splits & set(VALIDATION):
    encoded = [image for image in encoded if image.split != "test"]
  digest = hashlib.blake2b(f"{size} {channels}".encode(), digest_size=16)
  for image in encoded:
    digest.update(hashlib.blake2b(image.content, digest_size=16).digest())
    digest.update(f"{image.label} {image.split}".encode())
  images, good = _decoded(encoded, size, channels, cfg, digest.hexdigest())
  labels = np.array([image.label for image in encoded], np.int32)
  held = _held_out(encoded, cfg.validation_fraction)
  digest.update(held.tobytes())
  every, bad = Labelled(images, labels), int((~good).sum())
  return Images(every[good & ~held], every[good & held], names, digest.hexdigest(), bad)


def _of_tables(
  tables: list[Path], root: Path, cfg: DataConfig
) -> tuple[tuple[str, ...], list[Encoded]]:
  """Names of the classes, and the images of Parquet files.

  The first file that names the classes counts; if none does, the names are the numbers.

  Raises:
    DataError: a file cannot be read, or a column is missing or of another type.
  """
  names: tuple[str, ...] = ()
  found: list[Encoded] = []
  for path in tables:
    try:
      table = need("pyarrow.parquet", f"reading {path}").read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
      raise DataError(f"{path}: cannot be read as Parquet: {error}") from None
    field = cfg.image_field or next((c for c in IMAGE_COLUMNS if c in table.column_names), "")
    for option, name in (("image_field", field), ("label_field", cfg.label_field)):
      if name not in table.column_names:
        raise DataError(
          f"{path} has no column {name or ' or '.join(IMAGE_COLUMNS)!r}; set data.{option} to one "
          f"of: {', '.join(table.column_names)}"
        )
    names = names or _class_names(table.schema.metadata, cfg.label_field)
    split = split_name(root, path)
    rows = zip(table[field].to_pylist(), table[cfg.label_field].to_pylist())
    for number, (image, label) in enumerate(rows):
      where = f"{path}:{number + 1}"
      content = image.get("bytes") if isinstance(image, dict) else image
      if not isinstance(content, bytes) or type(label) is not int:
        raise DataError(
          f"{where}: column {field!r} has {type(content).__name__} and {cfg.label_field!r} has "
          f"{type(label).__name__}; bytes of an image and a whole number are needed"
        )
      found.append(Encoded(where, content, label, split))
  count = max((image.label for image in found), default=-1) + 1
  return names or tuple(map(str, range(count))), found


def _class_names(metadata: Any, field: str) -> tuple[str, ...]:
  """Names of the classes from a Parquet file's metadata; () if `datasets` wrote none there.

  Args:
    metadata: of the file's schema, or None.
    field: the column of the labels.
  """
  try:
    content = parse_json((metadata or {})[b"huggingface"], "the file's metadata")
    names = content["info"]["features"][field]["names"]
  except (KeyError, TypeError, StoredError):
    return ()
  return tuple(map(str, names)) if isinstance(names, list) else ()


def _of_folders(root: Path, shown: str) -> tuple[tuple[str, ...], list[Encoded]]:
  """Names of the classes, sorted, and the images of folders CLASS/ or SPLIT/CLASS/.

  A warning says how many files are no images in a class folder.

  Raises:
    DataError: there is no image, or one cannot be read.
  """
  files = sorted(p for p in root.rglob("*") if p.is_file())
  readable = [
    p for p in files if p.suffix.lower() in FORMATS and len(p.relative_to(root).parts) > 1
  ]
  if left := len(files) - len(readable):
    log.warning("data.path=%r: %d files are no images in a class folder that can be read (%s); "
                "left out", shown, left, " ".join(FORMATS))  # fmt: skip
  if not readable:
    raise DataError(
      f"data.path={shown!r} has no Parquet file and no folder CLASS/ with images "
      f"({' '.join(FORMATS)}); give one of both"
    )
  names = tuple(sorted({p.parent.name for p in readable}))
  number = {name: i for i, name in enumerate(names)}
  found = []
  for path in readable:
    try:
      content = path.read_bytes()
    except OSError as error:
      raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    split = split_name(root, path.parent.parent / "x") if path.parent.parent != root else None
    found.append(Encoded(str(path), content, number[path.parent.name], split))
  return names, found


def _held_out(encoded: list[Encoded], fraction: float) -> np.ndarray:
  """bool [N], True for images that are for validation; see `from_files` for the rule."""
  splits = {image.split for image in encoded}
  if "train" in splits:
    named = [s for s in splits if s in VALIDATION] or [s for s in splits if s == "test"]
    if named:
      return np.array([image.split in named for image in encoded])
  shares = np.array([hash_share(image.content) for image in encoded])
  return shares < split_threshold(shares, fraction, named=False)


def _decoded(
  encoded: list[Encoded], size: int, channels: int, cfg: DataConfig, name: str
) -> tuple[np.ndarray, np.ndarray]:
  """All images, uint8 [N, S, S, C], 0 where not decodable, and whether each was decoded, bool [N].

  Both are read from the cache folder if they are there, else made and written there.

  Args:
    encoded: the N images.
    size, channels: S and C.
    cfg: the `data` section.
    name: a digest of the images, S and C, for the names of the cached files.

  Raises:
    DataError: more than `data.max_bad_rows` images cannot be decoded.
  """
  path, good_path = (cfg.cache_folder() / f"{kind}-{name}.npy" for kind in ("images", "decoded"))
  images, good = read_cached_array(path), read_cached_array(good_path)
  if images is not None and good is not None:
    return images, good
  bad, parts, good = BadRows(cfg.max_bad_rows), [], np.ones(len(encoded), bool)
  with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    made = pool.map(lambda image: _pixels(image.content, size, channels), encoded)
    for i, found in enumerate(made):
      if isinstance(found, str):
        bad.skip(encoded[i].where, found)
        good[i] = False
      parts.append(np.zeros((size, size, channels), np.uint8) if isinstance(found, str) else found)
  images = np.stack(parts)
  write_cached_array(path, images)
  write_cached_array(good_path, good)
  return images, good


def _pixels(content: bytes, size: int, channels: int) -> np.ndarray | str:
  """The image decoded, cut to a square and resized, uint8 [S, S, C]; or why it is not decodable."""
  from PIL import Image, ImageOps

  try:
    with Image.open(io.BytesIO(content), formats=sorted(set(FORMATS.values()))) as image:
      image = image.convert("RGB" if channels == 3 else "L")
      if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
      return np.asarray(image, np.uint8).reshape(size, size, channels)
  except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
    return f"not decodable: {error}"
