"""Reads .npz files that may come from an untrusted source."""

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
  """Reads all arrays of a file, by name.

  A small archive can decompress to a thousand times its size, and an array's header can claim more
  bytes than the archive holds. So this function checks all sizes before it allocates memory.

  Args:
    path: the file to read.
    most: limit on the decompressed size of all arrays together, in bytes.

  Raises:
    ValueError: the file is missing, damaged or larger than `most`, or holds arrays of Python
      objects, which only pickle could load. The message is one line.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      members = archive.infolist()
      if (total := sum(member.file_size for member in members)) > most:
        raise ValueError(f"it decompresses to {total:,} bytes; the limit is {most:,}")
      for member in members:
        _check(archive, member)
    with np.load(path, allow_pickle=False) as file:
      return dict(file)
  # RuntimeError: zipfile does not know the compression, or the archive needs a password.
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
    raise ValueError(f"{path} cannot be read: {reason}") from None


def _check(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
  """Raises ValueError unless the array's header implies the size that the archive records."""
  with archive.open(member) as file:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
      raise ValueError(f"{member.filename} has .npy format {version}; known are 1.0 and 2.0")
    shape, _, dtype = _HEADERS[version](file)
    begin = file.tell()
  if dtype.hasobject:
    raise ValueError(f"{member.filename} holds Python objects; only arrays of numbers are read")
  if (size := begin + math.prod(shape) * dtype.itemsize) != member.file_size:
    raise ValueError(f"{member.filename} has {member.file_size} bytes; its header implies {size}")
