"""Configuration fields that carry their meaning and limits, and the check of their values.

Every component declares its options in a frozen dataclass beside its code:

  @dataclasses.dataclass(frozen=True)
  class RouterConfig(Options, path="router"):
    n_group: int = option(1, "groups that the experts form", minimum=1)

`RouterConfig(n_group=0)` raises "router.n_group=0 is too small; the least is 1". `--help`,
validation and the documentation read the same declaration, so no field can lack a meaning. Checks
of several fields against each other are methods that run on the complete configuration (`check`,
`resolve`). They are not here, because a user who changes two such fields by two
`dataclasses.replace` calls would be refused at the first.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import FORM, is_import_path
from scmoe.base.renamed import note_name, old_names

# Annotation of a field -> (type that the field stores, types that it accepts, advice for the error
# message). The abstract number types include NumPy's scalars.
_KINDS: dict[str, tuple[type, Any, str]] = {
  "bool": (bool, (bool, np.bool_), "use True or False"),
  "int": (int, numbers.Integral, "use a whole number such as 8"),
  "float": (float, numbers.Real, "use a number such as 0.1 or 3e-4"),
  "str": (str, str, "use a text"),
}


def option(
  default: Any = dataclasses.MISSING,
  help: str = "",
  *,
  choices: Iterable[Any] = (),
  minimum: float | None = None,
  maximum: float | None = None,
  above: float | None = None,
  importable: bool = False,
) -> Any:
  """A dataclass field with its meaning and the values that it may have.

  Args:
    default: the value if none is given; without a default the field is required.
    help: the meaning, for `--help` and docs. Classes that only users of the library see leave it
      empty and describe the field in their docstring.
    choices: the values that are allowed; empty: any. A mapping is not copied, so keys that a
      program adds to it later are allowed too.
    minimum, maximum: the least and the largest value.
    above: the value must be larger than this.
    importable: besides `choices`, an import path `my_package.module:Name` is allowed
      (`scmoe.base.extensions`).
  """
  words = choices if isinstance(choices, Mapping) else tuple(choices)
  metadata = {"help": help, "choices": words, "minimum": minimum, "maximum": maximum}
  metadata |= {"above": above, "importable": importable}
  if default is dataclasses.MISSING:
    return dataclasses.field(metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, help: str = "", *, default: Any = None) -> Any:
  """A field that holds another component's options, e.g. `model.rope`.

  Args:
    cls: the class of those options.
    help: the meaning, as in `option`.
    default: the value if none is given; None: `cls()`.
  """
  metadata = {"help": help, "section": cls}
  if default is not None:
    return dataclasses.field(default=default, metadata=metadata)
  return dataclasses.field(default_factory=cls, metadata=metadata)


class _Renamed(type):
  """Lets a class of options take arguments by the names of earlier versions (`RENAMED`)."""

  if not TYPE_CHECKING:  # to a type checker only today's names are right

    def __call__(cls, *args, **given):
      for old, new in cls._old_names.items():
        if old in given:
          note_name(f"{cls._path}.{old}")
          section, _, name = new.partition(".")
          group = given[section] if section in given else _default(cls, section)
          given[section] = dataclasses.replace(group, **{name: given.pop(old)})
      return super().__call__(*args, **given)


def _default(cls: type, name: str) -> Any:
  """The default of a field that holds a section."""
  field = cls.__dataclass_fields__[name]
  made = field.default_factory is not dataclasses.MISSING
  return field.default_factory() if made else field.default


class Options(metaclass=_Renamed):
  """Base of every dataclass of options: checks each field by itself when an object is made.

  Python's `help` of the class shows each field's meaning, default and limits.

  `dataclasses.replace` makes a new object, so it checks too. A number is stored as the field's
  Python type: `capacity_factor=2` as 2.0, `np.int64(8)` as 8. Subclasses inherit the check, which
  covers the fields declared by `option` or `section`.
  """

  _path: ClassVar[str] = ""
  _old_names: ClassVar[dict[str, str]] = {}  # of earlier versions -> where the option is now

  def __init_subclass__(cls, path: str = "", **given: Any) -> None:
    """Sets the name of this section in messages, and describes the fields in the docstring.

    Args:
      path: the section's dotted name in a run's configuration, e.g. `router`. "" takes the base
        class's path, or, if it has none, the class's name.
      **given: arguments for other base classes.
    """
    super().__init_subclass__(**given)
    if path:
      cls._path, cls._old_names = path, old_names(path)
    cls.__doc__ = _described(cls)

  if not TYPE_CHECKING:  # to a type checker only today's names are right

    def __getattr__(self, name: str) -> Any:
      """The value of an option by a name of an earlier version."""
      if name not in self._old_names:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
      note_name(f"{self._path}.{name}")
      section, _, last = self._old_names[name].partition(".")
      return getattr(getattr(self, section), last)

  def __post_init__(self) -> None:
    check_options(self, self._path or type(self).__name__)


def check_options(config: Any, path: str) -> None:
  """Checks type, choices and range of every field of an options dataclass.

  Args:
    config: the dataclass. A number of another type is replaced in place by the field's type.
    path: its name in messages, e.g. `model`.

  Raises:
    ConfigError: names the field, its value and a value that would work.
  """
  for field in _checked_fields(type(config)):
    given = getattr(config, field.name)
    value = field.accepted(f"{path}.{field.name}", given)
    if value is not given:
      object.__setattr__(config, field.name, value)  # the dataclass is frozen


def check_choice(
  name: str, value: Any, choices: Iterable[Any], *, importable: bool = False
) -> None:
  """Checks that a value is one of the choices.

  Args:
    name: the value's name in the message.
    value: the value.
    choices: the values that are allowed.
    importable: whether an import path `my_package.module:Name` is allowed too.

  Raises:
    ConfigError: names the value, the nearest choice and all choices.
  """
  choices = list(choices)
  if value in choices or (importable and is_import_path(value)):
    return
  near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
  hint = f"did you mean {near[0]!r}? " if near else ""
  words = ", ".join(str(choice) or "''" for choice in choices)
  raise ConfigError(
    f"{name}={_shown(value)} is unknown; {hint}one of: {words}"
    + (f", or your own as {FORM}" if importable else "")
  )


# Abstract class -> the type that users write for it, and how.
_ABSTRACT: dict[type, tuple[str, str]] = {
  Sequence: ("list", "[...]"),
  Iterable: ("list", "[...]"),
  Mapping: ("dict", "{...}"),
}


def check_type(name: str, value: Any, cls: type) -> None:
  """Checks that an argument is an object of a class.

  Raises:
    ConfigError: names the argument, its type and the class.
  """
  if not isinstance(value, cls):
    word, form = _ABSTRACT.get(cls, (cls.__name__, f"{cls.__name__}(...)"))
    raise ConfigError(f"{_typed(name, value)}, not {word}; use {form}")


def check_whole(name: str, value: Any, least: float = -math.inf) -> None:
  """Checks that an argument is a whole number, and not too small.

  Raises:
    ConfigError: names the argument, and its type or the least value.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise ConfigError(f"{_typed(name, value)}, not int; use a whole number")
  if value < least:
    raise ConfigError(f"{name}={value} is too small; the least is {least}")


