"""Plots of studies as SVG elements of a page: sharp at every size, with text that can be found."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence

from scmoe.reports.curves import COLOURS
from scmoe.reports.records import number
from scmoe.reports.studies import Finding, Study

_WIDTH, _LEFT, _ROW = 900, 260, 26
_TEXT = "font-family='system-ui, sans-serif' font-size='12' fill='currentColor'"


def differences_plot(found: Sequence[Finding], metric: str) -> str:
  """The difference of each contrast with its 95 % interval, and its margin as a band.

  Returns:
    an SVG element; empty where no contrast has a pair.
  """
  shown = [f for f in found if f.test is not None]
  edges = [0.0]
  for one in shown:
    assert one.test is not None
    edges += [x for x in (one.test.mean, one.test.low, one.test.high) if x is not None]
    edges += [one.contrast.margin, -one.contrast.margin] if one.contrast.margin else []
  if not shown or max(edges) == min(edges):
    return ""
  place = _scale(min(edges), max(edges), _LEFT, _WIDTH - 20)
  bottom = _ROW * (len(shown) + 1)
  parts = [f"<line x1='{place(0):.1f}' x2='{place(0):.1f}' y1='4' y2='{bottom}' stroke='#888'/>"]
  for row, one in enumerate(shown, 1):
    y, test, contrast = _ROW * row - 6, one.test, one.contrast
    assert test is not None
    name = html.escape(f"{contrast.variant} − {contrast.base}")
    parts.append(f"<text x='4' y='{y + 4}' {_TEXT}>{name}</text>")
    if contrast.margin:
      left, wide = place(-contrast.margin), place(contrast.margin) - place(-contrast.margin)
      parts.append(
        f"<rect x='{left:.1f}' y='{y - 9}' width='{wide:.1f}' height='18' fill='#8883'/>"
      )
    if test.low is not None and test.high is not None:
      parts.append(
        f"<line x1='{place(test.low):.1f}' x2='{place(test.high):.1f}' y1='{y}' y2='{y}' "
        f"stroke='{COLOURS[0]}' stroke-width='2'/>"
      )
    parts.append(f"<circle cx='{place(test.mean):.1f}' cy='{y}' r='4' fill='{COLOURS[0]}'/>")
  parts += _ticks(min(edges), max(edges), place, bottom)
  about = f"differences of {metric} with 95 % intervals"
  return _svg(parts, bottom + 24, about)


def standalone(plot: str) -> str:
  """A plot of a page as an SVG file, for READMEs: with its namespace, on white.

  Args:
    plot: an element that a function of this module returned, not empty.
  """
  element = plot[plot.index("<svg ") : plot.index("</svg>")]
  opening, rest = element.split(">", 1)
  namespace = "xmlns='http://www.w3.org/2000/svg' color='black'"
  opening = opening.replace("<svg ", f"<svg {namespace} ").replace(" width='100%'", "")
  return f"{opening}><rect width='100%' height='100%' fill='white'/>{rest}</svg>\n"


def curves_plot(study: Study) -> str:
  """Held-out loss over training tokens: the mean over seeds of every variant.

  Returns:
    an SVG element; empty without two evaluations of a variant.
  """
  curves: dict[str, list[tuple[float, float]]] = {}
  for name in study.plan.variants:
    at: dict[float, list[float]] = {}
    for (variant, _), result in study.done.items():
      if variant == name:
        for pair in zip(result["evals"].get("tokens", ()), result["evals"].get("loss", ())):
          tokens, loss = map(number, pair)
          if tokens is not None and loss is not None:
            at.setdefault(tokens, []).append(loss)
    points = [(x, statistics.fmean(values)) for x, values in sorted(at.items())]
    if len(points) > 1:
      curves[name] = points
  about = "held-out loss over millions of training tokens, mean over seeds"
  return lines_plot(curves, about, unit=1e6)


def lines_plot(
  curves: Mapping[str, Sequence[tuple[float, float]]], about: str, unit: float = 1.0
) -> str:
  """A plot with one line for each name, and a legend.

  Args:
    curves: name -> points (x, y), each with two points or more.
    about: the caption.
    unit: number by which the values of x are divided in the labels of the axis.

  Returns:
    an SVG element; empty without curves.
  """
  if not curves:
    return ""
  xs = [x for points in curves.values() for x, _ in points]
  ys = [y for points in curves.values() for _, y in points]
  height = 320
  across = _scale(min(xs), max(xs), 60, _WIDTH - 190)
  up = _scale(min(ys), max(ys), height - 30, 10)
  parts = []
  for row, (name, points) in enumerate(curves.items()):
    colour = COLOURS[row % len(COLOURS)]
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
    y = 20 + 18 * row
    parts.append(f"<rect x='{_WIDTH - 180}' y='{y - 9}' width='12' height='4' fill='{colour}'/>")
    parts.append(f"<text x='{_WIDTH - 160}' y='{y}' {_TEXT}>{html.escape(name)}</text>")
  parts += _ticks(min(xs), max(xs), across, height - 30, unit=unit)
  for y in (min(ys), (min(ys) + max(ys)) / 2, max(ys)):
    parts.append(f"<text x='4' y='{up(y) + 4:.1f}' {_TEXT}>{y:.3f}</text>")
  return _svg(parts, height, about)


def _scale(low: float, high: float, begin: float, end: float):
  """The function from values to pixels; a span of 0 lies at the beginning."""
  span = high - low or 1.0
  return lambda x: begin + (end - begin) * (x - low) / span


def _ticks(low: float, high: float, place, y: float, unit: float = 1.0) -> list[str]:
  """Labels at round values between two edges."""
  step = 10 ** math.floor(math.log10((high - low) or 1.0))
  step = step / 2 if (high - low) / step < 3 else step
  values = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
  return [
    f"<text x='{place(v):.1f}' y='{y + 18:.1f}' text-anchor='middle' {_TEXT}>{v / unit:g}</text>"
    for v in values
  ]


def _svg(parts: Sequence[str], height: float, about: str) -> str:
  title = html.escape(about)
  return (
    f"<figure><svg viewBox='0 0 {_WIDTH} {height:g}' role='img' width='100%' "
    f"aria-label='{title}'>{''.join(parts)}</svg><figcaption><small>{title}</small></figcaption>"
    "</figure>"
  )
