"""LayerNorm and RMSNorm, computed in float32 or wider."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float


class Norm(nnx.Module):
  """Normalises the last dimension; computes in float32 or wider, the result has the input's type.

  For the backward pass it keeps only the input, in the input's type, and its parameters: the
  float32 copies that automatic differentiation would keep of a 16-bit input are twice as large.

  Args:
    width: D.
    kind: "layernorm" (mean and variance, scale and bias) or "rmsnorm" (root mean square, scale).
    eps: added to the mean square under the root (in a layernorm, to the variance).
  """

  def __init__(self, width: int, kind: str, eps: float):
    self.kind, self.eps = kind, eps
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=("embed",))
    self.bias = (
      nnx.Param(jnp.zeros((width,), jnp.float32), axes=("embed",)) if kind == "layernorm" else None
    )

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    bias = None if self.bias is None else self.bias[...]
    return _normalised(x, self.scale[...], bias, self.kind == "layernorm", self.eps)


def rms_normalised(x: Array, scale: Array, eps: float) -> Array:
  """RMSNorm of the last dimension as in `Norm`, with a scale that another module holds."""
  return _normalised(x, scale, None, False, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalised(x: Array, scale: Array, bias: Array | None, centred: bool, eps: float) -> Array:
  return _normalised_fwd(x, scale, bias, centred, eps)[0]


def _normalised_fwd(x, scale, bias, centred, eps):
  wide, _, inverse = _statistics(x, centred, eps)
  y = wide * inverse * scale
  y = y if bias is None else y + bias
  return y.astype(x.dtype), (x, scale, bias)


def _normalised_bwd(centred, eps, kept, bar):
  x, scale, bias = kept
  # The barrier keeps XLA from sharing the forward pass' statistics with this pass. The forward norm
  # is one kernel only while nothing else reads them.
  x = jax.lax.optimization_barrier(x)
  wide, mean, inverse = _statistics(x, centred, eps)
  bar = bar.astype(wide.dtype)
  unit_bar = bar * scale
  along = (unit_bar * wide).mean(-1, keepdims=True) * inverse
  offset = unit_bar.mean(-1, keepdims=True) if centred else None
  # Before this barrier are the sums within rows; after it are element-wise operations and sums over
  # columns, which XLA fuses into one kernel. Without it XLA writes bar * unit in float32, and a
  # second kernel sums its columns.
  mean, inverse, along, offset = jax.lax.optimization_barrier((mean, inverse, along, offset))
  unit = _centred(x, mean) * inverse
  x_bar = unit_bar - unit * along
  if offset is not None:
    x_bar = x_bar - offset
  rows = tuple(range(x.ndim - 1))
  bias_bar = None if bias is None else bar.sum(rows).astype(bias.dtype)
  return (x_bar * inverse).astype(x.dtype), (bar * unit).sum(rows).astype(scale.dtype), bias_bar


def _statistics(x, centred, eps):
  """x, less its rows' means if `centred`; these means, or None; and 1/√(mean square + eps) of rows.

  The mean square is that of the first result. All are float32 or wider.
  """
  mean = _centred(x, None).mean(-1, keepdims=True) if centred else None
  wide = _centred(x, mean)
  return wide, mean, jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)


def _centred(x, mean):
  """x in float32 or wider, minus the mean if one is given."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return wide if mean is None else wide - mean


_normalised.defvjp(_normalised_fwd, _normalised_bwd)
