"""Fine-tuning from the command line: a base, a run that learns its answers, and its commands."""

import io

import jax
import pytest
from leaving import write_run

from scmoe import evaluate, generate, train
from scmoe.run.build import vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.session import Session
from scmoe.training.metrics import read_metrics

QUICK = ("--config=finetune_small", "--smoke", "--config.train.tensorboard=false",
         "--config.mesh.data=1", "--config.checkpoint.keep=9")  # fmt: skip


def run(workdir, *argv):
  train.main([*QUICK, f"--workdir={workdir}", *argv])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A base that reads additions, with random weights."""
  jax.config.update("jax_disable_most_optimizations", True)
  root = tmp_path_factory.mktemp("tuned")
  base = load_config(find_config("finetune_small"), "smoke")
  for name, value in (
    ("data.source", "procedural"),
    ("data.path", "arithmetic"),
    ("mesh.data", "1"),
  ):
    base = with_field(base, name, value)
  write_run(base.resolve(num_devices=1, vocab_size=vocab_size(base.data)), root / "base")
  yield root
  jax.config.update("jax_disable_most_optimizations", False)


def test_a_base_is_tuned_evaluated_and_asked(root, monkeypatch, capsys):
  run(root / "chat", f"--config.train.init_from={root / 'base'}")
  out = capsys.readouterr().out
  assert "the loss counts 6,144 of the training tokens" in out
  assert "bigram" not in out
  assert len(read_metrics(root / "chat")) == 3
  figures = evaluate.evaluate_run(str(root / "chat"), mesh="data=1")
  assert figures["tokens"] < 600  # of more than 5,000 that validation reads
  assert "bigram_bits_per_byte" not in figures
  asked = []
  tokens = Session.tokens

  def noted(self, prompts, *args, **options):
    asked.append(bytes(i for i in prompts[0] if i < 256).decode())
    return tokens(self, prompts, *args, **options)

  monkeypatch.setattr(Session, "tokens", noted)
  monkeypatch.setattr("sys.stdin", io.StringIO("1+2?\n"))
  argv = [f"--workdir={root / 'chat'}", "--chat", "--max_new_tokens=2", "--mesh=data=1"]
  generate.main([*argv, "--temperature=0"])
  assert asked == ["User:\n1+2?\n\nAssistant:\n"]


@pytest.mark.nightly  # by day models/test_preference.py
def test_answers_are_preferred_to_others_with_a_reference(root, capsys):
  base = root / "base"
  options = [f"--config.train.init_from={base}", "--config.router.noise=0"]
  argv = ["--config=preference_small", *QUICK[1:], f"--workdir={root / 'dpo'}", *options]
  train.main([*argv, "--config.train.reference_free=false", f"--config.train.teacher={base}"])
  assert "reference    " in capsys.readouterr().out
  lines = read_metrics(root / "dpo")
  # The model begins as its reference: the first step's margins are 0, and the last one's are not.
  assert abs(lines[0]["reward_margin"]) < 1e-5
  assert abs(lines[-1]["reward_margin"]) > 1e-5
  assert (root / "dpo" / "teacher.json").is_file()
  figures = evaluate.evaluate_run(str(root / "dpo"), mesh="data=1")
  assert figures["tokens"] > 100
  train.main([*argv[:-3], f"--workdir={root / 'free'}", *options])
  assert read_metrics(root / "free")[0]["reward_margin"] != 0
