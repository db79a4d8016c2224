"""Arrays of the state that the host keeps and updates itself (`mesh.moments_update=host`).

They lie in ordinary memory, as arrays of jax's CPU, which an update there changes in place, or in a
file (`scmoe.training.filed`). Devices of a process that hold the same shard of every array share
one copy: for eight data ranks with `mesh.shard_state` none the process keeps each moment once. If
the ranks partition the embedding, no two of them hold the same shards, and it keeps each moment of
all other parameters eight times.
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
from scmoe.training.filed import FileShard, InFile, is_in_file
from scmoe.training.host_arrays import is_made, lies_on_host, made_on_host, shard_of
from scmoe.training.pieced import Pieced, gathered

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
    shape, dtype, sharding: of the array or layer; the sharding's memory kind is the host's.
    groups: which devices share a shard.
    shards: for each group its shard: an array on jax's CPU, or a `FileShard`.
  """

  def __init__(self, like: Any, groups: Groups, shards: list[Any]):
    self.shape, self.dtype, self.sharding = tuple(like.shape), like.dtype, like.sharding
    self.groups, self.shards = groups, shards

  @classmethod
  def zeros(cls, like: Any, groups: Groups) -> Kept:
    """An array of zeros with the shape, type and sharding of `like`."""
    shape = like.sharding.shard_shape(tuple(like.shape))
    if is_in_file(like):
      return cls(like, groups, [FileShard(like.room, shape, like.dtype) for _ in groups.members])
    put = lambda: jax.device_put(np.zeros(shape, like.dtype), cpu(), may_alias=False)
    return cls(like, groups, [put() for _ in groups.members])

  @classmethod
  def filed(cls, like: InFile, shards: Sequence[np.ndarray]) -> Kept:
    """An array in a file, with the values of a shard for each group."""
    put = lambda values: FileShard(like.room, values.shape, like.dtype, values)
    return cls(like, like.groups(), [put(values) for values in shards])

  @classmethod
  def taken(cls, x: Array, groups: Groups, like: Any = None) -> Kept:
    """A copy of an array that lies in pinned memory; that array is deleted.

    The copy lies in a file if `like` is an `InFile`, else in memory.
    """
    if is_in_file(like):
      kept = cls.filed(like, [shard_of(x, group[0]) for group in groups.members])
      x.delete()
      return kept
    shards = [shard_of(x, group[0]) for group in groups.members]
    kept = cls(x, groups, [jax.device_put(one, cpu(), may_alias=False) for one in shards])
    jax.block_until_ready(kept.shards)
    x.delete()
    return kept

  @property
  def in_file(self) -> bool:
    """Whether it lies in a file."""
    return isinstance(self.shards[0], FileShard)

  def on(self, device: Any) -> np.ndarray:
    """The values of a device's shard: read from its file, or a view of memory.

    The next update makes a view invalid.
    """
    shard = self.shards[self.groups.of[device]]
    return shard.read() if isinstance(shard, FileShard) else np.asarray(shard)

  def whole(self) -> Array | Pieced:
    """A copy in pinned memory of the host, or the array to be read from its file."""
    if self.in_file:
      return Pieced(self, 0, lambda place: gathered(self, (), self.on), (self,))
    return pinned_stack([self])


def whole_stack(parts: Sequence[Kept]) -> Array | Pieced:
  """A stack's layers as one array [L, ...], copied to pinned memory or to be read from its file."""
  if not parts[0].in_file:
    return pinned_stack(parts)
  like = jax.ShapeDtypeStruct((len(parts), *parts[0].shape[1:]), parts[0].dtype)
  like = like.update(sharding=parts[0].sharding)
  read = lambda place: gathered(parts[place[0]], (), parts[place[0]].on)
  return Pieced(like, 1, read, tuple(parts))


def filed(x: Array, like: InFile) -> Pieced:
  """Writes `x` to its file, a stack layer by layer, and deletes `x`; returns it as a `Pieced`.

  Args:
    x: in any memory.
    like: of the whole array.
  """
  shards = [shard_of(x, group[0]) for group in like.groups().members]
  layer = like.update(shape=(1, *like.shape[1:]), layers=0)
  one = lambda i: Kept.filed(layer, [shard[i : i + 1] for shard in shards])
  parts = tuple(map(one, range(like.layers))) if like.layers else (Kept.filed(like, shards),)
  x.delete()
  return whole_stack(parts) if like.layers else parts[0].whole()  # pyright: ignore


def zeros_in_file(like: InFile) -> Pieced:
  """Zeros in a file, for a whole array in the form of a checkpoint."""
  layer = like.update(shape=(1, *like.shape[1:]), layers=0)
  parts = [Kept.zeros(layer, like.groups()) for _ in range(like.layers)]
  found = whole_stack(parts) if parts else Kept.zeros(like, like.groups()).whole()
  return found  # pyright: ignore


def pinned_stack(parts: Sequence[Kept]) -> Array:
  """A copy in pinned memory of the host: a stack's layers as one array [L, ...], or one part."""
  first = parts[0]
  shape = (sum(part.shape[0] for part in parts), *first.shape[1:]) if first.shape else ()
  join = lambda device: np.concatenate([part.on(device) for part in parts])
  values = lambda index, device: join(device) if len(parts) > 1 else first.on(device)
  return made_on_host(shape, first.sharding, values)


def is_kept(x: Any) -> bool:
  """Whether a leaf is a `Kept`."""
  return isinstance(x, Kept)


def is_away(x: Any) -> bool:
  """Whether a leaf of a state lies in any memory of the host, or in a file.

  An `Apart` is one leaf here, and counts as lying there: where the host computes the update, all
  its layers do.
  """
  return is_apart(x) or is_kept(x) or lies_on_host(x)


def kept(leaf: Any, like: Any, groups: Groups) -> Any:
  """A leaf in the host's memory, or to lie in a file, as `Kept`, or an `Apart` of them.

  Arrays with values are copied and deleted; a `Kept` is returned as it is; a leaf of an abstract
  state becomes zeros, as moments begin.

  Args:
    leaf: of a state.
    like: the same leaf of the abstract state.
    groups: devices with the same shards.

  Raises:
    ConfigError: as `cpu`.
    StorageError: the file cannot be made or written, or the disk has too little room.
  """
  if is_apart(leaf):
    return Apart(tuple(kept(*pair, groups) for pair in zip(leaf.parts, like.parts)))
  if is_kept(leaf):
    return leaf
  return Kept.taken(leaf, groups, like) if is_made(leaf) else Kept.zeros(leaf, groups)


def cpu(field: str = "moments_update") -> Any:
  """jax's CPU.

  Args:
    field: the field of `mesh` that needs it.

  Raises:
    ConfigError: JAX_PLATFORMS leaves it out.
  """
  if (device := host_device()) is None:
    raise ConfigError(
      f"mesh.{field}='host' computes on jax's CPU, which JAX_PLATFORMS leaves out; add cpu to it, "
      f"or set mesh.{field}=device"
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
