"""Splits parameters for pairs that begin the next pair's route and dispatch (`overlap.ahead`).

With a MoE in every block, each block is a pair, and in Pos-2 a pair's experts read a value of the
pair before. With `overlap.ahead` the pair before runs their gate and dispatch, and hands on the
rows (`scmoe.blocks.walk.Begun`). So a pair reads the *early* parameters of the next pair, which are
gate and norms, beside its own. Three pairs in a scan:

  before the scan   early 0                       route and dispatch of pair 0
  step 0            early 0 | rest 0 | early 1    pair 0, with route and dispatch of pair 1
  step 1            early 1 | rest 1 | early 2    pair 1, with route and dispatch of pair 2
  step 2            early 2 | rest 2 | early 0    pair 2, with a dispatch that no pair reads

All steps of a scan do the same, so the last one sends rows too: n pairs make n + 1 dispatches. To
leave that one out, the last pair would have to stand outside the scan, which costs a copy of all
other pairs' weights. Pairs that are written out make n dispatches.

Two pairs read each early parameter, so `ready` is called for it before both of them. Early
parameters are small. The gradients of all others are added, and summed over devices, in the pair
that reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.blocks.pair import BlockPair
from scmoe.blocks.walk import Context, begin
from scmoe.blocks.wiring import Tap
from scmoe.models.gradient_totals import GradientTotal, Turn, ready, ready_in_turn
from scmoe.moe.experts import OnDevice
from scmoe.parallel.shares import is_share

PyTree = Any

# Names of the parts of a pair that are read before the pair begins, by the pair before it or before
# the scan: gates, and the norms that `Unit.tapped` and `Unit.hand_over` apply to the gates' input.
EARLY = ("router_gate", "own_norm", "norm_attention")

# The early parameters of a pair, or of stacked pairs: once for each batch, a list of arrays.
Early = list[list[Any]]
# The other parameters in the same way, and the totals of their gradients (see `added`).
Rest = tuple[list[list[Any]], list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Split:
  """The parameters of a pair in two: the early ones, and the rest.

  Attributes:
    structure: tree structure of the pair's parameters.
    early: for each array, in the order of `structure`, whether it is an early one.
  """

  structure: Any
  early: tuple[bool, ...]

  @classmethod
  def of(cls, params: PyTree) -> Split:
    """The split for parameters with this structure: those of one pair, or of stacked pairs."""
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_share)
    names = [jax.tree_util.keystr(path) for path, _ in found]
    return cls(structure, tuple(any(f"'{part}'" in name for part in EARLY) for name in names))

  def parts(self, copies: Sequence[PyTree], totals: PyTree) -> tuple[Early, Rest]:
    """The early parameters, for which it calls `ready`, and the rest with their totals.

    Args:
      copies: the parameters of a pair, or of stacked pairs, once for each batch.
      totals: see `scmoe.models.gradient_totals.added`.
    """
    is_leaf = lambda x: x is None or isinstance(x, GradientTotal)
    summed = None if totals is None else jax.tree.leaves(totals, is_leaf=is_leaf)
    leaves = [jax.tree.leaves(own, is_leaf=is_share) for own in copies]
    early, rest = (
      ([self._picked(own, which) for own in leaves], self._picked(summed, which))
      for which in (True, False)
    )
    return ready(*early), rest

  def params(
    self,
    read: tuple[Early, Rest],
    following: tuple[Early, PyTree] | None,
    graph: Any,
    contexts: Sequence[Context],
    turn: Turn | None = None,
  ) -> tuple[list[PyTree], Sequence[tuple[BlockPair, Context] | None], Turn | None]:
    """For each batch, a pair's parameters and the argument `following` of its `PairWalk`.

    The third result is the turn of the next pair.

    Args:
      read: result of `parts` for the pair; this method calls `ready_in_turn` for the rest.
      following: the next pair's early parameters, and its (keys of each batch, bias); None: no pair
        follows.
      graph: a pair's graph definition.
      contexts: one per batch.
      turn: this pair's; None: no pair adds in place.
    """
    early = read[0]
    rest, turn = ready_in_turn(*read[1], turn)
    own = list(map(self.joined, early, rest))
    if following is None:
      return own, [None] * len(own), turn
    next_early, (keys, bias_E) = following
    # The next pair, to run its gate and norms: its early parameters with the rest of this pair's,
    # which is not read and only fills the tree.
    pairs = [nnx.merge(graph, params) for params in map(self.joined, next_early, rest)]
    there = [dataclasses.replace(c, keys=key, bias_E=bias_E) for c, key in zip(contexts, keys)]
    return own, list(zip(pairs, there)), turn

  def joined(self, early: Sequence[Any], rest: Sequence[Any]) -> PyTree:
    """The tree of one pair's parameters for one batch, from the lists of both parts."""
    sources = {True: iter(early), False: iter(rest)}
    return jax.tree.unflatten(self.structure, [next(sources[which]) for which in self.early])

  def _picked(self, leaves: Sequence[Any] | None, which: bool) -> Any:
    if leaves is None:
      return None
    return [x for x, early in zip(leaves, self.early, strict=True) if early == which]


