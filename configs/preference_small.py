"""A fine-tuned small model learns to prefer right answers to wrong ones (DPO).

command   python -m scmoe.train --config finetune_small --workdir runs/tuned, with train.steps=200
          python -m scmoe.train --config preference_small --workdir runs/preferring
hardware  2 CPU cores, no GPU
time      with --smoke 36 s, most of it compilation (cores shared with other work); not run whole
expect    with --smoke, from three steps of finetune_small --smoke: mean margin of the rewards 0 in
          the first step, 0.0002 in the second, 0.0003 in the third (Python 3.11)
data      preference without data.path: 2,000 generated pairs of answers to additions
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
  name="preference_small",
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
  data=DataConfig(source="preference", seq_len=256, packing="pack"),
  train=TrainConfig(
    steps=100,
    batch_size=8,
    init_from="runs/tuned",
    teacher="runs/tuned",
    preference_beta=0.1,
    log_every=10,
    eval_batches=0,
    sample_tokens=0,
  ),
  optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10),
  checkpoint=CheckpointConfig(every=100, keep=1),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
