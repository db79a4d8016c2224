"""Standard output and standard error, which may be closed, full, a closed pipe or ASCII only.

A command whose result is what it prints has to say when the text did not arrive. A training run
must go on: its record is metrics.jsonl, and its console lines may be lost. So `run_main` puts a
`GuardedStream` in place of both streams, and a training run makes its own optional (`optional`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Nobody will read this stream again: the reader is gone, the terminal hung up, or it was closed.
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)


class OutputError(Exception):
  """Standard output did not take a text that the command has to print.

  Attributes:
    reader_left: the other end of the pipe was closed, as in `... --help | head`.
  """

  def __init__(self, error: Exception):
    super().__init__(getattr(error, "strerror", None) or str(error))
    self.reader_left = isinstance(error, BrokenPipeError)


class GuardedStream:
  """A text stream that writes every character it can and fails in one way only.

  Characters that the stream's encoding lacks are written as escapes (`\\u2026` for an ellipsis). An
  optional stream drops what cannot be written; others raise `OutputError`. Everything else
  (`isatty`, `encoding`, ...) is that of the stream below.
  """

  def __init__(self, stream: TextIO, *, required: bool):
    self.stream, self.required = stream, required

  def write(self, text: str) -> int:
    """Writes a text; returns its length."""
    try:
      self.stream.write(text)
    except UnicodeEncodeError:
      encoding = self.stream.encoding or "ascii"
      return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except (OSError, ValueError) as error:  # ValueError: the stream was closed
      self._failed(error)
    return len(text)

  def writelines(self, lines: Any) -> None:
    """Writes several texts."""
    for line in lines:
      self.write(line)

  def flush(self) -> None:
    """Hands what was written to the operating system."""
    try:
      self.stream.flush()
    except (OSError, ValueError) as error:
      self._failed(error)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.stream, name)

  def _failed(self, error: OSError | ValueError) -> None:
    if self.required or getattr(error, "errno", None) in _GONE:
      discard(self.stream)
    if self.required:
      raise OutputError(error) from None


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """Guards both streams while a command runs: output is required, messages are optional."""
  keep_descriptors()
  before = sys.stdout, sys.stderr
  out, messages = (stream or open(os.devnull, "w") for stream in before)  # noqa: SIM115
  sys.stdout = GuardedStream(out, required=True)  # pyright: ignore
  sys.stderr = GuardedStream(messages, required=False)  # pyright: ignore
  try:
    yield
  finally:
    for stream in (out, messages):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()
        continue
      discard(stream)  # or the interpreter would try again at its end, and exit with 120
    sys.stdout, sys.stderr = before


@contextlib.contextmanager
def optional() -> Iterator[None]:
  """Inside, a text that cannot be printed is dropped: for a run that must go on."""
  before = sys.stdout
  inner = before.stream if isinstance(before, GuardedStream) else before
  sys.stdout = GuardedStream(inner or open(os.devnull, "w"), required=False)  # pyright: ignore # noqa: SIM115
  try:
    yield
  finally:
    sys.stdout.flush()
    sys.stdout = before


def say(text: str) -> None:
  """One line on standard output. Whether it can be written changes nothing."""
  with optional():
    print(text, flush=True)


def warn(text: str) -> None:
  """One line on standard error. Whether it can be written changes nothing."""
  if sys.stderr is not None:
    stream = GuardedStream(sys.stderr, required=False)
    stream.write(f"WARNING: {text}\n")
    stream.flush()


def keep_descriptors() -> None:
  """Opens descriptors 0, 1 and 2 on /dev/null where they were closed at the start.

  Otherwise the next file to be opened gets such a number, run.lock or metrics.jsonl for example,
  and XLA, which writes its messages to descriptor 2, would write them into that file.
  """
  for number in (0, 1, 2):
    try:
      os.fstat(number)
    except OSError:
      found = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
      if found != number:
        os.dup2(found, number)
        os.close(found)


def discard(stream: TextIO) -> None:
  """Lets everything that is still written to a stream go to /dev/null."""
  with contextlib.suppress(OSError, ValueError, AttributeError):
    target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, stream.fileno())
    os.close(target)
