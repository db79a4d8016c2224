"""config.json of DeepSeek-V2 and V3, and of families that share parts with them: GLM-4.5 has V3's
router and first dense layers, LongCat-Flash its latent attention.
"""

from __future__ import annotations

from typing import Any

from scmoe.base.errors import DataError
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained.fields import Fields, merged
from scmoe.pretrained.written import common_fields, head_fields, normalised, normalises, ranges

# -- DeepSeek-V2 and V3 ---------------------------------------------------------------------------


def _deepseek(c: Fields, *, theta: float, interleaved: bool) -> dict[str, Any]:
  layers, first = c.size("num_hidden_layers"), c.size("first_k_dense_replace", 0)
  c.refuse("moe_layer_freq", 1)
  shared = c.size("n_shared_experts", 0)
  width = c.size("moe_intermediate_size")
  if first > layers:
    raise DataError(
      f"{c.name}: first_k_dense_replace={first} is more than num_hidden_layers={layers}"
    )
  return {
    **c.common(theta, eps=1e-6, interleaved=interleaved),
    **c.latent(),
    "wiring": "dense" if first == layers else "shared_expert" if shared else "topk",
    "num_layers": layers,
    "num_experts": c.size("n_routed_experts"),
    "top_k": c.size("num_experts_per_tok"),
    "expert_hidden": width,
    "shared_hidden": width * (shared or 1),
    "mlp_hidden": c.size("intermediate_size"),
    "dense_layers": "" if first == layers else ranges(tuple(range(first))),
  }


def _deepseek_written(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.qk_rope_head_dim}
  return _moe_written(model, router) | _latent_written(model) | heads


