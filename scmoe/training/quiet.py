"""One line for each error: no tracebacks of orbax and tensorstore, no line breaks in texts."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any


def quiet_libraries() -> None:
  """Keeps the tracebacks of orbax and tensorstore off standard error.

  scmoe's own warnings say in one line each what failed. orbax logs tracebacks, so the loggers
  `absl` and `asyncio` are set to critical errors only. When one of orbax's reads or writes fails,
  orbax closes its event loop. Others that are under way then raise in a tensorstore thread, or in a
  coroutine that Python closes unfinished as it exits. Both kinds of exceptions reach
  `sys.unraisablehook`, and the hook that this function installs drops them: one full disk or one
  damaged file could print over a hundred tracebacks. Coroutines of orbax that were never begun
  would cause a warning at the exit.
  """
  warnings.filterwarnings("ignore", r"coroutine 'async_serialize", RuntimeWarning)
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  if not isinstance(sys.unraisablehook, _WithoutAbandoned):
    sys.unraisablehook = _WithoutAbandoned(sys.unraisablehook)


class _WithoutAbandoned:
  """A `sys.unraisablehook` that drops exceptions of orbax's abandoned work, and passes on others.

  It drops each "Event loop is closed", and whatever a coroutine of orbax raises.
  """

  def __init__(self, hook: Callable[..., Any]):
    # While Python exits, names of this module may be None already; attributes are still there.
    self._hook, self._coroutine = hook, types.CoroutineType

  def __call__(self, unraisable: Any) -> None:
    error, thing = unraisable.exc_value, unraisable.object
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    abandoned = isinstance(thing, self._coroutine) and "orbax" in thing.cr_code.co_filename
    if not (closed or abandoned):
      self._hook(unraisable)


def in_one_line(error: Exception) -> str:
  """An exception's text with single spaces between its words, cut to 300 characters."""
  return " ".join(str(error).split())[:300]
