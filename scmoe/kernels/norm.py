"""The norm of a single token in one kernel: XLA takes one for each sum over the row, and one more.

D  width
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.pipeline import compiled, interpretation

_WIDEST = 8192  # numbers that a warpgroup holds: 64 a thread
_MULTIPLE = 256  # two numbers for each of its threads


def takes(x_BD: Array, backend: str = "auto") -> bool:
  """Whether the kernel takes this: one row of 16-bit floats, D a multiple of 256, at most 8192."""
  width = x_BD.shape[-1]
  fits = x_BD.size == width and width % _MULTIPLE == 0 and width <= _WIDEST
  # Asked last: it says what it decides.
  return fits and resolve_backend(backend, x_BD.dtype, width) == "mosaic_gpu"


def normalised(
  x_BD: Array, scale_D: Array, bias_D: Array | None, *, centred: bool, eps: float
) -> Array:
  """LayerNorm or RMSNorm of a single row that the kernel `takes`, in float32; not differentiable.

  Args:
    x_BD: [..., D].
    scale_D, bias_D: float32.
    centred: whether the mean is taken off first.
    eps: added to the mean square.
  """
  more = () if bias_D is None else (bias_D,)
  run = functools.partial(_normalised, centred=centred, eps=eps, simulation=interpretation())
  return run(x_BD.reshape(1, -1), scale_D, *more).reshape(x_BD.shape)


@functools.partial(jax.jit, static_argnames=("centred", "eps", "simulation"))
def _normalised(
  x_1D: Array, scale_D: Array, *bias: Array, centred: bool, eps: float, simulation: Any
) -> Array:
  del simulation  # the program depends on it
  width = x_1D.shape[1]

  def body(x, scale, *rest):
    *bias, y = rest
    wide = x[0].astype(jnp.float32)
    if centred:
      wide = wide - jnp.sum(wide) / width
    wide = wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps) * scale[...].astype(jnp.float32)
    for b in bias:
      wide = wide + b[...].astype(jnp.float32)
    y[0] = wide.astype(y.dtype)

  run = compiled(body, out_type=jax.ShapeDtypeStruct(x_1D.shape, x_1D.dtype))
  return run(x_1D, scale_D, *bias)
