"""Locks, full disks, files that somebody else changed, and standard output that is not there."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from covering import night
from test_files import restore, run, saved, setup  # noqa: F401 - fixtures
from training_fakes import bits, trainer
from workers import HERE, Worker

from scmoe import compare as compare_command
from scmoe import replay as replay_command
from scmoe.base.arrays import read_npz
from scmoe.base.errors import CheckpointError, ConfigError, ScmoeError, StorageError
from scmoe.base.stored import StoredError, parse_json, read_json
from scmoe.reports.records import read_run
from scmoe.training import description
from scmoe.training.metrics import MetricsFile, metrics_by_kind, read_metrics
from scmoe.training.restore import StepGone, list_steps, read_meta, restore_part, with_newest
from scmoe.training.workdir import RunLock, identity, prepare_workdir

ROOT = Path(__file__).resolve().parents[2]
STALE = json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "started": "1"})
SMALL = {"steps": 4}


def python(code, *words, **options):
  """Runs a script that imports this package; returns the ended process."""
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [sys.executable, "-c", code, *map(str, words)], env=environment, timeout=120, check=False,
    **{"capture_output": True, "text": True} | options,
  )  # fmt: skip


# --- one run, one lock ----------------------------------------------------------------------------

RACE = """
import os, pathlib, sys
from scmoe.base.errors import ConfigError
from scmoe.training.workdir import RunLock
held = []
for trial in range(60):
  folder = pathlib.Path(sys.argv[1]) / str(trial)
  folder.mkdir()
  (folder / "run.lock").write_text(sys.argv[2])
  (go, start), (done, finish), (results, result) = os.pipe(), os.pipe(), os.pipe()
  for _ in range(4):
    if os.fork() == 0:
      os.close(start), os.close(finish), os.read(go, 1)
      try:
        with RunLock(folder):
          os.write(result, b"1"), os.read(done, 1)
      except ConfigError:
        os.write(result, b"0")
      os._exit(0)
  os.close(start)
  held.append(b"".join(os.read(results, 1) for _ in range(4)).count(b"1"))
  os.close(finish)
  for _ in range(4):
    os.wait()
print(held)
"""


@pytest.mark.parametrize("left", [STALE, "", "[]", '{"pid": "x"}'])
def test_exactly_one_of_many_holds_a_lock_that_was_left_behind(tmp_path, left):
  """Four processes at once, sixty times, at the lock of a process that is gone."""
  ended = python(RACE, tmp_path, left)
  assert ended.stdout.strip() == str([1] * 60), ended.stderr[-2000:]


HOLDER = """
import os, pathlib, sys, time
from scmoe.training.workdir import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
  if os.fork() == 0:
    print("held", flush=True)
  time.sleep(60)
