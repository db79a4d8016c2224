"""Checks a run's name and its folder, before anything is written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scmoe.base.errors import ConfigError
from scmoe.base.paths import expanded

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_run_name(name: str, field: str) -> None:
  """Checks that a name can be a folder below runs/ on every system.

  Raises:
    ConfigError: it is not 1 to 64 letters, digits, '.', '_' and '-' that begin with a letter or a
      digit.
  """
  if not RUN_NAME.fullmatch(name):
    raise ConfigError(
      f"{field}={name[:80]!r} is not a run name; use 1 to 64 letters, digits, '.', '_' or '-', "
      "starting with a letter or digit"
    )


def check_workdir(text: str) -> Path:
  """The folder of a run from `--workdir`: a bare run name, or any path without '..'.

  Nothing is created here. A path with '..' is refused, because scripts and sweeps build paths from
  the names of runs, and a name must not lead out of the intended folder.

  Raises:
    ConfigError: the path is empty or too long, names an unknown user, holds '..', is a link, or is
      not a folder.
  """
  shown = f"--workdir={text[:80]!r}"
  if "\0" in text or not text.strip():
    raise ConfigError(f"{shown} is empty or holds a NUL; give a folder such as runs/a")
  path = expanded(text, "--workdir")
  if ".." in path.parts:
    raise ConfigError(
      f"{shown} holds '..', which could lead a name out of its folder; give the folder itself: "
      f"{os.path.abspath(path)[:300]}"
    )
  if len(os.fsencode(path)) > 1000 or any(len(os.fsencode(p)) > 200 for p in path.parts):
    raise ConfigError(f"{shown}... is too long; use at most 200 bytes a folder and 1000 in all")
  if len(path.parts) <= 1 and not path.is_absolute():
    check_run_name(text, "--workdir")
  if path.is_symlink():
    raise ConfigError(f"{shown} is a symbolic link; give the folder that it points to")
  try:
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
  except OSError as error:
    raise ConfigError(f"{shown} cannot be used: {error}") from None
  if not nearest.is_dir():
    raise ConfigError(f"{shown}: {nearest} is a file, not a folder; choose another one")
  return path
