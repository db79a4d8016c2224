"""Moves tensors one at a time: from a model's folder into a checkpoint or onto a mesh, and back.

A checkpoint takes tensors as `pieces`, in any order. On a mesh, `load` fills each device's shard of
a parameter while it reads the tensors: the host never holds a whole parameter, and a device never
holds more than its shard. A pool of threads reads tensors, up to `AHEAD` of them before they are
needed; one thread copies them to the devices; and the caller meanwhile works on parameters that are
complete. A shard on a CPU device is filled by the reading threads themselves.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.base.errors import DataError
from scmoe.parallel.mesh import host_device
from scmoe.pretrained.folder import TYPES, Folder
from scmoe.pretrained.names import Tensor, ignored, tensors
from scmoe.run.build import Built
from scmoe.training.pieces import Piece, PiecedArray

READERS = 8  # threads that read tensors
AHEAD = 16  # tensors that are read before the thread that copies them to devices needs them


def leaves_of(built: Built) -> dict[str, Any]:
  """`jax.ShapeDtypeStruct` with sharding of all parameters and router state, by dotted name."""
  return flat({"params": built.shapes, "router": built.router_shapes})


def flat(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by dotted name, as checkpoints name them."""
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def nested(leaves: dict[str, Any], like: Any) -> Any:
  """The inverse of `flat`: a tree with the structure of `like` and these leaves."""
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flat(like)])


def check_tensors(
  folder: Folder, family: str, model: Any, router: Any
) -> tuple[list[Tensor], list[str]]:
  """Compares the headers of a folder's files with the tensors of the architecture.

  Returns:
    the tensors of the architecture, and the names of other tensors, which scmoe ignores.

  Raises:
    DataError: a tensor is missing or unknown, or has another shape or an unsupported type; the line
      names the first one.
  """
  wanted, entries, skip = [], folder.entries, ignored(family, model)
  # Compares them one at a time, because an absurd configuration may have more tensors than memory
  # can list.
  for tensor in tensors(family, model, router):
    entry = entries.get(tensor.name)
    if entry is None:
      raise DataError(f"{folder.path}: tensor {tensor.name} is missing")
    if entry.shape != tensor.shape:
      raise DataError(
        f"{entry.file}: tensor {tensor.name} has shape {list(entry.shape)}; by config.json it has "
        f"{list(tensor.shape)}"
      )
    if entry.dtype not in TYPES:
      raise DataError(
        f"{entry.file}: tensor {tensor.name} is of type {entry.dtype}; known: {', '.join(TYPES)}"
      )
    wanted.append(tensor)
  known = {t.name for t in wanted}
  extra = [name for name in entries if name not in known]
  if unknown := next((name for name in extra if not skip.fullmatch(name)), None):
    raise DataError(
      f"{entries[unknown].file}: tensor {unknown} is not part of a {family} with this config.json"
    )
  return wanted, extra


def stored_types(folder: Folder, wanted: Iterable[Tensor]) -> dict[str, np.dtype]:
  """The type in which each parameter is stored: that of its tensors, or float32 if they differ."""
  found: dict[str, set[str]] = {}
  for tensor in wanted:
    found.setdefault(tensor.leaf, set()).add(folder.entries[tensor.name].dtype)
  wide = TYPES["F32"]
  return {leaf: TYPES[kinds.pop()] if len(kinds) == 1 else wide for leaf, kinds in found.items()}


def pieced(
  types: Mapping[str, np.dtype], wanted: Iterable[Tensor], shapes: Mapping[str, Any]
) -> list[PiecedArray]:
  """Describes, for a checkpoint, the parameters of which these tensors are pieces.

  Args:
    types, wanted, shapes: see `load`.
  """
  leading = {tensor.leaf: len(tensor.index) for tensor in wanted}
  return [PiecedArray(n, tuple(shapes[n].shape), types[n], k) for n, k in leading.items()]


def pieces(
  read: Callable[[str], np.ndarray], types: Mapping[str, np.dtype], wanted: Iterable[Tensor]
) -> Iterator[Callable[[], list[Piece]]]:
  """Yields for each tensor, in order, a function that reads it and returns its slices as pieces.

  Args:
    read, types: see `load`.
    wanted: slices of tensors; those that share a tensor follow each other.
  """

  def made(name: str, slices: list[Tensor]) -> list[Piece]:
    value = read(name)
    turned = ((tensor, _transposed(tensor.cut(value), tensor.order)) for tensor in slices)
    return [Piece(t.leaf, t.index, x.astype(types[t.leaf], copy=False)) for t, x in turned]

  for name, slices in itertools.groupby(wanted, lambda tensor: tensor.name):
    yield functools.partial(made, name, list(slices))


