"""Arrays of the state in a file on a local disk (`mesh.moments_in=files`).

    layer        0         1         2         3
    read      |    0    |    1    |    2    |    3    |
    update              |    0    |    1    |    2    |    3    |
    written                       |    0    |    1    |    2    |    3    |

The host updates moments and lower halves layer by layer (`scmoe.training.host_update`). Here they
lie in a file. Unless `mesh.moments_ahead` is 0, threads read a layer's while the layers before are
updated, and write the new ones behind the update, also beside the next step. So the host's memory
need not hold those of all layers.

The file has no name. It belongs to the process that made it, and the operating system frees it when
that process ends, in whatever way. So no later process can read a state that a killed step has
updated in part: a run always goes on from a checkpoint. The file's room is reserved before the
first step, so a disk that is too small ends a run as it begins.
Source of the scheme: ZeRO-Infinity (S. Rajbhandari et al., arXiv 2104.07857).
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from scmoe.base.errors import StorageError

PyTree = Any
THREADS = 4  # that read and write, each one shard at a time
_ALIGNED = 64  # bytes; jax's CPU takes arrays without a copy if this divides their address


class Room:
  """A file without a name; arrays get ranges of it.

  It is opened when the first range is taken. A range that is given back serves a later array of the
  same size.

  Args:
    folder: of the file, on a local disk.
  """

  def __init__(self, folder: str):
    self.folder = folder
    self.size = 0
    self._file: Any = None
    self._free: dict[int, list[int]] = {}
    # Python's collector may free a shard, and so call `give_back`, while this thread has the lock.
    self._lock = threading.RLock()

  def take(self, size: int) -> tuple[int, bool]:
    """(offset of a range of `size` bytes, whether it is new and so all zeros).

    Raises:
      StorageError: the folder cannot be written, or the disk has too little room.
    """
    with self._lock:
      if ranges := self._free.get(size):
        return ranges.pop(), False
      offset = self.size
      try:
        if self._file is None:
          self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        if size:
          os.posix_fallocate(self._file.fileno(), offset, size)
      except OSError as error:
        raise self._failed(f"no file of {offset + size} bytes can be made", error) from None
      self.size += size
      return offset, True

  def give_back(self, offset: int, size: int) -> None:
    """Frees a range for another array."""
    with self._lock:
      self._free.setdefault(size, []).append(offset)

  def read(self, offset: int, size: int) -> np.ndarray:
    """The bytes of a range, uint8 [size], at an address that jax's CPU takes without a copy.

    Raises:
      StorageError: the file cannot be read.
    """
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    found: Any = room[start : start + size]
    view, done = memoryview(found), 0
    try:
      while done < size:
        count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
        if not count:
          raise OSError(0, "the file ends too early")
        done += count
    except OSError as error:
      raise self._failed("moments cannot be read", error) from None
    return found

  def write(self, offset: int, values: np.ndarray) -> None:
    """Writes an array's bytes at an offset.

    Raises:
      StorageError: the file cannot be written.
    """
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    view, done = memoryview(flat), 0
    try:
      while done < len(view):
        done += os.pwrite(self._file.fileno(), view[done:], offset + done)
    except OSError as error:
      raise self._failed("moments cannot be written", error) from None

  def _failed(self, what: str, error: OSError) -> StorageError:
    return StorageError(
      f"mesh.moments_folder={self.folder!r}: {what}: {error.strerror}; name a folder on a disk "
      "that can be written and has room, or set mesh.moments_in=host"
    )


class FileShard:
  """A shard of an array, or of one layer of it, in a file.

  Args:
    room: the file.
    shape, dtype: of the shard.
    values: None for zeros.

  Raises:
    StorageError: see `Room.take` and `Room.write`.
  """

  def __init__(
    self, room: Room, shape: tuple[int, ...], dtype: Any, values: np.ndarray | None = None
  ):
    self.shape, self.dtype = shape, np.dtype(dtype)
    self.nbytes = math.prod(shape) * self.dtype.itemsize
    self._room, self._offset = room, -1
    self._offset, new = room.take(self.nbytes)
    self._writing: Future[None] | None = None
    if values is not None or not new:
      room.write(self._offset, np.zeros(shape, dtype) if values is None else values)

  def __del__(self):
    if self._offset >= 0:
      self._room.give_back(self._offset, self.nbytes)

  def read(self) -> np.ndarray:
    """The values, when a write under way is complete.

    Raises:
      StorageError: that write failed, or the file cannot be read.
    """
    if self._writing is not None:
      self._writing.result()
    return self._room.read(self._offset, self.nbytes).view(self.dtype).reshape(self.shape)

  def write_behind(self, pool: ThreadPoolExecutor, values: Any) -> Future[None]:
    """Begins to write new values, of the same shape and type, and returns the write at once.

    Args:
      pool: of threads that wait for the values and write them.
      values: an array on jax's CPU, which may still be computed.
    """
    self._writing = pool.submit(self._write, values)
    return self._writing

  def _write(self, values: Any) -> None:
    self._room.write(self._offset, np.asarray(values))


@dataclasses.dataclass(frozen=True, eq=False)
class InFile:
  """A mark in an abstract state: this array, or layer [1, ...] of a stack, is to lie in a file.

  Attributes:
    shape, dtype, sharding: of the array, stack or layer, not of a shard.
    room: the file.
    groups: gives the `scmoe.training.kept.Groups` of all arrays that the host keeps.
    layers: number of layers, if this is a whole stack; 0: it is none.
  """

  shape: tuple[int, ...]
  dtype: Any
  sharding: Any
  room: Room
  groups: Callable[[], Any]
  layers: int = 0

  @property
  def ndim(self) -> int:
    """Number of dimensions."""
    return len(self.shape)

  def update(self, **fields: Any) -> InFile:
    """The same with other fields, as `jax.ShapeDtypeStruct.update`."""
    return dataclasses.replace(self, **fields)


def is_in_file(x: Any) -> bool:
  """Whether a leaf of an abstract state is marked to lie in a file."""
  return isinstance(x, InFile)


class Passage:
  """The shards of one step on their way from the file, and back to it.

  Works for shards in memory too: new ones take their places there.

  Args:
    layers: for each layer, in the order of the updates, its `Kept` objects.
    ahead: number of layers that are read before their turn; 0: each is read when its turn comes,
      and written before the next one's.
    pool: of threads that read and write; None: all shards lie in memory.
  """

  def __init__(self, layers: Sequence[Sequence[Any]], ahead: int, pool: ThreadPoolExecutor | None):
    self._layers, self._ahead, self._pool = layers, ahead, pool
    self._read: dict[int, list[list[Future[np.ndarray]]]] = {}
    self._written: dict[int, list[Future[None]]] = {}
    for number in range(min(ahead, len(layers))):
      self._begin(number)

  def _begin(self, number: int) -> None:
    if self._pool is None:
      return
    self._read[number] = [
      [self._pool.submit(shard.read) for shard in holder.shards] for holder in self._layers[number]
    ]

  def arrive(self, number: int) -> None:
    """Waits for a layer's shards and an earlier layer's write, and begins to read a later layer.

    That is the layer `ahead` places later, if there is one.

    Call it once for each layer, in order. With `ahead` 0 it reads the layer's own shards alone. It
    does nothing if all shards lie in memory.

    Raises:
      StorageError: a file cannot be read or written.
    """
    if self._pool is None:
      return
    # With `ahead`, memory holds the layer before, which is being written, this one, and those that
    # are being read.
    for one in self._written.pop(number - 2 if self._ahead else number - 1, []):
      one.result()
    if not self._ahead:
      self._begin(number)
    jax.tree.map(lambda one: one.result(), self._read[number])
    if self._ahead and number + self._ahead < len(self._layers):
      self._begin(number + self._ahead)

  def take(self, number: int, group: int, where: Any) -> list[Any]:
    """A group's shards of a layer that has arrived, as arrays on jax's CPU, which is `where`."""
    if self._pool is None:
      return [holder.shards[group] for holder in self._layers[number]]
    return [jax.device_put(own[group].result(), where) for own in self._read[number]]

  def leave(self, number: int, group: int, new: Sequence[Any]) -> None:
    """Takes over a group's new shards of a layer; begins to write those that belong to files."""
    for i, (holder, shard) in enumerate(zip(self._layers[number], new)):
      if self._pool is None:
        holder.shards[group] = shard
        continue
      self._read[number][i][group] = _DROPPED
      written = holder.shards[group].write_behind(self._pool, shard)
      self._written.setdefault(number, []).append(written)


_DROPPED: Any = Future()  # in place of shards that were used, so that their memory is free again
