"""The studies of experiments/quality: every plan can be run, and a study is made in pieces."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import script

from scmoe import sweep
from scmoe.base.errors import ConfigError, StorageError
from scmoe.reports.studies import read_plan, read_results
from scmoe.run.modality import modality_of

ROOT = Path(__file__).resolve().parents[1]
QUALITY = ROOT / "experiments/quality"
STUDIES = sorted(path.parent.name for path in QUALITY.glob("*/run.py"))

# Trains nothing: notes its start, waits while told to, and leaves the lines of a run.
FAKE = """
import json, os, pathlib, signal, sys, time
argv = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.loads(pathlib.Path(argv["--config_json"]).read_text())
folder = pathlib.Path(argv["--workdir"])
with open(folder.parent / "starts", "a") as file:
  file.write(folder.name + " " + os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
(folder / "checkpoints").mkdir(exist_ok=True)
steps, seed = config["train"]["steps"], config["train"]["seed"]
lines = [{"step": 1, "kind": "train", "loss": 5.0, "tokens": 2048}]
def stop(*_):
  (folder / "metrics.jsonl").write_text("".join(json.dumps(l) + "\\n" for l in lines))
  sys.exit(75)
signal.signal(signal.SIGTERM, stop)
until = time.monotonic() + (60 if (folder.parent / "hold").exists() else 0)
while time.monotonic() < until:
  time.sleep(0.02)
if (folder.parent / "bad").exists() and config["model"]["wiring"] == "top1":
  print("NonFiniteError: no good")
  sys.exit(4)
loss = 3 + seed + len(config["model"]["wiring"]) / 1000
lines += [{"step": steps, "kind": "eval", "loss": loss}, {"step": steps, "kind": "end"}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(l) + "\\n" for l in lines))
"""


def load(name):
  """The run.py of a study as a module."""
  return script(Path("quality", name, "run.py").as_posix())


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """Runs end at once."""
  script = tmp_path / "fake.py"
  script.write_text(FAKE)
  monkeypatch.setattr(sweep, "TRAIN", (sys.executable, str(script)))
  monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
  (tmp_path / "w").mkdir()
  return tmp_path


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_every_scale_can_be_configured(name):
  """The plan is consistent, and each variant resolves, on one device, at every scale."""
  module = load(name)
  design = module.DESIGN
  assert set(design.seeds) == set(module.study.SCALES)
  for scale in design.seeds:
    plan = design.plan(scale, [])
    assert plan.contrasts, scale
    for variant in plan.variants:
      run = module.study.variant_run(plan, variant, 1)
      assert run.train.seed == 1
      run.resolve(num_devices=1, vocab_size=257)
  readme = (QUALITY / name / "README.md").read_text()
  for variant in plan.variants:
    assert f"`{variant}`" in readme, f"{variant} is not in the README that registers the study"
  for stored in (QUALITY / name / "results").glob("plan-*.json"):
    plan = read_plan(stored)
    assert (plan.study, plan.contrasts) == (name, tuple(design.contrasts)), stored


def test_a_study_in_pieces(fake, capsys, monkeypatch):
  monkeypatch.setattr(sweep, "visible_gpus", lambda: ["4", "7"])
  table = load("table1_3_language")
  argv = ["--scale=smoke", f"--workdir={fake / 'w'}", f"--out={fake / 'out'}", "--commit=abc"]
  (fake / "w/bad").touch()
  with pytest.raises(sweep.Failed, match="2 runs failed: top1_seed-0, top1_seed-1;") as failed:
    table.study.call(table.DESIGN, [*argv, "--only=top2,top1"])
  assert failed.value.code == 4
  assert "top1, seed 0: failed at step 0 of 3, exit 4" in capsys.readouterr().out
  study = table.study.call(table.DESIGN, [*argv, "--table"])
  starts = (fake / "w/starts").read_text().split()
  assert sorted(starts[::2]) == sorted(f"{v}_seed-{s}" for v in ("top2", "top1") for s in (0, 1))
  assert set(starts[1::2]) == {"4", "7"}
  assert list(study.done) == [("top2", 0), ("top2", 1)]
  assert [r["status"] for r in study.failed] == [
    "failed at step 0 of 3, exit 4: NonFiniteError: no good"
  ] * 2
  assert not (fake / "w/top2_seed-0/checkpoints").exists()
  (piece,) = (fake / "out/runs").iterdir()
  first = json.loads(piece.read_text().splitlines()[0])
  assert first["git"] == {"commit": "abc"}
  assert 0 <= first["seconds"] < 60  # rounded to tenths
  # The rest, from another folder: what has a result is not trained again, what failed is.
  (fake / "w/bad").unlink()
  study = table.study.call(table.DESIGN, argv)
  assert len(study.done) == len(study.plan.runs)
  assert (fake / "w/starts").read_text().split()[::2].count("top2_seed-0") == 1
  assert len(list((fake / "out/runs").iterdir())) == 2
  assert study.values("top1")[1] == pytest.approx(4.004)
  assert "made good later" in capsys.readouterr().out
  table.study.call(table.DESIGN, [*argv, "--table"])
  assert "equivalent within 0.01" in capsys.readouterr().out
  with pytest.raises(ConfigError, match="registers another plan"):
    table.study.call(table.DESIGN, [*argv, "--config.optimizer.learning_rate=0.5"])
  with pytest.raises(ConfigError, match="is no variant; one of: top2, top1"):
    table.study.call(table.DESIGN, [*argv, "--only=top9"])


def test_a_plan_is_registered_before_its_runs_and_made_afresh(fake, capsys, monkeypatch):
  monkeypatch.chdir(fake)
  table = load("table4")
  argv = ["--scale=smoke", f"--out={fake / 'r'}", "--config.data.source=stdlib"]
  study = table.study.call(table.DESIGN, [*argv, "--register"])
  assert f"registered: {fake / 'r' / 'plan-smoke.json'}" in capsys.readouterr().out
  assert read_plan(fake / "r/plan-smoke.json") == study.plan
  assert not study.done
  first = table.study.call(table.DESIGN, argv)
  assert set(first.done) == set(first.plan.runs)
  # Trained again, in folders of their own; a second call finds their results.
  again = [argv[0], "--afresh", argv[2]]
  for _ in range(2):
    second = table.study.call(table.DESIGN, [*again, f"--out={fake / 'again'}"])
    assert set(second.done) == set(first.done)
    starts = fake / "runs/quality/table4/smoke-afresh/starts"
    assert len(starts.read_text().splitlines()) == len(first.done)
  with pytest.raises(ConfigError, match="--afresh needs a folder for the new results; give --out"):
    table.study.call(table.DESIGN, again)


def test_runs_on_another_text_are_refused_before_they_train(fake, monkeypatch):
  table = load("table1_3_language")
  monkeypatch.setattr(sweep, "visible_gpus", list)
  argv = ["--scale=smoke", f"--workdir={fake / 'w'}", f"--out={fake / 'out'}"]
  study = table.study.call(table.DESIGN, [*argv, "--only=top2"])
  run = table.study.variant_run(study.plan, "top1", 0).resolve(num_devices=1, vocab_size=257)
  read = modality_of(run).open_data(run).fingerprint()
  (piece,) = (fake / "out/runs").iterdir()
  finished = [json.loads(line) for line in piece.read_text().splitlines()]

  def having_read(data):
    piece.write_text("".join(json.dumps(one | {"data": data}) + "\n" for one in finished))

  having_read(read | {"documents": 2})
  with pytest.raises(ConfigError, match=r"has documents \d+, and the finished .* documents 2: "):
    table.study.call(table.DESIGN, argv)
  assert len((fake / "w/starts").read_text().splitlines()) == 2
  having_read(read | {"seed": 7})
  own = read_results([fake / "out/runs"], "smoke")
  others = [one | {"study": "table4"} for one in own]
  strange = [one | {"data": read | {"documents": 2}} for one in others]
  kept = table.study.of_one_text(study.plan, [*own, *others, *strange], "top1", 0)
  assert kept == [*own, *others]
  with pytest.raises(ConfigError, match="could not be paired"):
    table.study.of_one_text(
      study.plan, [{**own[0], **strange[0], "study": own[0]["study"]}], "top1", 0
    )


def test_the_limit_cuts_a_run_which_then_goes_on(fake, capsys, monkeypatch):
  table = load("table1_3_language")
  monkeypatch.setattr(sweep, "visible_gpus", list)
  monkeypatch.setitem(table.study.GRACE, "smoke", 0.0)
  argv = ["--scale=smoke", f"--workdir={fake / 'w'}", f"--out={fake / 'out'}", "--only=top2,top1"]
  (fake / "w/hold").touch()
  study = table.study.call(table.DESIGN, [*argv, "--limit_seconds=2"])
  assert not study.done
  assert not study.failed  # cut off is not failed
  assert (fake / "w/starts").read_text().split()[::2] == ["top2_seed-0"]
  (fake / "w/hold").unlink()
  study = table.study.call(table.DESIGN, argv)
  assert len(study.done) == 4


def test_a_new_option_does_not_part_studies(tmp_path):
  """A plan registered before an option existed, and one registered after: the same digests."""
  table = load("table1_3_language")
  plan = table.DESIGN.plan("smoke", [])
  older = {
    **plan.config,
    "model": {k: v for k, v in plan.config["model"].items() if k != "qk_norm"},
  }
  (tmp_path / "first/results").mkdir(parents=True)
  dataclasses.replace(plan, config=older).write(tmp_path / "first/results")
  assert table.study.as_written(tmp_path, "smoke", plan.config) == older
  assert table.study.as_written(tmp_path, "cpu", plan.config) == plan.config
  other = table.DESIGN.plan("smoke", [("model.qk_norm", "head")])
  assert table.study.as_written(tmp_path, "smoke", other.config) == other.config
  design = dataclasses.replace(table.DESIGN, folder=tmp_path / "first")
  stored = dataclasses.replace(plan, study="first", config=older)
  stored.write(tmp_path / "first/results")
  given = [("model.wiring", "scmoe_pos2")]  # what it is without saying so
  places = [tmp_path / "first/results"]
  assert table.study.registered(design, "smoke", given, places) == stored


def test_a_plan_holds_wherever_the_data_lie(fake, monkeypatch):
  """The folder of the data is the machine's own: the runs read it there, their digests stay."""
  monkeypatch.setattr(sweep, "visible_gpus", list)
  monkeypatch.setattr(sweep, "shared_out", lambda jobs, runs: [{}])
  table = load("table5_vision")
  design = dataclasses.replace(table.DESIGN, folder=fake / "vision")
  (fake / "vision/results").mkdir(parents=True)
  plan = design.plan("gpu", [])
  assert plan.config["data"]["path"] == "data/cifar10"
  plan.write(fake / "vision/results")
  values = {"scale": "gpu", "workdir": str(fake / "w"), "out": "", "only": "top1",
            "afresh": False, "dry_run": True, "table": False}  # fmt: skip
  one = table.study.asked(design, values, [("data.path", "/elsewhere")])
  assert one.plan == plan
  (run, _), *_ = table.study.queue_of([one])
  assert run.config.data.path == "/elsewhere"
  (run, _), *_ = table.study.queue_of([table.study.asked(design, values, [])])
  assert run.config.data.path == "data/cifar10"
  with pytest.raises(ConfigError, match="registers another plan"):
    table.study.asked(design, values, [("data.path", "/elsewhere"), ("model.width", "128")])


