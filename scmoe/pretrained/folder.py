"""Reads and writes folders of safetensors one tensor at a time.

This module has its own reader and writer, because the reader of the safetensors library holds
Python's global lock while the disk works, and its writer needs all tensors of a file at once. By
the format's specification a file is eight bytes with the length of a JSON header, the header, and
the bytes of the tensors in its order. The header gives each tensor's offset, so any number of
threads may read at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from scmoe.base.errors import DataError, StorageError
from scmoe.base.paths import expanded
from scmoe.pretrained import mxfp4, quantised
from scmoe.pretrained.header import LIMITS, TENSORS, read_header, read_object

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TYPES = {
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
}
# Types in scmoe's own inference folders (`scmoe.pretrained.inference`). Released models in int8 are
# refused, because no code here reads their scales.
WRITTEN = {**TYPES, "I8": np.dtype(np.int8), "I32": np.dtype(np.int32)}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_REWRITE = "only safetensors are read; save_pretrained(FOLDER) of transformers writes them"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PIECE = 2**24  # bytes that the thread of `read_ahead` reads at a time
SHARD_BYTES = 5 * 10**9  # limit on the size of a file, as in published models


class Entry(NamedTuple):
  """A tensor as the header of its file describes it.

  Attributes:
    file: the file that holds the tensor.
    shape: the tensor's shape.
    dtype: its type, in the format's spelling, e.g. "BF16".
    start: offset of its first byte from the beginning of the file.
  """

  file: Path
  shape: tuple[int, ...]
  dtype: str
  start: int


class Folder:
  """A released model on disk.

  Attributes:
    path: the folder.
    config: the parsed config.json.
    entries: every tensor of the model, by name, with the shape and type that `read` returns. A
      matrix in fp8 or MXFP4 is described as bfloat16, and its scales are not listed. One in MXFP4
      has the name of its tensor of blocks without `_blocks`.

  Raises:
    DataError: a file is missing, truncated or malformed, or a matrix in fp8 or MXFP4 lacks fitting
      scales; one line names it.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = expanded(os.fspath(path), "--from")
    if not self.path.is_dir():
      name = os.fspath(path)
      hint = (
        f" (hf download {name} --local-dir DIR fetches one)" if _HUB_NAME.fullmatch(name) else ""
      )
      raise DataError(
        f"--from={name!r} is not a folder; give one with {CONFIG} and {WEIGHTS}{hint}"
      )
    self.config = read_object(self.path / CONFIG, LIMITS[CONFIG])
    self._open: dict[Path, BinaryIO] = {}
    self._asked = threading.Event()  # set by the first `read`
    self._blocks = quantised.blocks_of(self.config, str(self.path / CONFIG))
    self._stored = self._indexed(self._index())
    self.entries = self._described()

  def _described(self) -> dict[str, Entry]:
    """The tensors as `read` returns them."""
    packed = [name for name, entry in self._stored.items() if entry.dtype == quantised.FP8]
    for name in packed:
      quantised.check_scales(name, self._stored, self._blocks)
    scales = {name + quantised.SCALES for name in packed}
    wide = {name: self._stored[name]._replace(dtype=quantised.READ_AS) for name in packed}
    for name, shape in mxfp4.packed(self._stored).items():
      parts = name + mxfp4.BLOCKS, name + mxfp4.SCALES
      wide[name] = self._stored[parts[0]]._replace(shape=shape, dtype=quantised.READ_AS)
      scales |= set(parts)
    return {name: e for name, e in (self._stored | wide).items() if name not in scales}

  def _indexed(self, index: Mapping[str, str]) -> dict[str, Entry]:
    """The tensors of the folder by name.

    If there is an index, only the tensors that it names are read, each from the file that it names.
    """
    if not index:
      return self._read_header(self.path / self._only())
    held = {file: self._read_header(self.path / file) for file in sorted(set(index.values()))}
    for name, file in index.items():
      if name not in held[file]:
        raise DataError(
          f"{self.path / INDEX} says that {name} is in {file}, which does not have it"
        )
    return {name: held[file][name] for name, file in index.items()}

  def read_ahead(self) -> None:
    """Starts a thread that reads the files into the system's page cache.

    So the disk works while JAX starts its devices and the model is built. The thread ends at the
    first `read`.
    """
    threading.Thread(target=self._read_ahead, name="ahead", daemon=True).start()

  def _read_ahead(self) -> None:
    piece = bytearray(_PIECE)
    for file in self._open.values():
      place = 0
      while not self._asked.is_set():
        try:
          count = os.preadv(file.fileno(), [piece], place)
        except OSError:  # `read` will raise the error when it needs a tensor of this file
          return
        if not count:
          break
        place += count

  def read(self, name: str) -> np.ndarray:
    """Reads one tensor; several threads may call it at once.

    Returns:
      an array of the type that `entries` states; a matrix in fp8 or MXFP4 is multiplied by its
      scales.

    Raises:
      DataError: its file cannot be read.
    """
    self._asked.set()
    entry = self._stored.get(name)
    if entry is None:
      parts = (self._bytes(name + end, np.dtype(np.uint8)) for end in (mxfp4.BLOCKS, mxfp4.SCALES))
      return mxfp4.dequantised(*parts)
    if entry.dtype != quantised.FP8:
      return self._bytes(name, TYPES[entry.dtype])
    assert self._blocks is not None, "checked when the folder was opened"
    scales = name + quantised.SCALES
    kind = quantised.SCALE_TYPES[self._stored[scales].dtype]
    values = self._bytes(name, quantised.ELEMENT), self._bytes(scales, kind)
    return quantised.dequantised(*values, self._blocks)

  def _bytes(self, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor as its file holds it."""
    entry = self._stored[name]
    found = np.empty(entry.shape, dtype)
    try:
      read_into(found, self._open[entry.file], entry.start)
    except OSError as error:
      raise DataError(f"{entry.file}: {name} cannot be read: {error}") from None
    return found

  @property
  def size(self) -> int:
    """Total bytes of all tensors, as `read` returns them."""
    return sum(math.prod(e.shape) * TYPES[e.dtype].itemsize for e in self.entries.values())

  def _index(self) -> dict[str, str]:
    """The file of every tensor, by name; {} for a folder without an index.

    Raises:
      DataError: the index is malformed, or names a file that is not in the folder.
    """
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
        raise DataError(f"{path}: {name} is in {file!r}, which is not the name of a file beside it")
      if not file.endswith(".safetensors"):
        raise DataError(f"{path}: {name} is in {file!r}, not a .safetensors file; {_REWRITE}")
      if not (self.path / file).is_file():
        raise DataError(f"{path} names {file} for {name}, and {self.path} has no such file")
    return found

  def _only(self) -> str:
    files = sorted(p.name for p in self.path.glob("*.safetensors"))
    if WEIGHTS in files:
      return WEIGHTS
    if len(files) == 1:
      return files[0]
    others = sorted(p.name for p in self.path.iterdir() if p.suffix in _OTHER_FORMATS)
    if others and not files:
      raise DataError(f"{self.path} has {others[0]} and no .safetensors file; {_REWRITE}")
    found = f"{len(files)} files without {INDEX}" if files else "no file"
    raise DataError(f"{self.path} has no {WEIGHTS} ({found}); give all files of the model")

  def _read_header(self, file: Path) -> dict[str, Entry]:
    """The tensors of one file. Keeps the file open for `read`."""
    found = {name: Entry(file, *described) for name, described in read_header(file).items()}
    try:
      self._open[file] = file.open("rb", buffering=0)
    except OSError as error:
      raise DataError(f"{file} is damaged or incomplete: {error}") from None
    return found


def read_into(found: np.ndarray, file: BinaryIO, start: int) -> None:
  """Fills a contiguous array from byte `start` of an open file; several threads may do so at once.

  Raises:
    OSError: the file cannot be read, or ends before the array is full.
  """
  left: Any = memoryview(found.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
  while left:
    count = os.preadv(file.fileno(), [left], start)
    if not count:
      raise OSError("it is truncated")
    left, start = left[count:], start + count


# -- writing --------------------------------------------------------------------------------------


class Planned(NamedTuple):
  """A tensor to be written; `dtype` is in the format's spelling, e.g. "BF16"."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def size(self) -> int:
    """Bytes of the tensor."""
    return math.prod(self.shape) * WRITTEN[self.dtype].itemsize


def write_weights(folder: Path, planned: list[Planned], values: Iterable[np.ndarray]) -> list[str]:
  """Writes tensors to files of at most `SHARD_BYTES`, and an index if there are several files.

  It takes one value at a time, so an iterator need not hold all of them in memory.

  Args:
    folder: an existing folder.
    planned: all tensors, in order.
    values: their values, in the same order.

  Returns:
    the names of the files.

  Raises:
    OSError: a file cannot be written.
  """
  parts: list[list[Planned]] = [[]]
  for tensor in planned:
    if parts[-1] and sum(t.size for t in parts[-1]) + tensor.size > SHARD_BYTES:
      parts.append([])
    parts[-1].append(tensor)
  count, stream, weight_map, names = len(parts), iter(values), {}, []
  for i, part in enumerate(parts):
    name = WEIGHTS if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
    write_file(folder / name, part, stream)
    weight_map |= dict.fromkeys((tensor.name for tensor in part), name)
    names.append(name)
  if count > 1:
    index = {"metadata": {"total_size": sum(t.size for t in planned)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
  return names


def write_file(path: Path, planned: list[Planned], values: Iterator[np.ndarray]) -> None:
  """Writes tensors to one file; it takes as many values as there are tensors, one at a time.

  Raises:
    OSError: the file cannot be written.
  """
  with path.open("wb") as file:
    file.write(_header(planned))
    for tensor in planned:
      value = next(values)
      assert (value.shape, value.dtype) == (tensor.shape, WRITTEN[tensor.dtype]), tensor
      file.write(np.ascontiguousarray(value).view(np.uint8).data)


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
def atomic_folder(folder: Path, flag: str = "to") -> Iterator[Path]:
  """Yields a temporary folder to write into, and renames it to `folder` when the block ends.

  If the block fails, the temporary folder is deleted.

  Args:
    folder: a path that does not exist, or an empty folder.
    flag: the command's option that gave the path, for messages.

  Raises:
    StorageError: the folder has files already, or cannot be written.
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
    raise StorageError(
      f"--{flag}={str(folder)!r} cannot be written: {error.strerror or error}"
    ) from None
  finally:
    shutil.rmtree(partial, ignore_errors=True)
