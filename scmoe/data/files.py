"""Finding input files and reading them line by line, compressed or not."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import gzip
import io
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scmoe.base.errors import DataError
from scmoe.data.config import HUB, SUFFIXES
from scmoe.data.hub import fetched
from scmoe.data.packages import need

log = logging.getLogger("scmoe.data")

MAX_LINE = 10_000_000  # bytes; a longer line is almost always a broken file, and costs memory
_SPLIT_NAME = re.compile(r"^(train|validation|valid|val|dev|test)([-_.].*)?$")
_VALIDATION_NAMES = ("validation", "valid", "val", "dev")


@dataclasses.dataclass(frozen=True)
class InputFile:
  """A file and the split that its name gives it: 'train', 'validation' or None (decide by hash)."""

  path: Path
  split: str | None


def find_files(kind: str, path: str) -> list[InputFile]:
  """Files of a source in a fixed order (sorted by path).

  Files or folders named train-*, validation-*, test-* (the layout of Hugging Face datasets) keep
  their split and tests are left out; without a train-* file the names mean nothing.

  Raises:
    DataError: nothing there, or nothing that matches.
  """
  named = path.startswith(HUB)
  root = fetched(kind, path) if named else Path(path).expanduser()
  if root.is_file():
    return [InputFile(root, None)]
  if root.is_dir() or named:
    found = sorted(p for p in root.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES[kind]))
    what = f"a file ending in {', '.join(SUFFIXES[kind])}"
  elif glob.has_magic(path):
    hits = glob.glob(str(root), recursive=True)
    found, what = sorted(Path(p) for p in hits if os.path.isfile(p)), "a file matching it"
  else:
    raise DataError(f"data.path={path!r} does not exist; give a file, a folder or a quoted glob")
  if named and not found:
    raise DataError(
      f"data.path={path!r} has no {kind} file; look at its files on the hub, and name their kind "
      "(data.source=jsonl) or their folder (hf:OWNER/NAME/FOLDER)"
    )
  if not found:
    raise DataError(f"data.path={path!r} has no {kind} file; {what} was expected")
  return _with_splits(root, found)


def _with_splits(root: Path, found: list[Path]) -> list[InputFile]:
  names = [_split_name(root, p) for p in found]
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


def _split_name(root: Path, path: Path) -> str | None:
  parts = path.relative_to(root).parts if path.is_relative_to(root) else path.parts[-1:]
  for part in reversed(parts):
    if match := _SPLIT_NAME.match(part):
      return match.group(1)
  return None


class BadRows:
  """Counts rows that cannot be used, and gives up at the first one over the limit."""

  def __init__(self, limit: float, *, say: bool = True):
    self.limit, self.say = limit, say
    self.count = 0

  @classmethod
  def silent(cls) -> BadRows:
    """For a second reading: all of them were counted and said before."""
    return cls(float("inf"), say=False)

  def skip(self, where: str, why: str) -> None:
    """Notes one bad row; `where` is file:line.

    Raises:
      DataError: more than `limit` rows were bad.
    """
    self.count += 1
    if self.count > self.limit:
      raise DataError(
        f"{where}: {why}; this is bad row {self.count} and data.max_bad_rows={self.limit}: "
        "mend the data or raise the limit"
      )
    if (
      self.say and self.count <= 5
    ):  # a few say what is wrong; thousands of lines would bury the run's header
      log.warning("%s: %s; row skipped (%d so far)", where, why, self.count)


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
  """(line number from 1, line without its newline) of a .jsonl, .gz or .zst file.

  A line over `MAX_LINE` bytes comes as None and is never held in memory as a whole.

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
  """A binary file that appears under `path` only when it is complete.

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


def _unwritable(path: Path, error: OSError) -> DataError:
  return DataError(
    f"data.cache_dir: {str(path.parent)!r} cannot be written ({error}); name a folder that can"
  )
