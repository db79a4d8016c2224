"""Arrays in pinned memory of the host, and how the host itself reads and makes them.

A GPU copies from pinned memory at the full speed of its link. An array that is divided over several
devices is divided there in the same way: each device has its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from scmoe.offload.memory import HOST, is_on_host

PyTree = Any
Index = tuple[slice, ...]


def lies_on_host(x: Any) -> bool:
  """Whether an array, or a `jax.ShapeDtypeStruct` with sharding, is in pinned memory of the host.

  Unlike `is_on_host` it is False for every traced value. As it looks at `sharding` alone, other
  objects that have one, such as an `InFile` or a `Kept`, may give True, too.
  """
  return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def is_made(x: Any) -> bool:
  """Whether `x` is a jax array with values: neither traced nor a `jax.ShapeDtypeStruct`."""
  return isinstance(x, Array) and not isinstance(x, Tracer)


def made_on_host(
  shape: Sequence[int], sharding: NamedSharding, piece: Callable[[Index, Any], np.ndarray]
) -> Array:
  """An array in pinned memory of the host; each process computes the shards of its own devices.

  Args:
    shape: of the whole array.
    sharding: its memory kind is replaced by `HOST`.
    piece: (the shard's index in the whole array, its device) -> its values.
  """
  place = NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST)
  shards = []
  for device, index in place.addressable_devices_indices_map(tuple(shape)).items():
    assert index is not None
    where = SingleDeviceSharding(device, memory_kind=HOST)
    shards.append(jax.device_put(piece(index, device), where, may_alias=False))
  return jax.make_array_from_single_device_arrays(tuple(shape), place, shards)


def shard_of(x: Array, device: Any, index: Index | None = None) -> np.ndarray:
  """The values of the shard that one device has of an array, or of a part of that shard.

  Args:
    x: in any memory.
    device: an addressable one that holds a shard.
    index: part of the whole array; must lie in that shard. None: the whole shard.
  """
  (shard,) = (one for one in x.addressable_shards if one.device == device)
  value = np.asarray(shard.data)
  if index is None:
    return value
  starts = [own.start or 0 for own in shard.index]
  ends = [size if part.stop is None else part.stop for part, size in zip(index, x.shape)]
  return value[
    tuple(slice((part.start or 0) - s, end - s) for part, s, end in zip(index, starts, ends))
  ]


def to_device(tree: PyTree) -> PyTree:
  """The arrays of a tree in the memory of their devices; those that lie there are not copied.

  Args:
    tree: traced values, or arrays with NamedShardings.
  """
  move = lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x
  return jax.tree.map(move, tree)


def to_host(tree: PyTree) -> PyTree:
  """The arrays of a tree, traced values, copied to the host's memory."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)
