"""A timeline of the two streams as PNG and as a page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = {
  "attention": "#4c78a8",
  "mlp": "#72b7b2",
  "shared expert": "#54a24b",
  "experts": "#f58518",
  "route": "#b279a2",
  "dispatch": "#e45756",
  "combine": "#ff9da6",
  "all-reduce": "#9d755d",
  "other": "#bab0ac",
}
Bar = tuple[str, float, float]  # stage word, start, end


def draw_png(
  rows: Mapping[str, Mapping[str, Sequence[Bar]]], title: str, unit: str = "ms"
) -> bytes:
  """PNG of several timelines.

  Args:
    rows: arm -> stream -> bars, e.g. {"scmoe_pos2": {"compute": [...], "link": [...]}}.
    title: printed above; say where and when it was measured.
    unit: of the bars' times.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  lanes = [(arm, stream, bars) for arm, streams in rows.items() for stream, bars in streams.items()]
  figure = Figure(figsize=(11, 1.2 + 0.45 * len(lanes)), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots()
  seen: dict[str, str] = {}
  for lane, (_, _, bars) in enumerate(lanes):
    for stage, start, end in bars:
      word = re.sub(r" \d+\b.*", "", stage)  # "attention 1: projections" is attention
      colour = seen.setdefault(word, COLOURS.get(word, COLOURS["other"]))
      axes.broken_barh([(start, end - start)], (lane - 0.38, 0.76), facecolors=colour)
  axes.set_yticks(range(len(lanes)), [f"{arm} · {stream}" for arm, stream, _ in lanes])
  axes.invert_yaxis()
  axes.set_xlabel(unit)
  axes.set_title(title, fontsize=10)
  patches = [Patch(color=colour, label=word) for word, colour in seen.items()]
  axes.legend(handles=patches, ncol=len(patches) or 1, loc="upper center", fontsize=8,
              bbox_to_anchor=(0.5, -0.18 - 0.3 / max(len(lanes), 1)), frameon=False)  # fmt: skip
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=140)
  return out.getvalue()


def write_page(path: Path, png: bytes, title: str, text: str) -> None:
  """A self-contained HTML page: the picture and the report below it."""
  image = base64.b64encode(png).decode()
  path.write_text(
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    "<body style='font-family:sans-serif;max-width:1200px;margin:2em auto'>"
    f"<h1 style='font-size:1.2em'>{html.escape(title)}</h1>"
    f"<img alt='timeline' style='width:100%' src='data:image/png;base64,{image}'>"
    f"<pre style='overflow-x:auto'>{html.escape(text)}</pre></body></html>\n",
    "utf-8",
  )
