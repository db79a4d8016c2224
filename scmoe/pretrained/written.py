"""Writes the fields of config.json that families of released models have in common.

`scmoe.pretrained.fields` reads them.
"""

from __future__ import annotations

from typing import Any

from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.pretrained.fields import ACTIVATIONS


def normalised(normalise: bool, k: int) -> dict[str, Any]:
  """Router options by which the K weights of a token are divided by their sum, or are not.

  For k = 1 the option `normalise` does nothing here, while the released models divide the weight by
  itself, which gives 1; so `compat.weight_norm` is set.
  """
  once = normalise and k == 1
  return {"normalise": normalise, "compat": CompatConfig(weight_norm=1.0 if once else 0.0)}


def normalises(router: RouterConfig, k: int) -> bool:
  """Whether the K weights of a token are divided by their sum; the inverse of `normalised`."""
  return router.compat.weight_norm == 1 if k == 1 else router.normalise


def common_fields(model: ModelConfig) -> dict[str, Any]:
  """The fields of config.json that all families have, without the names of class and family."""
  kind = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
  return {
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


def head_fields(model: ModelConfig) -> dict[str, Any]:
  """The fields about the heads of ordinary attention; `Fields.heads` reads them."""
  return {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}


def ranges(layers: tuple[int, ...]) -> str:
  """Layers in the format of `model.dense_layers`: "0,1,5"."""
  return ",".join(map(str, layers))
