"""Configuration files: Python files that define `get_config()` and `smoke()`.

Reading such a file runs it. Checkpoints store their configuration as JSON instead, which
`scmoe.run.config.from_json` reads without running code.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.paths import at_home
from scmoe.run.config import RunConfig, from_dict
from scmoe.run.names import RUN_NAME

_HERE = Path(__file__).resolve().parents[1]
# The installed package has configs/ inside, as scmoe/configs; in a checkout it lies beside scmoe/.
CONFIG_FOLDER = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"


def config_names() -> list[str]:
  """Names of the configurations that come with the project."""
  return sorted(p.stem for p in CONFIG_FOLDER.glob("*.py") if not p.stem.startswith("_"))


def find_config(name: str) -> Path:
  """The config file that `--config` names: a path, or a bare name such as `quickstart`.

  Raises:
    ConfigError: there is no such file.
  """
  path = at_home(name)
  if "\0" not in name and path.is_file():
    return path
  if RUN_NAME.fullmatch(name) and name in config_names():
    return CONFIG_FOLDER / f"{name}.py"
  near = difflib.get_close_matches(Path(name).stem, config_names(), n=1)
  hint = f"did you mean {near[0]}? " if near else ""
  raise ConfigError(
    f"--config={name!r} is not a file; {hint}give a path or one of: {', '.join(config_names())}"
  )


def load_config(path: Path, function: str = "get_config") -> RunConfig:
  """Runs a config file, which is Python code, and reads what its function returns.

  Args:
    path: the file.
    function: `get_config`, or `smoke` for the reduced form that tests run.

  Raises:
    ConfigError: the file fails, lacks the function, or the function returns no configuration.
  """
  module = _run_file(path)
  make: Callable[[], Any] | None = getattr(module, function, None)
  if not callable(make):
    raise ConfigError(
      f"{path}: has no {function}(); a config file defines get_config() and smoke()"
    )
  try:
    values = make()
  except ConfigError:
    raise
  except (
    Exception,
    SystemExit,
  ) as error:  # the user's code may raise anything; it becomes one line
    raise ConfigError(f"{path}{_line_of(error, path)}: {_in_words(error)}") from None
  if isinstance(values, RunConfig):
    return values
  if hasattr(values, "to_dict"):
    values = values.to_dict()
  if not isinstance(values, Mapping):
    raise ConfigError(
      f"{path}: {function}() returned {type(values).__name__}, not as_config_dict(RunConfig(...))"
    )
  return from_dict(values, str(path))


def _run_file(path: Path) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(f"scmoe_config_{path.stem}", path)
  if spec is None or spec.loader is None:
    raise ConfigError(f"{path}: not a Python file; its name must end in .py")
  module = importlib.util.module_from_spec(spec)
  # No __pycache__ is left beside the user's file.
  writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
  try:
    spec.loader.exec_module(module)
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    raise ConfigError(f"{path}{_line_of(error, path)}: {_in_words(error)}") from None
  finally:
    sys.dont_write_bytecode = writes
  return module


def _in_words(error: BaseException) -> str:
  lines = str(error).splitlines()
  return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _line_of(error: BaseException, path: Path) -> str:
  """The innermost line of the file in the error's traceback, as ":LINE"; empty if there is none."""
  if isinstance(error, SyntaxError) and error.lineno:
    return f":{error.lineno}"
  trace, line = error.__traceback__, ""
  while trace is not None:
    if trace.tb_frame.f_code.co_filename == str(path):
      line = f":{trace.tb_lineno}"
    trace = trace.tb_next
  return line
