"""A comparison as files: a page, a picture, Markdown."""

from __future__ import annotations

from pathlib import Path

from scmoe.reports import page
from scmoe.reports.comparison import Comparison
from scmoe.reports.curves import draw_curves
from scmoe.reports.tables import tables


def write_comparison(comparison: Comparison, out: Path, command: str) -> str:
  """Writes page, picture and Markdown; returns what is printed.

  Raises:
    StorageError: nothing can be written.
  """
  found, png = tables(comparison), draw_curves(comparison)
  names = " against ".join(group.label for group in comparison.groups[:4])
  title = f"{len(comparison.records)} runs: {names}" + (" …" if len(comparison.groups) > 4 else "")
  unfinished = [f"{record.name}: {record.status}" for record in comparison.unfinished]
  about = "training loss, validation loss and final figure of every group, with bands over seeds"
  parts = [page.warning(unfinished), page.picture(png, about), *found]
  page.write(out / "compare.html", page.page(title, parts, command))
  page.write(out / "compare.png", png)
  text = [f"# {title}", *(f"- {line}" for line in unfinished), "![curves](compare.png)"]
  page.write(out / "compare.md", "\n\n".join([*text, *(t.markdown() for t in found)]) + "\n")
  shown = [t.text() for t in found[:2]]
  warned = [f"not done: {line}" for line in unfinished]
  return "\n\n".join(
    [*shown, *warned, f"page: {out / 'compare.html'} (and compare.png, compare.md)"]
  )
