"""Studies: variants of a configuration with several seeds, compared as a plan registered before.

A study is a folder below experiments/quality/:

  README.md                      hypothesis, metric, sizes, seeds, margins: written before the runs
  results/plan-SCALE.json        the same for this module (`Plan`)
  results/runs/SCALE-TIME.jsonl  one line per run (`result_line`), one file per call of its run.py

A call adds one file and changes none, so results of several machines are merged by copying their
files into one folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.stored import Maybe, parse_json, read_bytes, read_json, write_whole
from scmoe.reports.records import Line, Record, number, printable
from scmoe.reports.statistics import PairedTest, equivalence, holm, paired_test
from scmoe.reports.tables import Table
from scmoe.training.health import DEAD, DIVERSITY

# Which way is better; `ema_` is that of the average of the weights (`optimizer.ema`).
METRICS = {
  "loss": "lower",
  "bits_per_byte": "lower",
  "accuracy": "higher",
  "ema_accuracy": "higher",
}
LEVEL = 0.05  # significance level of a test, after Holm's adjustment
POINTS = 200  # most points of a training curve in a result line
_ROUTER = ("drop", "imbalance", "dead", "diversity", "router_entropy", "confidence",
           "max_violation", "balance_loss", "shortcut_ratio", "real_experts")  # fmt: skip
_PLAN_SHAPE = {
  "study": str, "scale": str, "title": str, "metric": str, "config": dict, "variants": {"*": dict},
  "seeds": {"*": int}, "contrasts": [{"variant": str, "base": str, "margin": object}],
}  # fmt: skip
_RESULT_SHAPE = {
  "study": str, "scale": str, "variant": str, "seed": int, "plan": str, "status": str, "date": str,
  "final": {"*": object}, "train": {"*": list}, "evals": {"*": list},
  "hardware": str, "tokens": float,
  "parameters": dict, "git": {"commit": Maybe(str), "changed": Maybe(bool)}, "data": Maybe(dict),
  "versions": Maybe(dict), "environment": Maybe(dict), "step_seconds": Maybe(dict),
  "steps": Maybe(int), "seconds": Maybe(float),
}  # fmt: skip

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Contrast:
  """A planned comparison: metric of the variant minus that of the base, paired by seed.

  Attributes:
    variant, base: names of variants.
    margin: margin of an equivalence test, in units of the metric; None: no such test.
  """

  variant: str
  base: str
  margin: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """A study at one scale, as it was registered.

  Attributes:
    study: the folder's name.
    scale: cpu, gpu or smoke.
    title: the question, in one line.
    config: the configuration that all runs share, as `scmoe.run.config.to_dict` gives it.
    variants: name -> fields that the variant changes, with their values as text.
    seeds: name -> number of seeds n; the seeds are 0 to n - 1.
    contrasts: the planned comparisons. For Holm's adjustment all of them are one family, and those
      with a margin are another.
    metric: one of `METRICS`, read from a run's last evaluation.
  """

  study: str
  scale: str
  title: str
  config: dict[str, Any]
  variants: dict[str, dict[str, str]]
  seeds: dict[str, int]
  contrasts: tuple[Contrast, ...]
  metric: str = "loss"

  def __post_init__(self) -> None:
    named = {name for c in self.contrasts for name in (c.variant, c.base)}
    unknown = (named - set(self.variants)) | (set(self.seeds) ^ set(self.variants))
    if unknown:
      raise ConfigError(
        f"the plan of {self.study} does not agree with itself about the variants "
        f"{', '.join(sorted(unknown))}; name each in variants and in seeds"
      )
    for c in self.contrasts:
      if c.margin is not None and not (number(c.margin) or 0) > 0:
        raise ConfigError(
          f"the plan of {self.study} has the margin {c.margin!r} for {c.variant} and {c.base}; "
          "name a number above 0, or null for no equivalence test"
        )
    if self.metric not in METRICS:
      raise ConfigError(f"the metric {self.metric!r} is unknown; one of: {', '.join(METRICS)}")

  @property
  def runs(self) -> list[tuple[str, int]]:
    """(variant, seed) of every run, by seed, so that a study that is cut short has pairs."""
    most = max(self.seeds.values(), default=0)
    return [(v, s) for s in range(most) for v in self.variants if s < self.seeds[v]]

  def digest(self, variant: str) -> str:
    """A short digest of a variant's configuration without the seed."""
    content = {"config": self.config, "fields": self.variants[variant]}
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

  @property
  def file(self) -> str:
    """The name of the plan's file: plan-SCALE.json."""
    return f"plan-{self.scale}.json"

  def write(self, folder: Path) -> None:
    """Writes the plan's `file` into a folder that exists."""
    text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)  # the variants in order
    write_whole(folder / self.file, f"{text}\n".encode())


