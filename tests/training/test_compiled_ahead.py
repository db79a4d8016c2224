"""Steps that an elastic run compiles beside its training, and the lines about them."""

import sys
import time

import elastic_site
import pytest

from scmoe.base.errors import ConfigError
from scmoe.training.ahead import Ahead, Compilation
from scmoe.training.children import QuietChild
from scmoe.training.members import AHEAD, RUNNING, Choice, Member, Plan, read_plan

FOUR = Plan(3, (0, 1, 2, 3), ("a", "b", "c", "d"), "127.0.0.1:5", 8, 1, "words of four")


class FakeQuiet:
  """A compilation that the test ends."""

  def __init__(self, plan, index):
    self.plan, self.index = plan, index
    self.code, self.ended = None, False

  def poll(self):
    return self.code

  def end(self):
    self.ended = True

  def reason(self):
    return "out of memory"


class Site:
  """The members of a turn, of which those in `tokens` compile ahead."""

  def __init__(self, folder, *, mesh=lambda processes: processes, starts=True):
    self.folder, self.mesh, self.started = folder, mesh, []
    self.trains, self.now = True, 0.0
    how = Compilation(self.choose, lambda pid: self.trains, self.start if starts else None)
    self.members = [
      Member(number, token, RUNNING, 3, "127.0.0.1", 2) for number, token in enumerate("abcd")
    ]
    self.aheads = [Ahead(folder, how, lambda: self.now) for _ in self.members]

  def choose(self, processes, devices):
    used = self.mesh(processes)
    return Choice(used, used * devices, 1, f"words of {used}")

  def start(self, plan, index):
    self.started.append(FakeQuiet(plan, index))
    return self.started[-1]

  def tick(self, plan=FOUR, there=4):
    for number in plan.members:
      self.aheads[number].tick(plan, self.members[number], 1000, there)


def test_those_that_would_go_on_compile_what_they_would_run(tmp_path, capsys):
  site = Site(tmp_path)
  site.trains = False
  site.tick()
  assert not site.started, "the training compiles first, without competition"
  site.trains = True
  site.tick()
  assert [quiet.index for quiet in site.started] == [0, 1, 2]
  plan = site.started[0].plan
  assert {quiet.plan for quiet in site.started} == {plan, read_plan(tmp_path, AHEAD)}
  assert (plan.turn, plan.members, plan.tokens) == (3, (0, 1, 2), ("a", "b", "c"))
  assert (plan.data, plan.expert) == (6, 1)
  assert plan.coordinator.startswith("127.0.0.1:")
  assert plan.coordinator != FOUR.coordinator

  site.now = 31.0
  for quiet in site.started:
    quiet.code = 0
  site.tick()
  want = "elastic: compiled ahead in 31 s, should a process be lost: words of 3\n"
  assert capsys.readouterr().out == want, "one process says it"
  assert all(quiet.ended for quiet in site.started)
  site.tick()
  assert len(site.started) == 3


def test_no_step_is_compiled_twice(tmp_path):
  """After a loss the next smaller mesh is due; the process that comes back makes nothing due."""
  site = Site(tmp_path)
  site.tick()
  for quiet in site.started:
    quiet.code = 0
  site.tick()
  three = FOUR._replace(turn=4, members=(0, 1, 2), tokens=("a", "b", "c"), data=6)
  for _ in range(2):
    site.tick(three, there=3)
  assert [quiet.plan.members for quiet in site.started[3:]] == [(0, 1)] * 2
  for quiet in site.started:
    quiet.code = 0
  site.tick(three, there=3)
  site.tick(FOUR._replace(turn=5))
  assert len(site.started) == 5


def test_what_a_loss_interrupts_is_begun_again(tmp_path):
  site = Site(tmp_path)
  site.tick()
  for ahead in site.aheads:
    ahead.stop()
  assert all(quiet.ended for quiet in site.started)
  site.tick(FOUR._replace(turn=5))
  assert [quiet.plan.turn for quiet in site.started] == [3, 3, 3, 5, 5, 5]


def none_fits(processes):
  raise ConfigError("no mesh")


