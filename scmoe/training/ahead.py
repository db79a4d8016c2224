"""Compiles, beside an elastic run's training, the step for the mesh that the next loss would leave.

After a loss XLA compiles the step for the smaller mesh: on two H200s that took 31 of the 69 s until
one of them did a step alone (experiments/LOG.md). So once a turn trains, its first members, as many
as the smaller mesh needs, run the command of that next turn with `--compile_only`, on their devices
and at the lowest priority. This command has the next turn's program and numbers of processes and
devices, so jax keeps the program under the key that the next turn looks up. (A thread of the
training command could not do so: jax's key holds the topology of all processes that train.)

A compilation that fails costs a line at most; the next turn after a loss then compiles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from scmoe.base.errors import ConfigError
from scmoe.base.output import say, warn
from scmoe.training.children import free_port
from scmoe.training.members import AHEAD, Choice, Member, Plan, read_plan, write


class Quiet(Protocol):
  """The command that compiles: a `scmoe.training.children.QuietChild`, or a test's stand-in."""

  def poll(self) -> int | None:
    """The exit code, negative for a signal; None while the command runs."""
    ...

  def end(self) -> None:
    """Ends the command at once, if it still runs."""
    ...

  def reason(self) -> str:
    """The cause of its failure, in one line."""
    ...


class Compilation(NamedTuple):
  """How a member compiles ahead.

  Attributes:
    choose: (processes that are there, devices of each) -> the mesh; raises `ConfigError` if none
      fits, even with one process alone.
    trains: pid of the first member's command -> True once it has done a step.
    start: (plan, number of this process in it) -> the running command that compiles the plan's
      step; None: nothing is compiled ahead.
  """

  choose: Callable[[int, int], Choice]
  trains: Callable[[int], bool]
  start: Callable[[Plan, int], Quiet] | None


class Ahead:
  """The compilations of one member; `tick` begins them and takes in how they end.

  The first member of a turn chooses the mesh to compile for and writes it to
  WORKDIR/elastic/ahead.json, as a plan that nobody trains. The other members that this plan names
  read it there.

  Args:
    folder: WORKDIR/elastic.
    how: see `Compilation`.
    clock: seconds, monotonic.
  """

  def __init__(self, folder: Path, how: Compilation, clock: Callable[[], float] = time.monotonic):
    self._folder, self._how, self._clock = folder, how, clock
    self._child: Quiet | None = None
    self._plan, self._begun = Plan(), 0.0
    self._turn = 0  # the last turn for which nothing more is to be begun
    # Meshes, (processes, data, expert), for which this member has compiled, or with which it has
    # trained as the first member.
    self._known: set[tuple[int, int, int]] = set()

  def tick(self, plan: Plan, me: Member, pid: int, there: int) -> None:
    """Begins a compilation if one is due. Once it has ended, the first member says how.

    Args:
      plan: of the turn that trains.
      me: this member, one of the plan's.
      pid: of this member's training command.
      there: members that could train, those that wait included, those left out not.
    """
    if self._child is not None:
      self._look(self._child, me)
      return
    if self._how.start is None or self._turn == plan.turn:
      return
    if (found := self._due(plan, me, pid, there)) is not None:
      self._begin(found, me)

  def stop(self) -> None:
    """Ends the command that compiles, if there is one: the turn is over."""
    if self._child is not None:
      self._child.end()
      self._child = None

  def _due(self, plan: Plan, me: Member, pid: int, there: int) -> Plan | None:
    """The plan whose step this member has to compile now; None for nothing."""
    if me.number != plan.members[0]:
      found = read_plan(self._folder, AHEAD) if me.number in plan.members[:-1] else None
      mine = found is not None and found.turn == plan.turn and me.token in found.tokens
      return found if mine else None
    if not self._how.trains(pid):
      return None
    self._turn = plan.turn
    self._known.add((len(plan.members), plan.data, plan.expert))
    if there < 2:
      return None
    try:
      choice = self._how.choose(there - 1, me.devices)
    except ConfigError:  # no mesh fits
      return None
    if (choice.processes, choice.data, choice.expert) in self._known:
      return None
    if choice.processes > len(plan.members):  # members outside the turn compile nothing
      return None
    members, tokens = plan.members[: choice.processes], plan.tokens[: choice.processes]
    found = Plan(plan.turn, members, tokens, "", choice.data, choice.expert, choice.words[:1000])
    try:
      found = found._replace(coordinator=f"{me.host}:{free_port()}")
    except OSError as error:  # this process has too many open files, for example
      self._failed(error, found)
      return None
    write(self._folder / AHEAD, found)
    return found

  def _begin(self, plan: Plan, me: Member) -> None:
    assert self._how.start is not None
    self._turn, self._plan, self._begun = plan.turn, plan, self._clock()
    try:
      self._child = self._how.start(plan, plan.members.index(me.number))
    except OSError as error:  # e.g. no memory for another process, or no room for its lines
      self._failed(error, plan)

  def _look(self, child: Quiet, me: Member) -> None:
    if (code := child.poll()) is None:
      return
    plan, first = self._plan, me.number == self._plan.members[0]
    if code == 0:
      self._known.add((len(plan.members), plan.data, plan.expert))
      if first:
        seconds = self._clock() - self._begun
        say(f"elastic: compiled ahead in {seconds:.0f} s, should a process be lost: {plan.words}")
    elif first:
      self._failed(child.reason(), plan)
    with contextlib.suppress(OSError):
      child.end()
    self._child = None

  def _failed(self, why: str | OSError, plan: Plan) -> None:
    why = why.strerror or str(why) if isinstance(why, OSError) else why
    warn(f"elastic: not compiled ahead ({why}), so a loss will cost it: {plan.words}")
