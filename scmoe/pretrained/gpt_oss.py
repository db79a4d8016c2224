"""Reads and writes the config.json of GPT-OSS."""

from __future__ import annotations

from typing import Any

from scmoe.base.errors import DataError
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained.fields import Fields, merged
from scmoe.pretrained.written import common_fields, head_fields, normalised, ranges

WINDOW, FULL = "sliding_attention", "full_attention"
# The rotary embedding if config.json says nothing about it; the same numbers as in transformers.
_ROPE = {
  "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
  "original_max_position_embeddings": 4096,
}  # fmt: skip
_STEEPNESS, _LIMIT = 1.702, 7.0  # the only ones that the activation `clamped_swiglu` can have
_WINDOW = 128  # positions, if the file does not name the field, as in transformers; null: no window


def read(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a GPT-OSS from its config.json; see `scmoe.pretrained.families.Family`.

  Raises:
    DataError: a field asks for something that scmoe's model does not have, or `layer_types` does
      not have a known word for each layer.
  """
  c.refuse("swiglu_alpha", _STEEPNESS)
  c.refuse("swiglu_limit", _LIMIT)
  c.refuse("hidden_act", "silu")
  if not (c.values.get("rope_parameters") or c.values.get("rope_scaling")):
    c = Fields({**c.values, "rope_scaling": _ROPE}, c.name)
  k, layers, hidden = (
    c.size(name) for name in ("num_experts_per_tok", "num_hidden_layers", "intermediate_size")
  )
  kinds = c.layer_kinds(FULL, WINDOW)
  if kinds is None:
    kinds = [FULL if i % 2 else WINDOW for i in range(layers)]
  if len(kinds) != layers:
    raise DataError(f"{c.name}: layer_types has {len(kinds)} words; num_hidden_layers={layers}")
  window = c.size("sliding_window", 0 if "sliding_window" in c.values else _WINDOW)
  window = window if WINDOW in kinds else 0
  full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
  model = ModelConfig(
    **merged(
      c.common(150000.0, eps=1e-5, layer_kinds=(FULL, WINDOW)),
      attention_bias=c.flag("attention_bias", True),
      ffn=FFNOptions(activation="clamped_swiglu"),
    ),
    **merged(c.heads(8), head_dim=c.size("head_dim", 64)),
    wiring="topk",
    num_layers=layers,
    num_experts=c.experts,
    top_k=k,
    expert_hidden=hidden,
    mlp_hidden=hidden,
    expert_bias=True,
    attention_sinks=True,
    sliding_window=window,
    full_attention_layers=ranges(full) if window else "",
  )
  return model, RouterConfig(gate="affine", **normalised(True, k), **c.balance(k))


def write(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of config.json for a GPT-OSS with these options; see `Family.write`."""
  full = model.full_layers
  kind = lambda i: WINDOW if model.sliding_window and i not in full else FULL
  return common_fields(model) | head_fields(model) | {
    "hidden_act": "silu",
    "swiglu_limit": _LIMIT,
    "num_local_experts": model.num_experts,
    "num_experts_per_tok": model.top_k,
    "intermediate_size": model.expert_hidden,
    # transformers makes the mask of a window even if no layer has one, and refuses null there.
    "sliding_window": model.sliding_window or _WINDOW,
    "layer_types": [kind(i) for i in range(model.num_layers)],
    "router_aux_loss_coef": router.balance_loss / model.top_k,
  }  # fmt: skip
