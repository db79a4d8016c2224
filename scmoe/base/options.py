"""One way to declare a configuration field: its default, its meaning and what it may be.

Every component owns a frozen dataclass of options beside its code. `--help`, validation and the
documentation are all read from here, so a field cannot be without a meaning.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import FORM, is_import_path


def option(
  default: Any,
  help: str,
  *,
  choices: Iterable[Any] = (),
  minimum: float | None = None,
  maximum: float | None = None,
  importable: bool = False,
) -> Any:
  """A dataclass field with a meaning and, where it has them, the values it may take.

  With `importable` also the import path of a part of one's own (`scmoe.base.extensions`).
  """
  # A dictionary stays itself, so that a word which a program adds to it can be chosen.
  words = choices if isinstance(choices, Mapping) else tuple(choices)
  metadata = {"help": help, "choices": words, "minimum": minimum, "maximum": maximum}
  metadata["importable"] = importable
  return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, help: str) -> Any:
  """A field that holds a component's own options, e.g. `mesh`."""
  return dataclasses.field(default_factory=cls, metadata={"help": help})


def check_options(config: Any, path: str) -> None:
  """Checks choices and ranges of an options dataclass and of its groups.

  Args:
    config: the dataclass.
    path: its dotted name, e.g. `model`.

  Raises:
    ConfigError: names the field, what was got and what would do.
  """
  for f in dataclasses.fields(config):
    name, value = f"{path}.{f.name}", getattr(config, f.name)
    if dataclasses.is_dataclass(value):
      check_options(value, name)
      continue
    choices = f.metadata.get("choices", ())
    low, high = f.metadata.get("minimum"), f.metadata.get("maximum")
    own = bool(f.metadata.get("importable"))
    if choices and value not in choices and not (own and is_import_path(value)):
      near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
      hint = f"did you mean {near[0]!r}? " if near else ""
      raise ConfigError(
        f"{name}={value!r} is unknown; {hint}one of: {', '.join(map(str, choices))}"
        + (f", or your own as {FORM}" if own else "")
      )
    if low is not None and value < low:
      raise ConfigError(f"{name}={value} is too small; the least is {low}")
    if high is not None and value > high:
      raise ConfigError(f"{name}={value} is too large; the most is {high}")
