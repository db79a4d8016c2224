"""Keeps the tracebacks of orbax and tensorstore off standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any


def quiet_libraries() -> None:
  """Keeps the tracebacks of orbax and tensorstore off standard error: ours are one-line warnings.

  orbax logs tracebacks, so the loggers `absl` and `asyncio` are set to critical errors only. When
  one of orbax's reads or writes fails, it closes its event loop. Every other read or write then
  raises in a tensorstore thread, and tensorstore passes the exception to `sys.unraisablehook`: over
  a hundred tracebacks for one full disk, which are dropped.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
    sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


class _WithoutClosedLoops:
  """A `sys.unraisablehook` that passes on all exceptions but "Event loop is closed"."""

  def __init__(self, hook: Callable[..., Any]):
    self._hook = hook

  def __call__(self, unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
      self._hook(unraisable)


def in_one_line(error: Exception) -> str:
  """The first 300 characters of an exception's text, on one line."""
  return " ".join(str(error).split())[:300]
