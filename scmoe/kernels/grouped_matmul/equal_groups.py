"""The feed-forward network on groups of one size: a dense MLP, or experts with equal room.

    G  groups (1 for a dense MLP)      R  rows of each group
    D  model width      F  hidden width

XLA's batched product is as fast as a kernel can be here, but it writes the pre-activations and
reads them again to activate them. On the kernels, bias and activation are the first product's
epilogue: on one H200 0.43 ms instead of 0.54 at R 8192, D 2048, F 8192 (experiments/kernels). The
other products are XLA's in both directions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scmoe.kernels.grouped_matmul.activations import activation_vjp, get_activation
from scmoe.kernels.grouped_matmul.api import cast_weights
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.ffn import FFNWeights, check_ffn
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE, make_layout

# What the backward needs of the first layer; rematerialisation that keeps matrix products keeps it.
PRE_ACTIVATION = "ffn_pre_activation"


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
) -> jax.Array:
  """down(act(up(rows))) for groups of equal size; see `grouped_ffn` for the formula.

  Args:
    rows_GRD: the rows of each group.
    gate_GDF: gate weights, or None if the activation is not gated.
    up_GDF, down_GFD: up and down weights; all weights are cast to the type of the rows.
    activation: one of `activation_names()`.
    gate_bias_GF, up_bias_GF, down_bias_GD: biases, or None.
    backend: "auto" and "mosaic_gpu" use the kernels where R is a multiple of 128 and (for "auto")
      the device and the widths have them; else, and for "xla", XLA's batched products.

  Returns:
    y_GRD in the type of the rows.

  Raises:
    ValueError: shapes disagree, or the activation or the backend is unknown or does not fit.
  """
  weights = FFNWeights(gate_GDF, up_GDF, down_GFD, gate_bias_GF, up_bias_GF, down_bias_GD)
  check_ffn(rows_GRD.reshape(-1, rows_GRD.shape[-1]), weights, rows_GRD.shape[0], activation)
  weights = cast_weights(weights, rows_GRD.dtype)
  if rows_have_kernels(rows_GRD.shape[1], backend, rows_GRD.dtype, *up_GDF.shape[1:]):
    return _on_kernels(rows_GRD, weights, activation)
  kind = get_activation(activation)
  pre = [
    _biased(jnp.einsum("grd,gdf->grf", rows_GRD, weight_GDF), bias_GF)
    for weight_GDF, bias_GF in zip(weights.up_weights, weights.up_biases)
  ]
  value_GRF = kind.value(pre[0])
  return _down(value_GRF * pre[1] if kind.gated else value_GRF, weights)


def _biased(y_GRN: jax.Array, bias_GN: jax.Array | None) -> jax.Array:
  return y_GRN if bias_GN is None else y_GRN + bias_GN.astype(y_GRN.dtype)[:, None, :]


def _down(a_GRF: jax.Array, weights: FFNWeights) -> jax.Array:
  return _biased(jnp.einsum("grf,gfd->grd", a_GRF, weights.down_GFD), weights.down_bias_GD)


def _first_layer(rows_GRD, weights: FFNWeights, activation: str, *, with_pre: bool):
  """The pre-activations, if asked for, and what they become, [G, R, F] each."""
  from scmoe.kernels.grouped_matmul import mosaic_gpu, tiles

  groups, rows, width = rows_GRD.shape
  sizes_G = jnp.full((groups,), rows, jnp.int32)
  kind = "up" if len(weights.up_weights) == 2 else "activated"
  outs = mosaic_gpu.rows_product(
    (rows_GRD.reshape(groups * rows, width),),
    (weights.up_weights,),
    make_layout(sizes_G, groups * rows, KERNEL_ROW_TILE),
    tiles.choose(kind, width, weights.up_GDF.shape[2]),
    transpose_rhs=False,
    biases=weights.up_biases,
    activation=get_activation(activation),
    with_results=with_pre,
    out_dtype=rows_GRD.dtype,
  )
  # The layout's static bound leaves room for groups that end inside a tile; these do not.
  *pre, a_GRF = (out[: groups * rows].reshape(groups, rows, -1) for out in outs)
  return tuple(pre), a_GRF


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _on_kernels(rows_GRD, weights, activation):
  return _down(_first_layer(rows_GRD, weights, activation, with_pre=False)[1], weights)


def _on_kernels_fwd(rows_GRD, weights, activation):
  pre, a_GRF = _first_layer(rows_GRD, weights, activation, with_pre=True)
  pre = checkpoint_name(pre, PRE_ACTIVATION)
  return _down(a_GRF, weights), (rows_GRD, weights, pre)


def _on_kernels_bwd(activation, residuals, dy_GRD):
  rows_GRD, weights, pre = residuals
  dtype = rows_GRD.dtype
  da_GRF = jnp.einsum("grd,gfd->grf", dy_GRD, weights.down_GFD)
  a_GRF, dpre = activation_vjp(get_activation(activation), pre, da_GRF.astype(jnp.float32))
  a_GRF, dpre = a_GRF.astype(dtype), [d.astype(dtype) for d in dpre]
  dups = [jnp.einsum("grd,grf->gdf", rows_GRD, d) for d in dpre]
  drows = [jnp.einsum("grf,gdf->grd", d, w) for d, w in zip(dpre, weights.up_weights)]

  def bias_gradient(bias_GN, d_GRN):
    if bias_GN is None:
      return None
    return d_GRN.sum(1, dtype=jnp.float32).astype(bias_GN.dtype)

  dbiases = [bias_gradient(bias, d) for bias, d in zip(weights.up_biases, dpre)]
  gradients = dataclasses.replace(
    weights,
    gate_GDF=None if weights.gate_GDF is None else dups[0],
    up_GDF=dups[-1],
    down_GFD=jnp.einsum("grf,grd->gfd", a_GRF, dy_GRD),
    gate_bias_GF=None if weights.gate_GDF is None else dbiases[0],
    up_bias_GF=dbiases[-1],
    down_bias_GD=bias_gradient(weights.down_bias_GD, dy_GRD),
  )
  return functools.reduce(jnp.add, drows), gradients


_on_kernels.defvjp(_on_kernels_fwd, _on_kernels_bwd)
