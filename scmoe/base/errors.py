"""Expected failures: each has a class, a one-line message and an exit code.

Every message is one line that names the field or file, the value found, and a value that would
work. Entry points print that line to standard error and exit with `code`. A traceback means a bug
in scmoe.

| code | meaning                                            |
|------|----------------------------------------------------|
| 0    | done                                               |
| 2    | configuration error                                |
| 3    | data error                                         |
| 4    | aborted: numbers of the training are not finite    |
| 5    | no valid checkpoint                                |
| 6    | storage failure                                    |
| 7    | an elastic run has used up its restarts            |
| 69   | no device, or no other process, can be reached     |
| 75   | preempted and saved: run the same command again    |
| 86   | a step or a collective is stuck (the watchdog), or |
|      | another process of the run has ended               |
| 130  | interrupted (Ctrl-C) before it could save          |
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable

from scmoe.base.output import OutputError, guarded


class ScmoeError(Exception):
  """An expected failure with a one-line message and a documented exit code.

  Attributes:
    code: the exit code.
    at_once: end the process without Python's exit handlers.
  """

  code = 1
  at_once = False


class ConfigError(ScmoeError):
  """A field of the configuration, or a command-line argument, cannot be used."""

  code = 2


class DataError(ScmoeError):
  """Data are missing, empty, too small or malformed."""

  code = 3


class NonFiniteError(ScmoeError):
  """Too many optimizer steps in a row were skipped, one was a spike, or a state is not finite."""

  code = 4


class CheckpointError(ScmoeError):
  """No checkpoint of the run can be used."""

  code = 5


class StorageError(ScmoeError):
  """Writing to disk failed at every attempt."""

  code = 6


class Unavailable(ScmoeError):
  """No device is found, or the run's processes do not reach each other: now, maybe not later."""

  code = 69


class Preempted(ScmoeError):
  """The run was asked to stop, saved its state and can be continued."""

  code = 75


# The watchdog ends the process itself: Python raises no exception inside a stuck collective.
WATCHDOG_EXIT = 86


class PeerLost(ScmoeError):
  """Another process of the run has ended, or is not reached any more."""

  code = WATCHDOG_EXIT
  # jax's exit handler waits for the lost process until `distributed.heartbeat_seconds` are over,
  # and aborts then.
  at_once = True


# A parent process ends with it once no restart is left: `scmoe.training.elastic`.
GAVE_UP_EXIT = 7
# The status that a shell reports for a process ended by SIGINT.
INTERRUPTED_EXIT = 130
_READER_LEFT = 141  # the status that a shell reports for a process ended by SIGPIPE
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run_main(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
  """Runs an entry point; turns a `ScmoeError` into one line on standard error and its exit code.

  An error that ends the process `at_once` runs no exit handlers.

  If standard output cannot be written, the exit code is 6 (storage failure), or 141 if it is a
  pipe whose reader has closed it.
  """
  with guarded():
    try:
      main(sys.argv[1:] if argv is None else argv)
      sys.stdout.flush()
    except ScmoeError as error:
      print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
      if error.at_once:
        with contextlib.suppress(OutputError):
          sys.stdout.flush()
        os._exit(error.code)
      raise SystemExit(error.code) from None
    except OutputError as error:
      if error.reader_left:
        raise SystemExit(_READER_LEFT) from None
      print(f"StorageError: standard output cannot be written: {error}", file=sys.stderr)
      raise SystemExit(StorageError.code) from None
    except OSError as error:
      # The last resort: the disk filled up, or another program deleted files, at any moment.
      if error.filename is None and error.errno not in _STORAGE:
        raise
      print(f"StorageError: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
      raise SystemExit(StorageError.code) from None
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      raise SystemExit(INTERRUPTED_EXIT) from None
