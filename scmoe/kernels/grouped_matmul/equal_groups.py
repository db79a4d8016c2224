"""The feed-forward network on groups of one size: a dense MLP, or experts with equal room.

    G  groups (1 for a dense MLP)      R  rows of each group
    D  model width      F  hidden width

XLA's batched products are as fast as a kernel can be here, but the first one writes what the
activation then reads again. Where no gradient is asked for, the kernels make bias and activation
the end of that product and write the activation alone (experiments/kernels). A training step gained
nothing from it, so gradients are left to XLA, and so is all that they need of the forward.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.kernels.grouped_matmul.activations import get_activation
from scmoe.kernels.grouped_matmul.api import cast_weights
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.ffn import FFNWeights, check_ffn
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE, make_layout

# CTAs per multiprocessor, one after the other, where a collective may run beside the product. With
# one each, a CTA whose multiprocessor is taken would begin when the others end, and the product
# take twice its time; alone, one each is faster.
WAVES = 8

Local = Callable[[jax.Array, FFNWeights], jax.Array]


def rows_have_kernels(rows: int, backend: str, dtype, *widths: int) -> bool:
  """Whether the first layer of groups of so many rows runs on the kernels.

  Args:
    rows: R on this device; the kernels take whole row tiles.
    backend, dtype, *widths: as in `resolve_backend`.
  """
  whole = rows > 0 and rows % KERNEL_ROW_TILE == 0
  return whole and resolve_backend(backend, dtype, *widths) == "mosaic_gpu"


def equal_ffn(
  rows_GRD: jax.Array,
  gate_GDF: jax.Array | None,
  up_GDF: jax.Array,
  down_GFD: jax.Array,
  *,
  activation: str,
  gate_bias_GF: jax.Array | None = None,
  up_bias_GF: jax.Array | None = None,
  down_bias_GD: jax.Array | None = None,
  backend: str = "auto",
  shares: int = 1,
  on_shares: Callable[[Local], Local] | None = None,
) -> jax.Array:
  """down(act(up(rows))) for groups of equal size; see `grouped_ffn` for the formula.

  Args:
    rows_GRD: the rows of each group.
    gate_GDF: gate weights, or None if the activation is not gated.
    up_GDF, down_GFD: up and down weights; all weights are cast to the type of the rows, and the
      width of the result may be another than D.
    activation: one of `activation_names()`.
    gate_bias_GF, up_bias_GF, down_bias_GD: biases, or None.
    backend: "auto" and "mosaic_gpu" use the kernels where R is a multiple of 128, no gradient is
      asked for and (for "auto") the device and the widths have them; else, and for "xla", XLA's
      batched products.
    shares: devices that the rows are spread over, each with whole weights.
    on_shares: makes a function of one device's rows and weights one of all rows and the weights
      (`jax.shard_map`: XLA cannot split a kernel); None where each device sees its own rows.

  Returns:
    y_GRD in the type of the rows.

  Raises:
    ValueError: shapes disagree, or the activation or the backend is unknown or does not fit.
  """
  weights = FFNWeights(gate_GDF, up_GDF, down_GFD, gate_bias_GF, up_bias_GF, down_bias_GD)
  groups, _, width = rows_GRD.shape
  flat_MD = jax.ShapeDtypeStruct((groups, width), rows_GRD.dtype)
  check_ffn(flat_MD, weights, groups, activation, out_width=down_GFD.shape[-1])
  weights = cast_weights(weights, rows_GRD.dtype)
  rows = rows_GRD.shape[1] // shares
  if rows_have_kernels(rows, backend, rows_GRD.dtype, *up_GDF.shape[1:]):
    kernels = functools.partial(_on_kernels, activation=activation, on_shares=on_shares)
    plain = functools.partial(_on_xla, activation=activation)
    return without_gradient(kernels, plain, rows_GRD, weights)
  return _on_xla(rows_GRD, weights, activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def without_gradient(fast: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
  """fast(*operands); where a gradient is asked for, plain(*operands) and its gradient.

  Args:
    fast, plain: the same function computed in two ways; neither closes over traced values.
  """
  return fast(*operands)


without_gradient.defvjp(
  lambda fast, plain, *operands: jax.vjp(plain, *operands),
  lambda fast, plain, pull, cotangents: pull(cotangents),
)


def _on_xla(rows_GRD: jax.Array, weights: FFNWeights, activation: str) -> jax.Array:
  kind = get_activation(activation)
  pre = [_product(rows_GRD, w, b) for w, b in zip(weights.up_weights, weights.up_biases)]
  a_GRF = kind.value(pre[0]) * pre[1] if kind.gated else kind.value(pre[0])
  return _product(a_GRF, weights.down_GFD, weights.down_bias_GD)


def _product(x_GRK: jax.Array, weight_GKN: jax.Array, bias_GN: jax.Array | None) -> jax.Array:
  if len(weight_GKN) == 1:  # a batch dimension of one would hide it from rematerialisation's policy
    y_GRN = (x_GRK[0] @ weight_GKN[0])[None]
  else:
    y_GRN = jnp.einsum("grk,gkn->grn", x_GRK, weight_GKN)
  return y_GRN if bias_GN is None else y_GRN + bias_GN.astype(y_GRN.dtype)[:, None, :]


def _on_kernels(rows_GRD, weights: FFNWeights, activation: str, on_shares) -> jax.Array:
  from scmoe.kernels.grouped_matmul import pipeline

  # Layers are alike: jitted, the kernel is lowered once for all of them. Not where it is simulated,
  # which the cache would not notice.
  first_layer = _first_layer
  if not pipeline.simulated():
    first_layer = jax.jit(_first_layer, static_argnames="activation")
  local: Local = functools.partial(first_layer, activation=activation)
  a_GRF = (on_shares(local) if on_shares else local)(rows_GRD, weights)
  return _product(a_GRF, weights.down_GFD, weights.down_bias_GD)


def _first_layer(rows_GRD, weights: FFNWeights, activation: str) -> jax.Array:
  """act(rows @ up + bias), [G, R, F], in one kernel."""
  from scmoe.kernels.grouped_matmul import mosaic_gpu, pipeline, tiles

  waves = WAVES if jax.sharding.get_abstract_mesh().size > 1 else 1
  groups, rows, width = rows_GRD.shape
  kind = "up" if len(weights.up_weights) == 2 else "activated"
  (a_RF,) = mosaic_gpu.rows_product(
    (rows_GRD.reshape(groups * rows, width),),
    (weights.up_weights,),
    make_layout(jnp.full((groups,), rows, jnp.int32), groups * rows, KERNEL_ROW_TILE),
    tiles.choose(kind, width, weights.up_GDF.shape[2]),
    transpose_rhs=False,
    biases=weights.up_biases,
    activation=get_activation(activation),
    with_results=False,
    out_dtype=rows_GRD.dtype,
    num_sms=waves * pipeline.resolve_num_sms(None),
  )
  # The layout's static bound leaves room for groups that end inside a tile; these do not.
  return a_RF[: groups * rows].reshape(groups, rows, -1)
