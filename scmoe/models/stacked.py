"""A stack of layers that are alike: each parameter is one array with a leading layer dimension.

One array for all layers keeps checkpoints, optimizer and compilation small. It costs copies if the
layers are written out one after the other, as on GPUs (`overlap.unroll`), instead of run by a scan:
each layer reads a slice of the array, and the layers' gradients have to become one array again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

PyTree = Any
STACKS = ("stages", "dense")  # names of a trunk's stacks, in the paths of their parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
  """A stack's array split into one array per layer.

  Attributes:
    parts: for each layer an array, or an object in place of one (`scmoe.offload.memory.Int8` or
      `OnDisk`). The arrays have no dimension of layers if `split_layers` made them, and one of
      size 1 in the training state (`scmoe.training.host_state`).
  """

  parts: tuple[Any, ...]


def is_apart(leaf: Any) -> bool:
  """Whether a leaf of a stack is an `Apart`."""
  return isinstance(leaf, Apart)


def stacked(make: Callable[[Array], Any], keys: Array) -> Any:
  """One module for L layers: each parameter has a leading dimension L, with a slice for each key.

  Args:
    make: makes the module of one layer from a random key.
    keys: [L] typed keys.
  """
  graphs = []  # filled while vmap traces: a second trace for the graph would double the time

  def split(key: Array) -> nnx.State:
    graph, params = nnx.split(make(key))
    graphs.append(graph)
    return params

  params = jax.vmap(split)(keys)
  return nnx.merge(graphs[0], params)


def each_layer(tree: PyTree, count: int) -> list[PyTree]:
  """The parameters of a stack as L trees, one for each layer.

  Args:
    tree: leaves [L, ...] or `Apart`.
    count: L.
  """
  take = lambda x, i: x.parts[i] if is_apart(x) else x[i]
  return [jax.tree.map(lambda x, i=i: take(x, i), tree, is_leaf=is_apart) for i in range(count)]


def split_layers(tree: PyTree, count: int, keep: Callable[[str, Array], bool]) -> PyTree:
  """The same stack with an `Apart` in place of each array, except those that stay stacked.

  A loop around the layers, for example over tokens, would copy each layer's slice of a stacked
  array in every iteration. It copies no array that belongs to one layer.

  Args:
    tree: leaves [L, ...]; an `Apart` stays one.
    count: L.
    keep: (path as `jax.tree_util.keystr` writes it, array) -> whether the array stays stacked.
  """

  def split(path: tuple, x: Array) -> Any:
    stays = is_apart(x) or keep(jax.tree_util.keystr(path), x)
    return x if stays else Apart(tuple(x[i] for i in range(count)))

  return jax.tree_util.tree_map_with_path(split, tree, is_leaf=is_apart)


def stacked_again(tree: PyTree) -> PyTree:
  """The inverse of `split_layers`: all leaves [L, ...], in the dtype of the first layer's array."""
  stack = lambda x: padded_stack(x.parts[0], *x.parts) if is_apart(x) else x
  return jax.tree.map(stack, tree, is_leaf=is_apart)


def stack_outputs(outputs: Sequence[PyTree]) -> PyTree:
  """Stacks the outputs of layers that are written out, as a scan over the layers would.

  Args:
    outputs: for each layer, in order, a tree of arrays of equal shapes.
  """
  with jax.named_scope("stack"):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unstacked(tree: PyTree, count: int) -> list[PyTree]:
  """`each_layer`; its backward pass joins the layers' gradients by `padded_stack`.

  The gradient of an `Apart` is an `Apart`: these gradients are not joined.
  """
  return each_layer(tree, count)


def _unstacked_bwd(count: int, dtypes: PyTree, bars: list[PyTree]) -> tuple[PyTree]:
  del count
  with jax.named_scope("stack"):
    stack = lambda like, *parts: Apart(parts) if is_apart(like) else padded_stack(like, *parts)
    return (jax.tree.map(stack, dtypes, *bars, is_leaf=is_apart),)


def _dtypes(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), tree)


unstacked.defvjp(lambda tree, count: (each_layer(tree, count), _dtypes(tree)), _unstacked_bwd)


def padded_stack(like: Array, *layers: Array) -> Array:
  """The layers' arrays as one array [L, ...] in the dtype of `like`.

  It is a sum of arrays, each padded with zeros to [L, ...], so that XLA fuses it into the kernel
  that reads it (optimizer or accumulation). With a concatenation XLA either copies the operands or
  makes that kernel take 1.4 times as long. If each layer is written into its slice of an array, XLA
  copies the layer twice (experiments/LOG.md, 2026-11-22).
  """
  count, zero = len(layers), jnp.zeros((), like.dtype)
  pads = [((i, count - 1 - i, 0), *((0, 0, 0),) * x.ndim) for i, x in enumerate(layers)]
  wide = [jax.lax.pad(x[None].astype(like.dtype), zero, pad) for x, pad in zip(layers, pads)]
  return functools.reduce(jnp.add, wide)


def leading_dimensions(path: Any) -> int:
  """Number of leading dimensions of a parameter that count layers: 1 in a stack, else 0.

  Args:
    path: the parameter's path in a model, as `jax.tree_util` gives it.
  """
  return int(any(getattr(key, "key", None) in STACKS for key in path))
