"""The products that an expert needs, on the Hopper kernels: which tiling, and what is gathered.

    R  rows of the tiles      K, N  widths      G  groups      D  model width      F  expert width

`grouped_rows`, `grouped_weights`, `forward` and `backward` have the arguments and results of those
in `xla.py`, but do not write rows of tiles that are not in use. `forward` and `backward` are jitted
in both files: an unrolled model lowers them once for all layers of equal shapes and options, and
not once per layer.
"""

import functools

import jax
import jax.numpy as jnp

from scmoe.kernels.grouped_matmul import copy_to_tiles, fp8, tiles
from scmoe.kernels.grouped_matmul.down_backward import down_backward_product
from scmoe.kernels.grouped_matmul.layout import GroupLayout
from scmoe.kernels.grouped_matmul.pipeline import can_gather
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.grouped_matmul.weights import Execution, FFNWeights
from scmoe.kernels.grouped_matmul.weights_product import weights_product
from scmoe.kernels.grouped_matmul.xla import group_sums, per_row
from scmoe.kernels.launch import runs_ptx
from scmoe.kernels.permute import Permutation, take_rows, take_words

ROW_TILE: int | None = tiles.ROW_TILE  # all kernels take tiles of so many rows
# Hidden sizes from which the rows are copied to their places before the product: the first product
# ("up"), `down_backward_product`, and the gradients of the first layer's matrices ("weights_lhs",
# whose left operand is x). A product that gathers its rows does so once for every column tile, with
# copies that wgmma waits for. Except `down_backward_product`, it mostly takes the widest tiles that
# cover its result, to gather each row less often. A product of rows in order may be faster with
# narrower tiles. The copy takes 0.7 to 0.8 ps for each element that it writes if each row has four
# to eight places, and 1.0 ps with two places, since it then reads more rows for the same number of
# elements written. Measured with layers of nine models on H200s (experiments/LOG.md, 2026-11-26).
# With fp8 operands XLA gathers before the first product at every size (`_fp8_product`).
GATHERED_BEFORE = {"up": 1408, "down_backward": 640, "weights_lhs": 1408}


def _gathers_inside(product: str, hidden: int) -> bool:
  """Whether this product of `GATHERED_BEFORE` gathers its rows itself; not in the simulation."""
  return can_gather() and hidden < GATHERED_BEFORE[product]


def _split_gather(x_XN, index_R, inside: bool):
  """(x, index) for a product that gathers, or the gathered rows and None.

  Without an index x is returned as it is.
  """
  if index_R is None or inside:
    return x_XN, index_R
  return take_words(x_XN, index_R), None


