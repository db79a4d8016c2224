"""Imports optional packages where they are used, so that an error can say what needs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from scmoe.base.errors import ConfigError

# Packages whose name on PyPI is not the name under which Python imports them.
ON_PYPI = {"PIL": "pillow", "sklearn": "scikit-learn"}


def need(package: str, purpose: str) -> ModuleType:
  """Imports `package`.

  Raises:
    ConfigError: it is not installed; the message begins with `purpose`.
  """
  try:
    return importlib.import_module(package)
  except ImportError as error:
    root = package.partition(".")[0]
    name = ON_PYPI.get(root, root)
    raise ConfigError(
      f"{purpose} needs the package {name!r}: pip install {name} ({error})"
    ) from None
