"""OLMoE-1B-7B (arXiv 2409.02060): 64 experts in every block, 6.9B parameters, 1.3B active.

command   python -m scmoe.train --config configs/olmoe.py --config.data.source=jsonl \\
            --config.data.path=TEXT.jsonl --config.data.tokenizer=TOKENIZER.json
hardware  8 GPUs of 80 GB: --config.mesh.expert=8
time      --dry_run estimates it for your mesh; experiments/kernels/train_step.py measures a step of
          a few of its layers on one GPU
expect    never trained here. On one H200 a step of 4 of its layers on 16,384 tokens takes 87 ms
          (187k tokens/s, MFU 46 %), a step of all 16 on 32,768 tokens 573 ms (MFU 46 %, 128 GiB,
          XLA_PYTHON_CLIENT_MEM_FRACTION=0.95)
sizes     published: 16 blocks, width 2048, 16 heads, 8 of 64 experts of width 1024 in every block,
          no shared expert, context 4096, 50304 tokens in the vocabulary; dropless, experts' weights
          not renormalised, balancing loss 0.01 (mean over layers), z-loss 0.001 (here summed over
          layers); 4.2M tokens a step, peak learning rate 4e-4 after 2000 steps. Not used here:
          norms on queries and keys, and the published length of 1.2M steps (5.1T tokens).
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
  name="olmoe",
  model=ModelConfig(
    style="llama",
    wiring="topk",
    num_experts=64,
    top_k=8,
    moe_every=1,
    num_layers=16,
    width=2048,
    num_heads=16,
    expert_hidden=1024,
    context=4096,
    vocab_size=50304,
    tie_embeddings=False,
  ),
  router=RouterConfig(normalise=False, balance="megablocks", balance_loss=0.01, z_loss=0.001),
  dispatch=DispatchConfig(transport="dropless"),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=4096, document_mask=False),
  train=TrainConfig(steps=5000, batch_size=8, tokens_per_step=4194304, eval_every=500),
  optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2000),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: all mechanisms, in seconds on a CPU."""
  return as_config_dict(smoke_run(RUN))
