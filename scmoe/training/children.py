"""Starts the training command of a member of an elastic run, and a quiet command beside it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_LEAST_URGENT = 19  # the lowest priority that `os.nice` gives
_MOST_CHARACTERS = 200  # of a reason


class Child(Protocol):
  """The training command: a `subprocess.Popen`, or a test's stand-in."""

  pid: int

  def poll(self) -> int | None:
    """The exit code, negative for a signal; None while the command runs."""
    ...

  def wait(self) -> int:
    """The exit code, once the command has ended."""
    ...

  def kill(self) -> None:
    """Ends the command at once."""
    ...

  def send_signal(self, sig: int, /) -> None:
    """Sends a signal to the command."""
    ...


def start_child(
  command: Sequence[str],
  variables: Mapping[str, str],
  *,
  urgent: bool = True,
  out: int | None = None,
  messages: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
  """Starts a command; on Linux the kernel ends it when this process dies.

  Args:
    command: program and arguments.
    variables: of the environment, in addition to this process's.
    urgent: False: it runs at the lowest priority.
    out, messages: its standard output and error, as for `subprocess.Popen`; None: this process's.
  """
  prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it

  def prepare() -> None:
    # Else this process's handler would swallow a SIGINT between fork and exec.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if prctl is not None:
      prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if not urgent:
      os.nice(_LEAST_URGENT)

  return subprocess.Popen(
    command, env=os.environ | dict(variables), preexec_fn=prepare, stdout=out, stderr=messages
  )


class QuietChild:
  """A command at the lowest priority whose output is not shown; `reason` says why it failed.

  Args:
    command: program and arguments.
    variables: of the environment, in addition to this process's.
  """

  def __init__(self, command: Sequence[str], variables: Mapping[str, str]):
    self._said = tempfile.TemporaryFile()  # noqa: SIM115
    self._process = start_child(
      command, variables, urgent=False, out=subprocess.DEVNULL, messages=self._said
    )

  def poll(self) -> int | None:
    """The exit code, negative for a signal; None while the command runs."""
    return self._process.poll()

  def end(self) -> None:
    """Ends the command at once, if it still runs."""
    self._process.kill()
    self._process.wait()
    self._said.close()

  def reason(self) -> str:
    """The last line that is not blank, cut to 200 characters, of the command's standard error.

    If there is none, or it cannot be read: "it ended with" and the exit code.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):
      self._said.seek(0)
      lines = self._said.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:_MOST_CHARACTERS] if said else f"it ended with {self.poll()}"


def free_port() -> int:
  """A port that is free on this host, for a command that starts soon and will listen on it."""
  with socket.socket() as probe:
    probe.bind(("", 0))
    return probe.getsockname()[1]
