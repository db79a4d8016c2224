"""Writes the arrays of a step piece by piece, in any order; memory has to hold a few pieces only.

Orbax describes the arrays and reads them like those of any step: each is a folder with a file for
every piece (zarr). tensorstore writes the pieces, as it does for Orbax. A training step's pieces
are written with fsync, as Orbax writes, a conversion's without it: the operating system decides
when they reach the disk. With fsync, a disk that reads and writes by turns would make a conversion
as slow as both together (experiments/LOG.md). If power fails before the pieces are on the disk,
their fingerprints show it when the step is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from scmoe.training.fingerprint import survey_piece

WORKERS = 16  # number of threads that make, fingerprint and write pieces
CAREFUL = 4  # the same for a training step, which has less memory for pieces


class Piece(NamedTuple):
  """A piece of an array: array[place] = value.

  Attributes:
    name: of the array.
    place: indices into the array's leading dimensions; () for the whole array.
    value: contiguous, in the type of the array.
  """

  name: str
  place: tuple[int, ...]
  value: np.ndarray


@dataclasses.dataclass(frozen=True)
class PiecedArray:
  """An array that comes in pieces of one shape.

  Attributes:
    name: dotted, as checkpoints call it.
    shape, dtype: of the whole.
    leading: number of leading dimensions that a piece's place indexes.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  leading: int

  @property
  def piece(self) -> tuple[int, ...]:
    """Shape of a piece, with as many dimensions as the whole."""
    return (1,) * self.leading + self.shape[self.leading :]

  @property
  def count(self) -> int:
    """The number of pieces."""
    return math.prod(self.shape[: self.leading])


class Found(NamedTuple):
  """The fingerprint of an array that was written, and whether all its elements are finite."""

  fingerprint: str
  finite: bool


def write_pieces(
  place: Path,
  arrays: Sequence[PiecedArray],
  pieces: Iterable[Callable[[], Sequence[Piece]]],
  *,
  sync: bool = False,
) -> dict[str, Found]:
  """Writes all arrays of one item of a step from their pieces.

  Args:
    place: the item's folder; must not exist.
    arrays: all arrays of the item.
    pieces: functions that make one or several pieces each, in any order. Threads call them, each
      function once.
    sync: write with fsync, and by `CAREFUL` threads instead of `WORKERS`.

  Returns:
    fingerprint and finiteness of each array, by name.

  Raises:
    ValueError: an array has too few or too many pieces. Exceptions of a piece's function, Orbax,
      tensorstore and the file system pass through.
  """
  handler = _Handler(pieces, sync)
  registry = ocp.type_handlers.create_type_handler_registry((PiecedArray, handler))
  tree = ocp.PyTreeCheckpointHandler(
    use_ocdbt=False, use_compression=False, type_handler_registry=registry
  )
  with ocp.Checkpointer(tree) as writer:
    writer.save(place, args=ocp.args.PyTreeSave({array.name: array for array in arrays}))
  return handler.found


class _Handler(ocp.type_handlers.ArrayHandler):
  """Writes `PiecedArray`s for Orbax, recorded as `jax.Array`s, so that Orbax reads them as such."""

  def __init__(self, pieces: Iterable[Callable[[], Sequence[Piece]]], sync: bool):
    super().__init__()
    self._pieces, self._sync = pieces, sync
    self.found: dict[str, Found] = {}

  async def serialize(
    self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> list[Any]:
    """Writes all pieces of all arrays and sets `found`; Orbax calls it once, with all arrays."""
    workers = CAREFUL if self._sync else WORKERS
    how = {"file_io_sync": self._sync, "file_io_concurrency": {"limit": workers}}
    stores, context = {}, ts.Context(how)
    for array, info in zip(values, infos):
      await info.await_path_creation()
      spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=False,
        global_shape=array.shape,
        local_shape=array.piece,
        dtype=array.dtype,
      )
      typed = ts.Spec(spec | {"dtype": array.dtype.name})  # Orbax 0.12.4's lacks the dtype
      opened = ts.open(typed, create=True, open=True, context=context)
      stores[array.name] = await opened
    self.found = _write({array.name: array for array in values}, stores, self._pieces, workers)
    return []


def _write(
  arrays: Mapping[str, PiecedArray],
  stores: Mapping[str, ts.TensorStore],
  pieces: Iterable[Callable[[], Sequence[Piece]]],
  workers: int,
) -> dict[str, Found]:
  def write(make: Callable[[], Sequence[Piece]]) -> list[tuple[str, int, bool]]:
    return [write_one(piece) for piece in make()]

  def write_one(piece: Piece) -> tuple[str, int, bool]:
    number, finite = survey_piece(piece.value, arrays[piece.name].shape, piece.place)
    stores[piece.name][piece.place].write(piece.value).result()
    return piece.name, number, finite

  sums, finite = dict.fromkeys(arrays, 0), dict.fromkeys(arrays, True)
  left = {name: array.count for name, array in arrays.items()}
  pool = ThreadPoolExecutor(workers, thread_name_prefix="piece")
  try:
    for name, number, good in itertools.chain.from_iterable(pool.map(write, pieces)):
      sums[name] = (sums[name] + number) % 2**32
      finite[name] &= good
      left[name] -= 1
  finally:
    pool.shutdown(cancel_futures=True)
  if wrong := [name for name, count in left.items() if count]:
    raise ValueError(f"{wrong[0]}: {left[wrong[0]]} of its {arrays[wrong[0]].count} pieces missing")
  return {name: Found(f"{sums[name]:08x}", finite[name]) for name in arrays}
