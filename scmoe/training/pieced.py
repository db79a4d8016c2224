"""An array of the state that the host reads piece by piece, because memory may not hold all of it.

With `mesh.moments_in=files` a checkpoint's form of the state (`TrainState.for_checkpoint`) has such
objects in place of the moments in files, and of parameters whose lower halves lie in files. A save
writes few pieces at a time (`Checkpointer.save`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from scmoe.models.stacked import STACKS
from scmoe.training.pieces import Piece, PiecedArray

PyTree = Any
Place = tuple[int, ...]


class Pieced:
  """One array of a state, whose pieces the host reads when they are needed.

  The next step changes or moves what is read, so all pieces have to be read before it.

  Attributes:
    shape, dtype, sharding: of the whole array.
    leading: number of leading dimensions that a piece's place indexes: 1 if the pieces are the
      layers of a stack, else 0.
    read: place -> the piece [1, ...], or the whole array for ().
    parts: the `Kept` objects that hold the array, one for each layer of a stack, else one; () if
      none hold it as it is.
  """

  def __init__(
    self, like: Any, leading: int, read: Callable[[Place], np.ndarray], parts: tuple[Any, ...] = ()
  ):
    self.shape, self.dtype, self.sharding = tuple(like.shape), np.dtype(like.dtype), like.sharding
    self.leading, self.read, self.parts = leading, read, parts

  @property
  def places(self) -> Iterator[Place]:
    """The places of all pieces, in order."""
    return itertools.product(*map(range, self.shape[: self.leading]))

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """The whole array, if it fits into memory."""
    del copy
    pieces = [self.read(place) for place in self.places]
    whole = np.concatenate(pieces) if self.leading else pieces[0]
    return whole if dtype is None else whole.astype(dtype)


def is_pieced(x: Any) -> bool:
  """Whether a leaf is a `Pieced`."""
  return isinstance(x, Pieced)


def gathered(x: Any, place: Place, pieces: Callable[[Any], np.ndarray]) -> np.ndarray:
  """A piece of an array, from its devices' shards.

  Args:
    x: has the array's shape, type and NamedSharding; all its devices are this process's.
    place: (i,) for layer i, [1, ...], of a stack whose first axis no device divides; () for all.
    pieces: device -> its shard, or this layer [1, ...] of it.
  """
  shape = (1, *x.shape[1:]) if place else tuple(x.shape)
  whole, done = np.empty(shape, x.dtype), set()
  for device, index in x.sharding.addressable_devices_indices_map(tuple(x.shape)).items():
    where = (slice(None), *index[1:]) if place else tuple(index)
    key = tuple((part.start, part.stop) for part in where)
    if key not in done:
      whole[where] = pieces(device)
      done.add(key)
  return whole


def in_pieces(leaves: dict[str, Any]) -> tuple[list[PiecedArray], Iterator[Callable[[], list]]]:
  """(descriptions, functions that read one piece each) of all arrays of a state, to save them.

  Args:
    leaves: by dotted name; `Pieced` objects and jax arrays, whose stacks are cut into layers, too,
      but for stacks of one number a layer.
  """
  found = {name: x if is_pieced(x) else _of_array(name, x) for name, x in leaves.items()}
  arrays = [PiecedArray(name, x.shape, x.dtype, x.leading) for name, x in found.items()]
  whole = lambda x, place: np.ascontiguousarray(x.read(place)).reshape(x.shape[x.leading :])
  one = lambda name, x, place: lambda: [Piece(name, place, whole(x, place))]
  return arrays, (one(name, x, place) for name, x in found.items() for place in x.places)


def _of_array(name: str, x: jax.Array) -> Pieced:
  stacked = x.ndim > 1 and any(part in STACKS for part in name.split("."))
  read = lambda place: np.asarray(x[place[0] : place[0] + 1] if place else x)
  return Pieced(x, int(stacked), read)
