"""Plans and results of studies: what belongs together, what is left out, what the tables say."""

import dataclasses
import json

import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.reports import studies
from scmoe.reports.records import Record
from scmoe.reports.studies import Contrast, Plan, collected, complaints, findings, read_study

PLAN = Plan(
  study="positions",
  scale="gpu",
  title="Which?",
  config={"train": {"steps": 4}},
  variants={"top2": {"model.wiring": "top2"}, "pos2": {"model.wiring": "scmoe_pos2"}, "bad": {}},
  seeds={"top2": 3, "pos2": 3, "bad": 2},
  contrasts=(Contrast("pos2", "top2", 0.01), Contrast("bad", "top2")),
)


def result(variant, seed, loss, status="done", plan=PLAN, date="2026-01-01", digest="text", **more):
  return {
    "study": plan.study, "scale": plan.scale, "variant": variant, "seed": seed,
    "plan": plan.digest(variant), "status": status, "date": date, "train": {}, "evals": {},
    "final": {} if loss is None else {"loss": loss}, "data": {"digest": digest, "seed": seed},
    "hardware": "1 x gpu", "git": {"commit": "abc", "changed": False}, "tokens": 8.0,
    "parameters": {"active": 1000}, "step_seconds": {"median": 0.01}, **more,
  }  # fmt: skip


GOOD = [
  result("top2", 0, 3.0), result("top2", 1, 3.1), result("top2", 2, 3.2),
  result("pos2", 0, 3.001), result("pos2", 1, 3.1), result("pos2", 2, 3.199),
  result("bad", 0, 3.5), result("bad", 1, 3.6),
]  # fmt: skip


def test_runs_go_seed_by_seed():
  assert PLAN.runs[:4] == [("top2", 0), ("pos2", 0), ("bad", 0), ("top2", 1)]
  assert PLAN.runs[-2:] == [("top2", 2), ("pos2", 2)]


def test_plan_and_results_are_read_back(tmp_path):
  tmp_path = tmp_path / "quality/positions"
  (tmp_path / "results/runs").mkdir(parents=True)
  PLAN.write(tmp_path / "results")
  studies.write_results(tmp_path / "results/runs/gpu-2.jsonl", GOOD[3:])
  studies.write_results(tmp_path / "results/runs/gpu-1.jsonl", GOOD[:3])
  studies.write_results(tmp_path / "results/runs/cpu-1.jsonl", [result("bad", 1, 9.9)])
  study = read_study(tmp_path, "gpu")
  assert study.plan == PLAN
  assert list(study.done) == PLAN.runs
  assert study.done["pos2", 1]["file"] == "positions/results/runs/gpu-2.jsonl"
  assert study.differences(PLAN.contrasts[0]) == pytest.approx([0.001, 0.0, -0.001])
  with pytest.raises(FileNotFoundError):
    read_study(tmp_path, "cpu")
  (tmp_path / "results/runs/gpu-3.jsonl").write_text('{"study": "positions"}\n')
  with pytest.raises(DataError, match=r"gpu-3.jsonl:1 cannot be used: .*; remove this line"):
    read_study(tmp_path, "gpu")
  (tmp_path / "results/plan-gpu.json").rename(tmp_path / "results/plan-cpu.json")
  with pytest.raises(DataError, match=r"^\S*plan-cpu.json has the scale 'gpu'; rename it"):
    read_study(tmp_path, "cpu")


@pytest.mark.parametrize(
  ("field", "value"),
  [("git", "abc"), ("git", {"commit": 7}), ("hardware", None), ("tokens", "8"), ("parameters", []),
   ("data", 7), ("versions", "0.10"), ("step_seconds", 0.01), ("seconds", None), ("steps", "3"),
   ("evals", {"loss": 1})],
)  # fmt: skip
def test_a_damaged_field_of_a_result_is_one_line(tmp_path, field, value):
  (tmp_path / "results/runs").mkdir(parents=True)
  PLAN.write(tmp_path / "results")
  studies.write_results(tmp_path / "results/runs/gpu-1.jsonl", [GOOD[0], GOOD[1] | {field: value}])
  with pytest.raises(DataError, match=r"gpu-1.jsonl:2 cannot be used: .* is .*, not "):
    read_study(tmp_path, "gpu")


