"""Distillation from the command line: the same teacher at every start, bitwise resume, a run or an
inference checkpoint, and what does not fit."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from leaving import write_run

from scmoe import convert, evaluate, train
from scmoe.base.errors import CheckpointError, ConfigError, DataError, Preempted
from scmoe.run import adapters, opened
from scmoe.run.build import vocab_size
from scmoe.run.opened import open_run
from scmoe.run.teacher import PINNED, open_teacher
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import list_steps, restore_part

QUICK = ("--config=distillation", "--smoke", "--config.train.tensorboard=false",
         "--config.mesh.data=1", "--config.checkpoint.keep=9",
         "--config.train.sample_tokens=0",
         "--config.data.validation_fraction=0")  # fmt: skip


def run(workdir, *argv):
  train.main([*QUICK, f"--workdir={workdir}", *argv])


def write_teacher(workdir, step):
  many = (*QUICK, "--config.model.num_experts=8", "--config.router.bias=sign")
  values, given = train.parse([*many], train.TRAIN_FLAGS, with_fields=True)
  run = train.run_config(values, given)
  write_run(run.resolve(num_devices=1, vocab_size=vocab_size(run.data)), workdir, step, seed=step)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A teacher with four times the student's experts, and random weights as of steps 2 and 4."""
  jax.config.update("jax_disable_most_optimizations", True)
  root = tmp_path_factory.mktemp("taught")
  for step in (2, 4):
    write_teacher(root / "teacher", step)
  yield root
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def whole(root):
  """A student of four steps."""
  run(root / "whole", f"--config.train.teacher={root / 'teacher'}", "--config.train.steps=4")
  return root / "whole"


def parameters(workdir, step=4):
  from scmoe.run.build import build

  wanted = {"params": build(open_run(str(workdir), step).run).shapes}
  return jax.device_get(restore_part(workdir, wanted, step)["params"])


def test_a_student_says_how_far_it_is_from_its_teacher(root, whole, capsys):
  lines = read_metrics(whole)
  assert all(np.isfinite(line["divergence"]) and line["divergence"] > 0 for line in lines)
  pinned = json.loads((whole / PINNED).read_text())
  assert (pinned["teacher"], pinned["step"]) == (str(root / "teacher"), 4)
  # Nobody but training needs the teacher: it may be gone.
  text = root / "a.txt"
  text.write_text("a line to evaluate\n\n" * 100)
  (root / "teacher").rename(root / "gone")
  try:
    evaluate.main(["--workdir", str(whole), "--max_batches=1", f"--data.path={text}"])
  finally:
    (root / "gone").rename(root / "teacher")
  assert "perplexity" in capsys.readouterr().out


def test_a_resumed_student_is_bitwise_the_same_and_keeps_its_teacher(root, whole):
  """The teacher has been trained on since: the student goes on with the one that it began with."""
  teacher = Path(shutil.copytree(root / "teacher", root / "moving"))
  taught = (f"--config.train.teacher={teacher}", "--config.train.steps=4")
  later = teacher / "checkpoints" / "4"
  aside = root / "later"
  with pytest.raises(Preempted):
    run(root / "halves", *taught, "--config.train.stop_after=2")
  write_teacher(teacher, 6)
  assert list_steps(teacher / "checkpoints")[-1] == 6
  run(root / "halves", *taught)
  jax.tree.map(np.testing.assert_array_equal, parameters(root / "halves"), parameters(whole))
  want = [line["divergence"] for line in read_metrics(whole)]
  assert [line["divergence"] for line in read_metrics(root / "halves")] == want
  # Without that step there is no going on.
  later.rename(aside)
  with pytest.raises(CheckpointError, match="no valid checkpoint of step 4"):
    run(root / "halves", taught[0], "--config.train.steps=5")
  (teacher / "checkpoints" / "2").rename(later)
  with pytest.raises(ConfigError, match=r"is no longer the model of step \d+ with which this run"):
    run(root / "halves", taught[0], "--config.train.steps=5")


@pytest.mark.nightly  # by day pretrained/test_inference.py reads such folders
def test_an_inference_checkpoint_teaches_the_same(root, whole):
  convert.main(["--workdir", str(root / "teacher"), "--inference", str(root / "folder")])
  run(root / "b", f"--config.train.teacher={root / 'folder'}", "--config.train.steps=4")
  jax.tree.map(np.testing.assert_array_equal, parameters(root / "b"), parameters(whole))
  file = root / "folder" / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(DataError, match=r"model.safetensors is truncated"):
    run(root / "c", f"--config.train.teacher={root / 'folder'}")


