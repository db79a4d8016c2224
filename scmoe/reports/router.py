"""Draws a run's routers: statistics over training, and a probe of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scmoe.base.arrays import read_npz
from scmoe.base.errors import DataError
from scmoe.reports.figures import literal_text, new_figure, png
from scmoe.reports.records import Line, Record
from scmoe.training.metrics import router_files

_MOST = 2**28  # largest router file that is read, in bytes

OVER_TRAINING = (
  ("max_violation", "max violation (busiest expert / mean − 1)"),
  ("entropy", "entropy of a token's probabilities / ln E"),
  ("dead", "share of dead experts"),
  ("drop", "share of choices dropped"),
  ("confidence", "confidence (mean largest probability)"),
  ("mutual_information", "token–expert mutual information, nats"),
  ("diversity", "diversity exp(H) / E"),
  ("shortcut_ratio", "|routed| / |main path|"),
)


def layers_over_training(record: Record, name: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps [N], values [N, layers]) of a statistic that metrics.jsonl has for each layer."""
  steps, values = _logged(record.train, name)
  return steps, values.reshape(len(steps), -1 if len(steps) else 0)


def loads_over_training(record: Record) -> tuple[np.ndarray, np.ndarray]:
  """(steps [N], load [N, layers, E]): each expert's share of the choices.

  They are read from metrics.jsonl, or from router files, which runs of larger models write instead.

  Raises:
    DataError: a router file is damaged.
  """
  logged, values = _logged(record.train, "load")
  if len(logged) and values.ndim == 3:
    return logged, values
  steps, loads = [], []
  for step, path in router_files(record.path):
    try:
      arrays = read_npz(path, _MOST)
    except ValueError as error:
      raise DataError(str(error)) from None
    load = arrays.get("load", np.zeros(0))
    if load.ndim == 2 and load.dtype.kind == "f" and load.shape == (loads or [load])[0].shape:
      steps.append(step)
      loads.append(load)
  return np.array(steps), np.array(loads, float)


def _logged(lines: Sequence[Line], name: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps [N], values [N, ...]) of a per-layer statistic; lines of another shape than the last are
  left out."""
  found = [(line["step"], _floats(line.get("layers", {}).get(name))) for line in lines]
  found = [(step, values) for step, values in found if values.size]
  found = [(step, values) for step, values in found if values.shape == found[-1][1].shape]
  return np.array([step for step, _ in found]), np.array([values for _, values in found])


def _floats(value: Any) -> np.ndarray:
  """A JSON list as an array; empty if it is missing, ragged or has something else than numbers."""
  try:
    return np.array([] if value is None else value, float)
  except (ValueError, TypeError, OverflowError):
    return np.zeros(0)


# --- pictures -------------------------------------------------------------------------------------


@literal_text
def draw_training(record: Record) -> bytes | None:
  """PNG of every statistic over training, one curve per layer; None if nothing was logged."""
  shown = [(name, title) for name, title in OVER_TRAINING if len(_logged(record.train, name)[0])]
  if not shown:
    return None
  figure, axes = _figure(len(shown), columns=4, height=2.6)
  for place, (name, title) in zip(axes, shown):
    steps, values = layers_over_training(record, name)
    for layer, colour in zip(range(values.shape[1]), _shades(values.shape[1])):
      place.plot(steps, values[:, layer], color=colour, label=f"MoE layer {layer}", linewidth=1.2)
    place.set_title(title, fontsize=9)
    place.grid(alpha=0.25)
  if len(axes[0].lines) <= 12:
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=6,
                  frameon=False, fontsize=8)  # fmt: skip
  return png(figure, dpi=120)


@literal_text
def draw_loads(record: Record) -> bytes | None:
  """PNG of each expert's load over training, a heat map per layer; None if no load was stored."""
  steps, loads = loads_over_training(record)
  if not len(steps):
    return None
  layers = loads.shape[1]
  figure, axes = _figure(layers, columns=4, height=2.2)
  top = 2.0 / loads.shape[-1]  # white: no choices; half dark: an equal share; darkest: twice that
  image = None
  for layer, place in enumerate(axes[:layers]):
    image = place.imshow(loads[:, layer].T, aspect="auto", cmap="Blues", vmin=0, vmax=top,
                         extent=(0, len(steps), loads.shape[-1] - 0.5, -0.5))  # fmt: skip
    marks = np.unique(np.linspace(0, len(steps) - 1, 4).astype(int))
    place.set_xticks(marks + 0.5, [str(steps[m]) for m in marks], fontsize=8)
    place.set_title(f"MoE layer {layer}", fontsize=9)
  axes[0].set_ylabel("expert", fontsize=8)
  figure.colorbar(image, ax=list(axes), label="share of choices", shrink=0.8)
  return png(figure, dpi=120)


