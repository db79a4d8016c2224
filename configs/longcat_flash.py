"""LongCat-Flash (arXiv 2509.01322): 560B parameters, 27B active; ScMoE Pos-2 at full size.

command   python -m scmoe.train --config longcat_flash --config.mesh.data=8 \\
            --config.mesh.expert=32 --config.mesh.sequence=8 \\
            --config.mesh.shard_state=parameters --dry_run
hardware  published: expert parallelism over 32, context parallelism over 8 and a pipeline; the
          number of GPUs is not published. There is no pipeline axis here. The mesh above takes its
          place on 2,048 GPUs: ranks share all state
time      docs/scale.md has the prediction for this mesh
expect    never trained here; longcat_flash_small trains the same architecture on a laptop
sizes     published: 28 layers, each a pair of blocks here, of width 6144; MLPs of 12288; latent
          attention with 64 heads; 12 of 512 experts of width 2048 and 256 zero experts, of which 8
          compute on average; vocabulary of 131,072, context 131,072. Not published: batch and
          learning rate; rows of 8192 tokens and 16.8M tokens a step are choices of this file. Not
          here: the layer that predicts a second token
"""

from __future__ import annotations

import dataclasses
from typing import Any

from scmoe.data.config import DataConfig
from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="longcat_flash",
  model=ModelConfig(
    style="llama",
    wiring="scmoe_pos2",
    mix="direct",
    shortcut_norm="shared",
    num_experts=512,
    zero_experts=256,
    top_k=12,
    num_layers=56,
    width=6144,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    rope=RopeConfig(interleaved=True),
    rope_theta=1e7,
    mlp_hidden=12288,
    expert_hidden=2048,
    shared_hidden=12288,
    context=131072,
    vocab_size=131072,
    tie_embeddings=False,
  ),
  router=RouterConfig(
    normalise=False,
    routed_scaling_factor=6.0,
    balance="none",
    balance_loss=0.0,
    bias="pid",
    bias_rate=0.5,  # LongCat-Flash's own gains are not published; these are longcat_flash_small's
    bias_proportional=3.0,
    real_experts=8.0,
  ),
  # Buffers have room for all 12 choices of a token, of which 8 travel: so no slack on top.
  dispatch=DispatchConfig(transport="dropless", slack=1.0),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=8192, document_mask=False),
  train=TrainConfig(
    steps=5000, batch_size=2048, tokens_per_step=16777216, eval_every=500, remat="full"
  ),
  optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=2000, moments="bfloat16", eps=1e-16),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: 2 of 4 experts and 2 zero experts."""
  run = smoke_run(RUN)
  model = dataclasses.replace(run.model, zero_experts=2)
  router = dataclasses.replace(run.router, real_experts=0.0)
  return as_config_dict(dataclasses.replace(run, model=model, router=router))
