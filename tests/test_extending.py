"""The package of docs/extending.md, outside of the repository, from training to the profile."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scmoe import evaluate, generate, profile, train
from scmoe.base import extensions
from scmoe.base.errors import ConfigError, DataError, Preempted
from scmoe.data.config import DataConfig
from scmoe.data.text import read_own
from scmoe.run.config import RunConfig, from_json, imports_of, to_json
from scmoe.run.fields import with_field
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import list_steps

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {
  "router.gate": "my_parts:SharpGate",
  "model.experts": "my_parts:SquaredReLU",
  "dispatch.transport": "my_parts:Lossless",
  "router.balance": "my_parts:square_loss",
  "data.source": "my_parts:counting",
}
OWN = [f"--config.{field}={path}" for field, path in FIELDS.items()]
SMALL = ["--config", "quickstart", "--smoke", "--config.train.tensorboard=false"]
SMALL += ["--config.train.sample_tokens=0", "--config.mesh.data=2"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
  """The folder with my_parts.py, as the page has it."""
  folder = tmp_path_factory.mktemp("elsewhere")
  text = (ROOT / "docs" / "extending.md").read_text()
  ((name, body),) = re.findall(r"```python (my_parts\.py)\n(.*?)```", text, re.S)
  (folder / name).write_text(body)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield folder


def command(workdir, *more, steps=4):
  """The page's command; a checkpoint after every third of the steps, or after every second step."""
  every = [f"--config.train.steps={steps}", f"--config.checkpoint.every={max(2, steps // 3)}"]
  return [*SMALL, *OWN, *every, "--workdir", str(workdir), *more]


@pytest.fixture(scope="module")
def trained(package):
  """Workdir of a run of four steps."""
  train.main(command(package / "run"))
  return package / "run"


def killed_and_finished(package):
  """Workdir of a run of 60 steps that was killed after its first checkpoint, and then finished."""
  workdir = package / "killed"
  env = os.environ | {"PYTHONPATH": f"{ROOT}:{package}"}
  args = [sys.executable, "-m", "scmoe.train", *command(workdir, steps=60)]
  quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
  process = subprocess.Popen(args, env=env, cwd=package, **quiet)
  while not list_steps(workdir / "checkpoints"):
    assert process.poll() is None, "it ended before its first checkpoint"
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert list_steps(workdir / "checkpoints")[-1] < 60, "it ended before it was killed"
  train.main(command(workdir, steps=60))
  return workdir


def losses_of(workdir):
  return {line["step"]: line["loss"] for line in read_metrics(workdir)}


@pytest.mark.nightly  # by day training/test_loop.py and training/test_average.py resume bitwise
def test_stopped_resumed_and_equal_to_the_unbroken_run(trained, package):
  with pytest.raises(Preempted):
    train.main(command(package / "halves", "--config.train.stop_after=2"))
  train.main(command(package / "halves"))
  found, want = losses_of(package / "halves"), losses_of(trained)
  assert found == want, "bitwise"
  assert len(want) == 4
  assert np.isfinite(list(want.values())).all()


@pytest.mark.nightly
def test_killed_resumed_and_equal_to_the_unbroken_run(package):
  found = losses_of(killed_and_finished(package))
  train.main(command(package / "long", steps=60))
  want = losses_of(package / "long")
  assert found[60] == want[60], "bitwise"
  assert np.isfinite(list(want.values())).all()


def test_evaluated_and_generated_from_what_is_stored(trained, capsys):
  assert np.isfinite(list(losses_of(trained).values())).all()
  evaluate.main(["--workdir", str(trained), "--max_batches", "2"])
  generate.main(["--workdir", str(trained), "--prompt", "1 2 3", "--max_new_tokens", "4"])
  out = capsys.readouterr().out
  assert "numbers" in out
  assert "1 2 3" in out


@pytest.mark.nightly  # by day test_profile.py profiles, and a run trains with these parts
def test_profiled(package, capsys):
  turns = ["--rounds", "1", "--calls", "1", "--workdir", str(package / "profile")]
  profile.main([*SMALL, *OWN, *turns])
  assert "scmoe_pos2" in capsys.readouterr().out


