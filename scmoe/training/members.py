"""The members of an elastic run, and the plan of who trains: small files in WORKDIR/elastic/.

Each process of the launcher is a member: a parent that runs the training command as a child
(`scmoe.training.elastic`). A member writes one file about itself, about every second and at each
change, and reads those of the others. It counts a member as alive while that member's file goes on
changing, by its own clock, and does not say that the member has ended: the clocks of two hosts are
never compared. Of the living members that may train in the next turn, the one with the lowest
number writes the plan.

Files are overwritten in place and not renamed: on NFS a host opens the current content of a file
that it knows, but may find the old file under a name for up to a minute. A half-written file that
is no JSON counts as unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scmoe.base.stored import StoredError, read_json

FOLDER = "elastic"
PLAN, AHEAD = "plan.json", "ahead.json"
WAITING, COUNTING, RUNNING, ENDED = "waiting", "counting", "running", "ended"
REGROUP, LEAVE = "regroup", "leave"
DEATHS = 2  # after so many deaths in a row a member's host counts as at fault
GONE_SECONDS = 3.0  # a member without its lock that wrote nothing for so long is gone; see `Others`
LATE_SECONDS = 2.0  # a look that comes more seconds after the one before was held up; see `Others`
_MOST_BYTES = 1 << 16


class Member(NamedTuple):
  """A member's description of itself, the content of its file.

  Attributes:
    number: the launcher's number of the process.
    token: differs between two processes that claim the same number.
    state: WAITING for a turn, COUNTING its devices after its command died, RUNNING its training
      command, or ENDED.
    turn: the last turn in which it ran the command; 0 if it has not yet.
    host: name or address at which other members reach it.
    devices: devices of its host that the command will use.
    asks: REGROUP: it has asked its command to save and stop, because members wait to join. LEAVE:
      it was told to stop, and leaves the others. "": neither.
    code: exit code, once ENDED.
    deaths: number of turns in a row in which its command died by itself, not by its watchdog
      or since another one had ended, without a checkpoint later than that of the death before.
    beat: counts the writes of the file.
  """

  number: int
  token: str
  state: str
  turn: int
  host: str
  devices: int
  asks: str = ""
  code: int = 0
  deaths: int = 0
  beat: int = 0

  @property
  def at_fault(self) -> bool:
    """True if `deaths` has reached `DEATHS`: its host may be at fault."""
    return self.deaths >= DEATHS


class Choice(NamedTuple):
  """The mesh for some processes: how many of them train, two axes' sizes, and a text for people."""

  processes: int
  data: int
  expert: int
  words: str


class Plan(NamedTuple):
  """The members that train in a turn, and their mesh.

  In ahead.json they are the members that compile for this mesh (`scmoe.training.ahead`).

  Attributes:
    turn: 1, 2, ... over all starts in this folder.
    members: numbers of the members that train. The first one is process 0 of the turn.
    tokens: theirs. A member that was started again since then has another one: it takes no part.
    coordinator: host:port of process 0.
    data, expert: sizes of these axes of the mesh.
    words: for people: the mesh, the number of its processes and of all, and, if the check refused
      meshes before it, why it refused the first of them.
  """

  turn: int = 0
  members: tuple[int, ...] = ()
  tokens: tuple[str, ...] = ()
  coordinator: str = ""
  data: int = 1
  expert: int = 1
  words: str = ""


_MEMBER = {"number": int, "token": str, "state": str, "turn": int, "host": str, "devices": int}
_MEMBER |= {"asks": str, "code": int, "deaths": int, "beat": int}
_PLAN = {"turn": int, "members": [int], "tokens": [str], "coordinator": str}
_PLAN |= {"data": int, "expert": int, "words": str}


def member_file(folder: Path, number: int) -> Path:
  """The file in which a member writes about itself."""
  return folder / f"member_{number}.json"


def read_member(folder: Path, number: int) -> Member | None:
  """Reads a member's file; None if it is missing, not whole or unreadable."""
  found = _read(member_file(folder, number), _MEMBER)
  return Member(**{name: found[name] for name in Member._fields}) if found else None


def read_plan(folder: Path, name: str = PLAN) -> Plan | None:
  """The plan in a file of the folder; None if it is missing, not whole or unreadable."""
  found = _read(folder / name, _PLAN)
  if not found:
    return None
  values = {name: found[name] for name in Plan._fields}
  values |= {name: tuple(found[name]) for name in ("members", "tokens")}
  if len(values["tokens"]) != len(values["members"]):
    return None
  return Plan(**values)


def write(path: Path, value: Member | Plan) -> None:
  """Overwrites a file in place. A write that fails raises nothing.

  Until it ends, a member writes its own file again about a second later. Nobody writes the same
  plan again.
  """
  data = json.dumps(value._asdict()).encode() + b"\n"
  with contextlib.suppress(OSError):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
      os.pwrite(file, data, 0)
      os.ftruncate(file, len(data))
    finally:
      os.close(file)


