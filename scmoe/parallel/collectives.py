"""Exchanges between the devices of one mesh axis: linear and hierarchical all-to-all.

Called inside `jax.shard_map`. All are differentiable; an all-to-all is its own transpose.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import MutableMapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from scmoe._compat import COPY_ENGINE_POLICY, jax_version
from scmoe.errors import ConfigError

# NCCL hands an all-to-all to the GPU's copy engines where its policy asks for no thread blocks and
# both buffers are symmetric memory, which XLA (jax 0.11 and later) then uses.
COPY_ENGINE_FLAG = "--xla_enable_nccl_symmetric_buffers_for_collectives=AllToAll"


def request_copy_engines(environment: MutableMapping[str, str] = os.environ) -> None:
  """Asks for all-to-alls by copy engines; has to come before the first use of a device.

  They take no multiprocessor from the computation beside them. For GPUs of one host that reach each
  other's memory; elsewhere NCCL goes on with its kernels.

  Args:
    environment: changed in place.

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


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Who exchanges rows with whom, and how.

  Attributes:
    axis: name of the mesh axis; None where there is nobody to exchange with.
    size: W, devices on it.
    nodes: hosts that the axis spans, for the hierarchical exchange; 1 for the linear one.
  """

  axis: str | None = None
  size: int = 1
  nodes: int = 1

  def __post_init__(self):
    if self.nodes < 1 or self.size % self.nodes:
      raise ConfigError(
        f"dispatch.nodes={self.nodes} does not divide the {self.size} devices of the expert axis; "
        f"use a divisor of {self.size}"
      )


def all_to_all(x: Array, exchange: Exchange) -> Array:
  """Slice w of the leading dimension goes to device w: [W, ...] -> [W, ...], by sender.

  Only an exchange over the major-most dimension moves what it sends without a transpose.
  """
  if exchange.axis is None or exchange.size == 1:
    return x
  if exchange.nodes == 1:
    return jax.lax.all_to_all(x, exchange.axis, 0, 0, tiled=True)
  return _hierarchical(x, exchange)


def _hierarchical(x: Array, exchange: Exchange) -> Array:
  """All-to-all in two steps (Tutel's 2DH): inside each node, then between equal ranks of nodes.

  Device n·L + l holds slices for all (node, local) destinations. Step 1 hands every slice to the
  local rank it is meant for, step 2 to its node: fewer and larger messages cross nodes, W / L
  instead of W. The result is the linear exchange's, bit for bit.
  """
  assert exchange.axis is not None
  nodes, local = exchange.nodes, exchange.size // exchange.nodes
  inside = [[n * local + rank for rank in range(local)] for n in range(nodes)]
  across = [[n * local + rank for n in range(nodes)] for rank in range(local)]
  by_node = x.reshape(nodes, local, *x.shape[1:])
  by_local = jnp.swapaxes(by_node, 0, 1)  # [destination rank, destination node, ...]
  received = _exchange_within(by_local, exchange.axis, inside)  # [source rank, node, ...]
  outgoing = jnp.swapaxes(received, 0, 1)
  arrived = _exchange_within(outgoing, exchange.axis, across)  # [source node, source rank, ...]
  return arrived.reshape(x.shape)


def _exchange_within(x: Array, axis: str, groups: Sequence[Sequence[int]]) -> Array:
  return jax.lax.all_to_all(x, axis, 0, 0, axis_index_groups=groups, tiled=True)
