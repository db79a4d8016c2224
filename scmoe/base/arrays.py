"""Reads .npz files that somebody else may have written."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: Path, most: int) -> dict[str, np.ndarray]:
  """All arrays of a file, by name.

  An archive can unfold to a thousand times its size, and the header of an array can claim more than
  the archive holds. So all sizes are checked before memory is taken.

  Args:
    path: of the file.
    most: bytes of all arrays together.

  Raises:
    ValueError: one line: more than that, no such file, a damaged one, or arrays of objects, which
      would be pickles.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      members = archive.infolist()
      if (total := sum(member.file_size for member in members)) > most:
        raise ValueError(f"it unfolds to {total:,} bytes, at most {most:,} are expected")
      for member in members:
        _check(archive, member)
    with np.load(path, allow_pickle=False) as file:
      return dict(file)
  # RuntimeError: a compression that is not known, or a password.
  except (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    reason = str(error).partition("\n")[0] or type(error).__name__
    raise ValueError(f"{path} is not read: {reason}") from None


def _check(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
  """Raises ValueError unless the array's header asks for the bytes that the member has."""
  with archive.open(member) as file:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
      raise ValueError(f"{member.filename} has format {version}, 1.0 and 2.0 are known")
    shape, _, dtype = _HEADERS[version](file)
    begin = file.tell()
  if dtype.hasobject:
    raise ValueError(f"{member.filename} holds objects, which would be pickles")
  if begin + math.prod(shape) * dtype.itemsize != member.file_size:
    raise ValueError(f"{member.filename} has {member.file_size} bytes, its header tells of others")
