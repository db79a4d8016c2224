"""rows -> rows: the feed-forward networks of this device's experts.

Rows come with equal room for each expert, [W, e, R, D], or [R, D] with group sizes, for the grouped
kernels; either way in the order of their senders. Empty rows are zero and whatever they become is
never read. Tokens that stay where they are, [T, D] with their choices, come out as what
their experts add up to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.kernels.grouped_matmul import equal_ffn, grouped_ffn
from scmoe.kernels.moe_layer import moe_ffn
from scmoe.moe.types import Rows, Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
  """Weights of this device's experts.

  Attributes:
    up_eDF: first layer.
    gate_eDF: second first-layer matrix of a gated activation (SwiGLU); None otherwise.
    down_eFD: last layer.
    up_bias_eF, down_bias_eD: biases, or None.
  """

  up_eDF: Array
  gate_eDF: Array | None
  down_eFD: Array
  up_bias_eF: Array | None = None
  down_bias_eD: Array | None = None


def expert_ffn(
  rows: Array,
  weights: ExpertWeights,
  activation: str,
  sizes_e: Any = None,
  *,
  place_R: Array | None = None,
  backend: str = "auto",
) -> Array:
  """down(act(up(rows))) for every expert, in the rows' dtype with float32 accumulation.

  Args:
    rows: [e, R, D] or [W, e, R, D], or [R, D] sorted by expert with `sizes_e`, or in any order with
      `place_R` too.
    weights: see `ExpertWeights`; cast to the rows' dtype.
    activation: one of `grouped_matmul.activation_names()`; gated ones use `gate_eDF`.
    sizes_e: int32, rows of each expert; rows behind them give zero.
    place_R: where each row stands in the order of the experts; see `Rows`.
    backend: of the grouped products; see `scmoe.kernels.grouped_matmul.backend`.
  """
  if sizes_e is not None:
    return grouped_ffn(
      rows,
      weights.gate_eDF,
      weights.up_eDF,
      weights.down_eFD,
      sizes_e,
      activation=activation,
      place_M=place_R,
      up_bias_GF=weights.up_bias_eF,
      down_bias_GD=weights.down_bias_eD,
      backend=backend,
    )
  return equal_ffn(
    rows,
    weights.gate_eDF,
    weights.up_eDF,
    weights.down_eFD,
    activation=activation,
    up_bias_GF=weights.up_bias_eF,
    down_bias_GD=weights.down_bias_eD,
    backend=backend,
  )


def _compute(part: Any, weights: ExpertWeights, activation: str, backend: str) -> Array:
  """What the experts make of one chunk, whichever form it has."""
  if not isinstance(part, Tokens):
    options = {"place_R": part.place_R, "backend": backend}
    return expert_ffn(part.rows, weights, activation, part.group_sizes_e, **options)
  return moe_ffn(
    part.rows,
    part.expert_TK,
    part.weight_TK,
    weights.gate_eDF,
    weights.up_eDF,
    weights.down_eFD,
    activation=activation,
    up_bias_EF=weights.up_bias_eF,
    down_bias_ED=weights.down_bias_eD,
    backend=backend,
  )


def expert_stage(
  part: Rows | Tokens,
  weights: ExpertWeights,
  activation: str,
  *,
  shards: int = 1,
  replicas: int = 1,
  gather_experts: bool = False,
  tensor: int = 1,
  backend: str = "auto",
) -> Rows | Tokens:
  """The experts on one chunk of rows, with weights spread over devices (inside `shard_map`).

  Where `shards` devices share an expert, each holds F / shards of its hidden width. Tutel's
  adaptive parallelism says who moves: with r replicas, the weights are gathered within r groups of
  shards / r devices, every row is sent to one device of each group, and the r partial sums are
  added. r = 1 moves weights only, r = shards rows only; r = 0 gathers the weights of all experts.
  Results and gradients do not depend on r.

  Args:
    part: this device's rows, or tokens.
    weights: this device's share of the weights.
    activation: see `expert_ffn`.
    shards: devices on the shard axis.
    replicas: Tutel's r, 0 or a divisor of `shards`.
    gather_experts: gather over the expert axis too (r = 0).
    tensor: devices on the tensor axis; each adds a partial sum.
    backend: see `expert_ffn`.
  """
  weights = _gather_weights(weights, shards, max(replicas, 1), gather_experts)
  # The output's bias counts once among the partial sums.
  partial = replicas > 1 or tensor > 1
  if weights.down_bias_eD is not None and partial:
    first = jnp.array(True)
    if replicas > 1:
      first &= jax.lax.axis_index("shard") < shards // replicas
    if tensor > 1:
      first &= jax.lax.axis_index("tensor") == 0
    bias_eD = jnp.where(first, weights.down_bias_eD, 0)
    weights = dataclasses.replace(weights, down_bias_eD=bias_eD)
  if replicas <= 1:
    return dataclasses.replace(part, rows=_compute(part, weights, activation, backend))
  # Devices at the same place of each group hold together one whole expert and share their rows.
  group = shards // replicas
  peers = [[place + group * r for r in range(replicas)] for place in range(group)]
  repeat = lambda a: jax.lax.all_gather(a, "shard", axis_index_groups=peers)
  repeated = jax.tree.map(repeat, part)
  sums = [
    _compute(jax.tree.map(lambda a, r=r: a[r], repeated), weights, activation, backend)
    for r in range(replicas)
  ]
  added = jax.lax.psum_scatter(jnp.stack(sums), "shard", axis_index_groups=peers)
  return dataclasses.replace(part, rows=added)


def _gather_weights(
  weights: ExpertWeights, shards: int, replicas: int, gather_experts: bool
) -> ExpertWeights:
  """Collects the slices of the hidden width, and all experts if asked; gradients scatter back."""
  group = shards // replicas
  groups = [[group * r + place for place in range(group)] for r in range(replicas)]

  def gather(w: Array | None, hidden: int | None) -> Array | None:
    if w is None:
      return None
    if group > 1 and hidden is not None:
      w = jax.lax.all_gather(w, "shard", axis=hidden, axis_index_groups=groups, tiled=True)
    return jax.lax.all_gather(w, "expert", axis=0, tiled=True) if gather_experts else w

  up, down = gather(weights.up_eDF, 2), gather(weights.down_eFD, 1)
  assert up is not None
  assert down is not None
  return ExpertWeights(
    up_eDF=up,
    gate_eDF=gather(weights.gate_eDF, 2),
    down_eFD=down,
    up_bias_eF=gather(weights.up_bias_eF, 1),
    down_bias_eD=gather(weights.down_bias_eD, None),
  )
