"""Alike layers whose parameters lie in one array each: stacked, taken apart, and their gradients.

One array for all layers keeps checkpoints, optimizer and compilation small. What it costs is
copies, so GPUs run the layers written out, one after the other (`overlap.unroll`), and whoever
reads the layers' gradients reads them where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

PyTree = Any

# Elements of a layer's array below which its sum of gradients shares a kernel with the others'.
SMALL = 1 << 18


def stacked(make: Callable[[Array], Any], keys: Array) -> Any:
  """A module whose parameters carry a leading dimension, one slice per key."""
  graph = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))[0]
  params = jax.vmap(lambda key: nnx.split(make(key))[1])(keys)
  return nnx.merge(graph, params)


def taken_apart(tree: PyTree, count: int, whole: Callable[[str, Array], bool]) -> PyTree:
  """A stack of so many layers for `layers`, each layer's arrays by themselves (`Apart`).

  For a loop around the layers: what it slices, it copies every time.

  Args:
    tree: leaves [L, ...].
    count: L.
    whole: of a path as `jax.tree_util.keystr` has it, and the array there, whether it stays as it
      is.
  """

  def take(path: tuple, x: Array) -> Any:
    keep = whole(jax.tree_util.keystr(path), x)
    return x if keep else Apart(tuple(x[i] for i in range(count)))

  return jax.tree_util.tree_map_with_path(take, tree)


def layers(
  copies: Sequence[PyTree], count: int, sums: PyTree, others: PyTree, into: PyTree = None
) -> Iterator[tuple[PyTree, PyTree, PyTree]]:
  """What `jax.lax.scan` would give its body of (copies, sums, others), a layer at a time.

  Args:
    copies: trees with leaves [L, ...], alike: the same parameters, once or several times; or of
      `taken_apart`.
    count: L.
    sums: like one of them, or of `large_apart`, of earlier microbatches
      (`scmoe.parallel.gradients.Reduction`), or None.
    others: leaves [L, ...] without a gradient.
    into: float32 like one of the copies, or of `large_apart`, or None. Given, their gradients are
      added to it: its gradient is the sum, and the parameters have none
      (`scmoe.parallel.gradients.added_to`).
  """
  own: Any = _apart(list(copies), count) if into is None else _apart_into(into, list(copies), count)
  apart: Any = _apart(sums, count)
  return zip(own, apart, each_layer(others, count))


def joined(made: Sequence[PyTree]) -> PyTree:
  """The layers' results, stacked."""
  with jax.named_scope("stack"):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *made)


def each_layer(tree: PyTree, count: int) -> list[PyTree]:
  """The parameters of every layer of a stack, or of one that is `taken_apart`."""
  take = lambda x, i: x.parts[i] if is_apart(x) else x[i]
  return [jax.tree.map(lambda x, i=i: take(x, i), tree, is_leaf=is_apart) for i in range(count)]


def large_apart(sums: PyTree, count: int) -> PyTree:
  """Sums of a stack's gradients with each layer's by itself, so that its kernel adds in place and
  reads nothing else; small ones stay together.

  Args:
    sums: leaves [L, ...].
    count: L.
  """
  return taken_apart(sums, count, lambda _, x: x.size < SMALL * count)


def put_together(tree: PyTree) -> PyTree:
  """What was `taken_apart` in one array again; see `_together`."""
  join = lambda x: _together(x.parts[0], *x.parts) if is_apart(x) else x
  return jax.tree.map(join, tree, is_leaf=is_apart)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
  """What was one array of a stack: each layer's own.

  Attributes:
    parts: as many as layers; arrays, or what stands for one (`scmoe.offload.experts.Int8`).
  """

  parts: tuple[Any, ...]


def is_apart(leaf: Any) -> bool:
  """Whether that is an `Apart`."""
  return isinstance(leaf, Apart)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apart(tree: PyTree, count: int) -> list[PyTree]:
  """The layers of a stack, each by itself; their gradients are put together as `_together` does."""
  return each_layer(tree, count)


def _apart_bwd(count: int, dtypes: PyTree, bars: list[PyTree]) -> tuple[PyTree]:
  del count
  with jax.named_scope("stack"):
    own = lambda like, *parts: Apart(parts) if is_apart(like) else _together(like, *parts)
    return (jax.tree.map(own, dtypes, *bars, is_leaf=is_apart),)


_apart.defvjp(lambda tree, count: (each_layer(tree, count), _types(tree)), _apart_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _apart_into(into: PyTree, copies: list[PyTree], count: int) -> list[list[PyTree]]:
  """`_apart`, with the gradients added up in place."""
  return each_layer(copies, count)


def _into_bwd(count: int, into: PyTree, bars: list[list[PyTree]]) -> tuple[PyTree, None]:
  del count
  with jax.named_scope("accumulate"):
    for of_copy in zip(*bars):
      into = jax.tree.map(_added, into, *of_copy, is_leaf=is_apart)
  return into, None


_apart_into.defvjp(lambda into, copies, count: (each_layer(copies, count), into), _into_bwd)


def _added(total: Array | Apart, *parts: Array) -> Array | Apart:
  if isinstance(total, Apart):
    return Apart(tuple(own + part.astype(own.dtype) for own, part in zip(total.parts, parts)))
  return total + _together(total, *parts)


def _types(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), tree)


def _together(like: Array, *parts: Array) -> Array:
  """The layers' arrays in one, of the type of `like`.

  As a sum of arrays padded with zeros, which the kernel that reads it (optimizer, accumulation)
  reads where they are: as a concatenation they are copied, or the kernel takes 1.4 times as long,
  and written one by one into their places they are copied twice (experiments/LOG.md, 2026-11-22).
  """
  ahead = range(len(parts))
  pads = [((i, len(parts) - 1 - i, 0), *((0, 0, 0),) * part.ndim) for i, part in zip(ahead, parts)]
  zero = jnp.zeros((), like.dtype)
  wide = [jax.lax.pad(p[None].astype(like.dtype), zero, pad) for p, pad in zip(parts, pads)]
  return functools.reduce(jnp.add, wide)