"""


def test_a_lock_ends_with_its_process_and_not_with_its_file(tmp_path):
  """A child that was forked must not keep it; a deleted file must not give it away."""
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], env=environment,
                            stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
  try:
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    (tmp_path / "run.lock").unlink()
    with pytest.raises(ConfigError, match="is in use by"), RunLock(tmp_path):
      pass
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
      assert json.loads((tmp_path / "run.lock").read_text()) == identity(os.getpid())
  finally:
    os.killpg(holder.pid, signal.SIGKILL)
  assert not (tmp_path / "run.lock").exists()


def test_a_lock_on_a_file_system_without_locks_goes_by_its_name(tmp_path, monkeypatch, capsys):
  def none(*_):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr("fcntl.flock", none)
  with RunLock(tmp_path):
    assert "has no locks" in capsys.readouterr().err
  (tmp_path / "run.lock").write_text(json.dumps(identity(os.getppid())))
  with pytest.raises(ConfigError, match=f"in use by process {os.getppid()}"), RunLock(tmp_path):
    pass


# --- a full disk ----------------------------------------------------------------------------------


def _full():
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _worker(workdir, *, environment=None, **options):
  arguments = json.dumps({"workdir": str(workdir), "train": SMALL})
  words = [sys.executable, str(HERE / "worker.py"), arguments]
  paths = os.pathsep.join([str(HERE), str(ROOT)])
  environment = os.environ | {"PYTHONPATH": paths} | (environment or {})
  return subprocess.run(words, env=environment, timeout=120, check=False,
                        **{"capture_output": True, "text": True} | options)  # fmt: skip


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tmp_path):
  ended = _worker(tmp_path / "deep" / "run", preexec_fn=_full)
  assert ended.returncode == StorageError.code
  (line,) = ended.stderr.splitlines()
  assert line.startswith("StorageError: workdir=")
  assert list(tmp_path.iterdir()) == []
  prepare_workdir(tmp_path / "deep" / "run")


def test_a_lock_that_cannot_be_written_is_not_left(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr("os.pwrite", full)
    with pytest.raises(StorageError, match=r"run.lock cannot be written \(No space"):
      RunLock(tmp_path).__enter__()
  assert list(tmp_path.iterdir()) == []
  with RunLock(tmp_path):
    pass


def _too_large():
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_a_disk_that_fills_up_in_the_first_save_is_one_line_a_save(tmp_path):
  # Beside this, jax says in two lines of its own that it cannot keep a program.
  alone = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
  ended = _worker(tmp_path / "run", preexec_fn=_too_large, environment=alone)
  assert ended.returncode == StorageError.code
  assert "Traceback" not in ended.stderr
  *warnings, last = ended.stderr.splitlines()
  assert all(line.startswith("WARNING: ") for line in warnings)
  assert re.match(r"StorageError: saving step \d+ to .* gave up after 3 failures in a row$", last)


def test_deleted_arrays_of_a_checkpoint_are_one_line(tmp_path, mesh8):
  trainer(mesh8, tmp_path / "run", **SMALL).run()
  step = tmp_path / "run" / "checkpoints" / "4"
  for file in (step / "state" / "d").iterdir():
    file.unlink()
  ended = _worker(tmp_path / "run")
  assert ended.returncode == CheckpointError.code
  assert "Traceback" not in ended.stderr
  assert len(ended.stderr.splitlines()) == 2, "what was set aside, and the end"


def _without_privileges():
  """From the next program on, the superuser may read only what a file's mode permits."""
  drop = ctypes.CDLL(None, use_errno=True).prctl
  for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if os.geteuid() == 0 and drop(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
      raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.parametrize("part", ["*/d/*", "*/manifest.ocdbt", "state/d", "meta/*"])
def test_a_step_that_may_not_be_read_is_not_damaged(tmp_path, mesh8, part):
  """Exit 6 with one line; the step keeps its name, and none before it is taken."""
  trainer(mesh8, tmp_path / "run", **SMALL).run()
  steps = tmp_path / "run" / "checkpoints"
  before, locked = sorted(steps.iterdir()), list((steps / "4").glob(part))
  assert locked
  for path in locked:
    path.chmod(0)
  try:
    ended = _worker(tmp_path / "run", preexec_fn=_without_privileges)
  finally:
    for path in locked:
      path.chmod(0o755)
  assert ended.returncode == StorageError.code, ended.stderr[-3000:]
  (line,) = ended.stderr.splitlines()
  assert re.fullmatch(rf"StorageError: {steps}/4/.*: Permission denied", line)
  assert sorted(steps.iterdir()) == before


# --- the record -----------------------------------------------------------------------------------


def test_a_record_that_vanished_is_not_filled_up(tmp_path, capsys):
  file = MetricsFile(tmp_path, 0)
  for step in range(1, 4):
    file.write(step, {"loss": 1.0})
  file.path.unlink()
  file.write(4, {"loss": 1.0})
  file.write(5, {"loss": 1.0})
  assert file.path.read_bytes().count(b"\0") == 0
  assert [line["step"] for line in read_metrics(tmp_path)] == [4, 5]
  assert capsys.readouterr().err.count("was removed or cut by somebody else") == 1


def test_a_record_that_was_cut_goes_on_in_a_new_line(tmp_path, capsys):
  file = MetricsFile(tmp_path, 0)
  for step in range(1, 4):
    file.write(step, {"loss": 1.0})
  os.truncate(file.path, file.path.stat().st_size - 10)
  file.write(4, {"loss": 1.0})
  assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 4]
  with open(file.path, "a") as other:
    other.write('{"step": 5}\n')
  file.write(6, {"loss": 1.0})
  assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 4, 5, 6]
  assert capsys.readouterr().err.count("was removed or cut") == 1


