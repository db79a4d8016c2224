"""The same training command twice on a GPU has the same bits."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

COMMAND = [
  "-m", "scmoe.train", "--config=gpt2_moe_small", "--deterministic", "--config.model.num_layers=2",
  "--config.train.steps=5", "--config.train.batch_size=4", "--config.train.tokens_per_step=0",
  "--config.train.eval_every=0", "--config.train.sample_tokens=0", "--config.train.log_every=1",
  "--config.data.tokenizer=bytes", "--config.checkpoint.every=0",
]  # fmt: skip
SAID = ("step", "loss", "grad_norm")


# Beside the memory that this process has taken.
ENVIRONMENT = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_the_same_command_twice_has_the_same_bits(tmp_path):
  runs = []
  for name in ("a", "b"):
    command = [sys.executable, *COMMAND, f"--workdir={tmp_path / name}"]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("kind") == "train"]
    runs.append([[row[key] for key in SAID] for row in steps])
  assert len(runs[0]) == 5
  assert runs[0] == runs[1]
