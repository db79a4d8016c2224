"""LongCat-Flash's architecture at laptop size: latent attention, and a fixed share of zero experts.

command   python -m scmoe.train --config longcat_flash_small
hardware  2 CPU cores, no GPU
time      1.5 minutes, on cores shared with other work
expect    2.61 validation bits per byte (Python 3.11); a bigram model of bytes has 3.53. The mean of
          `zero_share` over steps 201 to 400 is 0.328 to 0.332 (three seeds); its target is 0.333.
          Single steps differ by 0.03 and more
data      stdlib: Python files of the running interpreter, and its language reference as prose

A block pair is one of LongCat's layers: two attentions, two MLPs, and a MoE that reads the value
after the first attention and is added after the second MLP. Four of the 12 experts are zero
experts, which return their input. A token visits three experts, of which on average two should
compute; in the released model 8 of 12. `python -m scmoe.convert --workdir
runs/longcat_flash_small --to FOLDER` writes it as a LongCat-Flash model.
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="longcat_flash_small",
  model=ModelConfig(
    style="llama",
    wiring="scmoe_pos2",
    mix="direct",
    num_experts=8,
    zero_experts=4,
    top_k=3,
    num_layers=4,
    width=128,
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    rope=RopeConfig(interleaved=True),
    mlp_hidden=256,
    expert_hidden=64,
    shared_hidden=256,
    context=256,
    tie_embeddings=False,
    dtype="float32",
  ),
  router=RouterConfig(
    normalise=False,
    routed_scaling_factor=4.0,
    balance="none",
    balance_loss=0.0,
    bias="pid",
    bias_rate=0.5,
    bias_proportional=3.0,
  ),
  dispatch=DispatchConfig(transport="dropless"),
  data=DataConfig(seq_len=128, document_mask=False),
  train=TrainConfig(
    steps=400, batch_size=16, log_every=20, eval_every=200, eval_batches=20, sample_tokens=160
  ),
  optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
  checkpoint=CheckpointConfig(every=200, keep=2),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
