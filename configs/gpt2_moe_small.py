"""GPT2-MoE-Small of the ScMoE paper: 323M parameters as top2.

command   python -m scmoe.train --config configs/gpt2_moe_small.py --config.data.source=jsonl \\
            --config.data.path=TEXT.jsonl --config.data.tokenizer=TOKENIZER.json
hardware  1 GPU of 24 GB or more
time      --dry_run estimates it for your mesh
expect    not run yet
sizes     paper: 12 blocks, width 768, 12 heads, 8 experts in every 2nd block, context 1K
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
  name="gpt2_moe_small",
  model=ModelConfig(
    wiring="scmoe_pos2",
    num_experts=8,
    num_layers=12,
    width=768,
    num_heads=12,
    context=1024,
    vocab_size=50304,
  ),
  router=RouterConfig(balance_loss=0.01),
  dispatch=DispatchConfig(capacity_factor=2.0),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=1024, document_mask=False),
  train=TrainConfig(steps=4000, batch_size=8, tokens_per_step=262144, eval_every=500, remat="dots"),
  optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=200),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all mechanisms, in seconds on a CPU."""
  return as_config_dict(smoke_run(RUN))
