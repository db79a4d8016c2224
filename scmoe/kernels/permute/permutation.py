"""Which choice fills which row of a buffer, and functions that move rows there and back.

    T  tokens      K  choices per token      R  rows of a buffer      D  width      E  experts

A buffer has R rows; each choice (t, k) has at most one of them. Worked example: three tokens with
one choice each, for experts 1, 0 and 1, and a buffer of two rows for each of two experts:

    row_TK  = [[2], [0], [3]]       token 0 stands in row 2, token 1 in row 0, token 2 in row 3
    copy_R  = [1, -1, 0, 2]         rows 0, 2 and 3 hold choices 1, 0 and 2

`gather_rows`, `weigh_rows`, `sum_rows` and `sum_chunks` compute results and gradients by gathers:
by `row_TK`, or by `copy_R` and `token_R`. They need no scatter-add and no atomic, so results do not
depend on the order in which a GPU runs its blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from scmoe.kernels import launch
from scmoe.kernels.permute import positions

_BLOCK = 32  # Choices that are compared with each other; blocks of 128 take 4 times as long.
_SUMMED = 512  # The most rows whose running sums one product computes.
_ADDED = 16  # The most rows that are added one by one.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permutation:
  """A bijection between the choices that have a row of a buffer and the filled rows.

  Attributes:
    row_TK: integers, row of each choice; R or more for a choice without a row.
    copy_R: int32, the choice t·K + k that fills each row; -1 for an empty row.
    token_R: int32, the token t of the choice that fills each row; -1 for an empty row.
  """

  row_TK: Array
  copy_R: Array
  token_R: Array


def make_permutation(row_TK: Array, num_rows: int) -> Permutation:
  """The permutation in which each choice has the row `row_TK`; `num_rows` or more means no row.

  Args:
    row_TK: integers from 0 on; those below R differ from each other.
    num_rows: R, static.
  """
  # The choices are listed in the order in which the router's kernel writes them, all first choices
  # before all second ones, so that XLA need not transpose what that kernel has written.
  copy_KT = jnp.arange(row_TK.size, dtype=jnp.int32).reshape(row_TK.shape).T
  nobody_R = jnp.full((num_rows,), -1, jnp.int32)
  copy_R = nobody_R.at[row_TK.T.reshape(-1)].set(
    copy_KT.reshape(-1), mode="drop", unique_indices=True
  )
  return permutation_of(row_TK, copy_R)


def permutation_of(row_TK: Array, copy_R: Array) -> Permutation:
  """The `Permutation` of two arrays: the row of each choice, and the choice that fills each row.

  The caller sees to it that they are inverse to each other.
  """
  return Permutation(row_TK, copy_R, jnp.where(copy_R < 0, -1, copy_R // row_TK.shape[1]))


def running_positions(expert_TK: Array, num_experts: int) -> tuple[Array, Array]:
  """Each choice's position among those of its expert, and how many choices each expert has.

  A position is the number of earlier choices, in the order of the array, of the same expert. Where
  `launch.runs_ptx` is true, a kernel computes positions and counts if it takes the sizes
  (`positions`). Otherwise XLA compares the choices of each block of 32 with each other, and adds
  the counts of earlier blocks.

  Worked example: five tokens that chose the experts 0, 2, 0, 0, 2 of three have the positions 0, 0,
  1, 2, 1; the counts are 3, 0, 2.

  Args:
    expert_TK: integer expert ids of any shape, in row-major order; an id outside [0, E) is no
      choice.
    num_experts: E.

  Returns:
    position_TK, int32, unspecified where there is no choice; count_E, int32, each expert's choices.

  Raises:
    ValueError: the ids are not integers.
  """
  if not jnp.issubdtype(expert_TK.dtype, jnp.integer):
    raise ValueError(f"expert ids must be integers, got {expert_TK.dtype}")
  if launch.runs_ptx() and positions.takes(expert_TK.size, num_experts):
    expert_N = expert_TK.reshape(-1).astype(jnp.int32)
    position_N, count_E = positions.running_positions_kernel(expert_N, num_experts)
    return position_N.reshape(expert_TK.shape), count_E
  made_TK = (expert_TK >= 0) & (expert_TK < num_experts)
  id_N = jnp.where(made_TK, expert_TK, num_experts).reshape(-1).astype(jnp.int32)
  blocks = max(1, -(-id_N.size // _BLOCK))
  id_CB = jnp.pad(id_N, (0, blocks * _BLOCK - id_N.size), constant_values=num_experts)
  id_CB = id_CB.reshape(blocks, _BLOCK)
  index_B = jnp.arange(_BLOCK, dtype=jnp.int32)
  equal_CBB = id_CB[:, :, None] == id_CB[:, None, :]
  within_CB = jnp.sum(equal_CBB & (index_B[None, :] < index_B[:, None]), axis=2, dtype=jnp.int32)
  ids_E = jnp.arange(num_experts, dtype=jnp.int32)
  # Each element of the reduction adds up eight comparisons, since the time of XLA's reduction grows
  # with its number of elements.
  id_CSJ = id_CB.reshape(blocks, _BLOCK // 8, 8)
  count_CSE = sum((id_CSJ[:, :, j, None] == ids_E).astype(jnp.int32) for j in range(8))
  before_CE, count_E = _running_sums(jnp.sum(count_CSE, axis=1), _BLOCK)
  before_CB = jnp.take_along_axis(before_CE, jnp.minimum(id_CB, num_experts - 1), axis=1)
  position_N = (within_CB + before_CB).reshape(-1)[: id_N.size]
  return position_N.reshape(expert_TK.shape), count_E


def _running_sums(count_CE: Array, largest: int) -> tuple[Array, Array]:
  """For each row the sum of the rows before it, and the sum of all rows.

  Products with a triangular matrix compute the sums of up to 512 rows, without rounding as long as
  these sums stay below 2²⁴. More rows are cut into runs of 512, whose totals are added up in the
  same way. Up to 16 rows are added one by one instead.

  Args:
    count_CE: int32 counts.
    largest: no count is larger. Up to 256 the counts are exact in bfloat16, so products of up to
      512 rows then multiply in bfloat16 and add up in float32.
  """
  blocks, num_experts = count_CE.shape
  if blocks <= _ADDED:
    sums = list(itertools.accumulate(count_CE, initial=jnp.zeros_like(count_CE[0])))
    return jnp.stack(sums[:-1]), sums[-1]
  small = blocks <= _SUMMED
  outer, inner = (1, blocks) if small else (-(-blocks // _SUMMED), _SUMMED)
  dtype = jnp.bfloat16 if largest <= 256 else jnp.float32
  count_OBE = jnp.pad(count_CE, ((0, outer * inner - blocks), (0, 0)))
  count_OBE = count_OBE.reshape(outer, inner, num_experts)
  within_OBE = jnp.einsum(
    "ij,oje->oie",
    jnp.tri(inner, k=-1, dtype=dtype),
    count_OBE.astype(dtype),
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  ).astype(jnp.int32)
  count_OE = within_OBE[:, -1] + count_OBE[:, -1]
  if small:
    return within_OBE[0], count_OE[0]
  before_OE, count_E = _running_sums(count_OE, largest * inner)
  before_CE = within_OBE + before_OE[:, None]
  return before_CE.reshape(-1, num_experts)[:blocks], count_E


# -- moving rows ----------------------------------------------------------------------------------


def take_rows(x_MN: Array, index_R: Array) -> Array:
  """Row index[r] of x for each r; zeros where the index is negative or past x's last row."""
  if not x_MN.shape[0]:
    return jnp.zeros((*index_R.shape, *x_MN.shape[1:]), x_MN.dtype)
  # As an unsigned number a negative index is a large one, so one comparison tests both bounds.
  inside_R = index_R.astype(jnp.uint32) < x_MN.shape[0]
  inside = inside_R.reshape(*index_R.shape, *(1,) * (x_MN.ndim - 1))
  return jnp.where(inside, jnp.take(x_MN, index_R, axis=0, mode="clip"), 0)


