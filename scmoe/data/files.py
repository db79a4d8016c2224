"""Finds input files, reads them line by line, and writes the cache's files."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import gzip
import io
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scmoe.base.errors import DataError
from scmoe.base.paths import check_is_file, expanded, files_below
from scmoe.data.config import HUB, SUFFIXES
from scmoe.data.hub import fetched
from scmoe.data.packages import need
from scmoe.data.sniff import HEAD

log = logging.getLogger("scmoe.data")

MAX_LINE = 10_000_000  # bytes; a longer line almost always means a broken file
_SPLIT_NAME = re.compile(r"^(train|validation|valid|val|dev|test)([-_.].*)?$")
_VALIDATION_NAMES = ("validation", "valid", "val", "dev")


@dataclasses.dataclass(frozen=True)
class InputFile:
  """A file, and the split in its name: 'train', 'validation', or None to split by hash."""

  path: Path
  split: str | None


def find_files(kind: str, path: str) -> list[InputFile]:
  """The files of a source, sorted by path.

  Files or folders named train-*, validation-*, test-* (the layout of Hugging Face datasets) keep
  their split, and test files are left out. Without a train-* file, all names are ignored. Without a
  validation file, documents of the train files are split by their hash.

  Raises:
    DataError: the path does not exist, or no file there matches.
  """
  named = path.startswith(HUB)
  root = fetched(kind, path) if named else expanded(path, "data.path")
  if root.is_file():
    return [InputFile(root, None)]
  if root.is_dir() or named:
    found = sorted(files_below(root, "data.path", SUFFIXES[kind]))
    what = f"a file ending in {', '.join(SUFFIXES[kind])}"
  elif glob.has_magic(path):
    hits = glob.glob(str(root), recursive=True)
    found = sorted(check_is_file(Path(p), "data.path") for p in hits if not os.path.isdir(p))
    what = "a file matching it"
  else:
    why = "is not a regular file" if os.path.lexists(root) else "does not exist"
    raise DataError(f"data.path={path!r} {why}; give a file, a folder or a quoted glob")
  if named and not found:
    raise DataError(
      f"data.path={path!r} has no {kind} file; look at its files on the hub, and name their kind "
      "(data.source=jsonl) or their folder (hf:OWNER/NAME/FOLDER)"
    )
  if not found:
    raise DataError(f"data.path={path!r} has no {kind} file; {what} was expected")
  return _with_splits(root, found)


def _with_splits(root: Path, found: list[Path]) -> list[InputFile]:
  names = [split_name(root, p) for p in found]
  if "train" not in names:
    return [InputFile(p, None) for p in found]
  has_validation = any(n in _VALIDATION_NAMES for n in names)
  files = []
  for path, name in zip(found, names):
    if name == "test":
      continue
    split = "validation" if name in _VALIDATION_NAMES else name
    files.append(InputFile(path, split if has_validation else None))
  return files


def split_name(root: Path, path: Path) -> str | None:
  """The split that the name of a file, or of a folder between it and `root`, says; else None."""
  parts = path.relative_to(root).parts if path.is_relative_to(root) else path.parts[-1:]
  for part in reversed(parts):
    if match := _SPLIT_NAME.match(part):
      return match.group(1)
  return None


class BadRows:
  """Counts unusable rows; raises an error when their number exceeds the limit."""

  def __init__(self, limit: float, *, say: bool = True):
    self.limit, self.say = limit, say
    self.count = 0
    self.first = ""  # place and reason of the first bad row

  @classmethod
  def silent(cls) -> BadRows:
    """A counter without limit or warnings, for a second pass over the same rows."""
    return cls(float("inf"), say=False)

  def skip(self, where: str, why: str) -> None:
    """Counts one bad row; `where` is file:line.

    Raises:
      DataError: more than `limit` rows were bad.
    """
    self.count += 1
    self.first = self.first or f"{where}: {why}"
    if self.count > self.limit:
      raise DataError(
        f"{where}: {why}; this is bad row {self.count} and data.max_bad_rows={self.limit}: "
        "mend the data or raise the limit"
      )
    if self.say and self.count <= 5:  # thousands of warnings would bury the run's header
      log.warning("%s: %s; row skipped (%d so far)", where, why, self.count)


def read_head(path: Path) -> bytes:
  """The first bytes of a file, the input of `scmoe.data.sniff.kind_of`.

  Raises:
    DataError: it cannot be read.
  """
  try:
    with path.open("rb") as file:
      return file.read(HEAD)
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
  """Yields (line number from 1, line without its newline) of a plain, .gz or .zst file.

  A line over `MAX_LINE` bytes is yielded as None and never held in memory as a whole.

  Raises:
    DataError: the file cannot be read or decompressed.
  """
  number = 0
  try:
    with contextlib.closing(_open(path)) as file:
      while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
          while not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
            pass
          yield number, None
        else:
          yield number, line.rstrip(b"\r\n")
  except (OSError, EOFError) as error:
    raise DataError(f"{path}:{number + 1}: cannot be read: {error}") from None
  except Exception as error:  # zlib.error and ZstdError share no base class with OSError
    if type(error).__name__ not in ("error", "ZstdError"):
      raise
    raise DataError(f"{path}:{number + 1}: cannot be decompressed: {error}") from None


def _open(path: Path) -> BinaryIO | Any:
  if path.name.endswith(".gz"):
    return gzip.open(path, "rb")
  if path.name.endswith(".zst"):
    zstandard = need("zstandard", f"reading {path}")
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
  return path.open("rb")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
  """Opens a temporary binary file and renames it to `path` when the block ends without error.

  Raises:
    DataError: the folder cannot be written, or the disk is full.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
  except OSError as error:
    raise _unwritable(path, error) from None
  try:
    with os.fdopen(handle, "wb") as file:
      yield file
    os.replace(temporary, path)
  except BaseException as error:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    if isinstance(error, OSError):  # the disk is full
      raise _unwritable(path, error) from None
    raise