def load(
  read: Callable[[str], np.ndarray],
  types: Mapping[str, np.dtype],
  wanted: list[Tensor],
  shapes: Mapping[str, Any],
) -> Iterator[tuple[str, Array]]:
  """Yields (dotted name, parameter on its mesh), the largest parameters first.

  Parameters that share tensors are read together, so each tensor is read once: in a GPT-OSS gate
  and up projections lie in one tensor, which `read` also has to dequantise.

  Args:
    read: returns a tensor by its name, in the type of its parameter.
    types: the type of every parameter, by name (`stored_types`).
    wanted: the tensors to read.
    shapes: `jax.ShapeDtypeStruct` with sharding of every parameter, by name.

  Raises:
    DataError: `read` raises it.
  """
  by_leaf = lambda tensor: tensor.leaf
  grouped = itertools.groupby(sorted(wanted, key=by_leaf), by_leaf)
  groups = _sharing([_Parameter(leaf, list(parts), shapes[leaf]) for leaf, parts in grouped])
  # The largest first, because the caller needs long to process them, and the others are read
  # meanwhile.
  groups.sort(key=lambda own: own.size, reverse=True)

  def pieces() -> Iterator[Callable[[], list[np.ndarray]]]:
    for own in groups:
      own.begin(types)
      for name in own.slices:
        yield functools.partial(own.take, name, functools.partial(read, name))

  readers = ThreadPoolExecutor(READERS, thread_name_prefix="read")
  filler = ThreadPoolExecutor(1, thread_name_prefix="fill")
  values = _ahead(readers, pieces())
  try:
    for found in filler.map(lambda own: own.filled(values), groups):
      yield from found
  finally:
    filler.shutdown(cancel_futures=True)
    readers.shutdown(cancel_futures=True)


def _sharing(parameters: list[_Parameter]) -> list[_Group]:
  """The parameters in groups: two of them are in one group if a tensor has slices of both."""
  groups: list[list[_Parameter]] = []
  group_of: dict[str, list[_Parameter]] = {}  # by the name of a tensor
  for own in parameters:
    found = next((group_of[t.name] for t in own.tensors if t.name in group_of), None)
    if found is None:
      groups.append(found := [])
    found.append(own)
    group_of |= {tensor.name: found for tensor in own.tensors}
  return [_Group(found) for found in groups]


def _ahead(pool: ThreadPoolExecutor, pieces: Iterator[Callable[[], Any]]) -> Iterator:
  """Yields the results of these functions in order, while the pool works on the next `AHEAD`."""
  coming = collections.deque(pool.submit(piece) for piece in itertools.islice(pieces, AHEAD))
  while coming:
    yield coming.popleft().result()
    coming.extend(pool.submit(piece) for piece in itertools.islice(pieces, 1))


class _Parameter:
  """A parameter that is being read: the shards of this process's devices, and their tensors.

  Attributes:
    leaf: dotted name of the parameter.
    shape: shape of the whole parameter.
    tensors: the tensors that overlap a shard of these devices.
  """

  def __init__(self, leaf: str, parts: list[Tensor], like: Any):
    self.leaf, self.shape, self._sharding = leaf, like.shape, like.sharding
    indices = like.sharding.addressable_devices_indices_map(like.shape)
    self._bounds = {
      device: [s.indices(n)[:2] for s, n in zip(shard, like.shape)]
      for device, shard in indices.items()
    }
    self.tensors = [t for t in parts if any(_lies(t, own) for own in self._bounds.values())]
    self._shards: list[_Shard] = []

  def begin(self, dtype: np.dtype) -> None:
    """Allocates the shards."""
    self._shards = [_Shard(device, own, dtype) for device, own in self._bounds.items()]

  def take(self, tensor: Tensor, whole: np.ndarray) -> np.ndarray:
    """Copies a slice of a tensor into the shards that lie in the host's memory.

    Several threads may call it at once, for different tensors.

    Returns:
      the slice, which `put` copies to the other devices.
    """
    value = tensor.cut(whole)
    for shard in self._shards:
      if shard.on_host and _lies(tensor, shard.bounds):
        shard.put(tensor, value)
    return value

  def put(self, tensor: Tensor, value: np.ndarray) -> None:
    """Copies a slice to the devices that have their own memory; `value` is what `take` returned."""
    for shard in self._shards:
      if not shard.on_host and _lies(tensor, shard.bounds):
        shard.put(tensor, value)

  def array(self) -> Array:
    """The complete parameter."""
    arrays = [shard.array() for shard in self._shards]
    self._shards = []
    return jax.make_array_from_single_device_arrays(self.shape, self._sharding, arrays)


class _Group:
  """Parameters that share tensors, or one parameter.

  Attributes:
    slices: for each tensor by its name, (parameter, slice of the tensor) of all its slices here.
    size: elements of all parameters.
  """

  def __init__(self, parameters: list[_Parameter]):
    self._parameters = parameters
    self.slices: dict[str, list[tuple[_Parameter, Tensor]]] = {}
    for own in parameters:
      for tensor in own.tensors:
        self.slices.setdefault(tensor.name, []).append((own, tensor))
    self.size = sum(math.prod(own.shape) for own in parameters)

  def begin(self, types: Mapping[str, np.dtype]) -> None:
    """Allocates the shards of all parameters."""
    for own in self._parameters:
      own.begin(types[own.leaf])

  def take(self, name: str, read: Callable[[], np.ndarray]) -> list[np.ndarray]:
    """Reads a tensor; returns what `_Parameter.take` returns for each of its slices."""
    whole = read()
    return [own.take(tensor, whole) for own, tensor in self.slices[name]]

  def filled(self, values: Iterator[list[np.ndarray]]) -> list[tuple[str, Array]]:
    """The complete parameters with their names; `values` are the results of `take`, in order."""
    for slices in self.slices.values():
      for (own, tensor), value in zip(slices, next(values)):
        own.put(tensor, value)
    return [(own.leaf, own.array()) for own in self._parameters]


