"""The directory of a run: creates it, checks that it can be written, keeps a second run out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, StorageError
from scmoe.base.output import warn
from scmoe.base.paths import with_home
from scmoe.base.stored import StoredError, read_json, write_probe

LOCK = "run.lock"
# A living run touches its lock file once in this time.
TOUCH_SECONDS = 30
# A lock of another host counts as left behind if it was not touched for this time.
FOREIGN_STALE_SECONDS = 300
_BUSY = (errno.EAGAIN, errno.EACCES)  # errors of flock if somebody else holds the lock
_LARGEST_PID = 2**31 - 1

# Open descriptors of all locks that this process holds or tries to take.
_descriptors: set[int] = set()


def prepare_workdir(path: str | os.PathLike[str], name: str = "workdir") -> Path:
  """Creates the directory of a run and checks that it can be written; returns it absolute.

  Args:
    path: of the directory.
    name: of the flag that gave it, for messages.

  Raises:
    ConfigError: a file is in the way, or `path` is no usable path.
    StorageError: it cannot be created or written; empty folders that were created are removed.
  """
  text = os.fspath(path)
  if not text or "\0" in text or any(len(part) > 255 for part in Path(text).parts):
    raise ConfigError(f"{name}={text[:80]!r} is not a usable path; give a directory name")
  workdir = with_home(text, f"{name}={text!r}").absolute()
  for place in (workdir, *workdir.parents):
    # In a folder that may not be searched nothing exists for `os.path`; `Path.exists` would raise.
    if os.path.exists(place) and not os.path.isdir(place):
      raise ConfigError(f"{name}={workdir}: {place} is a file; give another directory")
  missing = [place for place in (workdir, *workdir.parents) if not os.path.exists(place)]
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    write_probe(workdir)
  except OSError as error:
    for place in missing:  # the innermost folder first, since only empty ones can be removed
      with contextlib.suppress(OSError):
        place.rmdir()
    raise StorageError(
      f"{name}={workdir} cannot be written ({error.strerror}); give another directory or free it"
    ) from None
  return workdir


class RunLock:
  """Keeps a second run out of a directory. A context manager.

  It takes an OS lock (flock) on a file in the directory and, under the default name, on the
  directory itself. At most one process can hold an OS lock, and the kernel releases it when that
  process dies, however it dies. The lock file also names process and host: for messages, for file
  systems without OS locks, and for those whose locks do not reach other hosts. So the lock counts
  as held, too, if the file names another process that runs on this host, or one of another host
  that touched the file within `FOREIGN_STALE_SECONDS`.

  Args:
    workdir: exists.
    name: of the lock file; locks of different names do not keep each other out.
  """

  def __init__(self, workdir: Path, name: str = LOCK):
    self._path = workdir / name
    self._done = threading.Event()
    self._file = -1
    self._held: list[int] = []  # open descriptors of the files that this lock has locked

  def __enter__(self) -> RunLock:
    """Takes the lock.

    Raises:
      ConfigError: another process, or another `RunLock` of this one, holds it.
      StorageError: as `_take`; or the file cannot be written, and is removed.
    """
    try:
      self._take()
      self._refuse_named_owner()
      self._write_name()
    except BaseException:
      self._release()
      raise
    threading.Thread(target=self._touch, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._done.set()
    if _is_same_file(self._file, self._path):
      self._path.unlink(missing_ok=True)
    self._release()

  def _take(self) -> None:
    """Locks the lock file, and before it its directory if the file has the default name.

    On a file system without locks it goes on: without the file's lock it warns, without the
    directory's it says nothing.

    Raises:
      ConfigError: a lock that it takes is held already.
      StorageError: the directory cannot be opened, or the file cannot be opened for writing.
    """
    # If somebody deletes the lock file of a running process, the lock on the directory still holds.
    if self._path.name == LOCK:
      try:
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
      except OSError as error:
        raise StorageError(f"{self._path.parent} cannot be opened ({error.strerror})") from None
      self._hold(folder, warns=False)
    while True:
      try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(self._path, flags, 0o644)
      except OSError as error:
        raise StorageError(f"{self._path} cannot be written ({error.strerror})") from None
      self._hold(self._file, warns=True)
      # The lock's last holder may have deleted the file between our opening and locking it.
      if _is_same_file(self._file, self._path):
        return
      self._held.remove(self._file)
      _close(self._file)

  def _hold(self, descriptor: int, *, warns: bool) -> None:
    self._held.append(descriptor)
    _descriptors.add(descriptor)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in _BUSY:
        raise self._in_use(_owner(self._path)[0]) from None
      # A directory's lock may fail without a warning: NFS locks only files. If the file's fails, as
      # a rule the file system has no locks.
      if warns:
        warn(
          f"the file system of {self._path} has no locks ({error.strerror}): two runs that start "
          "there in the same moment are not kept apart"
        )

  def _refuse_named_owner(self) -> None:
    owner, alive = _owner(self._path)
    if alive:
      raise self._in_use(owner)
    if owner:
      warn(
        f"breaking the lock that process {owner['pid']} on {owner['host']} left in "
        f"{self._path.parent}"
      )

  def _in_use(self, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
    return ConfigError(
      f"workdir={self._path.parent} is in use by {who}; give another workdir, or stop that run"
    )

  def _write_name(self) -> None:
    text = json.dumps(identity(os.getpid())).encode()
    try:
      os.ftruncate(self._file, 0)
      if os.pwrite(self._file, text, 0) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
      self._path.unlink(missing_ok=True)
      raise StorageError(f"{self._path} cannot be written ({error.strerror})") from None

  def _release(self) -> None:
    for descriptor in self._held:
      _close(descriptor)
    self._held.clear()
    self._file = -1

  def _touch(self) -> None:
    while not self._done.wait(TOUCH_SECONDS):
      try:
        os.utime(self._file)
      except OSError:
        return


def owner_lives(path: Path) -> bool:
  """True if a lock file is there and the process that it names seems to run.

  A process of another host seems to run if the lock was touched less than `FOREIGN_STALE_SECONDS`
  ago. If the file names this process itself, the result is False.
  """
  return _owner(path)[1]


def _owner(path: Path) -> tuple[dict[str, Any], bool]:
  """(process, host and start that a lock file names, whether that process runs).

  The first is {} if no lock file can be read. A process of another host counts as running if the
  lock was touched less than `FOREIGN_STALE_SECONDS` ago; this process itself does not count.
  """
  try:
    silent = time.time() - path.stat().st_mtime
    owner = read_json(path, {"pid": int, "host": str}, most=4096)
  except (OSError, StoredError):  # e.g. there is none, or a full disk has cut off its text
    return {}, False
  pid = owner["pid"]
  if owner["host"] != socket.gethostname():
    return owner, silent < FOREIGN_STALE_SECONDS
  possible = 0 < pid <= _LARGEST_PID and pid != os.getpid()
  return owner, possible and owner == identity(pid)


def identity(pid: int) -> dict[str, Any]:
  """`pid`, `host` and `started` of a process of this host; its start time tells reused ids apart.

  If /proc does not give it, `started` is "alive" for a process that runs and "" for one that does
  not.
  """
  try:
    started = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[19]
  except (OSError, IndexError):
    started = "alive" if _alive(pid) else ""
  return {"pid": pid, "host": socket.gethostname(), "started": started}


def _alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


def _is_same_file(descriptor: int, path: Path) -> bool:
  with contextlib.suppress(OSError):
    return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
  return False


def _close(descriptor: int) -> None:
  _descriptors.discard(descriptor)
  with contextlib.suppress(OSError):
    os.close(descriptor)


def _close_in_child() -> None:
  """Closes the locks' files in a forked child, which else would hold the locks after the run."""
  for descriptor in list(_descriptors):
    _close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