def _rows(x_XD, permutation: Permutation | None, layout: GroupLayout, inside: bool):
  """(x, index) for a product that gathers, or the rows in their tiles and None.

  Without a permutation x lies in its tiles already, and is returned as it is.
  """
  if permutation is None:
    return x_XD, None
  if inside:
    return x_XD, permutation.token_R
  if not (runs_ptx() and copy_to_tiles.takes(x_XD, permutation.row_TK.shape[1])):
    return take_words(x_XD, permutation.token_R), None
  places = layout.group_sizes_G, layout.tile_starts_G, layout.tiles_G
  copied = copy_to_tiles.copy_rows_to_tiles(
    x_XD, permutation.row_TK, *places, num_rows=layout.num_rows, tile=layout.tile
  )
  return copied, None


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
  """`xla.grouped_rows` by a kernel: each row times its group's matrix or the transpose (+ bias).

  Rows of tiles that are not in use are not written. `precision` is ignored.
  """
  del precision  # the matrix unit multiplies 2-byte operands exactly
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  n = rhs_GKN.shape[1 if transpose_rhs else 2]
  lhs, index_R = _split_gather(lhs_XK, index_R, can_gather())
  gathered = index_R is not None
  tiling = tiles.choose("rows", lhs.shape[1], n, out_dtype.itemsize, gathered=gathered)
  (out_RN,) = rows_product(
    (lhs,),
    ((rhs_GKN,),),
    layout,
    tiling,
    transpose_rhs=transpose_rhs,
    biases=(bias_GN,),
    index_R=index_R,
    out_dtype=out_dtype,
    num_sms=num_sms,
  )
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
  """out[g] = lhs[rows of g].T @ rhs[rows of g], by a kernel; as `xla.grouped_weights`.

  `precision` is ignored.
  """
  del precision
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  lhs, lhs_index_R = _split_gather(lhs_XK, lhs_index_R, can_gather())
  rhs, rhs_index_R = _split_gather(rhs_XN, rhs_index_R, can_gather() and lhs_index_R is None)
  gathered = lhs_index_R is not None or rhs_index_R is not None
  widths = lhs.shape[1], rhs.shape[1]
  tiling = tiles.choose("weights", *widths, out_dtype.itemsize, gathered=gathered)
  (out_GKN,) = weights_product(
    lhs,
    (rhs,),
    layout,
    tiling,
    lhs_index_R=lhs_index_R,
    rhs_index_R=rhs_index_R,
    out_dtype=out_dtype,
    num_sms=num_sms,
  )
  return out_GKN


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
  """Every row through its expert, as `xla.forward`, by one product kernel for each layer.

  With a permutation the first product gathers its rows, or a kernel or XLA brings them to their
  tiles before it (see `GATHERED_BEFORE`). The products add biases and apply the activation. With
  fp8 they multiply fp8 operands where all widths are multiples of 128, fp8's block. For other
  widths they multiply the rounded operands in the rows' type.
  """
  product, between = _product, lambda a_RF: a_RF
  if how.fp8 and all(size % fp8.BLOCK == 0 for size in weights.widths):
    product = _fp8_product
  elif how.fp8:
    x_XD, weights = fp8.rounded_rows(x_XD), fp8.rounded_weights(weights)
    between = fp8.rounded_rows
  *pre, a_RF = product(
    x_XD,
    weights.up_weights,
    weights.up_biases,
    layout,
    permutation=permutation,
    activation=how.activation,
    with_results=with_pre,
    num_sms=how.num_sms,
  )
  down = (weights.down_GFD,), (weights.down_bias_GD,)
  (y_RD,) = product(between(a_RF), *down, layout, num_sms=how.num_sms)
  return y_RD, tuple(pre)


def _product(x_XK, matrices, biases, layout, *, permutation=None, activation=None, **options):
  """Each row of x times its group's matrices and, if one is given, the activation of the results.

  The outputs are those of `rows_product`, in the type of x. This function chooses the tiling, and
  where the rows are gathered.
  """
  widths = matrices[0].shape[1:]
  x, index_R = _rows(x_XK, permutation, layout, _gathers_inside("up", widths[1]))
  kind = "rows" if activation is None else "up" if activation.gated else "activated"
  experts = kind != "rows" and layout.num_groups > 1  # a dense MLP is one group
  return rows_product(
    (x,),
    (matrices,),
    layout,
    tiles.choose(kind, *widths, gathered=index_R is not None, experts=experts),
    transpose_rhs=False,
    biases=biases,
    index_R=index_R,
    activation=activation,
    out_dtype=x.dtype,
    **options,
  )


def _fp8_product(x_XK, matrices, biases, layout, *, permutation=None, **options):
  """`_product` with operands rounded to e4m3; XLA gathers by a permutation before the kernel."""
  rows, scale = fp8.quantised_rows(x_XK)
  if permutation is not None:
    rows, scale = (take_rows(x, permutation.token_R) for x in (rows, scale))
  quantised = [fp8.quantised_matrices(w) for w in matrices]
  return rows_product(
    (rows,),
    (tuple(jnp.swapaxes(w, 1, 2) for w, _ in quantised),),
    layout,
    tiles.FP8,
    transpose_rhs=True,
    biases=biases,
    scales=(scale, tuple(s for _, s in quantised)),
    out_dtype=x_XK.dtype,
    **options,
  )


