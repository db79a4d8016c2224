"""A sweep's runs: planned, shared out, killed and gone on with, failed and shown."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scmoe import sweep
from scmoe.base.errors import ConfigError, Preempted, run_main
from scmoe.reports.records import read_run
from scmoe.run.config import RunConfig, from_json
from scmoe.training.options import OptimizerConfig
from scmoe.training.workdir import RunLock

ROOT = Path(__file__).resolve().parent.parent

# Trains nothing: notes that it was started, waits while told to, ends as the learning rate says.
FAKE = """
import json, os, pathlib, sys, time
argv = dict(zip(sys.argv[1::2], sys.argv[2::2]))
beside = [word for flag, word in zip(sys.argv[1::2], sys.argv[2::2]) if flag == "--beside"]
config = json.loads(pathlib.Path(argv["--config_json"]).read_text())
folder = pathlib.Path(argv["--workdir"])
with open(folder / "starts", "a") as file:
  file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
while (folder.parent / "hold").exists():
  time.sleep(0.02)
rate = config["optimizer"]["learning_rate"]
if rate > 0.5:
  print("NonFiniteError: no good")
  sys.exit(4)
steps = config["train"]["steps"]
for word in [f"{config['train']['seed']}={folder}", *beside]:
  seed, _, place = word.partition("=")
  if (pathlib.Path(place).parent / f"fail-{seed}").exists():
    continue
  loss = rate + int(seed)
  lines = [{"step": steps, "kind": "eval", "loss": loss, "bits_per_byte": loss},
           {"step": steps, "kind": "end"}]
  text = "".join(json.dumps(l) + "\\n" for l in lines)
  (pathlib.Path(place) / "metrics.jsonl").write_text(text)
if any((folder.parent).glob("fail-*")):
  print("NonFiniteError: one seed was no good")
  sys.exit(4)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """Runs end at once, and the current folder is empty."""
  script = tmp_path / "fake.py"
  script.write_text(FAKE)
  monkeypatch.setattr(sweep, "TRAIN", (sys.executable, str(script)))
  monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
  here = tmp_path / "here"
  here.mkdir()
  monkeypatch.chdir(here)
  return here


def starts(run):
  return (run / "starts").read_text().splitlines() if (run / "starts").exists() else []


def wait_for_starts(run, count):
  """Until so many have been noted: a file that is there may still be without its line."""
  until = time.monotonic() + 60
  while len(starts(run)) < count:
    assert time.monotonic() < until, f"{len(starts(run))} of {count} starts in a minute"
    time.sleep(0.02)


def test_the_grid_is_checked_and_named():
  base = RunConfig()
  grid = ["model.wiring=top2,scmoe_pos2", "--config.optimizer.learning_rate=1e-3,2e-3"]
  runs = sweep.planned(base, grid, 2, Path("w"))
  names = [run.folder.name for run in runs]
  assert names[:3] == [
    "wiring-top2_learning_rate-1e-3_seed-0",
    "wiring-top2_learning_rate-1e-3_seed-1",
    "wiring-top2_learning_rate-2e-3_seed-0",
  ]
  assert len(set(names)) == len(runs) == 8
  assert runs[-1].config.model.wiring == "scmoe_pos2"
  assert (runs[-1].config.optimizer.learning_rate, runs[-1].config.train.seed) == (2e-3, 1)
  odd = sweep.planned(base, ["overlap.schedule=auto;mlp 0"], 1, Path("w"))
  assert odd[1].config.overlap.schedule == "mlp 0"
  assert odd[1].folder.name.startswith("schedule-mlp-0")
  for text, words in (
    ("model.wiring", "is not FIELD=VALUE"),
    ("model.wiring=top2,,top1", "is not FIELD=VALUE"),
    ("model.wiring=top2,top2", "has a value twice"),
    ("train.seed=1,2", "--seeds=2"),
    ("model.wirings=top2", "did you mean model.wiring"),
    ("model.num_experts=8,-1", "model.num_experts=-1"),
    ("model.wiring=top2,top9", "model.wiring='top9'"),
  ):
    with pytest.raises(ConfigError, match=words):
      sweep.planned(base, [text], 1, Path("w"))
  with pytest.raises(ConfigError, match="given twice"):
    sweep.planned(base, ["model.top_k=1", "model.top_k=2"], 1, Path("w"))


