"""Which rows of a step belong to which task, and which device computes them.

All devices run one program (SPMD), so each computes equally many rows in a step, and an empty place
costs as much as a row. Example: 8 devices with 4 rows each, and four tasks with loads 4, 2, 1, 1.

  elastic   rows 16, 8, 4, 4   devices 4, 2, 1, 1   all 32 places are used
  equal     rows  8, 4, 2, 2   devices 2, 2, 2, 2   16 of the 32 places are empty

The heaviest task decides how many rows a plan of equal shares trains: the devices of all others
wait for it, here by computing padding. The elastic plan gives devices by load (SE-MoE's UFO, arXiv
2205.10034, section 4): a heavy task gets several devices, light tasks share one.

A plan depends on loads and sizes only. It changes where rows are computed, not which step they
belong to. So loss and gradients of given rows do not depend on it in a step of one microbatch, nor
with `router.balance_over=step` and no gate noise. In a step of several microbatches each device
deals its own rows to them, so a balancing loss of each microbatch
(`router.balance_over=microbatch`) depends on the plan and on the number of devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from scmoe.base.errors import ConfigError

EMPTY = -1  # the task of a place that no row fills
PLANS = ("elastic", "equal")


@dataclasses.dataclass(frozen=True)
class Plan:
  """The rows of one step by device and task.

  Attributes:
    names: of the tasks.
    rows_DT: for each device, the number of its rows of each task.
    places: rows that each device computes in a step, padding included.
  """

  names: tuple[str, ...]
  rows_DT: tuple[tuple[int, ...], ...]
  places: int

  @property
  def rows_T(self) -> tuple[int, ...]:
    """The rows of each task in a step, on all devices."""
    return tuple(map(sum, zip(*self.rows_DT)))

  @property
  def filled(self) -> float:
    """The share of the places that rows fill; the rest is padding."""
    return sum(self.rows_T) / (self.places * len(self.rows_DT))

  def devices_of(self, task: int) -> tuple[int, ...]:
    """The devices that compute rows of a task."""
    return tuple(device for device, rows in enumerate(self.rows_DT) if rows[task])

  def layout(self, microbatches: int) -> np.ndarray:
    """The task of each place of a step, int32 [A, D · b]; `EMPTY` where there is no row.

    Each microbatch has b = places / A rows of every device, device after device, as the mesh cuts
    a batch. A device deals its rows out to the microbatches in turns, so that each microbatch has
    about the same share of every task.

    Args:
      microbatches: A, which divides `places`.
    """
    per_device = self.places // microbatches
    found = np.full((microbatches, len(self.rows_DT), per_device), EMPTY, np.int32)
    for device, rows in enumerate(self.rows_DT):
      tasks = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
      place = np.arange(len(tasks))
      found[place % microbatches, device, place // microbatches] = tasks
    return found.reshape(microbatches, -1)

  def words(self) -> str:
    """A line that says how many rows and devices each task has, and how much of them is padding."""
    tasks = ", ".join(
      f"{name} {rows} rows on {_range(self.devices_of(task))}"
      for task, (name, rows) in enumerate(zip(self.names, self.rows_T))
    )
    empty = f"; {1 - self.filled:.0%} of the places are empty" if self.filled < 1 else ""
    return f"a step has {tasks}{empty}"


def make_plan(
  kind: str, names: Sequence[str], loads: Sequence[float], *, devices: int, places: int
) -> Plan:
  """The plan of a step.

  Args:
    kind: `elastic` or `equal`.
    names: of the tasks.
    loads: for each task its share of the rows, relative to the others; above 0.
    devices: D, devices that have rows of their own.
    places: rows that each of them computes in a step.

  Raises:
    ConfigError: a task would get no row; or, with `equal`, neither of the numbers of tasks and
      devices divides the other.
  """
  if kind == "equal":
    rows_DT = _equal(names, loads, devices, places)
  else:
    rows = _checked(rows_of(loads, devices * places), names, devices * places)
    rows_DT = elastic(rows, devices)
  return Plan(tuple(names), tuple(map(tuple, rows_DT)), places)


def rows_of(loads: Sequence[float], total: int) -> list[int]:
  """`total` rows divided in proportion to the loads, by the largest remainders.

  Example: loads 4, 2, 1 and 10 rows: exact shares 5.71, 2.86, 1.43; rows 6, 3, 1.
  """
  shares = [load * total / sum(loads) for load in loads]
  rows = [int(share) for share in shares]
  by_remainder = sorted(range(len(rows)), key=lambda task: rows[task] - shares[task])
  for task in by_remainder[: total - sum(rows)]:
    rows[task] += 1
  return rows


def elastic(rows: Sequence[int], devices: int) -> list[list[int]]:
  """Rows of each task on each device: [D][T], as few on the busiest device as can be.

  A device gets at most ceil(rows of all tasks / devices). Greedy: a task fills as many devices of
  its own as it can. The rests, largest first, go where they fit most tightly; one that fits nowhere
  is split over the devices with the most room. So most devices serve one task. Splitting a rest
  fills a device, so with m rests on k devices a device serves more than one task at most m + k - 1
  times in all.

  Example: rows 11, 3, 2 on 4 devices, at most 4 each. Task 0 fills two devices; the rests are 3, 3
  and 2. The first two go to a device each, and task 2 is split, one row to each of these two.

  Args:
    rows: of each task.
    devices: D.
  """
  most = -(-sum(rows) // devices)
  found = [[0] * len(rows) for _ in range(devices)]
  free = [most] * devices
  used = 0  # the first devices, which one task fills or a rest has begun
  for task, count in enumerate(rows):
    for _ in range(count // most if most else 0):
      found[used][task], free[used] = most, 0
      used += 1
  rests = {task: count % most for task, count in enumerate(rows) if most and count % most}
  for task in sorted(rests, key=lambda task: -rests[task]):
    rest = rests[task]
    fitting = [device for device in range(devices) if free[device] >= rest]
    if fitting:
      places = [min(fitting, key=lambda device: (free[device], device))]
    else:
      places = sorted(range(devices), key=lambda device: (-free[device], device))
    for device in places:
      taken = min(rest, free[device])
      found[device][task] += taken
      free[device] -= taken
      rest -= taken
  return found


def _equal(
  names: Sequence[str], loads: Sequence[float], devices: int, places: int
) -> list[list[int]]:
  """Rows on each device where all tasks have equally many devices, or devices equally many tasks.

  The loads keep their proportion, so the busiest device is full and the others have empty places.
  """
  tasks = len(names)
  if devices % tasks and tasks % devices:
    raise ConfigError(
      f"multitask.plan='equal' gives each of the {tasks} tasks as many devices, which {devices} "
      "devices that share a batch do not allow; use a mesh whose mesh.data x mesh.expert is a "
      f"multiple of {tasks}, or multitask.plan=elastic"
    )
  own, together = max(devices // tasks, 1), max(tasks // devices, 1)
  groups = [range(first, first + together) for first in range(0, tasks, together)]
  busiest = max(sum(loads[task] for task in group) for group in groups)
  rows = [int(own * places * load / busiest + 1e-9) for load in loads]
  _checked(rows, names, own * places)
  found = [[0] * tasks for _ in range(devices)]
  for first, group in zip(range(0, devices, own), groups):
    for task in group:
      each, more = divmod(rows[task], own)
      for device in range(own):
        found[first + device][task] = each + (device < more)
  return found


def _checked(rows: list[int], names: Sequence[str], places: int) -> list[int]:
  """The same rows, after checking that every task has one."""
  for name, count in zip(names, rows):
    if not count:
      raise ConfigError(
        f"multitask.loads gives task {name!r} none of the {places} rows of a step; raise its load, "
        "train.batch_size or train.tokens_per_step"
      )
  return rows


def _range(devices: Sequence[int]) -> str:
  """ "device 3", or "devices 0 to 2", or "devices 0, 2"."""
  if len(devices) == 1:
    return f"device {devices[0]}"
  if devices[-1] - devices[0] == len(devices) - 1 and len(devices) > 2:
    return f"devices {devices[0]} to {devices[-1]}"
  return "devices " + ", ".join(map(str, devices))