def check_array(name: str, value: Any) -> None:
  """Checks that an argument is an array: it has a shape and a type of numbers.

  Raises:
    ConfigError: names the argument and its type.
  """
  if not (hasattr(value, "shape") and hasattr(value, "dtype")):
    raise ConfigError(f"{name} is of type {type(value).__name__}, not an array; use jnp.asarray")


def check_callable(name: str, value: Any) -> None:
  """Checks that an argument can be called.

  Raises:
    ConfigError: names the argument and its type.
  """
  if not callable(value):
    raise ConfigError(f"{_typed(name, value)}, which cannot be called; give a function")


# Devices compute with options in float32, where a larger number is infinite.
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(frozen=True)
class _Field:
  """The declaration of one field of a dataclass of options.

  Attributes:
    name: the field's name.
    kind: a key of `_KINDS`, or "" where the type is not checked.
    optional: whether None is allowed.
    section: for a field declared by `section`, the class of its options; else None.
    metadata: what `option` or `section` stored in the dataclass field.
  """

  name: str
  kind: str
  optional: bool
  section: type | None
  metadata: Mapping[str, Any]

  def accepted(self, name: str, value: Any) -> Any:
    """The value converted to the form that the field stores; ConfigError if it is not allowed."""
    if value is None and self.optional:
      return value
    if self.section is not None:
      check_type(name, value, self.section)
      return value
    if self.kind:
      value = self._typed(name, value)
    if self.metadata["choices"]:
      check_choice(name, value, self.metadata["choices"], importable=self.metadata["importable"])
    self._check_range(name, value)
    return value

  def _typed(self, name: str, value: Any) -> Any:
    """The value converted to the field's Python type. A bool, NaN or infinity is not a number."""
    kind, accepts, advice = _KINDS[self.kind]
    right = isinstance(value, accepts) and (kind is bool or not isinstance(value, bool))
    if not right:
      choices = self.metadata["choices"]
      advice = f"one of: {', '.join(map(str, choices))}" if choices else advice
      raise ConfigError(f"{_typed(name, value)}, not {self.kind}; {advice}")
    if kind is float and not _is_finite(value):
      raise ConfigError(f"{name}={_shown(value)} is not a finite float; {advice}")
    if kind is float and abs(value) > _FLOAT32_MAX:
      raise ConfigError(f"{name}={_shown(value)} is beyond float32, whose largest number is 3.4e38")
    return value if type(value) is kind or kind is str else kind(value)

  def _check_range(self, name: str, value: Any) -> None:
    low, high, above = (self.metadata[word] for word in ("minimum", "maximum", "above"))
    if low is not None and value < low:
      raise ConfigError(f"{name}={value} is too small; the least is {low}")
    if above is not None and value <= above:
      raise ConfigError(f"{name}={value} is too small; it must be larger than {above}")
    if high is not None and value > high:
      raise ConfigError(f"{name}={value} is too large; the most is {high}")


