"""Models of the smallest sizes at which all that is sharded divides over eight devices."""

import dataclasses

from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig

SMALL = ModelConfig(
  wiring="top2",
  num_layers=4,
  width=16,
  num_heads=2,
  mlp_hidden=24,
  num_experts=4,
  vocab_size=64,
  context=8,
  dtype="float32",
)
DENSE = dataclasses.replace(SMALL, wiring="dense")
POS2 = dataclasses.replace(SMALL, wiring="scmoe_pos2", top_k=1)
# LongCat-Flash's fields: Pos-2 with zero experts and latent attention.
LONGCAT_FIELDS = {
  "style": "llama",
  "wiring": "scmoe_pos2",
  "mix": "direct",
  "zero_experts": 2,
  "top_k": 2,
  "q_lora_rank": 8,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 4,
  "v_head_dim": 8,
  "tie_embeddings": False,
}
LONGCAT = dataclasses.replace(SMALL, **LONGCAT_FIELDS)
ROUTER = RouterConfig(balance_loss=0.5, z_loss=0.1, noise=1.0)  # random, with both losses