def _up_gradients(x_XD, dpre, layout, index_R, how: Execution) -> tuple[jax.Array, ...]:
  """Gradients of the first layer's matrices, one array for each pre-activation."""
  options = {"out_dtype": x_XD.dtype, "num_sms": how.num_sms}
  if index_R is None or len(dpre) == 1:
    gradient = functools.partial(grouped_weights, lhs_index_R=index_R, **options)
    return tuple(gradient(x_XD, d_RF, layout) for d_RF in dpre)
  # One gather of x serves both gradients. Rows in order are read twice instead, by one product for
  # each gradient: for most shapes that were timed two products take less time than one of both, at
  # best 16 % less (experiments/kernels/h200-tilings-2026-11-25.json).
  widths = x_XD.shape[1], dpre[0].shape[1]
  tiling = tiles.choose("weights_pair", *widths, x_XD.dtype.itemsize, gathered=True)
  return weights_product(x_XD, dpre, layout, tiling, lhs_index_R=index_R, **options)


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
  """The gradients of s · y, as `xla.backward`, by kernels.

  `down_backward_product` runs first. The products for the down weights' gradient, for those of the
  first layer's weights and for dx read its results. XLA adds up the gradients of the biases.
  """
  dtype, (_, width, hidden) = x_XD.dtype, weights.up_GDF.shape
  inside = _gathers_inside("down_backward", hidden)
  dy, dy_index_R = _rows(dy_XD, permutation, layout, inside)
  scaled_a_RF, dpre, ds_R = down_backward_product(
    dy,
    weights.down_GFD,
    pre,
    row_weight_R,
    layout,
    how.activation,
    tiles.choose("down_backward", dy.shape[1], hidden, gathered=dy_index_R is not None),
    index_R=dy_index_R,
    num_sms=how.num_sms,
  )
  ddown_GFD = grouped_weights(
    scaled_a_RF, dy, layout, rhs_index_R=dy_index_R, out_dtype=dtype, num_sms=how.num_sms
  )
  if permutation is not None:
    # XLA would keep the scaled activation, as large as a pre-activation, until dx is computed. With
    # the barrier it computes the down weights' gradient first, and frees the scaled activation. And
    # x's rows are gathered anew: without the barrier XLA might keep those of the forward pass.
    dpre, ddown_GFD, x_XD = jax.lax.optimization_barrier((dpre, ddown_GFD, x_XD))
  x, x_index_R = _rows(x_XD, permutation, layout, _gathers_inside("weights_lhs", hidden))
  dups = _up_gradients(x, dpre, layout, x_index_R, how)
  (dx_RD,) = rows_product(  # one accumulator adds up the products of gate, if any, and up
    dpre,
    tuple((w,) for w in weights.up_weights),
    layout,
    tiles.choose("dx" if how.activation.gated else "rows", hidden, width, dtype.itemsize),
    transpose_rhs=True,
    out_dtype=dtype,
    num_sms=how.num_sms,
  )
  gradient = lambda bias, d_RN: None if bias is None else group_sums(d_RN, layout, bias.dtype)
  dbiases = [gradient(b, d_RF) for b, d_RF in zip(weights.up_biases, dpre)]
  ddown_bias_GD = None
  if weights.down_bias_GD is not None:
    dy_RD = dy if dy_index_R is None else take_rows(dy, dy_index_R)
    dy_RD = dy_RD.astype(jnp.float32)
    ds_R = ds_R + jnp.sum(dy_RD * per_row(weights.down_bias_GD, layout), axis=1)
    ddown_bias_GD = gradient(weights.down_bias_GD, dy_RD * row_weight_R[:, None])
  return dx_RD, FFNWeights.of_layers(dups, ddown_GFD, dbiases, ddown_bias_GD), ds_R
