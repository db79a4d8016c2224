"""LayerNorm and RMSNorm, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class Norm(nnx.Module):
  """Normalises the last dimension; statistics in float32, result in the input's dtype.

  `kind` is "layernorm" (mean and variance, scale and bias) or "rmsnorm" (scale only).
  """

  def __init__(self, width: int, kind: str, eps: float):
    self.kind, self.eps = kind, eps
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=("embed",))
    self.bias = (
      nnx.Param(jnp.zeros((width,), jnp.float32), axes=("embed",)) if kind == "layernorm" else None
    )

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if self.kind == "layernorm":
      wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
    wide = wide * self.scale[...]
    if self.bias is not None:
      wide = wide + self.bias[...]
    return wide.astype(x.dtype)
