"""Arms of a comparison as processes of their own, which a driver asks one by one.

A worker prints what it has to say as JSON behind `MARK`, once when it is ready and then for each
line that it is sent; everything else that it prints is passed on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "> "


def say(value: Any) -> None:
  """In a worker: an answer, JSON-able."""
  print(MARK + json.dumps(value), flush=True)


class Silent(Exception):
  """A worker ended, or said nothing for too long."""


class Worker:
  """A process that answers.

  Args:
    name: in what is said of it.
    command: for this Python.
    folder: in which it runs.
    variables: of its environment, beside this process's.
    log: file for what it writes to stderr; None: where this process writes it.
    patience: seconds for one answer; None: for ever.
  """

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    *,
    folder: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
    log: Path | None = None,
    patience: float | None = None,
  ):
    self.name, self.log, self.patience = name, log, patience
    # Each takes what it needs: the workers share the GPUs' memory.
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(variables or {})
    with log.open("w") if log else contextlib.nullcontext() as errors:
      self.process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
      )
    self._said: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=self._listen, daemon=True).start()

  def answer(self) -> Any:
    """The next line that it prints.

    Raises:
      Silent: nothing; it is ended then.
    """
    try:
      said = self._said.get(timeout=self.patience)
    except queue.Empty:
      said = None
    if said is None:
      self.end()
      if self.log is None:
        raise Silent(f"{self.name}: ended, or silent for too long; what it wrote stands above")
      last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
      raise Silent(f"{self.name}: left out; the last line of {self.log}: {' '.join(last)}")
    return json.loads(said)

  def ask(self, line: str) -> Any:
    """Its answer to a line; raises as `answer`."""
    assert self.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `answer` says so
      self.process.stdin.write(line + "\n")
      self.process.stdin.flush()
    return self.answer()

  def end(self) -> None:
    """Kills it."""
    self.process.kill()
    self.process.wait()

  def _listen(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      if line.startswith(MARK):
        self._said.put(line[len(MARK) :])
      else:
        print(f"{self.name}: {line}", end="", flush=True)
    self._said.put(None)
