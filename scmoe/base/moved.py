"""Addresses of version 0.2: configurations and packages that import them still load.

`import scmoe.config` gives `scmoe.run.config` and warns once. The finder is last in
`sys.meta_path`, so Python asks it only for names that no file has.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

# Address in version 0.2 -> address now.
MOVED = {
  "scmoe.arrays": "scmoe.base.arrays",
  "scmoe.batch": "scmoe.base.batch",
  "scmoe.errors": "scmoe.base.errors",
  "scmoe.extensions": "scmoe.base.extensions",
  "scmoe.options": "scmoe.base.options",
  "scmoe.benchmark": "scmoe.run.benchmark",
  "scmoe.build": "scmoe.run.build",
  "scmoe.command_line": "scmoe.run.command_line",
  "scmoe.config": "scmoe.run.config",
  "scmoe.dry_run": "scmoe.run.dry_run",
  "scmoe.programs": "scmoe.run.programs",
  "scmoe.tasks": "scmoe.run.tasks",
  "scmoe.teacher": "scmoe.run.teacher",
  "scmoe.plan": "scmoe.inference.offload.plan",
}


class _Alias(importlib.abc.Loader):
  """Loads the module at the new address under its old name: one object, two names."""

  def __init__(self, target: str):
    self._target = target

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    """The module at the new address."""
    warnings.warn(f"{spec.name} is now {self._target}", DeprecationWarning, stacklevel=2)
    module = importlib.import_module(self._target)
    self._spec = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    """Restores the module's own spec, which Python has just replaced. Its code has already run."""
    module.__spec__ = self._spec


class _Finder(importlib.abc.MetaPathFinder):
  """Finds the old names of `MOVED`."""

  def find_spec(
    self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    """The spec of a moved module; None for every other name."""
    del path, target
    if name not in MOVED:
      return None
    return importlib.machinery.ModuleSpec(name, _Alias(MOVED[name]))


def install() -> None:
  """Lets Python find the old names; does nothing the second time."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
