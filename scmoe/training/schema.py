"""Reads checkpoints of earlier versions, which called some things by other names.

Nothing is converted on disk. A checkpoint of schema 1 is read by the names below, and the run's
next checkpoint is of the present schema.

| schema 1                                     | now                                            |
|----------------------------------------------|------------------------------------------------|
| moe.up, .gate, .down, .up_bias, .down_bias   | moe.experts.up, ...                            |
| router.skewed                                | gone, with dispatch.further                    |
| router.order, weights, weight_norm, jitter, uniform, round_to | router.compat.order, ...      |
| overlap.slot, sequential                     | overlap.schedule                               |
| overlap.backward_slot                        | overlap.ablation.backward                      |
| overlap.barriers                             | overlap.order                                  |
| overlap.gradients                            | gone: summed over devices once a step          |
| overlap.command_buffers = True, False        | overlap.command_buffers = on, auto             |

Until 2026-11-28 AdamW updated the kernels of a stem's convolutions in runs with Muon. Their first
moment becomes Muon's momentum, and their second is not read.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any

from scmoe.base.errors import CheckpointError
from scmoe.base.renamed import with_present_names
from scmoe.blocks.schedule import dense_steps, slot_names, tap_step
from scmoe.blocks.wiring import WIRINGS, tap_index
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.layers.rope import RopeConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.models.vision.augment import AugmentConfig
from scmoe.models.vision.options import VisionConfig

SCHEMA = 2
_EXPERTS = re.compile(r"(?<=\bmoe\.)(?=(up|gate|down|up_bias|down_bias)$)")
_GONE = ("router.skewed",)
_OF_KERNEL = re.compile(
  r"(.*\binner_states\.)other(\.inner_state\.)(mu|nu)(\.(?:.*\.)?embedding\.convolutions\.\d+\.kernel)"
)
_MOST_BLOCKS = 1024  # a larger `model.moe_every` is unusable: a damaged file may hold any number
_COMPAT = ("order", "weights", "weight_norm", "jitter", "uniform", "round_to")
# Fields that later versions added, by the names with which they were added, and the value that
# describes what earlier runs did; a field that changed no result of theirs has a default instead.
# Without the value the missing field would count as a change of the configuration, and most such
# changes keep a run from resuming.
_SINCE = {
  "model": {
    "ablation": {"norm_after": False},
    "ffn": {"num_sms": 0},
    "expert_impl": "auto",
    "expert_fp8": False,
    "experts": "ffn",
    "zero_experts": 0,
    "dense_layers": "",
    "attention_bias": False,
    "attention_out_bias": True,
    "attention_multiplier": 0.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "qk_norm": "none",
    "clip_qkv": 0.0,
    "sliding_window": 0,
    "full_attention_layers": "",
    "nope_layers": "",
    "attention_chunk": 0,
    "attention_temperature": 0.0,
    "attention_temperature_floor": 8192,
    "attention_sinks": False,
    "expert_bias": False,
    "kv_lora_rank": 0,
    "q_lora_rank": 0,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
    "mla_scale_q_lora": False,
    "mla_scale_kv_lora": False,
    "latent_norm_eps": 1e-6,
    "rope": dataclasses.asdict(RopeConfig()),
    "architecture": "gpt",
    "vision": dataclasses.asdict(VisionConfig()),
  },
  "data": {
    "image_field": "",
    "label_field": "label",
    "chat_template": "auto",
    "train_on": "answers",
    "long_conversations": "refuse",
  },
  "router": {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "group_score": "top2",
    "bias_proportional": 0.0,
    "bias_derivative": 0.0,
    "real_experts": 0.0,
    "balance_over": "microbatch",
    "tasks": 0,
  },
  "dispatch": {
    "silent": False,
    "overflow": "loop",
    "fp8": False,
    "put_blocks": 0,
    "ablation": {"first_round": False},
  },
  "mesh": {
    "sequence": 1,
    "sequence_attention": "ring",
    "shard_state": "none",
    "gather_again": True,
    "gather_ahead": False,
    "embedding": "whole",
    "bucket_bytes": 1 << 25,
    "moments_in": "device",
    "moments_folder": "",
    "moments_update": "device",
    "moments_ahead": 1,
    "moments_kept": 0,
    "experts_in": "device",
  },
  "train": {
    "spike_sigma": 0.0,
    "spike_action": "skip",
    "init_from": "",
    "trackers": "",
    "teacher": "",
    "teacher_share": 0.5,
    "teacher_temperature": 2.0,
    "teacher_hidden": 0.0,
    "preference_beta": 0.1,
    "reference_free": False,
  },
  "optimizer": {
    "loss_scale": 0.0,
    "loss_scale_window": 1000,
    "masters": "auto",
    "moments": "float32",
    "name": "adamw",
    "muon_beta": 0.95,
    "muon_rms": 0.2,
    "ema": 0.0,
  },
  "augment": {"trivial": 0.0},
  # These fields of `overlap` have their present defaults.
  "overlap": {"search_seconds": 90.0, "flight": 1, "ahead": True, "embedding_rows": False},
}
# Sections that later versions added, with the values that describe what earlier runs did.
_SECTIONS = {
  "augment": dataclasses.asdict(AugmentConfig()),
  "multitask": dataclasses.asdict(MultitaskConfig()),
  "lora": dataclasses.asdict(LoraConfig()),
}


def upgraded(meta: dict[str, Any]) -> dict[str, Any]:
  """A checkpoint's description, its leaves and configuration converted to the present schema.

  A leaf that was stored under another name has that name in `stored_as`; leaves that are no longer
  read are left out.

  Raises:
    CheckpointError: this version does not know the schema.
  """
  schema, config = meta.get("schema", SCHEMA), meta.get("config", {})
  if schema not in (1, SCHEMA):
    raise CheckpointError(
      f"the checkpoint of step {meta.get('step')} has schema {schema}, this version of scmoe reads "
      f"1 to {SCHEMA}; use the version that wrote it, or a later one"
    )
  if schema == SCHEMA:
    leaves = _kernels_of_muon(meta.get("leaves", {}))
    return meta | {"leaves": leaves, "config": with_present_names(_completed(config))[0]}
  leaves = {}
  for name, leaf in meta["leaves"].items():
    if name not in _GONE:
      leaves[_EXPERTS.sub("experts.", name)] = leaf | {"stored_as": name}
  config = _completed(_of_schema_2(config))
  return meta | {"leaves": leaves, "config": with_present_names(config)[0]}


def _kernels_of_muon(leaves: dict[str, Any]) -> dict[str, Any]:
  """The leaves with AdamW's first moment of a stem's kernels as the momentum that Muon reads."""
  found = {}
  for name, leaf in leaves.items():
    old = _OF_KERNEL.fullmatch(name)
    if old is None or len(leaf["shape"]) != 4:
      found[name] = leaf
    elif old[3] == "mu":
      stored = leaf.get("stored_as", name)
      found[f"{old[1]}matrix{old[2]}mu{old[4]}"] = leaf | {"stored_as": stored}
  return found


def _completed(config: dict[str, Any]) -> dict[str, Any]:
  """A stored configuration, completed by the fields that later versions added (`_SINCE`).

  Sections that later versions added are added to a whole configuration only, which has `model` and
  `data`.
  """
  stored = {part: config[part] for part in _SINCE if isinstance(config.get(part), dict)}
  whole = {"model", "data"} <= set(config)  # else `config` holds some sections, and gets no others
  added = copy.deepcopy(_SECTIONS) if whole else {}
  return added | config | {part: _over(_SINCE[part], fields) for part, fields in stored.items()}


def _over(since: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
  """The stored fields and, where one is missing, that of `since`; a group of fields likewise."""
  groups = {
    name: _over(since[name], group)
    for name, group in fields.items()
    if isinstance(group, dict) and isinstance(since.get(name), dict)
  }
  return since | fields | groups


def upgraded_config(values: dict[str, Any]) -> dict[str, Any]:
  """A stored configuration of any schema with the present names; no missing field is added.

  A section that is no dictionary stays as it is: the check of the configuration refuses it.
  """
  return with_present_names(_of_schema_2(values))[0]


def _of_schema_2(values: dict[str, Any]) -> dict[str, Any]:
  """A stored configuration with the names and values that schema 2 had at first.

  Some of these names have changed since; `with_present_names` replaces them. The table in the
  module's docstring has today's names.
  """
  values = copy.deepcopy(values)
  group = lambda name: part if isinstance(part := values.get(name), dict) else {}
  router, dispatch, overlap, model = map(group, ("router", "dispatch", "overlap", "model"))
  compat = router.get("compat", {})
  moved = {name: router.pop(name) for name in _COMPAT if name in router}
  if moved and isinstance(compat, dict):
    router["compat"] = compat | moved
  dispatch.pop("further", None)
  overlap.pop("gradients", None)
  if "slot" in overlap:
    overlap["schedule"] = _slot_name(overlap.pop("slot"), model)
  if "backward_slot" in overlap:
    slot = overlap.pop("backward_slot")
    word = "mirror" if slot == -1 else "free" if slot == -2 else ""
    overlap["backward"] = word or _slot_name(slot, model)
  if "barriers" in overlap:
    overlap["order"] = "barriers" if overlap.pop("barriers") else "xla"
  if isinstance(overlap.get("command_buffers"), bool):
    overlap["command_buffers"] = "on" if overlap["command_buffers"] else "auto"
  if overlap.pop("sequential", False):
    overlap["schedule"] = "off"
  return values


def _slot_name(slot: Any, model: dict[str, Any]) -> Any:
  """The present name of a slot of schema 1.

  That was the number of dense operations, attentions and MLPs, between the value that the gate
  reads and the experts: 0 is right after the dispatch. A negative number is `auto`, as is any
  number of a model without routed experts, of unknown wiring, or with an unusable `moe_every`. A
  value that is no finite number is returned unchanged.
  """
  if not (isinstance(slot, int | float) and math.isfinite(slot)):
    return slot
  wiring, blocks = WIRINGS.get(str(model.get("wiring", "scmoe_pos2"))), model.get("moe_every", 2)
  sensible = isinstance(blocks, int) and 0 < blocks <= _MOST_BLOCKS
  if slot < 0 or wiring is None or not wiring.taps or not sensible:
    return "auto"
  start = min(tap_step(tap_index(tap, blocks)) for tap in wiring.taps)
  names = slot_names([step.name for step in dense_steps(wiring, blocks)][start:])
  # In schema 1 an attention was one operation, and slot n + 0.5 was inside the attention after n
  # operations. An attention is two steps now: the slot behind its projections is next in `names`.
  operations = [name for name in names if ": " not in name]
  before = operations[min(int(slot), len(operations) - 1)]
  index = names.index(before) + (1 if slot % 1 else 0)
  return names[min(index, len(names) - 1)]