def test_a_run_that_would_not_end_is_not_begun(fake, capsys, monkeypatch):
  table = load("table1_3_language")
  monkeypatch.setattr(sweep, "visible_gpus", list)
  plan = table.DESIGN.plan("smoke", [])
  folder = fake / "w/top2_seed-0"
  run = sweep.Run(folder, table.study.variant_run(plan, "top2", 0))

  def make(limit, seconds):
    known = [{"seconds": seconds, "steps": 3, "plan": "", "seed": 0, "study": ""}]
    one = table.study.Asked(plan, known, set(), fake / "w", fake / "out")
    return table.study.Pieces(one, limit, "", "", keep=False, pace={})

  assert make(0, 500).may_begin(run)  # no limit
  assert make(305, 0).may_begin(run)  # nothing is known of how long a run takes
  assert make(305, 200).may_begin(run)
  late = make(305, 200)
  late.until -= 150
  assert not late.may_begin(run)
  late.left([run])
  said = capsys.readouterr().out
  assert "not begun: top2_seed-0; 150 s are left and top2_seed-0 takes about 200 s" in said
  folder.mkdir(parents=True)
  (fake / "out/runs").mkdir(parents=True)
  lines = [{"step": 3, "kind": "eval", "loss": 2.0}, {"step": 3, "kind": "end"}]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  late.one.runs[folder] = "top2", 0
  starts = {"starts": [{}, {}]}
  (folder / "card.json").write_text(json.dumps(starts))
  late.ended(run, 1.0)
  assert not late.may_begin(run), "a run that went on trained only some of its steps in that time"
  (folder / "card.json").write_text(json.dumps({"starts": [{}]}))
  late.ended(run, 100.0)
  assert late.may_begin(run), "the run that ended last was faster than those before"
  assert make(305, 9000).may_begin(run)  # ends within no call: it is cut, and goes on


