"""Where each token's K copies go: the metadata of the permutation, computed on the device.

    T  tokens      K  experts per token      E  experts      R  rows of the padded layout
    C  blocks of `_BLOCK` tokens

No sort: a row's position within its expert is the number of earlier tokens that chose the same
expert, a running sum of a 0/1 matrix, which two small triangular products compute exactly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels.grouped_matmul.layout import GroupLayout, make_layout

_BLOCK = 128


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["row_TK", "slot_R", "layout"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PermutePlan:
  """A bijection between the T·K (token, choice) slots and the used rows of the padded layout.

  Attributes:
    row_TK: int32, row of each slot; R (out of range) for a choice of no expert.
    slot_R: int32, slot t·K + k behind each row; -1 for padding.
    layout: tiles of the rows, in expert order; within an expert, in token order.
  """

  row_TK: jax.Array
  slot_R: jax.Array
  layout: GroupLayout

  @property
  def token_R(self) -> jax.Array:
    """Token behind each row; -1 for padding."""
    return jnp.where(self.slot_R < 0, -1, self.slot_R // self.row_TK.shape[1])


def make_plan(expert_TK: jax.Array, num_experts: int, tile: int) -> PermutePlan:
  """The permutation to expert order, each expert's rows padded to whole tiles.

  Args:
    expert_TK: integer expert ids, distinct within a token; an id outside [0, E) means the choice
      goes to no expert.
    num_experts: E.
    tile: rows of a tile.

  Raises:
    ValueError: the ids are not a matrix of integers.
  """
  if expert_TK.ndim != 2 or not jnp.issubdtype(expert_TK.dtype, jnp.integer):
    raise ValueError(
      f"expert ids must be integers [T, K], got {expert_TK.dtype} of shape {expert_TK.shape}"
    )
  tokens, choices = expert_TK.shape
  place_TE, sizes_E = _places(expert_TK, num_experts)
  layout = make_layout(sizes_E, tokens * choices, tile)
  row_TE = place_TE + (layout.tile_starts_G * layout.tile)[None, :]
  valid_TK = (expert_TK >= 0) & (expert_TK < num_experts)
  row_TK = jnp.take_along_axis(row_TE, jnp.where(valid_TK, expert_TK, 0), axis=1)
  row_TK = jnp.where(valid_TK, row_TK, layout.num_rows)
  slot_TK = jnp.arange(tokens * choices, dtype=jnp.int32).reshape(tokens, choices)
  slot_R = jnp.full((layout.num_rows,), -1, jnp.int32)
  slot_R = slot_R.at[row_TK.reshape(-1)].set(slot_TK.reshape(-1), mode="drop", unique_indices=True)
  return PermutePlan(row_TK=row_TK, slot_R=slot_R, layout=layout)


def _places(expert_TK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """For each token and expert, how many earlier tokens chose the expert; and the totals."""
  tokens = expert_TK.shape[0]
  blocks = -(-tokens // _BLOCK)
  ids_E = jnp.arange(num_experts, dtype=expert_TK.dtype)
  chosen_TE = jnp.any(expert_TK[:, :, None] == ids_E[None, None, :], axis=1)
  chosen_TE = jnp.pad(chosen_TE, ((0, blocks * _BLOCK - tokens), (0, 0)))
  # 0/1 entries and sums up to 128 are exact in bfloat16 products with float32 accumulation.
  chosen_CBE = chosen_TE.reshape(blocks, _BLOCK, num_experts).astype(jnp.bfloat16)
  earlier_BB = jnp.tri(_BLOCK, k=-1, dtype=jnp.bfloat16)
  within_CBE = jnp.einsum("ij,cje->cie", earlier_BB, chosen_CBE, preferred_element_type=jnp.float32)
  total_CE = jnp.sum(chosen_CBE, axis=1, dtype=jnp.float32)
  # Counts up to T < 2**24 are exact in float32.
  before_CE = jnp.dot(
    jnp.tri(blocks, k=-1, dtype=jnp.float32), total_CE, precision=lax.Precision.HIGHEST
  )
  place_TE = (within_CBE + before_CE[:, None, :]).reshape(-1, num_experts)[:tokens]
  return place_TE.astype(jnp.int32), jnp.sum(total_CE, axis=0).astype(jnp.int32)
