"""Tilings that were measured on a user's own GPU, in the files of `python -m scmoe.bench.tune`.

Each kind of device has its own JSON file in the user's cache folder. For products with 2-byte
operands and results its tilings are preferred to those that the package ships, as long as they are
among the tilings that `tiles` offers for a product (`variants`). If a file is read but cannot be
used, a warning names it and the products run without it, perhaps slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scmoe.base.errors import StorageError
from scmoe.base.stored import StoredError, parse_json, read_text
from scmoe.kernels.grouped_matmul.pipeline import Tiling

# (kind, contracted width, result width, whether the kernel gathers an operand). For the kinds
# "weights" and "weights_pair" the two widths are the result's rows and columns.
Key = tuple[str, int, int, bool]
_log = logging.getLogger(__name__)
_FORMAT = 1
_MOST = 2**20  # The most bytes of a file; a larger one cannot be used.
_RENAMED = {"stores": "store_buffers"}  # Fields' names in older files -> their names now.
_FIELDS = {field.name: type(field.default) for field in dataclasses.fields(Tiling)}


class Measured(NamedTuple):
  """The tiling that `scmoe.bench.tune` chose for one product.

  Attributes:
    tiling: the tiling.
    ms: milliseconds of a call with it.
    shipped_ms: milliseconds of a call with the shipped tiling (`tiles.shipped`).
    when: the date, and jax's version.
  """

  tiling: Tiling
  ms: float
  shipped_ms: float
  when: str


Table = dict[Key, Measured]
_tables: dict[str, Table] = {}  # by device kind: read from its file, or given to `use`


def file_of(device_kind: str) -> Path:
  """The file of a kind of device's measurements: $XDG_CACHE_HOME/scmoe/tilings/KIND.json.

  If that variable is empty or not set, ~/.cache takes its place. For "NVIDIA H200" KIND is
  nvidia-h200.
  """
  cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
  return Path(cache) / "scmoe" / "tilings" / f"{name}.json"


def table(device_kind: str) -> Table:
  """The measurements of a kind of device, as given to `use`, or else from its file, read once."""
  if device_kind not in _tables:
    _tables[device_kind] = stored(device_kind)
  return _tables[device_kind]


def use(device_kind: str, found: Table) -> None:
  """Replaces this process' table of a kind of device.

  Processes of one run must compile the same program, so all of them use the first one's table.
  """
  _tables[device_kind] = found


def stored(device_kind: str) -> Table:
  """The content of a kind of device's file; {} without a file, {} and a warning for a bad one.

  A file whose path is relative is not read: the result is {}.
  """
  file = file_of(device_kind)
  # The path is relative if XDG_CACHE_HOME is, or without it if no absolute home folder is known.
  if not file.is_absolute():
    return {}
  try:
    return parsed(read_text(file, _MOST), device_kind)
  except FileNotFoundError:
    return {}
  except (StoredError, ValueError) as error:
    _log.warning("%s is left out: %s; `python -m scmoe.bench.tune` writes it anew", file, error)
    return {}


def keep(device_kind: str, found: Table) -> Path:
  """Adds measurements to the file, lets this process use the file's table; returns the file's path.

  A file that cannot be used is replaced.

  Raises:
    StorageError: the file's path is relative, or the file cannot be written and keeps its old
      content.
  """
  file, merged = file_of(device_kind), stored(device_kind) | found
  if not file.is_absolute():
    raise StorageError(
      f"tilings cannot be kept in {file}, which is no absolute path; set XDG_CACHE_HOME to one"
    )
  partial = file.with_name(f".{file.name}.{os.getpid()}")
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text(merged, device_kind), "utf-8")
    os.replace(partial, file)
  except OSError as error:
    with contextlib.suppress(OSError):
      partial.unlink()
    raise StorageError(
      f"{file} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME"
    ) from None
  use(device_kind, merged)
  return file


def text(found: Mapping[Key, Measured], device_kind: str) -> str:
  """Measurements as the JSON text of a file."""
  entries = [
    {"product": list(key), "tiling": dataclasses.asdict(own.tiling)}
    | {"ms": own.ms, "shipped_ms": own.shipped_ms, "when": own.when}
    for key, own in sorted(found.items())
  ]
  whole = {"format": _FORMAT, "device": device_kind, "tilings": entries}
  return json.dumps(whole, indent=1) + "\n"


def parsed(content: str, device_kind: str) -> Table:
  """The measurements in the JSON text of a file; the inverse of `text`.

  Raises:
    StoredError: `parse_json` refuses the content.
    ValueError: the JSON is of another format, has an entry that is no measurement of a tiling, or
      is for another kind of device.
  """
  whole = parse_json(content, "it", object)
  if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
    raise ValueError(f"not a list of tilings of format {_FORMAT}")
  if whole.get("device") != device_kind:
    raise ValueError(f"it is of {whole.get('device')!r}, not of {device_kind!r}")
  try:
    return dict(map(_entry, whole["tilings"]))
  except (KeyError, TypeError, OverflowError) as error:
    raise ValueError(f"an entry lacks what it should have ({error})") from None


def _entry(entry: Any) -> tuple[Key, Measured]:
  kind, width, n, gathered = entry["product"]
  fields: dict[str, Any] = {_RENAMED.get(k) or k: v for k, v in dict(entry["tiling"]).items()}
  wrong = [name for name, kind in _FIELDS.items() if type(fields[name]) is not kind]
  if wrong or set(fields) != set(_FIELDS):
    raise ValueError(f"{fields} is no tiling")
  key = str(kind), int(width), int(n), bool(gathered)
  numbers = float(entry["ms"]), float(entry["shipped_ms"])
  return key, Measured(Tiling(**fields), *numbers, str(entry["when"]))
