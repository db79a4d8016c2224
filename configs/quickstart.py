"""A small ScMoE, trained on Python's own source code: minutes on a laptop's CPU, no download.

command   python -m scmoe.train            (the same as --config configs/quickstart.py)
hardware  2 CPU cores, no GPU
time      4 minutes of CPU time; it took 5.4 minutes on cores shared with other work
expect    2.8 validation bits per byte (2.82 on Python 3.11); a bigram model of bytes, printed
          beside it, has 3.53
data      stdlib: Python files of the running interpreter, and its language reference as prose
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="quickstart",
  model=ModelConfig(
    wiring="scmoe_pos2",
    num_experts=8,
    num_layers=4,
    width=128,
    num_heads=4,
    mlp_hidden=256,
    context=256,
    dtype="float32",
  ),
  data=DataConfig(seq_len=128, document_mask=False),
  train=TrainConfig(
    steps=400, batch_size=16, log_every=20, eval_every=200, eval_batches=20, sample_tokens=160
  ),
  optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
  checkpoint=CheckpointConfig(every=200, keep=2),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
