"""Folders of safetensors, read and written one tensor at a time.

Reading takes a tensor's bytes from the place that the header names, in as many threads as ask for
one: the library's own reader holds Python's lock while the disk works. Writing is by hand too,
since the library wants all tensors of a file at once: a file is eight bytes with the length of a
JSON header, the header, and the bytes of the tensors in its order (the format's specification).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from scmoe.base.errors import DataError, StorageError
from scmoe.pretrained.header import LIMITS, TENSORS, read_header, read_object

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TYPES = {
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
}
# What our own folders also hold (`scmoe.pretrained.inference`); released models are not read so.
WRITTEN = {**TYPES, "I8": np.dtype(np.int8), "I32": np.dtype(np.int32)}
_PIECE = 2**24  # bytes that are read ahead at once
SHARD_BYTES = 5 * 10**9  # of one file, as published models have it


class Entry(NamedTuple):
  """What a header says of a tensor: the file it lies in, its shape, its type, and the byte of the
  file at which it begins."""

  file: Path
  shape: tuple[int, ...]
  dtype: str
  start: int


class Folder:
  """A released model on disk.

  Attributes:
    path: of the folder.
    config: of config.json.
    entries: of every tensor, by name.

  Raises:
    DataError: a file is missing, truncated or not what it should be; one line that names it.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path).expanduser()
    if not self.path.is_dir():
      raise DataError(f"--from={str(path)!r} is not a folder; give one with {CONFIG} and {WEIGHTS}")
    self.config = read_object(self.path / CONFIG, LIMITS[CONFIG])
    self._open: dict[Path, BinaryIO] = {}
    self._asked = threading.Event()  # for a tensor
    self.entries: dict[str, Entry] = {}
    index = self._index()
    files = sorted(set(index.values())) if index else [self._only()]
    for name in files:
      self._read_header(self.path / name)
    for name, file in index.items():
      entry = self.entries.get(name)
      if entry is None or entry.file.name != file:
        raise DataError(
          f"{self.path / INDEX} says that {name} is in {file}, which does not hold it"
        )
    if index and (extra := sorted(set(self.entries) - set(index))):
      file = self.entries[extra[0]].file
      raise DataError(f"{file} holds {extra[0]}, which {self.path / INDEX} does not name")

  def read_ahead(self) -> None:
    """Has the files read into the system's page cache until the first tensor is asked for.

    A disk then works while devices are started and a model is built.
    """
    threading.Thread(target=self._read_ahead, name="ahead", daemon=True).start()

  def _read_ahead(self) -> None:
    piece = bytearray(_PIECE)
    for file in self._open.values():
      place = 0
      while not self._asked.is_set():
        try:
          count = os.preadv(file.fileno(), [piece], place)
        except OSError:  # whoever asks for a tensor of it is told
          return
        if not count:
          break
        place += count

  def read(self, name: str) -> np.ndarray:
    """One tensor; may be called by several threads at once.

    Raises:
      DataError: its file cannot be read.
    """
    self._asked.set()
    entry = self.entries[name]
    found = np.empty(entry.shape, TYPES[entry.dtype])
    try:
      read_into(found, self._open[entry.file], entry.start)
    except OSError as error:
      raise DataError(f"{entry.file}: {name} cannot be read: {error}") from None
    return found

  @property
  def size(self) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(e.shape) * TYPES[e.dtype].itemsize for e in self.entries.values())

  def _index(self) -> dict[str, str]:
    """File of every tensor; {} for a folder of one file."""
    path = self.path / INDEX
    if not path.is_file():
      return {}
    found = read_object(path, LIMITS["index"]).get("weight_map")
    if not isinstance(found, dict) or not found:
      raise DataError(f"{path} has no weight_map from tensors to files")
    if len(found) > TENSORS:
      raise DataError(f"{path} names {len(found)} tensors; at most {TENSORS} are read")
    for name, file in found.items():
      if not isinstance(file, str) or Path(file).name != file:
        raise DataError(f"{path}: {name} is in {file!r}, which is no name of a file beside it")
      if not (self.path / file).is_file():
        raise DataError(f"{path} names {file} for {name}, and {self.path} has no such file")
    return found

  def _only(self) -> str:
    files = sorted(p.name for p in self.path.glob("*.safetensors"))
    if WEIGHTS in files:
      return WEIGHTS
    if len(files) == 1:
      return files[0]
    found = f"{len(files)} files without {INDEX}" if files else "no file"
    raise DataError(f"{self.path} has no {WEIGHTS} ({found}); give all files of the model")

  def _read_header(self, file: Path) -> None:
    for name, described in read_header(file).items():
      if name in self.entries:
        raise DataError(f"{file} and {self.entries[name].file} both hold {name}")
      self.entries[name] = Entry(file, *described)
    try:
      self._open[file] = file.open("rb", buffering=0)
    except OSError as error:
      raise DataError(f"{file} is damaged or incomplete: {error}") from None