class Life:
  """The lock that a member's process holds on member_N.lock as long as it lives.

  The kernel releases it when the process dies, however it dies, so others need not wait until the
  member's file has been silent for long. If its host dies, the lock may stay.

  Args:
    folder: of the members' files.
    number: of the member.
  """

  def __init__(self, folder: Path, number: int):
    self._path, self._file = _lock_file(folder, number), -1

  def hold(self) -> None:
    """Takes the lock, unless this object has it; call it again later, since it may be in use.

    Whoever looks at the lock (`is_held`) has it for a moment. A file system without locks has none
    to take.
    """
    if self._file >= 0:
      return
    with contextlib.suppress(OSError):
      file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        os.close(file)
        raise
      self._file = file

  def release(self) -> None:
    """Gives the lock back, if this object has it."""
    if self._file >= 0:
      os.close(self._file)
      self._file = -1


def is_held(folder: Path, number: int) -> bool | None:
  """Whether a process holds a member's lock (`Life`), as far as this host can see.

  None if that cannot be told: there is no such file, or it cannot be opened or locked.
  """
  try:
    file = os.open(_lock_file(folder, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  except OSError:
    return None
  try:
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except OSError as error:
    return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
  finally:
    os.close(file)
  return False


def _lock_file(folder: Path, number: int) -> Path:
  return folder / f"member_{number}.lock"


def usable_of(members: Sequence[Member]) -> list[Member]:
  """The members that can train together: those with the commonest number of devices, in order.

  Of two numbers that are equally common, the larger one counts.
  """
  common = Counter(member.devices for member in members)
  devices = max(common, key=lambda number: (common[number], number))
  return [member for member in members if member.devices == devices]


class Others:
  """The other members as one member sees them.

  A file that was there before this object counts only once it changes: an earlier start in the
  same folder may have left it.

  A shared file system that stalls holds up the members' writes and this object's looks alike. So
  time between two looks counts as silence only up to `LATE_SECONDS`: the others need a chance to
  write once the file system answers again.

  A member whose process is dead is given up earlier: if its lock (`Life`) was seen held, is free
  now, and its file has not changed for `GONE_SECONDS`. The first condition keeps file systems out
  whose locks do not reach other hosts, the last one those that lose a lock.

  Args:
    folder: of the members' files.
    own: number of the member that looks.
    count: processes of the launcher.
    silent: seconds without a change after which a member is given up.
    clock: seconds, monotonic.
  """

  def __init__(self, folder: Path, own: int, count: int, silent: float, clock: Callable[[], float]):
    self._folder, self._silent, self._clock = folder, silent, clock
    self._numbers = [number for number in range(count) if number != own]
    self._left = {number: read_member(folder, number) for number in self._numbers}
    self._seen: dict[int, tuple[Member, float]] = {}
    # Tokens of the members whose lock was seen held, and the last words of those that are gone.
    self._locked: dict[int, str] = {}
    self._gone: dict[int, Member] = {}
    self._since = self._looked = clock()

  @property
  def seconds(self) -> float:
    """Seconds for which this object has watched, without those by which a look came late."""
    return self._clock() - self._since

  def look(self) -> None:
    """Reads the other members' files once, and tests their locks where that can tell something."""
    before = self._looked
    for number in self._numbers:
      member = read_member(self._folder, number)
      if member is None or member == self._left[number]:
        continue
      if number not in self._seen or self._seen[number][0] != member:
        self._seen[number] = member, self._clock()
        if self._locked.get(number) != member.token and is_held(self._folder, number):
          self._locked[number] = member.token
    self._looked = self._clock()
    if (late := self._looked - before - LATE_SECONDS) > 0:
      self._since += late
      self._seen = {n: (m, min(at + late, self._looked)) for n, (m, at) in self._seen.items()}
    for number, (member, at) in self._seen.items():
      quiet = self._looked - at > GONE_SECONDS and self._locked.get(number) == member.token
      if quiet and self._gone.get(number) != member and is_held(self._folder, number) is False:
        self._gone[number] = member

  def last(self, number: int) -> Member | None:
    """A member's newest description of itself, whether the member is alive or not.

    None if it has written nothing since this object began to watch.
    """
    return self._seen[number][0] if number in self._seen else None

  def is_gone(self, number: int) -> bool:
    """True if a member's process is dead: it has left its lock, and its file does not change."""
    return number in self._gone and self._gone[number] == self.last(number)

  def is_silent(self, number: int) -> bool:
    """True if a member is gone, or wrote nothing for so long that it is given up."""
    if self.is_gone(number):
      return True
    changed = self._seen[number][1] if number in self._seen else self._since
    return self._clock() - changed > self._silent

  def alive(self) -> list[Member]:
    """The members that have written, are not silent (`is_silent`) and have not ended, by number."""
    found = [self._seen[n][0] for n in sorted(self._seen) if not self.is_silent(n)]
    return [member for member in found if member.state != ENDED]


def _read(path: Path, shape: dict[str, Any]) -> dict[str, Any] | None:
  try:
    return read_json(path, shape, most=_MOST_BYTES)
  except (OSError, StoredError):
    return None