def _moe_written(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of DeepSeek and GLM: those of all families, of the experts and of the router."""
  dense, shared = model.dense_indices, model.wiring_rule.shared_expert
  return common_fields(model) | {
    "first_k_dense_replace": len(dense) if model.wiring_rule.taps else model.num_layers,
    "n_routed_experts": model.num_experts,
    "n_shared_experts": model.shared_hidden // model.expert_hidden if shared else None,
    "num_experts_per_tok": model.top_k,
    "moe_intermediate_size": model.expert_hidden,
    "intermediate_size": model.mlp_hidden,
    "routed_scaling_factor": router.routed_scaling_factor,
    "norm_topk_prob": normalises(router, model.top_k),
    "n_group": router.n_group,
    "topk_group": router.topk_group,
  }  # fmt: skip


def _latent_written(model: ModelConfig) -> dict[str, Any]:
  names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
  return {"q_lora_rank": model.q_lora_rank or None} | {n: getattr(model, n) for n in names}


def read_v2(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a DeepSeek-V2; see `scmoe.pretrained.families.Family`."""
  c.refuse("topk_method", "greedy", "group_limited_greedy")
  c.refuse("scoring_func", "softmax")
  model = ModelConfig(**_deepseek(c, theta=10000.0, interleaved=True))
  k, limited = model.top_k, c.values.get("topk_method") == "group_limited_greedy"
  normalise = c.flag("norm_topk_prob")
  router = RouterConfig(
    **normalised(normalise, k),
    **c.balance(k, "aux_loss_alpha"),
    # The published code ignores routed_scaling_factor where it normalises the weights.
    routed_scaling_factor=1.0 if normalise else c.number("routed_scaling_factor", 1.0),
    n_group=c.size("n_group", 1) if limited else 1,
    topk_group=c.size("topk_group", 1) if limited else 1,
    group_score="max",
  )
  return model, router


def write_v2(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of a DeepSeek-V2."""
  return _deepseek_written(model, router) | {
    "topk_method": "group_limited_greedy" if router.n_group > 1 else "greedy",
    "scoring_func": "softmax",
    "aux_loss_alpha": router.balance_loss / model.top_k,
  }


def read_v3(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a DeepSeek-V3."""
  c.refuse("topk_method", "noaux_tc")
  c.refuse("scoring_func", "sigmoid")
  model = ModelConfig(**_deepseek(c, theta=10000.0, interleaved=c.flag("rope_interleave", True)))
  return model, _noaux_router(c, model.top_k, 2.5)


def _noaux_router(c: Fields, k: int, factor: float) -> RouterConfig:
  """Sigmoid scores, groups, and a balancing bias in place of a loss; `factor`: if none is given."""
  return RouterConfig(
    **normalised(c.flag("norm_topk_prob", True), k),
    scoring_func="sigmoid",
    routed_scaling_factor=c.number("routed_scaling_factor", factor),
    n_group=c.size("n_group", 1),
    topk_group=c.size("topk_group", 1),
    group_score="top2",
    balance="none",
    balance_loss=0.0,
    bias="sign",
  )


def write_v3(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of a DeepSeek-V3."""
  return _deepseek_written(model, router) | {
    "rope_interleave": model.rope.interleaved,
  }


# -- GLM-4.5 --------------------------------------------------------------------------------------


def read_glm(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a GLM-4.5; raises DataError if no layer has experts."""
  layers, first = c.size("num_hidden_layers"), c.size("first_k_dense_replace", 1)
  shared, width = c.size("n_shared_experts", 1), c.size("moe_intermediate_size")
  if first >= layers:
    raise DataError(
      f"{c.name}: first_k_dense_replace={first} leaves no experts in num_hidden_layers={layers}"
    )
  model = ModelConfig(
    **c.common(10000.0, eps=1e-5, share=0.5),
    **c.heads(8),
    attention_out_bias=not c.flag("attention_bias"),  # without biases the option does nothing
    qk_norm="head" if c.flag("use_qk_norm") else "none",
    wiring="shared_expert" if shared else "topk",
    num_layers=layers,
    num_experts=c.size("n_routed_experts"),
    top_k=c.size("num_experts_per_tok"),
    expert_hidden=width,
    shared_hidden=width * (shared or 1),
    mlp_hidden=c.size("intermediate_size"),
    dense_layers=ranges(tuple(range(first))),
  )
  return model, _noaux_router(c, model.top_k, 1.0)


def write_glm(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of a GLM-4.5."""
  share = {"partial_rotary_factor": model.rope.share}
  return _moe_written(model, router) | head_fields(model) | share | {
    "use_qk_norm": model.qk_norm == "head",
  }  # fmt: skip


# -- LongCat-Flash --------------------------------------------------------------------------------


def read_longcat(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a LongCat-Flash, whose layers are pairs of blocks here."""
  c.refuse("attention_method", "MLA")
  c.refuse("zero_expert_type", "identity")
  c.refuse("router_bias", False)
  c.refuse("norm_topk_prob", False)
  for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
    c.refuse(name, True)
  hidden, k = c.size("ffn_hidden_size"), c.size("moe_topk")
  model = ModelConfig(
    **merged(c.common(1e7, eps=1e-5, interleaved=True), moe_every=2),
    **c.latent(),
    wiring="scmoe_pos2",
    shortcut_norm="shared",
    num_layers=2 * c.size("num_layers"),
    num_experts=c.size("n_routed_experts"),
    zero_experts=c.size("zero_expert_num", 0),
    top_k=k,
    mlp_hidden=hidden,
    shared_hidden=hidden,
    expert_hidden=c.size("expert_ffn_hidden_size"),
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
  )
  router = RouterConfig(
    normalise=False,
    routed_scaling_factor=c.number("routed_scaling_factor", 1.0),
    balance="none",
    balance_loss=0.0,
    bias="pid",
  )
  return model, router


def write_longcat(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of a LongCat-Flash."""
  return common_fields(model) | _latent_written(model) | {
    "num_layers": model.num_layers // 2,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.qk_rope_head_dim,
    "qk_head_dim": model.qk_nope_head_dim + model.qk_rope_head_dim,
    "ffn_hidden_size": model.mlp_hidden,
    "expert_ffn_hidden_size": model.expert_hidden,
    "n_routed_experts": model.num_experts,
    "zero_expert_num": model.zero_experts,
    "zero_expert_type": "identity",
    "moe_topk": model.top_k,
    "routed_scaling_factor": router.routed_scaling_factor,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_method": "MLA",
  }  # fmt: skip
