"""Collectives of the manual region (`mesh.manual`), and the names that all collectives have.

Every collective of a program runs under one of `NAMES`, by which traces and tests know it. This
module holds those that several packages use. All of these are differentiable, except `gathered`,
`summed_parts` and `largest`, and none sends anything over an axis of one device. The others are
issued where they are needed, for example the gathers of shares (`scmoe.parallel.shares`) and the
sums of gradients (`scmoe.parallel.gradients`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.compat import COPY_ENGINE_POLICY, jax_version
from scmoe.base.errors import ConfigError
from scmoe.parallel.barriers import barrier
from scmoe.parallel.mesh import axis_size, own_share

# NCCL gives an all-to-all to the GPU's copy engines if its policy asks for no thread blocks and
# both buffers are symmetric memory. XLA allocates such memory with this flag (jax 0.11 and later).
COPY_ENGINE_FLAG = "--xla_enable_nccl_symmetric_buffers_for_collectives=AllToAll"


def request_copy_engines(environment: MutableMapping[str, str] = os.environ) -> None:
  """Asks XLA and NCCL for all-to-alls by copy engines; call it before the first use of a device.

  Copy engines take no multiprocessor from the computation beside them. They serve GPUs of one host
  that reach each other's memory; elsewhere NCCL uses its kernels as before.

  Args:
    environment: the environment variables, changed in place.

  Raises:
    ConfigError: this jax does not know the flag.
  """
  if jax_version() < (0, 11):
    raise ConfigError(
      f"overlap.copy_engines=True needs jax 0.11 or later, got {jax.__version__}; leave it False, "
      "or use Python 3.12 or later"
    )
  flags = environment.get("XLA_FLAGS", "")
  if COPY_ENGINE_FLAG not in flags:
    environment["XLA_FLAGS"] = f"{flags} {COPY_ENGINE_FLAG}".strip()
  environment.setdefault(*COPY_ENGINE_POLICY)


# The names of all collectives, in traces and tests. Both steps of a hierarchical exchange have the
# same name.
NAMES = (
  "dispatch",  # all-to-all of rows to their experts, and of their gradient back
  "combine",  # all-to-all of the experts' results back to the tokens' ranks, and of their gradient
  "counts",  # all-gather of row counts per rank, and agreement on overflow rounds; sums of the
  # choices of each expert, if experts lie in the host's memory
  "weights",  # gathers of experts' weights; over the devices that share an expert also gathers of
  # its rows, and sums of these devices' results
  "parameters",  # gathers of parameters of which ranks hold shares
  "vocabulary",  # rows of an embedding that data ranks partition, hidden states for its scores,
  # and the gradients of both
  "sequence",  # attention's queries, keys, values, results and gradients, between the devices that
  # divide rows, and the documents of the rows' tokens
  "tensor",  # sums, maxima and gathers over the tensor axis: row-parallel products, gradients of
  # column-parallel ones, vocabulary-parallel embedding, scores and loss
  "gradients",  # sums of gradients over the devices that hold the same parameter, their norm, and
  # gathers of matrices that Muon needs whole
  "statistics",  # sums of the loss and of the figures of a step or an evaluation
)

# JAX's backward pass of a sum over devices is another sum over devices. If all devices compute the
# same function of the sum, for example a loss, they all have the same gradient of the sum, and the
# second sum counts it once per device: with 4 devices, 4 times. The gradient of an addend should
# then be the gradient of the sum, unchanged: `total` does this. `repeat` is the counterpart, which
# sums in the backward pass only. Megatron-LM calls the two g and f.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _total(tree: Any, axes: tuple[str, ...], name: str) -> Any:
  with jax.named_scope(name):
    return jax.lax.psum(tree, axes)


_total.defvjp(
  lambda tree, axes, name: (_total(tree, axes, name), None), lambda axes, name, _, bar: (bar,)
)


def total(tree: Any, axes: tuple[str, ...], name: str) -> Any:
  """Sums over mesh axes; the gradient of every addend is that of the sum.

  Use it if all devices compute the same from the sum, for example a loss, or all that follows a
  row-parallel product.

  Args:
    tree: arrays, each device's addends.
    axes: mesh axes; axes of one device are left out.
    name: one of `NAMES`.
  """
  axes = _several(axes)
  return _total(tree, axes, name) if axes else tree


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _repeat(tree: Any, axes: tuple[str, ...], name: str) -> Any:
  return tree


def _repeat_bwd(axes: tuple[str, ...], name: str, _: None, bar: Any) -> tuple[Any]:
  with jax.named_scope(name):
    return (jax.lax.psum(bar, axes),)


_repeat.defvjp(lambda tree, axes, name: (tree, None), _repeat_bwd)


def repeat(tree: Any, axes: tuple[str, ...], name: str) -> Any:
  """Returns the same arrays; their gradients are summed over mesh axes.

  Use it for arrays that are equal on all devices if each device computes a different part from
  them, for example for the input of a column-parallel product. Arguments as in `total`.
  """
  axes = _several(axes)
  return _repeat(tree, axes, name) if axes else tree


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_replicated(x: Array, dimension: int, axis: str, name: str) -> Array:
  with jax.named_scope(name):
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


_gather_replicated.defvjp(
  lambda x, dimension, axis, name: (_gather_replicated(x, dimension, axis, name), None),
  lambda dimension, axis, name, _, bar: (own_share(bar, dimension, axis),),
)


def gather_replicated(x: Array, dimension: int, axis: str, name: str) -> Array:
  """Joins the slices of an array that the devices of an axis hold, along `dimension`.

  Use it if every device computes the same from the result: the gradient of a device's slice is then
  its slice of the result's gradient, and no data travel back.
  """
  return _gather_replicated(x, dimension, axis, name) if axis_size(axis) > 1 else x


def gathered(x: Array, dimension: int, axes: tuple[str, ...], name: str) -> Array:
  """Joins the slices that the devices of `axes` hold, along `dimension`; not to be differentiated.

  The slices are in the order of the devices' indices; that on the first axis varies slowest.
  """
  axes = _several(axes)
  if not axes:
    return x
  with jax.named_scope(name):
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)


def summed_parts(x: Array, dimension: int, axes: tuple[str, ...], name: str) -> Array:
  """This device's slice of the sum over mesh axes, cut along `dimension`; not to be differentiated.

  The counterpart of `gathered`, with the same order of slices.
  """
  axes = _several(axes)
  if not axes:
    return x
  with jax.named_scope(name):
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def largest(x: Array, axes: tuple[str, ...], name: str) -> Array:
  """The elementwise maximum over mesh axes; no gradient flows through it."""
  axes = _several(axes)
  if not axes:
    return x
  with jax.named_scope(name):
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes)


def _several(axes: tuple[str, ...]) -> tuple[str, ...]:
  return tuple(axis for axis in axes if axis_size(axis) > 1)


# -- the exchange of rows -------------------------------------------------------------------------


# Chunk -> the arrays that its exchange waits for, while the call of a transport is traced; see
# `waiting`.
_WAITS: contextvars.ContextVar[dict[int, Any] | None] = contextvars.ContextVar(
  "waits", default=None
)


@contextlib.contextmanager
def waiting(values: dict[int, Any]) -> Iterator[None]:
  """Lets the exchanges of some chunks begin only when other values are computed.

  Dependencies leave open beside which of several exchanges an operation runs; this decides it.

  Args:
    values: chunk -> the arrays that its exchange waits for. Each exchange that names its chunk
      (`Exchange.all_to_all`) replaces these arrays by the same ones behind a barrier: whoever reads
      them there waits until the rows of the chunk are computed. In the backward pass, the gradients
      of these arrays are passed on only when the gradients of the rows have arrived.
  """
  token = _WAITS.set(values)
  try:
    yield
  finally:
    _WAITS.reset(token)


def wait(x: Array, chunk: int) -> Array:
  """x, the rows that a chunk sends, behind a barrier with the arrays that the chunk waits for.

  These are the arrays of `waiting`; if it gives this chunk none, x has no barrier.
  """
  waits = _WAITS.get()
  if waits is not None and chunk in waits:
    x, waits[chunk] = barrier((x, waits[chunk]))
  return x


# What a transport's `combine` has brought back, while it is traced; see `arrivals`.
_ARRIVALS: contextvars.ContextVar[list[Array] | None] = contextvars.ContextVar(
  "arrivals", default=None
)


@contextlib.contextmanager
def arrivals() -> Iterator[list[Array]]:
  """Collects the rows that a transport's `combine` brings back, chunk by chunk.

  Other values can so wait for them. The list stays empty where the transport does not call
  `Exchange.arrived`, and without an exchange.
  """
  brought: list[Array] = []
  token = _ARRIVALS.set(brought)
  try:
    yield brought
  finally:
    _ARRIVALS.reset(token)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """An all-to-all of rows between the ranks of one mesh axis.

  Attributes:
    axis: name of the mesh axis; None: one device, no exchange.
    size: W, the number of ranks on the axis.
    nodes: number of hosts that the axis spans, for an exchange in two steps (hierarchical); 1: one
      all-to-all of all ranks (linear).
    silent: for measurements: no row moves, so the result is wrong. Shapes stay as they are, and a
      barrier stands where the exchange stood.
  """

  axis: str | None = None
  size: int = 1
  nodes: int = 1
  silent: bool = False

  def __post_init__(self):
    if self.nodes < 1 or self.size % self.nodes:
      raise ConfigError(
        f"dispatch.nodes={self.nodes} does not divide the {self.size} devices of the expert axis; "
        f"use a divisor of {self.size}"
      )

  def all_to_all(self, x: Array, chunk: int | None = None) -> Array:
    """Sends x[w] to rank w, for each rank w: [W, ...] -> [W, ...], where slice w came from rank w.

    Over the first dimension XLA needs no transpose of the data. The backward pass is the same
    exchange. On one device it returns x.

    Args:
      x: the slices to send, one for each rank.
      chunk: number of the chunk of a dispatch, for `waiting`; None: the exchange waits for x only.
    """
    if self.axis is None or self.size == 1:
      return x
    if chunk is not None:
      x = wait(x, chunk)
    if self.silent:
      # Without an exchange between them, XLA would fuse the operations before and after it, and
      # the program without exchanges would do less work than the one with them.
      return barrier(x)
    if self.nodes == 1:
      return jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)
    return _hierarchical(x, self)

  def arrived(self, x: Array) -> Array:
    """Rows that an exchange has brought back; `arrivals`, if it collects, keeps them.

    A transport gives them as the backward pass keeps them (`checkpoint_name`): what waits for them
    would otherwise have a recomputed forward pass exchange them again.
    """
    brought = _ARRIVALS.get()
    if brought is not None and self.size > 1:
      brought.append(x)
    return x

  # Transports send rows to the experts by this name, and the experts' results back by the other, so
  # that a subclass can let rows travel to the experts in another form. Here it is one method.
  to_experts = all_to_all


def _hierarchical(x: Array, exchange: Exchange) -> Array:
  """All-to-all in two steps (Tutel's 2DH): inside each node, then between ranks of all nodes.

  With L ranks a node, rank n·L + l has the local rank l on node n. It holds a slice for each of the
  W ranks. Step 1 sends every slice, inside the node, to the rank with the local rank of the slice's
  destination. Step 2 sends it from there to the destination's node. So a rank sends W / L - 1 large
  messages to other nodes instead of W - L small ones: with 8 ranks on 2 nodes, 1 instead of 4. The
  result is that of the linear exchange, bit for bit.
  """
  assert exchange.axis is not None
  nodes, local = exchange.nodes, exchange.size // exchange.nodes
  inside = [[n * local + rank for rank in range(local)] for n in range(nodes)]
  across = [[n * local + rank for n in range(nodes)] for rank in range(local)]
  by_node = x.reshape(nodes, local, *x.shape[1:])
  # The ranks in these comments are local ones, from 0 to L - 1.
  by_local = jnp.swapaxes(by_node, 0, 1)  # [destination rank, destination node, ...]
  received = _exchange_within(by_local, exchange.axis, inside)  # [source rank, node, ...]
  outgoing = jnp.swapaxes(received, 0, 1)
  arrived = _exchange_within(outgoing, exchange.axis, across)  # [source node, source rank, ...]
  return arrived.reshape(x.shape)


def _exchange_within(x: Array, axis: str, groups: Sequence[Sequence[int]]) -> Array:
  return jax.lax.all_to_all(x, axis, 0, 0, axis_index_groups=groups, tiled=True)
