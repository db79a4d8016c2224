"""The members of an elastic run on one clock, with commands that the test ends."""

from scmoe.training.elastic import Choice, Launch, Supervisor
from scmoe.training.members import read_plan

SILENT = 15.0


class FakeChild:
  """A training command that the test ends."""

  def __init__(self, plan, index):
    self.plan, self.index, self.pid = plan, index, 1000 + plan.turn
    self.code, self.signals = None, []

  def poll(self):
    return self.code

  def wait(self):
    return self.code

  def kill(self):
    self.code = -9

  def send_signal(self, number):
    self.signals.append(number)


class Site:
  """Members on one clock; `mesh` says how many of so many processes a mesh can use."""

  def __init__(self, folder, count=4, *, mesh=lambda processes: processes, restarts=2):
    self.folder, self.count, self.mesh, self.restarts = folder, count, mesh, restarts
    self.now, self.step, self.released = 0.0, 0, 0
    self.members, self.codes, self.trains = {}, {}, True
    self.held, self.found = False, {}  # the devices that a member finds when it counts again
    for number in range(count):
      self.start(number)

  def start(self, number, devices=2):
    launch = Launch(
      choose=lambda n, devices: Choice(self.mesh(n), self.mesh(n) * devices, 1, "words"),
      start=FakeChild,
      trains=lambda pid: self.trains,
      progress=lambda: self.step,
      release=self.release,
      held=lambda: self.held,
      count=lambda: lambda: self.found.get(number, devices),
    )
    self.codes.pop(number, None)
    self.members[number] = Supervisor(
      self.folder,
      number,
      self.count,
      host="127.0.0.1",
      devices=devices,
      launch=launch,
      restarts=self.restarts,
      silent=SILENT,
      clock=lambda: self.now,
    )

  def release(self):
    self.released += 1

  def lose(self, number):
    """The host of a member is gone: it and its command do nothing any more."""
    del self.members[number]

  def passes(self, seconds):
    for _ in range(int(2 * seconds)):
      self.now += 0.5
      for number in list(self.members):
        code = self.members[number].tick()
        if code is not None:
          self.codes[number] = code
          self.lose(number)

  @property
  def turn(self):
    return read_plan(self.folder).turn

  @property
  def training(self):
    return [n for n, member in self.members.items() if member.child is not None]

  def end(self, code, *numbers):
    for number in numbers or self.training:
      self.members[number].child.code = code
