"""Small files that scmoe keeps: written atomically, and checked when read.

A full disk may have cut a stored JSON file off, a user may have edited it, or an attacker may have
made it to crash its reader. All readers use `read_json`: it limits size and depth, checks the
fields that the caller is going to use, and raises `StoredError` for everything else.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from scmoe.base.errors import DataError

MOST_BYTES = 2**28  # size of a file; the metadata of a checkpoint of 10,000 arrays has 2 MB
MOST_DEPTH = 64  # levels of nested objects and lists; a configuration has 4
_MOST_INT = 2**63
_PROBE_BYTES = 4096
_OPENERS = ("{", "[")
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number",
          float: "a finite number", bool: "true or false"}  # fmt: skip


class StoredError(DataError):
  """A stored file cannot be read, is not JSON, or lacks a field of the expected type."""


class Maybe:
  """Marks a field of a JSON object as optional, for `check_shape`."""

  def __init__(self, shape: Any):
    self.shape = shape


def read_json(path: str | os.PathLike[str], shape: Any = dict, *, most: int = MOST_BYTES) -> Any:
  """Reads a JSON file and checks its fields.

  Args:
    path: a regular file; reading a pipe or a device might never end.
    shape: the expected fields and types; see `check_shape`.
    most: limit on the file's size in bytes.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: the file cannot be read, is not JSON, or has another shape.
  """
  return parse_json(read_bytes(path, most), str(path), shape)


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
  """The bytes of a regular file.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read, is not a regular file, or has more than `most` bytes.
  """
  try:
    found = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with os.fdopen(found, "rb") as file:
      if not stat.S_ISREG(os.fstat(found).st_mode):
        raise StoredError(f"{path} is not a regular file")
      data = file.read(most + 1)
  except (FileNotFoundError, NotADirectoryError):
    raise FileNotFoundError(f"{path} does not exist") from None
  except OSError as error:
    raise StoredError(f"{path} cannot be read: {error.strerror}") from None
  if len(data) > most:
    raise StoredError(f"{path} is larger than {most:,} bytes, the limit for such a file")
  return data


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
  """The text of a regular file in UTF-8.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read, is not a regular file, has more than `most` bytes, or is not
      UTF-8.
  """
  try:
    return read_bytes(path, most).decode("utf-8")
  except UnicodeDecodeError as error:
    raise StoredError(f"{path} cannot be used: {error}") from None


def parse_json(text: str | bytes, where: str, shape: Any = dict) -> Any:
  """Parses a JSON text and checks its fields.

  Args:
    text: a string, or bytes in UTF-8.
    where: the text's name in messages.
    shape: the expected fields and types; see `check_shape`.

  Raises:
    StoredError: it is not JSON, names a key twice, is nested too deep, or has another shape.
  """
  try:
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    value = json.loads(text, object_pairs_hook=_unique)
    if sum(map(text.count, _OPENERS)) > MOST_DEPTH:  # fewer openers cannot nest that deep
      _check_depth(value)
    if "\\u" in text:
      # JSON can spell half of a surrogate pair, which is not a character; encoding it fails.
      json.dumps(value, ensure_ascii=False).encode()
    check_shape(value, shape)
  except (ValueError, RecursionError) as error:
    reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
    raise StoredError(f"{where} cannot be used: {' '.join(reason.split())[:200]}") from None
  return value


def check_shape(value: Any, shape: Any, name: str = "it") -> None:
  """Checks that a JSON value has the fields and types that its reader is going to use.

  Args:
    value: a result of `json.loads`.
    shape: one of
      - a type: `object` allows anything; `float` allows integers too; numbers lie in ±2^63, so
        infinity and NaN are refused;
      - `[shape]`: a list of such values;
      - `{"*": shape}`: an object whose fields all have this shape;
      - `{"step": int, "kind": Maybe(str)}`: an object with these fields and possibly others.
    name: the value's name in messages.

  Raises:
    ValueError: names the first difference.
  """
  if isinstance(shape, list):
    _check_type(value, list, name)
    for number, item in enumerate(value):
      check_shape(item, shape[0], f"{name}[{number}]")
  elif isinstance(shape, dict):
    _check_type(value, dict, name)
    fields = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
    for field, inner in fields.items():
      if field in value:
        check_shape(value[field], inner.shape if isinstance(inner, Maybe) else inner, repr(field))
      elif not isinstance(inner, Maybe):
        raise ValueError(f"{name} has no {field!r}")
  else:
    _check_type(value, shape, name)


def ends_a_line(file: BinaryIO) -> bool:
  """Whether the last byte of a file that is not empty ends a line; moves the file's position."""
  file.seek(-1, os.SEEK_END)
  return file.read(1) == b"\n"


def write_probe(folder: Path) -> None:
  """Writes 4096 bytes and removes them: a full disk still lets a program create an empty file.

  Raises:
    OSError: no file can be written in the folder.
  """
  probe = folder / f".probe-{os.getpid()}"
  try:
    probe.write_bytes(bytes(_PROBE_BYTES))
  finally:
    # A process with the same number on another host may have removed the file already.
    probe.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
  """Replaces a JSON file atomically: readers see the old content or the new, never a part.

  Raises:
    OSError: it cannot be written. The old file stays, and no temporary file is left.
  """
  write_whole(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
  """Replaces a file atomically: readers see the old content or the new, never a part.

  Raises:
    OSError: it cannot be written, or is a device. The old file stays, and no temporary file is
      left.
  """
  _check_replaceable(path)
  partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
  try:
    partial.write_bytes(data)
    os.replace(partial, path)
  except OSError as error:
    partial.unlink(missing_ok=True)
    if error.filename is None:  # a full disk, found while writing
      error.filename = str(path)
    raise


def _check_replaceable(path: Path) -> None:
  """Raises OSError for a device, and for a link to a device or a pipe, such as /dev/stdout.

  The superuser's `os.replace` would put a file in the place of /dev/null or /dev/stdout, for all
  processes of the machine.
  """
  try:
    mode = path.stat().st_mode
  except OSError:
    return  # nothing is there, or writing says what is wrong
  is_stream = stat.S_ISFIFO(mode) and path.is_symlink()
  if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or is_stream:
    raise OSError(errno.EINVAL, "it is a device or a stream, not a file", str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise ValueError(f"{twice[:80]!r} is given twice")
  return found


def _check_depth(value: Any) -> None:
  level = [value]
  for _ in range(MOST_DEPTH + 1):
    inside = [x for x in level if isinstance(x, dict | list)]
    level = [x for outer in inside for x in (outer.values() if isinstance(outer, dict) else outer)]
  if level:
    raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")


def _check_type(value: Any, wanted: type, name: str) -> None:
  kinds = (int, float) if wanted is float else wanted
  good = isinstance(value, kinds) and (wanted in (bool, object) or not isinstance(value, bool))
  if good and wanted in (int, float):
    good = -_MOST_INT <= value < _MOST_INT  # false for NaN and infinities too
  if not good:
    raise ValueError(f"{name} is {repr(value)[:60]}, not {_NAMES.get(wanted, wanted.__name__)}")
