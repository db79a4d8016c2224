"""Lists a configuration's fields by dotted name, such as `model.width`, and sets one from text."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from scmoe.base.errors import ConfigError
from scmoe.base.renamed import present_name
from scmoe.run.suggestions import OTHER_NAMES, nearest

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
Run = TypeVar("Run")


class Field(typing.NamedTuple):
  """One field of a configuration.

  Attributes:
    path: dotted name, such as `model.rope.factor`.
    type: bool, int, float or str.
    default: its value in the configuration that `fields` was given.
    help, metadata: what `scmoe.base.options.option` declared for it.
  """

  path: str
  type: type
  default: Any
  help: str
  metadata: Mapping[str, Any]


@functools.cache
def field_types(cls: type) -> dict[str, type]:
  """Name -> type of a dataclass of options."""
  hints = typing.get_type_hints(cls)
  return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def fields(config: Any, prefix: str = "") -> Iterator[Field]:
  """All fields of a dataclass of options and of its sections, in order."""
  kinds = field_types(type(config))
  for f in dataclasses.fields(config):
    value, path = getattr(config, f.name), prefix + f.name
    if dataclasses.is_dataclass(value):
      yield from fields(value, f"{path}.")
    else:
      yield Field(path, kinds[f.name], value, f.metadata.get("help", ""), f.metadata)


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
  """(dotted name, meaning) of every section, including sections of sections."""
  for f in dataclasses.fields(config):
    value, path = getattr(config, f.name), prefix + f.name
    if dataclasses.is_dataclass(value):
      yield path, f.metadata.get("help", "")
      yield from sections(value, f"{path}.")


def with_field(run: Run, path: str, text: str) -> Run:
  """The configuration `run` with one field replaced by the value that `text` spells.

  The text is read by the field's type; nothing is evaluated. A name of an earlier version will do.

  Raises:
    ConfigError: no such field, or the text is not of its type.
  """
  known, path = {f.path: f for f in fields(run)}, present_name(path)
  if path not in known:
    raise ConfigError(unknown_field(path, list(known)))
  twin = OTHER_NAMES.get(path.rpartition(".")[2])
  if known[path].type is str and twin in known and text.strip().isdecimal():
    raise ConfigError(f"{path}={text!r} is a number; did you mean {twin}={text.strip()}?")
  return _replaced(run, path.split("."), parse_value(text, known[path].type, path))


def _replaced(config: Any, path: list[str], value: Any) -> Any:
  if len(path) > 1:
    value = _replaced(getattr(config, path[0]), path[1:], value)
  return dataclasses.replace(config, **{path[0]: value})


def parse_value(text: str, kind: type, name: str) -> Any:
  """Reads `text` as a bool, int, float or str.

  Raises:
    ConfigError: the text is not a value of that type.
  """
  word = text.strip()
  if kind is str:
    return text
  if kind is bool:
    if word.lower() in WORDS:
      return WORDS[word.lower()]
    raise ConfigError(f"{name}={text!r} is not of type bool; use true or false")
  if kind is int:
    if re.fullmatch(r"[+-]?\d+(_\d+)*", word) and len(word) < 20:
      return int(word)
    raise ConfigError(f"{name}={text!r} is not of type int; use a whole number such as 8")
  try:
    value = float(word)
  except ValueError:
    value = math.nan
  if not math.isfinite(value):
    raise ConfigError(f"{name}={text!r} is not of type float; use a number such as 0.1 or 3e-4")
  return value


def unknown_field(path: str, known: list[str]) -> str:
  """The text of an error: `path` is not a field; a section's fields, or the nearest name.

  Args:
    path: what was given.
    known: dotted names of all fields.
  """
  inside = [name for name in known if name.startswith(path + ".")]
  if inside:
    return f"{path!r} is a section; name a field of it: {', '.join(inside)}"
  near = nearest(path, known)
  return f"{path!r} is not a field; " + (f"did you mean {near}?" if near else "see --help all")
