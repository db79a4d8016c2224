"""Elastic runs: who trains when a process is lost, comes back, leaves or ends."""

import os
import signal

import pytest
from elastic_site import SILENT, FakeChild, Site

from scmoe.base.errors import ConfigError
from scmoe.training.elastic import FIRST_SECONDS, supervise
from scmoe.training.members import (
  ENDED,
  LEAVE,
  PLAN,
  REGROUP,
  WAITING,
  Member,
  Others,
  Plan,
  member_file,
  read_member,
  read_plan,
  write,
)
from scmoe.training.workdir import FOREIGN_STALE_SECONDS


@pytest.fixture
def site(tmp_path):
  site = Site(tmp_path)
  site.passes(3)
  return site


def test_all_begin_together(site):
  assert site.training == [0, 1, 2, 3]
  plan = read_plan(site.folder)
  assert (plan.turn, plan.members, plan.data) == (1, (0, 1, 2, 3), 8)
  assert plan.coordinator.startswith("127.0.0.1:")
  assert [site.members[n].child.index for n in range(4)] == [0, 1, 2, 3]
  assert not site.released


def test_the_first_turn_waits_for_all(tmp_path):
  site = Site(tmp_path, 3)
  site.lose(2)
  site.passes(FIRST_SECONDS - 2)
  assert not site.training
  site.passes(5)
  assert read_plan(tmp_path).members == (0, 1)


@pytest.mark.parametrize("victim", [0, 3])
def test_the_others_go_on_without_a_silent_one_and_take_it_back(site, capsys, victim):
  rest = [n for n in range(4) if n != victim]
  site.lose(victim)
  site.passes(SILENT - 3)
  assert site.turn == 1
  site.passes(5)
  assert site.training == rest
  assert site.turn == 2
  assert [site.members[n].child.index for n in rest] == [0, 1, 2], "numbers without a gap"
  assert site.released == 1, "the lock of the lost process 0 must not keep the next turn out"
  said = capsys.readouterr().err
  assert f"process {victim} is silent; restart 1 of 2" in said
  assert f"turn 2 begins with process {', '.join(map(str, rest))} without {victim}: words" in said

  site.start(victim)
  site.passes(4)
  first = site.members[rest[0]].child
  assert first.signals == [signal.SIGTERM], "saves before the mesh changes"
  assert all(not site.members[n].child.signals for n in rest[1:]), "jax passes it on"
  site.end(75)
  site.passes(3)
  assert sorted(site.training) == [0, 1, 2, 3]
  assert site.turn == 3
  assert not site.codes


def test_a_command_that_dies_costs_the_others_theirs(site):
  """Its supervisor lives, so that the next turn has all members, without waiting for silence."""
  site.end(-9, 2)
  site.passes(8)
  assert site.turn == 2
  assert site.training == [0, 1, 2, 3]


def test_restarts_without_progress_end_it(site, capsys):
  for _ in range(2):
    site.end(1)
    site.passes(8)
  assert site.turn == 3
  site.end(134)
  site.passes(4)
  assert site.codes == dict.fromkeys(range(4), 7)
  assert "after 2 restarts without a new checkpoint; giving up" in capsys.readouterr().err


def test_what_another_start_may_mend_ends_nobody(site):
  """69: the command found no devices or no peers."""
  site.end(69, 1)
  site.passes(8)
  assert site.training == [0, 1, 2, 3]
  assert site.turn == 2


def test_one_that_gives_up_ends_those_that_joined_later(site):
  site.end(1)
  site.passes(4)
  site.lose(3)
  site.start(3)
  site.passes(8)
  site.end(1)
  site.passes(70)
  assert site.codes == dict.fromkeys(range(4), 7)


def test_progress_gives_the_restarts_back(site):
  for _ in range(5):
    site.step += 1
    site.end(1)
    site.passes(4)
  assert site.turn == 6
  assert not site.codes


def test_losses_with_progress_between_them_use_up_no_restarts(site):
  """A turn that ended because a process came back counts as well as one whose command died."""
  for _ in range(4):
    site.lose(3)
    site.passes(SILENT + 5)
    assert site.training == [0, 1, 2]
    site.step += 500
    site.start(3)
    site.passes(4)
    site.end(75)
    site.passes(3)
    assert sorted(site.training) == [0, 1, 2, 3]
  assert not site.codes