def test_code_of_a_checkpoint_from_elsewhere_is_not_run(trained, tmp_path, capsys):
  shutil.copytree(trained, tmp_path / "copy")
  asked = ["--workdir", str(tmp_path / "copy"), "--max_batches", "1"]
  with pytest.raises(ConfigError, match=r"names code .* pass --allow_import=my_parts") as caught:
    evaluate.main(asked)
  assert "model.experts='my_parts:SquaredReLU'" in str(caught.value)
  with pytest.raises(ConfigError, match="names code"):
    generate.main(["--workdir", str(tmp_path / "copy"), "--prompt", "a", "--allow_import", "os"])
  evaluate.main([*asked, "--allow_import", "my_parts"])
  assert "numbers" in capsys.readouterr().out
  with pytest.raises(ConfigError, match="names code"):
    train.main(["--config_json", str(trained / "config.json"), "--print_config"])


def test_a_name_of_a_file_is_not_imported_to_be_refused(tmp_path, monkeypatch):
  (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
  monkeypatch.syspath_prepend(str(tmp_path))
  run = with_field(RunConfig(), "router.gate", "evil:Gate")
  again = from_json(to_json(run))
  assert imports_of(again) == {"router.gate": "evil:Gate"}
  again.resolve(num_devices=1, vocab_size=257)
  with pytest.raises(ConfigError, match="allow_import=evil"):
    extensions.check_allowed(imports_of(again), ["evils", "my"], "a file", tmp_path)


def test_what_a_run_was_started_with_is_known_for_its_folder_only(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
  named = {"router.gate": "mine.gates:A"}
  assert extensions.remember(named, tmp_path / "a") == ""
  assert extensions.remember({}, tmp_path / "b") == ""
  extensions.check_allowed(named, (), "a", tmp_path / "a")
  for allowed in ("mine", "mine.gates", "mine.gates:A"):
    extensions.check_allowed(named, [allowed], "b", tmp_path / "b")
  with pytest.raises(ConfigError, match="b: router"):
    extensions.check_allowed(named, (), "b", tmp_path / "b")
  with pytest.raises(ConfigError, match="gates:B"):
    extensions.check_allowed({"router.gate": "mine.gates:B"}, (), "a", tmp_path / "a")
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
  assert "cannot be written" in extensions.remember(named, tmp_path / "a")


def test_a_module_that_ends_the_process_is_one_line(tmp_path, monkeypatch):
  (tmp_path / "ends.py").write_text("import sys\n\nsys.exit(3)\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ConfigError, match=r"ends cannot be imported \(SystemExit: 3\)"):
    extensions.load("ends:Gate", "router.gate")


WRONG = {
  ("router.gate", "my_parts:SharpGat"): "has no 'SharpGat'; did you mean 'SharpGate'",
  ("router.gate", "no_such_package:Gate"): "no_such_package cannot be imported",
  ("router.gate", "os:name"): "holds a str as 'name'",
  ("router.gate", "shapr"): "is unknown; one of: linear, affine, cosine, or your own as",
  ("model.experts", "my_parts:SharpGate"): "could not be made: TypeError",
  ("model.experts", "builtins:dict"): "could not be made|needs a subclass of scmoe.Experts",
  ("model.experts", "fnn"): "did you mean 'ffn'",
  ("dispatch.transport", "my_parts:square_loss"): "could not be made: TypeError",
  ("dispatch.transport", "types:SimpleNamespace"): "could not be made|without the method dispatch",
  ("router.balance", "jax.numpy:shape"): "gave a loss of shape|could not be made",
}


@pytest.mark.parametrize(("field", "path"), WRONG)
def test_a_wrong_part_is_refused_with_one_line(package, tmp_path, field, path):
  argv = [*SMALL, f"--config.{field}={path}", "--workdir", str(tmp_path / "run")]
  with pytest.raises(ConfigError, match=WRONG[field, path]) as caught:
    train.main(argv)
  assert field in str(caught.value)
  assert "\n" not in str(caught.value)


def numbers(config):
  """A source that yields no text."""
  yield from ("a text", 3)


def broken(config):
  """A source that fails."""
  yield "a text"
  raise ValueError("disk on fire")


@pytest.mark.parametrize(
  ("name", "problem"), [("numbers", "document 1 is a int"), ("broken", "ValueError: disk on fire")]
)
def test_a_source_that_gives_no_text(name, problem):
  path = f"{__name__}:{name}"
  with pytest.raises(DataError, match=problem) as caught:
    list(read_own(path, DataConfig(source=path)))
  assert f"data.source={path!r}" in str(caught.value)
