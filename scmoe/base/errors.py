"""What a user may do wrong, and the exit code that says so.

Every error is one line: which field or file, what was got, what would do. Entry points print that
line to standard error and exit with `code`; a traceback means a defect of ours.

| code | meaning                                            |
|------|----------------------------------------------------|
| 0    | done                                               |
| 2    | configuration error                                |
| 3    | data error                                         |
| 4    | aborted: the loss or the gradients stay non-finite |
| 5    | no valid checkpoint                                |
| 6    | storage failure                                    |
| 75   | preempted and saved: run the same command again    |
| 86   | watchdog: a step or a collective is stuck          |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class ScmoeError(Exception):
  """An expected failure with a one-line message and a documented exit code."""

  code = 1


class ConfigError(ScmoeError):
  """A field of the configuration, or a command-line argument, cannot be used."""

  code = 2


class DataError(ScmoeError):
  """Data are missing, empty, too small or malformed."""

  code = 3


class NonFiniteError(ScmoeError):
  """Too many optimizer steps in a row had a non-finite loss or gradient."""

  code = 4


class CheckpointError(ScmoeError):
  """No checkpoint of the run can be used."""

  code = 5


class StorageError(ScmoeError):
  """Writing to disk failed again and again."""

  code = 6


class Preempted(ScmoeError):
  """The run was asked to stop, saved its state and can be continued."""

  code = 75


WATCHDOG_EXIT = (
  86  # the watchdog ends the process itself: no exception can leave a stuck collective
)


_BROKEN_PIPE = 141  # what a shell gives for SIGPIPE


def run_main(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
  """Runs an entry point; turns a `ScmoeError` into one line on standard error and its exit code."""
  try:
    main(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
  except ScmoeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    raise SystemExit(error.code) from None
  except BrokenPipeError:  # the reader has had enough, as in `... --help | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the end complain
    raise SystemExit(_BROKEN_PIPE) from None
