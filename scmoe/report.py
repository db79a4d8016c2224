"""python -m scmoe.report: a folder of studies as one HTML page.

  python -m scmoe.report experiments/quality
  python -m scmoe.report experiments/quality --scale cpu --out build/quality.html
  python -m scmoe.report experiments/quality --plots

Begins with a table of all verdicts. Then shows for every study its question, what was registered,
differences with intervals and verdicts, curves, and its runs. Each variant's name leads to its
runs, and each run names its command, commit, hardware and the line of the file that holds its raw
JSON. The page needs no other file and no network. --plots writes each study's plot of differences
to its results/differences-SCALE.svg, which its README shows, in place of the page.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from pathlib import Path

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.options import check_choice
from scmoe.base.output import say
from scmoe.reports import page
from scmoe.reports.analyses import analyses_parts, read_analyses
from scmoe.reports.plots import curves_plot, differences_plot, standalone
from scmoe.reports.speedups import read_speedups, root_of, speedups_table
from scmoe.reports.studies import (
  Study,
  complaints,
  findings,
  findings_table,
  read_study,
  variants_table,
)
from scmoe.reports.tables import Table
from scmoe.run.command_line import HELP, Flag, help_text, parse

SCALES = ("gpu", "cpu", "smoke")
FLAGS = (
  Flag("FOLDER", str, None, "folder of studies, such as experiments/quality", words=True),
  Flag("scale", str, "gpu", "scale of the runs: gpu, cpu or smoke"),
  Flag("out", str, "", "file to write; FOLDER/report-SCALE.html if not given"),
  Flag("plots", bool, False, "write STUDY/results/differences-SCALE.svg of each study, no page"),
  HELP,
)


def main(argv: list[str]) -> None:
  """Writes the page, or the studies' plots.

  Raises:
    ConfigError: the folder holds no studies, or the scale is unknown; or a page is asked for
      beside plots.
    DataError: a plan or a result cannot be used.
  """
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  if len(values["FOLDER"]) != 1:
    raise ConfigError(f"got {len(values['FOLDER'])} folders; give one, e.g. experiments/quality")
  folder, scale = Path(values["FOLDER"][0]), values["scale"]
  check_choice("--scale", scale, SCALES)
  if values["plots"]:
    if values["out"]:
      raise ConfigError("--plots writes into the studies' folders; leave out --out")
    for path, picture in pictures(folder, scale).items():
      page.write(path, picture)
      say(f"plot: {path}")
    return
  out = Path(values["out"] or folder / f"report-{scale}.html")
  page.write(out, rendered(folder, scale, out.parent, " ".join(argv)))
  say(f"page: {out}")


def pictures(folder: Path, scale: str) -> dict[Path, str]:
  """Each study's plot of differences as an SVG file: the file's path -> its text.

  A study none of whose contrasts has a pair of runs has no plot.

  Raises:
    ConfigError: there is no study.
    DataError: a plan or a result cannot be used.
  """
  found = {}
  for place, study in _studies(folder, scale)[0].items():
    if plot := differences_plot(findings(study), study.plan.metric):
      found[place / "results" / f"differences-{scale}.svg"] = standalone(plot)
  return found


def _studies(folder: Path, scale: str) -> tuple[dict[Path, Study], list[Path]]:
  """The studies of a folder by their own folders, and the folders without a plan at this scale."""
  folders = sorted(path.parent for path in folder.glob("*/run.py"))
  if not folders:
    raise ConfigError(f"{str(folder)!r} holds no study (no */run.py); give experiments/quality")
  studies, without = {}, []
  for place in folders:
    try:
      studies[place] = read_study(place, scale)
    except FileNotFoundError:
      without.append(place)
  return studies, without


def rendered(folder: Path, scale: str, beside: Path, arguments: str) -> str:
  """The HTML of all studies below a folder, with links that hold from the folder `beside`.

  Raises:
    ConfigError: there is no study.
    DataError: a plan or a result cannot be used.
  """
  studies, without = _studies(folder, scale)
  parts: list = [_verdicts(list(studies.values()))]
  for place in studies:
    parts += _speedups(place, scale, beside)
  for place, study in studies.items():
    parts += [*study_parts(study, place, beside), _readme(place)]
  analyses = read_analyses(folder / "analyses" / "results")
  parts += analyses_parts(analyses, beside)
  if without:
    parts.append("<h1 id='without'>Registered, without a plan at this scale</h1>")
    parts += [_readme(place, place.name) for place in without]
  names = [
    *(place.name for place in studies),
    *(["analyses"] if analyses else []),
  ]
  contents = " · ".join(f"<a href='#{name}'>{name}</a>" for name in names)
  if without:
    contents += f" · <a href='#without'>{len(without)} without a plan at this scale</a>"
  title = f"Quality: {len(studies) + len(without)} studies, {scale}"
  return page.page(title, [f"<p>{contents}</p>", *parts], f"python -m scmoe.report {arguments}")


def _verdicts(studies: Sequence[Study]) -> Table | str:
  """A row for each contrast that has been tested; a sentence where none has."""
  rows = []
  for study in studies:
    plan = study.plan
    for found in findings(study):
      test, contrast = found.test, found.contrast
      if test is None or test.low is None:
        continue
      rows.append(
        (
          plan.study,
          f"{plan.metric}: {contrast.variant} − {contrast.base}",
          str(test.count),
          f"{test.mean:+.4f} ({test.low:+.4f} to {test.high:+.4f})",
          found.verdict,
        )
      )
  if not rows:
    return "<p>No contrast has two pairs of runs yet.</p>"
  heads = ("study", "contrast", "pairs", "difference and 95 % interval", "verdict")
  return Table("What was found", heads, tuple(rows))


def _speedups(place: Path, scale: str, beside: Path) -> list[str]:
  """A study's table of effective speed-ups and its baseline's curve, if it has them.

  A variant leads to its runs, and a throughput to its file.
  """
  speedups = read_speedups(place, scale)
  if speedups is None:
    return []
  table, links = speedups_table(speedups, scale), {}
  for row, one in enumerate(speedups.found):
    links[row, 0] = f"#{one.study}-{one.variant}"
    links[row, len(table.heads) - 1] = os.path.relpath(root_of(place) / one.file, beside)
  return [table.html(links), speedups.plot()]


def study_parts(study: Study, place: Path, beside: Path) -> list:
  """A study's part of the page: notes, tables, plots, runs."""
  plan, name = study.plan, study.plan.study
  head = f"<h1 id='{name}'>{name}</h1><p>{html.escape(plan.title)}</p>"
  # A variant leads to its runs.
  links = {(row, 0): f"#{name}-{variant}" for row, variant in enumerate(plan.variants)}
  table = variants_table(study).html(links)
  notes = page.warning(complaints(study))
  found = findings(study)
  return [
    head,
    notes,
    findings_table(study),
    differences_plot(found, plan.metric),
    table,
    curves_plot(study),
    _runs(study, place, beside),
  ]


