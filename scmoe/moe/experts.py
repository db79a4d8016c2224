"""rows -> rows: the feed-forward networks of this device's experts.

Rows come grouped by expert with equal room for each, [e, R, D], so that a batched matrix product
computes them. Empty rows are zero and whatever they become is never read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from scmoe.layers.mlp import activate


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


def expert_ffn(rows_eRD: Array, weights: ExpertWeights, activation: str) -> Array:
  """down(act(up(rows))) for every expert, in the rows' dtype with float32 accumulation.

  Args:
    rows_eRD: rows of each expert.
    weights: see `ExpertWeights`; cast to the rows' dtype.
    activation: a word of `scmoe.layers.mlp.ACTIVATIONS`; gated ones use `gate_eDF`.
  """
  dtype = rows_eRD.dtype

  def project(x, w, bias):
    y = jnp.einsum("erd,edf->erf", x, w.astype(dtype))
    return y if bias is None else y + bias.astype(dtype)[:, None, :]

  up_eRF = checkpoint_name(project(rows_eRD, weights.up_eDF, weights.up_bias_eF), "moe_hidden")
  gate_eRF = None
  if weights.gate_eDF is not None:
    gate_eRF = checkpoint_name(project(rows_eRD, weights.gate_eDF, None), "moe_hidden")
  hidden_eRF = activate(activation, up_eRF, gate_eRF)
  return project(hidden_eRF, weights.down_eFD, weights.down_bias_eD)
