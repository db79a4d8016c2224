"""Families of released models: converts their config.json to options of model and router, and back.

A `Family` reads the config.json that Hugging Face transformers writes, and writes it again. The
names of its tensors are in `scmoe.pretrained.names`. A field that asks for something scmoe's model
does not have is an error that names it. Fields that affect no computation are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from scmoe.base.errors import ConfigError, DataError
from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.pretrained import own
from scmoe.pretrained.fields import ACTIVATIONS, Fields


@dataclasses.dataclass(frozen=True)
class Family:
  """One family of released models.

  Attributes:
    architecture: the name of the model's class in transformers.
    read: converts config.json to options of model and router.
    write: the inverse, for options that the family can express.
  """

  architecture: str
  read: Callable[[Fields], tuple[ModelConfig, RouterConfig]]
  write: Callable[[ModelConfig, RouterConfig], dict[str, Any]]


def _merged(fields: dict[str, Any], **others: Any) -> dict[str, Any]:
  return {**fields, **others}


def _normalised(normalise: bool, k: int) -> dict[str, Any]:
  """Router options by which the K weights of a token are divided by their sum, or are not.

  For k = 1 the option `normalise` does nothing here, while the released models divide the weight by
  itself, which gives 1; so `compat.weight_norm` is set.
  """
  once = normalise and k == 1
  return {"normalise": normalise, "compat": CompatConfig(weight_norm=1.0 if once else 0.0)}


def _normalises(router: RouterConfig, k: int) -> bool:
  return router.compat.weight_norm == 1 if k == 1 else router.normalise


def _written(model: ModelConfig, family: str) -> dict[str, Any]:
  """The fields of config.json that all families have."""
  kind = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
  return {
    "architectures": [FAMILIES[family].architecture],
    "model_type": family,
    "hidden_size": model.width,
    "num_attention_heads": model.num_heads,
    "num_hidden_layers": model.num_layers,
    "vocab_size": model.vocab_size,
    "max_position_embeddings": model.context,
    "hidden_act": kind.get(model.ffn.activation, model.ffn.activation),
    "rms_norm_eps": model.norm_eps,
    "initializer_range": model.init_std,
    "tie_word_embeddings": model.tie_embeddings,
    "attention_bias": model.attention_bias,
    "rope_theta": model.rope_theta,
    "rope_scaling": _rope_scaling(model.rope),
  }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
  if rope.scaling == "none":
    return None
  plain, found = RopeConfig(), {"rope_type": rope.scaling, "factor": rope.factor}
  if rope.original_context:
    found["original_max_position_embeddings"] = rope.original_context
  names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
           "low_freq_factor", "high_freq_factor", "truncate")  # fmt: skip
  if rope.scaling == "llama3":
    return found | {name: getattr(rope, name) for name in names[5:7]}
  return found | {n: getattr(rope, n) for n in names if getattr(rope, n) != getattr(plain, n)}


def _heads_written(model: ModelConfig) -> dict[str, Any]:
  return {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}


def _ranges(layers: tuple[int, ...]) -> str:
  """Layers in the format of `model.dense_layers`: "0,1,5"."""
  return ",".join(map(str, layers))


# -- OLMoE ----------------------------------------------------------------------------------------


def _read_olmoe(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("sliding_window")
  k = c.size("num_experts_per_tok")
  model = ModelConfig(
    **c.common(10000.0, eps=1e-5),
    **_merged(c.heads(), head_dim=0),
    wiring="topk",
    num_layers=c.size("num_hidden_layers"),
    num_experts=c.experts,
    top_k=k,
    expert_hidden=c.size("intermediate_size"),
    mlp_hidden=c.size("intermediate_size"),
    qk_norm="all",
    clip_qkv=c.number("clip_qkv", 0.0),
  )
  return model, RouterConfig(**_normalised(c.flag("norm_topk_prob"), k), **c.balance(k))


def _write_olmoe(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  k = model.top_k
  return _written(model, "olmoe") | {
    "num_key_value_heads": model.num_kv_heads,
    "num_experts": model.num_experts,
    "num_experts_per_tok": k,
    "intermediate_size": model.expert_hidden,
    "clip_qkv": model.clip_qkv or None,
    "norm_topk_prob": _normalises(router, k),
    "router_aux_loss_coef": router.balance_loss / k,
  }


# -- Mixtral --------------------------------------------------------------------------------------


def _read_mixtral(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("attention_bias", False)
  k = c.size("num_experts_per_tok")
  model = ModelConfig(
    **c.common(1e6, eps=1e-5),
    **c.heads(8),
    wiring="topk",
    num_layers=c.size("num_hidden_layers"),
    num_experts=c.experts,
    top_k=k,
    expert_hidden=c.size("intermediate_size"),
    mlp_hidden=c.size("intermediate_size"),
    sliding_window=c.size("sliding_window", 0),
  )
  return model, RouterConfig(**_normalised(True, k), **c.balance(k))


def _write_mixtral(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  return _written(model, "mixtral") | _heads_written(model) | {
    "num_local_experts": model.num_experts,
    "num_experts_per_tok": model.top_k,
    "intermediate_size": model.expert_hidden,
    "sliding_window": model.sliding_window or None,
    "router_aux_loss_coef": router.balance_loss / model.top_k,
  }  # fmt: skip


# -- Granite-MoE ----------------------------------------------------------------------------------

_MULTIPLIERS = ("attention", "embedding", "residual")


def _read_granite(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  k, hidden = c.size("num_experts_per_tok"), c.size("intermediate_size")
  names = [f"{name}_multiplier" for name in _MULTIPLIERS]
  scales: dict[str, Any] = {name: c.number(name, 1.0) for name in names}
  if not all(scales.values()):
    zero = next(name for name, value in scales.items() if not value)
    raise DataError(f"{c.name}: {zero}=0 leaves nothing to compute; give a number other than 0")
  model = ModelConfig(
    **c.common(10000.0, eps=1e-6),
    **_merged(c.heads(), head_dim=0),
    **scales,
    logits_scaling=c.number("logits_scaling", 1.0),
    wiring="topk",
    num_layers=c.size("num_hidden_layers"),
    num_experts=c.experts,
    top_k=k,
    expert_hidden=hidden,
    mlp_hidden=hidden,
  )
  return model, RouterConfig(**_normalised(True, k), **c.balance(k))


def _write_granite(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  scales = {f"{name}_multiplier": getattr(model, f"{name}_multiplier") for name in _MULTIPLIERS}
  scales["attention_multiplier"] = model.attention_multiplier or model.head_dim**-0.5
  return _written(model, "granitemoe") | scales | {
    "logits_scaling": model.logits_scaling,
    "num_key_value_heads": model.num_kv_heads,
    "num_local_experts": model.num_experts,
    "num_experts_per_tok": model.top_k,
    "intermediate_size": model.expert_hidden,
    "router_aux_loss_coef": router.balance_loss / model.top_k,
  }  # fmt: skip


# -- Qwen3-MoE ------------------------------------------------------------------------------------


def _read_qwen3_moe(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  k, layers = c.size("num_experts_per_tok"), c.size("num_hidden_layers")
  step, only = c.size("decoder_sparse_step", 1), c.layers("mlp_only_layers")
  if not step or (only and max(only) >= layers):
    raise DataError(
      f"{c.name}: decoder_sparse_step={step} and mlp_only_layers={list(only)} do not fit "
      f"num_hidden_layers={layers}"
    )
  dense = [i for i in range(layers) if i in only or (i + 1) % step or not c.experts]
  window = c.size("sliding_window", 4096) if c.flag("use_sliding_window") else 0
  regular = step > 1 and not only and layers % step == 0
  model = ModelConfig(
    **_merged(c.common(10000.0, eps=1e-6), moe_every=step if regular else 1),
    **c.heads(4),
    wiring="dense" if len(dense) == layers else "topk",
    num_layers=layers,
    num_experts=c.experts or 1,
    top_k=k if c.experts else 1,
    expert_hidden=c.size("moe_intermediate_size"),
    mlp_hidden=c.size("intermediate_size"),
    dense_layers="" if regular or len(dense) == layers else _ranges(tuple(dense)),
    qk_norm="head",
    sliding_window=window,
  )
  return model, RouterConfig(**_normalised(c.flag("norm_topk_prob"), k), **c.balance(k))


def _write_qwen3_moe(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  k = model.top_k
  return _written(model, "qwen3_moe") | _heads_written(model) | {
    "num_experts": model.num_experts if model.wiring_rule.taps else 0,
    "num_experts_per_tok": k,
    "moe_intermediate_size": model.expert_hidden,
    "intermediate_size": model.mlp_hidden,
    "decoder_sparse_step": model.moe_every,
    "mlp_only_layers": list(model.dense_indices),
    "use_sliding_window": bool(model.sliding_window),
    "sliding_window": model.sliding_window or None,
    "norm_topk_prob": _normalises(router, k),
    "router_aux_loss_coef": router.balance_loss / k,
  }  # fmt: skip


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
    "dense_layers": "" if first == layers else _ranges(tuple(range(first))),
  }


def _deepseek_written(model: ModelConfig, router: RouterConfig, family: str) -> dict[str, Any]:
  heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.qk_rope_head_dim}
  return _moe_written(model, router, family) | _latent_written(model) | heads


def _moe_written(model: ModelConfig, router: RouterConfig, family: str) -> dict[str, Any]:
  """The fields of DeepSeek and GLM: those of all families, of the experts and of the router."""
  dense, shared = model.dense_indices, model.wiring_rule.shared_expert
  return _written(model, family) | {
    "first_k_dense_replace": len(dense) if model.wiring_rule.taps else model.num_layers,
    "n_routed_experts": model.num_experts,
    "n_shared_experts": model.shared_hidden // model.expert_hidden if shared else None,
    "num_experts_per_tok": model.top_k,
    "moe_intermediate_size": model.expert_hidden,
    "intermediate_size": model.mlp_hidden,
    "routed_scaling_factor": router.routed_scaling_factor,
    "norm_topk_prob": _normalises(router, model.top_k),
    "n_group": router.n_group,
    "topk_group": router.topk_group,
  }  # fmt: skip


def _latent_written(model: ModelConfig) -> dict[str, Any]:
  names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
  return {"q_lora_rank": model.q_lora_rank or None} | {n: getattr(model, n) for n in names}


def _read_deepseek_v2(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("topk_method", "greedy", "group_limited_greedy")
  c.refuse("scoring_func", "softmax")
  model = ModelConfig(**_deepseek(c, theta=10000.0, interleaved=True))
  k, limited = model.top_k, c.values.get("topk_method") == "group_limited_greedy"
  normalise = c.flag("norm_topk_prob")
  router = RouterConfig(
    **_normalised(normalise, k),
    **c.balance(k, "aux_loss_alpha"),
    # The published code ignores routed_scaling_factor where it normalises the weights.
    routed_scaling_factor=1.0 if normalise else c.number("routed_scaling_factor", 1.0),
    n_group=c.size("n_group", 1) if limited else 1,
    topk_group=c.size("topk_group", 1) if limited else 1,
    group_score="max",
  )
  return model, router


def _write_deepseek_v2(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  return _deepseek_written(model, router, "deepseek_v2") | {
    "topk_method": "group_limited_greedy" if router.n_group > 1 else "greedy",
    "scoring_func": "softmax",
    "aux_loss_alpha": router.balance_loss / model.top_k,
  }


def _read_deepseek_v3(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("topk_method", "noaux_tc")
  c.refuse("scoring_func", "sigmoid")
  model = ModelConfig(**_deepseek(c, theta=10000.0, interleaved=c.flag("rope_interleave", True)))
  return model, _noaux_router(c, model.top_k, 2.5)


def _noaux_router(c: Fields, k: int, factor: float) -> RouterConfig:
  """Sigmoid scores, groups, and a balancing bias in place of a loss; `factor`: if none is given."""
  return RouterConfig(
    **_normalised(c.flag("norm_topk_prob", True), k),
    scoring_func="sigmoid",
    routed_scaling_factor=c.number("routed_scaling_factor", factor),
    n_group=c.size("n_group", 1),
    topk_group=c.size("topk_group", 1),
    group_score="top2",
    balance="none",
    balance_loss=0.0,
    bias="sign",
  )


def _write_deepseek_v3(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  return _deepseek_written(model, router, "deepseek_v3") | {
    "rope_interleave": model.rope.interleaved,
  }


# -- GLM-4.5 --------------------------------------------------------------------------------------


def _read_glm(c: Fields) -> tuple[ModelConfig, RouterConfig]:
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
    dense_layers=_ranges(tuple(range(first))),
  )
  return model, _noaux_router(c, model.top_k, 1.0)


def _write_glm(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  share = {"partial_rotary_factor": model.rope.share}
  return _moe_written(model, router, "glm4_moe") | _heads_written(model) | share | {
    "use_qk_norm": model.qk_norm == "head",
  }  # fmt: skip


# -- LongCat-Flash --------------------------------------------------------------------------------


def _read_longcat(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("attention_method", "MLA")
  c.refuse("zero_expert_type", "identity")
  c.refuse("router_bias", False)
  c.refuse("norm_topk_prob", False)
  for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
    c.refuse(name, True)
  hidden, k = c.size("ffn_hidden_size"), c.size("moe_topk")
  model = ModelConfig(
    **_merged(c.common(1e7, eps=1e-5, interleaved=True), moe_every=2),
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


def _write_longcat(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  return _written(model, "longcat_flash") | _latent_written(model) | {
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


# -- dense models, for `scmoe.convert --upcycle` --------------------------------------------------


def _read_dense(c: Fields, *, qk_norm: str, window: int, theta: float) -> ModelConfig:
  return ModelConfig(
    **c.common(theta, eps=1e-6),
    **c.heads(),
    wiring="dense",
    num_layers=c.size("num_hidden_layers"),
    num_experts=1,
    mlp_hidden=c.size("intermediate_size"),
    qk_norm=qk_norm,
    sliding_window=window,
  )


def _read_llama(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  return _read_dense(c, qk_norm="none", window=0, theta=10000.0), RouterConfig()


def _read_mistral(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("attention_bias", False)
  window = c.size("sliding_window", 0)
  return _read_dense(c, qk_norm="none", window=window, theta=10000.0), RouterConfig()


def _read_qwen3(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("use_sliding_window", False)
  return _read_dense(c, qk_norm="head", window=0, theta=10000.0), RouterConfig()


def _dense_writer(family: str) -> Callable[[ModelConfig, RouterConfig], dict[str, Any]]:
  return lambda model, router: _written(model, family) | _heads_written(model) | {
    "intermediate_size": model.mlp_hidden,
    "sliding_window": model.sliding_window or None,
  }  # fmt: skip


FAMILIES: dict[str, Family] = {
  "olmoe": Family("OlmoeForCausalLM", _read_olmoe, _write_olmoe),
  "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral),
  "granitemoe": Family("GraniteMoeForCausalLM", _read_granite, _write_granite),
  "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
  "deepseek_v2": Family("DeepseekV2ForCausalLM", _read_deepseek_v2, _write_deepseek_v2),
  "deepseek_v3": Family("DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),
  "glm4_moe": Family("Glm4MoeForCausalLM", _read_glm, _write_glm),
  "longcat_flash": Family("LongcatFlashForCausalLM", _read_longcat, _write_longcat),
  "llama": Family("LlamaForCausalLM", _read_llama, _dense_writer("llama")),
  "mistral": Family("MistralForCausalLM", _read_mistral, _dense_writer("mistral")),
  "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _dense_writer("qwen3")),
  # The last one, since it expresses every model and transformers has no code for it.
  own.FAMILY: Family("ScmoeForCausalLM", own.read, own.write),
}


def read_config(
  values: Mapping[str, Any], name: str = "config.json"
) -> tuple[str, ModelConfig, RouterConfig]:
  """The family of a config.json, and the resolved options of model and router.

  Args:
    values: the parsed file.
    name: the file's name in messages.

  Raises:
    DataError: the family is unknown, a size is missing, or a field asks for something that scmoe's
      model does not have.
  """
  family = values.get("model_type")
  if not isinstance(family, str) or family not in FAMILIES:
    raise DataError(
      f"{name}: model_type={family!r} is not a known family; one of: {', '.join(FAMILIES)}"
    )
  try:
    model, router = FAMILIES[family].read(Fields(values, name))
    model = model.resolve()
    router.check()
    if model.wiring_rule.taps:
      router.check_experts(model.top_k, model.num_experts, model.zero_experts)
  except ConfigError as error:
    raise DataError(f"{name}: {error}") from None
  return family, model, router


def write_config(model: ModelConfig, router: RouterConfig, family: str = "") -> dict[str, Any]:
  """The config.json of a resolved model: that of a released family, or of `scmoe.pretrained.own`.

  Args:
    model, router: the options.
    family: the family that the model came from, the only released one that is tried; "" tries all.

  Raises:
    ConfigError: an option cannot be expressed in any folder; names it.
  """
  released = [name for name in FAMILIES if name != own.FAMILY] if model.style == "llama" else []
  for name in [family] if family in released else released:
    values = FAMILIES[name].write(model, router)
    try:
      found = read_config(values)[1:]
    except DataError:
      continue
    if not (_difference(model, found[0], "model") or _difference(router, found[1], "router")):
      return values
  return own.write(model, router)


# Options that a config.json need not express: they change how the model is computed or trained,
# not the function that it computes.
_FREE = (
  "model.dtype", "model.ffn.impl", "model.ffn.backend", "model.ffn.fp8",
  "model.document_mask",
  "model.ablation.mix_input", "model.shortcut_norm", "model.num_kv_heads", "model.head_dim",
  "model.init_std", "model.context",
  "router.noise", "router.balance", "router.balance_loss", "router.z_loss",
  "router.bias", "router.bias_rate", "router.bias_proportional", "router.bias_derivative",
  "router.real_experts", "router.compat.order", "router.compat.jitter", "router.compat.fp32_gate",
)  # fmt: skip


def _difference(have: Any, want: Any, prefix: str) -> str:
  """Describes the first field in which two configurations differ; "" if there is none.

  Fields that the wiring does not use, such as `shared_hidden` without a shared expert, may differ.
  """
  for f in dataclasses.fields(have):
    ours, theirs, name = getattr(have, f.name), getattr(want, f.name), f"{prefix}.{f.name}"
    if dataclasses.is_dataclass(ours):
      if found := _difference(ours, theirs, name):
        return found
    elif name == "model.num_kv_heads" or name == "model.head_dim":
      if not getattr(have, "kv_lora_rank", 0) and ours != theirs:
        return f"{name}={ours!r}, not {theirs!r}"
    elif name == "model.shortcut_norm":
      if have.wiring_rule.is_shortcut and ours != theirs:
        return f"{name}={ours!r}, not {theirs!r}"
    elif name in ("model.shared_hidden", "model.mix"):  # used only with a shared expert
      if have.wiring_rule.shared_expert and ours != theirs:
        return f"{name}={ours!r}, not {theirs!r}"
    elif name not in _FREE and ours != theirs:
      return f"{name}={ours!r}, not {theirs!r}"
  return ""
