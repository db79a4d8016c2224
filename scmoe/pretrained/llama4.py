"""Reads and writes the config.json of Llama-4's text part.

A folder may hold that part alone (`llama4_text`), or with the model of images (`llama4`), whose
tensors are not read. scmoe writes both as `llama4_text`.
"""

from __future__ import annotations

from typing import Any

from scmoe.base.errors import DataError
from scmoe.models.config import ModelConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.pretrained.fields import Fields, merged
from scmoe.pretrained.written import common_fields, head_fields, ranges

WHOLE, TEXT = "llama4", "llama4_text"
CHUNKED, FULL = "chunked_attention", "full_attention"
_FLOOR, _SCALE = 8192, 0.1  # `floor_scale` and `attn_scale` if the file gives none


def read_whole(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of the text part of a Llama-4 with images, from its config.json; see `read`.

  Raises:
    DataError: `text_config` is not a group of fields; or see `read`.
  """
  text = c.values.get("text_config")
  if not isinstance(text, dict):
    raise DataError(f"{c.name}: text_config={str(text)[:40]!r} is not a group of fields")
  # config.json states quantisation beside `text_config`, not in it.
  text = {"quantization_config": c.values.get("quantization_config"), **text}
  return read(Fields(text, f"{c.name}: text_config"))


def read(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of a Llama-4 from the fields of its text part; see `families.Family`.

  Raises:
    DataError: a field asks for something that scmoe's model does not have; a list does not have an
      entry for each layer; no layer has experts; or `moe_layers` names a layer that is not there.
  """
  layers, hidden = c.size("num_hidden_layers"), c.size("intermediate_size")
  turning, sees_chunk, chunk = _attention(c, layers)
  straight = tuple(i for i in range(layers) if not turning[i])
  full = tuple(i for i in range(layers) if not sees_chunk[i])
  step, listed = c.size("interleave_moe_layer_step", 1), c.values.get("moe_layers")
  if not step or (listed is not None and not c.layers("moe_layers")):
    raise DataError(
      f"{c.name}: interleave_moe_layer_step={step} and moe_layers={listed} leave no experts"
    )
  every = range(step - 1, layers, step)
  with_experts = set(every if listed is None else c.layers("moe_layers"))
  if not with_experts or max(with_experts) >= layers:
    raise DataError(
      f"{c.name}: layers {sorted(with_experts)[-3:]} with experts do not fit "
      f"num_hidden_layers={layers}"
    )
  dense = tuple(i for i in range(layers) if i not in with_experts)
  regular = step > 1 and layers % step == 0 and with_experts == set(every)
  tuned = c.values.get("attn_temperature_tuning", True)  # early files have a number here
  tuned = tuned is None or (tuned > 0 if type(tuned) is int else c.flag("attn_temperature_tuning"))
  model = ModelConfig(
    **merged(
      c.common(500000.0, eps=1e-5, interleaved=True, layer_kinds=(FULL, CHUNKED)),
      moe_every=step if regular else 1,
    ),
    **merged(c.heads(8), head_dim=c.size("head_dim", 128)),
    wiring="shared_expert",
    num_layers=layers,
    num_experts=c.experts,
    top_k=c.size("num_experts_per_tok", 1),
    expert_hidden=hidden,
    shared_hidden=hidden,
    mlp_hidden=c.size("intermediate_size_mlp", 16384),
    dense_layers="" if regular else ranges(dense),
    qk_norm="l2" if c.flag("use_qk_norm", True) else "none",
    attention_chunk=chunk,
    full_attention_layers=ranges(full) if chunk else "",
    nope_layers=ranges(straight),
    attention_temperature=c.number("attn_scale", _SCALE) if straight and tuned else 0.0,
    attention_temperature_floor=c.size("floor_scale", _FLOOR) if straight and tuned else _FLOOR,
  )
  router = RouterConfig(
    normalise=False,
    scoring_func="sigmoid",
    compat=CompatConfig(weights="before"),
    **c.balance(model.top_k),
  )
  return model, router


def _attention(c: Fields, layers: int) -> tuple[list[int], list[bool], int]:
  """Which layers rotate (1, else 0), in which layers chunks hold, and the size of a chunk.

  The first two have an entry for each layer. The size is 0 if chunks hold in no layer.

  Raises:
    DataError: a list does not have `layers` entries or has an unknown one; or layers have chunks
      and the file gives no size.
  """
  size = c.size("attention_chunk_size", 0 if "attention_chunk_size" in c.values else 8192)
  turning = c.values.get("no_rope_layers") or [
    int((i + 1) % max(c.size("no_rope_layer_interval", 4), 1) != 0) for i in range(layers)
  ]
  if not isinstance(turning, list) or not all(entry in (0, 1) for entry in turning):
    raise DataError(f"{c.name}: no_rope_layers={str(turning)[:40]} is not a list of 0 and 1")
  kinds = c.layer_kinds(FULL, CHUNKED)
  if kinds is None:
    kinds = [CHUNKED if turns and size else FULL for turns in turning]
  for name, some in (("no_rope_layers", turning), ("layer_types", kinds)):
    if len(some) != layers:
      raise DataError(f"{c.name}: {name} has {len(some)} entries; num_hidden_layers={layers}")
  if CHUNKED in kinds and not size:
    raise DataError(
      f"{c.name}: layer_types has {CHUNKED!r} with attention_chunk_size=null; give a size"
    )
  sees_chunk = [kind == CHUNKED for kind in kinds]
  return turning, sees_chunk, size if any(sees_chunk) else 0


def write(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The fields of config.json for a Llama-4 without images; see `Family.write`."""
  full, straight, dense = model.full_layers, model.straight_layers, model.dense_indices
  every = range(model.moe_every - 1, model.num_layers, model.moe_every)
  kind = lambda i: CHUNKED if model.attention_chunk and i not in full else FULL
  return common_fields(model) | head_fields(model) | {
    "intermediate_size": model.expert_hidden,
    "intermediate_size_mlp": model.mlp_hidden,
    "num_local_experts": model.num_experts,
    "num_experts_per_tok": model.top_k,
    "interleave_moe_layer_step": model.moe_every,
    "moe_layers": [i for i in every if i not in dense],
    "use_qk_norm": model.qk_norm == "l2",
    "no_rope_layers": [int(i not in straight) for i in range(model.num_layers)],
    "layer_types": [kind(i) for i in range(model.num_layers)],
    "attention_chunk_size": model.attention_chunk or None,
    "attn_temperature_tuning": model.attention_temperature > 0,
    "attn_scale": model.attention_temperature or _SCALE,
    "floor_scale": model.attention_temperature_floor,
    "router_aux_loss_coef": router.balance_loss / model.top_k,
  }  # fmt: skip
