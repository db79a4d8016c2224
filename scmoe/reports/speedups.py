"""Effective speed-ups of a folder of studies: ratios of data times ratios of throughput, by link.

A study that trains the baseline with several amounts of text gives the baseline's curve. Its file
baseline.json names these variants of it, and those that are compared with the baseline, each with
the study that trains it:

  {"variants": [VARIANT, ...], "compared": {VARIANT: STUDY}}

The file speeds.json, beside the studies' folders, says where throughputs were measured:

  {LINK: {VARIANT: {"file": results of experiments/, "label": row, "base": arm, "arm": arm}}}
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from scmoe.base.errors import DataError
from scmoe.base.stored import Maybe, read_json
from scmoe.reports.plots import lines_plot
from scmoe.reports.statistics import (
  Budgets,
  Estimate,
  Speedup,
  curves_of,
  effective_speedup,
  fit_curve,
  join_means,
)
from scmoe.reports.studies import Study, read_study, text_of
from scmoe.reports.tables import Table

BASELINE, SPEEDS = "baseline.json", "speeds.json"
_BASELINE_SHAPE = {"variants": [str], "compared": {"*": str}}
_SPEEDS_SHAPE = {"*": {"*": {"file": str, "label": str, "base": str, "arm": str}}}
_TIMES_SHAPE = [{"label": str, "arms": {"*": {"ms": float, "rounds_ms": Maybe([float])}}}]


@dataclasses.dataclass(frozen=True)
class Worth:
  """The effective speed-up of a variant on a link.

  Attributes:
    variant: its name in the study.
    study: the study of the variant.
    pairs: runs of the variant that were compared with one of the baseline, of the same seed.
    link: between GPUs.
    file: of the throughput, a path in this repository.
    arms: the file's row, and two arms of it: the baseline's and the variant's.
    fitted: by the fitted curve, with intervals.
    joined: by the curve that joins the measured losses.
  """

  variant: str
  study: str
  pairs: int
  link: str
  file: str
  arms: str
  fitted: Speedup
  joined: Speedup


@dataclasses.dataclass(frozen=True)
class Speedups:
  """The baseline's losses, and the effective speed-ups that follow from them.

  Attributes:
    curve: the study of the baseline's curve.
    means: mean loss of the baseline after each number of tokens, by tokens.
    fitted: loss of the fitted curve after `means`' tokens, and some between.
    found: one for each variant and link.
  """

  curve: str
  means: dict[float, float]
  fitted: dict[float, float]
  found: list[Worth]

  @property
  def misfit(self) -> float:
    """By how much the fitted curve misses a mean loss, at most, in nats per token."""
    return max(abs(self.fitted[d] - loss) for d, loss in self.means.items())

  def plot(self) -> str:
    """The baseline's mean losses, joined, and its fitted curve, as an SVG element."""
    lines = {"measured": [*self.means.items()], "fitted": sorted(self.fitted.items())}
    return lines_plot(lines, "the baseline's loss after millions of training tokens", unit=1e6)


def budgets_of(study: Study, baseline: Sequence[str]) -> Budgets:
  """Tokens -> seed -> loss, of the runs of a study's variants that are the baseline.

  Raises:
    DataError: the study has no such variant.
  """
  if missing := [name for name in baseline if name not in study.plan.variants]:
    where = study.plan.study
    raise DataError(
      f"{BASELINE} names {missing[0]}, which {where} does not train; name a variant of it"
    )
  found: dict[float, dict[int, float]] = {}
  for (variant, seed), result in study.done.items():
    if variant not in baseline:
      continue
    found.setdefault(result["tokens"], {})[seed] = float(result["final"][study.plan.metric])
  return found


def ratios(path: Path, label: str, base: str, arm: str) -> list[float]:
  """Throughput of an arm over the base's: of each round, or of the medians if only they were kept.

  Raises:
    DataError: there is no such file, or it has no such row or arm.
  """
  try:
    rows = read_json(path, _TIMES_SHAPE)
  except FileNotFoundError:
    raise DataError(f"{path} does not exist, and {SPEEDS} names it; give its path there") from None
  arms = next((row["arms"] for row in rows if row["label"] == label), {})
  if missing := [name for name in (base, arm) if name not in arms]:
    raise DataError(f"{path} has no arm {missing[0]!r} in the row {label!r}")
  rounds = [arms[name].get("rounds_ms") for name in (base, arm)]
  if all(rounds) and len(rounds[0]) == len(rounds[1]):
    return [before / after for before, after in zip(*rounds)]
  return [arms[base]["ms"] / arms[arm]["ms"]]


def root_of(place: Path) -> Path:
  """The folder of which a path in `SPEEDS` is part: three levels above that of the study."""
  return place.resolve().parents[2]


