"""The 1.1T-parameter language model of arXiv 2112.10684, which Tutel ran on 512 GPUs.

command   python -m scmoe.train --config gpt_moe_1t --config.mesh.data=1 --config.mesh.expert=512 \\
            --dry_run
hardware  Microsoft's report on Tutel (November 2021): 512 A100 of 80 GB, 8 to a host, each host
          with 8 InfiniBand ports of 200 Gb/s; one expert of every MoE layer on each GPU
time      docs/scale.md has the prediction for this mesh; the report says only that Tutel made the
          step more than 40 % faster than fairseq's own MoE
expect    never trained here
sizes     published: 32 blocks of width 4096 with 32 heads, 2 of 512 experts of width 16384 in every
          2nd block, rows of 2048 tokens. Choices of this file: 2.1M tokens a step, learning rate,
          GPT-2's vocabulary, learned positions, and buffers of K · T / E rows for each expert
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="gpt_moe_1t",
  model=ModelConfig(
    wiring="top2",
    num_experts=512,
    num_layers=32,
    width=4096,
    num_heads=32,
    context=2048,
    vocab_size=50304,
  ),
  dispatch=DispatchConfig(capacity_factor=1.0),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=2048, document_mask=False),
  train=TrainConfig(
    steps=5000, batch_size=1024, tokens_per_step=2097152, eval_every=500, remat="full"
  ),
  optimizer=OptimizerConfig(learning_rate=1.2e-4, warmup_steps=2000),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all mechanisms, in seconds on a CPU."""
  return as_config_dict(smoke_run(RUN))
