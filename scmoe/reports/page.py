"""Writes a report as a single HTML file: pictures are inside, and it needs no script or network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from scmoe.base.errors import StorageError
from scmoe.base.stored import write_whole
from scmoe.reports.records import printable
from scmoe.reports.tables import Table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 2em 0 .6em; }
img { width: 100%; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #8884; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.warning { border-left: 4px solid #d33; padding: .2em 1em; }
pre { overflow-x: auto; } small { color: #888; }
"""


def picture(png: bytes, about: str) -> str:
  """The HTML of a picture; screen readers read `about`."""
  data = base64.b64encode(png).decode()
  return f"<img alt='{html.escape(about, quote=True)}' src='data:image/png;base64,{data}'>"


def warning(lines: Sequence[str]) -> str:
  """The HTML of a highlighted paragraph; empty without lines."""
  inside = "<br>".join(html.escape(line) for line in lines)
  return f"<p class='warning'>{inside}</p>" if lines else ""


def page(title: str, parts: Sequence[str | Table], note: str = "") -> str:
  """The HTML of a page.

  Args:
    title: heading.
    parts: HTML, or tables.
    note: small text at the end, e.g. the command.
  """
  body = "\n".join(part.html() if isinstance(part, Table) else part for part in parts)
  title, note = html.escape(printable(title)), html.escape(printable(note))
  return (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
    f"<style>{_STYLE}</style></head><body><h1>{title}</h1>\n{body}\n"
    f"<p><small>{note}</small></p></body></html>\n"
  )


def write(path: Path, content: str | bytes) -> None:
  """Writes a file of a report, and creates its folder.

  Raises:
    StorageError: the file cannot be written.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    write_whole(path, data)
  except OSError as error:
    raise StorageError(f"{path} cannot be written: {error.strerror}; give another --out") from None
