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
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained import deepseek, gpt_oss, llama4, own
from scmoe.pretrained.fields import Fields, merged
from scmoe.pretrained.written import common_fields, head_fields, normalised, normalises, ranges


@dataclasses.dataclass(frozen=True)
class Family:
  """One family of released models.

  Attributes:
    architecture: the name of the model's class in transformers.
    read: converts config.json to options of model and router.
    write: the inverse, for options that the family can express, without the names of class and
      family.
  """

  architecture: str
  read: Callable[[Fields], tuple[ModelConfig, RouterConfig]]
  write: Callable[[ModelConfig, RouterConfig], dict[str, Any]]


# -- OLMoE ----------------------------------------------------------------------------------------


def _read_olmoe(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  c.refuse("sliding_window")
  k = c.size("num_experts_per_tok")
  model = ModelConfig(
    **c.common(10000.0, eps=1e-5),
    **merged(c.heads(), head_dim=0),
    wiring="topk",
    num_layers=c.size("num_hidden_layers"),
    num_experts=c.experts,
    top_k=k,
    expert_hidden=c.size("intermediate_size"),
    mlp_hidden=c.size("intermediate_size"),
    qk_norm="all",
    clip_qkv=c.number("clip_qkv", 0.0),
  )
  return model, RouterConfig(**normalised(c.flag("norm_topk_prob"), k), **c.balance(k))


def _write_olmoe(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  k = model.top_k
  return common_fields(model) | {
    "num_key_value_heads": model.num_kv_heads,
    "num_experts": model.num_experts,
    "num_experts_per_tok": k,
    "intermediate_size": model.expert_hidden,
    "clip_qkv": model.clip_qkv or None,
    "norm_topk_prob": normalises(router, k),
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
  return model, RouterConfig(**normalised(True, k), **c.balance(k))


def _write_mixtral(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  return common_fields(model) | head_fields(model) | {
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
    **merged(c.heads(), head_dim=0),
    **scales,
    logits_scaling=c.number("logits_scaling", 1.0),
    wiring="topk",
    num_layers=c.size("num_hidden_layers"),
    num_experts=c.experts,
    top_k=k,
    expert_hidden=hidden,
    mlp_hidden=hidden,
  )
  return model, RouterConfig(**normalised(True, k), **c.balance(k))


def _write_granite(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  scales = {f"{name}_multiplier": getattr(model, f"{name}_multiplier") for name in _MULTIPLIERS}
  scales["attention_multiplier"] = model.attention_multiplier or model.head_dim**-0.5
  return common_fields(model) | scales | {
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
    **merged(c.common(10000.0, eps=1e-6), moe_every=step if regular else 1),
    **c.heads(4),
    wiring="dense" if len(dense) == layers else "topk",
    num_layers=layers,
    num_experts=c.experts or 1,
    top_k=k if c.experts else 1,
    expert_hidden=c.size("moe_intermediate_size"),
    mlp_hidden=c.size("intermediate_size"),
    dense_layers="" if regular or len(dense) == layers else ranges(tuple(dense)),
    qk_norm="head",
    sliding_window=window,
  )
  return model, RouterConfig(**normalised(c.flag("norm_topk_prob"), k), **c.balance(k))


def _write_qwen3_moe(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  k = model.top_k
  return common_fields(model) | head_fields(model) | {
    "num_experts": model.num_experts if model.wiring_rule.taps else 0,
    "num_experts_per_tok": k,
    "moe_intermediate_size": model.expert_hidden,
    "intermediate_size": model.mlp_hidden,
    "decoder_sparse_step": model.moe_every,
    "mlp_only_layers": list(model.dense_indices),
    "use_sliding_window": bool(model.sliding_window),
    "sliding_window": model.sliding_window or None,
    "norm_topk_prob": normalises(router, k),
    "router_aux_loss_coef": router.balance_loss / k,
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


def _write_dense(model: ModelConfig, _: RouterConfig) -> dict[str, Any]:
  return common_fields(model) | head_fields(model) | {
    "intermediate_size": model.mlp_hidden,
    "sliding_window": model.sliding_window or None,
  }  # fmt: skip


FAMILIES: dict[str, Family] = {
  "olmoe": Family("OlmoeForCausalLM", _read_olmoe, _write_olmoe),
  "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral),
  "granitemoe": Family("GraniteMoeForCausalLM", _read_granite, _write_granite),
  "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
  "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek.read_v2, deepseek.write_v2),
  "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek.read_v3, deepseek.write_v3),
  "glm4_moe": Family("Glm4MoeForCausalLM", deepseek.read_glm, deepseek.write_glm),
  "gpt_oss": Family("GptOssForCausalLM", gpt_oss.read, gpt_oss.write),
  "longcat_flash": Family("LongcatFlashForCausalLM", deepseek.read_longcat, deepseek.write_longcat),
  llama4.TEXT: Family("Llama4ForCausalLM", llama4.read, llama4.write),
  llama4.WHOLE: Family("Llama4ForConditionalGeneration", llama4.read_whole, llama4.write),
  "llama": Family("LlamaForCausalLM", _read_llama, _write_dense),
  "mistral": Family("MistralForCausalLM", _read_mistral, _write_dense),
  "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_dense),
  # The last one, since it expresses every model and transformers has no code for it.
  own.FAMILY: Family("ScmoeForCausalLM", own.read, own.write),
}

# Families without an entry above, and what a model of this project lacks for them.
LACKING = {
  "jetmoe": "its attention is a mixture of experts, too: a gate of its own chooses for every token "
  "which query and output projections it goes through, and both mixtures add a bias to their sum; "
  "attention here has the same projections for all tokens",
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
    lacking = LACKING.get(family) if isinstance(family, str) else None
    why = f"cannot be read, since {lacking}" if lacking else "is not a known family"
    raise DataError(f"{name}: model_type={family!r} {why}; one of: {', '.join(FAMILIES)}")
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
  family = llama4.TEXT if family == llama4.WHOLE else family  # without its images
  released = [name for name in FAMILIES if name not in (own.FAMILY, llama4.WHOLE)]
  released = released if model.style == "llama" else []
  for name in [family] if family in released else released:
    known = FAMILIES[name]
    values = {"architectures": [known.architecture], "model_type": name}
    values |= known.write(model, router)
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
  "model.dtype", "model.ffn.impl", "model.ffn.backend", "model.ffn.fp8", "model.ffn.num_sms",
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
