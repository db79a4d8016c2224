"""Grouped products on any device, by XLA: a dense product per row tile, or one for all groups.

    R  rows of the tiles      K, N  widths      G  groups      I  row tiles      B  rows of a tile

The cost grows with the rows, and padding adds at most one part-filled tile per group. Masked dense
products of all rows with every group's matrix would cost G times as much. Tiles run one after the
other, so a tile must be large enough to fill the device, and small enough to waste little memory:
see `choose_tile`. The experts' network takes a tile from its first product to its last. So the
arrays between the two exist for one tile only, but for pre-activations that `forward` returns.

If every group is one tile (`GroupLayout.one_tile_each`, padded experts), one product serves all
groups instead, except in `grouped_weights`. On Hopper it is about as fast as a kernel's, but XLA
does not fuse the activation into its end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels.grouped_matmul import fp8
from scmoe.kernels.grouped_matmul.activations import activate, activation_vjp
from scmoe.kernels.grouped_matmul.layout import GroupLayout
from scmoe.kernels.grouped_matmul.weights import Execution, FFNWeights
from scmoe.kernels.permute import Permutation, take_rows

ROW_TILE: int | None = None  # tiles may have any size; `choose_tile` chooses one


def choose_tile(num_rows: int, num_groups: int) -> int:
  """Rows of a tile, 8 to 512: a sixteenth of a balanced group, or up to a quarter of a small one.

  The layout has room for a part-filled tile of every group. With tiles of a sixteenth of a group,
  padding adds about 6 % to the rows at most. A product should have 64 rows, though. If 64 is more
  than a sixteenth, the tile has 64 rows or a quarter of the group, whichever is less, and padding
  adds about 25 % at most. The result is rounded up to a multiple of 8 and lies from 8 to 512. So
  padding may add more to small groups: for groups of 36 rows a tile has 16, and a group of 33 rows
  then has 15 empty ones.

  Worked example: 1,024 rows of 8 experts, 128 each if balanced: a sixteenth would be 8 rows, so it
  is a quarter, 32.
  """
  group = -(-num_rows // max(num_groups, 1))
  rows = max(group / 16, min(group / 4, 64))
  return min(max(math.ceil(rows / 8) * 8, 8), 512)


def accumulation_type(*dtypes) -> jnp.dtype:
  """The type in which products of these types are added up: float32, or float64 if one is."""
  result = jnp.dtype(jnp.float32)
  for dtype in dtypes:
    result = jnp.promote_types(result, dtype)
  return result


# -- products of one tile, and of all groups at once ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Products:
  """The operations of an expert's network, for one tile or for all groups at once.

  Attributes:
    product: (rows, matrix, transpose=False) -> rows @ matrix, or @ matrix.T.
    outer: (lhs rows, rhs rows) -> lhs.T @ rhs, the form of a matrix's gradient.
    total: rows -> their sum, for all groups at once the sum of each group, in the accumulation
      type.
    of_rows: bias -> the bias of each row.
  """

  product: Callable[..., jax.Array]
  outer: Callable[[jax.Array, jax.Array], jax.Array]
  total: Callable[[jax.Array], jax.Array]
  of_rows: Callable[[jax.Array], jax.Array]

  def plus(self, rows: jax.Array, bias: jax.Array | None) -> jax.Array:
    return rows if bias is None else rows + self.of_rows(bias).astype(rows.dtype)


def _of_tile(precision) -> _Products:
  """The operations of one tile; products are in the accumulation type."""

  def dot(lhs, rhs, left, right):
    dtype = accumulation_type(lhs.dtype, rhs.dtype)
    contracted = (((left,), (right,)), ((), ()))
    return lax.dot_general(lhs, rhs, contracted, precision=precision, preferred_element_type=dtype)

  return _Products(
    product=lambda lhs_BK, rhs, transpose=False: dot(lhs_BK, rhs, 1, 1 if transpose else 0),
    outer=lambda lhs_BK, rhs_BN: dot(lhs_BK, rhs_BN, 0, 0),
    total=lambda x_BN: jnp.sum(x_BN, axis=0, dtype=accumulation_type(x_BN.dtype)),
    of_rows=lambda bias_N: bias_N,
  )


def _of_groups(layout: GroupLayout, precision, dtype=None) -> _Products:
  """The operations of all groups at once; products are in `dtype`, else in the operands' type."""
  groups = layout.num_groups
  by_group = lambda rows_RN: rows_RN.reshape(groups, layout.tile, rows_RN.shape[1])

  def options(*operands):
    return {
      "precision": precision,
      "preferred_element_type": dtype or jnp.result_type(*operands),
    }

  def product(lhs_RK, rhs_GKN, transpose=False):
    if groups == 1:  # `train.remat=dots` does not save products with a batch dimension
      rhs_KN = rhs_GKN[0].T if transpose else rhs_GKN[0]
      return jnp.matmul(lhs_RK, rhs_KN, **options(lhs_RK, rhs_GKN))
    equation = "gbk,gnk->gbn" if transpose else "gbk,gkn->gbn"
    out_GBN = jnp.einsum(equation, by_group(lhs_RK), rhs_GKN, **options(lhs_RK, rhs_GKN))
    return out_GBN.reshape(lhs_RK.shape[0], out_GBN.shape[2])

  def outer(lhs_RK, rhs_RN):
    lhs_GBK, rhs_GBN = by_group(lhs_RK), by_group(rhs_RN)
    return jnp.einsum("gbk,gbn->gkn", lhs_GBK, rhs_GBN, **options(lhs_RK, rhs_RN))

  def total(x_RN):
    return jnp.sum(by_group(x_RN), axis=1, dtype=accumulation_type(x_RN.dtype))

  return _Products(product, outer, total, lambda bias_GN: per_row(bias_GN, layout))


