"""Draws curves of groups of runs: the mean over seeds as a line, ± std as a band."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from scmoe.reports.comparison import Comparison, Group
from scmoe.reports.figures import literal_text, new_figure, png
from scmoe.reports.records import Line, Measure, Record, number

# Colours that colour-blind people can tell apart, also in grey (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a00")
Curve = list[tuple[float, float, float]]  # x, mean, standard deviation


def curve(group: Group, lines: Callable[[Record], list[Line]], name: str, x: str) -> Curve:
  """Mean and std of one value at every x that a run of the group logged.

  Args:
    group: the runs.
    lines: gives `train` or `evals` of a run.
    name: name of the value.
    x: `step` or `tokens`.
  """
  at: dict[float, list[float]] = {}
  for record in group.records:
    per_step = _tokens_per_step(record) if x == "tokens" else 1.0
    for line in lines(record):
      if (value := number(line.get(name))) is not None:
        at.setdefault(line["step"] * per_step, []).append(value)
  spread = lambda values: statistics.stdev(values) if len(values) > 1 else 0.0
  return [(x, statistics.fmean(values), spread(values)) for x, values in sorted(at.items())]


@literal_text
def draw_curves(comparison: Comparison) -> bytes:
  """PNG: training loss and validation loss over steps, and the final figure of every run."""
  figure = new_figure(12, 4.2)
  train, evals, final = figure.subplots(1, 3, width_ratios=(5, 5, 4))
  x = _axis(comparison)
  for axes, lines, name, title in (
    (train, lambda r: r.train, "loss", "training loss"),
    (evals, lambda r: r.evals, "loss", "validation loss"),
  ):
    for group, colour in zip(comparison.groups, _colours(comparison)):
      _draw(axes, curve(group, lines, name, x), colour, group.label)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens" if x == "tokens" else "optimizer steps")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
  if train.lines:
    figure.legend(*train.get_legend_handles_labels(), loc="outside lower center", fontsize=9,
                  ncol=min(len(comparison.groups), 4), frameon=False)  # fmt: skip
  _draw_final(final, comparison)
  return png(figure, dpi=140)


def _axis(comparison: Comparison) -> str:
  """`step`, or `tokens` if the runs have steps of different numbers of tokens."""
  sizes = {_tokens_per_step(record) for record in comparison.records if record.train}
  return "tokens" if len(sizes) > 1 else "step"


def _tokens_per_step(record: Record) -> float:
  last = (record.train or [{}])[-1]
  tokens, step = number(last.get("tokens")), number(last.get("step"))
  return tokens / step if tokens and step else 1.0


def _colours(comparison: Comparison) -> list[str]:
  return [COLOURS[i % len(COLOURS)] for i in range(len(comparison.groups))]


def _draw(axes: Any, points: Curve, colour: str, label: str) -> None:
  if not points:
    return
  x, mean, std = (list(column) for column in zip(*points))
  axes.xaxis.get_major_locator().set_params(integer=True)
  if len(x) == 1:
    axes.errorbar(x, mean, yerr=std, fmt="D", color=colour, label=label, capsize=4)
    return
  axes.plot(x, mean, color=colour, label=label, marker="o" if len(x) < 12 else "", markersize=3)
  low, high = [m - s for m, s in zip(mean, std)], [m + s for m, s in zip(mean, std)]
  axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def final_measure(comparison: Comparison) -> Measure | None:
  """The figure of the last panel: bits per byte if there is one, else a loss."""
  known = {m.name: m for m in comparison.measures}
  return next((known[n] for n in ("bits_per_byte", "loss", "train_loss") if n in known), None)


def _draw_final(axes: Any, comparison: Comparison) -> None:
  """Draws a dot for every run, and every group's mean with ± std."""
  measure = final_measure(comparison)
  if measure is None:
    axes.set_axis_off()
    return
  for row, (group, colour) in enumerate(zip(comparison.groups, _colours(comparison))):
    found = group.statistic(measure)
    if found is None:
      continue
    axes.plot(
      found.values, [row + 0.18] * len(found.values), "o", color=colour, alpha=0.5, markersize=4
    )
    axes.errorbar(found.mean, row - 0.08, xerr=found.std or None, fmt="D", color=colour, capsize=4)
  axes.set_yticks(range(len(comparison.groups)), [_short(g.label) for g in comparison.groups])
  axes.invert_yaxis()
  axes.set_ylim(len(comparison.groups) - 0.5, -0.5)
  axes.set_title(f"final {measure.title}, ± std over seeds", fontsize=10)
  axes.grid(alpha=0.25, axis="x")


def _short(label: str) -> str:
  return label if len(label) <= 24 else f"{label[:23]}…"
