"""Members of an elastic run whose process is dead are given up before their file is silent."""

import signal
import subprocess
import sys

import pytest
from elastic_site import SILENT, Site

from scmoe.training.members import (
  GONE_SECONDS,
  RUNNING,
  Life,
  Member,
  Others,
  is_held,
  member_file,
  write,
)

HOLD = """
import pathlib, sys, time
from scmoe.training.members import Life
life = Life(pathlib.Path(sys.argv[1]), 1)
life.hold()
print("held", flush=True)
time.sleep(60)
"""


class Watch:
  """One member that looks at another one, whose file and lock the test changes."""

  def __init__(self, folder):
    self.folder, self.now, self.beat = folder, 0.0, 0
    self.life = Life(folder, 1)
    self.others = Others(folder, 0, 2, SILENT, lambda: self.now)

  def passes(self, seconds, *, writes, token="token"):
    for _ in range(int(2 * seconds)):
      self.now += 0.5
      if writes:
        self.beat += 1
        write(member_file(self.folder, 1), Member(1, token, RUNNING, 1, "host", 2, beat=self.beat))
      self.others.look()


def test_the_lock_ends_with_its_process(tmp_path):
  assert is_held(tmp_path, 1) is None
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
  )
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_held(tmp_path, 1)
    assert is_held(tmp_path, 1), "a look does not take it"
    second = Life(tmp_path, 1)
    second.hold()
    second.release()
    assert is_held(tmp_path, 1)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert is_held(tmp_path, 1) is False
    second.hold()
    assert is_held(tmp_path, 1)
    second.release()
    assert is_held(tmp_path, 1) is False
  finally:
    process.kill()
    process.wait()


def test_a_dead_process_is_given_up_early(tmp_path):
  watch = Watch(tmp_path)
  watch.life.hold()
  watch.passes(5, writes=True)
  watch.life.release()
  watch.passes(GONE_SECONDS, writes=False)
  assert not watch.others.is_silent(1)
  watch.passes(1, writes=False)
  assert watch.others.is_gone(1)
  assert watch.others.is_silent(1)
  assert watch.others.alive() == []
  watch.passes(0.5, writes=True, token="another")
  assert not watch.others.is_silent(1), "it was started again"


@pytest.mark.parametrize(
  ("held", "released", "writes"),
  [
    (True, False, False),  # a host that is lost or stopped may keep the lock
    (False, False, False),  # a file system without locks, or whose locks reach no other host
    (True, True, True),  # a file system that loses a lock
  ],
)
def test_only_a_dead_process_is_given_up_early(tmp_path, held, released, writes):
  watch = Watch(tmp_path)
  if held:
    watch.life.hold()
  watch.passes(5, writes=True)
  if released:
    watch.life.release()
  watch.passes(SILENT - 2, writes=writes)
  assert not watch.others.is_silent(1)
  watch.passes(4, writes=writes)
  assert watch.others.is_silent(1) == (not writes)
  watch.life.release()


def test_a_lock_that_cannot_be_looked_at_tells_nothing(tmp_path):
  """A file that was deleted, or a file system that answers with errors."""
  watch = Watch(tmp_path)
  watch.life.hold()
  watch.passes(5, writes=True)
  watch.life.release()
  (tmp_path / "member_1.lock").unlink()
  watch.passes(SILENT - 2, writes=False)
  assert not watch.others.is_silent(1)
  watch.passes(4, writes=False)
  assert watch.others.is_silent(1)


def test_the_lock_of_the_process_before_does_not_count(tmp_path):
  """A new process that has not got the lock yet is not taken for dead when the old one ends."""
  watch = Watch(tmp_path)
  watch.life.hold()
  watch.passes(2, writes=True)
  watch.life.release()
  watch.passes(2, writes=True, token="another")
  watch.passes(GONE_SECONDS + 2, writes=False)
  assert not watch.others.is_silent(1)


def test_a_lost_process_costs_seconds_and_no_count_of_devices(tmp_path, capsys):
  """The command of a living member dies with its peer; its devices need not be counted first."""
  site = Site(tmp_path, 2)
  lives = [Life(tmp_path, number) for number in range(2)]
  for life in lives:
    life.hold()
  site.passes(3)
  site.found[0] = None  # the count does not end
  site.lose(1)
  lives[1].release()
  site.end(1, 0)
  site.passes(GONE_SECONDS + 2)
  assert site.training == [0]
  assert site.members[0].me.devices == 2
  lives[0].release()


def test_a_gone_process_is_called_so(tmp_path, capsys):
  site = Site(tmp_path, 2)
  life = Life(tmp_path, 1)
  life.hold()
  site.passes(3)
  site.lose(1)
  life.release()
  site.passes(GONE_SECONDS + 2)
  assert site.training == [0]
  assert "process 1 is gone; restart 1 of 2" in capsys.readouterr().err