@pytest.mark.parametrize(
  ("mesh", "there", "starts"),
  [
    (none_fits, 4, True),
    # A process that waits takes the lost one's place, on the same mesh.
    (lambda processes: min(processes, 4), 5, True),
    (lambda processes: processes, 4, False),
    # Those that wait make the next turn's mesh larger than this turn's members.
    (lambda processes: processes, 6, True),
  ],
)
def test_nothing_is_due(tmp_path, capsys, mesh, there, starts):
  site = Site(tmp_path, mesh=mesh, starts=starts)
  for _ in range(2):
    site.tick(there=there)
  assert not site.started
  assert capsys.readouterr() == ("", "")


def test_a_run_of_one_process_can_lose_nobody(tmp_path):
  site = Site(tmp_path)
  site.tick(FOUR._replace(members=(0,), tokens=("a",), data=2), there=1)
  assert not site.started


def test_a_plan_of_another_turn_or_process_is_not_compiled(tmp_path):
  site = Site(tmp_path)
  site.tick()
  site.started.clear()
  member, later = Site(tmp_path).members[1], Site(tmp_path).aheads[1]
  later.tick(FOUR._replace(turn=4), member, 1, 4)
  later.tick(FOUR, member._replace(token="z"), 1, 4)
  later.tick(FOUR._replace(members=(2, 3)), member, 1, 4)
  assert not site.started


def test_a_failure_is_one_line(tmp_path, capsys):
  site = Site(tmp_path)
  site.tick()
  for quiet in site.started:
    quiet.code = 2
  for _ in range(3):
    site.tick()
  said = capsys.readouterr()
  want = "elastic: not compiled ahead (out of memory), so a loss will cost it: words of 3"
  assert (said.out, said.err) == ("", f"WARNING: {want}\n")
  assert len(site.started) == 3


def test_a_command_that_cannot_be_started_is_one_line(tmp_path, capsys, monkeypatch):
  site = Site(tmp_path)

  def refuses(plan, index):
    raise OSError(12, "Cannot allocate memory")

  how = Compilation(site.choose, lambda pid: True, refuses)
  ahead = Ahead(tmp_path, how, lambda: 0.0)
  for _ in range(3):
    ahead.tick(FOUR, site.members[0], 1, 4)
  assert capsys.readouterr().err.count("not compiled ahead (Cannot allocate memory)") == 1


def test_a_port_that_cannot_be_had_is_one_line(tmp_path, capsys, monkeypatch):
  """The training goes on although its member has no file descriptor left."""

  def refuses():
    raise OSError(24, "Too many open files")

  monkeypatch.setattr("scmoe.training.ahead.free_port", refuses)
  site = Site(tmp_path)
  for _ in range(3):
    site.tick()
  assert not site.started
  assert capsys.readouterr().err.count("(Too many open files), so a loss will cost it") == 1


def test_a_member_that_is_left_out_takes_nobodys_place(tmp_path):
  """After the next loss the others train without it, on the mesh that has to be compiled."""
  asked = []
  site = elastic_site.Site(tmp_path, restarts=5)
  for member in site.members.values():
    member.ahead.tick = lambda plan, me, pid, there: asked.append((len(plan.members), there))
  site.passes(2)
  for _ in range(2):
    site.end(1, 3)
    site.passes(20)
  assert site.training == [0, 1, 2]
  assert 3 in site.members
  assert asked[0] == (4, 4)
  assert asked[-1] == (3, 3)


def test_the_command_is_quiet_and_yields_the_cores(capfd, monkeypatch):
  script = "import os, sys; print('much'); print(os.nice(0), os.environ['A'], file=sys.stderr)"
  child = QuietChild([sys.executable, "-c", script], {"A": "b"})
  end = time.monotonic() + 30
  while child.poll() is None:
    assert time.monotonic() < end
    time.sleep(0.01)
  assert child.reason() == "19 b"
  child.end()
  assert capfd.readouterr() == ("", "")
  silent = QuietChild([sys.executable, "-c", "import time; time.sleep(60)"], {})
  silent.end()
  assert silent.poll() == -9
  assert silent.reason() == "it ended with -9"
