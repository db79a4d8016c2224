"""GroupNorm over the pixels of an image and a group of its channels, followed by GELU.

Y. Wu and K. He, Group Normalization (arXiv 1803.08494). As batch norm does, it leaves the contrast
between an image's pixels in each channel; as layer norm does, it reads no other image.

    B  images    S  pixels on a side    C  channels    G  groups of channels
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

GROUP = 16  # channels of a group; where it does not divide C, the greatest common divisor of both


class GroupNormGelu(nnx.Module):
  """GELU of the normalised input, computed in float32 or wider; the result has the input's type.

  For the backward pass it keeps the input, in the input's type, and mean and inverse deviation
  of every group. Each pass reads a large input twice: once for the sums, once for the result.

  Args:
    channels: C.
    eps: added to the variance.
  """

  def __init__(self, channels: int, eps: float):
    self.groups, self.eps = channels // math.gcd(channels, GROUP), eps
    self.scale = nnx.Param(jnp.ones((channels,), jnp.float32), axes=("embed",))
    self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32), axes=("embed",))

  def __call__(self, x_BSSC: Float[Array, "B S S C"]) -> Float[Array, "B S S C"]:
    return _activated(x_BSSC, self.scale[...], self.bias[...], self.groups, self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _activated(x: Array, scale: Array, bias: Array, groups: int, eps: float) -> Array:
  return _activated_fwd(x, scale, bias, groups, eps)[0]


def _activated_fwd(x, scale, bias, groups, eps):
  wide = _wide(x)
  mean_BG = _of_groups(wide.mean((1, 2)), groups)
  # The variance as a difference of means needs one pass over x in place of two. In float32 it is
  # wrong by 1e-7 of the squared mean, which here is about as large as the variance.
  square_BG = _of_groups((wide * wide).mean((1, 2)), groups)
  inverse_BG = jax.lax.rsqrt(jnp.maximum(square_BG - mean_BG**2, 0) + eps)
  unit = _unit(x, mean_BG, inverse_BG)
  return jax.nn.gelu(unit * scale + bias).astype(x.dtype), (x, mean_BG, inverse_BG, scale, bias)


def _activated_bwd(groups, eps, kept, bar):
  del eps
  x, mean_BG, inverse_BG, scale, bias = kept
  unit, normalised_bar = _before_gelu(x, mean_BG, inverse_BG, scale, bias, bar)
  along_BC, offset_BC = (normalised_bar * unit).mean((1, 2)), normalised_bar.mean((1, 2))
  # Before this barrier are the sums over an image's pixels, after it the element-wise operations.
  # Without it XLA writes the gradient of the normalised values in float32 for both.
  x, bar, along_BG, offset_BG = jax.lax.optimization_barrier(
    (x, bar, _of_groups(along_BC * scale, groups), _of_groups(offset_BC * scale, groups))
  )
  unit, normalised_bar = _before_gelu(x, mean_BG, inverse_BG, scale, bias, bar)
  spread = functools.partial(_spread, channels=x.shape[-1])
  x_bar = normalised_bar * scale - spread(offset_BG) - unit * spread(along_BG)
  pixels = x.shape[1] * x.shape[2]
  scale_bar, bias_bar = along_BC.sum(0) * pixels, offset_BC.sum(0) * pixels
  x_bar = (x_bar * spread(inverse_BG)).astype(x.dtype)
  return x_bar, scale_bar.astype(scale.dtype), bias_bar.astype(bias.dtype)


def _before_gelu(x, mean_BG, inverse_BG, scale, bias, bar) -> tuple[Array, Array]:
  """The normalised values before scale and bias, and the gradient of GELU's input."""
  unit = _unit(x, mean_BG, inverse_BG)
  _, back = jax.vjp(jax.nn.gelu, unit * scale + bias)
  return unit, back(bar.astype(unit.dtype))[0]


def _unit(x: Array, mean_BG: Array, inverse_BG: Array) -> Array:
  """x with mean 0 and variance 1 in each image and group."""
  channels = x.shape[-1]
  return (_wide(x) - _spread(mean_BG, channels)) * _spread(inverse_BG, channels)


def _of_groups(x_BC: Array, groups: int) -> Float[Array, "B G"]:
  """The mean over the channels of each group."""
  return x_BC.reshape(x_BC.shape[0], groups, -1).mean(-1)


def _spread(x_BG: Array, channels: int) -> Float[Array, "B 1 1 C"]:
  """A group's number for each of its channels."""
  return jnp.repeat(x_BG, channels // x_BG.shape[-1], -1)[:, None, None]


def _wide(x: Array) -> Any:
  """x in float32 or wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


_activated.defvjp(_activated_fwd, _activated_bwd)
