"""Writes a comparison as page, picture, Markdown and JSON."""

from __future__ import annotations

from pathlib import Path

from scmoe.base.errors import StorageError
from scmoe.base.stored import write_json
from scmoe.reports import page
from scmoe.reports.comparison import Comparison
from scmoe.reports.curves import draw_curves
from scmoe.reports.tables import markdown_text, tables


def write_figures(path: Path, comparison: Comparison) -> None:
  """Writes the figures of a comparison as JSON.

  Raises:
    StorageError: the file cannot be written.
  """
  try:
    write_json(path, comparison.as_json())
  except OSError as error:
    raise StorageError(f"--json={str(path)!r} cannot be written: {error.strerror}") from None


def write_comparison(comparison: Comparison, out: Path, command: str) -> str:
  """Writes page, picture and Markdown; returns the text to print.

  Raises:
    StorageError: a file cannot be written.
  """
  found, png = tables(comparison), draw_curves(comparison)
  names = " against ".join(group.label for group in comparison.groups[:4])
  title = f"{len(comparison.records)} runs: {names}" + (" …" if len(comparison.groups) > 4 else "")
  unfinished = [f"{record.name}: {record.status}" for record in comparison.unfinished]
  about = "training loss, validation loss and final figure of every group, with bands over seeds"
  parts = [page.warning(unfinished), page.picture(png, about), *found]
  page.write(out / "compare.html", page.page(title, parts, command))
  page.write(out / "compare.png", png)
  warned = [f"- {markdown_text(line)}" for line in unfinished]
  text = [f"# {markdown_text(title)}", *warned, "![curves](compare.png)"]
  page.write(out / "compare.md", "\n\n".join([*text, *(t.markdown() for t in found)]) + "\n")
  shown = [t.text() for t in found[:2]]
  warned = [f"not finished: {line}" for line in unfinished]
  return "\n\n".join(
    [*shown, *warned, f"page: {out / 'compare.html'} (and compare.png, compare.md)"]
  )
