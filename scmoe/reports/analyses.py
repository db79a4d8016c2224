"""Analyses of trained models: figures that `python -m scmoe.inspect` has written, side by side.

Each file of the folder, NAME.json, is the `inspect.json` of one model. A figure of the page has one
line per file. Where the paper (arXiv 2404.05019) shows the same, the page names the paper's figure.
"""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scmoe.base.stored import read_json
from scmoe.reports.plots import lines_plot
from scmoe.reports.records import number, printable
from scmoe.reports.tables import Table

_SHAPE = {"run": str, "wiring": str, "step": int, "tokens": int, "command": str, "date": str,
          "commit": str, "hardware": str, "curves": dict}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Analysis:
  """One `inspect.json`.

  Attributes:
    file: where it lies.
    said: its fields apart from the curves.
    curves: name -> numbers in order; None for what is not defined there.
  """

  file: Path
  said: dict[str, Any]
  curves: dict[str, list[float | None]]

  @property
  def name(self) -> str:
    """The file's name without its ending, by which figures name the model."""
    return printable(self.file.stem)

  def mean(self, curve: str) -> float | None:
    """The mean of a curve's numbers, None where it has none."""
    values = [x for x in self.curves.get(curve, ()) if x is not None]
    return sum(values) / len(values) if values else None


@dataclasses.dataclass(frozen=True)
class Drawn:
  """A figure of the page.

  Attributes:
    curve: name in `Analysis.curves`.
    about: the caption: which values are drawn, and over which.
    paper: the paper's figure of these values, and its finding; empty if it has none.
    over: name of the curve that holds the values of x; empty: x is 0, 1, 2, ...
  """

  curve: str
  about: str
  paper: str = ""
  over: str = ""


FIGURES = (
  Drawn("similarity", "mean cosine between each value on the main path and the next, over depth",
        "Figures 10, 14 and 15: adjacent representations have a cosine of about 1, and the first "
        "layer's differ most"),
  Drawn("alignment", "linear CKA of each value on the main path and the next, over depth"),
  Drawn("confidence", "mean of a token's largest gate probability, router by router",
        "Figure 9 (c, d): average gate score of top-1 gating"),
  Drawn("entropy", "entropy of a token's gate probabilities / ln E, router by router"),
  Drawn("confidence_by_part", "mean of a token's largest gate probability over eighths of a row"),
  Drawn("entropy_by_part", "entropy / ln E over eighths of a row"),
  Drawn("shortcut_ratio", "routed experts' output over the main path, pair by pair"),
  Drawn("shortcut_ratio_by_step", "the same over training steps, mean over pairs", over="steps"),
  *(Drawn(f"gradient of {part}", f"norm of the gradient of {part}, over depth")
    for part in ("attention", "experts", "gate")),
)  # fmt: skip


def read_analyses(folder: Path) -> list[Analysis]:
  """The analyses of a folder, sorted by name; empty if there is no such folder.

  Raises:
    DataError: a file has another form.
  """
  found = []
  for file in sorted(folder.glob("*.json")):
    said = read_json(file, _SHAPE)
    lists = {n: v for n, v in said.pop("curves").items() if isinstance(v, list)}
    curves = {str(name): [number(x) for x in values] for name, values in lists.items()}
    found.append(Analysis(file, said, curves))
  return found


def figures_table(found: Sequence[Analysis]) -> Table:
  """One row per model with the mean of each of its curves; – for a curve that it lacks."""
  columns = (("similarity", "cosine to the next value"), ("alignment", "CKA"),
             ("confidence", "gate score"), ("entropy", "entropy"), ("repeated", "repeated choice"),
             ("as_current", "as on current"), ("by_domain", "by domain"),
             ("by_class", "by class"), ("shortcut_ratio", "shortcut ratio"))  # fmt: skip
  text = lambda value: "–" if value is None else f"{value:.3f}"
  rows = tuple(
    (one.name, str(one.said["wiring"]), *(text(one.mean(name)) for name, _ in columns))
    for one in found
  )
  return Table("Means over all routers", ("model", "wiring", *(head for _, head in columns)), rows)


def analyses_parts(found: Sequence[Analysis], beside: Path) -> list[Any]:
  """The parts of the page: a table, a plot of each figure with data, and the numbers' sources.

  Args:
    found: the analyses; without any there are no parts.
    beside: folder from which links hold.
  """
  if not found:
    return []
  parts: list[Any] = ["<h1 id='analyses'>analyses</h1>", figures_table(found)]
  for figure in FIGURES:
    curves = {}
    for one in found:
      values = one.curves.get(figure.curve, [])
      xs = one.curves.get(figure.over) if figure.over else list(range(len(values)))
      points = [(float(x), y) for x, y in zip(xs or [], values) if x is not None and y is not None]
      if len(points) > 1:
        curves[one.name] = points
    if curves:
      parts.append(lines_plot(curves, figure.about))
      parts.append(
        f"<p><small>Paper: {html.escape(figure.paper)}.</small></p>" * bool(figure.paper)
      )
  return [*parts, _sources(found, beside)]


def _sources(found: Sequence[Analysis], beside: Path) -> str:
  """A folded table: each model's tokens, hardware, date, commit, raw JSON and command."""
  rows = []
  for one in found:
    said = {key: html.escape(printable(str(value))) for key, value in one.said.items()}
    raw = html.escape(os.path.relpath(one.file, beside), quote=True)
    cells = [html.escape(one.name), f"{one.said['tokens']:,}", said["hardware"], said["date"][:10],
             said["commit"][:9], f"<a href='{raw}'>raw JSON</a>",
             f"<code>{said['command']}</code>"]  # fmt: skip
    rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
  heads = ("model", "tokens read", "hardware", "trained", "commit", "source", "command")
  head = "".join(f"<th>{h}</th>" for h in heads)
  return (
    f"<details><summary>{len(rows)} models</summary><div class='wide'><table><thead><tr>{head}</tr>"
    f"</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
  )
