"""Sums of gradients over the devices that hold the same parameter.

A parameter's PartitionSpec says which devices those are. On a mesh of data=2 x expert=2, the weight
of a norm, `P()`, is on all four devices: its gradients are summed over both axes. An expert's,
`P("expert")`, is on the two devices of its column of the data axis: over that axis only.

`scmoe.models.gradient_sums` decides when the sums are made.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from scmoe.parallel.mesh import AXES, BATCH_AXES, axis_size

PyTree = Any

STACKED = 32  # layers at most in an array that `global_norm` reads layer by layer


def reduce_gradients(grads: PyTree, specs: PyTree, dtype: str = "float32") -> PyTree:
  """Sums of gradients over all devices that hold the same parameter, after the backward pass.

  Args:
    grads: this device's shares of the gradients, in any type.
    specs: PartitionSpecs like the parameters.
    dtype: type in which they travel.

  Returns:
    float32 gradients of the whole batch, this device's shares.
  """
  reduce = lambda grad, spec: sum_over_devices(grad, travels_over(spec), dtype)
  with jax.named_scope("gradients"):
    return jax.tree.map(reduce, grads, specs)


def sum_over_devices(grad: Array, axes: tuple[str, ...], dtype: str) -> Array:
  """The float32 sum of a gradient over mesh axes.

  Args:
    grad: this device's gradient.
    axes: result of `travels_over`; (): there is nothing to sum.
    dtype: type in which it travels.
  """
  if axes:
    grad = jax.lax.psum(grad.astype(dtype), axes)
  return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


def travels_over(spec: P) -> tuple[str, ...]:
  """Mesh axes over which a parameter's gradients are summed; () if no other device holds it."""
  split = axes_of(spec)
  return tuple(axis for axis in BATCH_AXES if axis not in split and axis_size(axis) > 1)


def axes_of(spec: P) -> tuple[str, ...]:
  """Mesh axes that split an array."""
  parts = [(part,) if isinstance(part, str) else part or () for part in spec]
  return tuple(axis for part in parts for axis in part)


def global_norm(grads: PyTree, specs: PyTree) -> Array:
  """Euclidean norm of all gradients, float32 []; an element that several devices hold counts once.

  Args:
    grads: this device's shares of reduced gradients.
    specs: PartitionSpecs like the parameters.
  """

  def square(grad: Array, spec: P) -> Array:
    copies = axis_size(*AXES) // axis_size(*axes_of(spec))
    squares = lambda part: jnp.sum(jnp.square(part.astype(jnp.float32)))
    # Layers one by one: XLA then reads each layer's gradient from the kernel that made it instead
    # of stacking them first.
    parts = grad if grad.ndim > 2 and len(grad) <= STACKED else [grad]
    return jnp.stack([squares(part) for part in parts]).sum() / copies

  total = sum(jax.tree.leaves(jax.tree.map(square, grads, specs)))
  over = tuple(axis for axis in AXES if axis_size(axis) > 1)
  with jax.named_scope("gradients"):
    return jnp.sqrt(jax.lax.psum(total, over) if over else total)
