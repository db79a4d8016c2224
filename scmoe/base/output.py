"""Standard output and standard error that may be closed, full, a broken pipe or ASCII only.

A command whose result is its printed text must fail if the text cannot be written. A training run
must go on: its record is metrics.jsonl, and its console lines may be lost. So `run_main` replaces
both streams by a `GuardedStream`, and a training run wraps its prints in `optional`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Errors after which nobody reads the stream: its reader left, it was closed, its terminal hung up.
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)


class OutputError(Exception):
  """A command could not write its result to standard output.

  Attributes:
    reader_left: whether the reader closed the pipe, as in `... --help | head`.
  """

  def __init__(self, error: Exception):
    super().__init__(getattr(error, "strerror", None) or str(error))
    self.reader_left = isinstance(error, BrokenPipeError)


class GuardedStream:
  """A text stream whose only error is `OutputError`.

  It writes characters that the stream's encoding lacks as escapes (`\\u2026` for an ellipsis). If
  the stream cannot be written, a required stream raises `OutputError` and an optional one drops the
  text. Other attributes (`isatty`, `encoding`, ...) are those of the wrapped stream.
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
    """Hands the buffered text to the operating system."""
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
  """While a command runs: standard output is required, standard error is optional."""
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
      discard(stream)  # otherwise the interpreter flushes again at exit, fails, and returns 120
    sys.stdout, sys.stderr = before


@contextlib.contextmanager
def optional() -> Iterator[None]:
  """Inside this context, text that cannot be printed is dropped: for runs that must go on."""
  before = sys.stdout
  inner = before.stream if isinstance(before, GuardedStream) else before
  sys.stdout = GuardedStream(inner or open(os.devnull, "w"), required=False)  # pyright: ignore # noqa: SIM115
  try:
    yield
  finally:
    sys.stdout.flush()
    sys.stdout = before


def say(text: str) -> None:
  """Prints one line on standard output; drops it if it cannot be written."""
  with optional():
    print(text, flush=True)


def warn(text: str) -> None:
  """Prints one line on standard error; drops it if it cannot be written."""
  if sys.stderr is not None:
    stream = GuardedStream(sys.stderr, required=False)
    stream.write(f"WARNING: {text}\n")
    stream.flush()


def note(text: str) -> None:
  """Prints one line on standard error that asks for nothing; drops it if it cannot be written."""
  if sys.stderr is not None:
    stream = GuardedStream(sys.stderr, required=False)
    stream.write(f"NOTE: {text}\n")
    stream.flush()


def keep_descriptors() -> None:
  """Opens those of the descriptors 0, 1 and 2 on /dev/null that are closed.

  Otherwise the next file that is opened, say metrics.jsonl, would get descriptor 2, and XLA, which
  writes its messages to descriptor 2, would write them into that file.
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
  """Redirects a stream to /dev/null."""
  with contextlib.suppress(OSError, ValueError, AttributeError):
    target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, stream.fileno())
    os.close(target)
