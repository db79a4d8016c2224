"""Components from other packages, which a configuration names as `my_package.gates:Mine`.

A configuration stores this import path unchanged, so resuming, evaluation and generation import the
component again: its package must be installed or on PYTHONPATH. Importing a module runs its code.
So an import path read from a file (a checkpoint, a configuration in JSON) is imported only if this
user once started a run with it in the file's folder, or passes `--allow_import`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.stored import StoredError, read_json, write_json

FORM = "my_package.module:Name"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(value: Any) -> bool:
  """True if a configuration's value has the form `my_package.module:Name`."""
  return isinstance(value, str) and len(value) <= 300 and bool(_PATH.fullmatch(value))


@functools.cache
def load(path: str, field: str) -> Any:
  """The object that an import path names.

  Args:
    path: `module:Name`.
    field: the configuration's field, for messages.

  Raises:
    ConfigError: the module cannot be imported, has no such name, or the object is not callable.
  """
  module_name, _, name = path.partition(":")
  try:
    module = importlib.import_module(module_name)
  except (Exception, SystemExit) as error:  # its code can raise anything while it runs
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    raise ConfigError(
      f"{field}={path!r}: {module_name} cannot be imported ({what}); install its package, or put "
      "its folder on PYTHONPATH"
    ) from None
  found = getattr(module, name, None)
  if not callable(found):
    near = difflib.get_close_matches(name, dir(module), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"names are written {FORM}"
    kind = "has no" if found is None else f"holds a {type(found).__name__} as"
    raise ConfigError(f"{field}={path!r}: {module.__file__} {kind} {name!r}; {hint}")
  return found


def construct(path: str, field: str, *args: Any, needs: Iterable[str] = (), **options: Any) -> Any:
  """Calls the object that an import path names; see `load` and `made_by`.

  Raises:
    ConfigError: see both.
  """
  return made_by(load(path, field), f"{field}={path!r}", *args, needs=needs, **options)


def made_by(make: Any, named: str, *args: Any, needs: Iterable[str] = (), **options: Any) -> Any:
  """Calls a user's class or function; checks that the result has the methods `needs`.

  Args:
    make: what is called with `args` and `options`.
    named: the configuration's field with its value, `field='value'`, for messages.
    needs: names of methods.

  Raises:
    ConfigError: the call failed, or a method is missing.
  """
  try:
    made = make(*args, **options)
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise ConfigError(f"{named} could not be made: {what}") from None
  missing = [name for name in needs if not callable(getattr(made, name, None))]
  if missing:
    raise ConfigError(
      f"{named} made a {type(made).__name__} without the method {missing[0]}; it needs: "
      f"{', '.join(needs)}"
    )
  return made


# -- import paths read from files -----------------------------------------------------------------


def check_allowed(
  named: Mapping[str, str], allowed: Iterable[str], where: str, workdir: Path | None = None
) -> None:
  """Refuses import paths from a file that the user has not allowed.

  Args:
    named: import paths by field.
    allowed: import paths, modules or packages that the user allows.
    where: the file's name in messages.
    workdir: the run's folder, if there is one. Import paths with which this user started training
      there are allowed.

  Raises:
    ConfigError: names the field, the path, and the flag that allows it.
  """
  known = set(allowed) | (set() if workdir is None else _remembered(workdir))
  for field, path in named.items():
    module, _, _ = path.partition(":")
    parents = {module[:i] for i, letter in enumerate(module) if letter == "."}
    if not known & {path, module, *parents}:
      raise ConfigError(
        f"{where}: {field}={path!r} names code that importing would run, and you started no run "
        f"with it here; if you trust it, pass --allow_import={module.partition('.')[0]}"
      )


def remember(named: Mapping[str, str], workdir: Path) -> str:
  """Stores a run's import paths in the user's home, where `check_allowed` finds them.

  Returns:
    "", or a warning for the user if they cannot be stored.
  """
  if not named:
    return ""
  place = _place(workdir)
  values = sorted({*named.values(), *_remembered(workdir)})
  try:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(place, {"workdir": str(workdir.resolve()), "imports": values})
  except OSError as error:
    return f"{place} cannot be written ({error.strerror}): evaluation will ask for --allow_import"
  return ""


def _remembered(workdir: Path) -> set[str]:
  try:
    stored = read_json(_place(workdir), {"workdir": str, "imports": [str]})
  except (FileNotFoundError, StoredError):
    return set()
  if stored["workdir"] != str(workdir.resolve()):
    return set()
  return {path for path in stored["imports"] if is_import_path(path)}


def _place(workdir: Path) -> Path:
  """The file of a run's allowed imports: in the user's home, since others may write the workdir."""
  root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
  name = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:32]
  return Path(root).expanduser() / "scmoe" / "imports" / f"{name}.json"
