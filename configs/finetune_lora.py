"""finetune_small with low-rank adapters: attention and experts learn, the model itself stays.

command   python -m scmoe.train --config finetune_small --workdir runs/base, with
          data.source=procedural, data.path=arithmetic and train.steps=200
          python -m scmoe.train --config finetune_lora --workdir runs/adapted
          echo "3+4?" | python -m scmoe.generate --workdir runs/adapted --chat --temperature 0
hardware  2 CPU cores, no GPU
time      with --smoke, lora.rank=2 and train.init_from 20 s, most of it compilation; not run whole
expect    with these, from three steps of finetune_small --smoke: 3.33K of 28K parameters are
          trained, and the loss of three steps stays at 5.76 to 5.78, near that of a uniform guess
          among 320 tokens (Python 3.11); whole, 117K of 1.51M parameters are trained
data      chat without data.path: 2,000 generated conversations about additions
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="finetune_lora",
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
    steps=200,
    batch_size=8,
    init_from="runs/base",
    log_every=20,
    eval_every=100,
    eval_batches=0,
    sample_tokens=0,
  ),
  optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=20, weight_decay=0.01),
  lora=LoraConfig(rank=8, alpha=16, targets="attention,experts"),
  checkpoint=CheckpointConfig(every=100, keep=1),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all parameters, for there is no base."""
  return as_config_dict(smoke_run(RUN))
