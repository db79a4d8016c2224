"""Timelines of two streams, as PNG, and as SVG with each bar's times as its tooltip."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Colours that stand out on white and on black, and on which black words can be read.
COLOURS = {
  "before": "#8496b0",
  "attention": "#4f94dc",
  "mlp": "#2bb3a3",
  "shared expert": "#6aaf3d",
  "experts": "#f08a24",
  "route": "#b285e0",
  "dispatch": "#e8606a",
  "combine": "#f58bbb",
  "add": "#c3a51e",
  "counts": "#5cc3e6",
  "weights": "#d56ad8",
  "tensor": "#a9744f",
  "all-reduce": "#87912a",
  "other": "#a5a09a",
}
OTHER = "other"


class Bar(NamedTuple):
  """One stage on one stream.

  Attributes:
    stage: its name. A number and the text after it do not change the colour: "attention 1:
      projections" has the colour of "attention".
    start, end: times in the timeline's unit.
    about: further text, e.g. its number of kernels.
  """

  stage: str
  start: float
  end: float
  about: str = ""

  @property
  def word(self) -> str:
    """The key of its colour in `COLOURS`."""
    word = re.sub(r" \d+\b.*", "", self.stage)
    return word if word in COLOURS else OTHER


Rows = Mapping[str, Mapping[str, Sequence[Bar]]]  # arm -> stream -> bars


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Rows of bars on one time axis.

  Attributes:
    title: says whether the times were measured, simulated or modelled, and for which machine.
    rows: e.g. {"scmoe_pos2": {"compute": [...], "link": [...]}}.
    unit: unit of the bars' times.
  """

  title: str
  rows: Rows
  unit: str = "ms"

  @property
  def lanes(self) -> list[tuple[str, str, Sequence[Bar]]]:
    """Arm, stream and bars, from top to bottom."""
    return [(arm, stream, bars) for arm, row in self.rows.items() for stream, bars in row.items()]

  @property
  def end(self) -> float:
    """End of the last bar."""
    return max((bar.end for _, _, bars in self.lanes for bar in bars), default=0.0)

  @property
  def words(self) -> list[str]:
    """The legend's words, in the order of the palette."""
    seen = {bar.word for _, _, bars in self.lanes for bar in bars}
    return [word for word in COLOURS if word in seen]


def draw_png(timelines: Sequence[Timeline], title: str) -> bytes:
  """PNG of timelines, one below the other, each with its own axis."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  heights = [0.9 + 0.4 * len(t.lanes) for t in timelines]
  figure = Figure(figsize=(11, 0.8 + sum(heights)), layout="constrained")
  FigureCanvasAgg(figure)
  figure.suptitle(title, fontsize=10)
  panels = figure.subplots(len(timelines) or 1, 1, height_ratios=heights or [1], squeeze=False)
  for axes, timeline in zip(panels[:, 0], timelines):
    for lane, (_, _, bars) in enumerate(timeline.lanes):
      for bar in bars:
        axes.broken_barh(
          [(bar.start, bar.end - bar.start)], (lane - 0.38, 0.76), facecolors=COLOURS[bar.word]
        )
    axes.set_yticks(range(len(timeline.lanes)), [f"{a} · {s}" for a, s, _ in timeline.lanes])
    axes.set_ylim(len(timeline.lanes) - 0.5, -0.5)
    axes.set_xlim(0, timeline.end or 1)
    axes.set_xlabel(timeline.unit)
    axes.set_title(timeline.title, fontsize=9, loc="left")
  words = [w for w in COLOURS if any(w in t.words for t in timelines)]
  figure.legend(handles=[Patch(color=COLOURS[w], label=w) for w in words], frameon=False,
                ncol=len(words) or 1, loc="outside lower center", fontsize=8)  # fmt: skip
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=140)
  return out.getvalue()


# Sizes of the drawing, in its own units: the page scales it to its width.
_WIDTH, _LEFT, _LANE, _BAR, _TOP, _LETTER = 1160, 190, 30, 24, 30, 6.4
_STYLE = (
  "svg.timeline{width:100%;height:auto;font:12px system-ui,sans-serif}"
  ".timeline text{fill:currentColor}.timeline rect+text{fill:#000;pointer-events:none}"
  ".timeline g.bar:hover rect{stroke:currentColor;stroke-width:1.5}"
  ".timeline line{stroke:currentColor;opacity:.25}"
)


def draw_svg(timeline: Timeline) -> str:
  """SVG element of a timeline, without a script. Every bar has its times as `<title>`, which a
  browser shows under the pointer and a screen reader reads."""
  scale = (_WIDTH - _LEFT - 24) / (timeline.end or 1.0)
  lanes, ticks = timeline.lanes, _ticks(timeline.end)
  bottom = _TOP + _LANE * len(lanes)
  parts = [
    f'<svg class="timeline" viewBox="0 0 {_WIDTH} {bottom + 34}" role="group" '
    f'aria-label="{html.escape(timeline.title, quote=True)}"><style>{_STYLE}</style>'
  ]
  x = float(_LEFT)
  for word in timeline.words:
    parts.append(f'<rect x="{x:.0f}" y="6" width="12" height="12" rx="2" fill="{COLOURS[word]}"/>')
    parts.append(f'<g><text x="{x + 17:.0f}" y="16">{word}</text></g>')
    x += 32 + _LETTER * len(word)
  for time in ticks:
    at = _LEFT + time * scale
    parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{time:g}</text>')
  middle = (_LEFT + _WIDTH) / 2
  parts.append(f'<text x="{middle}" y="{bottom + 31}" text-anchor="middle">{timeline.unit}</text>')
  for lane, (arm, stream, bars) in enumerate(lanes):
    y = _TOP + _LANE * lane + (_LANE - _BAR) / 2
    name = html.escape(f"{arm} · {stream}")
    parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{name}</text>')
    parts += [_svg_bar(bar, f"{arm} · {stream}", scale, y, timeline.unit) for bar in bars]
  return "".join([*parts, "</svg>"])


def _svg_bar(bar: Bar, lane: str, scale: float, y: float, unit: str) -> str:
  """A bar with its times as its title, and its stage as text where it fits."""
  left, width = _LEFT + bar.start * scale, max((bar.end - bar.start) * scale, 0.6)
  times = f"{_digits(bar.start)} to {_digits(bar.end)} {unit}: {_digits(bar.end - bar.start)}"
  about = f"\n{bar.about}" if bar.about else ""
  title = html.escape(f"{bar.stage} ({lane})\n{times} {unit}{about}")
  room = int((width - 8) / _LETTER)
  label = bar.stage if len(bar.stage) <= room else bar.word if len(bar.word) <= room else ""
  word = f'<text x="{left + 4:.2f}" y="{y + 16:.1f}">{html.escape(label)}</text>' if label else ""
  return (
    f'<g class="bar"><title>{title}</title><rect x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" '
    f'height="{_BAR}" rx="1" fill="{COLOURS[bar.word]}"/>{word}</g>'
  )


def _digits(time: float) -> str:
  """Three significant digits: 0.0123, 4.56, 789."""
  return f"{time:.0f}" if time >= 1000 else f"{time:.3g}"


def _ticks(end: float) -> list[float]:
  """About eight round numbers from 0 to the end."""
  if end <= 0:
    return [0.0]
  rough = end / 8
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
  return [round(i * step, 12) for i in range(int(end / step + 1e-9) + 1)]
