"""The norm of a single token in one kernel; XLA may need several.

D  width
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.launch import compiled, interpretation
from scmoe.kernels.one_row.without_gradient import without_gradient

_WIDEST = 8192  # The most numbers that a warpgroup holds: 64 for each of 128 threads.
_MULTIPLE = 256  # D is a multiple of this: two numbers for each thread of a warpgroup.


def takes(x_BD: Array, backend: str = "auto") -> bool:
  """Whether the kernel runs for x.

  It takes one row of 16-bit floats, with D a multiple of 256 and at most 8192, where `backend`
  stands for the kernels (`resolve_backend`).

  Raises:
    ValueError: for one row of such a D, the backend is unknown or "mosaic_gpu" cannot take the type
      of x.
  """
  width = x_BD.shape[-1]
  fits = x_BD.size == width and width % _MULTIPLE == 0 and width <= _WIDEST
  # `resolve_backend` is called last, because it logs its decision.
  return fits and resolve_backend(backend, x_BD.dtype, width) == "mosaic_gpu"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalisation:
  """Parameters of a LayerNorm or RMSNorm over the last dimension.

  Attributes:
    scale_D: float32.
    bias_D: float32, or None.
    centred: whether the mean is subtracted first (LayerNorm).
    eps: added to the mean square under the root (after centring, the mean square is the variance).
  """

  scale_D: Array
  bias_D: Array | None
  centred: bool = dataclasses.field(metadata={"static": True})
  eps: float = dataclasses.field(metadata={"static": True})

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The scale, and the bias where there is one."""
    return (self.scale_D,) if self.bias_D is None else (self.scale_D, self.bias_D)

  def __call__(self, x: Array) -> Array:
    """The norm without a kernel: computed in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True) if self.centred else wide
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps) * self.scale_D
    return (wide if self.bias_D is None else wide + self.bias_D).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalised:
  """A row, and the norm that is still to be applied to it: a `linear.ComputedRow`.

  Attributes:
    x_BD: a single row, [..., D].
    norm: the norm to apply to it.
  """

  x_BD: Array
  norm: Normalisation

  @property
  def shape(self) -> tuple[int, ...]:
    return self.x_BD.shape

  @property
  def width(self) -> int:
    """D, the width of x."""
    return self.shape[-1]

  @property
  def size(self) -> int:
    """How many numbers x has."""
    return self.x_BD.size

  @property
  def dtype(self) -> Any:
    return self.x_BD.dtype

  @property
  def arrays(self) -> tuple[Array, ...]:
    """x as [1, D], the scale, and the bias where there is one."""
    return (self.x_BD.reshape(1, -1), *self.norm.arrays)

  def takes(self, rows: int, backend: str) -> bool:
    """Whether the norm's kernel takes the whole row; the length of a CTA's part plays no role."""
    del rows
    return takes(self.x_BD, backend)

  def write(self, arrays: Any, part: Any, to: Any) -> None:
    """Writes a part of the normalised row, rounded to the dtype of x, to a float32 reference.

    Args:
      arrays: references to x, to the scale, and to the bias where there is one.
      part: slice of the row.
      to: float32 reference, as long as the part.
    """
    x, *arrays = arrays
    to[...] = of_part(self.norm, x, arrays, part).astype(x.dtype).astype(jnp.float32)

  def __call__(self) -> Array:
    """The normalised row without a kernel, [..., D]."""
    return self.norm(self.x_BD)

  def alone(self) -> Array:
    """The normalised row, [..., D]: by a kernel of its own where that takes the row, else by XLA.

    Where a gradient is asked for, XLA computes the row and the gradient.
    """
    if not takes(self.x_BD):
      return self()
    return without_gradient(normalised, lambda x, norm: norm(x), self.x_BD, self.norm)


def normalised(x_BD: Array, norm: Normalisation) -> Array:
  """The norm of a single row that the kernel `takes`: [..., D] in the dtype of x.

  Not differentiable.
  """
  y_1D = _normalised(x_BD.reshape(1, -1), norm, simulation=interpretation())
  return y_1D.reshape(x_BD.shape)


@functools.partial(jax.jit, static_argnames="simulation")
def _normalised(x_1D: Array, norm: Normalisation, *, simulation: Any) -> Array:
  del simulation  # only makes jit compile anew for each simulation

  def body(x, *rest):
    *arrays, y = rest
    y[0] = of_part(norm, x, arrays, pl.ds(0, x.shape[1])).astype(y.dtype)

  run = compiled(body, out_type=jax.ShapeDtypeStruct(x_1D.shape, x_1D.dtype))
  return run(x_1D, *norm.arrays)


def of_part(norm: Normalisation, x: Any, arrays: Any, part: Any) -> Array:
  """A part of the normalised row in float32, as one warpgroup of a kernel computes it.

  Args:
    norm: the norm.
    x: reference to the whole row, [1, D].
    arrays: references to the scale, and to the bias where there is one.
    part: slice of the row.
  """
  width = x.shape[1]
  # All loads begin before the first sum: a load behind a sum would wait for it.
  wide, found = x[0].astype(jnp.float32), x[0, part].astype(jnp.float32)
  scale, *bias = (a[part] for a in arrays)
  if norm.centred:
    mean = jnp.sum(wide) / width
    wide, found = wide - mean, found - mean
  found = found * lax.rsqrt(jnp.sum(wide * wide) / width + norm.eps) * scale
  for b in bias:
    found = found + b
  return found
