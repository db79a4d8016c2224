"""Expands and checks paths that a user typed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from scmoe.base.errors import ConfigError, DataError


def expanded(path: str, field: str) -> Path:
  """The path with `~` and `~user` replaced; it need not exist.

  Args:
    path: the path as the user typed it.
    field: the option's name, for the message.

  Raises:
    ConfigError: no file can have this path: it holds a NUL, is too long, or names an unknown user.
      Or it is not valid UTF-8, which jax's compilation cache needs.
  """
  shown = f"{field}={path[:80]!r}{'...' if len(path) > 80 else ''}"
  if "\0" in path:
    raise ConfigError(f"{shown} holds a NUL byte; give the path of a file or folder")
  try:
    path.encode()
  except UnicodeEncodeError:
    raise ConfigError(f"{shown} is not valid UTF-8; give another path") from None
  found = with_home(path, shown)
  try:
    found.exists()
  except OSError as error:
    raise ConfigError(f"{shown} cannot be used: {error.strerror}") from None
  return found


def with_home(path: str, shown: str) -> Path:
  """The path with `~` and `~user` replaced; nothing is looked up there.

  Args:
    path: the path as the user typed it.
    shown: option and path, for the message.

  Raises:
    ConfigError: it names an unknown user.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:  # pathlib's, for ~user
    raise ConfigError(f"{shown} names a user that this machine does not have") from None


def at_home(path: str) -> Path:
  """The path with `~` and `~user` replaced; `~user` of an unknown user stays as it is."""
  return Path(os.path.expanduser(path))


def files_below(root: Path, field: str, endings: tuple[str, ...] = ("",)) -> Iterator[Path]:
  """The files of a folder and of those inside it, in no particular order.

  A link to a file is a file. A link to a folder is not entered, so links cannot form a loop.

  Args:
    root: the folder.
    field: the option that names it, for the message.
    endings: a file's name ends in one of them.

  Raises:
    DataError: a folder cannot be listed; or see `check_is_file`, of what has such a name.
  """

  def refused(error: OSError) -> None:
    raise _unreadable(error, field)

  for folder, _, names in os.walk(root, onerror=refused):
    for name in names:
      if name.endswith(endings):
        yield check_is_file(Path(folder, name), field)


def check_is_file(path: Path, field: str) -> Path:
  """The path, if a regular file or a link to one is there.

  To leave out what is none would train on less text than the user named.

  Raises:
    DataError: it cannot be looked at, is a link to nothing or to itself, or is something else than
      a regular file (a pipe, a socket, a device); the message names it and `field`.
  """
  try:
    is_file = stat.S_ISREG(path.stat().st_mode)
  except OSError as error:
    raise _unreadable(error, field) from None
  if not is_file:
    raise DataError(f"{field}: {str(path)!r} is not a regular file; name files, or remove it")
  return path


def _unreadable(error: OSError, field: str) -> DataError:
  where = f"{field}: {str(error.filename)!r}"
  return DataError(f"{where} cannot be read ({error.strerror}); name what can be, or remove it")
