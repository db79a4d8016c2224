"""The parts of a run that the training loop is handed: data, model and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax

from scmoe.base.batch import Batch
from scmoe.parallel.mesh import batch_sharding
from scmoe.training.fastest import Searchable
from scmoe.training.options import CheckpointConfig


class Batches(Protocol):
  """An iterator over this process's microbatches: `Batch`es, or `ImageBatch`es, of numpy arrays.

  Their leaves are [B / processes, ...], for microbatches of B sequences or images.
  """

  def __iter__(self) -> Iterator[Batch]: ...
  def __next__(self) -> Batch: ...
  def state(self) -> dict[str, Any]:
    """JSON-able position of the next microbatch."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a position that `state` returned.

    Raises:
      DataError: it is no such position.
    """
    ...


class Data(Protocol):
  """The part of the training data's interface that the loop uses; for sources see `scmoe.data`."""

  def train(self) -> Batches:
    """An iterator that begins with the first microbatch of training."""
    ...

  def fingerprint(self) -> dict[str, Any]:
    """JSON-able identity of the data and their order."""
    ...


class Trainable(Searchable, Protocol):
  """The model and options that the loop needs; the commands pass a `scmoe.run.build.Built`.

  Attributes:
    checkpoint: the options of checkpoints.
    batch_shapes: one step's batch as `jax.ShapeDtypeStruct`s [A, B, ...], of all processes.
    peak_flops: FLOP/s of one device; 0: no MFU.
    aimed_share: the share of the choices that a balancing bias aims to give to computing experts;
      None: no bias aims at one.
  """

  @property
  def checkpoint(self) -> CheckpointConfig: ...
  @property
  def batch_shapes(self) -> Any: ...
  @property
  def peak_flops(self) -> float: ...
  @property
  def aimed_share(self) -> float | None: ...
  def flops_per_token(self, figures: Mapping[str, Any]) -> float:
    """Training FLOPs of a token in a step with these figures; 0: unknown, no MFU."""
    ...


def abstract_batch(built: Trainable) -> Any:
  """One step's batch as `jax.ShapeDtypeStruct`s with shardings."""
  sharding = batch_sharding(built.mesh, leading=1)
  place = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
  return jax.tree.map(place, built.batch_shapes)
