"""LLaMA2-MoE of the ScMoE paper: an MoE in every block, 6.7B parameters as top2.

command   python -m scmoe.train --config configs/llama2_moe.py --config.data.source=jsonl \\
            --config.data.path=TEXT.jsonl --config.data.tokenizer=TOKENIZER.json
hardware  8 GPUs of 80 GB: --config.mesh.expert=8
time      --dry_run estimates it for your mesh
expect    not run yet
sizes     paper: 24 blocks, width 2048, 16 heads, 4 key-value heads, 8 experts in
          every block, context 2K. Its ScMoE is Pos-1. The expert width follows from the 6.7B.
          Not in the paper: batch, learning rate, schedule, tokenizer and FFN widths.
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.route import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="llama2_moe",
  model=ModelConfig(
    style="llama",
    wiring="scmoe_pos1",
    num_experts=8,
    moe_every=1,
    num_layers=24,
    width=2048,
    num_heads=16,
    num_kv_heads=4,
    mlp_hidden=5376,
    context=2048,
    vocab_size=32000,
    tie_embeddings=False,
  ),
  router=RouterConfig(balance_loss=0.01),
  dispatch=DispatchConfig(capacity_factor=2.0),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=2048, document_mask=False),
  train=TrainConfig(steps=4000, batch_size=8, tokens_per_step=262144, eval_every=500, remat="full"),
  optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=200),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all mechanisms, in seconds on a CPU."""
  return as_config_dict(smoke_run(RUN))
