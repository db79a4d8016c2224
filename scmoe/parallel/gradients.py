"""Sums of gradients over the devices that hold the same parameter.

A parameter's PartitionSpec says which devices those are. On a mesh of data=2 x expert=2, the weight
of a norm, `P()`, is on all four devices: its gradients are summed over both axes. An expert's
weight, `P("expert")`, is on the two devices with the same index on the expert axis: its gradients
are summed over the data axis only. Devices that differ on the tensor axis alone see the same tokens
and have the same gradient already, so nothing is summed over that axis.

`scmoe.models.gradient_sums` decides when the sums are made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from scmoe.parallel.mesh import AXES, TOKEN_AXES, axis_size

PyTree = Any

# `global_norm` reads an array of more than two dimensions slice by slice along its first, for
# example layer by layer, if there are at most this many slices.
STACKED = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sent:
  """A stack's gradients that have left the device for the host's memory, layer by layer.

  Attributes:
    parts: for each layer its gradient [1, ...] in the host's memory, float32.
    squares_L: float32, for each layer the sum of the gradient's squares, made before it left.
  """

  parts: tuple[Array, ...]
  squares_L: Array


def is_sent(leaf: Any) -> bool:
  """Whether a leaf of gradients is a `Sent`."""
  return isinstance(leaf, Sent)


def reduce_gradients(grads: PyTree, specs: PyTree, dtype: str = "float32") -> PyTree:
  """Sums gradients over the devices that hold the same parameter and have other tokens.

  The sums are made after the whole backward pass. It is for training steps of your own: those of
  this package sum each layer's gradients as they are made (`models/gradient_sums.py`).

  Args:
    grads: the gradients from this device's tokens, for its shares of the parameters, in any dtype.
    specs: PartitionSpecs like the parameters.
    dtype: dtype in which the gradients travel.

  Returns:
    The gradients of the global batch for this device's shares, float32 (float64 stays).
  """
  reduce = lambda grad, spec: sum_over_devices(grad, travels_over(spec), dtype)
  with jax.named_scope("gradients"):
    return jax.tree.map(reduce, grads, specs)


def sum_over_devices(grad: Array, axes: tuple[str, ...], dtype: str) -> Array:
  """The sum of a gradient over mesh axes, float32 (float64 stays).

  Args:
    grad: this device's gradient.
    axes: result of `travels_over`; (): the gradient is only cast.
    dtype: dtype in which the gradient travels, and in which it is summed.
  """
  if axes:
    grad = jax.lax.psum(grad.astype(dtype), axes)
  return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


def travels_over(spec: P) -> tuple[str, ...]:
  """Mesh axes over which a parameter's gradients are summed.

  They are the axes whose devices have different tokens and the same part of the parameter; () if
  there is no such axis with more than one device.
  """
  split = axes_of(spec)
  return tuple(axis for axis in TOKEN_AXES if axis not in split and axis_size(axis) > 1)


def axes_of(spec: P) -> tuple[str, ...]:
  """Mesh axes over which the dimensions of an array with this PartitionSpec are split."""
  parts = [(part,) if isinstance(part, str) else part or () for part in spec]
  return tuple(axis for part in parts for axis in part)


def global_norm(grads: PyTree, specs: PyTree) -> Array:
  """Euclidean norm of all gradients, float32 []; an element that several devices hold counts once.

  Args:
    grads: this device's shares of reduced gradients; may be `Sent`.
    specs: PartitionSpecs like the parameters.
  """

  def square(grad: Any, spec: P) -> Array:
    copies = axis_size(*AXES) // axis_size(*axes_of(spec))
    if is_sent(grad):
      return grad.squares_L.sum() / copies
    squares = lambda part: jnp.sum(jnp.square(part.astype(jnp.float32)))
    # Layers one by one: XLA then reads each layer's gradient from the kernel that made it, and does
    # not have to stack the gradients first.
    parts = grad if grad.ndim > 2 and len(grad) <= STACKED else [grad]
    return jnp.stack([squares(part) for part in parts]).sum() / copies

  total = sum(jax.tree.leaves(jax.tree.map(square, grads, specs, is_leaf=is_sent)))
  over = tuple(axis for axis in AXES if axis_size(axis) > 1)
  with jax.named_scope("gradients"):
    return jnp.sqrt(jax.lax.psum(total, over) if over else total)
