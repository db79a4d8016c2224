"""Which tokens of a row a device has, where the devices of `mesh.sequence` divide each row.

Hosts give whole rows to all devices that divide them. In the manual region `own_tokens` takes this
device's tokens; from there on a token of another device's part is like a token of another row, for
all but attention (`scmoe.layers.divided_rows`).

With `mesh.sequence_attention=heads` device i of N has the i-th of N equal parts. With `ring` a row
is 2N chunks, and device i has chunks i and 2N - 1 - i. With N = 2 and rows of 16 tokens device 0
has tokens 0 to 3 and 12 to 15, device 1 tokens 4 to 11. Why: a token attends to those before it, so
work grows along the row. With the first half of the row device 0 would have 36 of the 136 scores,
with these chunks it has 68 (10 + 58).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.parallel.mesh import SEQUENCE_AXES, axis_index, axis_size, own_share

RING, HEADS = SEQUENCE_AXES

_WHOLE: contextvars.ContextVar[bool] = contextvars.ContextVar("whole", default=False)
# The fields of `Batch` that have a value for each token.
_BY_TOKEN = ("inputs", "targets", "weights", "segment_ids", "positions")


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
  """Inside this context every device has whole rows, on any mesh, as generation needs them."""
  token = _WHOLE.set(True)
  try:
    yield
  finally:
    _WHOLE.reset(token)


def parts() -> int:
  """Number of devices that divide each row; 1 outside the manual region and in `whole_rows`."""
  return 1 if _WHOLE.get() else axis_size(*SEQUENCE_AXES)


def own_places(x: Array, dimension: int) -> Array:
  """This device's share of an array whose `dimension` has a place for each token of whole rows.

  Raises:
    ConfigError: the devices cannot divide so many tokens evenly.
  """
  if parts() == 1:
    return x
  length, chunks = x.shape[dimension], parts() * (2 if axis_size(RING) > 1 else 1)
  if length % chunks:
    near = -(-length // chunks) * chunks
    raise ConfigError(
      f"mesh.sequence={parts()} cuts rows into {chunks} equal parts, got rows of {length} tokens; "
      f"use rows of {near} tokens, or mesh.sequence=1"
    )
  if axis_size(RING) == 1:
    return own_share(x, dimension, HEADS)
  early, late = chunks_of(axis_index(RING))
  size = length // chunks
  cut = lambda i: jax.lax.dynamic_slice_in_dim(x, i * size, size, dimension)
  return jnp.concatenate([cut(early), cut(late)], dimension)


def own_tokens(batch: Any) -> Any:
  """This device's tokens of a `scmoe.base.batch.Batch` of whole rows, with leaves [..., S].

  Where no devices divide rows (`parts` is 1), the batch is returned as it is, whatever its type.

  Raises:
    ConfigError: see `own_places`.
  """
  if parts() == 1:
    return batch
  arrays = {name: getattr(batch, name) for name in _BY_TOKEN}
  own = {name: own_places(x, x.ndim - 1) for name, x in arrays.items()}
  return dataclasses.replace(batch, **own)


def own_positions(size: int) -> Array:
  """Places in a row of the `size` tokens that this device has of each row: int32 [size], rising."""
  return own_places(jnp.arange(size * parts(), dtype=jnp.int32), 0)


def chunks_of(rank: Any) -> tuple[Any, Any]:
  """Numbers, from 0 on, of the two chunks of a row that a rank of the ring has: (early, late)."""
  return rank, 2 * axis_size(RING) - 1 - rank