@pytest.mark.nightly  # the formula by day: models/test_distillation.py
def test_a_share_of_nothing_is_training_on_text(root):
  taught = (f"--config.train.teacher={root / 'teacher'}", "--config.train.teacher_share=0")
  run(root / "none", *taught, "--config.train.steps=2")
  run(root / "text", "--config.train.steps=2")
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
  jax.tree.map(close, parameters(root / "none", 2), parameters(root / "text", 2))


@pytest.mark.parametrize(
  ("argv", "error", "words"),
  [
    (["teacher=nowhere"], CheckpointError, "train.teacher=.*nowhere': no valid checkpoint"),
    (["teacher={root}/student"], ConfigError, "is the run itself"),
    (["teacher={root}/teacher", "teacher_share=2"], ConfigError, "train.teacher_share=2"),
    (["teacher_share=0.1"], ConfigError, "train.teacher_share.*train.teacher='' means no teacher"),
  ],
)
def test_what_does_not_fit_is_one_line(root, argv, error, words):
  with pytest.raises(error, match=words) as caught:
    run(root / "student", *(f"--config.train.{word.format(root=root)}" for word in argv))
  assert "\n" not in str(caught.value)
  assert not (root / "student" / "checkpoints").exists()


def test_another_tokenizer_is_refused(root):
  from scmoe.data.tokenizers import ByteTokenizer
  from scmoe.run.teacher import check_tokenizer

  stored = open_run(str(root / "teacher"), None).run
  taught = dataclasses.replace(
    stored, train=dataclasses.replace(stored.train, teacher=str(root / "teacher"))
  )
  teacher = open_teacher(taught, root / "x")
  assert teacher is not None
  check_tokenizer(teacher, ByteTokenizer())

  class Other(ByteTokenizer):
    digest = "another"

  with pytest.raises(
    ConfigError, match=r"another tokenizer .fingerprint bytes-257, data.tokenizer"
  ):
    check_tokenizer(teacher, Other())


# -- a step that its run removes before it is read ------------------------------------------------


def removing(monkeypatch, module, name):
  """Lets the first call of a reader find that the step it asks for has just been removed."""
  real, removed = getattr(module, name), []

  def read(folder, wanted, step):
    if not removed:
      removed.append(step)
      shutil.rmtree(Path(folder) / "checkpoints" / str(step))
    return real(folder, wanted, step)

  monkeypatch.setattr(module, name, read)
  return removed


@pytest.mark.nightly  # through the same reader as a conversion, by day
def test_a_new_student_takes_the_newest_teacher_again(root, tmp_path, monkeypatch):
  teacher = Path(shutil.copytree(root / "teacher", tmp_path / "teacher"))
  removed = removing(monkeypatch, adapters, "restore_part")
  taught = (f"--config.train.teacher={teacher}", "--config.train.steps=1")
  run(tmp_path / "student", *taught)
  assert removed == [4]
  assert json.loads((tmp_path / "student" / PINNED).read_text())["step"] == 2
  run(tmp_path / "student", *taught[:1], "--config.train.steps=2")  # and goes on with it
  removed.clear()
  with pytest.raises(CheckpointError, match="no valid checkpoint of step 2"):
    run(tmp_path / "student", *taught[:1], "--config.train.steps=3")


@pytest.mark.nightly  # through the same reader as a conversion, by day
def test_a_run_begins_with_the_newest_step_that_is_left(root, tmp_path, monkeypatch):
  other = Path(shutil.copytree(root / "teacher", tmp_path / "other"))
  removed = removing(monkeypatch, adapters, "restore_part")
  still = ("--config.optimizer.learning_rate=0", "--config.train.steps=1")
  many = ("--config.model.num_experts=8", "--config.router.bias=sign")
  run(tmp_path / "begun", f"--config.train.init_from={other}", *still, *many)
  assert removed == [4]
  jax.tree.map(
    np.testing.assert_array_equal, parameters(tmp_path / "begun", 1), parameters(other, 2)
  )


def test_a_conversion_takes_the_newest_step_again(root, tmp_path, monkeypatch, capsys):
  of = Path(shutil.copytree(root / "teacher", tmp_path / "of"))
  removed = removing(monkeypatch, opened, "restore_stored")
  convert.main(["--workdir", str(of), "--inference", str(tmp_path / "out")])
  assert (removed, "step 2:" in capsys.readouterr().out) == ([4], True)
  with pytest.raises(CheckpointError, match="no valid checkpoint of step 4"):
    convert.main(["--workdir", str(of), "--inference", str(tmp_path / "o"), "--step=4"])
