"""One token's logits from partial sums, its K best experts and their probabilities, in one kernel.

    P  parts of the logits' sums      E  experts      L  E, rounded up to a multiple of 64
    K  experts per token              M  rows of a tile

XLA takes several kernels for that, and each waits for the one before. This kernel does not sort. It
counts for every expert how many logits are larger than the expert's own, or equal and of a smaller
index: this is the expert's place. Example: logits 3, 9, 5 have places 2, 0, 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import load_as
from scmoe.kernels.launch import compiled, interpretation

_ROWS = 64  # Rows of a tile (M), and the number of parts (P) that the kernel takes.
_MOST = 256  # The most experts: comparisons of 64 with all fit a warpgroup's registers.


def takes(parts: int, num_experts: int) -> bool:
  """Whether the kernel takes these sizes: 64 parts, and a multiple of 8 experts up to 256."""
  return parts == _ROWS and num_experts % 8 == 0 and num_experts <= _MOST


def top_k_of_sums(sums_PE: Array, k: int) -> tuple[Array, Array, Array]:
  """The logits, the K experts with the largest, and these experts' softmax probabilities.

  Among equal logits the expert with the smaller index comes first. If a logit is NaN, the choice is
  unspecified; its ids are valid.

  Args:
    sums_PE: float32, partial sums of the logits, of a size that the kernel `takes`.
    k: K, at most E.

  Returns:
    Logits Σ_p sums[p], float32 [E]; experts, int32 [K], best first; their probabilities by the
    softmax over all E logits, float32 [K].
  """
  return _top_k(sums_PE, k=k, simulation=interpretation())


@functools.partial(jax.jit, static_argnames=("k", "simulation"))
def _top_k(sums_PE: Array, *, k: int, simulation: Any) -> tuple[Array, Array, Array]:
  del simulation  # only makes jit compile anew for each simulation
  experts = sums_PE.shape[1]
  padded = -(-experts // _ROWS) * _ROWS
  tile = plgpu.Layout.WGMMA
  down, across = tile.reduce(1), tile.reduce(0)  # layouts: one number a row, one a column

  def body(sums, logits, expert, share, values, numbers, shares):
    own_E = jnp.sum(load_as(sums, tile), axis=0)
    if padded != experts:
      values[...] = plgpu.layout_cast(jnp.full((padded,), -jnp.inf, jnp.float32), across)
      plgpu.commit_smem()
    values[:experts] = own_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(values.at[:experts], logits)
    shape = _ROWS, padded
    column_ML = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile)
    row_ML = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile)
    one, none = jnp.full_like(column_ML, 1.0, jnp.float32), jnp.zeros_like(column_ML, jnp.float32)
    value_ML = lax.broadcast_in_dim(load_as(values, across), shape, (1,))
    for first in range(0, padded, _ROWS):
      mine_M = load_as(values.at[first : first + _ROWS], down)
      mine_ML = lax.broadcast_in_dim(mine_M, shape, (0,))
      before = (value_ML == mine_ML) & (column_ML < row_ML + first)
      larger_ML = jnp.where((value_ML > mine_ML) | before, one, none)
      numbers[first : first + _ROWS] = jnp.sum(larger_ML, axis=1)
    plgpu.commit_smem()
    # Every row of the tile holds all logits, so each warp computes the whole softmax for itself.
    most_ML = lax.broadcast_in_dim(jnp.max(value_ML, axis=1), shape, (0,))
    part_ML = jnp.exp(value_ML - most_ML)
    total_M = jnp.sum(part_ML, axis=1)
    place_ML = lax.broadcast_in_dim(load_as(numbers, across), shape, (1,))
    plgpu.commit_smem()  # no thread overwrites `numbers` before all threads have read it
    for first in range(0, -(-k // _ROWS) * _ROWS, _ROWS):
      is_here = place_ML == (row_ML + first).astype(jnp.float32)
      id_M = jnp.sum(jnp.where(is_here, column_ML.astype(jnp.float32), none), axis=1)
      numbers[first : first + _ROWS] = jnp.minimum(id_M, jnp.full_like(id_M, experts - 1))
      part_M = jnp.sum(jnp.where(is_here, part_ML, none), axis=1)
      shares[first : first + _ROWS] = part_M / total_M
    plgpu.commit_smem()
    for i in range(k):
      expert[i] = numbers[i].astype(jnp.int32)
      share[i] = shares[i]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  run = compiled(
    body,
    out_type=(
      jax.ShapeDtypeStruct((experts,), jnp.float32),
      jax.ShapeDtypeStruct((k,), jnp.int32),
      jax.ShapeDtypeStruct((k,), jnp.float32),
    ),
    scratch_types=[plgpu.SMEM((padded,), jnp.float32)] * 3,
  )
  return run(sums_PE)
