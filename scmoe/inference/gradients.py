"""Norms of the loss's gradient, by layer and by part of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from scmoe.models.config import ModelConfig
from scmoe.models.vision.stages import stages_of

PARTS = ("attention", "mlp", "shared expert", "experts", "gate", "norms")


def gradient_norms(gradients: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
  """The Euclidean norm of the gradient of each part of each layer.

  Embedding, head, the last norm and a Swin's mergers belong to no layer and are left out.

  Args:
    gradients: of the parameters, in a tree of nested dictionaries like theirs.
    model: resolved options.

  Returns:
    part -> float64 [L], layers in order; NaN where a layer has no such part. "norms" are all norms
    of blocks and units outside attention, and the weights of `model.mix`. The experts and the gate
    of a pair count as parts of its last layer.
  """
  whole = model.architecture == "swin"
  trunks = list(stages_of(model)) if whole or model.reads_images else [model]
  starts, total = [], 0
  for trunk in trunks:
    starts.append(_starts(trunk, total))
    total += trunk.num_layers
  squares = {part: np.full(total, np.nan) for part in PARTS}
  for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
    names = [str(getattr(key, "key", key)) for key in path]
    number = int(names[1]) if names[0] == "trunks" else 0
    names = names[2:] if names[0] == "trunks" else names
    if names[0] not in ("stages", "dense"):
      continue
    trunk = trunks[number].of_dense_layers if names[0] == "dense" else trunks[number]
    part, within = _place(names[1:], trunk)
    values = np.square(np.asarray(leaf, np.float64)).reshape(leaf.shape[0], -1).sum(-1)
    for start, value in zip(starts[number][names[0]], values, strict=True):
      layer = start + within
      squares[part][layer] = np.nan_to_num(squares[part][layer], nan=0.0) + value
  return {part: np.sqrt(values) for part, values in squares.items()}


def _starts(trunk: ModelConfig, first: int) -> dict[str, list[int]]:
  """Numbers of layers by stack: the first layer of each pair in `stages`, each layer in `dense`.

  Args:
    trunk: options of the trunk.
    first: number of the trunk's first layer.
  """
  found: dict[str, list[int]] = {"stages": [], "dense": []}
  for run in trunk.runs:
    for _ in range(run.start, run.stop):
      found["dense" if run.dense else "stages"].append(first)
      first += 1 if run.dense else trunk.moe_every * trunk.wiring_rule.units_per_moe
  return found


def _place(names: list[str], trunk: ModelConfig) -> tuple[str, int]:
  """(part, layer) of a parameter below `stages` or `dense`; the pair's first layer has number 0.

  Args:
    names: the parameter's path below the stack, such as units, 0, blocks, 1, mlp, up.
    trunk: options of the stack's layers; for `dense` those of `ModelConfig.of_dense_layers`.
  """
  every, rule = trunk.moe_every, trunk.wiring_rule
  if names[0] == "moe":
    return "gate" if "router_gate" in names else "experts", every * rule.units_per_moe - 1
  unit = int(names[1])
  if names[2] != "blocks":  # the parameter is of a norm or the mix of the unit itself
    return "norms", (unit + 1) * every - 1
  block = int(names[3])
  is_shared = bool(rule.taps) and block == every - 1
  kinds = {"attention": "attention", "mlp": "shared expert" if is_shared else "mlp"}
  return kinds.get(names[4], "norms"), unit * every + block
