"""Scripts of experiments/ as modules, for tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def script(path: str) -> ModuleType:
  """The script `experiments/PATH` as a module; it may import files beside it, as when it runs."""
  file = EXPERIMENTS / path
  before = list(sys.path)
  sys.path.insert(0, str(file.parent))
  name = path.removesuffix(".py").replace("/", "_")
  spec = importlib.util.spec_from_file_location(name, file)
  assert spec is not None
  assert spec.loader is not None
  module = sys.modules[name] = importlib.util.module_from_spec(spec)  # its dataclasses look there
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path[:] = before
  return module
