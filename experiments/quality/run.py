"""Trains what is missing in all studies of language, in one call.

  python experiments/quality/run.py --scale gpu --jobs 6 --limit_seconds 570 \\
      --config.data.source=jsonl --config.data.path=runs/packages_text --config.data.tokenizer=bpe
  python experiments/quality/run.py --scale gpu --studies table4,norms --table

The command puts the missing runs of all studies in one list, first seed 0 of every study, then
seed 1; a free GPU takes the next. A run that two studies share is trained once. A study whose
finished runs read another text than the one here is left out, and a line says so. --limit_seconds
is that of the whole call; what it cuts off goes on in the next call. Without it a call on a CPU
ends after 14 minutes times the number of studies. The other flags are those of a study's own
run.py, without --only, --workdir and --register; --out=FOLDER gives each study a folder,
FOLDER/STUDY/results.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import study  # noqa: E402

from scmoe.base.errors import ConfigError, run_main  # noqa: E402
from scmoe.base.output import warn  # noqa: E402
from scmoe.run.command_line import Flag, help_text, parse  # noqa: E402

STUDIES = (
  "first_pair",
  "table4",
  "norms",
  "norm_after",
  "zero_experts",
  "farskip",
  "moe_every",
  "experts",
  "table6_7",
  "effective_speedup",
  "muon",
  "table1_3_language",
)
# Flags that name variants or folders of one study.
_OF_ONE = ("only", "workdir", "register")
FLAGS = (
  *(flag for flag in study.FLAGS if flag.name not in _OF_ONE),
  Flag("studies", str, ",".join(STUDIES), "studies to train in this call, joined by commas"),
)


def design_of(name: str) -> study.Design:
  """The design in a study's run.py."""
  spec = importlib.util.spec_from_file_location(f"quality_{name}", HERE / name / "run.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.DESIGN


def main(argv: list[str]) -> None:
  """The command.

  Raises:
    ConfigError: a study is unknown; or as `study.call`.
    sweep.Failed, Preempted: as `study.call`.
  """
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
    return
  names = list(dict.fromkeys(word.strip() for word in values["studies"].split(",") if word.strip()))
  if unknown := [name for name in names if name not in STUDIES]:
    raise ConfigError(f"--studies={unknown[0]!r} is no study; one of: {', '.join(STUDIES)}")
  if not names:
    raise ConfigError(f"--studies is empty; name some of: {', '.join(STUDIES)}")
  if values["scale"] == "cpu" and values["limit_seconds"] < 0:
    values["limit_seconds"] = study.CPU_LIMIT * len(names)
  out = Path(values["out"]) if values["out"] else None
  beside = study.runs_of_all(out) if out else ()
  many = []
  for name in names:
    own = {**values, "only": "", "workdir": "", "out": out / name / "results" if out else ""}
    try:
      many.append(study.asked(design_of(name), own, given, beside))
    except study.OtherText as error:
      warn(f"{name} is left out: {error}")
  if values["dry_run"]:
    return print("\n".join(run.title or run.folder.name for run, _ in study.queue_of(many)))
  try:
    study.train(many, values, shlex.join(["python", "experiments/quality/run.py", *argv]))
  finally:
    # A run that two studies share is trained by one of them, and counts in both tables.
    found = [result for one in many for result in one.results]
    for one in many:
      print(
        f"\n== {one.plan.study}\n{study.shown(study.collected(one.plan, [*one.known, *found]))}"
      )


if __name__ == "__main__":
  run_main(main)