def test_one_that_is_told_to_stop_between_two_turns_leaves(site):
  """While it pauses before a restart, and after its command has saved for a larger mesh."""
  site.end(1)
  site.passes(4)
  site.end(1)
  site.passes(1)
  assert not site.training
  site.members[3].asked = True
  site.passes(6)
  assert site.codes == {3: 75}
  assert site.training == [0, 1, 2]

  site.start(3)
  site.passes(4)
  site.end(75, 1)
  site.passes(0.5)
  site.members[1].asked = True
  site.passes(1)
  site.end(75)
  site.passes(4)
  assert site.codes == {1: 75}
  assert sorted(site.training) == [0, 2, 3]


def test_a_peer_that_is_started_again_at_once_is_noticed(site):
  """Its file never falls silent, but its command is gone: the others' commands wait for it."""
  site.start(2)
  site.passes(8)
  assert site.turn == 2
  assert sorted(site.training) == [0, 1, 2, 3]
  assert not site.codes


def test_a_peer_that_ends_before_the_turn_begins_is_noticed(tmp_path):
  site = Site(tmp_path, 3)
  slow = site.members.pop(2)
  slow.tick()
  site.passes(1)
  assert site.training == [0, 1]
  slow.asked = True
  assert slow.tick() == 75
  site.passes(8)
  assert read_plan(tmp_path).members == (0, 1)
  assert site.training == [0, 1]


def test_a_command_that_crashes_when_it_is_asked_to_save_is_noticed(site):
  site.lose(3)
  site.passes(SILENT + 5)
  site.start(3)
  site.passes(4)
  assert read_member(site.folder, 0).asks == REGROUP
  site.end(139, 0)
  site.passes(8)
  assert sorted(site.training) == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 7, 75, 130])
def test_what_a_restart_would_not_mend_ends_all(site, code):
  """75 without a request of ours: somebody stopped the commands, or `train.stop_after` did."""
  site.end(code)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), code)


@pytest.mark.parametrize(("ended", "code"), [(2, 2), (-2, 130)])
def test_one_that_ends_for_good_ends_those_that_lost_it(site, ended, code):
  """2: its configuration cannot be used. -2: the user has interrupted it (SIGINT)."""
  site.end(ended, 1)
  site.end(134, 0, 2, 3)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), code)


def test_a_spare_waits_and_ends_with_the_run(tmp_path):
  """A mesh for three does not fit: two train, one waits until the fourth is there."""
  site = Site(tmp_path, mesh=lambda processes: 4 if processes == 4 else min(processes, 2))
  site.passes(3)
  site.lose(3)
  site.passes(SILENT + 5)
  assert site.training == [0, 1]
  assert read_plan(tmp_path).members == (0, 1)
  assert not site.members[0].child.signals, "a third process would not make the mesh larger"
  site.start(3)
  site.passes(3)
  assert site.members[0].child.signals == [signal.SIGTERM]
  site.end(75)
  site.passes(3)
  assert sorted(site.training) == [0, 1, 2, 3]
  site.lose(3)
  site.passes(SILENT + 5)
  site.end(0)
  site.passes(3)
  assert site.codes == {0: 0, 1: 0, 2: 0}


def test_a_run_that_has_not_begun_to_train_is_not_asked_to_stop(site):
  site.trains = False
  site.lose(3)
  site.passes(SILENT + 5)
  site.start(3)
  site.passes(5)
  assert not site.members[0].child.signals
  site.trains = True
  site.passes(1)
  assert site.members[0].child.signals


def test_one_that_is_told_to_stop_leaves_and_the_others_go_on(site):
  site.members[1].asked = True
  site.passes(1)
  assert site.members[1].child.signals == [signal.SIGTERM]
  assert read_member(site.folder, 1).asks == LEAVE
  site.end(75)
  site.passes(3)
  assert site.codes == {1: 75}
  assert site.training == [0, 2, 3]


def test_one_that_is_told_to_stop_while_its_command_starts_may_be_requeued(site):
  site.members[1].asked = True
  site.passes(1)
  site.end(-signal.SIGTERM, 1)
  site.passes(1)
  assert site.codes == {1: 75}


def test_an_interrupted_one_ends_the_run_of_all(site):
  """A terminal that sends Ctrl-C to the command does the same."""
  site.members[1].interrupt()
  assert site.members[1].child.signals == [signal.SIGTERM]
  site.end(75)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), 75)


def test_one_that_is_interrupted_while_its_command_starts_ends_the_run_of_all(site):
  site.members[1].interrupt()
  site.end(-signal.SIGTERM, 1)
  site.end(134, 0, 2, 3)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), 130)


