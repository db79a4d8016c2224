"""Trains what is missing in all studies of language, one study after the other, in one call.

  python experiments/quality/run.py --scale gpu --jobs 6 --limit_seconds 570 \\
      --config.data.source=jsonl --config.data.path=runs/packages_text --config.data.tokenizer=bpe
  python experiments/quality/run.py --scale gpu --studies table4,norms --table

The studies of the smaller model come first (`STUDIES`), unless --studies gives another order. A run
that two studies share is trained once. --limit_seconds is that of the whole call; whatever it cuts
off goes on with the next. Without it each study has the time that its scale gives it. All other
flags are those of a study's own run.py and go to each study; --out=FOLDER gives each a folder in
it, FOLDER/STUDY/results.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import study  # noqa: E402

from scmoe.base.errors import ConfigError, run_main  # noqa: E402
from scmoe.base.output import say  # noqa: E402
from scmoe.run.command_line import Flag, help_text, parse  # noqa: E402

STUDIES = (
  "first_pair",
  "table4",
  "norms",
  "zero_experts",
  "farskip",
  "moe_every",
  "experts",
  "table6_7",
  "effective_speedup",
  "table1_3_language",
)
# Flags that name variants or folders of one study.
_OF_ONE = ("only", "workdir")
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
    Preempted: as `study.call`.
  """
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
    return
  names = [word.strip() for word in values["studies"].split(",") if word.strip()]
  if unknown := [name for name in names if name not in STUDIES]:
    raise ConfigError(f"--studies={unknown[0]!r} is no study; one of: {', '.join(STUDIES)}")
  if not names:
    raise ConfigError(f"--studies is empty; name some of: {', '.join(STUDIES)}")
  limit, scale = values["limit_seconds"], values["scale"]
  until = time.monotonic() + limit if limit > 0 else math.inf
  own = [f"--{flag.name}={values[flag.name]}" for flag in study.FLAGS
         if flag.name not in (*_OF_ONE, "out", "help")
         and values[flag.name] != flag.default]  # fmt: skip
  own += [f"--config.{name}={value}" for name, value in given]
  out = Path(values["out"]) if values["out"] else None
  for name in names:
    if until - time.monotonic() <= study.GRACE.get(scale, 0):
      say(f"{name}: not begun, the time of the call is over")
      continue
    words = [*own, f"--out={out / name / 'results' if out else ''}"]
    say(f"== {name}")
    study.call(design_of(name), words, study.runs_of_all(out) if out else (), until)


if __name__ == "__main__":
  run_main(main)
