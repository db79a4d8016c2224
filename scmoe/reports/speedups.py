"""Effective speed-ups of a folder of studies: data saved times throughput, for each link.

The baseline's curve is the study effective_speedup. The losses of a variant are those of the first
study, by name, that trains it with the curve's configuration, and effective_speedup/speeds.json
names where throughputs were measured:

  {LINK: {VARIANT: {"file": results of experiments/, "label": row, "base": arm, "arm": arm}}}
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path

import numpy as np

from scmoe.base.errors import DataError
from scmoe.base.stored import Maybe, read_json
from scmoe.reports.plots import lines_plot
from scmoe.reports.statistics import (
  Budgets,
  Estimate,
  LossCurve,
  Speedup,
  effective_speedup,
  fit_curve,
  join_means,
)
from scmoe.reports.studies import Result, Study, read_study, text_of
from scmoe.reports.tables import Table

CURVE, SPEEDS = "effective_speedup", "speeds.json"
_SPEEDS_SHAPE = {"*": {"*": {"file": str, "label": str, "base": str, "arm": str}}}
_TIMES_SHAPE = [{"label": str, "arms": {"*": {"ms": float, "rounds_ms": Maybe([float])}}}]


@dataclasses.dataclass(frozen=True)
class Worth:
  """The effective speed-up of a variant on a link.

  Attributes:
    variant: its name in the study.
    study: whose runs of the variant are compared with the baseline's.
    link: between GPUs.
    source: file, row and arms of the throughput.
    speedup: by the fitted curve, with intervals.
    joined: by the curve that joins the measured losses.
  """

  variant: str
  study: str
  link: str
  source: str
  speedup: Speedup
  joined: Speedup


@dataclasses.dataclass(frozen=True)
class Speedups:
  """The baseline's losses, and what they make the variants worth.

  Attributes:
    budgets: of the baseline, at least three numbers of tokens.
    found: one for each variant and link.
  """

  budgets: Budgets
  found: list[Worth]

  @property
  def fitted(self) -> LossCurve:
    """The baseline's fitted curve."""
    points = [(d, loss) for d, found in self.budgets.items() for loss in found.values()]
    return fit_curve([d for d, _ in points], [loss for _, loss in points])

  @property
  def means(self) -> dict[float, float]:
    """Tokens -> the baseline's mean loss, by tokens."""
    return {d: statistics.fmean(self.budgets[d].values()) for d in sorted(self.budgets)}

  @property
  def misfit(self) -> float:
    """By how much the fitted curve misses a mean loss, at most, in nats per token."""
    fitted = self.fitted
    return max(abs(fitted.loss(d) - loss) for d, loss in self.means.items())

  def plot(self) -> str:
    """The baseline's mean losses, joined, and its fitted curve, as an SVG element."""
    means, fitted = self.means, self.fitted
    between = np.geomspace(min(means), max(means), 40)
    lines = {
      "measured": list(means.items()),
      "fitted": [(float(d), fitted.loss(float(d))) for d in between],
    }
    return lines_plot(lines, "the baseline's loss after millions of training tokens", unit=1e6)


def budgets_of(study: Study) -> Budgets:
  """Tokens -> seed -> loss, of the baseline's runs."""
  found: dict[float, dict[int, float]] = {}
  for (_, seed), result in study.done.items():
    found.setdefault(result["tokens"], {})[seed] = float(result["final"][study.plan.metric])
  return found


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


def read_speedups(folder: Path, scale: str) -> Speedups | None:
  """The effective speed-ups that the results below a folder of studies allow.

  None without a baseline of three numbers of tokens.

  Args:
    folder: of the studies, experiments/quality; files of speeds are named from two levels above.
    scale: of the studies.

  Raises:
    DataError: plans, results or speeds cannot be used.
  """
  try:
    baseline = read_study(folder / CURVE, scale)
    speeds = read_json(folder / CURVE / SPEEDS, _SPEEDS_SHAPE)
  except FileNotFoundError:
    return None
  budgets = budgets_of(baseline)
  if len(budgets) < 3:
    return None
  found = []
  compared = compared_with(baseline, folder, scale)
  for link, variants in speeds.items():
    for variant, source in variants.items():
      if variant not in compared:
        continue
      study, runs = compared[variant]
      tokens = next(iter(runs.values()))["tokens"]
      metric, base = baseline.plan.metric, budgets.get(tokens, {})
      pairs = [float(r["final"][metric]) - base[seed] for seed, r in runs.items() if seed in base]
      if len(pairs) < 2:
        continue
      where = folder.parents[1] / source["file"]
      measured = ratios(where, source["label"], source["base"], source["arm"])
      named = f"{source['file']}, {source['label']}: {source['base']}, {source['arm']}"
      fitted = effective_speedup(budgets, pairs, tokens, measured)
      joined = effective_speedup(budgets, pairs, tokens, measured, fit=join_means)
      found.append(Worth(variant, study, link, named, fitted, joined))
  return Speedups(budgets, found)


def compared_with(
  baseline: Study, folder: Path, scale: str
) -> dict[str, tuple[str, dict[int, Result]]]:
  """The runs that can be compared with a baseline's, by variant: name of the study, seed -> run.

  They share the baseline's configuration, but for the fields of their variant, and its text.

  Raises:
    DataError: plans or results cannot be used.
  """
  text = next((text_of(result.get("data", {})) for result in baseline.done.values()), {})
  found: dict[str, tuple[str, dict[int, Result]]] = {}
  for path in sorted(folder.glob(f"*/results/plan-{scale}.json")):
    study = read_study(path.parents[1], scale)
    if study.plan.config != baseline.plan.config:
      continue
    for (variant, seed), result in study.done.items():
      named, runs = found.setdefault(variant, (study.plan.study, {}))
      if named == study.plan.study and text_of(result.get("data", {})) == text:
        runs[seed] = result
  return {variant: (named, runs) for variant, (named, runs) in found.items() if runs}


def speedups_table(speedups: Speedups, scale: str) -> Table:
  """One row a variant and link: Sc, ratio of throughputs, Sw, with 95 % intervals."""
  rows = tuple(
    (
      one.variant,
      one.study,
      one.link,
      _interval(one.joined.data),
      _interval(one.joined.throughput),
      _interval(one.joined.effective),
      _interval(one.speedup.data),
      _interval(one.speedup.effective),
      one.source,
    )
    for one in speedups.found
  )
  heads = ("variant", "runs of", "link", "Sc, joined", "throughput", "Sw, joined", "Sc, fitted",
           "Sw, fitted", "measured in")  # fmt: skip
  title = (
    f"Effective speed-up over top2, {scale}, by the baseline's measured losses, joined, and by the "
    f"curve fitted to them, which misses them by up to {speedups.misfit:.3f} nats"
  )
  return Table(title, heads, rows)


def _interval(found: Estimate) -> str:
  shown = lambda x: "∞" if math.isinf(x) else f"{x:.3f}"
  if found.low == found.high:
    return f"{shown(found.value)}×"
  return f"{shown(found.value)}× ({shown(found.low)} to {shown(found.high)})"