def test_findings():
  first, second = findings(collected(PLAN, GOOD))
  assert first.verdict == "equivalent within 0.01"
  # t = 0.01 / 0.000577 = 17.32 with two degrees of freedom: 1/2 - t / (2 sqrt(2 + t²))
  assert first.equivalent == pytest.approx(0.001658, abs=1e-6)
  assert first.p == pytest.approx(1)
  assert second.verdict == "worse"  # both pairs differ by 0.5, so there is no spread
  assert second.test is not None
  assert second.test.mean == pytest.approx(0.5)
  few = findings(collected(PLAN, [*GOOD[:2], *GOOD[3:5]]))
  assert few[0].verdict == "equivalent within 0.01 (runs are missing)"
  assert few[1].verdict == "no test: fewer than two pairs"
  higher = dataclasses.replace(PLAN, metric="accuracy")
  accurate = [{**r, "final": {"accuracy": r["final"]["loss"]}} for r in GOOD]
  assert findings(collected(higher, accurate))[1].verdict == "better"


def test_what_does_not_belong_is_left_out():
  other = dataclasses.replace(PLAN, config={"train": {"steps": 5}})
  changed = {"variants": {"gone": {"model.mix": "cg2"}}, "seeds": {"gone": 1}, "contrasts": ()}
  gone = dataclasses.replace(PLAN, **changed)
  lines = [
    *GOOD[:5],
    result("pos2", 2, 9.0, plan=other),
    result("bad", 0, 1.0, digest="another text"),
    result("bad", 1, None, "failed at step 3 of 4, exit 4: NonFiniteError"),
    result("top2", 1, float("nan")),
    result("top2", 0, 2.5, date="2026-02-01"),
    result("gone", 0, 1.0, plan=gone),
  ]  # fmt: skip
  study = collected(PLAN, lines)
  assert study.values("top2") == {0: 2.5, 1: 3.1, 2: 3.2}  # the newest complete one
  assert study.values("pos2") == {0: 3.001, 1: 3.1}
  assert study.values("bad") == {}
  assert len(study.other) == 3
  said = "\n".join(complaints(study))
  assert "3 of 8 planned runs have no result" in said
  assert "bad, seed 1: failed at step 3 of 4, exit 4" in said
  assert "top2, seed 1: done, made good later" in said
  assert "3 results of another configuration or other text are left out" in said


def test_a_variant_whose_routers_collapsed_is_named():
  """Two of three runs of pos2, one by each of the two figures; top2 has figures at the limits."""
  fine, dead, narrow = (
    {"dead": d, "diversity": v} for d, v in ((0.25, 0.3), (0.75, 0.9), (0, 0.29))
  )
  routers = {"top2": [fine] * 3, "pos2": [fine, dead, narrow], "bad": [{}, None]}
  lines = [{**r, "router": routers[r["variant"]][r["seed"]]} for r in GOOD]
  (said,) = [line for line in complaints(collected(PLAN, lines)) if "collapsed" in line]
  assert said == (
    "pos2: in the last step of 2 of 3 runs the router of a layer had collapsed (up to 75 % of its "
    "experts had no token)"
  )


def test_the_study_s_own_text_counts():
  """A run of another study, finished earlier on another text, does not put out the study's own."""
  early = result("pos2", 2, 9.0, digest="another text") | {"study": "mixing"}
  study = collected(PLAN, [early, *GOOD])
  assert study.values("pos2") == {0: 3.001, 1: 3.1, 2: 3.199}
  assert not study.other
  assert collected(PLAN, [early]).values("pos2") == {2: 9.0}