def read_plan(path: Path) -> Plan:
  """Reads a plan that `Plan.write` wrote.

  Raises:
    FileNotFoundError: there is no such file.
    DataError: the file is not a plan, or that of another scale than its name says.
    ConfigError: the plan contradicts itself.
  """
  values = read_json(path, _PLAN_SHAPE)
  contrasts = tuple(Contrast(c["variant"], c["base"], c["margin"]) for c in values["contrasts"])
  names = ("study", "scale", "title", "config", "variants", "seeds", "metric")
  plan = Plan(**{name: values[name] for name in names}, contrasts=contrasts)
  if path.name != plan.file:
    raise DataError(
      f"{path} has the scale {plan.scale!r}; rename it {plan.file}, or correct the scale in it"
    )
  return plan


# --- results --------------------------------------------------------------------------------------


def result_line(plan: Plan, variant: str, seed: int, record: Record, **extra: Any) -> Result:
  """The result of a run that a study stores: a few kilobytes, JSON-able.

  Args:
    plan, variant, seed: identify the run.
    record: the run, read from its folder.
    **extra: further entries, such as `command` and `seconds` of wall time.
  """
  card, last = record.card, (record.train or [{}])[-1]
  final = {k: v for k, v in (record.evals or [{}])[-1].items() if number(v) is not None}
  end = (record.end or [{}])[-1]
  tokens = number(last.get("tokens")) or 0.0
  per_step = tokens / last["step"] if last.get("step") else 0.0
  return {
    "study": plan.study,
    "scale": plan.scale,
    "variant": variant,
    "seed": seed,
    "data_seed": seed,
    "plan": plan.digest(variant),
    "overrides": plan.variants[variant],
    "status": _status(record, final, plan.metric),
    "date": card.get("time", ""),
    "git": card.get("git", {}),
    "hardware": record.devices,
    "host": {name: x for name, x in card.get("host", {}).items() if name != "name"},
    "versions": card.get("versions", {}),
    "environment": card.get("environment", {}),
    "data": card.get("data", {}),
    "parameters": card.get("parameters", {}),
    "flops_per_token": card.get("flops_per_token"),
    "steps": record.steps,
    "tokens": tokens,
    "final": final if record.done else {},
    "train": _curve(record.train, per_step, POINTS),
    "evals": _curve(record.evals, per_step, POINTS),
    "step_seconds": {
      "median": number(end.get("median_seconds_per_step")),
      "p99": number(end.get("p99_seconds_per_step")),
    },
    "memory_bytes": number(end.get("device_memory_bytes")) or number(end.get("host_memory_bytes")),
    "router": {name: last[name] for name in _ROUTER if number(last.get(name)) is not None},
    "layers": last.get("layers", {}),
    **extra,
  }


def _status(record: Record, final: Mapping[str, Any], metric: str) -> str:
  if record.done and number(final.get(metric)) is None:
    return f"failed: its last evaluation has no finite {metric}"
  return record.status