@pytest.mark.parametrize("kept", [0, 30], ids=["removed", "cut"])
def test_a_write_that_fails_after_the_record_was_cut_leaves_no_broken_line(tmp_path, kept, capsys):
  file = MetricsFile(tmp_path, 0)
  file.write(1, {"loss": 1.0})
  assert 30 < file.path.stat().st_size < 60
  os.truncate(file.path, kept) if kept else file.path.unlink()
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
  try:
    file.write(2, {"loss": 1.0, "text": "x" * 50})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
  assert file.path.stat().st_size == 60
  file.write(3, {"loss": 1.0})
  assert [line["step"] for line in read_metrics(tmp_path)] == [2, 3]
  metrics_by_kind(tmp_path, warns=True)
  broken = "metrics.jsonl: 1 of its lines cannot be read" in capsys.readouterr().err
  assert broken == bool(kept), "only the line that somebody else has cut"


def test_lines_with_odd_numbers_are_left_out(tmp_path, capsys):
  odd = [
    '{"step": Infinity}',
    '{"step": 1e999}',
    '{"step": true}',
    '{"step": ' + "9" * 5000 + "}",
    "[" * 10**5,
    '{"step": 1, "kind": []}',
    '{"step": 1, "layers": 3}',
    '{"step": 1, "step": 2}',
    "\0" * 30,
  ]
  (tmp_path / "metrics.jsonl").write_text("\n".join([*odd, '{"step": 7}', ""]))
  assert [line["step"] for line in read_metrics(tmp_path)] == [7]
  assert [line["step"] for line in read_run(tmp_path).train] == [7]
  assert capsys.readouterr().err.count("metrics.jsonl: 9 of its lines cannot be read") == 1
  # The record of a run that is being written ends in half a line; one of zeros is nobody's.
  for content, warnings in (('{"step": 7}\n{"st', 0), ("\0" * 5000, 1)):
    (tmp_path / "metrics.jsonl").write_text(content)
    read_run(tmp_path)
    assert capsys.readouterr().err.count("metrics.jsonl: 1 of its lines") == warnings


# --- stored JSON ----------------------------------------------------------------------------------

DAMAGED = {
  "another type": "[]",
  "a number": "3",
  "nested 100,000 deep": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}",
  "cut off": '{"step": 1',
  "infinite": '{"step": Infinity, "digest": "x", "leaves": {}}',
  "NaN": '{"step": NaN, "digest": "x", "leaves": {}}',
  "bytes": b"\xff\xfe{}",
  "zeros": b"\0" * 64,
  "empty": "",
  "half a character": '{"a": "\\ud800"}',
  "a key twice": '{"step": 1, "step": 2, "digest": "x", "leaves": {}}',
  "fields of other types": '{"step": "1", "digest": [], "leaves": 3, "config": [], "starts": {}, '
  '"devices": {"count": []}, "processes": 1, "code": "x"}',
}


def _write(path, content):
  path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_is_one_error(tmp_path, name):
  file = tmp_path / "x.json"
  _write(file, DAMAGED[name])
  with pytest.raises(StoredError) as caught:
    read_json(file, {"step": int, "digest": str})
  assert str(caught.value).startswith(f"{file} cannot be used: ")
  assert "\n" not in str(caught.value)
  assert len(str(caught.value)) < 500


