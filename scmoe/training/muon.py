"""Muon: the update of a matrix is its Nesterov momentum, made nearly orthogonal and scaled.

A parameter's name and its module's say whether it is a matrix (`scmoe.models.matrices`). A
parameter of 12 stacked layers with 8 experts each is 96 matrices; the kernel [3, 3, in, out] of a
stem's convolution is one matrix with 9 · in rows. The iteration that makes them orthogonal is
optax's. Adam updates the rest, such as embeddings, the head, routers, norms, biases, and parameters
of a user's modules with other names.

Sources: K. Jordan et al., Muon (2024); the scale is that of J. Liu et al., "Muon is Scalable for
LLM Training" (arXiv 2502.16982), under which the learning rate and weight decay of AdamW fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from scmoe.models.matrices import holder_and_sides, kernel_sides
from scmoe.parallel.collectives import gathered
from scmoe.parallel.gradients import axes_of
from scmoe.parallel.mesh import own_share

# A parameter of more elements is a batch of its own: to join it with others would cost a copy of
# gradient and momentum, and each of its GPU kernels runs longer than its launch takes.
SMALL = 1 << 22


def dimensions(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
  """The input and output dimensions of a parameter's matrices; None if it is no matrix.

  They are counted from the end: -1 is the last dimension, and the outputs are the last dimensions,
  which follow the inputs.

  Args:
    path: of the parameter, as `jax.tree_util` gives it.
    leaf: the array, or its `jax.ShapeDtypeStruct`.
  """
  found = holder_and_sides(path, leaf.ndim)
  sides = kernel_sides(path, leaf.ndim) if found is None else found[1]
  return None if sides is None else MuonDimensionNumbers(*sides)


def muon_or(
  other: optax.GradientTransformation, *, beta: float, rms: float, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
  """Muon for matrices, `other` for the rest; updates are not multiplied by the learning rate yet.

  Args:
    other: the rule for parameters that are no matrices.
    beta: decay of the Nesterov momentum.
    rms: root mean square of a matrix's update, were it exactly orthogonal.
    specs: PartitionSpecs like the parameters; None: `update` gets whole arrays. If a matrix is
      split over several devices, each gathers gradient and momentum, and keeps its own part of the
      results.
  """
  spec_of = {}
  if specs is not None:
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    spec_of = {jax.tree_util.keystr(path): spec for path, spec in leaves}
  initial = scale_by_muon(beta=beta).init

  def each(change: Callable[[Any, Array, P], Array], tree: Any) -> Any:
    of = lambda path, leaf: change(path, leaf, spec_of.get(jax.tree_util.keystr(path), P()))
    return jax.tree_util.tree_map_with_path(of, tree)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    del params, extra
    whole = each(_gathered, updates)
    batches = _Batches(whole)
    together = scale_by_muon(beta=beta, weight_dimension_numbers=batches.dimensions)
    before = state._replace(mu=batches.joined(each(_gathered, state.mu)))
    results: Any = together.update(batches.joined(whole), before)
    found, after = batches.split(results[0]), batches.split(results[1].mu)
    scaled = jax.tree_util.tree_map_with_path(lambda path, x: _scaled(path, x, rms), found)
    return each(_share, scaled), results[1]._replace(mu=each(_share, after))

  kind = lambda path, leaf: "other" if dimensions(path, leaf) is None else "matrix"
  return optax.partition(
    {"matrix": optax.GradientTransformationExtraArgs(initial, update), "other": other},
    lambda params: jax.tree_util.tree_map_with_path(kind, params),
  )


class _Batches:
  """Which parameters' matrices are made orthogonal in one batch: those of one shape.

  The iteration is a chain of about 25 GPU kernels. If matrices are small, each of them takes longer
  to launch than to run. A model of eight blocks of width 256 has 18 parameters of matrices, but
  only six shapes, since a wide matrix and a tall one are transposes of each other. A parameter of
  more than `SMALL` elements is a batch of its own.

  Args:
    tree: parameters of matrices, or arrays like them.

  Attributes:
    dimensions: name of a batch -> input and output dimensions of its matrices.
  """

  def __init__(self, tree: Any):
    leaves, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
    self.dimensions: dict[str, MuonDimensionNumbers] = {}
    self.places: list[tuple[str, tuple[int, int] | None, tuple[int, ...]]] = []
    for path, leaf in leaves:
      numbers: Any = dimensions(path, leaf)
      name, sides = jax.tree_util.keystr(path), None
      if leaf.size <= SMALL:
        rows, columns = (math.prod(leaf.shape[d] for d in side) for side in numbers)
        sides = rows, columns
        name = f"{min(sides)} x {max(sides)} {leaf.dtype}"
        numbers = MuonDimensionNumbers((-2,), (-1,))
      self.dimensions[name] = numbers
      self.places.append((name, sides, leaf.shape))

  def joined(self, tree: Any) -> dict[str, Array]:
    """Name of a batch -> its matrices [count, rows, columns], with rows <= columns.

    A large parameter is alone in its batch and keeps its shape.

    Args:
      tree: arrays like those of the parameters.
    """
    parts: dict[str, list[Array]] = {}
    for leaf, (name, sides, _) in zip(jax.tree.leaves(tree), self.places):
      if sides is not None:
        leaf = leaf.reshape(-1, *sides)
        leaf = leaf if sides[0] <= sides[1] else leaf.mT
      parts.setdefault(name, []).append(leaf)
    return {name: own[0] if len(own) == 1 else jnp.concatenate(own) for name, own in parts.items()}

  def split(self, joined: dict[str, Array]) -> Any:
    """The tree whose `joined` this is."""
    begun, leaves = dict.fromkeys(joined, 0), []
    for name, sides, shape in self.places:
      leaf = joined[name]
      if sides is not None:
        count = math.prod(shape) // math.prod(sides)
        leaf = leaf[begun[name] : begun[name] + count]
        begun[name] += count
        leaf = leaf if sides[0] <= sides[1] else leaf.mT
      leaves.append(leaf.reshape(shape))
    return jax.tree.unflatten(self.treedef, leaves)


def _scaled(path: tuple[Any, ...], update: Array, rms: float) -> Array:
  """Orthogonal updates of matrices [m, n], of RMS 1 / sqrt(max(m, n)), scaled to an RMS of `rms`.

  They are nearly orthogonal, so the RMS is nearly that. If an input or output has several
  dimensions, such as heads and their width, m or n is their product.
  """
  numbers: Any = dimensions(path, update)
  sizes = (math.prod(update.shape[d] for d in side) for side in numbers)
  return update * jnp.asarray(rms * math.sqrt(max(sizes)), update.dtype)


def _gathered(path: tuple[Any, ...], x: Array, spec: P) -> Array:
  """A parameter's matrices, each one whole: gathered where several devices hold parts of a matrix.

  Where devices hold different whole matrices, e.g. of different experts, nothing is gathered.
  """
  for dimension, axes in _split(path, x, spec):
    x = gathered(x, dimension, axes, "gradients")
  return x


def _share(path: tuple[Any, ...], x: Array, spec: P) -> Array:
  """This device's part of gathered matrices: undoes `_gathered`."""
  for dimension, axes in _split(path, x, spec):
    x = own_share(x, dimension, *axes)
  return x


def _split(path: tuple[Any, ...], x: Array, spec: P) -> list[tuple[int, tuple[str, ...]]]:
  """(dimension, mesh axes that split it) for every split dimension of the matrices themselves."""
  numbers: Any = dimensions(path, x)
  if numbers is None:
    return []
  own = {x.ndim + d for side in numbers for d in side}
  found = [(i, axes_of(P(axes))) for i, axes in enumerate(spec)]
  return [(i, axes) for i, axes in found if axes and i in own]
