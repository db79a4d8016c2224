"""Experts' parameters that lie in the host's memory in training (`mesh.experts_in=host`).

A pair's experts are copied to the device while the pair before it, in the order of the pass,
computes, and their memory is free when the pair has computed (vertical prefetch of SE-MoE, arXiv
2205.10034). The backward pass copies them again. So the device holds the experts of two pairs. A
pair's gradients of its experts leave the device while the pair below computes its own. Three pairs:

  forward    fetch 0 | fetch 1, pair 0 | fetch 2, pair 1 | pair 2
  backward   pair 2, fetch 1 | pair 1, fetch 0, store 2 | pair 0, store 1 | store 0

`scmoe.models.regather` keeps this order of the fetches, which is that of parameters that ranks
share. Here stand the objects in place of the arrays.

The training state has an `Apart` of one array [1, ...] per layer in the host's memory in place of
a stack, since XLA copies whole arrays asynchronously, but not slices of them. `to_fetch` marks each
of them as `InHostMemory`. They have no gradient of their own, because each has a `GradientTotal`,
which lies in the host's memory too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from scmoe.models.stacked import is_apart, unstacked
from scmoe.offload.memory import is_on_host
from scmoe.parallel.shares import GATHERED, Gathering, Share, gathered, is_share

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InHostMemory:
  """One layer's parameter in the host's memory, in place of the array, in the manual region.

  Attributes:
    value: the array [1, ...] there.
    dtype: type in which the model reads the parameter; the device casts what it has fetched.
    how: with the name and the meaning that it has in `Share`: fetched again, and one pair ahead.
  """

  value: Any
  dtype: str = dataclasses.field(metadata={"static": True})
  how: ClassVar[Gathering] = Gathering(again=True, ahead=True)


def is_in_host_memory(leaf: Any) -> bool:
  """Whether a leaf is an `InHostMemory`."""
  return isinstance(leaf, InHostMemory)


def is_elsewhere(leaf: Any) -> bool:
  """Whether a leaf stands in place of an array that this device has to gather or to fetch."""
  return is_share(leaf) or is_in_host_memory(leaf)


def elsewhere_in(tree: PyTree) -> list[Share | InHostMemory]:
  """All `Share`s and `InHostMemory`s of a tree, in its order."""
  return [x for x in jax.tree.leaves(tree, is_leaf=is_elsewhere) if is_elsewhere(x)]


def to_fetch(params: PyTree, dtype: str) -> PyTree:
  """Parameters for the model: an `InHostMemory` in place of each array in the host's memory.

  Args:
    params: in the manual region, or arrays with NamedShardings.
    dtype: type in which the model reads what lies there.
  """
  return jax.tree.map(lambda x: InHostMemory(x, dtype) if is_on_host(x) else x, params)


def brought(leaves: Sequence[Any]) -> list[Any]:
  """The leaves with whole arrays on the device in place of `Share`s and `InHostMemory`s.

  An `InHostMemory`'s array loses its first dimension, of size 1. Other leaves stay as they are.
  """
  with jax.named_scope("fetch"):
    return gathered([_fetched(x) if is_in_host_memory(x) else x for x in leaves])


def _fetched(away: InHostMemory) -> Array:
  here = jax.device_put(away.value, jax.memory.Space.Device)
  return checkpoint_name(here[0].astype(away.dtype), GATHERED)


def pairs_of(copies: Sequence[PyTree], count: int) -> list[list[PyTree]]:
  """The parameters of every pair, once for each batch, from those of the stack; differentiable.

  jax takes a gradient of zero for an array of the device's memory, wherever the array lies. So no
  backward rule sees the `InHostMemory`s here.

  Args:
    copies: the stack, once for each batch; leaves [L, ...], or `Apart`s.
    count: L.
  """
  leaves, structure = jax.tree.flatten(list(copies), is_leaf=is_apart)
  here = [i for i, x in enumerate(leaves) if not (is_apart(x) and is_in_host_memory(x.parts[0]))]
  pairs = []
  for pair, own in enumerate(unstacked([leaves[i] for i in here], count)):
    found = dict(zip(here, own))
    parts = (found[i] if i in found else x.parts[pair] for i, x in enumerate(leaves))
    pairs.append(structure.unflatten(parts))
  return pairs


def held_back(copies: Sequence[PyTree], begun: Sequence[Array]) -> list[PyTree]:
  """The parameters, whose fetches wait until the values `begun` have been computed.

  Args:
    copies: a pair's parameters, once for each batch; only `InHostMemory`s wait.
    begun: without gradients.
  """
  flat, structure = jax.tree.flatten(list(copies), is_leaf=is_in_host_memory)
  here = [i for i, x in enumerate(flat) if is_in_host_memory(x)]
  values = [jax.lax.stop_gradient(flat[i].value) for i in here]
  tied, _ = jax.lax.optimization_barrier((values, list(begun)))
  for i, value in zip(here, tied):
    flat[i] = dataclasses.replace(flat[i], value=value)
  return structure.unflatten(flat)
