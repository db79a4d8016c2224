"""Alike layers whose parameters lie in one array each: stacked, taken apart, and their gradients.

One array for all layers keeps checkpoints, optimizer and compilation small. What it costs is
copies, so GPUs run the layers written out, one after the other (`overlap.unroll`), and the
gradients of the layers are written where they belong, as they come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

PyTree = Any

CONCATENATED = 4  # arrays that XLA's own kernel for it takes on a GPU


def stacked(make: Callable[[Array], Any], keys: Array) -> Any:
  """A module whose parameters carry a leading dimension, one slice per key."""
  graph = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))[0]
  params = jax.vmap(lambda key: nnx.split(make(key))[1])(keys)
  return nnx.merge(graph, params)


def layers(
  copies: Sequence[PyTree], sums: PyTree, others: PyTree, into: PyTree = None
) -> Iterator[tuple[PyTree, PyTree, PyTree]]:
  """What `jax.lax.scan` would give its body of (copies, sums, others), a layer at a time.

  Args:
    copies: trees with leaves [L, ...], alike: the same parameters, once or several times.
    sums: like one of them, of earlier microbatches (`scmoe.parallel.gradients.Reduction`), or None.
    others: leaves [L, ...] without a gradient.
    into: float32 like one of the copies, or None. Given, their gradients are added to it: its
      gradient is the sum, and the parameters have none (`scmoe.parallel.gradients.added_to`).
  """
  count = jax.tree.leaves(copies)[0].shape[0]
  own: Any = _apart(list(copies), count) if into is None else _apart_into(into, list(copies), count)
  apart: Any = _apart(sums, count)
  return zip(own, apart, _layers(others, count))


def joined(made: Sequence[PyTree]) -> PyTree:
  """The layers' results, stacked."""
  with jax.named_scope("stack"):
    return jax.tree.map(lambda *parts: jnp.stack(parts), *made)


def _layers(tree: PyTree, count: int) -> list[PyTree]:
  return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apart(tree: PyTree, count: int) -> list[PyTree]:
  """The layers of a stack, each by itself.

  Gradients of up to four are stacked by XLA's concatenation; of more, which it does at a fifth of
  the speed, each is written where it belongs (experiments/LOG.md, 2026-11-22).
  """
  return _layers(tree, count)


def _apart_bwd(count: int, tree: PyTree, bars: list[PyTree]) -> tuple[PyTree]:
  if count <= CONCATENATED:
    return (joined(bars),)
  with jax.named_scope("stack"):
    whole, write = jax.tree.map(jnp.zeros_like, tree), jax.lax.dynamic_update_index_in_dim
    for i in reversed(range(count)):
      whole = jax.tree.map(lambda x, bar, i=i: write(x, bar, i, 0), whole, bars[i])
    return (whole,)


_apart.defvjp(lambda tree, count: (_layers(tree, count), tree), _apart_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _apart_into(into: PyTree, copies: list[PyTree], count: int) -> list[list[PyTree]]:
  """`_apart`, with the gradients added up in place, a layer at a time."""
  return _layers(copies, count)


def _into_bwd(count: int, into: PyTree, bars: list[list[PyTree]]) -> tuple[PyTree, None]:
  def add(total: Array, bar: Array, i: int) -> Array:
    # Read from what has been written so far: a read of what was there before costs a copy of it.
    own = jax.lax.dynamic_index_in_dim(total, i, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, own + bar.astype(total.dtype), i, 0)

  with jax.named_scope("accumulate"):
    for i in reversed(range(count)):
      for bar in bars[i]:
        into = jax.tree.map(functools.partial(add, i=i), into, bar)
  return into, None


_apart_into.defvjp(lambda into, copies, count: (_layers(copies, count), into), _into_bwd)
