"""Attention whose keys and values go round a ring of devices that divide the tokens of each row.

Each of N devices keeps its queries. In N - 1 steps the keys and values of the other devices pass
by, and the results over each are joined (Ring Attention, arXiv 2310.01889). All devices have equal
work, although a token sees only those before it (as in Striped Attention, arXiv 2311.09431, and in
the zigzag order of Llama 3's context parallelism, arXiv 2407.21783). The next keys travel while a
device computes with those at hand.

Device i has chunks i and 2N - 1 - i of the row's 2N (`scmoe.parallel.sequence`). Example for N = 4:
device 2 has chunks 2 and 5. When device 1's chunks 1 and 6 pass by, both of its own see chunk 1 and
neither sees chunk 6. Of device 3's chunks 3 and 4 its chunk 5 sees both and its chunk 2 neither. So
a step is two blocks without a mask on every device, each of one chunk of queries and one of keys:
always the late queries over the early keys, and either the early queries over the early keys (of a
device of lower rank) or the late queries over the late keys. No device waits for one with more to
do. Windows and documents mask parts of these blocks. A device skips a block if `any_visible` says
that they mask all of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.layers.attention_blocks import Block, Places, Result, any_visible, joined
from scmoe.parallel.mesh import axis_index, axis_size
from scmoe.parallel.sequence import RING, own_positions


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend_round(
  q_BSHN: Float[Array, "B S H N"],
  k_BSKN: Float[Array, "B S K N"],
  v_BSKM: Float[Array, "B S K M"],
  sinks_H: Float[Array, " H"] | None,
  segments_BS: Int[Array, "B S"] | None,
  window: Int[Array, ""] | None,
  block: Block,
) -> Float[Array, "B S H M"]:
  """Causal attention among the tokens of whole rows; arguments and result are this device's tokens.

  Results of blocks are joined, and gradients are added up, in float32 (float64 stays float64).

  Args:
    q_BSHN, k_BSKN, v_BSKM: as for `scmoe.layers.dot_product.attend`.
    sinks_H: as for `scmoe.layers.dot_product.softmax_over`; None: no sinks.
    segments_BS: document of each token; attention stays inside it. None: it spans the row.
    window: int32 [], positions that a token sees, itself included; None: all before it.
    block: computes the blocks.
  """
  return _forward(q_BSHN, k_BSKN, v_BSKM, sinks_H, segments_BS, window, block)[0]


def _forward(
  q: Array, k: Array, v: Array, sinks: Any, segments: Any, window: Any, block: Block
) -> tuple[Array, Any]:
  place = own_positions(q.shape[1])
  own = Places(place, segments, window)
  y, logs = block.attend(q, k, v, (own, own))
  early, late = zip(_halves(y), _halves(logs, 2))
  sent = (k, v, Places(place, segments))
  for step in _steps():
    sent = _passed_on(sent)
    blocks = zip(step.of_queries((q, own)), step.of_keys(sent))
    always, other = (_result(block, *queries, *keys) for queries, keys in blocks)
    late = joined(late, always)
    hidden = jnp.full_like(other[1], -jnp.inf)
    early = joined(early, (other[0], jnp.where(step.before, other[1], hidden)))
    late = joined(late, (other[0], jnp.where(step.before, hidden, other[1])))
  y = jnp.concatenate([early[0], late[0]], 1)
  logs = jnp.concatenate([early[1], late[1]], 2)
  if sinks is not None:  # a sink is a key with the value 0 that all queries see
    nothing = jnp.zeros_like(y), jnp.broadcast_to(sinks.astype(logs.dtype)[:, None], logs.shape)
    y, logs = joined((y, logs), nothing)
  y = y.astype(q.dtype)
  return y, (q, k, v, sinks, segments, window, y, logs)


def _backward(block: Block, kept: Any, dy: Array) -> tuple[Any, ...]:
  q, k, v, sinks, segments, window, y, logs = kept
  place = own_positions(q.shape[1])
  own = Places(place, segments, window)
  over_all = {"y_BSHM": y, "logs_BHS": logs, "dy_BSHM": dy}
  dq, *here = block.gradients(q, k, v, (own, own), **over_all)
  dq, passing = _halves(dq), None  # `passing`: gradients of the keys and values that pass by
  sent = (k, v, Places(place, segments))
  logs_BSH = jnp.moveaxis(logs, 2, 1)  # with the queries second, as in the other arrays
  for step in _steps():
    sent = _passed_on(sent)
    if passing is not None:
      passing = _passed_on(passing)
    blocks = zip(step.of_queries((q, own, y, logs_BSH, dy)), step.of_keys(sent))
    always, other = (_gradients(block, *queries, *keys) for queries, keys in blocks)
    dq = step.added(dq, always[0], other[0], late_always=True)
    passing = [
      step.added(whole, one, two, late_always=False)
      for whole, one, two in zip(passing or [(0.0, 0.0)] * 2, always[1:], other[1:])
    ]
  home = _passed_on(passing)  # each device has those of the next one's keys: one step more
  dk, dv = (x + jnp.concatenate(halves, 1) for x, halves in zip(here, home))
  dq, d_sinks = jnp.concatenate(dq, 1), None
  if sinks is not None:
    dot_BSH = (y.astype(logs.dtype) * dy.astype(logs.dtype)).sum(-1)
    d_sinks = -(jnp.exp(sinks.astype(logs.dtype) - logs_BSH) * dot_BSH).sum((0, 1))
    d_sinks = d_sinks.astype(sinks.dtype)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None, None


attend_round.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Step:
  """One step of the ring, in which the keys of one other device are at hand.

  Attributes:
    before: bool [], whether the keys at hand are those of a device of lower rank, whose early chunk
      lies before both of this device's chunks.
  """

  before: Array

  def of_queries(self, tree: Any) -> tuple[Any, Any]:
    """The halves of this device's arrays for the step's two blocks.

    The late half is for the block that every step has. For the other block it is the early half if
    `before`, else the late half again.
    """
    early, late = _split(tree)
    return late, self._chosen(early, late)

  def of_keys(self, tree: Any) -> tuple[Any, Any]:
    """The halves of the arrays that pass by for the step's two blocks.

    The early half is for the block that every step has. For the other block it is the early half
    again if `before`, else the late half.
    """
    early, late = _split(tree)
    return early, self._chosen(early, late)

  def added(self, halves: Any, always: Array, other: Array, *, late_always: bool) -> Any:
    """An early and a late half plus the results of the step's two blocks, (early, late).

    Args:
      halves: the early and the late half so far.
      always: of the block that every step has.
      other: of the other block; goes to the early half if `before`, else to the late one.
      late_always: whether `always` goes to the late half, as for queries, or to the early one.
    """
    early, late = halves
    early = early + jnp.where(self.before, other, 0)
    late = late + jnp.where(self.before, 0, other)
    return (early, late + always) if late_always else (early + always, late)

  def _chosen(self, early: Any, late: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(self.before, a, b), early, late)


def _steps() -> list[_Step]:
  rank, ranks = axis_index(RING), axis_size(RING)
  return [_Step((rank - number) % ranks < rank) for number in range(1, ranks)]


def _result(block: Block, q: Array, at_q: Places, k: Array, v: Array, at_k: Places) -> Result:
  if not _masks(at_q):
    return block.attend(q, k, v, None)
  compute = lambda: block.attend(q, k, v, (at_q, at_k))
  shapes = jax.eval_shape(compute)
  nothing = lambda: (jnp.zeros_like(shapes[0]), jnp.full_like(shapes[1], -jnp.inf))
  return jax.lax.cond(any_visible(at_q, at_k), compute, nothing)


def _gradients(
  block: Block,
  q: Array,
  at_q: Places,
  y: Array,
  logs_BSH: Array,
  dy: Array,
  k: Array,
  v: Array,
  at_k: Places,
) -> tuple[Array, Array, Array]:
  over_all = {"y_BSHM": y, "logs_BHS": jnp.moveaxis(logs_BSH, 1, 2), "dy_BSHM": dy}
  if not _masks(at_q):
    return block.gradients(q, k, v, None, **over_all)
  compute = lambda: block.gradients(q, k, v, (at_q, at_k), **over_all)
  nothing = lambda: tuple(jnp.zeros_like(x) for x in jax.eval_shape(compute))
  return jax.lax.cond(any_visible(at_q, at_k), compute, nothing)


def _masks(queries: Places) -> bool:
  """Whether a window or documents may hide keys of an earlier chunk from a query."""
  return queries.window is not None or queries.segments_BS is not None


def _passed_on(tree: Any) -> Any:
  """The arrays of the device before this one in the ring."""
  ranks = axis_size(RING)
  with jax.named_scope("sequence"):
    return jax.lax.ppermute(tree, RING, [(i, (i + 1) % ranks) for i in range(ranks)])


def _halves(x: Array, axis: int = 1) -> list[Array]:
  return jnp.split(x, 2, axis)


def _split(tree: Any) -> tuple[Any, Any]:
  """Early and late halves of a tree of arrays [B, S, ...] or [S]; a window, [], is in both."""
  leaves, treedef = jax.tree.flatten(tree)
  halves = [_halves(x, 0 if x.ndim == 1 else 1) if x.ndim else (x, x) for x in leaves]
  return tuple(jax.tree.unflatten(treedef, half) for half in zip(*halves))  # pyright: ignore