def read_into(found: np.ndarray, file: BinaryIO, start: int) -> None:
  """Fills a contiguous array from byte `start` of an open file; any number of threads may.

  Raises:
    OSError: it cannot be read, or ends before the array does.
  """
  left: Any = memoryview(found.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
  while left:
    count = os.preadv(file.fileno(), [left], start)
    if not count:
      raise OSError("it is truncated")
    left, start = left[count:], start + count


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object of a model's folder.

  Raises:
    DataError: it is missing, too large, or is none.
  """
  return read_object(path, LIMITS["index"])


# -- writing --------------------------------------------------------------------------------------


class Planned(NamedTuple):
  """A tensor to be written: its name, its shape and its type as a header spells it."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def size(self) -> int:
    """In bytes."""
    return math.prod(self.shape) * WRITTEN[self.dtype].itemsize


def write_weights(folder: Path, planned: list[Planned], values: Iterable[np.ndarray]) -> list[str]:
  """Writes tensors as they come, in files of at most `SHARD_BYTES`, and the index of several.

  Args:
    folder: exists.
    planned: all tensors, in order.
    values: their values, in the same order.

  Returns:
    names of the files.
  """
  parts: list[list[Planned]] = [[]]
  for tensor in planned:
    if parts[-1] and sum(t.size for t in parts[-1]) + tensor.size > SHARD_BYTES:
      parts.append([])
    parts[-1].append(tensor)
  count, stream, weight_map, names = len(parts), iter(values), {}, []
  for i, part in enumerate(parts):
    name = WEIGHTS if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
    with (folder / name).open("wb") as file:
      file.write(_header(part))
      for tensor in part:
        value = next(stream)
        assert (value.shape, value.dtype) == (tensor.shape, WRITTEN[tensor.dtype]), tensor
        file.write(np.ascontiguousarray(value).view(np.uint8).data)
        weight_map[tensor.name] = name
    names.append(name)
  if count > 1:
    index = {"metadata": {"total_size": sum(t.size for t in planned)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
  return names


def _header(part: list[Planned]) -> bytes:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  start = 0
  for tensor in part:
    offsets = [start, start := start + tensor.size]
    header[tensor.name] = {
      "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets
    }  # fmt: skip
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def appearing(folder: Path, flag: str = "to") -> Iterator[Path]:
  """A folder to write into, which gets its name when all is done and is gone if anything fails.

  Args:
    folder: new, or empty.
    flag: by which it was given.

  Raises:
    StorageError: there is one already, or it cannot be written.
  """
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise StorageError(f"--{flag}={str(folder)!r} is there already; give a new folder")
  partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
  try:
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
      folder.rmdir()
    partial.rename(folder)
  except OSError as error:
    raise StorageError(f"--{flag}={str(folder)!r} cannot be written: {error}") from None
  finally:
    shutil.rmtree(partial, ignore_errors=True)