def test_a_run_that_lies_in_the_folder_is_not_taken_for_one_that_failed(fake):
  """A process that fails before it writes leaves the finished run of an earlier plan behind."""
  table = load("table4")
  words = ["--scale=smoke", f"--workdir={fake / 'w'}", "--only=top2"]
  for together in ([], ["--together"]):
    out = f"--out={fake / 'first'}{len(together)}"
    assert len(table.study.call(table.DESIGN, [*words, *together, out]).done) == 2
    (fake / "fake.py").rename(fake / "kept.py")  # the process that trains ends at once
    out = f"--out={fake / 'second'}{len(together)}"
    other = [*words, *together, out, "--config.optimizer.learning_rate=0.5"]
    with pytest.raises(sweep.Failed):
      table.study.call(table.DESIGN, other)
    study = table.study.call(table.DESIGN, [*other, "--table"])
    assert not study.done
    assert [r["status"].partition(":")[0] for r in study.failed] == [
      "failed at step 0 of 3, exit 2"
    ] * 2
    (fake / "kept.py").rename(fake / "fake.py")


@pytest.mark.parametrize("second", ["second", "first"])
def test_two_calls_at_once_share_the_runs(fake, monkeypatch, second):
  """A run that the second call finishes meanwhile is trained once, and filed once in each --out."""
  table = load("table4")
  monkeypatch.setattr(sweep, "visible_gpus", list)
  words = ["--scale=smoke", f"--workdir={fake / 'w'}", "--only=top2,top3"]
  ended = table.study.Pieces.ended

  def end_and_let_another_call_train(pieces, run, seconds):
    monkeypatch.setattr(table.study.Pieces, "ended", ended)
    pieces.ended(run, seconds)
    table.study.call(table.DESIGN, [*words, f"--out={fake / second}", "--keep"])
    for folder in (fake / "w").glob("top*"):  # what an earlier, interrupted process left
      (folder / "exit.json").write_text('{"code": 130, "words": "KeyboardInterrupt"}')

  monkeypatch.setattr(table.study.Pieces, "ended", end_and_let_another_call_train)
  study = table.study.call(table.DESIGN, [*words, f"--out={fake / 'first'}", "--jobs=1"])
  assert set(study.done) == {(name, seed) for name in ("top2", "top3") for seed in (0, 1)}
  begun = [line.split()[0] for line in (fake / "w/starts").read_text().splitlines()]
  # A second call that does not find the first one's result trains top3_seed-0 again.
  again = ["top3_seed-0"] if second == "second" else []
  assert sorted(begun) == sorted(
    ["top2_seed-0", "top2_seed-1", "top3_seed-0", "top3_seed-1", *again]
  )
  filed = [json.loads(line) for path in (fake / "first/runs").iterdir()
           for line in path.read_text().splitlines()]  # fmt: skip
  assert len(filed) == 4
  # It timed only what its own process trained, and keeps what the other call kept.
  assert ["seconds" in line for line in filed if line["variant"] == "top2"] == [
    second == "first"
  ] * 2
  assert (fake / "w/top2_seed-1/checkpoints").exists()


