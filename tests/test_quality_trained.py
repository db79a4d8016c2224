"""The studies of experiments/quality really train at their smoke sizes, and print their tables.

The runs train in this process, which has imported everything and remembers the text; a process of
each run's own would take three times as long. tests/test_quality.py tests the rest of the studies,
with runs that train nothing.
"""

import contextlib
import math
import re
import subprocess
import types
from pathlib import Path

import pytest
from covering import night
from scripts import script

from scmoe import sweep, train
from scmoe.reports.studies import Contrast, read_plan, read_results
from scmoe.training import description

QUALITY = Path(__file__).resolve().parents[1] / "experiments/quality"
STUDIES = sorted(path.parent.name for path in QUALITY.glob("*/run.py"))
# Each study's contrast by day. Eight of them share the runs of scmoe_pos2 or top2.
BY_DAY = {
  "first_pair": ("pos2_l0", "scmoe_pos2"),
  "table4": ("scmoe2", "scmoe_pos2"),
  "norms": ("pos2_megatron", "scmoe_pos2"),
  "norm_after": ("scmoe_pos2_after", "pos2_megatron"),
  "zero_experts": ("pos2_zero", "scmoe2"),
  "farskip": ("every_farskip", "every_pos1_direct"),
  "moe_every": ("scmoe_pos2", "top2"),
  "experts": ("pos2_8", "top2_8"),
  "table6_7": ("dgmoe", "scmoe_pos2"),
  "effective_speedup": ("top2_half", "top2_whole"),
  "muon": ("scmoe_pos2", "top2"),
  "table1_3_language": ("scmoe_pos2", "top2"),
  "table5_vision": ("scmoe_pos2", "top2"),
}
BOTH_SEEDS = ("table1_3_language",)  # by day; of the other studies only seed 0 is trained
CLASSES = {"table5_vision": 10}  # others predict one of 257 bytes and marks
# The mesh of a process with one device, which a study's runs have on a CPU; and programs that
# compile faster than those in bfloat16.
FIELDS = ("--config.mesh.data=1", "--config.model.dtype=float32")


class TrainedHere:
  """Stands in for `subprocess.Popen` in a sweep: trains in this process, before it returns."""

  def __init__(self, command, *, stdout, **options):
    words = command[len(sweep.TRAIN) :]
    with contextlib.redirect_stdout(stdout):
      train.main(words)
    self.returncode = 0

  def poll(self):
    return self.returncode


def load(name):
  """The run.py of a study, or of all studies, as a module."""
  return script(Path("quality", name, "run.py").as_posix())


@pytest.fixture
def asked_for(tmp_path, monkeypatch):
  """The runs that a test asks for: those of (study, variant, seed) for which it is true."""
  here = types.SimpleNamespace(**{**vars(subprocess), "Popen": TrainedHere})
  monkeypatch.setattr(sweep, "subprocess", here)
  monkeypatch.setattr(sweep, "POLL_SECONDS", 0.0)
  # A study reads no checkpoint: the program that fingerprints it is not compiled for each variant.
  unread = lambda leaves: (["0" * 8] * len(leaves), [True] * len(leaves))
  monkeypatch.setattr(description, "survey", unread)
  monkeypatch.chdir(tmp_path)
  study = load(".").study
  every = study.asked

  def limit_to(wanted):
    def some(*given):
      one = every(*given)
      runs = one.runs.items()
      one.runs = {folder: run for folder, run in runs if wanted(one.plan.study, *run)}
      return one

    monkeypatch.setattr(study, "asked", some)

  return limit_to


def by_day(study, variant, seed):
  """Whether `make test` trains a run."""
  return variant in BY_DAY[study] and (seed == 0 or study in BOTH_SEEDS)


def tables(capsys):
  """Study -> what all studies in one call, and then the study of images, print about it."""
  load(".").main(["--scale=smoke", "--out=out", *FIELDS])
  parts = capsys.readouterr().out.split("\n== ")[1:]
  found = dict(part.split("\n", 1) for part in parts)
  vision = load("table5_vision")
  words = ["--scale=smoke", "--out=out/table5_vision/results", *FIELDS]
  vision.study.call(vision.DESIGN, words)
  return found | {"table5_vision": capsys.readouterr().out}


@pytest.mark.parametrize("whole", [False, night(True)])
def test_every_study_trains_and_its_table_has_differences(asked_for, capsys, whole):
  """By day one contrast of each study, two seeds of one; by night all runs of all studies."""
  assert sorted(BY_DAY) == STUDIES
  asked_for((lambda *_: True) if whole else by_day)
  printed = tables(capsys)
  assert sorted(printed) == STUDIES
  plans = [read_plan(Path(f"out/{name}/results/plan-smoke.json")) for name in STUDIES]
  results = read_results([Path(f"out/{name}/results/runs") for name in STUDIES], "smoke")
  losses = {(one["plan"], one["seed"]): one["final"]["loss"] for one in results}
  assert len(losses) == len(results), "a run was trained twice"
  for one in results:
    at_random = math.log(CLASSES.get(one["study"], 257))
    assert 0.5 * at_random < one["final"]["loss"] < at_random + 0.5, one
    assert one["train"]["step"][-1] == one["steps"] > 0
    assert all(map(math.isfinite, one["train"]["loss"]))
  for plan in plans:
    named = {(c.variant, c.base): c for c in plan.contrasts}
    for contrast in named.values() if whole else [named[BY_DAY[plan.study]]]:
      seeds = check_contrast(printed[plan.study], plan, contrast, losses)
      assert seeds == [0, 1] or not (whole or plan.study in BOTH_SEEDS), contrast
    for variant in plan.variants:
      assert re.search(rf"^{variant} +\d of 2 ", printed[plan.study], re.M), variant


def check_contrast(table, plan, contrast: Contrast, losses) -> list[int]:
  """The table has the contrast's variants and its difference, between losses that differ.

  Returns:
    The seeds that both variants were trained with, by this study or another.
  """
  both = contrast.variant, contrast.base
  has = {v: [seed for seed in (0, 1) if (plan.digest(v), seed) in losses] for v in both}
  for variant, seeds in has.items():
    row = rf"^{variant} +{len(seeds)} of 2 +\d\.\d{{4}} "
    assert re.search(row, table, re.M), f"{variant}\n{table}"
  seeds = sorted(set(has[contrast.variant]) & set(has[contrast.base]))
  assert 0 in seeds, contrast
  number = r"[+-]\d\.\d{4}"
  interval = rf"{number} to {number}" if len(seeds) > 1 else "–"
  row = rf"^{contrast.variant} − {contrast.base} +{len(seeds)} +{number} +{interval} "
  assert re.search(row, table, re.M), f"{both}\n{table}"
  for seed in seeds:
    own, base = (losses[plan.digest(variant), seed] for variant in both)
    assert own != base, f"{plan.study}: {contrast.variant} computes what {contrast.base} does"
  return seeds