def _each_tile(
  function: Callable[..., Any],
  layout: GroupLayout,
  rows: Any,
  of_group: Any,
) -> Any:
  """Calls function(a tile's rows, its group's slices) for every tile, one after the other.

  Args:
    function: takes a tree like `rows` with arrays [B, ...] and one like `of_group` with arrays
      [...]. It gives two trees: the tile's results, arrays [B, ...], and arrays that are added up
      over the tiles of a group. None stands for an empty tree.
    layout: the tiles.
    rows: tree of arrays [R, ...].
    of_group: tree of arrays [G, ...].

  Returns:
    The results of all tiles as [R, ...], and each group's sums as [G, ...]; an empty group's are
    exactly zero.
  """
  groups, tile_group_I = layout.num_groups, layout.tile_group_I
  num_tiles = tile_group_I.shape[0]  # of those that there is room for
  if not num_tiles:
    return _no_tile(function, layout, rows, of_group)
  tiles = jax.tree.map(lambda a: a.reshape(num_tiles, layout.tile, *a.shape[1:]), rows)
  used_I = jnp.arange(num_tiles) < layout.num_tiles[0]

  def one_tile(arguments):
    tile, group = arguments
    pick = lambda a: lax.dynamic_index_in_dim(a, group, keepdims=False)
    return function(tile, jax.tree.map(pick, of_group))

  def step(sums, arguments):
    tile, group, used = arguments
    out, parts = one_tile((tile, group))

    def add(sum_G, part):
      old = lax.dynamic_index_in_dim(sum_G, group, keepdims=False)
      # A tile that is not in use may hold anything, and must add nothing.
      return lax.dynamic_update_index_in_dim(sum_G, old + jnp.where(used, part, 0), group, 0)

    return jax.tree.map(add, sums, parts), out

  _, parts = jax.eval_shape(one_tile, (jax.tree.map(lambda a: a[0], tiles), tile_group_I[0]))
  zeros = jax.tree.map(lambda part: jnp.zeros((groups, *part.shape), part.dtype), parts)
  sums, out = lax.scan(step, zeros, (tiles, tile_group_I, used_I))
  return jax.tree.map(lambda a: a.reshape(layout.num_rows, *a.shape[2:]), out), sums


def _no_tile(function: Callable[..., Any], layout: GroupLayout, rows: Any, of_group: Any) -> Any:
  """The result of `_each_tile` for a layout of no tile: no rows, and sums of zero."""
  shape = lambda a, *size: jax.ShapeDtypeStruct((*size, *a.shape[1:]), a.dtype)
  tile = jax.tree.map(lambda a: shape(a, layout.tile), rows)
  out, parts = jax.eval_shape(function, tile, jax.tree.map(shape, of_group))
  no_rows = jax.tree.map(lambda a: jnp.zeros((0, *a.shape[1:]), a.dtype), out)
  zero = lambda part: jnp.zeros((layout.num_groups, *part.shape), part.dtype)
  return no_rows, jax.tree.map(zero, parts)


def _index(permutation: Permutation | None) -> jax.Array | None:
  """The row of x that fills each row of the tiles, -1 for none; None without a permutation."""
  return None if permutation is None else permutation.token_R


def _reader(x_XN: jax.Array, index_R: jax.Array | None):
  """An array to cut into tiles, and a function from a tile of it to the tile's rows of x."""
  if index_R is None:
    return x_XN, lambda x_BN: x_BN
  return index_R, lambda index_B: take_rows(x_XN, index_B)


# -- grouped products -----------------------------------------------------------------------------


