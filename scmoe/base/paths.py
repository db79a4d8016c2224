"""Expands and checks paths that a user typed."""

from __future__ import annotations

from pathlib import Path

from scmoe.base.errors import ConfigError


def expanded(path: str, field: str) -> Path:
  """The path with `~` and `~user` replaced; it need not exist.

  Args:
    path: the path as the user typed it.
    field: the option's name, for the message.

  Raises:
    ConfigError: no file can have this path: it holds a NUL, is too long, or names an unknown user.
  """
  shown = f"{field}={path[:80]!r}{'...' if len(path) > 80 else ''}"
  if "\0" in path:
    raise ConfigError(f"{shown} holds a NUL byte; give the path of a file or folder")
  try:
    found = Path(path).expanduser()
    found.exists()
  except RuntimeError:  # pathlib's, for ~user
    raise ConfigError(f"{shown} names a user that this machine does not have") from None
  except OSError as error:
    raise ConfigError(f"{shown} cannot be used: {error.strerror}") from None
  return found
