"""GPT2-MoE-Medium of the ScMoE paper: 16 experts, 1.7B parameters there, 1.87B here as top2.

command   python -m scmoe.train --config configs/gpt2_moe_medium.py --config.data.source=jsonl \\
            --config.data.path=TEXT.jsonl --config.data.tokenizer=TOKENIZER.json
hardware  1 GPU of 80 GB, or more with mesh.expert
time      --dry_run estimates it for your mesh
expect    never trained to the end. 130 steps of 262,144 tokens on 4 H200, with Python's own source
          as text and a vocabulary of 8,192: the loss fell from 8.82 to 4.16, 1.728 validation bits
          per byte, 324k tokens/s (experiments/LOG.md, 2026-11-21). Now 139k tokens/s on one H200
          (MFU 43 %)
sizes     paper: 24 blocks, width 1024, 16 heads, 16 experts in every 2nd block, context 2K
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
  name="gpt2_moe_medium",
  model=ModelConfig(
    wiring="scmoe_pos2",
    num_experts=16,
    num_layers=24,
    width=1024,
    num_heads=16,
    context=2048,
    vocab_size=50304,
  ),
  router=RouterConfig(balance_loss=0.01),
  dispatch=DispatchConfig(capacity_factor=2.0),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=2048, document_mask=False),
  train=TrainConfig(steps=4000, batch_size=8, tokens_per_step=262144, eval_every=500),
  optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=200),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all mechanisms, in seconds on a CPU."""
  return as_config_dict(smoke_run(RUN))
