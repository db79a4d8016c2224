"""Compares runs; runs that differ only in the seed form one group, shown as mean ± std.

The difference of two groups is the mean of the differences between their runs of the same seed.
These differences vary less than the runs themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from scmoe.reports.records import Measure, Record, measures, printable

# Fields that may differ within a group: names, folders, and the handling of interruptions.
IGNORED = (
  "name",
  "train.seed",
  "train.stop_after",
  "train.watchdog_seconds",
  "train.first_step_seconds",
  "train.tensorboard",
  "train.trackers",
  "checkpoint.",
  "distributed.",
  "data.cache_dir",
)
_LONGEST_LABEL = 4  # most differing fields in a group's label; with more it is a run's name


@dataclasses.dataclass(frozen=True)
class Statistic:
  """Mean and sample standard deviation (n − 1) of n values; std is None for one value."""

  mean: float
  std: float | None
  values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Paired:
  """A group's figure minus the base group's, over the seeds that both have.

  Attributes:
    difference: differences between runs of the same seed.
    better: number of runs that are better than the base run of their seed.
  """

  difference: Statistic
  better: int


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs of one configuration, in the order of their seeds."""

  label: str
  records: tuple[Record, ...]

  def statistic(self, measure: Measure) -> Statistic | None:
    """Mean and std over the runs that have the figure; None if none has."""
    return _statistic(v for r in self.records if (v := measure.of(r)) is not None)

  def paired(self, base: Group, measure: Measure) -> Paired | None:
    """This group's difference from `base`; None for the base itself, or without a common seed."""
    if base is self or not measure.better:
      return None
    before = {r.seed: v for r in base.records if (v := measure.of(r)) is not None}
    after = {r.seed: v for r in self.records if (v := measure.of(r)) is not None}
    differences = [after[seed] - before[seed] for seed in after if seed in before]
    found = _statistic(differences)
    if found is None:
      return None
    sign = -1 if measure.better == "lower" else 1
    return Paired(found, sum(sign * d > 0 for d in differences))


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Groups of runs, the first of which is the base, and the figures that they have.

  Attributes:
    groups: groups, in the order in which their runs were given.
    measures: figures that the table shows.
    differences: field -> value in each group, of the configuration's fields that differ.
  """

  groups: tuple[Group, ...]
  measures: tuple[Measure, ...]
  differences: dict[str, tuple[Any, ...]]

  @property
  def records(self) -> list[Record]:
    """All runs."""
    return [record for group in self.groups for record in group.records]

  @property
  def unfinished(self) -> list[Record]:
    """Runs that have not finished."""
    return [record for record in self.records if not record.done]

  def as_json(self) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    base, groups = self.groups[0], []
    for group in self.groups:
      runs = [
        {"path": str(r.path), "seed": r.seed, "status": r.status, "devices": r.devices}
        | {"figures": {m.name: m.of(r) for m in self.measures}}
        for r in group.records
      ]
      found = {m.name: group.statistic(m) for m in self.measures}
      paired = {m.name: group.paired(base, m) for m in self.measures}
      groups.append(
        {
          "label": group.label,
          "runs": runs,
          "figures": {k: dataclasses.asdict(v) for k, v in found.items() if v is not None},
          "paired": {k: dataclasses.asdict(v) for k, v in paired.items() if v is not None},
        }
      )
    differences = {name: list(values) for name, values in self.differences.items()}
    return {"base": base.label, "groups": groups, "differences": differences}


def compare(records: Sequence[Record]) -> Comparison:
  """Groups the runs; the first group is the base of the paired differences."""
  keys: dict[str, list[Record]] = {}
  for record in records:
    if record.devices:
      keys.setdefault(_key(record), []).append(record)
  for record in records:  # a run that failed before it had devices joins a group by configuration
    if not record.devices:
      same = [key for key in keys if key.startswith(_options(record))]
      keys.setdefault(same[0] if same else _key(record), []).append(record)
  order = {id(record): place for place, record in enumerate(records)}
  found = sorted(keys.values(), key=lambda group: min(order[id(r)] for r in group))
  differences = _differences([group[0] for group in found])
  labels = _labels([group[0] for group in found], differences)
  groups = [
    Group(label, tuple(sorted(group, key=lambda r: (r.seed, order[id(r)]))))
    for label, group in zip(labels, found)
  ]
  return Comparison(tuple(groups), tuple(measures(records)), differences)


def _statistic(values: Iterable[float]) -> Statistic | None:
  found = tuple(values)
  if not found:
    return None
  std = statistics.stdev(found) if len(found) > 1 else None
  return Statistic(statistics.fmean(found), std, found)


def _options(record: Record) -> str:
  config = {k: v for k, v in record.config.items() if not _ignored(k)}
  return json.dumps(config, sort_keys=True)


def _key(record: Record) -> str:
  return f"{_options(record)} on {record.devices}"


def _ignored(name: str) -> bool:
  return any(name == i or (i.endswith(".") and name.startswith(i)) for i in IGNORED)


def _differences(firsts: Sequence[Record]) -> dict[str, tuple[Any, ...]]:
  names = dict.fromkeys(name for record in firsts for name in record.config)
  found = {}
  for name in names:
    values = tuple(record.config.get(name) for record in firsts)
    if not _ignored(name) and len(set(map(repr, values))) > 1:
      found[name] = values
  devices = tuple(record.devices for record in firsts)
  if len({d for d in devices if d}) > 1:
    found["devices"] = devices
  return found


def _labels(firsts: Sequence[Record], differences: dict[str, tuple[Any, ...]]) -> list[str]:
  """The label of each group: its values of the fields that differ, or its first run's name."""
  if not differences or len(differences) > _LONGEST_LABEL:
    # The name of a sweep's run ends in its seed, but a group has several seeds.
    return _unique([re.sub(r"_seed-\d+$", "", record.name) for record in firsts])
  leaves = [name.rpartition(".")[2] for name in differences]
  shown = [leaf if leaves.count(leaf) == 1 else name for leaf, name in zip(leaves, differences)]
  columns = list(zip(*differences.values()))
  if len(shown) == 1:
    return _unique([_word(value) for (value,) in columns])
  return _unique([", ".join(f"{n}={_word(v)}" for n, v in zip(shown, row)) for row in columns])


def _word(value: Any) -> str:
  if isinstance(value, float) and math.isfinite(value):
    return f"{value:g}"
  return printable(str(value)) if value != "" else "(empty)"


def _unique(labels: list[str]) -> list[str]:
  return [
    label if labels.count(label) == 1 else f"{label} #{labels[: i + 1].count(label)}"
    for i, label in enumerate(labels)
  ]