@pytest.mark.parametrize(("code", "other"), [(130, False), (2, True)])
def test_a_run_that_was_interrupted_has_not_failed(fake, monkeypatch, code, other):
  """Nor has one that another call, which began in the same moment, trains."""
  owners = iter([False, False])  # when the runs begin; later the other process has the lock
  monkeypatch.setattr(sweep, "owner_lives", lambda lock: next(owners, other))
  (fake / "fake.py").write_text(f"raise SystemExit({code})")
  table = load("table4")
  monkeypatch.setattr(table.study, "owner_lives", lambda lock: other)
  argv = ["--scale=smoke", f"--workdir={fake / 'w'}", f"--out={fake / 'out'}", "--only=top2"]
  study = table.study.call(table.DESIGN, argv)
  assert (study.done, study.failed, list((fake / "out/runs").iterdir())) == ({}, [], [])


def test_no_process_outlives_a_call_that_cannot_write(fake, monkeypatch):
  """A full disk ends the call; what still trains is told to save and end, and waited for."""
  script = fake / "fake.py"
  holds = 'if (folder.parent / "hold").exists()'
  assert holds in FAKE
  script.write_text(FAKE.replace(holds, 'if "seed-1" in folder.name'))
  table, begun, popen = load("table4"), [], subprocess.Popen

  def begin(*words, **options):
    begun.append(popen(*words, **options))
    return begun[-1]

  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(subprocess, "Popen", begin)
  monkeypatch.setattr(table.study, "write_results", full)
  argv = ["--scale=smoke", f"--workdir={fake / 'w'}", f"--out={fake / 'out'}", "--only=top2"]
  with pytest.raises(StorageError, match=r"out/runs.* cannot be written: No space left on device"):
    table.study.call(table.DESIGN, [*argv, "--jobs=2"])
  assert len(begun) == 2
  assert all(process.poll() is not None for process in begun)
  assert not list((fake / "out/runs").iterdir())


