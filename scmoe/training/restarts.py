"""Starts a run again when it dies: `scmoe.train --restarts N`.

The command runs as a child of this process. If the child was killed, crashed, got stuck (exit code
86) or lost its peers, the command runs again while restarts are left. Exit codes that another start
would not mend are passed on (`FINAL`): done, wrong configuration or data, numbers that end a run
(not finite, or a spike), no valid checkpoint, a failure of storage, an elastic run without restarts
left, asked to stop, and 130: the user has interrupted the command (Ctrl-C) before it could save, or
again. After a start that wrote a later checkpoint, restarts are counted anew.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from scmoe.base.errors import GAVE_UP_EXIT, INTERRUPTED_EXIT, Preempted
from scmoe.base.output import warn
from scmoe.training.signals import hangups

# Exit codes after which the run is not started again; see `scmoe.base.errors` for their meaning. An
# elastic run goes on after 75 if its members regroup or one of them leaves.
FINAL = (0, 2, 3, 4, 5, 6, GAVE_UP_EXIT, 75, INTERRUPTED_EXIT)
# Most seconds that a restart is put off. Restarts in a row are put off for 1, 2, 4, ... seconds, an
# elastic run's for 0, 2, 4, ...
LONGEST_WAIT = 60.0
_LOOK_SECONDS = 0.2  # most seconds until a pause ends after a request to stop


def supervise(
  command: Sequence[str],
  restarts: int,
  progress: Callable[[], int],
  *,
  wait: Callable[[float], Any] | None = None,
) -> int:
  """Runs a command, again and again until it ends for good; returns its last exit code.

  It ends for good with a code of `FINAL`, after a request to stop, or when no restart is left. The
  code is 128 + N if signal N killed the command. A request to stop is SIGTERM or SIGHUP (unless
  nohup ignores it), which is passed on to the command, or SIGINT, for which the command gets
  SIGTERM: a terminal sends SIGINT to the command too, and a second one would end it unsaved. If the
  request comes before a start, none follows, and the code is 75: the newest checkpoint stays.

  Args:
    command: program and arguments.
    restarts: most restarts in a row without a later checkpoint.
    progress: returns the step of the newest checkpoint, 0 if there is none.
    wait: sleeps for the seconds that it is given; None: this function sleeps, and less if it is
      asked to stop.
  """
  child: subprocess.Popen[bytes] | None = None
  asked: list[int] = []  # numbers of the signals

  def pass_on(number: int, frame: Any) -> None:
    del frame
    asked.append(number)
    if child is not None:
      child.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

  def pause_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while not asked and (left := until - time.monotonic()) > 0:
      time.sleep(min(left, _LOOK_SECONDS))  # Python sleeps on after a signal

  numbers = (signal.SIGTERM, signal.SIGINT, *hangups())
  before = {number: signal.signal(number, pass_on) for number in numbers}
  used = 0
  try:
    while True:
      reached = progress()
      if asked:
        return Preempted.code
      child = subprocess.Popen(command)
      if asked:  # the signal may have come before this child was known
        child.terminate()
      code = child.wait()
      code = 128 - code if code < 0 else code
      if code == 128 + signal.SIGTERM and signal.SIGINT in asked:
        return INTERRUPTED_EXIT
      if code in FINAL or asked:
        return code
      used = 1 if progress() > reached else used + 1
      if used > restarts:
        warn(f"ended with {code} after {restarts} restarts without a new checkpoint; giving up")
        return code
      pause = min(2.0 ** (used - 1), LONGEST_WAIT)
      warn(f"the run ended with {code}; restart {used} of {restarts} in {pause:g} s")
      (wait or pause_for)(pause)
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
