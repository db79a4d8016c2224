"""The feed-forward network on groups of one size: a dense MLP, or experts with equal room.

    G  groups (1 for a dense MLP)      R  rows of each group, or of each group and sender
    D  model width      F  hidden width      W  senders

XLA's batched products are as fast as a kernel can be here, but the first one writes what the
activation then reads again. Where no gradient is asked for, the kernels make bias and activation
the end of that product and write the activation alone (experiments/kernels). A training step gained
nothing from it, so gradients are left to XLA, and so is all that they need of the forward.

Rows that an exchange brought lie in the order of their senders, [W, G, R, D]. XLA's products need
each group in one piece, so it transposes them on the way in and on the way out, forward and
backward: four passes over all rows. The kernels read and write a tile wherever it lies, so there
they compute everything, gradients too; by themselves only where no collective takes
multiprocessors from them, the one case that is measured.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scmoe._compat import copy_engines_asked
from scmoe.kernels.grouped_matmul.activations import get_activation
from scmoe.kernels.grouped_matmul.api import cast_weights
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.ffn import (
  FFNConfig,
  FFNWeights,
  check_ffn,
  ffn_backward,
  ffn_forward,
)
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE, GroupLayout, make_equal_layout

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
  rows: jax.Array,
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
    rows: [G, R, D], or [W, G, R, D] in the order of their senders, which the result keeps.
    gate_GDF: gate weights, or None if the activation is not gated.
    up_GDF, down_GFD: up and down weights; all weights are cast to the type of the rows, and the
      width of the result may be another than D.
    activation: one of `activation_names()`.
    gate_bias_GF, up_bias_GF, down_bias_GD: biases, or None.
    backend: "auto" and "mosaic_gpu" use the kernels where R is a multiple of 128, no gradient is
      asked for or there are several senders, and (for "auto") the device and the widths have them
      and, for senders, copy engines exchange the rows; else, and for "xla", XLA's batched products.
    shares: devices that the rows are spread over, each with whole weights; one where there are
      senders.
    on_shares: makes a function of one device's rows and weights one of all rows and the weights
      (`jax.shard_map`: XLA cannot split a kernel); None where each device sees its own rows.

  Returns:
    [G, R, D] or [W, G, R, D], in the type of the rows.

  Raises:
    ValueError: shapes disagree, or the activation or the backend is unknown or does not fit.
  """
  weights = FFNWeights(gate_GDF, up_GDF, down_GFD, gate_bias_GF, up_bias_GF, down_bias_GD)
  *senders, groups, size, width = rows.shape
  flat_MD = jax.ShapeDtypeStruct((groups, width), rows.dtype)
  check_ffn(flat_MD, weights, groups, activation, out_width=down_GFD.shape[-1])
  weights = cast_weights(weights, rows.dtype)
  parts = math.prod(senders)
  have = lambda size: rows_have_kernels(size, backend, rows.dtype, *up_GDF.shape[1:])
  if parts > 1 and have(size) and (backend == "mosaic_gpu" or _undisturbed()):
    return _senders_on_kernels(rows, weights, activation)
  run = functools.partial(_on_xla, activation=activation)
  if have(parts * size // shares):
    fast = functools.partial(_on_kernels, activation=activation, on_shares=on_shares)
    run = functools.partial(without_gradient, fast, run)
  if not senders:
    return run(rows, weights)
  y_GRD = run(jnp.swapaxes(rows, 0, 1).reshape(groups, parts * size, width), weights)
  return jnp.swapaxes(y_GRD.reshape(groups, parts, size, y_GRD.shape[-1]), 0, 1)


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
  local: Local = functools.partial(_lowered_once(_first_layer), activation=activation)
  a_GRF = (on_shares(local) if on_shares else local)(rows_GRD, weights)
  return _product(a_GRF, weights.down_GFD, weights.down_bias_GD)


def _lowered_once(function: Callable[..., Any]) -> Callable[..., Any]:
  """`function`, jitted: layers are alike, so its kernels are lowered once for all of them.

  Not where they are simulated, which the cache would not notice.
  """
  from scmoe.kernels.grouped_matmul import pipeline

  return function if pipeline.simulated() else _jitted(function)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
  return jax.jit(function, static_argnames="activation")


def _first_layer(rows: jax.Array, weights: FFNWeights, activation: str) -> jax.Array:
  """act(rows @ up + bias), [(W,) G, R, F], in one kernel."""
  from scmoe.kernels.grouped_matmul import mosaic_gpu, tiles

  width = rows.shape[-1]
  kind = "up" if len(weights.up_weights) == 2 else "activated"
  (a_RF,) = mosaic_gpu.rows_product(
    (rows.reshape(-1, width),),
    (weights.up_weights,),
    _layout_of(rows),
    tiles.choose(kind, width, weights.up_GDF.shape[2]),
    transpose_rhs=False,
    biases=weights.up_biases,
    activation=get_activation(activation),
    with_results=False,
    out_dtype=rows.dtype,
    num_sms=_num_sms(),
  )
  return a_RF.reshape(*rows.shape[:-1], a_RF.shape[-1])


def _layout_of(rows: jax.Array) -> GroupLayout:
  *senders, groups, size, _ = rows.shape
  return make_equal_layout(math.prod(senders), groups, size, KERNEL_ROW_TILE)


def _undisturbed() -> bool:
  """Whether no collective takes multiprocessors from a kernel: one device, or copy engines."""
  return jax.sharding.get_abstract_mesh().size <= 1 or copy_engines_asked()


def _num_sms() -> int:
  """CTAs of a kernel."""
  from scmoe.kernels.grouped_matmul import pipeline

  return (1 if _undisturbed() else WAVES) * pipeline.resolve_num_sms(None)


# -------------------------------------------------------------- rows in the order of their senders


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _senders_on_kernels(rows_WGRD: jax.Array, weights: FFNWeights, activation: str) -> jax.Array:
  return _lowered_once(_value)(rows_WGRD, weights, activation=activation)


def _senders_fwd(rows_WGRD, weights, activation):
  y_WGRD, pre = _lowered_once(_value_and_pre)(rows_WGRD, weights, activation=activation)
  return y_WGRD, (rows_WGRD, weights, pre)


def _senders_bwd(activation, residuals, dy_WGRD):
  return _lowered_once(_gradients)(*residuals, dy_WGRD, activation=activation)


_senders_on_kernels.defvjp(_senders_fwd, _senders_bwd)


def _value(rows_WGRD, weights: FFNWeights, activation: str) -> jax.Array:
  from scmoe.kernels.grouped_matmul import mosaic_gpu

  a_WGRF = _first_layer(rows_WGRD, weights, activation)
  y_RD = mosaic_gpu.grouped_rows(
    a_WGRF.reshape(-1, a_WGRF.shape[-1]),
    weights.down_GFD,
    _layout_of(rows_WGRD),
    bias_GN=weights.down_bias_GD,
    out_dtype=rows_WGRD.dtype,
    num_sms=_num_sms(),
  )
  return y_RD.reshape(*rows_WGRD.shape[:-1], y_RD.shape[-1])


def _value_and_pre(rows_WGRD, weights: FFNWeights, activation: str):
  config = FFNConfig(activation, "mosaic_gpu", num_sms=_num_sms())
  x_RD = rows_WGRD.reshape(-1, rows_WGRD.shape[-1])
  y_RD, pre = ffn_forward(x_RD, None, weights, _layout_of(rows_WGRD), config)
  return y_RD.reshape(*rows_WGRD.shape[:-1], y_RD.shape[-1]), pre


def _gradients(rows_WGRD, weights: FFNWeights, pre, dy_WGRD, activation: str):
  config = FFNConfig(activation, "mosaic_gpu", num_sms=_num_sms())
  x_RD = rows_WGRD.reshape(-1, rows_WGRD.shape[-1])
  dy_RD = dy_WGRD.reshape(-1, dy_WGRD.shape[-1])
  ones_R = jnp.ones((len(x_RD),), jnp.float32)
  layout = _layout_of(rows_WGRD)
  dx_RD, dweights, _ = ffn_backward(x_RD, None, dy_RD, ones_R, pre, weights, layout, config)
  return dx_RD.reshape(rows_WGRD.shape), dweights
