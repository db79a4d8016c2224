"""python -m scmoe.compare: compares runs; those that differ only in the seed count as one.

  python -m scmoe.compare runs/a runs/b
  python -m scmoe.compare runs/sweep --out reports/wirings --json figures.json

A RUN is a run's folder, or a folder that holds runs. Writes compare.html (one file, to open or to
send), compare.png and compare.md into --out, and prints the table. Runs that failed, stopped or
are still running are listed with their last figures.
"""

from __future__ import annotations

from pathlib import Path

from scmoe.base.errors import run_main
from scmoe.reports.comparison import compare
from scmoe.reports.records import find_runs, read_run
from scmoe.reports.written import write_comparison, write_figures
from scmoe.run.command_line import HELP, Flag, help_text, parse

FLAGS = (
  Flag("RUN", str, None, "folder of a run, or of several", words=True),
  Flag("out", str, "", "folder to write to; the first RUN's compare/ if not given"),
  Flag("json", str, "", "also write the figures to this file"),
  HELP,
)


def main(argv: list[str]) -> None:
  """Compares the runs of the command line, and prints the table."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  comparison = compare([read_run(path) for path in find_runs(values["RUN"])])
  out = Path(values["out"] or Path(values["RUN"][0]) / "compare")
  print(write_comparison(comparison, out, " ".join(["python -m scmoe.compare", *argv])))
  if values["json"]:
    write_figures(Path(values["json"]), comparison)


if __name__ == "__main__":
  run_main(main)