@functools.cache
def _checked_fields(cls: type) -> tuple[_Field, ...]:
  """The fields of a dataclass that `option` or `section` declared."""
  found = []
  for field in dataclasses.fields(cls):
    declared = field.metadata
    if "section" not in declared and "choices" not in declared:
      continue  # a plain dataclass field, which a user's subclass may declare
    words = _annotation(field.type)
    kinds = [word for word in words if word in _KINDS]
    kind = kinds[0] if len(kinds) == 1 and set(words) <= {*kinds, "None"} else ""
    found.append(_Field(field.name, kind, "None" in words, declared.get("section"), declared))
  return tuple(found)


def _described(cls: type) -> str:
  """A class's docstring with a line added for each field that has a `help` text."""
  declared = dict(getattr(cls, "__dataclass_fields__", {}))  # fields of the base classes
  for name, kind in vars(cls).get("__annotations__", {}).items():
    value = vars(cls).get(name)
    declared.pop(name, None)
    if isinstance(value, dataclasses.Field):
      declared[name] = value
      value.type = value.type or kind
  lines = [
    textwrap.fill(_line(name, field), 98, initial_indent="  ", subsequent_indent="    ")
    for name, field in declared.items()
    if field.metadata.get("help")
  ]
  parts = [inspect.cleandoc(cls.__doc__ or ""), "Fields:\n" + "\n".join(lines) if lines else ""]
  return "\n\n".join(filter(None, parts))


def _line(name: str, field: dataclasses.Field[Any]) -> str:
  """A field as one line: `n_group: int = 1, at least 1: groups that the experts form`."""
  words = field.metadata
  default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
  bounds = (("minimum", "at least"), ("above", "above"), ("maximum", "at most"))
  limits = [f"{said} {words[key]}" for key, said in bounds if words.get(key) is not None]
  return ", ".join([f"{name}: {field.type}{default}", *limits]) + f": {words['help']}"


def _annotation(kind: Any) -> list[str]:
  """Splits an annotation, given as a type or as text: `int | None` gives ["int", "None"]."""
  text = kind.__name__ if isinstance(kind, type) else str(kind)
  return [word.strip() for word in text.split("|")]


def _is_finite(value: Any) -> bool:
  """True if the number is finite as a float64."""
  try:
    return math.isfinite(value)
  except OverflowError:  # an int beyond float64's range
    return False


def _typed(name: str, value: Any) -> str:
  """An argument with its value and type, as a message about its type begins."""
  return f"{name}={_shown(value)} is of type {type(value).__name__}"


def _shown(value: Any) -> str:
  """The value's repr on one line, cut to 80 characters."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 80 else f"{text[:77]}..."