def test_the_reader_refuses_pipes_and_large_files_unread(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(StoredError, match="is not a regular file"):
    read_json(tmp_path / "pipe")
  with pytest.raises(StoredError, match="is not a regular file"):
    read_json("/dev/zero")
  with open(tmp_path / "large", "wb") as file:
    file.truncate(2**40)
  with pytest.raises(StoredError, match="is larger than 1,000 bytes"):
    read_json(tmp_path / "large", most=1000)
  with pytest.raises(FileNotFoundError):
    read_json(tmp_path / "none")
  assert parse_json('{"a": [[1]], "b": 0.5}', "it", {"a": [[int]], "b": float}) == {
    "a": [[1]],
    "b": 0.5,
  }


@pytest.mark.parametrize("item", ["meta", "data"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_description_is_set_aside(run, saved, setup, name, item):  # noqa: F811
  _write(run / "checkpoints" / "2" / item / "metadata", DAMAGED[name])
  assert read_meta(run)["step"] == 1
  restored = restore(run, setup)
  assert restored.step == 1
  assert bits(restored.state) == saved[1][1]


def _resealed(step, change):
  """Writes a description that was changed by somebody who knows how the digest is made."""
  meta, data = (json.loads((step / n / "metadata").read_text()) for n in ("meta", "data"))
  change(meta)
  meta = description.sealed(meta, data)
  (step / "meta" / "metadata").write_text(json.dumps(meta))


@pytest.mark.parametrize(
  "change",
  [
    lambda meta: meta["leaves"].update({"params.embed": 3}),
    lambda meta: meta["leaves"]["params.embed"].update(dtype="float99"),
    lambda meta: meta["leaves"]["params.embed"].update(item="../../elsewhere"),
    lambda meta: meta.update(step=7),
    lambda meta: meta.update(config=3),
  ],
)
def test_a_sealed_description_of_another_form_is_set_aside(run, setup, change):  # noqa: F811
  _resealed(run / "checkpoints" / "2", change)
  assert restore(run, setup).step == 1


@pytest.mark.parametrize("name", DAMAGED)
def test_reports_of_damaged_files_are_one_line(tmp_path, name):
  for file in ("card.json", "config.json", "exit.json"):
    folder = tmp_path / file.partition(".")[0]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    _write(folder / file, DAMAGED[name])
    message = refusal(compare_command.main, [str(folder), "--out", str(tmp_path / "out")])
    assert message is None or (file in message and "\n" not in message)


def refusal(call, *arguments):
  """The message with which a call is refused; None if it is not."""
  try:
    call(*arguments)
  except ScmoeError as error:
    return str(error)
  return None


# --- standard output ------------------------------------------------------------------------------

OUTPUTS = {
  "closed": ">&-",
  "all closed": ">&- 2>&- <&-",
  "full": "> /dev/full 2> /dev/full",
  "a closed pipe": "| true",
}


OUTPUTS_BY_NIGHT = ("closed", "full", "a closed pipe")


@pytest.mark.parametrize("name", [night(n) if n in OUTPUTS_BY_NIGHT else n for n in OUTPUTS])
def test_a_training_run_needs_no_output(tmp_path, name):
  workdir = tmp_path / "run"
  words = json.dumps({"workdir": str(workdir), "train": SMALL | {"header": "Größe …"}})
  command = f"set -o pipefail; '{sys.executable}' '{HERE / 'worker.py'}' '{words}' {OUTPUTS[name]}"
  paths = os.pathsep.join([str(HERE), str(ROOT)])
  ended = subprocess.run(["bash", "-c", command], env=os.environ | {"PYTHONPATH": paths},
                         capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
  assert ended.returncode == 0, ended.stderr[-2000:]
  assert "Traceback" not in ended.stderr
  assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3, 4]
  text = "".join(p.read_text() for p in workdir.glob("*.json*"))
  assert "batch " not in text, "no file got the number of a closed descriptor"


def test_a_training_run_prints_escapes_where_output_is_ascii(tmp_path):
  workdir = tmp_path / "run"
  worker = Worker(workdir, {"PYTHONIOENCODING": "ascii"}, train=SMALL | {"header": "Größe …"})
  assert worker.end() == 0, worker.err.read_text()
  assert "Gr\\xf6\\xdfe \\u2026" in worker.out.read_text()


@pytest.mark.parametrize(
  ("where", "code", "message"),
  [
    (
      "> /dev/full",
      6,
      "StorageError: standard output cannot be written: No space left on device\n",
    ),
    (">&-", 0, ""),
    ("| true", 141, ""),
  ],
)
def test_a_command_says_when_its_output_did_not_arrive(where, code, message):
  script = f"set -o pipefail; '{sys.executable}' -m scmoe.compare --help {where}"
  ended = subprocess.run(["bash", "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
  assert (ended.returncode, ended.stderr) == (code, message)


# --- beside a run, and after it -------------------------------------------------------------------


def test_the_newest_step_is_taken_again_when_retention_removes_it(run, saved, setup):  # noqa: F811
  """`evaluate` chooses the newest step, builds a model, and reads the step that it chose."""
  place, chosen = run / "checkpoints", []

  def attempt():
    step = read_meta(run)["step"]
    if not chosen:  # meanwhile the run saves another and removes this one
      shutil.rmtree(place / "2")
    chosen.append(step)
    return restore_part(run, {"params": setup.abstract.params}, step)["params"]

  params = with_newest(attempt)
  assert chosen == [2, 1]
  assert bits(params) == bits(restore(run, setup).state.params)
  with pytest.raises(StepGone, match="no valid checkpoint of step 2"):
    with_newest(lambda: restore_part(run, {"params": setup.abstract.params}, 2), 2)


@pytest.mark.nightly  # by day test_loop.py, without a process of its own
def test_a_hangup_is_saved_like_a_termination(tmp_path):
  worker = Worker(tmp_path / "run", slow=0.05, train={"steps": 40})
  worker.wait_for("batch 3\n")
  worker.process.send_signal(signal.SIGHUP)
  assert worker.end() == 75
  assert list_steps(tmp_path / "run" / "checkpoints")


@pytest.fixture(scope="module")
def bundle(mesh8, tmp_path_factory):
  """(trainer, folder): what a run left whose second step was not finite."""
  from training_fakes import Poisoned, Source

  from scmoe.base.errors import NonFiniteError

  workdir = tmp_path_factory.mktemp("bundle")
  failed = trainer(mesh8, workdir, data=Source(8, bad=(1, 2)), objective=Poisoned(), steps=6,
                   max_skipped_in_row=0)  # fmt: skip
  with pytest.raises(NonFiniteError):
    failed.run()
  return failed.built, workdir / "replay"


HOSTILE = {
  "step": ["2", None, -1, 0, 2**40, 1.5, float("inf"), [2]],
  "variant": [None, [], {"chunks": "a"}, {"top_k": 1}, {"__class__": 1}],
  "objective": [3, None, ["x"], {}],
  "loss_scale": ["abc", 3],
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_hostile_replay_is_refused(bundle, tmp_path, field):
  built, folder = bundle
  found, same = replay_command.replay(built, folder)
  assert same, found
  good = json.loads((folder / "failure.json").read_text())
  copy = tmp_path / "replay"
  shutil.copytree(folder, copy)
  for value in HOSTILE[field]:
    (copy / "failure.json").write_text(json.dumps(good | {field: value}))
    with pytest.raises(CheckpointError, match="is not a run's replay bundle") as caught:
      replay_command.replay(built, copy)
    assert "\n" not in str(caught.value)


def test_a_replay_with_the_batch_of_another_run_is_refused(bundle, tmp_path):
  built, folder = bundle
  copy = tmp_path / "replay"
  shutil.copytree(folder, copy)
  batch = read_npz(copy / "batch_0.npz", 2**20)
  for change in ({"weights": batch["weights"][..., :1]}, {"inputs": batch["inputs"].astype(float)}):
    np.savez(copy / "batch_0.npz", **(batch | change))
    with pytest.raises(CheckpointError, match="it belongs to another run"):
      replay_command.replay(built, copy)


def test_names_and_words_of_a_run_are_no_markup(tmp_path):
  """Script, formulas, terminal escapes and surrogates in names, words and configurations."""
  evil = "<script>alert(1)</script>![x](http://e)|$\\frac$ \x1b[2J"
  runs = []
  for number, name in enumerate((evil.replace("/", "∕"), os.fsdecode(b"\xff"))):
    folder = tmp_path / name
    folder.mkdir()
    config = {"train": {"steps": 9, "seed": [1]}, "model": {"wiring": f"{evil}{number}"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "exit.json").write_text(json.dumps({"code": 3, "words": evil}))
    lines = [{"step": 1, "loss": 2.0, "tokens": "x"}, {"step": 2, "loss": 10**400}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs.append(str(folder))
  compare_command.main([*runs, "--out", str(tmp_path / "out")])
  page, text = ((tmp_path / "out" / f"compare.{kind}").read_text() for kind in ("html", "md"))
  assert "<script" not in page.replace("&lt;script", "")
  assert "<script" not in text
  assert "![x]" not in text
  assert "\x1b" not in page + text
