"""How gradients travel: sums over the devices that hold the same parameter, where and when."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from scmoe.parallel.mesh import AXES, BATCH_AXES, axis_size

PyTree = Any


def reduce_gradients(grads: PyTree, specs: PyTree, dtype: str = "float32") -> PyTree:
  """Sums of the devices' gradients over all that hold the same parameter: float32.

  All of them at once, behind the backward pass; `Reduction` does the same inside it.

  Args:
    grads: this device's shares of the gradients of what it differentiates, in any type.
    specs: PartitionSpecs like the parameters.
    dtype: in which they travel.
  """
  reduce = lambda grad, spec: _summed(grad, travels_over(spec), dtype)
  with jax.named_scope("gradients"):
    return jax.tree.map(reduce, grads, specs)


@dataclasses.dataclass(frozen=True)
class Reduction:
  """Sums over devices inside the backward pass, each as soon as its gradient is there.

  `copies` of parameters are the parameters. Then the gradient of a loss with respect to `sums` is

      sums + gradient of the parameters, added up over all devices that hold the same parameter

  in float32. Behind the last layer's gradient stands the next layer's backward pass, so that a
  schedule can lay its sum over devices beside that: SE-MoE's fused slices, one for each call.

  Attributes:
    sums: like the parameters, float32: what earlier microbatches of this device gave; None for a
      parameter that travels nowhere, whose gradient is taken as usual.
    specs: PartitionSpecs like the parameters.
    dtype: in which gradients travel.
    first: there are no earlier microbatches, and `sums` only has shapes.
  """

  sums: PyTree
  specs: PyTree
  dtype: str = "float32"
  first: bool = False

  def copies(self, trees: Sequence[PyTree]) -> list[PyTree]:
    """The same parameters, which may be there several times: their gradients are one.

    To be called once for each, before it is read.
    """
    sums, axes = self._sums(), [travels_over(spec) for spec in jax.tree.leaves(self.specs)]
    here = [i for i, total in enumerate(sums) if total is not None]
    static = (tuple(axes[i] for i in here), self.dtype, self.first)
    leaves, structures = zip(*map(jax.tree.flatten, trees))
    assert all(len(own) == len(sums) == len(axes) for own in leaves), "of other parameters"
    picked = [[own[i] for i in here] for own in leaves]
    same: Any = _reduced(static, picked, [sums[i] for i in here])
    for own, replaced in zip(leaves, same):
      for i, leaf in zip(here, replaced):
        own[i] = leaf
    return [jax.tree.unflatten(tree, own) for tree, own in zip(structures, leaves)]

  def part(self, *names: str) -> Reduction:
    """Of these entries of a dictionary of parameters."""
    some = lambda tree: {name: tree[name] for name in names}
    return dataclasses.replace(self, sums=some(self.sums), specs=some(self.specs))

  def _sums(self) -> list[Array | None]:
    return jax.tree.leaves(self.sums, is_leaf=lambda leaf: leaf is None)


@jax.custom_vjp
def added_to(sums: PyTree, copies: list[PyTree]) -> list[PyTree]:
  """The same parameters, whose gradients are added up on this device.

  The gradient of a loss with respect to `sums` is `sums` plus that of the parameters, which
  themselves get none.

  Args:
    sums: like the parameters, float32: what earlier microbatches gave.
    copies: the parameters, which may be there several times.
  """
  return copies


def _added_bwd(sums: PyTree, bars: list[PyTree]) -> tuple[PyTree, None]:
  with jax.named_scope("accumulate"):
    for bar in bars:
      sums = jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, bar)
    return sums, None


added_to.defvjp(lambda sums, copies: (copies, sums), _added_bwd)


def travels_over(spec: P) -> tuple[str, ...]:
  """Mesh axes over which a parameter's gradients are added up; () where its device is alone."""
  split = axes_of(spec)
  return tuple(axis for axis in BATCH_AXES if axis not in split and axis_size(axis) > 1)


STACKED = 32  # layers at most


def global_norm(grads: PyTree, specs: PyTree) -> Array:
  """Euclidean norm of a tree whose leaves lie on the mesh as `specs` say, each counted once."""

  def square(grad: Array, spec: P) -> Array:
    copies = axis_size(*AXES) // axis_size(*axes_of(spec))
    squares = lambda part: jnp.sum(jnp.square(part.astype(jnp.float32)))
    # A stack of layers by its layers: where they lie apart until they are read, one at a time is.
    parts = grad if grad.ndim > 2 and len(grad) <= STACKED else [grad]
    return jnp.stack([squares(part) for part in parts]).sum() / copies

  total = sum(jax.tree.leaves(jax.tree.map(square, grads, specs)))
  over = tuple(axis for axis in AXES if axis_size(axis) > 1)
  with jax.named_scope("gradients"):
    return jnp.sqrt(jax.lax.psum(total, over) if over else total)


def axes_of(spec: P) -> tuple[str, ...]:
  """Mesh axes that split an array."""
  parts = [(part,) if isinstance(part, str) else part or () for part in spec]
  return tuple(axis for part in parts for axis in part)


def _summed(grad: Array, over: tuple[str, ...], dtype: str) -> Array:
  if over:
    grad = jax.lax.psum(grad.astype(dtype), over)
  return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced(static: Any, copies: list[list[Array]], sums: list[Array]) -> list[list[Array]]:
  return copies


def _reduced_fwd(static, copies, sums):
  first = static[2]
  return copies, [None] * len(sums) if first else sums


def _reduced_bwd(static, sums, copies):
  axes, dtype, first = static
  with jax.named_scope("gradients"):
    totals: list[Any] = [None if first else total for total in sums]
    for bars in copies:
      wide = [bar.astype(jnp.promote_types(bar.dtype, jnp.float32)) for bar in bars]
      totals = [w if t is None else t + w for t, w in zip(totals, wide)]
    return None, [_summed(total, over, dtype) for total, over in zip(totals, axes)]


_reduced.defvjp(_reduced_fwd, _reduced_bwd)
