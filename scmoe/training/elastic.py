"""Trains on with the processes that are left: `scmoe.train --restarts N --elastic`.

Each process of the launcher is a member: a `Supervisor` that runs the training command as its
child. A turn is a time in which the same members train together. If a member falls silent or its
child dies, the other children end or are ended. While restarts are left, the next turn then begins
from the newest checkpoint, on the largest mesh that fits the members that are there, without those
that have another than the commonest number of devices, and without one whose host seems at fault if
a mesh fits the others (`Supervisor._chosen_from`). If another member comes back, or comes late, and
the mesh would be larger with it, the first member's child is asked to stop: all children save the
same step and exit with 75, and a turn with that member begins.

Why the children end: a collective whose peer has died mostly does not return with gloo, even with
jax's recoverable tasks (experiments/LOG.md), and process 0's death ends jax's coordination service.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scmoe.base.errors import (
  GAVE_UP_EXIT,
  INTERRUPTED_EXIT,
  WATCHDOG_EXIT,
  ConfigError,
  Preempted,
  Unavailable,
)
from scmoe.base.output import warn
from scmoe.training.ahead import Ahead, Compilation, Quiet
from scmoe.training.children import Child, free_port
from scmoe.training.members import (
  COUNTING,
  DEATHS,
  ENDED,
  LEAVE,
  REGROUP,
  RUNNING,
  WAITING,
  Choice,
  Life,
  Member,
  Others,
  Plan,
  member_file,
  read_member,
  read_plan,
  usable_of,
  write,
)
from scmoe.training.members import PLAN as PLAN_FILE
from scmoe.training.restarts import FINAL, LONGEST_WAIT
from scmoe.training.signals import hangups
from scmoe.training.workdir import FOREIGN_STALE_SECONDS

# A member that writes nothing for so long is given up; after `distributed.heartbeat_seconds`, if
# those are fewer.
SILENT_SECONDS = 15.0
FIRST_SECONDS = 300.0  # a start's first turn waits at most so long for all members, as jax does
_TICK_SECONDS = 0.25
_BEAT_SECONDS = 1.0
# For a child to end by itself after a peer's child has died, after the peer was started again, or
# after it ended before the turn began.
_PEER_SECONDS = 3.0
# The same after a peer has ended for good with another code than 0: as a rule, all members of a
# turn do so together.
_ENDED_SECONDS = 60.0


class Launch(NamedTuple):
  """How a supervisor runs its command.

  Attributes:
    choose: (processes that are there, devices of each) -> `Choice`; raises `ConfigError` if no mesh
      fits, even with one process alone, and `DataError` if the tokenizer cannot be read.
    start: (plan, number of this process in the turn) -> the running command.
    trains: pid of the first member's command -> True once it has done a step.
    progress: returns the step of the newest checkpoint, 0 if there is none.
    release: removes the run's lock file, whose owner has ended or was given up.
    held: returns True while the process that the run's lock file names may live.
    count: begins to count this host's devices; returns a function that gives None while they are
      being counted, and then their number.
    compile: (plan, number of this process in it) -> a command beside the training that compiles
      the plan's step; None: nothing is compiled ahead (`scmoe.training.ahead`).
  """

  choose: Callable[[int, int], Choice]
  start: Callable[[Plan, int], Child]
  trains: Callable[[int], bool]
  progress: Callable[[], int]
  release: Callable[[], None]
  held: Callable[[], bool]
  count: Callable[[], Callable[[], int | None]]
  compile: Callable[[Plan, int], Quiet] | None = None


class Supervisor:
  """One member. `tick` takes the actions that are due; it returns an exit code at the end.

  Args:
    folder: WORKDIR/elastic, which exists and which all members share.
    number, count: the launcher's number of this process, and how many there are.
    host: name or address at which the other members reach this host.
    devices: devices that the command will find here.
    launch: how the command is run.
    restarts: most restarts in a row without a later checkpoint.
    silent: seconds after which a silent member is given up.
    clock: seconds, monotonic.
  """

  def __init__(
    self,
    folder: Path,
    number: int,
    count: int,
    *,
    host: str,
    devices: int,
    launch: Launch,
    restarts: int,
    silent: float = SILENT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.folder, self.number, self.count = folder, number, count
    self.launch, self.restarts, self.silent, self.clock = launch, restarts, silent, clock
    self.asked = False  # whether this process was told to stop
    self._interrupted = False  # whether SIGINT came while its command ran
    self.child: Child | None = None
    self.plan = Plan()
    self.latest = read_plan(folder) or Plan()
    # The plan that was there when this member started; later the last one that it has begun. Only
    # another plan begins a turn.
    self._left = self.latest
    self.me = Member(number, secrets.token_hex(8), WAITING, 0, host, devices)
    self.others = Others(folder, number, count, silent, clock)
    how = Compilation(launch.choose, launch.trains, launch.compile)
    self.ahead = Ahead(folder, how, clock)
    self._written = -_BEAT_SECONDS
    self._resumes_at = 0.0
    self._used = self._died_at = 0  # restarts in a row; step of the checkpoint at the last one
    self._trouble = ("", 0.0)
    self._count: Callable[[], int | None] | None = None
    self._waits_for_lock = False

  def tick(self) -> int | None:
    """Tells the others about this member, looks at them, and acts.

    Raises:
      ConfigError: another process has this member's number, or no mesh fits.
      OSError: the command cannot be started, no port can be bound for the turn, the run's lock file
        cannot be removed, or the folder of checkpoints cannot be listed.
      DataError: as `Launch.choose`.
    """
    self._tell()
    self.others.look()
    found = read_plan(self.folder)
    # Two members that did not see each other may plan the same turn. The later plan counts.
    if found is not None and found.turn >= self.latest.turn:
      self.latest = found
    code = self._wait() if self.child is None else self._watch(self.child)
    if self.child is None:
      self.ahead.stop()
    if code is not None:
      self.tell(state=ENDED, code=code)
    return code

  def interrupt(self) -> None:
    """Ctrl-C: the command saves and ends, and the run with it; a waiting member leaves.

    The command gets SIGTERM, since a terminal sends it SIGINT too, and a second SIGINT would end it
    unsaved.
    """
    if self.child is None:
      self.asked = True
    else:
      self._interrupted = True
      self.child.send_signal(signal.SIGTERM)

  def tell(self, **changes: Any) -> None:
    """Changes this member's description of itself and writes it at once."""
    self.me = self.me._replace(**changes, beat=self.me.beat + 1)
    write(member_file(self.folder, self.number), self.me)
    self._written = self.clock()

  def _tell(self) -> None:
    if self.clock() - self._written < _BEAT_SECONDS:
      return
    found = read_member(self.folder, self.number)
    if self.me.beat and found is not None and found.token != self.me.token:
      raise ConfigError(
        f"another process is number {self.number} of this run in {self.folder.parent}; give each "
        "its own SCMOE_PROCESS_ID"
      )
    self.tell()

  # -- between two turns ------------------------------------------------------------------------

  def _wait(self) -> int | None:
    """Begins the turn that is planned, if this member is in it.

    If a turn is due, the first of the members chosen for it (`_chosen_from`) plans it.

    Returns:
      the member's exit code if it was told to stop, the run has ended, or this host has no devices
      any more; else None.

    Raises:
      ConfigError: this member plans the turn, and no mesh fits.
      DataError, OSError: as `tick`.
    """
    if self.asked:
      self.tell(asks=LEAVE)  # else the others would take 75 for the end of the run
      return Preempted.code
    if (code := self._ended_for_good()) is not None:
      return code
    if self._count is not None:
      devices = self._count()
      if devices is None and not self._lost_peer():
        return None
      self._count = None
      if devices == 0:
        return Unavailable.code
      self.tell(state=WAITING, devices=devices or self.me.devices)
    alive = sorted([self.me, *self.others.alive()])
    if self._chosen_from(alive)[0].number == self.number and self._may_plan(alive):
      self._write_plan(alive)
    if self.latest != self._left and self.me.token in self.latest.tokens:
      self._begin()
    return None

  def _lost_peer(self) -> bool:
    """True if another member of the last turn is silent: its loss may have ended the command."""
    return any(self.others.is_silent(n) for n in self.plan.members if n != self.number)

  def _ended_for_good(self) -> int | None:
    """The exit code with which a member of the last turn has ended the run; None if it goes on."""
    for number in self.latest.members:
      member = self.others.last(number) if number != self.number else None
      if member is None or member.state != ENDED or member.turn != self.latest.turn:
        continue
      if member.code in FINAL and member.asks != LEAVE:
        return member.code
    return None

  def _may_plan(self, alive: Sequence[Member]) -> bool:
    """True if a turn may be planned now.

    That is so if no living member runs its command or counts its devices, the pause before this
    member's restart is over, no member is missing or all had time to show that they live (as they
    had if this member has trained), and, at a new start, the lock of the start before is free or
    had time to become stale.
    """
    busy = any(member.state in (RUNNING, COUNTING) for member in alive)
    if busy or self.clock() < self._resumes_at:
      return False
    if not any(member.turn for member in alive) and self._locked_out():
      return False
    if len(alive) == self.count or self.me.turn:
      return True
    trained = any(member.turn for member in alive)
    return self.others.seconds > (self.silent if trained else FIRST_SECONDS)

  def _locked_out(self) -> bool:
    """True while an earlier start's lock may keep a new start's first command out of the folder.

    That command would end with 2, and the run with it. A killed process of another host seems to
    hold its lock for `FOREIGN_STALE_SECONDS`, so this member waits as long. A lock that is held
    after that belongs to a run that lives: then the command has to end with 2.
    """
    if self.others.seconds > FOREIGN_STALE_SECONDS or not self.launch.held():
      return False
    if not self._waits_for_lock:
      self._waits_for_lock = True
      warn(f"elastic: waiting up to {FOREIGN_STALE_SECONDS} s for the lock of an earlier start")
    return True

  def _chosen_from(self, alive: Sequence[Member]) -> list[Member]:
    """The members for the next turn, of which the first one plans it; a mesh may use fewer.

    Those are the members with the commonest number of devices (`usable_of`). If one of them has a
    host at fault, by `Member.at_fault`, it is left out if a mesh fits the others. If several seem
    at fault, nobody is left out: the death of one command may have ended the others'.
    """
    usable = usable_of(alive)
    rest = [member for member in usable if not member.at_fault]
    if rest and len(rest) == len(usable) - 1:
      with contextlib.suppress(ConfigError):
        self.launch.choose(len(rest), rest[0].devices)
        return rest
    return usable

  def _write_plan(self, alive: Sequence[Member]) -> None:
    able = self._chosen_from(alive)
    try:
      choice = self.launch.choose(len(able), self.me.devices)
    except ConfigError as error:
      self.tell(state=ENDED, code=error.code)
      raise
    chosen = tuple(member.number for member in able[: choice.processes])
    tokens = tuple(member.token for member in able[: choice.processes])
    if self.latest.turn and any(member.turn for member in alive):
      self.launch.release()
    host, port = self.me.host, free_port()
    turn = 1 + max(self.latest.turn, *(member.turn for member in alive))
    self.latest = Plan(
      turn, chosen, tokens, f"{host}:{port}", choice.data, choice.expert, choice.words[:1000]
    )
    write(self.folder / PLAN_FILE, self.latest)
    absent = [str(n) for n in range(self.count) if n not in chosen]
    without = f" without {', '.join(absent)}" if absent else ""
    odd = [f"{m.number} has {m.devices}" for m in alive if m.devices != self.me.devices]
    why = f"; every process needs {self.me.devices} devices: {', '.join(odd)}" if odd else ""
    if out := [m.number for m in usable_of(alive) if m not in able]:
      why += f"; process {out[0]} is left out: its training died in {DEATHS} turns running"
    names = ", ".join(map(str, chosen))
    warn(f"elastic: turn {turn} begins with process {names}{without}: {choice.words}{why}")

  def _begin(self) -> None:
    self.plan, self._left, self._trouble = self.latest, self.latest, ("", 0.0)
    self.child = self.launch.start(self.plan, self.plan.members.index(self.number))
    self.tell(state=RUNNING, turn=self.plan.turn, asks="")

  # -- during and after a turn ---------------------------------------------------------------------

  def _watch(self, child: Child) -> int | None:
    """Looks after the running command: ends it if it cannot go on, or asks it to save and stop.

    It asks if this member was told to stop, or if this is the turn's first member, the command has
    done a step, and the mesh would be larger with waiting members. Once this member was told to
    stop, or interrupted, it only waits for the command's end. While nothing was asked and the
    command can go on, the member compiles ahead (`Ahead`).

    Returns:
      the member's exit code if the command has ended and no turn follows; else None.
    """
    code = child.poll()
    if code is not None:
      return self._ended(128 - code if code < 0 else code)
    if self._interrupted:
      return None
    if self.asked:
      if self.me.asks != LEAVE:
        self.tell(asks=LEAVE)
        child.send_signal(signal.SIGTERM)
      return None
    why, patience = self._problem()
    if why != self._trouble[0]:
      self._trouble = why, self.clock()
    if why and self.clock() - self._trouble[1] >= patience:
      child.kill()
      child.wait()
      return self._died(why)
    if not why and not self.me.asks and self._newcomers() and self.launch.trains(child.pid):
      warn("elastic: a process has come back: saving, to go on with it")
      self.tell(asks=REGROUP)
      child.send_signal(signal.SIGTERM)
    if not why and not self.me.asks:
      there = self._chosen_from(sorted([self.me, *self.others.alive()]))
      self.ahead.tick(self.plan, self.me, child.pid, len(there))
    return None

  def _problem(self) -> tuple[str, float]:
    """The reason why the command cannot go on, and the seconds that it has to end by itself.

    The reason is "" if it can go on.
    """
    if self.latest != self.plan:
      return "another turn was planned", 0.0
    peers = {n: self.others.last(n) for n in self.plan.members if n != self.number}
    for number, member in peers.items():
      if self.others.is_silent(number) and not (member and member.state == ENDED):
        return f"process {number} is {'gone' if self.others.is_gone(number) else 'silent'}", 0.0
    tokens = dict(zip(self.plan.members, self.plan.tokens, strict=True))
    for number, member in peers.items():
      if member is not None and member.token != tokens[number]:
        return f"process {number} was started again", _PEER_SECONDS
      if member is not None and member.state == ENDED and member.turn != self.plan.turn:
        return f"process {number} ended before the turn began", _PEER_SECONDS
      if member is not None and member.turn == self.plan.turn:
        if member.state in (WAITING, COUNTING) and not member.asks:
          return f"the training of process {number} died", _PEER_SECONDS
        if member.state == ENDED and member.code:
          return f"process {number} ended with {member.code}", _ENDED_SECONDS
    return "", 0.0

  def _newcomers(self) -> bool:
    """True if this is the turn's first member and waiting members would make the mesh larger."""
    if self.number != self.plan.members[0]:
      return False
    alive = self.others.alive()
    fit = [m for m in alive if m.number not in self.plan.members and m.state == WAITING]
    fit = [m for m in fit if m.devices == self.me.devices and not m.at_fault]
    here = len(self.plan.members)
    return bool(fit) and self.launch.choose(here + len(fit), self.me.devices).processes > here

  def _ended(self, code: int) -> int | None:
    """This member's exit code if its command has ended for good; None if a turn follows.

    It is `GAVE_UP_EXIT` if the command died and no restart is left.
    """
    if code in FINAL and code != Preempted.code:
      return code
    if self._interrupted:  # and the run ends for all: this member does not say that it leaves
      return code if code == Preempted.code else INTERRUPTED_EXIT
    if self.asked:
      self.tell(asks=LEAVE)
      # The signal ends a command that has not begun to train: nothing is lost.
      return Preempted.code if code == 128 + signal.SIGTERM else code
    if code != Preempted.code:
      # A command ends so if its collective is stuck or breaks off, most likely by another host's
      # fault.
      own = code != WATCHDOG_EXIT
      return self._died(f"the training ended with {code}", counts=True, own=own)
    last = [self.me, *(self.others.last(number) for number in self.plan.members)]
    if not any(m is not None and m.turn == self.plan.turn and m.asks for m in last):
      return code  # somebody stopped the command itself, or `train.stop_after` did
    self.child = None
    self.tell(state=WAITING, deaths=0)
    return None

  def _died(self, why: str, *, counts: bool = False, own: bool = False) -> int | None:
    """Notes a restart; returns the exit code for a run that gave up if none is left.

    Args:
      why: for people.
      counts: whether a device may have failed, so that this host's devices are counted again.
      own: whether the command ended by itself, and maybe because of this host.
    """
    self.child = None
    step = self.launch.progress()
    self._used = 1 if step > self._died_at else self._used + 1
    before = self.me.deaths if step == self._died_at else 0
    deaths = before + 1 if own else 0
    self._died_at = step
    if self._used > self.restarts:
      warn(f"elastic: {why}, after {self.restarts} restarts without a new checkpoint; giving up")
      return GAVE_UP_EXIT
    pause = 0.0 if self._used == 1 else min(2.0 ** (self._used - 1), LONGEST_WAIT)
    self._resumes_at = self.clock() + pause
    warn(f"elastic: {why}; restart {self._used} of {self.restarts}")
    self._count = self.launch.count() if counts else None
    # A request to save died with the command: the peers must see that.
    self.tell(state=COUNTING if counts else WAITING, asks="", deaths=deaths)
    return None


def supervise(member: Supervisor) -> int:
  """Runs a member until it is done; returns its exit code. The main thread has to call it.

  SIGTERM and SIGHUP (unless nohup ignores it) make this member leave; if it trains, all members of
  the turn save first. The others go on without it if a mesh fits them, unless they were told to
  stop as well. SIGINT ends the run of all members, as it does if a terminal sends it to the command
  itself; while this member waits for a turn, it makes this member leave.

  Raises:
    ConfigError, DataError, OSError: as `Supervisor.tick`.
  """

  def ask(number: int, frame: Any) -> None:
    del number, frame
    member.asked = True

  before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, *hangups())}
  before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: member.interrupt())
  life = Life(member.folder, member.number)
  try:
    while True:
      life.hold()
      if (code := member.tick()) is not None:
        return code
      time.sleep(_TICK_SECONDS)
  finally:
    life.release()
    member.ahead.stop()
    if member.child is not None:
      member.child.kill()
    for number, handler in before.items():
      signal.signal(number, handler)
