"""Tables of a comparison, as text for a terminal, as Markdown and as HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence

from scmoe.reports.comparison import Comparison, Group, Paired, Statistic
from scmoe.reports.records import Measure, printable


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of text; the first column is left-aligned, the others are numbers.

  Cells may come from a stranger's run folder. So control characters are escaped here, and each
  output format escapes its own markup.

  Attributes:
    title: above the table.
    heads: the columns' names.
    rows: one cell for each column.
    keys: how many of the first columns name a row; they begin every part of a text that is cut.
  """

  title: str
  heads: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  keys: int = 1

  def __post_init__(self) -> None:
    object.__setattr__(self, "title", printable(self.title))
    object.__setattr__(self, "heads", tuple(map(printable, self.heads)))
    object.__setattr__(self, "rows", tuple(tuple(map(printable, row)) for row in self.rows))

  def text(self, width: int = 100) -> str:
    """Columns padded with spaces; columns that exceed `width` follow in further parts below."""
    widths = [max(map(len, column)) for column in zip(self.heads, *self.rows)]
    lines = []
    for columns in _parts(widths, width, self.keys):
      lines += [""] if lines else []
      for row in (self.heads, *self.rows):
        cells = [f"{row[i]:>{widths[i]}}" if i else f"{row[i]:<{widths[i]}}" for i in columns]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([self.title, *lines])

  def markdown(self) -> str:
    """A pipe table under its title."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    rule = line(["---", *["---:"] * (len(self.heads) - 1)])
    rows = (line(map(markdown_text, row)) for row in (self.heads, *self.rows))
    head, *body = rows
    return "\n".join([f"**{markdown_text(self.title)}**", "", head, rule, *body])

  def html(self, links: Mapping[tuple[int, int], str] | None = None) -> str:
    """The HTML of the heading and the table; a wide table scrolls.

    Args:
      links: (row, column) of a cell, from 0 -> the address to which it leads.
    """

    def cell(place: tuple[int, int]) -> str:
      text = html.escape(self.rows[place[0]][place[1]])
      if links and place in links:
        text = f"<a href='{html.escape(links[place], quote=True)}'>{text}</a>"
      return f"<td>{text}</td>"

    heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
    rows = (
      "".join(cell((row, column)) for column in range(len(cells)))
      for row, cells in enumerate(self.rows)
    )
    return (
      f"<h2>{html.escape(self.title)}</h2><div class='wide'><table><thead><tr>{heads}</tr></thead>"
      f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table></div>"
    )


def _parts(widths: Sequence[int], width: int, keys: int) -> list[list[int]]:
  """Columns of each part of a table.

  A part begins with the first `keys` columns, holds at least one other, and is at most `width`
  wide unless that one makes it wider.
  """
  first, begin = list(range(keys)), sum(widths[:keys]) + 2 * (keys - 1)
  parts, used = [list(first)], begin
  for i in range(keys, len(widths)):
    if used + 2 + widths[i] > width and len(parts[-1]) > keys:
      parts.append(list(first))
      used = begin
    parts[-1].append(i)
    used += 2 + widths[i]
  return parts


def markdown_text(text: str) -> str:
  """The text with escapes for HTML, links, pictures and ends of cells."""
  text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
  return text.replace("[", "\\[").replace("|", "\\|")


def result_table(comparison: Comparison) -> Table:
  """The table of mean ± std: one row per figure, one column per group."""
  groups = comparison.groups
  heads = ("", *(f"{g.label} ({_count(g)})" for g in groups))
  rows = tuple((m.title, *(spread(m, g.statistic(m)) for g in groups)) for m in comparison.measures)
  return Table("Mean ± standard deviation over seeds", heads, rows)


def paired_table(comparison: Comparison) -> Table | None:
  """The table of each group's difference from the first, paired by seed; None with one group."""
  base, others = comparison.groups[0], comparison.groups[1:]
  rows = []
  for m in comparison.measures:
    found = [group.paired(base, m) for group in others]
    if any(found):
      rows.append((m.title, *(difference(m, p) for p in found)))
  if not rows:
    return None
  return Table(
    f"Difference to {base.label}, run by run of the same seed",
    ("", *(g.label for g in others)),
    tuple(rows),
  )


def runs_table(comparison: Comparison) -> Table:
  """The table of runs: one row per run with seed, status and figures."""
  shown = [m for m in comparison.measures if m.name not in ("parameters", "active_parameters")]
  rows = tuple(
    (r.name, str(r.seed), r.status, *(m.text(m.of(r)) for m in shown)) for r in comparison.records
  )
  return Table("Runs", ("run", "seed", "status", *(m.title for m in shown)), rows)


def differences_table(comparison: Comparison) -> Table | None:
  """The table of configuration fields that differ between groups; None if none does."""
  if not comparison.differences:
    return None
  rows = tuple((name, *map(str, values)) for name, values in comparison.differences.items())
  return Table("What differs", ("field", *(g.label for g in comparison.groups)), rows)


def tables(comparison: Comparison) -> list[Table]:
  """All tables of a comparison, the most important first."""
  found = [
    result_table(comparison),
    paired_table(comparison),
    differences_table(comparison),
    runs_table(comparison),
  ]
  return [table for table in found if table is not None]


def spread(measure: Measure, found: Statistic | None) -> str:
  """A group's figure as text: `2.1034 ± 0.0121`."""
  if found is None:
    return "–"
  text = measure.text(found.mean)
  return text if not found.std else f"{text} ± {measure.text(found.std)}"


def difference(measure: Measure, paired: Paired | None) -> str:
  """A paired difference as text: `−0.0210 ± 0.0040, better in 3 of 3`."""
  if paired is None:
    return "–"
  found = paired.difference
  sign = "+" if found.mean >= 0 else "−"
  text = sign + measure.text(abs(found.mean))
  text += f" ± {measure.text(found.std)}" if found.std is not None else ""
  return f"{text}, better in {paired.better} of {len(found.values)}"


def _count(group: Group) -> str:
  done = sum(record.done for record in group.records)
  of = f"{len(group.records)} run" + ("s" if len(group.records) > 1 else "")
  return of if done == len(group.records) else f"{done} of {of} done"