def test_an_interrupted_run_does_not_go_on_without_a_lost_host(site):
  """Their commands are stuck in a collective with the lost one, and end by their watchdogs."""
  site.lose(3)
  for member in site.members.values():
    member.interrupt()
  site.passes(SILENT + 5)
  assert site.turn == 1
  site.end(86)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(3), 130)


def test_an_interrupted_one_whose_peer_dies_saves_and_ends_the_run(site):
  site.members[1].interrupt()
  site.end(134, 0)
  site.passes(5)
  assert site.training == [1]
  site.end(75, 1)
  site.passes(5)
  assert site.codes == dict.fromkeys(range(4), 75)


def test_one_that_is_interrupted_and_then_told_to_stop_does_not_leave_the_others_running(site):
  site.members[1].interrupt()
  site.members[1].asked = True
  site.passes(1)
  assert site.members[1].child.signals == [signal.SIGTERM]
  site.end(75)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), 75)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_member_hears_signals_to_its_process(tmp_path, monkeypatch, number):
  member = Site(tmp_path, 1).members[0]
  heard = lambda: (member.asked, member._interrupted)

  def tick():
    if any(heard()):
      return 75
    member.child = FakeChild(member.plan, 0)
    os.kill(os.getpid(), number)
    return None

  monkeypatch.setattr(member, "tick", tick)
  assert supervise(member) == 75
  assert heard() == (number == signal.SIGTERM, number == signal.SIGINT)
  assert member.child.signals == ([signal.SIGTERM] if number == signal.SIGINT else [])


def test_one_that_is_interrupted_while_it_waits_leaves(tmp_path):
  site = Site(tmp_path, mesh=lambda processes: min(processes, 2))
  site.passes(3)
  assert site.training == [0, 1]
  site.members[3].interrupt()
  site.passes(1)
  assert site.codes == {3: 75}
  assert site.training == [0, 1]


def test_all_that_are_told_to_stop_end(site):
  for member in site.members.values():
    member.asked = True
  site.passes(1)
  site.end(75)
  site.passes(3)
  assert site.codes == dict.fromkeys(range(4), 75)


def test_files_of_an_earlier_start_do_not_count(tmp_path):
  """A run that ended is started again in its folder: old members are neither alive nor ended."""
  site = Site(tmp_path, 2)
  site.passes(3)
  site.end(0)
  site.passes(2)
  again = Site(tmp_path, 2)
  again.passes(1)
  assert again.codes == {}
  again.passes(3)
  assert again.turn == 2
  assert again.training == [0, 1]


def test_two_processes_with_one_number(tmp_path):
  site = Site(tmp_path, 2)
  site.passes(1)
  first = site.members[1]
  site.start(1)
  site.passes(1)
  site.now += 2
  with pytest.raises(ConfigError, match="another process is number 1 of this run"):
    first.tick()


def test_a_mesh_that_fits_nobody_ends_all(tmp_path):
  def none_fits(processes):
    raise ConfigError("no mesh")

  site = Site(tmp_path, 2, mesh=none_fits)
  for _ in range(2):
    with pytest.raises(ConfigError, match="no mesh"):
      site.passes(FIRST_SECONDS + 5)
    first = min(site.members)
    assert (read_member(tmp_path, first).state, read_member(tmp_path, first).code) == (ENDED, 2)
    site.lose(first)


def test_another_number_of_devices_is_said(tmp_path, capsys):
  site = Site(tmp_path, 3)
  site.start(2, devices=1)
  site.passes(3)
  assert site.training == [0, 1]
  assert "every process needs 2 devices: 2 has 1" in capsys.readouterr().err


@pytest.mark.parametrize("odd", [1, 3])
def test_the_commonest_number_of_devices_decides(tmp_path, capsys, odd):
  """Process 0 sees another number than all others: it waits, and process 1 plans."""
  site = Site(tmp_path, 3)
  site.start(0, devices=odd)
  site.passes(4)
  assert site.training == [1, 2]
  assert f"every process needs 2 devices: 0 has {odd}" in capsys.readouterr().err
  assert not site.members[1].child.signals


def test_of_two_numbers_of_devices_the_larger_one_decides(tmp_path):
  site = Site(tmp_path, 2)
  site.start(0, devices=1)
  site.passes(4)
  assert site.training == [1]


def test_a_file_system_that_stalls_costs_no_member(site):
  """Nobody writes and nobody looks for a minute; then one member's look comes before all writes."""
  for _ in range(3):
    site.now += 60
    site.passes(2)
  assert site.turn == 1
  assert site.training == [0, 1, 2, 3]
  site.lose(3)
  site.passes(SILENT + 5)
  assert site.training == [0, 1, 2], "a member that is really gone is given up all the same"


