"""LayerNorm and RMSNorm, computed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.kernels.one_row import norm


class Norm(nnx.Module):
  """Normalises the last dimension; statistics in float32, result in the input's dtype.

  `kind` is "layernorm" (mean and variance, scale and bias) or "rmsnorm" (scale only).

  The backward pass reads the input as it came, and nothing else: float32 copies, which
  differentiation would keep, are twice the size of what they were made from.
  """

  def __init__(self, width: int, kind: str, eps: float):
    self.kind, self.eps = kind, eps
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=("embed",))
    self.bias = (
      nnx.Param(jnp.zeros((width,), jnp.float32), axes=("embed",)) if kind == "layernorm" else None
    )

  def __call__(self, x: Array) -> Array:
    own = self.normalisation
    if norm.takes(x):
      return norm.Normalised(x, own).alone()
    return _normalised(x, own.scale_D, own.bias_D, own.centred, own.eps)

  @property
  def normalisation(self) -> norm.Normalisation:
    """The same for kernels that begin with it."""
    bias = None if self.bias is None else self.bias[...]
    return norm.Normalisation(self.scale[...], bias, self.kind == "layernorm", self.eps)


def rms_normalised(x: Array, scale: Array, eps: float) -> Array:
  """RMSNorm of the last dimension, as `Norm`, with a weight that lies elsewhere."""
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
  # XLA shall not find the forward pass' statistics here: what normalises is one kernel as long as
  # nobody else wants them.
  x = jax.lax.optimization_barrier(x)
  wide, mean, inverse = _statistics(x, centred, eps)
  bar = bar.astype(wide.dtype)
  unit_bar = bar * scale
  along = (unit_bar * wide).mean(-1, keepdims=True) * inverse
  offset = unit_bar.mean(-1, keepdims=True) if centred else None
  # What each row has one number of ends here. From there on all is element by element and sums over
  # columns, which XLA makes in one kernel; sums over rows among them, and it would write bar * unit
  # in float32 to sum its columns in another.
  mean, inverse, along, offset = jax.lax.optimization_barrier((mean, inverse, along, offset))
  unit = _centred(x, mean) * inverse
  x_bar = unit_bar - unit * along
  if offset is not None:
    x_bar = x_bar - offset
  rows = tuple(range(x.ndim - 1))
  bias_bar = None if bias is None else bar.sum(rows).astype(bias.dtype)
  return (x_bar * inverse).astype(x.dtype), (bar * unit).sum(rows).astype(scale.dtype), bias_bar


def _statistics(x, centred, eps):
  """`_centred`, the mean of each row, and one over its standard deviation."""
  mean = _centred(x, None).mean(-1, keepdims=True) if centred else None
  wide = _centred(x, mean)
  return wide, mean, jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)


def _centred(x, mean):
  """In float32 or wider, without its mean where there is one."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return wide if mean is None else wide - mean


_normalised.defvjp(_normalised_fwd, _normalised_bwd)