def write_cached(path: Path, content: bytes) -> Path:
  """Writes a cache file with its CRC-32 in the name, by which `read_cached` detects damage.

  Args:
    path: its name without the checksum; `tokens-5f.npy` becomes `tokens-5f.0a1b2c3d.npy`.
    content: the file's bytes.

  Returns:
    the path of the file.

  Raises:
    DataError: it cannot be written.
  """
  place = path.with_name(f"{path.stem}.{zlib.crc32(content):08x}{path.suffix}")
  with atomic_write(place) as file:
    file.write(content)
  return place


def read_cached(path: Path) -> bytes | None:
  """The bytes that `write_cached` wrote under this name; None if the file is missing or damaged.

  A damaged file is deleted, with a warning.
  """
  pattern = f"{glob.escape(path.stem)}.{'[0-9a-f]' * 8}{path.suffix}"
  for place in sorted(path.parent.glob(pattern)):
    with contextlib.suppress(OSError):
      content = place.read_bytes()
      if f".{zlib.crc32(content):08x}{path.suffix}" == place.name[len(path.stem) :]:
        return content
    log.warning("%s is damaged; making it again", place)
    with contextlib.suppress(OSError):
      place.unlink()
  return None


def write_cached_array(path: Path, array: np.ndarray) -> None:
  """Writes an array by `write_cached`, as a .npy file."""
  buffer = io.BytesIO()
  np.save(buffer, array, allow_pickle=False)
  write_cached(path, buffer.getvalue())


def read_cached_array(path: Path) -> np.ndarray | None:
  """The array that `write_cached_array` wrote under this name; None if it is missing or damaged."""
  content = read_cached(path)
  if content is None:
    return None
  try:
    return np.load(io.BytesIO(content), allow_pickle=False)
  except (ValueError, EOFError):
    return None


@contextlib.contextmanager
def host_lock(path: Path, what: str) -> Iterator[None]:
  """Holds a lock that one process of this host has at a time; the others wait.

  If the file system has no locks, or the folder cannot be written, it continues without one.

  Args:
    path: the lock file, which is not deleted.
    what: the thing that the processes make, for the message of one that waits.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
  except OSError:
    yield
    return
  with file:
    with contextlib.suppress(OSError):
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        log.info("waiting for another process that makes %s", what)
        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _unwritable(path: Path, error: OSError) -> DataError:
  return DataError(
    f"data.cache_dir: {str(path.parent)!r} cannot be written ({error}); name a folder that can"
  )
