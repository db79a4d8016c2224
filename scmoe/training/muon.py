"""Muon: a matrix's momentum, made orthogonal, is its update.

Which parameters are matrices is known by their names; a stack of layers, and of experts in each,
is as many matrices. The iteration is optax's. Embeddings, the head, routers, norms, biases and
what a module of one's own calls otherwise are AdamW's.

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

from scmoe.parallel.collectives import gathered
from scmoe.parallel.gradients import axes_of
from scmoe.parallel.mesh import own_share

# Name of a parameter -> (dimensions that it reads, dimensions that it writes), from the last one.
# What stands before them are layers and experts.
_HEADS_OUT, _HEADS_IN, _PLAIN = ((-3,), (-2, -1)), ((-3, -2), (-1,)), ((-2,), (-1,))
MATRICES = {
  "query": _HEADS_OUT,
  "key": _HEADS_OUT,
  "value": _HEADS_OUT,
  "kv_up": _HEADS_OUT,
  "out": _HEADS_IN,
  "query_down": _PLAIN,
  "kv_down": _PLAIN,
  "up": _PLAIN,
  "gate": _PLAIN,
  "down": _PLAIN,
}
_HOLDERS = ("attention", "mlp", "experts", "shared")  # modules whose parameters these are


def dimensions(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
  """Which dimensions of a parameter make a matrix; None: it is none.

  Args:
    path: of `jax.tree_util`.
    leaf: the array, or its shape.
  """
  names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
  if len(names) < 2 or names[-2] not in _HOLDERS or names[-1] not in MATRICES:
    return None
  reads, writes = MATRICES[names[-1]]
  if leaf.ndim < len(reads) + len(writes):
    return None
  return MuonDimensionNumbers(reads, writes)


def muon_or(
  other: optax.GradientTransformation, *, beta: float, rms: float, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
  """Muon for matrices, `other` for the rest; what both give is still to be multiplied by the rate.

  Args:
    other: of the parameters that are no matrices.
    beta: decay of the momentum (Nesterov's).
    rms: root mean square of an update of a matrix that has been made orthogonal.
    specs: PartitionSpecs like the parameters; None: `update` sees them whole. A matrix that several
      devices share is gathered, and each keeps its part of the update.
  """
  spec_of = {}
  if specs is not None:
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    spec_of = {jax.tree_util.keystr(path): spec for path, spec in leaves}
  named = lambda tree: jax.tree_util.tree_map_with_path(dimensions, tree)
  inner = scale_by_muon(beta=beta, weight_dimension_numbers=named)

  def each(change: Callable[[Array, P], Array], tree: Any) -> Any:
    of = lambda path, leaf: change(leaf, spec_of.get(jax.tree_util.keystr(path), P()))
    return jax.tree_util.tree_map_with_path(of, tree)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    del params, extra
    whole = state._replace(mu=each(_gathered, state.mu))
    results: Any = inner.update(each(_gathered, updates), whole)
    found, after = results
    scaled = jax.tree_util.tree_map_with_path(lambda path, x: _scaled(path, x, rms), found)
    return each(_share, scaled), after._replace(mu=each(_share, after.mu))

  kind = lambda path, leaf: "other" if dimensions(path, leaf) is None else "matrix"
  return optax.partition(
    {"matrix": optax.GradientTransformationExtraArgs(inner.init, update), "other": other},
    lambda params: jax.tree_util.tree_map_with_path(kind, params),
  )


def _scaled(path: tuple[Any, ...], update: Array, rms: float) -> Array:
  """An orthogonal matrix [m, n] has a root mean square of 1 / sqrt(max(m, n)); then `rms`."""
  numbers: Any = dimensions(path, update)
  sizes = (math.prod(update.shape[d] for d in side) for side in numbers)
  return update * jnp.asarray(rms * math.sqrt(max(sizes)), update.dtype)


def _gathered(x: Array, spec: P) -> Array:
  """All of a matrix: the dimensions that several devices share; experts stay where they are."""
  for dimension, axes in _split(x, spec):
    x = gathered(x, dimension, axes, "gradients")
  return x


def _share(x: Array, spec: P) -> Array:
  """This device's part of what `_gathered` gave."""
  for dimension, axes in _split(x, spec):
    x = own_share(x, dimension, *axes)
  return x


def _split(x: Array, spec: P) -> list[tuple[int, tuple[str, ...]]]:
  """The dimensions that are split, but for the experts', and the axes that split them."""
  found = [(i, axes_of(P(axes))) for i, axes in enumerate(spec)]
  return [(i, axes) for i, axes in found if axes and axes != ("expert",) and i < x.ndim]
