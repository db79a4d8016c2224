"""LayerNorm and RMSNorm, computed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.kernels import norm
from scmoe.kernels.without_gradient import without_gradient


class Norm(nnx.Module):
  """Normalises the last dimension; statistics in float32, result in the input's dtype.

  `kind` is "layernorm" (mean and variance, scale and bias) or "rmsnorm" (scale only).

  The backward pass reads the input as it came, and two numbers a row: float32 copies, which
  differentiation would keep, are twice the size of what they were made from.
  """

  def __init__(self, width: int, kind: str, eps: float):
    self.kind, self.eps = kind, eps
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=("embed",))
    self.bias = (
      nnx.Param(jnp.zeros((width,), jnp.float32), axes=("embed",)) if kind == "layernorm" else None
    )

  def __call__(self, x: Array) -> Array:
    bias = None if self.bias is None else self.bias[...]
    centred = self.kind == "layernorm"
    plain = lambda *given: _normalised(*given, centred, self.eps)
    if not norm.takes(x):
      return plain(x, self.scale[...], bias)
    fast = functools.partial(norm.normalised, centred=centred, eps=self.eps)
    return without_gradient(fast, plain, x, self.scale[...], bias)


def rms_normalised(x: Array, scale: Array, eps: float) -> Array:
  """RMSNorm of the last dimension, as `Norm`, with a weight that lies elsewhere."""
  return _normalised(x, scale, None, False, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalised(x: Array, scale: Array, bias: Array | None, centred: bool, eps: float) -> Array:
  return _normalised_fwd(x, scale, bias, centred, eps)[0]


def _normalised_fwd(x, scale, bias, centred, eps):
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = wide.mean(-1, keepdims=True) if centred else None
  if mean is not None:
    wide = wide - mean
  inverse = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
  y = wide * inverse * scale
  y = y if bias is None else y + bias
  return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _normalised_bwd(centred, eps, kept, bar):
  x, scale, bias, mean, inverse = kept
  wide = x.astype(inverse.dtype)
  unit = (wide if mean is None else wide - mean) * inverse
  bar = bar.astype(inverse.dtype)
  unit_bar = bar * scale
  x_bar = unit_bar - unit * (unit_bar * unit).mean(-1, keepdims=True)
  if centred:
    x_bar = x_bar - unit_bar.mean(-1, keepdims=True)
  rows = tuple(range(x.ndim - 1))
  bias_bar = None if bias is None else bar.sum(rows).astype(bias.dtype)
  return (x_bar * inverse).astype(x.dtype), (bar * unit).sum(rows).astype(scale.dtype), bias_bar


_normalised.defvjp(_normalised_fwd, _normalised_bwd)
