"""Gathers the parameters of written-out pairs one pair ahead, in both passes.

It serves `mesh.shard_state=parameters` with `mesh.gather_ahead`. A pair's parameters are gathered
while the pair before it, in the order of the pass, computes. Experts in the host's memory
(`mesh.experts_in=host`, `scmoe.models.fetched`) are fetched in the same order. Three pairs:

  forward    gather 0 | gather 1, pair 0 | gather 2, pair 1 | pair 2
  backward   pair 2, gather 1 | pair 1, gather 0 | pair 0

The last pair keeps its parameters, because its backward pass comes next. So memory holds the whole
parameters of two pairs at a time. Two things bring this order about. Barriers let a gather begin
when the pair beside it begins: without them XLA could gather all pairs first, or take the second
gather of a pair for a repetition of the first, and keep all parameters. And a gather and the pair
beside it read no result of each other, so XLA's latency-hiding scheduler may run both at once.

Differentiation would keep a pair's whole parameters for its backward pass. Here they are removed
from the kept values. `_pair` returns them as an input of the next pair, which does not read them.
The backward pass of the next pair gathers them again, and returns them in the place of the gradient
of that input. So they arrive at the backward pass of the pair that reads them. No gradient is lost:
each pair returns the gradient of its own parameters.

A scan cannot do this: XLA moves no collective from one of its iterations to another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.models.fetched import (
  InHostMemory,
  brought,
  elsewhere_in,
  held_back,
  is_elsewhere,
  is_in_host_memory,
)
from scmoe.models.gradient_totals import is_total, ready
from scmoe.parallel.barriers import barrier
from scmoe.parallel.shares import Share

PyTree = Any
Body = Callable[[Any, Any], tuple[Any, Any]]
Elsewhere = Share | InHostMemory


class OneAhead:
  """Runs pairs that are written out, in order, and gathers their parameters one pair ahead.

  Args:
    body: runs a pair with whole parameters: (carry, ((copies, None), here, None)) -> (carry, out).
    totals: for each pair the totals of its parameters (`added`), or None.
  """

  def __init__(self, body: Body, totals: Sequence[PyTree]):
    self.body, self.totals = body, list(totals)
    self.shares: list[Elsewhere] | None = None  # of the pair before
    self.wholes: list[Array] | None = None  # the same, gathered
    self.start: Any = None  # the carry with which the pair before began

  def __call__(self, carry: Any, copies: list[PyTree], here: Any) -> tuple[Any, Any]:
    """Runs the next pair.

    Args:
      carry: the carry of `body`.
      copies: the pair's parameters once for each batch, with `Share`s or `InHostMemory`s.
      here: the pair's other inputs, which have no gradient.

    Returns:
      The result of `body`: the carry for the next pair, and the pair's output.
    """
    totals = self.totals.pop(0)
    shares = elsewhere_in(copies[0])
    if self.start is not None:
      begun = jax.lax.stop_gradient(_floats(self.start))
      if any(map(is_in_host_memory, shares)):
        copies = held_back(copies, begun)
      else:
        tied: Any = barrier((copies, begun), "forward")
        copies = tied[0]
    if self.totals:
      carry, self.totals[0] = _stored_before(carry, self.totals[0])
    leaves = jax.tree.leaves(copies[0], is_leaf=is_elsewhere)
    at = [i for i, x in enumerate(leaves) if is_elsewhere(x)]
    how = _How(self.body, tuple(at), last=not self.totals)
    found: Any = _pair(how, ready(copies, totals), carry, here, self.shares, self.wholes)
    made, self.wholes = found
    self.shares, self.start = shares, carry
    return made


@dataclasses.dataclass(frozen=True)
class _How:
  """The arguments of `_pair` that are no arrays.

  Attributes:
    body: see `OneAhead`.
    shared: which of the pair's parameters were gathered: their indices among its leaves.
    last: whether no pair follows.
  """

  body: Body
  shared: tuple[int, ...]
  last: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
  """The values that a pair's backward pass reads, without the gathered parameters.

  Attributes:
    leaves: the arrays in the backward function of `jax.vjp`, which is a pytree; None in place of a
      gathered parameter.
    shares: the shares of the pair before; None for the first pair.
    structure: the tree structure of that backward function.
    places: for each leaf, the index of the gathered parameter that it is; -1: it is none.
  """

  leaves: list[Any]
  shares: list[Elsewhere] | None
  structure: Any = dataclasses.field(metadata={"static": True})
  places: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pair(
  how: _How,
  copies: list[PyTree],
  carry: Any,
  here: Any,
  before: list[Elsewhere] | None,
  wholes: list[Array] | None,
) -> tuple[Any, list[Array] | None]:
  """The body's result, and the pair's gathered parameters for the next call's `wholes`.

  The second is None for the last pair.

  Args:
    how: see `_How`.
    copies: the pair's parameters, gathered, once for each batch.
    carry, here: see `OneAhead`.
    before, wholes: the shares and the gathered parameters of the pair before, for the backward
      pass only; None for the first pair.
  """
  del before, wholes
  return how.body(carry, ((copies, None), here, None)), _gathered_of(how, copies[0])


def _gathered_of(how: _How, params: PyTree) -> list[Array] | None:
  leaves = jax.tree.leaves(params)
  return None if how.last else [leaves[i] for i in how.shared]


def _pair_fwd(how, copies, carry, here, before, wholes):
  del wholes
  run = lambda copies, carry: how.body(carry, ((copies, None), here, None))
  made, pull = jax.vjp(run, copies, carry)
  place_of = {} if how.last else {
    id(jax.tree.leaves(own)[i]): place for own in copies for place, i in enumerate(how.shared)
  }  # fmt: skip
  leaves, structure = jax.tree.flatten(pull)
  places = tuple(place_of.get(id(leaf), -1) for leaf in leaves)
  kept = [leaf if place < 0 else None for leaf, place in zip(leaves, places)]
  return (made, _gathered_of(how, copies[0])), _Kept(kept, before, structure, places)


def _pair_bwd(how, kept, bars):
  del how
  made_bar, wholes = bars
  before_bar = None
  if kept.shares is not None:
    shares, _ = barrier((kept.shares, _floats(made_bar[0])))
    before_bar = brought(shares)
  leaves = [leaf if place < 0 else wholes[place] for leaf, place in zip(kept.leaves, kept.places)]
  copies_bar, carry_bar = jax.tree.unflatten(kept.structure, leaves)(made_bar)
  return copies_bar, carry_bar, None, None, before_bar


_pair.defvjp(_pair_fwd, _pair_bwd)


def _stored_before(carry: Any, following: PyTree) -> tuple[Any, PyTree]:
  """(`carry`, `following`), tied so that in the backward pass the pair before waits for a store.

  While a pair computes its gradients, those of the next pair's experts leave the device. The pair
  before begins when they have left. Without this barrier XLA could keep the gradients of all pairs
  on the device until the end.

  Args:
    carry: the carry with which a pair begins.
    following: the totals of the next pair. Only those in the host's memory count.
  """
  totals, structure = jax.tree.flatten(following, is_leaf=is_total)
  away = [i for i, x in enumerate(totals) if is_total(x) and x.squares is not None]
  if not away:
    return carry, following
  values, tree = jax.tree.flatten(carry)
  here = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]
  tied: Any = barrier(([values[i] for i in here], [totals[i] for i in away]), "backward")
  for i, value in zip(here, tied[0]):
    values[i] = value
  for i, total in zip(away, tied[1]):
    totals[i] = total
  return tree.unflatten(values), structure.unflatten(totals)


def _floats(tree: PyTree) -> list[Array]:
  """The floating-point arrays of a tree, which are those that have gradients."""
  return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