def test_a_run_serves_every_study_that_has_its_configuration(tmp_path):
  """Whatever the other study calls the variant; its own variants are not counted as strangers."""
  other = dataclasses.replace(
    PLAN, study="mixing", variants={"base": {"model.wiring": "top2"}, "new": {"model.mix": "cg2"}},
    seeds={"base": 2, "new": 2}, contrasts=(Contrast("new", "base"),),
  )  # fmt: skip
  for plan, lines in (
    (PLAN, GOOD),
    (other, [result("new", s, 2.9 + s / 10, plan=other) for s in range(2)]),
  ):
    folder = tmp_path / plan.study / "results"
    (folder / "runs").mkdir(parents=True)
    plan.write(folder)
    studies.write_results(folder / "runs/gpu-1.jsonl", lines)
  study = read_study(tmp_path / "mixing", "gpu")
  assert study.values("base") == {0: 3.0, 1: 3.1}
  assert study.done["base", 1]["file"] == "positions/results/runs/gpu-1.jsonl"
  assert (study.other, findings(study)[0].verdict) == ([], "better")


def test_tables_show_every_variant():
  study = collected(PLAN, GOOD[:-2])
  text = studies.variants_table(study).text()
  assert "top2     3 of 3  3.1000  0.1000" in text
  assert "bad      0 of 2       –" in text
  assert "pos2 − top2" in studies.findings_table(study).markdown()


@pytest.mark.parametrize(
  ("changed", "match"),
  [
    ({"seeds": {"top2": 1}}, "bad, pos2"),
    ({"contrasts": (Contrast("pos3", "top2"),)}, "pos3"),
    ({"metric": "beauty"}, "loss, bits_per_byte, accuracy"),
  ],
)
def test_a_plan_that_contradicts_itself(changed, match):
  with pytest.raises(ConfigError, match=match):
    dataclasses.replace(PLAN, **changed)


@pytest.mark.parametrize("margin", [0, -0.01, "0.01", True])
def test_a_margin_is_above_0_or_null(tmp_path, margin):
  """A plan edited by hand must not lose its equivalence test in silence."""
  results = tmp_path / "results"
  results.mkdir()
  PLAN.write(results)
  stored = json.loads((results / "plan-gpu.json").read_text())
  stored["contrasts"][0]["margin"] = margin
  (results / "plan-gpu.json").write_text(json.dumps(stored))
  with pytest.raises(DataError, match=r"plan-gpu.json: .* the margin .* for pos2 and top2; name a"):
    read_study(tmp_path, "gpu")


def test_a_line_is_what_is_needed_and_small(tmp_path):
  train = [
    {"step": i + 1, "loss": 5.0 - i / 1000, "tokens": 64 * (i + 1), "drop": 0.25, "x": [0] * 99}
    for i in range(1000)
  ]
  evals = [{"step": 500, "loss": 4.6}, {"step": 1000, "loss": 4.1, "bits_per_byte": 2.0}]
  end = [{"step": 1000, "median_seconds_per_step": 0.5, "host_memory_bytes": 7}]
  card = {"time": "2026-01-01T00:00:00+00:00", "git": {"commit": "abc"}, "host": {"name": "secret",
          "cpus": 2}, "environment": {"NCCL_P2P_DISABLE": "1"}}  # fmt: skip
  record = Record(tmp_path, {"train.steps": 1000}, "1 x cpu", card, train, evals, end, {})
  line = studies.result_line(PLAN, "pos2", 2, record, seconds=12.5)
  assert (line["status"], line["tokens"], line["final"]["loss"]) == ("done", 64000, 4.1)
  assert line["evals"] == {"step": [500, 1000], "tokens": [32000, 64000], "loss": [4.6, 4.1]}
  assert len(line["train"]["loss"]) == 200
  assert line["train"]["step"][0] == 5
  assert line["train"]["loss"][0] == pytest.approx(4.998)  # the mean of five
  assert line["router"] == {"drop": 0.25}
  assert (line["host"], line["seconds"], line["data_seed"]) == ({"cpus": 2}, 12.5, 2)
  assert line["environment"] == {"NCCL_P2P_DISABLE": "1"}
  assert len(json.dumps(line)) < 10_000
  broken = dataclasses.replace(record, evals=[{"step": 1000, "loss": None}])
  assert studies.result_line(PLAN, "pos2", 2, broken)["status"].startswith("failed: its last eval")