def test_calls_of_one_second_have_files_of_their_own(tmp_path):
  table = load("table4")
  made = [table.study.new_file(tmp_path, "smoke-20260101T000000") for _ in range(3)]
  suffixes = ["", "-2", "-3"]
  assert [path.name for path in made] == [f"smoke-20260101T000000{x}.jsonl" for x in suffixes]
  assert all(path.is_file() for path in made)


def test_fewer_than_no_jobs_are_refused(fake):
  table = load("table4")
  with pytest.raises(ConfigError, match="--jobs=-2 is below 0"):
    table.study.call(table.DESIGN, ["--scale=smoke", f"--out={fake / 'out'}", "--jobs=-2"])


def test_all_studies_in_one_call(fake, monkeypatch, capsys):
  """A run that two studies share is trained once, and the limit is that of the whole call."""
  monkeypatch.setattr(sweep, "visible_gpus", list)
  monkeypatch.chdir(fake)
  whole = load(".")
  assert sorted(whole.STUDIES) == sorted(set(STUDIES) - {"table5_vision"})
  words = ["--scale=smoke", f"--out={fake / 'out'}"]
  whole.main([*words, "--studies=table4,first_pair"])
  begun = [
    f"{path.parent.parent.name} {line.split()[0]}"
    for path in fake.glob("runs/quality/*/smoke/starts")
    for line in path.read_text().splitlines()
  ]
  assert begun.count("table4 scmoe_pos2_seed-0") == 1
  assert not [line for line in begun if line.startswith("first_pair scmoe_pos2_seed")]
  assert "first_pair scmoe_pos1_seed-1" in begun
  # One queue for both, by seed: no second seed before the last first one.
  seeds = [line.rpartition("seed-")[2] for line in begun]
  assert set(seeds) == {"0", "1"}
  tables = capsys.readouterr().out
  assert tables.index("== table4") < tables.index("== first_pair")
  assert "missing" not in tables.partition("== first_pair")[2]  # the shared runs count there too
  whole.main([*words, "--studies=norms", "--limit_seconds=0.001"])
  assert not list(fake.glob("runs/quality/norms/smoke/starts"))
  whole.main([*words, "--studies=norms,moe_every", "--dry_run"])
  planned = capsys.readouterr().out.splitlines()
  assert planned.index("moe_every: every_top2_seed-0") < planned.index("norms: pos2_own_seed-1")
  assert "norms: top2_seed-0" not in planned, "another study has trained it"
  # A study whose finished runs read another text is left out, a refusal of a plan ends the call;
  # neither leaves a plan behind.
  (piece,) = (fake / "out/first_pair/results/runs").iterdir()
  lines = [json.loads(line) for line in piece.read_text().splitlines()]
  text = {"digest": "another", "documents": 1}
  piece.write_text("".join(json.dumps(one | {"data": text}) + "\n" for one in lines[:-1]))
  whole.main([*words, "--studies=first_pair,zero_experts"])
  told = capsys.readouterr()
  assert "first_pair is left out: " in told.err
  assert "== zero_experts" in told.out
  plan = fake / "out/experts/results"
  plan.mkdir(parents=True)
  (fake / "out/zero_experts/results/plan-smoke.json").rename(plan / "plan-smoke.json")
  with pytest.raises(ConfigError, match="registers another plan"):
    whole.main([*words, "--studies=farskip,experts"])
  assert not (fake / "out/farskip").exists()
  with pytest.raises(ConfigError, match=r"--studies is empty; name some of: first_pair"):
    whole.main([*words, "--studies="])
  with pytest.raises(ConfigError, match=r"--studies='table9' is no study; one of: first_pair"):
    whole.main([*words, "--studies=table9"])
  with pytest.raises(ConfigError, match="--workdir"):
    whole.main([*words, "--workdir=x"])


def test_the_routers_figures_beside_the_analyses_are_those_of_the_records(tmp_path):
  script = QUALITY / "analyses/layers.py"
  subprocess.run([sys.executable, script, f"--out={tmp_path}"], check=True, capture_output=True)
  stored = QUALITY / "analyses/results/layers"
  assert {path.name for path in stored.iterdir()} == {path.name for path in tmp_path.iterdir()}
  for path in tmp_path.iterdir():
    assert path.read_text() == (stored / path.name).read_text(), f"run {script}"