def sends_ahead(pair: BlockPair, context: Context, start_BSD: Array) -> bool:
  """Whether each pair begins the route and dispatch of the next one, in a pass without caches.

  Args:
    pair: one of the pairs, or their stack.
    context: the `Context` of a batch.
    start_BSD: the residual stream of that batch.
  """
  if not pair.schedule.begins_next or not isinstance(context.experts, OnDevice):
    return False
  assert pair.moe is not None
  return pair.moe.sends_ahead(start_BSD[..., 0].size, no_drop=context.no_drop)


def next_of(stacked: PyTree) -> PyTree:
  """Stacks [L, ...] moved by one pair: slice i is that of pair i + 1, the last that of pair 0."""
  return jax.tree.map(lambda x: jnp.concatenate([x[1:], x[:1]]), stacked)


def enter_scan(
  carry: Any,
  split: Split,
  graph: Any,
  contexts: Sequence[Context],
  read: tuple[Early, Rest],
  others: tuple[list[Array | None], Array | None],
) -> Any:
  """The carry before a scan over pairs: route and dispatch of the first pair have run.

  Args:
    carry: (number of pairs before, (h_BSD, handed_BSD, None) of each batch, turn).
    split: the split of the pairs' parameters.
    graph: a pair's graph definition.
    contexts: one per batch.
    read: result of `Split.parts` for the stacked pairs of the scan.
    others: keys of each batch and bias, for all pairs of the scan.

  Returns:
    The carry, (number of pairs before, (h_BSD, None, `Begun`) of each batch, turn).
  """
  before, values, turn = carry
  (early, (rest, _)), (keys, bias_E) = jax.tree.map(lambda x: x[0], (read, others))
  begun = []
  for own, (h_BSD, handed_BSD, _), context, key in zip(
    map(split.joined, early, rest), values, contexts, keys
  ):
    pair: BlockPair = nnx.merge(graph, own)
    start_BSD = pair.units[0].hand_over(Tap.BLOCK_INPUT, h_BSD)
    handed_BSD = jnp.where(before == 0, start_BSD, handed_BSD)
    here = dataclasses.replace(context, keys=key, bias_E=bias_E)
    begun.append((h_BSD, None, begin(pair, here, handed_BSD)))
  return before, begun, turn


def leave_scan(carry: Any) -> Any:
  """The carry after a scan over pairs, without the rows that its last step has sent.

  After a run of pairs the trunk ends, or dense layers follow, which read no value that is handed
  over. So zeros replace the value handed over.
  """
  before, values, turn = carry
  return before, [(h_BSD, jnp.zeros_like(h_BSD), None) for h_BSD, _, _ in values], turn
