"""The `multitask` section of a run's configuration: tasks that train one model side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option
from scmoe.data.config import DataConfig
from scmoe.data.multitask.plan import PLANS

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_MOST_LOAD = 1e12  # loads are added and multiplied by the rows of a step in float64
_Number = TypeVar("_Number", int, float)


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of a run.

  Attributes:
    name: of the task.
    load: its share of a step's rows, relative to the other tasks.
    length: tokens of one of its sequences; a row of `data.seq_len` tokens holds several of them.
  """

  name: str
  load: float
  length: int


@dataclasses.dataclass(frozen=True)
class MultitaskConfig(Options, path="multitask"):
  """Options of several tasks in one run (docs/multitask.md): names, loads, lengths, plan."""

  names: str = option(
    "",
    "names of the tasks, by commas, one for each part of data.mixture in its order; each has a "
    "gate of its own over the experts, which all share (docs/multitask.md); empty: one task",
  )
  loads: str = option(
    "",
    "each task's share of the rows of a step, e.g. 4,2,1; empty: the weights of data.mixture. May "
    "change when a run goes on",
  )
  lengths: str = option(
    "",
    "tokens of a sequence of each task, e.g. 256,64; a row of data.seq_len tokens holds as many of "
    "them as fit without rest; empty: data.seq_len for all",
  )
  plan: str = option(
    "elastic",
    "how devices are given to tasks: elastic (by load: several to a heavy task, one to several "
    "light ones) or equal (as many to each, so that the heaviest task decides how many rows a step "
    "has; for comparisons). May change when a run goes on",
    choices=PLANS,
  )

  @property
  def task_names(self) -> tuple[str, ...]:
    """The names of the tasks; () in a run of one task."""
    return tuple(name.strip() for name in self.names.split(",")) if self.names else ()

  def tasks(self, data: DataConfig) -> tuple[Task, ...]:
    """The tasks of a run, in the order of the parts of `data.mixture`.

    Raises:
      ConfigError: names, loads, lengths or the mixture do not fit each other.
    """
    names, parts = self.task_names, data.parts()
    if data.kind != "mixture" or len(parts) != len(names):
      raise ConfigError(
        f"multitask.names={self.names!r} names {len(names)} tasks, data.mixture={data.mixture!r} "
        f"has {len(parts) if data.kind == 'mixture' else 0} parts; give each task a part, e.g. "
        "stdlib:0.7,procedural:arithmetic:0.3"
      )
    if len(names) < 2:
      raise ConfigError(f"multitask.names={self.names!r} is a single task; name two, or none")
    for name in names:
      if not _NAME.fullmatch(name):
        raise ConfigError(
          f"multitask.names={self.names!r}: {name!r} is no name of letters, digits, '.', '_', '-'"
        )
    if len(set(names)) < len(names):
      raise ConfigError(f"multitask.names={self.names!r} has a name twice; give each its own")
    weights = [part.weight for part in parts]
    loads = self._numbers("loads", float, weights)
    lengths = self._numbers("lengths", int, [data.seq_len] * len(names))
    for load in loads:
      if not 0 < load <= _MOST_LOAD:
        raise ConfigError(
          f"multitask.loads={self.loads!r}: {load:g} must be above 0, and at most {_MOST_LOAD:g}"
        )
    for length in lengths:
      if length < 2 or data.seq_len % length:
        raise ConfigError(
          f"multitask.lengths={self.lengths!r}: {length} does not divide data.seq_len="
          f"{data.seq_len} into sequences of two tokens or more; use e.g. {data.seq_len}"
        )
    for name, part, length in zip(names, parts, lengths):
      if part.kind == "chat" and length < data.seq_len:
        raise ConfigError(
          f"multitask.lengths={self.lengths!r} would cut the conversations of task {name!r}, a "
          f"part of kind chat, after {length} tokens; give this task data.seq_len={data.seq_len}"
        )
    if min(lengths) < data.seq_len and not data.document_mask:
      raise ConfigError(
        f"multitask.lengths={self.lengths!r} puts several sequences into a row, which must not "
        "attend to each other; set data.document_mask=True and model.document_mask=True"
      )
    return tuple(map(Task, names, loads, lengths))

  def _numbers(
    self, field: str, kind: Callable[[str], _Number], default: list[_Number]
  ) -> list[_Number]:
    text = getattr(self, field)
    if not text:
      return default
    try:
      found = [kind(part.strip()) for part in text.split(",")]
    except ValueError:
      found = []
    if len(found) != len(default):
      raise ConfigError(
        f"multitask.{field}={text!r} is not one number for each of the {len(default)} tasks "
        f"{self.names}; e.g. {','.join(f'{number:g}' for number in default)}"
      )
    return found
