"""Makes a model of some experts of another one, in a given order: `--place` and `--prune`.

Everything that belongs to an expert moves with it: its matrices and biases, its column of every
gate of the layer, and its numbers in the balancing state. Zero experts, which have no matrices,
keep the last ids. All other parameters, shared experts among them, stay as they are.

If all experts are taken, the new model is the same function with other ids: it computes the same
products. A softmax adds up its terms in another order, so probabilities may differ by float
rounding, and of two experts with equal scores a router takes the one that has the smaller id now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

_MOE = "params.stages.moe."
_EXPERTS, _GATES, _STATE = _MOE + "experts.", _MOE + "router_gate.", "router."
# The arrays of the router state whose last dimension is the experts.
_STATE_COLUMNS = ("bias", "error", "error_before")


def take(
  leaves: Mapping[str, Array],
  index_LE: Int[np.ndarray, "L E"],
  zero_experts: int,
  shapes: Mapping[str, Any],
  gate_arrays: Collection[str],
) -> dict[str, Array]:
  """The parameters and router state of a model with the experts index[l, 0], index[l, 1], ...

  Args:
    leaves: parameters and router state of the source by dotted name; its gates are scmoe's own.
    index_LE: for each MoE layer, the experts to take, by their id in the source.
    zero_experts: number of zero experts, all of which are taken.
    shapes: `jax.ShapeDtypeStruct` with sharding of each array of the new model, by name.
    gate_arrays: names of the gates' arrays whose last dimension is the experts.
  """
  found = {}
  for name, leaf in leaves.items():
    last = name.rpartition(".")[2]
    if name.startswith(_EXPERTS):
      found[name] = _taken(leaf, index_LE, 1, shapes[name])
    elif (name.startswith(_GATES) and last in gate_arrays) or (
      name.startswith(_STATE) and last in _STATE_COLUMNS
    ):
      found[name] = _taken(leaf, _with_zero(index_LE, leaf, zero_experts), -1, shapes[name])
    else:
      found[name] = leaf
  return found


def gate_norms(leaves: Mapping[str, Array], num_experts: int) -> np.ndarray:
  """The Euclidean norm of each expert's weights in its layer's gate: float64 [L, E].

  Of several gates (`router.compat.gates`) the mean.

  Args:
    leaves: parameters by dotted name, with linear or affine gates.
    num_experts: E, without zero experts.
  """
  weights = [x for name, x in leaves.items() if name.startswith(_GATES) and name.endswith("weight")]
  norms = [np.linalg.norm(np.asarray(x, np.float64), axis=1) for x in weights]  # [L, D, E]
  return np.mean(norms, 0)[:, :num_experts]


def _with_zero(index_LE: np.ndarray, leaf: Array, zero_experts: int) -> np.ndarray:
  total = leaf.shape[-1]
  last = np.arange(total - zero_experts, total)
  return np.concatenate([index_LE, np.tile(last, (len(index_LE), 1))], 1)


def _taken(leaf: Array, index_LE: np.ndarray, axis: int, shape: Any) -> Array:
  """Slices of one dimension, others in each layer."""
  axis %= leaf.ndim
  wide = (len(index_LE), *(1 if i != axis else index_LE.shape[1] for i in range(1, leaf.ndim)))
  run = lambda x, index: jnp.take_along_axis(x, index.reshape(wide), axis)
  return jax.jit(run, out_shardings=shape.sharding)(leaf, jnp.asarray(index_LE, jnp.int32))
