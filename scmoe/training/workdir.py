"""The directory of a run: who may write it, and how a file appears in it whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, StorageError

LOCK = "run.lock"
TOUCH_SECONDS = 30  # a living run shows itself so often
FOREIGN_STALE_SECONDS = 300  # silence after which a lock of another host counts as left behind


def warn(text: str) -> None:
  """One line on standard error; where that is a file on a full disk, training goes on without."""
  with contextlib.suppress(OSError):
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def prepare_workdir(path: str | os.PathLike[str]) -> Path:
  """Creates the directory of a run and shows that it can be written; returns it absolute.

  Raises:
    ConfigError: a file is in the way, or the name cannot be one.
    StorageError: it cannot be created or written.
  """
  text = os.fspath(path)
  if not text or "\0" in text or any(len(part) > 255 for part in Path(text).parts):
    raise ConfigError(f"workdir={text[:80]!r} is not a usable path; give a directory name")
  workdir = Path(text).expanduser().absolute()
  for place in (workdir, *workdir.parents):
    if place.exists() and not place.is_dir():
      raise ConfigError(f"workdir={workdir}: {place} is a file; give another directory")
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink(missing_ok=True)  # a process of another host may have the same number
  except OSError as error:
    raise StorageError(
      f"workdir={workdir} cannot be written ({error.strerror}); give another directory or free it"
    ) from None
  return workdir


def write_json(path: Path, value: Any) -> None:
  """Writes JSON so that readers see the old file or the new one, never a part."""
  partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
  partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
  os.replace(partial, path)


class RunLock:
  """Keeps a second run out of a directory. A context manager.

  The lock names process and host. One left by a process that is gone is broken with a warning; of
  another host we know only whether it still touches the file.
  """

  def __init__(self, workdir: Path):
    self._path = workdir / LOCK
    self._done = threading.Event()

  def __enter__(self) -> RunLock:
    for _ in range(3):
      try:
        handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
      except FileExistsError:
        self._break_if_stale()
        continue
      with os.fdopen(handle, "w") as file:
        json.dump(identity(os.getpid()), file)
      threading.Thread(target=self._touch, daemon=True).start()
      return self
    raise ConfigError(f"workdir: {self._path} appears again and again; is another run starting?")

  def __exit__(self, *_: object) -> None:
    self._done.set()
    self._path.unlink(missing_ok=True)

  def _touch(self) -> None:
    while not self._done.wait(TOUCH_SECONDS):
      try:
        os.utime(self._path)
      except OSError:
        return

  def _break_if_stale(self) -> None:
    owner, alive = _owner(self._path)
    if owner is None:
      return
    pid, host = owner.get("pid", 0), owner.get("host", "unknown")
    if alive:
      raise ConfigError(
        f"workdir={self._path.parent} is in use by process {pid} on {host}; give another "
        f"workdir, or stop that run (delete {self._path} only if it is gone)"
      )
    warn(f"breaking the lock that process {pid} on {host} left in {self._path.parent}")
    stale = self._path.with_name(f"{LOCK}.stale-{os.getpid()}")
    os.replace(self._path, stale)
    stale.unlink()


def owner_lives(path: Path) -> bool:
  """Whether a lock is there and held by a process that still runs."""
  return _owner(path)[1]


def _owner(path: Path) -> tuple[dict[str, Any] | None, bool]:
  """Who holds a lock, None if there is none, and whether that process still runs."""
  try:
    silent = time.time() - path.stat().st_mtime
    owner = json.loads(path.read_text() or "{}")
  except FileNotFoundError:
    return None, False
  except (ValueError, OSError):
    owner, silent = {}, FOREIGN_STALE_SECONDS + 1
  pid, host = owner.get("pid", 0), owner.get("host", "unknown")
  if host == socket.gethostname():
    return owner, pid != os.getpid() and pid > 0 and owner == identity(pid)
  return owner, silent < FOREIGN_STALE_SECONDS


def identity(pid: int) -> dict[str, Any]:
  """Process, host and, where /proc tells, the time the process started (ids are used again)."""
  try:
    started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
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