def test_devices_are_counted_again_after_a_command_died(site, capsys):
  """One GPU of process 0's host has failed: the others go on without that host."""
  site.found[0] = None
  site.end(1, 0)
  site.passes(8)
  assert not site.training, "the count may take long; nobody plans meanwhile"
  site.found[0] = 1
  site.passes(4)
  assert site.training == [1, 2, 3]
  assert "every process needs 2 devices: 0 has 1" in capsys.readouterr().err


def test_a_host_without_devices_leaves_and_may_be_started_again(site):
  site.found[0] = 0
  site.end(1, 0)
  site.passes(70)
  assert site.codes == {0: 69}
  assert site.training == [1, 2, 3]


@pytest.mark.parametrize("bad", [0, 2])
def test_a_host_whose_command_always_dies_is_left_out(tmp_path, capsys, bad):
  """It would use up all restarts; it is not taken back until its process is started again."""
  site = Site(tmp_path, restarts=3)
  site.passes(3)
  for turn in (2, 3):
    site.end(139, bad)
    site.passes(10)
    assert site.turn == turn
  rest = [n for n in range(4) if n != bad]
  assert site.training == rest
  assert (
    f"process {bad} is left out: its training died in 2 turns running" in capsys.readouterr().err
  )
  site.passes(30)
  assert not any(site.members[n].child.signals for n in rest)
  site.start(bad)
  site.passes(4)
  assert site.members[rest[0]].child.signals == [signal.SIGTERM]


@pytest.mark.parametrize(
  ("codes", "mesh"),
  [
    # All commands die in the same moment: nobody knows which was the first.
    ({0: 1, 1: 1, 2: 139, 3: 1}, lambda processes: processes),
    ({1: 134, 2: 139}, lambda processes: processes),
    # A stuck collective is another host's fault.
    ({2: 86}, lambda processes: processes),
    # The others fit no mesh.
    ({2: 139}, None),
  ],
)
def test_nobody_is_left_out_without_a_reason(tmp_path, codes, mesh):
  def all_or_none(processes):
    if processes < 4:
      raise ConfigError("no mesh")
    return processes

  site = Site(tmp_path, mesh=mesh or all_or_none)
  site.passes(3)
  for turn in (2, 3):
    for number, code in codes.items():
      site.end(code, number)
    site.passes(10)
    assert site.turn == turn
    assert site.training == [0, 1, 2, 3]


def test_a_command_that_dies_after_progress_is_not_left_out(site):
  for _ in range(4):
    site.end(139, 2)
    site.passes(10)
    assert site.training == [0, 1, 2, 3]
    site.step += 1


def test_a_new_start_waits_for_the_lock_of_a_lost_host(site, capsys):
  """All processes are gone, one of them with its host, which held the lock: no command takes it."""
  again = Site(site.folder)
  again.held = True
  again.passes(60)
  assert not again.training
  again.held = False
  again.passes(3)
  assert again.training == [0, 1, 2, 3]
  assert capsys.readouterr().err.count("for the lock of an earlier start") == 1


def test_a_new_start_does_not_wait_for_a_run_that_lives(site):
  """Its command says whose lock it is, and ends with 2."""
  again = Site(site.folder)
  again.held = True
  again.passes(FOREIGN_STALE_SECONDS + 5)
  assert again.training == [0, 1, 2, 3]


def test_of_two_plans_of_one_turn_the_later_one_counts(site):
  plan = read_plan(site.folder)
  write(site.folder / PLAN, plan._replace(coordinator="127.0.0.1:1"))
  site.passes(8)
  assert site.turn == 2
  assert site.training == [0, 1, 2, 3]


def test_half_written_files_count_as_unchanged(tmp_path):
  now = [0.0]
  others = Others(tmp_path, 0, 2, SILENT, lambda: now[0])
  member = Member(1, "token", WAITING, 0, "host", 2, beat=1)
  write(member_file(tmp_path, 1), member)
  others.look()
  assert others.alive() == [member]
  member_file(tmp_path, 1).write_text('{"number": 1, "to')
  for now[0] in range(int(SILENT) + 1):
    others.look()
  assert others.alive() == [member]
  now[0] = SILENT + 1
  assert others.is_silent(1)
  assert others.alive() == []
  write(tmp_path / PLAN, Plan(3, (0, 2), ("a", "b"), "host:1", 4, 2, "words" * 100))
  write(tmp_path / PLAN, plan := Plan(4, (0,), ("a",), "host:1", 2, 2, "words"))
  assert read_plan(tmp_path) == plan