def grouped_rows(
  lhs_XK: jax.Array,
  rhs_GKN: jax.Array,
  layout: GroupLayout,
  *,
  index_R: jax.Array | None = None,
  transpose_rhs: bool = False,
  bias_GN: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """Each row of lhs, in order or by index, times its group's matrix or its transpose (+ bias).

  Args:
    lhs_XK: the R rows of the layout, or any number of rows if `index_R` is given.
    rhs_GKN: one matrix a group; [G, N, K] with `transpose_rhs`.
    layout: the tiles of R.
    index_R: row of lhs that each row of the layout reads; a negative one reads as zero.
    transpose_rhs: contract the last dimension of rhs.
    bias_GN: added to the products, if given. The products are rounded to `out_dtype` after that; if
      every group is one tile, they are rounded before.
    out_dtype: type of the result, by default the accumulation type.
    precision: as in `jax.lax.dot_general`.
    num_sms: ignored; the kernels use it.
  """
  del num_sms
  out_dtype = out_dtype or accumulation_type(lhs_XK.dtype, rhs_GKN.dtype)
  if layout.one_tile_each:
    lhs_RK = lhs_XK if index_R is None else take_rows(lhs_XK, index_R)
    ops = _of_groups(layout, precision, out_dtype)
    return ops.plus(ops.product(lhs_RK, rhs_GKN, transpose_rhs), bias_GN)
  ops = _of_tile(precision)
  source, read = _reader(lhs_XK, index_R)

  def one_tile(rows, of_group):
    rhs, bias_N = of_group
    out_BN = ops.plus(ops.product(read(rows), rhs, transpose_rhs), bias_N)
    return out_BN.astype(out_dtype), None

  out_RN, _ = _each_tile(one_tile, layout, source, (rhs_GKN, bias_GN))
  return out_RN


def grouped_weights(
  lhs_XK: jax.Array,
  rhs_XN: jax.Array,
  layout: GroupLayout,
  *,
  lhs_index_R: jax.Array | None = None,
  rhs_index_R: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """out[g] = lhs[rows of g].T @ rhs[rows of g]; exactly zero for an empty group.

  Padding rows must be zero in at least one operand and finite in the other. `lhs_index_R` and
  `rhs_index_R` are for lhs and rhs what `index_R` of `grouped_rows` is for its lhs. Further
  arguments are those of `grouped_rows`.
  """
  del num_sms
  ops = _of_tile(precision)
  lhs, read_lhs = _reader(lhs_XK, lhs_index_R)
  rhs, read_rhs = _reader(rhs_XN, rhs_index_R)
  outer = lambda rows, _: (None, ops.outer(read_lhs(rows[0]), read_rhs(rows[1])))
  _, out_GKN = _each_tile(outer, layout, (lhs, rhs), None)
  return out_GKN if out_dtype is None else out_GKN.astype(out_dtype)


# -- the experts' network -------------------------------------------------------------------------

# `forward` and `backward` are jitted: an unrolled model lowers its experts once for all layers of
# equal shapes, and not once per layer.


@functools.partial(jax.jit, static_argnames=("how", "with_pre"))
def forward(
  x_XD: jax.Array,
  weights: FFNWeights,
  layout: GroupLayout,
  how: Execution,
  *,
  permutation: Permutation | None = None,
  with_pre: bool = True,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Each row's y = down(act(up(x))) by its expert, or the gated form, and the pre-activations.

  Args:
    x_XD: rows, read at the tokens of `permutation` if that is given.
    weights: matrices and biases of the groups, in the type of x.
    layout: the tiles of R.
    how: how to compute; its activation, precision and fp8 are used.
    permutation: between x's rows and those of the tiles; None: they are the same.
    with_pre: whether to return the pre-activations, up(x) and, if there is a gate, gate(x); if not,
      () stands for them.

  Returns:
    y, [R, D'] in the type of x (D' is the width of the last layer), and the pre-activations [R, F]
    in the order of `weights.up_weights`, or ().
  """
  dtype = x_XD.dtype

  def network(ops: _Products, x, weights: FFNWeights):
    # The pre-activations are rounded before the activation, so that the backward pass computes its
    # activation from the same numbers.
    first = zip(weights.up_weights, weights.up_biases)
    pre = tuple(ops.plus(ops.product(x, w), b).astype(dtype) for w, b in first)
    a = rounded_rows(activate(how.activation, pre).astype(dtype))
    y = ops.plus(ops.product(a, weights.down_GFD), weights.down_bias_GD).astype(dtype)
    return y, pre if with_pre else ()

  rounded_rows = fp8.rounded_rows if how.fp8 else lambda x: x
  if how.fp8:
    weights = fp8.rounded_weights(weights)
  source, read = _reader(rounded_rows(x_XD), _index(permutation))
  if layout.one_tile_each:
    return network(_of_groups(layout, how.precision), read(source), weights)
  ops = _of_tile(how.precision)
  one_tile = lambda rows, weights: (network(ops, read(rows), weights), None)
  return _each_tile(one_tile, layout, source, weights)[0]


@functools.partial(jax.jit, static_argnames="how")
def backward(
  x_XD: jax.Array,
  dy_XD: jax.Array,
  weights: FFNWeights,
  pre: tuple[jax.Array, ...],
  row_weight_R: jax.Array,
  layout: GroupLayout,
  how: Execution,
  *,
  permutation: Permutation | None = None,
) -> tuple[jax.Array, FFNWeights, jax.Array]:
  """The gradients of s · y for x, the weights and the rows' weights s; `forward` computes y.

  With da' = dy @ down.T, the gradient of the row weight is ds = ⟨da', a⟩ (+ ⟨dy, bias⟩). So neither
  y nor a is kept; a is recomputed from `pre` (SonicMoE, arXiv 2512.14080).

  Args:
    x_XD, dy_XD: rows of the input and of the gradient of s · y, both read as in `forward`.
    weights, layout, how, permutation: as in `forward`; fp8 is ignored.
    pre: the pre-activations that `forward` returned.
    row_weight_R: s; on a padding row s or the row of dy must be 0.

  Returns:
    dx_RD, the gradients of the weights in their types, and ds_R in the accumulation type.
  """
  dtype = x_XD.dtype

  def network(ops: _Products, x, dy, pre, s, weights: FFNWeights):
    da = ops.product(dy, weights.down_GFD, transpose=True)
    wide = accumulation_type(da.dtype)
    s = s.astype(wide)[:, None]
    a, dpre = activation_vjp(how.activation, pre, da.astype(wide) * s)
    dpre = tuple(d.astype(dtype) for d in dpre)
    ds = jnp.sum(da.astype(wide) * a, axis=1)
    back = [ops.product(d, w, transpose=True) for d, w in zip(dpre, weights.up_weights)]
    dups = [ops.outer(x, d) for d in dpre]
    dbiases = [None if b is None else ops.total(d) for b, d in zip(weights.up_biases, dpre)]
    ddown_bias = None
    if weights.down_bias_GD is not None:
      dy_wide = dy.astype(wide)
      ds = ds + jnp.sum(dy_wide * ops.of_rows(weights.down_bias_GD).astype(wide), axis=1)
      ddown_bias = ops.total(dy_wide * s)
    gradients = FFNWeights.of_layers(
      dups, ops.outer((a * s).astype(dtype), dy), dbiases, ddown_bias
    )
    return (sum(back[1:], back[0]).astype(dtype), ds), gradients

  index_R = _index(permutation)
  (x_source, read_x), (dy_source, read_dy) = _reader(x_XD, index_R), _reader(dy_XD, index_R)
  if layout.one_tile_each:
    ops = _of_groups(layout, how.precision)
    x_RD, dy_RD = read_x(x_source), read_dy(dy_source)
    (dx_RD, ds_R), gradients = network(ops, x_RD, dy_RD, pre, row_weight_R, weights)
  else:
    ops = _of_tile(how.precision)

    def one_tile(rows, weights):
      x, dy, pre, s = rows
      return network(ops, read_x(x), read_dy(dy), pre, s, weights)

    rows = (x_source, dy_source, pre, row_weight_R)
    (dx_RD, ds_R), gradients = _each_tile(one_tile, layout, rows, weights)
  return dx_RD, jax.tree.map(lambda d, w: d.astype(w.dtype), gradients, weights), ds_R


def per_row(bias_GN: jax.Array, layout: GroupLayout) -> jax.Array:
  """[R, N]: each row gets the vector of its group, and so do padding rows."""
  return jnp.repeat(bias_GN[layout.tile_group_I], layout.tile, axis=0)


def group_sums(x_RN: jax.Array, layout: GroupLayout, out_dtype=None) -> jax.Array:
  """Sum of each group's rows, added up in the accumulation type; padding rows must be zero.

  Tiles that are not in use may hold anything. The result has `out_dtype`, by default the
  accumulation type.
  """
  dtype = accumulation_type(x_RN.dtype)
  x_IBN = x_RN.reshape(layout.tile_group_I.shape[0], layout.tile, x_RN.shape[1])
  sums_IN = jnp.sum(x_IBN, axis=1, dtype=dtype)
  used_I1 = (jnp.arange(sums_IN.shape[0]) < layout.num_tiles[0])[:, None]
  sums_IN = jnp.where(used_I1, sums_IN, 0)
  # A product adds up the tiles' sums; a scatter was slower.
  group_GI = jnp.arange(layout.num_groups)[:, None] == layout.tile_group_I
  sums_GN = jnp.matmul(group_GI.astype(dtype), sums_IN, precision="highest")
  return sums_GN.astype(out_dtype or dtype)