def take_words(x_MN: Array, index_R: Array) -> Array:
  """Does `take_rows` in words of 4 bytes.

  A row must be an even number of 2-byte elements. On a GPU `take_rows` is slower: XLA's gather
  moves about as many elements a second, whether these have 2 or 4 bytes. Not differentiable.
  """
  rows, width = x_MN.shape
  words_MW = lax.bitcast_convert_type(x_MN.reshape(rows, width // 2, 2), jnp.uint32)
  rows_RW = take_rows(words_MW, index_R)
  return lax.bitcast_convert_type(rows_RW, x_MN.dtype).reshape(index_R.shape[0], width)


def sum_copies(
  rows_RD: Array,
  row_TK: Array,
  weight_TK: Array | None = None,
  *,
  joined: bool = False,
  arrived: bool = False,
) -> Array:
  """Σ_k weight[t, k] · rows[row[t, k]] in the type of the rows, accumulated in float32 (or wider).

  Row numbers outside [0, R) stand for a row of zeros. To differentiate, use `sum_rows`: its
  gradient is a gather, and the gradient that JAX derives for this function is a scatter-add.

  Args:
    rows_RD: a buffer's rows.
    row_TK: number of the row for each t and k.
    weight_TK: factors; None: all are 1.
    joined: whether XLA may fuse the loop over rows with the reader of its result. Set it only if no
      reader reduces over rows or columns: fused with such a reader, the loop would be slower.
    arrived: whether an exchange has brought the rows. XLA would compute their sum in one kernel
      with operations that read `row_TK` too, and these in one with the first operations of the
      dense path. That kernel, and all that follows it, would wait for the exchange. Behind a
      barrier the sum shares no operand with them.
  """
  if arrived:
    rows_RD, row_TK = lax.optimization_barrier((rows_RD, row_TK))
  return _sum_copies((rows_RD,), (row_TK,), weight_TK, joined)


def _sum_copies(
  chunks: Sequence[Array],
  rows: Sequence[Array],
  weight_TK: Array | None = None,
  joined: bool = False,
) -> Array:
  """`sum_copies` for a buffer in several arrays: `chunks`, and in `rows` the row_TK of each.

  Each k of each array is a term of its own, so that XLA fuses the gathers into one loop and makes
  no [T, K, D] array.
  """
  wide = jnp.promote_types(chunks[0].dtype, jnp.float32)
  tokens, choices = rows[0].shape
  total_TD = jnp.zeros((tokens, chunks[0].shape[1]), wide)
  for k in range(choices):
    for rows_RD, row_TK in zip(chunks, rows):
      term_TD = take_rows(rows_RD, row_TK[:, k]).astype(wide)
      if weight_TK is not None:
        term_TD = term_TD * weight_TK[:, k : k + 1].astype(wide)
      total_TD = total_TD + term_TD
  total_TD = total_TD.astype(chunks[0].dtype)
  return total_TD if joined else lax.optimization_barrier(total_TD)


def gather_rows(x_TD: Array, permutation: Permutation, *, sent: bool = False) -> Array:
  """rows[r] = x[token of r], zero where no choice fills row r: [T, D] -> [R, D].

  Args:
    x_TD: tokens.
    permutation: of the rows.
    sent: whether an exchange sends the rows, so that their gradient arrives by one (`sum_copies`).
  """
  return _gather_rows(sent, x_TD, permutation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(sent: bool, x_TD: Array, permutation: Permutation) -> Any:
  del sent
  return take_rows(x_TD, permutation.token_R)


def _gather_rows_fwd(sent, x_TD, permutation):
  return _gather_rows(sent, x_TD, permutation), permutation


def _gather_rows_bwd(sent, permutation, bar_RD):
  bar_TD = sum_copies(bar_RD, permutation.row_TK, arrived=sent)
  return bar_TD, zero_cotangents(permutation)


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@jax.custom_vjp
def weigh_rows(rows_RD: Array, weight_TK: Array, permutation: Permutation) -> Array:
  """rows[r] · weight of its choice, in the rows' type; 0 · rows[r] if no choice fills row r."""
  weight_R = take_rows(weight_TK.reshape(-1), permutation.copy_R)
  return (weight_R[:, None] * rows_RD).astype(rows_RD.dtype)


def _weigh_rows_fwd(rows_RD, weight_TK, permutation):
  return weigh_rows(rows_RD, weight_TK, permutation), (rows_RD, weight_TK, permutation)


def _weigh_rows_bwd(residuals, bar_RD):
  rows_RD, weight_TK, permutation = residuals
  rows_bar_RD = weigh_rows(bar_RD, weight_TK, permutation)
  dot_R = (rows_RD.astype(weight_TK.dtype) * bar_RD.astype(weight_TK.dtype)).sum(-1)
  return rows_bar_RD, take_rows(dot_R, permutation.row_TK), zero_cotangents(permutation)


weigh_rows.defvjp(_weigh_rows_fwd, _weigh_rows_bwd)


def sum_rows(rows_RD: Array, weight_TK: Array | None, permutation: Permutation) -> Array:
  """y[t] = Σ_k weight[t, k] · rows[row[t, k]]; a choice without a row adds its weight · 0.

  Sums are in float32 (or wider), in the order of k; the result has the rows' type. None stands for
  weights of 1.
  """
  return sum_chunks((rows_RD,), weight_TK, (permutation,))


@jax.custom_vjp
def sum_chunks(
  chunks: tuple[Array, ...], weight_TK: Array | None, permutations: tuple[Permutation, ...]
) -> Array:
  """`sum_rows` for a buffer that lies in several arrays, `chunks`, each with its own permutation.

  A choice has a row in at most one of the arrays. The gradient of each array is a gather of its
  own, which need not wait until the others' gradients are computed.
  """
  return _sum_copies(chunks, [p.row_TK for p in permutations], weight_TK)


def _sum_chunks_fwd(chunks, weight_TK, permutations):
  kept = None if weight_TK is None else chunks
  # An empty array tells the backward pass the rows' type, since the rows may not be kept.
  like = jnp.zeros((0,), chunks[0].dtype)
  return sum_chunks(chunks, weight_TK, permutations), (kept, like, weight_TK, permutations)


def _sum_chunks_bwd(residuals, y_bar_TD):
  chunks, like, weight_TK, permutations = residuals
  bars = []
  for permutation in permutations:
    y_bar_RD = take_rows(y_bar_TD, permutation.token_R)
    if weight_TK is not None:
      weight_R = take_rows(weight_TK.reshape(-1), permutation.copy_R)
      y_bar_RD = weight_R[:, None] * y_bar_RD
    bars.append(y_bar_RD.astype(like.dtype))
  none = zero_cotangents(permutations)
  if weight_TK is None:
    return tuple(bars), None, none
  columns = []
  for k in range(weight_TK.shape[1]):
    row_TD = sum(
      take_rows(rows_RD, permutation.row_TK[:, k]).astype(weight_TK.dtype)
      for rows_RD, permutation in zip(chunks, permutations)
    )
    columns.append((row_TD * y_bar_TD).sum(-1))
  return tuple(bars), jnp.stack(columns, axis=1).astype(weight_TK.dtype), none


sum_chunks.defvjp(_sum_chunks_fwd, _sum_chunks_bwd)


def zero_cotangents(tree: Any) -> Any:
  """Zero cotangents (of type float0) for a tree of integer arrays."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