def _runs(study: Study, place: Path, beside: Path) -> str:
  """Every run with its command, commit, hardware, and links to plan and raw JSON."""
  plan, name = study.plan, study.plan.study
  stored = os.path.relpath(place / "results" / f"plan-{plan.scale}.json", beside)
  rows, named = [], set()
  for (variant, seed), result in study.done.items():
    raw = os.path.relpath(place.parent / result["file"], beside)
    anchor = f" id='{name}-{variant}'" if variant not in named else ""
    named.add(variant)
    commit = result.get("git", {}).get("commit", "")
    versions = result.get("versions", {})
    cells = [
      f"{html.escape(variant)}, seed {seed}",
      f"{result['final'][plan.metric]:.4f}",
      html.escape(str(result.get("hardware", ""))),
      html.escape(result["date"][:10]),
      html.escape(commit[:9]),
      html.escape(f"jax {versions.get('jax', '–')}"),
      f"<a href='{html.escape(raw, quote=True)}'>line {result['line']}</a>",
      f"<a href='{html.escape(stored, quote=True)}'>plan</a>",
      f"<code>{html.escape(str(result.get('command', '')))}</code>",
    ]
    rows.append(f"<tr{anchor}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
  if not rows:
    return "<p>No run has a result yet.</p>"
  heads = ("run", plan.metric, "hardware", "date", "commit", "version", "raw JSON", "configuration",
           "command")  # fmt: skip
  head = "".join(f"<th>{h}</th>" for h in heads)
  return (
    f"<details><summary>{len(rows)} runs</summary><div class='wide'><table><thead><tr>{head}</tr>"
    f"</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
  )


def _readme(place: Path, title: str = "registered") -> str:
  """The registered plan as README.md has it, folded; its Markdown stays as it is."""
  try:
    text = (place / "README.md").read_text("utf-8", errors="replace")
  except OSError:
    return ""
  text = re.sub(r"\n{3,}", "\n\n", text)
  return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


if __name__ == "__main__":
  run_main(main)
