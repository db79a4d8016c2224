"""DeepSeek-V3 (arXiv 2412.19437): 671B parameters, 37B active, 256 experts in 58 of 61 blocks.

command   python -m scmoe.train --config deepseek_v3 --config.mesh.data=16 \\
            --config.mesh.expert=64 --config.mesh.sequence=2 \\
            --config.mesh.shard_state=parameters --dry_run
hardware  published: 2,048 H800, a pipeline of 16 stages x 64 expert ranks over 8 hosts, ZeRO-1
          over data ranks. There is no pipeline axis here. The mesh above takes its place: all
          ranks share the state, and two devices divide each row, since 15,360 rows a step do not
          divide evenly over 2,048 devices
time      published: 180,000 GPU hours a trillion tokens, so 19.9 s a step; docs/scale.md has the
          prediction for this mesh
expect    never trained here
sizes     published: 61 blocks of width 7168, the first three with an MLP of 18432; latent attention
          with 128 heads; 8 of 256 experts and a shared one, all of width 2048, experts of 4 of 8
          groups open to a token; sigmoid scores, weights times 2.5, a balancing bias; rows of 4096
          tokens, 15,360 rows a step, peak learning rate 2.2e-4 after 2000 steps, moments in
          bfloat16. Not here: the layer that predicts a second token, products in fp8, the batch
          that grows over the first 469B tokens, and the published 14.8T tokens
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
  name="deepseek_v3",
  model=ModelConfig(
    style="llama",
    wiring="shared_expert",
    mix="direct",
    num_experts=256,
    top_k=8,
    moe_every=1,
    num_layers=61,
    dense_layers="0-2",
    width=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=RopeConfig(interleaved=True),
    mlp_hidden=18432,
    expert_hidden=2048,
    shared_hidden=2048,
    norm_eps=1e-6,
    init_std=0.006,
    context=4096,
    vocab_size=129280,
    tie_embeddings=False,
  ),
  router=RouterConfig(
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    n_group=8,
    topk_group=4,
    balance="none",
    balance_loss=0.0,
    bias="sign",
  ),
  dispatch=DispatchConfig(transport="dropless"),
  # By default the text is the source code of Python itself, and a tokenizer is trained on it.
  data=DataConfig(tokenizer="bpe", seq_len=4096, document_mask=False),
  train=TrainConfig(
    steps=5000, batch_size=5120, tokens_per_step=62914560, eval_every=500, remat="full"
  ),
  optimizer=OptimizerConfig(learning_rate=2.2e-4, warmup_steps=2000, moments="bfloat16"),
  checkpoint=CheckpointConfig(every=500, keep=3),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run; without dense layers, which wirings refuse."""
  run = smoke_run(RUN)
  model = dataclasses.replace(run.model, dense_layers="")
  router = dataclasses.replace(run.router, n_group=2, topk_group=1)  # of 4 experts
  return as_config_dict(dataclasses.replace(run, model=model, router=router))
