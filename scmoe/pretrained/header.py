"""Checks the sizes that an untrusted file claims, before memory of that size is allocated.

By the format's specification a safetensors file is eight bytes with the length of a JSON header,
the header, and the tensors' bytes without gaps. `scmoe.pretrained.folder` relies on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scmoe.base import stored
from scmoe.base.errors import DataError

LIMITS = {  # largest size of each kind of file, in bytes
  "config.json": 2**20,
  "tokenizer.json": 2**27,
  "index": 2**26,
  "header": 2**26,
}
TENSORS = 2**20  # most tensors of one model; DeepSeek-V3 has 92,000
RANK = 8  # most dimensions of a tensor
# Bits of an element, by the format's spelling of its type.
_BITS = {
  "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
  "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
  "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class Described(NamedTuple):
  """A tensor as a header describes it.

  Attributes:
    shape: the tensor's shape.
    dtype: its type, in the format's spelling, e.g. "BF16".
    start: offset of its first byte from the beginning of the file.
  """

  shape: tuple[int, ...]
  dtype: str
  start: int


def read_text(path: Path, limit: int) -> str:
  """Reads a text file of at most `limit` bytes.

  Raises:
    DataError: it is missing, larger, not UTF-8, or not a regular file (a pipe, a device).
  """
  try:
    return stored.read_text(path, limit)
  except FileNotFoundError:
    raise _missing(path) from None


def read_object(path: Path, limit: int) -> dict[str, Any]:
  """Reads a file of at most `limit` bytes with a JSON object in which no name occurs twice.

  Raises:
    DataError: the file cannot be read or is not such an object.
  """
  try:
    return stored.read_json(path, most=limit)
  except FileNotFoundError:
    raise _missing(path) from None


def _missing(path: Path) -> DataError:
  return DataError(f"{path} is missing; a model's folder has one")


def read_header(file: Path) -> dict[str, Described]:
  """The tensors of a safetensors file by name; reads the header only.

  Raises:
    DataError: the header is larger than the file or the limit, or violates the format; or its
      tensors overlap, leave gaps, or do not end at the end of the file.
  """
  damaged = lambda why: DataError(f"{file} is damaged or incomplete: {why}")
  try:
    if not file.is_file():
      raise DataError(f"{file} is not a regular file")
    with file.open("rb") as opened:
      whole = file.stat().st_size
      first = opened.read(8)
      length = int.from_bytes(first, "little")
      if len(first) < 8 or length > whole - 8:
        raise damaged(f"a header of {length} bytes in a file of {whole}")
      if length > LIMITS["header"]:
        raise damaged(f"a header of {length} bytes; at most {LIMITS['header']} are read")
      text = opened.read(length)
  except OSError as error:
    raise damaged(error) from None
  values = stored.parse_json(text, f"{file} is damaged or incomplete: its header")
  values.pop("__metadata__", None)
  if len(values) > TENSORS:
    raise damaged(f"{len(values)} tensors; at most {TENSORS} are read")
  found, parts = {}, []
  for name, said in values.items():
    found[name], size = _described(said, lambda why, name=name: damaged(f"{name[:200]} {why}"))
    parts.append((found[name].start, found[name].start + size, name))
  end = 0
  for start, stop, name in sorted(parts):
    if start != end:
      kind = "overlaps another tensor" if start < end else "leaves a gap before it"
      raise damaged(f"{name[:200]}, which begins at byte {start}, {kind}")
    end = stop
  if end != whole - 8 - length:
    raise damaged(f"its tensors need {end} bytes; the file has {whole - 8 - length} for them")
  return {name: own._replace(start=own.start + 8 + length) for name, own in found.items()}


def _described(said: Any, damaged: Any) -> tuple[Described, int]:
  """One tensor of a header, and its size in bytes.

  As in the header, `start` is counted from the end of the header here.
  """
  whole = lambda x: type(x) is int and 0 <= x < 2**63
  if not isinstance(said, Mapping) or set(said) != {"dtype", "shape", "data_offsets"}:
    raise damaged("lacks one of the fields dtype, shape and data_offsets, or has others")
  kind, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
  if not isinstance(kind, str) or kind not in _BITS:
    raise damaged(f"has the type {str(kind)[:40]!r}, which the format does not have")
  if not isinstance(shape, list) or len(shape) > RANK or not all(map(whole, shape)):
    raise damaged(f"has a shape that is not at most {RANK} whole numbers: {str(shape)[:80]}")
  if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)):
    raise damaged(f"has data_offsets that are not two whole numbers: {str(offsets)[:80]}")
  start, stop = offsets
  if 8 * (stop - start) != math.prod(shape) * _BITS[kind]:
    raise damaged(f"has {stop - start} bytes, which do not fit shape {shape} of {kind}")
  return Described(tuple(shape), kind, start), stop - start
