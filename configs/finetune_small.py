"""A small shortcut model fine-tuned on conversations: the loss counts the answers alone.

command   python -m scmoe.train --config finetune_small --workdir runs/base, with
          data.source=procedural, data.path=arithmetic and train.steps=200
          python -m scmoe.train --config finetune_small --workdir runs/tuned, with
          train.init_from=runs/base
          echo "3+4?" | python -m scmoe.generate --workdir runs/tuned --chat --temperature 0
hardware  2 CPU cores, no GPU
time      on cores shared with other work: 2.5 minutes for the base, 4.5 for the fine-tuning
expect    validation loss of the answers 0.039, accuracy 1.000; the answer is 7 (Python 3.11)
data      chat without data.path: 2,000 generated conversations about additions
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="finetune_small",
  model=ModelConfig(
    style="llama",
    wiring="scmoe_pos2",
    num_experts=4,
    num_layers=4,
    width=96,
    num_heads=4,
    context=256,
    document_mask=True,
    dtype="float32",
  ),
  router=RouterConfig(balance_loss=0.01),
  dispatch=DispatchConfig(transport="dropless"),
  data=DataConfig(source="chat", seq_len=256, packing="pack"),
  train=TrainConfig(
    steps=400, batch_size=8, log_every=20, eval_every=200, eval_batches=0, sample_tokens=0
  ),
  optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=40),
  checkpoint=CheckpointConfig(every=200, keep=1),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
