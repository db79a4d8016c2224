"""Effective speed-ups from a folder of studies, of a truth that is known."""

import dataclasses
import json
import re
import shutil

import pytest

from scmoe import report
from scmoe.base.errors import DataError
from scmoe.reports import speedups
from scmoe.reports.statistics import LossCurve
from scmoe.reports.studies import Contrast, Plan, read_plan, read_study, write_results

TRUTH = LossCurve(1.5, 300.0, 0.3)
SHARES = {"top2_eighth": 1 / 8, "top2_half": 1 / 2, "top2_whole": 1.0, "top2_double": 2.0}
D = 1e8


@pytest.fixture
def folder(tmp_path):
  """experiments/quality/ with a baseline on the curve and a variant worth 1.25 times the text."""
  quality = tmp_path / "experiments/quality"
  line = lambda plan, variant, seed, tokens, loss: {
    "study": plan.study, "scale": "gpu", "variant": variant, "seed": seed, "data": {},
    "plan": plan.digest(variant), "status": "done", "date": "", "train": {}, "evals": {},
    "tokens": tokens, "final": {"loss": loss}, "hardware": "1 x gpu", "parameters": {}, "git": {},
  }  # fmt: skip
  baseline = Plan("effective_speedup", "gpu", "", {}, {n: {"n": n} for n in SHARES},
                  dict.fromkeys(SHARES, 2), ())  # fmt: skip
  compared = Plan("table1_3_language", "gpu", "", {}, {"top2": {}, "scmoe_pos2": {"w": "2"}},
                  {"top2": 2, "scmoe_pos2": 2}, (Contrast("scmoe_pos2", "top2"),))  # fmt: skip
  shift = {0: -0.001, 1: 0.001}
  better = TRUTH.loss(1.25 * D) - TRUTH.loss(D)
  of_curve = [
    line(baseline, n, s, x * D, TRUTH.loss(x * D) + shift[s])
    for n, x in SHARES.items()
    for s in shift
  ]
  of_variant = [
    line(compared, n, s, D, TRUTH.loss(D) + shift[s] * (1 + own / 10) + own * better)
    for n, own in (("top2", 0), ("scmoe_pos2", 1))
    for s in shift
  ]
  for plan, own in ((baseline, of_curve), (compared, of_variant)):
    results = quality / plan.study / "results"
    (results / "runs").mkdir(parents=True)
    plan.write(results)
    write_results(results / "runs/gpu-1.jsonl", own)
  times = [{"label": "xl", "arms": {"top": {"ms": 12.0}, "pos2": {"ms": 10.0},
            "pos3": {"ms": 9.0, "rounds_ms": [9.0, 9.5]}}}]  # fmt: skip
  (tmp_path / "experiments/times.json").write_text(json.dumps(times))
  (quality / "table6_7").mkdir()  # not registered
  source = {"file": "experiments/times.json", "label": "xl", "base": "top", "arm": "pos2"}
  speeds = {"slow link": {"scmoe_pos2": source, "dgmoe": source, "top3": source}}
  (quality / "speeds.json").write_text(json.dumps(speeds))
  studies = {"scmoe_pos2": "table1_3_language", "dgmoe": "table6_7"}
  named = {"variants": list(SHARES), "compared": studies}
  (quality / "effective_speedup/baseline.json").write_text(json.dumps(named))
  return quality


def test_worth_is_data_times_throughput(folder):
  read = speedups.read_speedups(folder / "effective_speedup", "gpu")
  assert read is not None
  (found,) = read.found
  assert (found.variant, found.study, found.pairs) == ("scmoe_pos2", "table1_3_language", 2)
  assert found.link == "slow link"
  assert found.fitted.data.value == pytest.approx(1.25, abs=0.02)
  assert found.fitted.throughput.value == pytest.approx(1.2)
  assert found.fitted.effective.value == pytest.approx(1.2 * found.fitted.data.value)
  assert found.fitted.effective.low < 1.5 < found.fitted.effective.high
  # Between D and 2 D the joined curve's line falls less steeply than the law does at D.
  assert 1.25 < found.joined.data.value < 1.3
  assert read.misfit < 0.002
  assert read.plot().count("<polyline") == 2
  text = speedups.speedups_table(read, "gpu").text(200)
  assert "experiments/times.json, xl: top, pos2" in text