def test_gpus_are_shared_out(monkeypatch):
  monkeypatch.setattr(sweep, "visible_gpus", lambda: ["0", "1", "2", "3", "4"])
  assert sweep.shared_out(1, 9) == [{}]
  assert [e["CUDA_VISIBLE_DEVICES"] for e in sweep.shared_out(2, 1)] == ["0,1", "2,3"]
  new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  monkeypatch.delenv(new, raising=False)
  monkeypatch.setenv(old, "")  # jax reads an empty one as none
  seven = sweep.shared_out(7, 9)
  assert [e["CUDA_VISIBLE_DEVICES"] for e in seven] == ["0", "1", "2", "3", "4", "0", "1"]
  assert {e[new] for e in seven} == {"0.450"}
  for name in (new, old):  # jax ends with an error if both are set
    monkeypatch.setenv(name, "0.2")
    assert sweep.shared_out(7, 9)[0] == {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setenv(name, "")
  assert sweep.shared_out(7, 4) == [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(5)]
  monkeypatch.setattr(sweep, "visible_gpus", list)
  assert sweep.shared_out(3, 9) == [{}, {}, {}]


def test_runs_end_in_a_comparison_and_are_not_run_twice(fake, capsys):
  argv = ["--grid", "optimizer.learning_rate=0.1,0.2", "--seeds", "3", "--json=c.json"]
  sweep.main([*argv, "--jobs", "2"])
  out = capsys.readouterr().out
  assert "[6/6] learning_rate-0.2_seed-2: done, loss 2.2000" in out
  assert "1.1000 ± 1.0000" in out
  figures = json.loads((fake / "c.json").read_text())
  assert [group["label"] for group in figures["groups"]] == ["0.1", "0.2"]
  assert figures["groups"][1]["paired"]["loss"]["difference"]["mean"] == pytest.approx(0.1)
  workdir = fake / "runs/sweep-quickstart"
  assert (workdir / "compare/compare.html").is_file()
  sweep.main([*argv, "--seeds", "4"])  # one more seed: only that one is trained
  assert "6 of 8 runs are done already" in capsys.readouterr().out
  counts = [len(starts(run)) for run in sorted(workdir.glob("learning*"))]
  assert counts == [1] * 8
  asked = from_json((workdir / "learning_rate-0.2_seed-1/asked.json").read_text())
  assert (asked.optimizer.learning_rate, asked.train.seed) == (0.2, 1)


def test_a_failed_run_is_shown_and_tried_again(fake, capsys):
  argv = ["--grid=optimizer.learning_rate=0.9,0.1", "--workdir=w"]
  with pytest.raises(SystemExit) as ended:
    run_main(sweep.main, argv)
  captured = capsys.readouterr()
  assert ended.value.code == 4
  assert captured.err.startswith("Failed: 1 runs failed: learning_rate-0.9_seed-0; their log.txt")
  assert "done, loss 0.1000" in captured.out  # the others went on
  assert "exit 4: NonFiniteError: no good" in captured.out
  assert "exit 4: NonFiniteError: no good" in (fake / "w/compare/compare.html").read_text()
  with pytest.raises(SystemExit):
    run_main(sweep.main, argv)
  assert len(starts(fake / "w/learning_rate-0.9_seed-0")) == 2
  assert len(starts(fake / "w/learning_rate-0.1_seed-0")) == 1


def test_the_figures_of_another_sweep_are_not_taken(fake, capsys):
  """A folder is named by grid and seed: with other options beside them it holds another run."""
  argv = ["--grid=model.wiring=top2,top1", "--workdir=w"]
  sweep.main([*argv, "--config.optimizer.learning_rate=0.1"])
  assert "loss 0.1000" in capsys.readouterr().out
  other = [*argv, "--config.optimizer.learning_rate=0.2"]
  with pytest.raises(
    ConfigError, match=r"holds a run of another sweep .*learning_rate: 0.1 -> 0.2"
  ):
    sweep.main(other)
  assert len(starts(fake / "w/wiring-top2_seed-0")) == 1
  sweep.main([*argv, "--config.optimizer.learning_rate=0.1", "--config.train.steps=77"])
  assert "are done already" not in capsys.readouterr().out, "longer runs go on"
  assert len(starts(fake / "w/wiring-top2_seed-0")) == 2
  sweep.main(["--grid=model.wiring=top2,scmoe_pos2", "--workdir=w",
              "--config.optimizer.learning_rate=0.1", "--config.train.steps=77"])  # fmt: skip
  assert "1 of 2 runs are done already" in capsys.readouterr().out


def test_a_second_sweep_is_refused(fake):
  folder = fake / "w"
  folder.mkdir()
  with RunLock(folder, sweep.SWEEP_LOCK), pytest.raises(ConfigError, match="is in use by process"):
    sweep.main(["--grid=model.wiring=top2,top1", "--workdir=w"])
  assert [p.name for p in folder.iterdir()] == []


def test_dry_run_writes_nothing(fake, capsys):
  sweep.main(["--grid=model.wiring=top2,top1", "--seeds=2", "--dry_run"])
  assert "4 runs in runs/sweep-quickstart:" in capsys.readouterr().out
  assert list(fake.iterdir()) == []


def test_a_mesh_that_the_simulated_devices_do_not_fill_is_refused_before_the_first(fake):
  words = ["--seeds=2", "--dry_run", "--config.mesh.expert=4"]
  with pytest.raises(ConfigError, match=r"mesh.* 2 devices"):
    sweep.main([*words, "--simulate=2"])
  sweep.main([*words, "--simulate=4"])


def test_a_run_that_another_sweep_has_trained_meanwhile_is_not_trained_again(fake, capsys):
  """Two studies' calls with one list: the second one's list still has what the first finished."""
  runs = sweep.planned(RunConfig(), [], 3, Path("w"))
  found = []

  class Beside(sweep.Watch):
    def ended(self, run, seconds):
      """The other sweep finishes the second run, and the third of another configuration."""
      if run is runs[0]:
        other = dataclasses.replace(runs[2].config, optimizer=OptimizerConfig(learning_rate=0.1))
        sweep.train_all([runs[1], dataclasses.replace(runs[2], config=other)], [{}], [])

    def found(self, run):
      found.append(run)

  sweep.train_all(runs, [{}], [], Beside())
  assert found == [runs[1]]
  assert [len(starts(run.folder)) for run in runs] == [1, 1, 2]
  assert "seed-1: another process has trained it" in capsys.readouterr().out
  found.clear()
  sweep.train_all(runs[:1], [{}], [], Beside())  # it was finished before: the caller asks for more
  assert not found
  assert len(starts(runs[0].folder)) == 2


def test_of_seeds_that_share_a_process_the_finished_one_is_not_trained_again(fake):
  """Another process finished the second of three seeds meanwhile: the others go on without it."""
  first, *group = sweep.planned(RunConfig(), [], 4, Path("w"))
  group = sweep.together(group)
  assert [len(run.all) for run in group] == [3]
  found = []

  class Beside(sweep.Watch):
    def ended(self, run, seconds):
      if run is first:
        sweep.train_all([group[0].all[1]], [{}], [])

    def found(self, run):
      found.append(run.folder.name)

  sweep.train_all([first, *group], [{}], [], Beside())
  assert found == ["seed-2"]
  assert [len(starts(run.folder)) for run in group[0].all] == [1, 1, 0]
  assert all(read_run(run.folder).done for run in group[0].all)


def test_killed_in_the_middle_it_goes_on(fake):
  """Killed outright, its run in flight stays alone: the next sweep waits for it."""
  folder = fake / "w"
  folder.mkdir()
  (folder / "hold").write_text("")
  code = (
    "import sys\nfrom scmoe import sweep\nfrom scmoe.base.errors import run_main\n"
    f"sweep.TRAIN = {sweep.TRAIN!r}\nsweep.POLL_SECONDS = 0.02\nrun_main(sweep.main)\n"
  )
  words = [sys.executable, "-c", code, "--grid=optimizer.learning_rate=0.1,0.2", "--workdir=w"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  first = folder / "learning_rate-0.1_seed-0"

  def begin(count):
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    wait_for_starts(first, count)
    return process

  for count, number in ((1, signal.SIGTERM), (2, signal.SIGINT)):
    stopped = begin(count)
    stopped.send_signal(number)  # passed on: the fake run ends without having saved
    assert stopped.wait(60) == Preempted.code
    assert not read_run(first).done
  killed = begin(3)
  killed.kill()
  killed.wait(60)
  (folder / "hold").unlink()  # what it left behind now ends by itself
  done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert "loss" in done.stdout
  assert all(read_run(run).done for run in folder.glob("learning*"))


def test_a_run_that_another_process_trains_holds_up_no_other(fake, monkeypatch, capsys):
  runs = sweep.planned(RunConfig(), [], 3, Path("w"))
  busy = runs[0].folder / sweep.LOCK

  def owned(path):
    return path == busy and not read_run(runs[2].folder).done

  monkeypatch.setattr(sweep, "owner_lives", owned)
  sweep.train_all(runs, [{}], [])
  assert all(read_run(run.folder).done for run in runs)
  lines = capsys.readouterr().out.splitlines()
  assert sum("is being trained by another process" in line for line in lines) == 1
  begun = [line.split()[1] for line in lines if line.endswith(": training")]
  assert [word.rstrip(":") for word in begun] == [runs[n].folder.name for n in (1, 2, 0)]


def test_a_sweep_that_waits_for_another_process_can_be_stopped(fake, monkeypatch):
  runs = sweep.planned(RunConfig(), [], 1, Path("w"))

  def owned(path):
    os.kill(os.getpid(), signal.SIGTERM)
    return True

  monkeypatch.setattr(sweep, "owner_lives", owned)
  with pytest.raises(Preempted):
    sweep.train_all(runs, [{}], [])
  assert starts(runs[0].folder) == []


@pytest.mark.nightly  # by day the same sweep starts runs that train nothing
def test_a_real_sweep(tmp_path):
  """Two runs of the smallest configuration: one trains, one has too little text for its batch."""
  words = [sys.executable, "-m", "scmoe.sweep", "--smoke", "--grid=train.batch_size=8,800000"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  words += ["--config.data.limit_bytes=20000", "--config.train.sample_tokens=0", "--workdir=w"]
  done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True,
                        timeout=300)  # fmt: skip
  assert done.returncode == 3, done.stderr
  good, bad = (read_run(tmp_path / "w" / f"batch_size-{n}_seed-0") for n in (8, 800000))
  assert good.done
  assert good.card["config"]["train"]["batch_size"] == 8
  assert good.card["versions"]["jax"]
  assert good.card["data"]["digest"]
  assert good.card["devices"]["count"] == 8
  assert bad.status.startswith("failed at step 0 of 3, exit 3: DataError: ")
  last = [json.loads(line) for line in (good.path / "metrics.jsonl").read_text().splitlines()]
  assert f"{[line for line in last if line['kind'] == 'eval'][-1]['loss']:.4f}" in done.stdout


def test_seeds_of_a_combination_share_a_process(fake, capsys):
  argv = ["--grid", "model.wiring=top2,scmoe_pos2", "--seeds=3", "--together", "--workdir=w"]
  sweep.main(argv)
  assert [len(starts(fake / f"w/wiring-top2_seed-{seed}")) for seed in range(3)] == [1, 0, 0]
  said = capsys.readouterr().out
  assert "[1/2] wiring-top2_seed-0: training with 2 more seeds" in said
  for seed in range(3):
    record = read_run(fake / f"w/wiring-scmoe_pos2_seed-{seed}")
    assert record.done
    assert record.seed == seed  # from the configuration that its folder was given
    assert record.ended == {"code": 0, "words": ""}
  sweep.main(argv)  # nothing is left to train
  assert "6 of 6 runs are done already" in capsys.readouterr().out


def test_a_seed_that_fails_beside_others_fails_alone(fake):
  (fake / "w").mkdir()
  (fake / "w/fail-1").touch()
  with pytest.raises(sweep.Failed, match="1 runs failed: seed-1;"):
    sweep.main(["--seeds=3", "--together", "--workdir=w"])
  ended = [read_run(fake / f"w/seed-{seed}").ended["code"] for seed in range(3)]
  assert ended == [0, 4, 0]


def test_runs_at_different_steps_do_not_share_a_process(tmp_path):
  runs = sweep.planned(RunConfig(), ["model.wiring=top2,scmoe_pos2"], 2, tmp_path)
  assert [len(run.all) for run in sweep.together(runs)] == [2, 2]
  (runs[0].folder / "checkpoints/5/meta").mkdir(parents=True)
  assert [len(run.all) for run in sweep.together(runs)] == [1, 1, 2]


def test_a_run_that_may_not_begin_is_asked_for_again_when_another_has_ended(fake):
  """The second and fourth of five never may, the third only once the first has ended."""
  runs = sweep.planned(RunConfig(), [], 5, Path("w"))
  begun, left = [], []

  class Choosing(sweep.Watch):
    ends = 0

    def may_begin(self, run):
      number = runs.index(run)
      if number in (1, 3) or (number == 2 and not self.ends):
        return False
      begun.append(number)
      return True

    def ended(self, run, seconds):
      self.ends += 1

    def left(self, runs):
      left.extend(runs)

  sweep.train_all(runs, [{}, {}], [], Choosing())
  assert sorted(begun[:2]) == [0, 4]
  assert begun[2:] == [2]
  assert left == [runs[1], runs[3]]