def _curve(lines: Sequence[Line], per_step: float, most: int) -> dict[str, list[Any]]:
  """Steps, tokens and losses of at most `most` points.

  If there are more lines, each point is the mean of several neighbouring ones, at their last step.
  """
  known = [(line["step"], x) for line in lines if (x := number(line.get("loss"))) is not None]
  size = -(-len(known) // most) or 1
  parts = [known[i : i + size] for i in range(0, len(known), size)]
  steps = [part[-1][0] for part in parts]
  losses = [round(sum(x for _, x in part) / len(part), 6) for part in parts]
  return {"step": steps, "tokens": [step * per_step for step in steps], "loss": losses}


def write_results(path: Path, results: Iterable[Result]) -> None:
  """Writes a file of result lines, in a folder that exists."""
  lines = "".join(json.dumps(result, allow_nan=False) + "\n" for result in results)
  write_whole(path, lines.encode())


@dataclasses.dataclass(frozen=True)
class Study:
  """A plan with its results.

  Attributes:
    plan: the registered plan.
    done: (variant, seed) -> the newest complete result.
    failed: attempts without a complete result, oldest first, even if a later attempt succeeded.
    other: results in the folder with another configuration or other text, which are left out.
  """

  plan: Plan
  done: dict[tuple[str, int], Result]
  failed: list[Result]
  other: list[Result]

  def values(self, variant: str) -> dict[int, float]:
    """Seed -> metric, for the finished runs of a variant."""
    metric = self.plan.metric
    return {seed: float(r["final"][metric]) for (v, seed), r in self.done.items() if v == variant}

  def differences(self, contrast: Contrast) -> list[float]:
    """Metric of the variant minus that of the base, for the seeds that both have, by seed."""
    own, base = self.values(contrast.variant), self.values(contrast.base)
    return [own[seed] - base[seed] for seed in sorted(own) if seed in base]


def read_results(folders: Iterable[Path], scale: str) -> list[Result]:
  """All result lines of a scale in some folders runs/, oldest first.

  Each gets `file`, its path from the folder of all studies, and `line`, counted from 1.

  Raises:
    DataError: a line is not a result in JSON.
  """
  found = []
  for path in sorted(path for folder in folders for path in folder.glob(f"{scale}-*.jsonl")):
    for row, text in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
      try:
        line = parse_json(text, f"{path}:{row}", _RESULT_SHAPE)
      except DataError as error:
        raise DataError(f"{error}; remove this line, and the next call trains its run") from None
      found.append({**line, "file": "/".join(path.parts[-4:]), "line": row})
  return sorted(found, key=lambda line: line["date"])


def collected(plan: Plan, results: Iterable[Result]) -> Study:
  """Sorts results into a plan's finished, failed and other ones.

  A result belongs to the variant whose configuration it has, whichever study trained it: several
  studies compare with top2, and one run serves all. Runs can be paired only if they read the same
  text, so results on other text than the study's first finished run are left out; while it has
  none, than the first finished run of another study.
  """
  found, failed, other = [], [], []
  wanted, names = set(plan.runs), {plan.digest(name): name for name in plan.variants}
  for result in results:
    key = names.get(result["plan"], ""), result["seed"]
    if key not in wanted:
      other += [result] if result["study"] == plan.study else []
      continue
    result = {**result, "variant": key[0]}
    if result["status"] != "done" or number(result["final"].get(plan.metric)) is None:
      failed.append(result)
    else:
      found.append(result)
  own = [result for result in found if result["study"] == plan.study]
  text = text_of((own or found)[0].get("data", {})) if found else {}
  done = {}
  for result in found:
    if text_of(result.get("data", {})) == text:
      done[result["variant"], result["seed"]] = result
    elif result["study"] == plan.study:
      other.append(result)
  ordered = {key: done[key] for key in plan.runs if key in done}
  return Study(plan, ordered, failed, other)


def text_of(data: Mapping[str, Any]) -> dict[str, str]:
  """The part of a fingerprint of data that does not depend on the seed or number of processes.

  Args:
    data: `fingerprint()` of a run's data, as the object or as read from JSON.

  Returns:
    values by name, as JSON: the object has tuples where JSON has lists.
  """
  own = ("seed", "order", "process_count")
  return {name: json.dumps(x, sort_keys=True) for name, x in data.items() if name not in own}


def read_study(folder: Path, scale: str) -> Study:
  """The study of a folder at one scale, with the runs that it shares with its neighbours.

  Raises:
    FileNotFoundError: the study was not registered at that scale.
    DataError: plan or results cannot be used.
  """
  results = folder / "results"
  try:
    plan = read_plan(results / f"plan-{scale}.json")
  except ConfigError as error:
    raise DataError(f"{results / f'plan-{scale}.json'}: {error}") from None
  return collected(plan, read_results(runs_of_all(folder.parent), scale))


def runs_of_all(folder: Path) -> list[Path]:
  """The folders with results of all studies below a folder."""
  return sorted(folder.glob("*/results/runs"))


# --- findings -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finding:
  """The test of a contrast.

  Attributes:
    contrast: the planned comparison.
    test: test of the paired differences; None without a pair.
    p: p-value of the difference, after Holm's adjustment over all contrasts of the plan.
    equivalent: p-value of the equivalence test, adjusted over the contrasts with a margin.
    better: "lower" or "higher", whichever is better for the metric.
    complete: whether every planned pair has finished.
  """

  contrast: Contrast
  test: PairedTest | None
  p: float | None
  equivalent: float | None
  better: str
  complete: bool

  @property
  def verdict(self) -> str:
    """The result in a few words; `not settled` if no test of the contrast was significant."""
    if self.test is None or self.test.p is None:
      return "no test: fewer than two pairs"
    words = []
    if self.equivalent is not None and self.equivalent < LEVEL:
      words.append(f"equivalent within {self.contrast.margin:g}")
    if self.p is not None and self.p < LEVEL:
      words.append("better" if (self.test.mean < 0) == (self.better == "lower") else "worse")
    verdict = ", ".join(words) or "not settled"
    return verdict if self.complete else f"{verdict} (runs are missing)"


def findings(study: Study) -> list[Finding]:
  """The finding of each contrast, in the plan's order."""
  plan, found = study.plan, [study.differences(c) for c in study.plan.contrasts]
  tests = [paired_test(d) if d else None for d in found]
  adjusted = holm([test.p if test else None for test in tests])
  margins = [i for i, c in enumerate(plan.contrasts) if c.margin is not None]
  equal = dict(zip(margins, holm([_equivalence(found[i], plan.contrasts[i]) for i in margins])))
  full = [min(plan.seeds[c.variant], plan.seeds[c.base]) == len(d)
          for c, d in zip(plan.contrasts, found)]  # fmt: skip
  better = METRICS[plan.metric]
  return [
    Finding(c, tests[i], adjusted[i], equal.get(i), better, full[i])
    for i, c in enumerate(plan.contrasts)
  ]


def _equivalence(differences: Sequence[float], contrast: Contrast) -> float | None:
  return equivalence(differences, contrast.margin) if differences and contrast.margin else None


def variants_table(study: Study) -> Table:
  """One row a variant: runs, mean ± std over seeds, tokens, parameters, time of a step."""
  plan, rows = study.plan, []
  for name in plan.variants:
    values = list(study.values(name).values())
    of = [r for (v, _), r in study.done.items() if v == name]
    test = paired_test(values) if values else None
    active = number(of[0]["parameters"].get("active")) if of else None
    steps = sorted(x for r in of if (x := number(r.get("step_seconds", {}).get("median"))))
    rows.append(
      (
        name,
        f"{len(values)} of {plan.seeds[name]}",
        "–" if test is None else f"{test.mean:.4f}",
        "–" if test is None or test.std is None else f"{test.std:.4f}",
        "–" if not of else f"{of[0]['tokens'] / 1e6:,.1f}",
        "–" if active is None else f"{active / 1e6:,.1f}",
        "–" if not steps else f"{1e3 * steps[len(steps) // 2]:,.1f}",
      )
    )
  heads = ("variant", "runs", plan.metric, "± std", "tokens, 10⁶", "active, 10⁶", "step ms")
  return Table(f"{plan.study}, {plan.scale}: {plan.metric} of held-out data", heads, tuple(rows))


def findings_table(study: Study) -> Table:
  """One row a contrast: difference, interval, p-values, verdict."""
  rows = []
  for found in findings(study):
    test, contrast = found.test, found.contrast
    interval = test is not None and test.low is not None
    rows.append(
      (
        f"{contrast.variant} − {contrast.base}",
        "0" if test is None else str(test.count),
        "–" if test is None else f"{test.mean:+.4f}",
        f"{test.low:+.4f} to {test.high:+.4f}" if test and interval else "–",
        _p(test.p if test else None),
        _p(found.p),
        "" if contrast.margin is None else _p(found.equivalent),
        found.verdict,
      )
    )
  heads = ("contrast", "pairs", "difference", "95 % interval", "p", "p, Holm", "p, equivalence",
           "verdict")  # fmt: skip
  title = f"Paired by seed; Holm's adjustment over {len(study.plan.contrasts)} contrasts"
  if (tests := sum(c.margin is not None for c in study.plan.contrasts)) > 1:
    title += f" and over {tests} tests of equivalence"
  return Table(title, heads, tuple(rows))


def _p(value: float | None) -> str:
  return "–" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _collapsed(router: Mapping[str, float]) -> bool:
  """Whether these are figures of a run whose worst layer has a collapsed router."""
  return router.get("dead", 0.0) > DEAD or router.get("diversity", 1.0) < DIVERSITY


def complaints(study: Study) -> list[str]:
  """Lines with caveats for the tables: failures, missing runs, collapsed routers, results left out.

  A router has collapsed if its last step has the figures of `CollapseAlarm`.
  """
  missing = len(study.plan.runs) - len(study.done)
  lines = [f"{missing} of {len(study.plan.runs)} planned runs have no result"] if missing else []
  for result in study.failed:
    again = ", made good later" if (result["variant"], result["seed"]) in study.done else ""
    lines.append(
      f"{result['variant']}, seed {result['seed']}: {printable(result['status'])}{again}"
    )
  for variant in study.plan.variants:
    own = [result for (name, _), result in study.done.items() if name == variant]
    routers = [result.get("router") or {} for result in own]
    dead = [router.get("dead", 0.0) for router in routers if _collapsed(router)]
    if dead:
      lines.append(
        f"{variant}: in the last step of {len(dead)} of {len(routers)} runs the router of a layer "
        f"had collapsed (up to {100 * max(dead):.0f} % of its experts had no token)"
      )
  if study.other:
    lines.append(f"{len(study.other)} results of another configuration or other text are left out")
  machines = {r["hardware"] for r in study.done.values()}
  if len(machines) > 1:
    lines.append(f"runs of several kinds of hardware: {', '.join(sorted(machines))}")
  changed = {r["git"].get("commit", "")[:9] for r in study.done.values() if r["git"].get("changed")}
  if changed:
    lines.append(f"runs of a checkout with changes beside the commit: {', '.join(sorted(changed))}")
  return lines
