"""Arrays of the state that the host keeps and updates itself (`mesh.moments_update=host`).

They lie in ordinary memory, as arrays of jax's CPU, which an update there changes in place. Devices
that hold the same shard of every array share one copy: on eight data ranks with `mesh.shard_state`
none the host keeps each moment once. If the ranks partition the embedding, no two of them hold the
same shards, and the host keeps each moment of all other parameters eight times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from scmoe.base.errors import ConfigError
from scmoe.models.stacked import Apart, is_apart
from scmoe.parallel.mesh import host_device
from scmoe.training.host_arrays import is_made, lies_on_host, made_on_host, shard_of

PyTree = Any


class Groups:
  """This process's devices, in groups that hold the same shards of every array.

  Args:
    arrays: anything with shapes and NamedShardings, e.g. the leaves of an abstract state.

  Attributes:
    members: the devices of each group; the first one stands for the group.
    of: device -> number of its group.
  """

  def __init__(self, arrays: Sequence[Any]):
    held: dict[Any, tuple[Any, ...]] = {}
    for x in arrays:
      for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
        own = tuple((part.start or 0, part.stop) for part in index)
        held[device] = (*held.get(device, ()), own)
    found: dict[tuple[Any, ...], list[Any]] = {}
    for device, shards in held.items():
      found.setdefault(shards, []).append(device)
    self.members = list(found.values())
    self.of = {device: i for i, group in enumerate(self.members) for device in group}


class Kept:
  """One array, or one layer [1, ...] of a stack, that the host keeps.

  Attributes:
    shape, dtype, sharding: of the whole array; the sharding's memory kind is the host's.
    groups: which devices share a shard.
    shards: for each group its shard, on jax's CPU.
  """

  def __init__(self, like: Any, groups: Groups, shards: list[Array]):
    self.shape, self.dtype, self.sharding = tuple(like.shape), like.dtype, like.sharding
    self.groups, self.shards = groups, shards

  @classmethod
  def zeros(cls, like: Any, groups: Groups) -> Kept:
    """An array of zeros with the shape, type and sharding of `like`."""
    shape = like.sharding.shard_shape(tuple(like.shape))
    put = lambda: jax.device_put(np.zeros(shape, like.dtype), cpu(), may_alias=False)
    return cls(like, groups, [put() for _ in groups.members])

  @classmethod
  def taken(cls, x: Array, groups: Groups) -> Kept:
    """A copy of an array that lies in pinned memory; that array is deleted."""
    shards = [shard_of(x, group[0]) for group in groups.members]
    kept = cls(x, groups, [jax.device_put(one, cpu(), may_alias=False) for one in shards])
    jax.block_until_ready(kept.shards)
    x.delete()
    return kept

  def on(self, device: Any) -> np.ndarray:
    """The values of a device's shard; a view, which the next update makes invalid."""
    return np.asarray(self.shards[self.groups.of[device]])

  def pinned(self) -> Array:
    """A copy in pinned memory of the host."""
    return pinned_stack([self])


def pinned_stack(parts: Sequence[Kept]) -> Array:
  """A copy of a stack's layers as one array [L, ...] in pinned memory of the host."""
  first = parts[0]
  shape = (sum(part.shape[0] for part in parts), *first.shape[1:]) if first.shape else ()
  join = lambda device: np.concatenate([part.on(device) for part in parts])
  values = lambda index, device: join(device) if len(parts) > 1 else first.on(device)
  return made_on_host(shape, first.sharding, values)


def is_kept(x: Any) -> bool:
  """Whether a leaf is a `Kept`."""
  return isinstance(x, Kept)


def is_away(x: Any) -> bool:
  """Whether a leaf of a state lies in any memory of the host.

  An `Apart` is one leaf here, and counts as lying there: where the host computes the update, all
  its layers do.
  """
  return is_apart(x) or is_kept(x) or lies_on_host(x)


def kept(leaf: Any, groups: Groups) -> Any:
  """A leaf in the host's memory as `Kept`, or an `Apart` of them.

  Arrays with values are taken over and deleted; a `Kept` is returned as it is;
  `jax.ShapeDtypeStruct`s become zeros, as which Adam's moments begin.

  Raises:
    ConfigError: as `cpu`.
  """
  if is_apart(leaf):
    return Apart(tuple(kept(part, groups) for part in leaf.parts))
  if is_kept(leaf):
    return leaf
  return Kept.taken(leaf, groups) if is_made(leaf) else Kept.zeros(leaf, groups)


def cpu() -> Any:
  """jax's CPU.

  Raises:
    ConfigError: JAX_PLATFORMS leaves it out.
  """
  if (device := host_device()) is None:
    raise ConfigError(
      "mesh.moments_update='host' computes on jax's CPU, which JAX_PLATFORMS leaves out; add cpu "
      "to it, or set mesh.moments_update=device"
    )
  return device


def of_devices(values: Sequence[Array], like: Any, groups: Groups) -> Array:
  """An array in the devices' memory from the shards that the host has computed.

  Args:
    values: a shard for each group, on jax's CPU.
    like: has the shape and the NamedSharding of the result, whatever its memory kind.
    groups: which devices get which shard.
  """
  sharding = NamedSharding(like.sharding.mesh, like.sharding.spec)
  put = lambda device: jax.device_put(
    np.asarray(values[groups.of[device]]), device, may_alias=False
  )
  shards = [put(device) for device in groups.of]
  return jax.make_array_from_single_device_arrays(tuple(like.shape), sharding, shards)
