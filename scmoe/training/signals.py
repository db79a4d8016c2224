"""Signals that ask a run to stop, and a watchdog for steps that never end.

SIGTERM, SIGHUP (the terminal hung up; ignored under nohup) and the first SIGINT ask the loop to
finish its step, save and exit 75; a second SIGINT does what it did before the run: as a rule, it
ends the process. With several processes SIGTERM belongs to jax: its preemption service agrees on
one poll of the loop at which all of them stop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from scmoe.base.errors import WATCHDOG_EXIT

_GRACE_SECONDS = 10.0  # faulthandler acts so many seconds later than the watchdog's own thread


class StopRequest:
  """A context whose signal handlers note that the run was asked to stop (`poll`).

  With several processes the handlers have jax tell all of them. They are installed only if the main
  thread enters the context: Python lets no other thread install handlers.
  """

  def __init__(self) -> None:
    self._asked = False
    self._polls = 0
    self._before: dict[int, Any] = {}
    self._several = jax.process_count() > 1

  def __enter__(self) -> StopRequest:
    # With several processes jax.distributed handles SIGTERM; our handler would disable that.
    mine = [signal.SIGINT] if self._several else [signal.SIGTERM, signal.SIGINT]
    mine += hangups()
    if threading.current_thread() is threading.main_thread():
      self._before = {number: signal.signal(number, self._handle) for number in mine}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def poll(self) -> bool:
    """True once the run should save and stop.

    With several processes all must poll equally often, in training and in evaluation. They get True
    at the same poll, whichever of them was asked.
    """
    if not self._several:
      return self._asked
    self._polls += 1
    if not self._asked:
      self._asked = multihost_utils.reached_preemption_sync_point(self._polls)
    return self._asked

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    # os.write instead of print, since the signal may have come in the middle of a print.
    text = f"\n{signal.Signals(number).name}: finishing this step, then saving and stopping\n"
    with contextlib.suppress(OSError):
      os.write(2, text.encode())
    if number == signal.SIGINT:
      # The handler from before this context is put back, which as a rule ends the process.
      signal.signal(signal.SIGINT, self._before[number])
    if self._several:
      os.kill(os.getpid(), signal.SIGTERM)  # jax tells all processes of the run that one got it
    else:
      self._asked = True


def hangups() -> list[signal.Signals]:
  """The signal of a terminal that hung up, as [SIGHUP]; [] where it is ignored, as under nohup."""
  return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


class Watchdog:
  """Ends the process if it was armed and neither armed again nor disarmed in time.

  It prints the stacks of all threads and exits with code 86. A context manager. A thread of its own
  does this, because the main thread does not return from a stuck collective. If even the
  interpreter is locked up, faulthandler's own thread, where it runs (`arm`), ends the process 10 s
  later, with code 1.
  """

  def __init__(self) -> None:
    self._deadline = 0.0  # a time of `time.monotonic`; 0: the watchdog is not armed
    self._armed_for = (0.0, "")
    self._changed = threading.Condition()
    self._closed = False

  def __enter__(self) -> Watchdog:
    threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self.disarm()
    with self._changed:
      self._closed = True
      self._changed.notify()

  def arm(self, seconds: float, what: str) -> None:
    """Gives `what` this many seconds from now, in place of any earlier limit; 0: no limit."""
    if not seconds:
      return self.disarm()
    with self._changed:
      self._deadline, self._armed_for = time.monotonic() + seconds, (seconds, what)
      self._changed.notify()
    # faulthandler refuses a stderr that is closed (None) or has no file descriptor; the
    # watchdog's own thread then acts alone.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):
      faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True)

  def disarm(self) -> None:
    """Takes the limit away until `arm` is called again."""
    with self._changed:
      self._deadline = 0.0
      self._changed.notify()
    faulthandler.cancel_dump_traceback_later()

  def _watch(self) -> None:
    while True:
      with self._changed:
        if self._closed:
          return
        left = self._deadline - time.monotonic() if self._deadline else None
        if left is None or left > 0:
          self._changed.wait(left)
          continue
        seconds, what = self._armed_for
      _end(seconds, what)


def _end(seconds: float, what: str) -> None:
  """Writes the reason and all threads' stacks to standard error; exits at once with code 86."""
  rank = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
  text = f"\n{rank}watchdog: {what} took longer than {seconds:g} s; the stacks of all threads:\n"
  with contextlib.suppress(OSError):
    os.write(2, text.encode())
  with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
  os._exit(WATCHDOG_EXIT)  # an exception would not reach a thread that is stuck in a collective