def read_speedups(place: Path, scale: str) -> Speedups | None:
  """The effective speed-ups over the baseline of one study.

  None if the study has no baseline, is not registered at the scale, or has trained the baseline
  with fewer than three numbers of tokens.

  Args:
    place: folder of the study. The studies that its baseline.json names lie beside it; files of
      speeds are named from three levels above.
    scale: of the studies.

  Raises:
    DataError: plans, results or speeds cannot be used.
  """
  try:
    named = read_json(place / BASELINE, _BASELINE_SHAPE)
    baseline = read_study(place, scale)
  except FileNotFoundError:
    return None
  budgets = budgets_of(baseline, named["variants"])
  if len(budgets) < 3:
    return None
  fitted, joined = curves_of(budgets, fit_curve), curves_of(budgets, join_means)
  compared = {
    variant: (study, *differences(baseline, budgets, place.parent / study, variant))
    for variant, study in named["compared"].items()
  }
  found = []
  for link, sources in _speeds(place.parent / SPEEDS, compared).items():
    for variant, (study, pairs, tokens) in compared.items():
      source = sources.get(variant)
      if source is None or len(pairs) < 2:
        continue
      where = root_of(place) / source["file"]
      measured = ratios(where, source["label"], source["base"], source["arm"])
      arms = f"{source['label']}: {source['base']}, {source['arm']}"
      worth = (effective_speedup(own, pairs, tokens, measured) for own in (fitted, joined))
      found.append(Worth(variant, study, len(pairs), link, source["file"], arms, *worth))
  means = {d: statistics.fmean(budgets[d].values()) for d in sorted(budgets)}
  between = map(float, np.geomspace(min(means), max(means), 40))
  return Speedups(place.name, means, {d: fitted.best.loss(d) for d in (*means, *between)}, found)


def _speeds(path: Path, compared: Collection[str]) -> dict[str, dict[str, dict[str, str]]]:
  """Link -> variant -> where its throughput was measured, from the file `SPEEDS`.

  Raises:
    DataError: there is no such file, or it lacks a variant that is compared with the baseline.
  """
  try:
    speeds = read_json(path, _SPEEDS_SHAPE)
  except FileNotFoundError:
    raise DataError(f"{path} does not exist; a study with a {BASELINE} needs it") from None
  if missing := [name for name in compared if all(name not in own for own in speeds.values())]:
    raise DataError(f"{path} has no speed of {missing[0]}, which a {BASELINE} names; add it")
  return speeds


def differences(
  baseline: Study, budgets: Budgets, place: Path, variant: str
) -> tuple[list[float], float]:
  """Losses of a study's variant less the baseline's, by seed, and after how many tokens.

  Runs of another configuration than the baseline's (but for the fields of the variant), of another
  text, or of other numbers of tokens than the baseline's give none, and so does a study that is not
  registered at the scale.

  Args:
    baseline: the study of the curve.
    budgets: its losses.
    place: folder of the variant's study.
    variant: its name there.

  Raises:
    DataError: there is no such folder, the study's plan or results cannot be used, it has no such
      variant, or its runs have several numbers of tokens.
  """
  if not place.is_dir():
    raise DataError(f"{BASELINE} names the study {place.name}, and {place} does not exist")
  try:
    study = read_study(place, baseline.plan.scale)
  except FileNotFoundError:
    return [], 0.0
  if variant not in study.plan.variants:
    raise DataError(
      f"{BASELINE} names {variant}, which {place} does not train; name a variant of it"
    )
  text = next((text_of(result.get("data", {})) for result in baseline.done.values()), {})
  if study.plan.config != baseline.plan.config:
    return [], 0.0
  runs = {
    seed: result
    for (name, seed), result in study.done.items()
    if name == variant and text_of(result.get("data", {})) == text
  }
  lengths = {result["tokens"] for result in runs.values()}
  if len(lengths) > 1:
    raise DataError(f"{place}: the runs of {variant} have {sorted(lengths)} tokens, not one number")
  tokens, metric = lengths.pop() if lengths else 0.0, baseline.plan.metric
  base = budgets.get(tokens, {})
  pairs = [float(r["final"][metric]) - base[seed] for seed, r in runs.items() if seed in base]
  return pairs, tokens


def speedups_table(speedups: Speedups, scale: str) -> Table:
  """One row a variant and link: Sc, ratio of throughputs, Sw, with 95 % intervals."""
  rows = tuple(
    (
      one.variant,
      one.link,
      one.study,
      str(one.pairs),
      _interval(one.joined.data),
      _interval(one.joined.throughput),
      _interval(one.joined.effective),
      _interval(one.fitted.data),
      _interval(one.fitted.effective),
      f"{one.file}, {one.arms}",
    )
    for one in speedups.found
  )
  heads = ("variant", "link", "study", "pairs", "Sc, joined", "throughput", "Sw, joined",
           "Sc, fitted", "Sw, fitted", "measured in")  # fmt: skip
  title = (
    f"Effective speed-up over top2, {scale}, by the losses of {speedups.curve}, joined, and by the "
    f"curve fitted to them, which misses them by up to {speedups.misfit:.3f} nats"
  )
  return Table(title, heads, rows, keys=2)


def _interval(found: Estimate) -> str:
  shown = lambda x: "∞" if math.isinf(x) else f"{x:.3f}"
  if found.low == found.high:
    return f"{shown(found.value)}×"
  return f"{shown(found.value)}× ({shown(found.low)} to {shown(found.high)})"