def test_the_page_leads_from_a_speed_up_to_its_runs_and_its_file(folder):
  for study in ("effective_speedup", "table1_3_language"):
    (folder / study / "run.py").touch()
  text = report.rendered(folder, "gpu", folder, "")
  table = text[text.index("<h2>Effective speed-up") :]
  row = table[table.index("<tbody><tr>") : table.index("</tr></tbody>")]
  runs, raw = re.findall(r"href='([^']+)'", row)
  assert f"id='{runs.removeprefix('#')}'" in text
  assert (folder / raw).resolve() == (folder.parent / "times.json").resolve()


@pytest.mark.parametrize(("here", "named"), [(".", "."), ("..", "quality")])
def test_the_page_is_made_from_every_folder(folder, monkeypatch, here, named):
  for name in ("effective_speedup", "table1_3_language"):
    (folder / name / "run.py").touch()
  monkeypatch.chdir(folder / here)
  report.main([named])
  text = (folder / "report-gpu.html").read_text()
  assert "href='../times.json'" in text


def test_without_enough_results_there_is_none(folder):
  assert speedups.read_speedups(folder / "effective_speedup", "cpu") is None
  shutil.rmtree(folder / "effective_speedup/results/runs")
  assert speedups.read_speedups(folder / "effective_speedup", "gpu") is None


@pytest.mark.parametrize(("path", "key", "value", "said"), [
  ("effective_speedup/baseline.json", "dgmoe", "table1_3_language", "names dgmoe, which"),
  ("effective_speedup/baseline.json", "dgmoe", "table9", "names the study table9, and"),
  ("speeds.json", "file", "experiments/no.json", "no.json does not exist"),
])  # fmt: skip
def test_a_wrong_name_is_one_line(folder, path, key, value, said):
  stored = json.loads((folder / path).read_text())
  where = stored["slow link"]["scmoe_pos2"] if path == "speeds.json" else stored["compared"]
  where[key] = value
  (folder / path).write_text(json.dumps(stored))
  with pytest.raises(DataError, match=said):
    speedups.read_speedups(folder / "effective_speedup", "gpu")


def test_a_baseline_needs_the_speeds_of_what_it_is_compared_with(folder):
  path = folder / "speeds.json"
  speeds = json.loads(path.read_text())
  del speeds["slow link"]["dgmoe"]
  path.write_text(json.dumps(speeds))
  with pytest.raises(DataError, match=r"speeds.json has no speed of dgmoe, which a baseline.json"):
    speedups.read_speedups(folder / "effective_speedup", "gpu")
  path.unlink()
  with pytest.raises(DataError, match=r"speeds.json does not exist; a study with a baseline.json"):
    speedups.read_speedups(folder / "effective_speedup", "gpu")


def test_only_the_named_variants_are_the_baseline(folder):
  path = folder / "effective_speedup/baseline.json"
  named = json.loads(path.read_text())
  path.write_text(json.dumps(named | {"variants": ["top2_half", "top2_whole", "top2_double"]}))
  read = speedups.read_speedups(folder / "effective_speedup", "gpu")
  assert read is not None
  assert sorted(read.means) == [D / 2, D, 2 * D]
  path.write_text(json.dumps(named | {"variants": ["top2_half", "top2_whole"]}))
  assert speedups.read_speedups(folder / "effective_speedup", "gpu") is None
  path.write_text(json.dumps(named | {"variants": ["top2_third"]}))
  with pytest.raises(DataError, match="names top2_third, which effective_speedup does not train"):
    speedups.read_speedups(folder / "effective_speedup", "gpu")


def test_ratios_of_rounds_and_of_medians(folder):
  path = folder.parent / "times.json"
  assert speedups.ratios(path, "xl", "pos3", "pos3") == [1.0, 1.0]
  assert speedups.ratios(path, "xl", "top", "pos3") == [pytest.approx(12 / 9)]
  with pytest.raises(DataError, match="no arm 'pos7' in the row 'xl'"):
    speedups.ratios(path, "xl", "top", "pos7")


@pytest.mark.parametrize("other", ["config", "text"])
def test_runs_of_another_size_or_text_are_not_compared(folder, other):
  """The study is registered with another configuration, or its runs read another text."""
  results = folder / "table1_3_language/results"
  plan = read_plan(results / "plan-gpu.json")
  if other == "config":
    plan = dataclasses.replace(plan, config={"width": 9})
    plan.write(results)
  path = results / "runs/gpu-1.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  text = {"data": {"digest": "x"}} if other == "text" else {}
  write_results(path, [line | {"plan": plan.digest(line["variant"])} | text for line in lines])
  assert len(read_study(folder / "table1_3_language", "gpu").done) == 4
  read = speedups.read_speedups(folder / "effective_speedup", "gpu")
  assert read is not None
  assert read.found == []