@literal_text
def draw_heat(
  values: np.ndarray, rows: Sequence[str], title: str, *, label: str = "share of choices"
) -> bytes:
  """PNG of one heat map [rows, E]; colours go from 0 to twice an equal share of the choices."""
  figure, (place,) = _figure(1, columns=1, height=0.7 + 0.32 * len(rows), width=9)
  experts = values.shape[1]
  image = place.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=2.0 / experts)
  place.set_yticks(range(len(rows)), rows, fontsize=8)
  place.set_xlabel("expert", fontsize=8)
  place.set_title(title, fontsize=9)
  if experts <= 16 and len(rows) <= 40:
    for row, column in np.ndindex(*values.shape):
      share = values[row, column]
      if np.isfinite(share):
        ink = "white" if share > 1.4 / experts else "black"
        place.text(
          column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink
        )
  figure.colorbar(image, ax=place, label=label)
  return png(figure, dpi=120)


@literal_text
def draw_by(values: np.ndarray, gatings: Sequence[str], rows: Sequence[str], title: str) -> bytes:
  """PNG of a heat map [rows, E] for each gating, e.g. of domains or of token classes."""
  figure, axes = _figure(len(gatings), columns=3, height=0.9 + 0.28 * len(rows))
  image = None
  for place, name, heat in zip(axes, gatings, values):
    image = place.imshow(heat, aspect="auto", cmap="Blues", vmin=0, vmax=2.0 / heat.shape[1])
    place.set_yticks(range(len(rows)), rows, fontsize=8)
    place.set_title(name, fontsize=9)
  figure.suptitle(title, fontsize=10)
  figure.colorbar(image, ax=list(axes), label="share of the row's choices", shrink=0.8)
  return png(figure, dpi=120)


@literal_text
def draw_bars(values: np.ndarray, names: Sequence[str], title: str) -> bytes:
  """PNG of a bar chart with one number per name; NaN is drawn as 0."""
  figure, (place,) = _figure(1, columns=1, height=2.6, width=10)
  place.bar(range(len(names)), np.nan_to_num(values), color="#0072b2")
  place.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
  place.set_title(title, fontsize=9)
  place.grid(alpha=0.25, axis="y")
  return png(figure, dpi=120)


@literal_text
def draw_lines(
  values: np.ndarray, places: Sequence[str], names: Sequence[str], title: str
) -> bytes:
  """PNG of a plot with one curve per name, with a legend for at most 12 names.

  Args:
    values: [names, places]; a NaN leaves a gap.
    places: labels of the horizontal axis.
    names: one per curve.
    title: above the plot.
  """
  figure, (place,) = _figure(1, columns=1, height=2.8, width=10)
  for row, name, colour in zip(values, names, _shades(len(names))):
    place.plot(range(len(places)), row, color=colour, label=name, marker="o", markersize=3)
  place.set_xticks(range(len(places)), places, fontsize=8)
  place.set_title(title, fontsize=9)
  place.grid(alpha=0.25)
  if len(names) <= 12:
    place.legend(frameon=False, fontsize=8, ncol=3)
  return png(figure, dpi=120)


def _figure(count: int, *, columns: int, height: float, width: float = 12) -> tuple[Any, list[Any]]:
  columns = min(columns, count)
  rows = -(-count // columns)
  figure = new_figure(width, 0.5 + height * rows)
  axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
  for place in axes[count:]:
    place.set_axis_off()
  return figure, axes[:count]


def _shades(count: int) -> list[Any]:
  import matplotlib

  return [matplotlib.colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]