def _lies(tensor: Tensor, bounds: list[tuple[int, int]]) -> bool:
  """True if a tensor overlaps the part of its parameter with these bounds."""
  return all(start <= i < stop for i, (start, stop) in zip(tensor.index, bounds))


class _Shard:
  """One device's shard of a parameter, while it is being filled."""

  def __init__(self, device: Any, bounds: list[tuple[int, int]], dtype: np.dtype):
    self.device, self.bounds = device, bounds
    size = tuple(stop - start for start, stop in bounds)
    # The memory of a CPU device is the host's, so numpy fills the shard in place.
    self.on_host = device.platform == "cpu"
    self.value: Any = _room(size, dtype) if self.on_host else _empty(size, dtype, device)

  def put(self, tensor: Tensor, value: np.ndarray) -> None:
    """Copies the part of a tensor that overlaps this shard.

    Args:
      tensor: the tensor.
      value: what `tensor.cut` returned.
    """
    place = tuple(i - start for i, (start, _) in zip(tensor.index, self.bounds))
    own = self.bounds[len(place) :]
    cut = [slice(None)] * len(own)
    for to, origin in enumerate(tensor.order):
      cut[origin] = slice(*own[to])
    piece = value[tuple(cut)]
    if self.on_host:
      self.value[place] = _transposed(piece, tensor.order)
      return
    start = jnp.asarray([*place, *[0] * len(own)], jnp.int32)
    self.value = _written(self.value, jax.device_put(piece, self.device), start, tensor.order)

  def array(self) -> Array:
    """The shard as an array on its device."""
    return jax.device_put(self.value, self.device) if self.on_host else self.value


_ALIGNED = 64  # bytes; jax uses a numpy array with this alignment in place and copies any other


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = math.prod(shape) * np.dtype(dtype).itemsize
  room = np.empty(size + _ALIGNED, np.uint8)
  start = -room.ctypes.data % _ALIGNED
  return room[start : start + size].view(dtype).reshape(shape)


def _transposed(value: np.ndarray, order: Sequence[int]) -> np.ndarray:
  """value.transpose(order) as a contiguous array.

  XLA on the CPU transposes five times as fast as numpy.
  """
  turned, device = value.transpose(order), host_device()
  if device is None or turned.flags.c_contiguous:
    return np.ascontiguousarray(turned)
  return np.asarray(jax.device_put(turned, device))


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Array:
  where = jax.sharding.SingleDeviceSharding(device)
  return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)()


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(whole: Array, piece: Array, start: Array, order: tuple[int, ...]) -> Array:
  piece = piece.transpose(order).astype(whole.dtype)
  piece = piece.reshape((1,) * (whole.ndim - piece.ndim) + piece.shape)
  return jax.lax.dynamic_update_slice(whole, piece, list(start))


def unload(leaves: Mapping[str, Array], wanted: Iterable[Tensor]) -> Iterator[np.ndarray]:
  """Yields the tensors' values in order; copies each from the devices only when it is requested.

  Slices that share a tensor give one value.

  Args:
    leaves: parameters by dotted name.
    wanted: tensors of these parameters; slices that share one follow each other.
  """
  for _, shared in itertools.groupby(wanted, lambda tensor: tensor.name):
    tensors = list(shared)
    values = [_unloaded(leaves[tensor.leaf], tensor) for tensor in tensors]
    within, shape = tensors[0].within, tensors[0].shape
    yield (values[0] if within is None else np.stack(values, within[0])).reshape(shape)


def _unloaded(leaf: Array, tensor: Tensor) -> np.ndarray:
  """A slice of a parameter, with its dimensions in the tensor's order."""
  value = np.asarray(leaf) if not tensor.index else np.asarray(slice_of(leaf, tensor.index))
  return _transposed(value, [tensor.order.index(i) for i in range(value.ndim)])


def slice_of(leaf: Array, index: tuple[int, ...]) -> Array:
  """leaf[index], replicated on all devices of the mesh."""
  return _take(leaf, jnp.asarray(index, jnp.int32), len(index), _everywhere(leaf))


def _everywhere(leaf: Array) -> Any:
  sharding = leaf.sharding
  if isinstance(sharding, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return None


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take(leaf: Array, index: Array, count: int, where: Any) -> Array:
  for i in range(count):
    leaf = jax.lax.dynamic_index_in_dim(leaf, index[i], 0, keepdims=False)
  return leaf if where is None else jax.lax.with_sharding_constraint(leaf, where)
