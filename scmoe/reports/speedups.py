"""Effective speed-ups of a folder of studies: data saved times throughput, for each link.

The baseline's curve is the study effective_speedup, the differences are those of the study
table1_3_language, and effective_speedup/speeds.json names where throughputs were measured:

  {LINK: {VARIANT: {"file": results of experiments/, "label": row, "base": arm, "arm": arm}}}
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from scmoe.base.errors import DataError
from scmoe.base.stored import Maybe, read_json
from scmoe.reports.statistics import (
  Budgets,
  Estimate,
  LossCurve,
  Speedup,
  effective_speedup,
  fit_curve,
)
from scmoe.reports.studies import Study, read_study
from scmoe.reports.tables import Table

CURVE, DIFFERENCES, SPEEDS = "effective_speedup", "table1_3_language", "speeds.json"
_SPEEDS_SHAPE = {"*": {"*": {"file": str, "label": str, "base": str, "arm": str}}}
_TIMES_SHAPE = [{"label": str, "arms": {"*": {"ms": float, "rounds_ms": Maybe([float])}}}]


@dataclasses.dataclass(frozen=True)
class Worth:
  """The effective speed-up of a variant on a link.

  Attributes:
    variant: of the study of differences.
    link: between GPUs.
    source: file, row and arms of the throughput.
    speedup: with intervals.
  """

  variant: str
  link: str
  source: str
  speedup: Speedup


def budgets_of(study: Study) -> Budgets:
  """Tokens -> seed -> loss, of the baseline's runs."""
  found: dict[float, dict[int, float]] = {}
  for (_, seed), result in study.done.items():
    found.setdefault(result["tokens"], {})[seed] = float(result["final"][study.plan.metric])
  return found


def curve_of(study: Study) -> LossCurve | None:
  """The baseline's fitted curve; None with fewer than three amounts of text."""
  budgets = budgets_of(study)
  if len(budgets) < 3:
    return None
  points = [(tokens, loss) for tokens, found in budgets.items() for loss in found.values()]
  return fit_curve(*zip(*points))


def ratios(path: Path, label: str, base: str, arm: str) -> list[float]:
  """Throughput of an arm over the base's: of each round, or of the medians if only they were kept.

  Raises:
    DataError: the file has no such row or arm.
  """
  rows = read_json(path, _TIMES_SHAPE)
  arms = next((row["arms"] for row in rows if row["label"] == label), {})
  if missing := [name for name in (base, arm) if name not in arms]:
    raise DataError(f"{path} has no arm {missing[0]!r} in the row {label!r}")
  rounds = [arms[name].get("rounds_ms") for name in (base, arm)]
  if all(rounds) and len(rounds[0]) == len(rounds[1]):
    return [before / after for before, after in zip(*rounds)]
  return [arms[base]["ms"] / arms[arm]["ms"]]


def read_speedups(folder: Path, scale: str) -> list[Worth]:
  """The effective speed-ups that the results below a folder of studies allow; none without them.

  Args:
    folder: of the studies, experiments/quality; files of speeds are named from two levels above.
    scale: of the studies.

  Raises:
    DataError: plans, results or speeds cannot be used.
  """
  try:
    baseline, compared = read_study(folder / CURVE, scale), read_study(folder / DIFFERENCES, scale)
    speeds = read_json(folder / CURVE / SPEEDS, _SPEEDS_SHAPE)
  except FileNotFoundError:
    return []
  budgets = budgets_of(baseline)
  if len(budgets) < 3:
    return []
  contrasts = {c.variant: c for c in reversed(compared.plan.contrasts) if c.base == "top2"}
  found = []
  for link, variants in speeds.items():
    for variant, source in variants.items():
      pairs = compared.differences(contrasts[variant]) if variant in contrasts else []
      if len(pairs) < 2:
        continue
      tokens = next(r["tokens"] for (name, _), r in compared.done.items() if name == variant)
      where = folder.parents[1] / source["file"]
      measured = ratios(where, source["label"], source["base"], source["arm"])
      named = f"{source['file']}, {source['label']}: {source['base']}, {source['arm']}"
      worth = effective_speedup(budgets, pairs, tokens, measured)
      found.append(Worth(variant, link, named, worth))
  return found


def speedups_table(found: list[Worth], scale: str) -> Table:
  """One row a variant and link: Sc, ratio of throughputs, Sw, with 95 % intervals."""
  rows = tuple(
    (
      one.variant,
      one.link,
      _interval(one.speedup.data),
      _interval(one.speedup.throughput),
      _interval(one.speedup.effective),
      one.source,
    )
    for one in found
  )
  heads = ("variant", "link", "Sc, data", "throughput", "Sw, effective", "measured in")
  return Table(f"Effective speed-up over top2, {scale}", heads, rows)


def _interval(found: Estimate) -> str:
  shown = lambda x: "∞" if math.isinf(x) else f"{x:.3f}"
  if found.low == found.high:
    return f"{shown(found.value)}×"
  return f"{shown(found.value)}× ({shown(found.low)} to {shown(found.high)})"
