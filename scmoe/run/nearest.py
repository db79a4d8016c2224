"""Meshes that hold a state which the run's own mesh does not hold, the nearest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from scmoe.parallel.mesh import MeshConfig
from scmoe.run.config import RunConfig
from scmoe.run.dry_run import Memory, dry_run, state_memory


def on_as_many_devices(
  run: RunConfig, memory: Memory, limits: Sequence[float]
) -> list[tuple[MeshConfig, int] | None]:
  """The nearest mesh of the same axes on which a step fits, and its bytes per device.

  First ranks share moments, then parameters too; experts lie on the devices. Activations and
  buffers stay those of the run, since each device has as many tokens as before.

  Args:
    run: resolved.
    memory: of `dry_run`.
    limits: bytes of a device; the result has an entry for each, None if no such mesh fits.
  """
  modes = ("moments", "parameters")
  meshes = (dataclasses.replace(run.mesh, shard_state=m, experts_in="device") for m in modes)
  runs = (
    dataclasses.replace(run, mesh=mesh) for mesh in meshes if mesh != run.mesh and mesh.shares_state
  )
  found = _first_that_fit(runs, memory, limits)
  return [fit and (fit[0].mesh, fit[1]) for fit in found]


def _first_that_fit(
  runs: Iterable[RunConfig], memory: Memory, limits: Sequence[float]
) -> list[tuple[RunConfig, int] | None]:
  """For each limit the first run that fits, and its bytes per device; None: none does.

  Args:
    runs: resolved; a device has the activations and buffers of `memory` in each of them.
    memory: of `dry_run`.
    limits: bytes of a device.
  """
  found: list[tuple[RunConfig, int] | None] = [None] * len(limits)
  for run in runs:
    needed = state_memory(run).total + memory.activations + memory.exchange
    for i, limit in enumerate(limits):
      if found[i] is None and needed <= limit:
        found[i] = run, needed
    if None not in found:
      break
  return found


def changed_fields(before: MeshConfig, after: MeshConfig) -> str:
  """The fields with which a user makes the mesh `after` from `before`."""
  names = [field.name for field in dataclasses.fields(after)]
  changed = [name for name in names if getattr(before, name) != getattr(after, name)]
  return " ".join(f"mesh.{name}={getattr(after, name)}" for name in changed)


def all_shared(mesh: MeshConfig) -> str:
  """The fields with which ranks share all state; experts then lie on the devices."""
  shared = dataclasses.replace(mesh, shard_state="parameters", experts_in="device")
  return changed_fields(dataclasses.replace(mesh, shard_state="none"), shared)


def smallest_data(run: RunConfig, limits: Sequence[float]) -> list[tuple[int, int] | None]:
  """The fewest data ranks with which a step fits if all ranks share the state; bytes per device.

  Each rank has as many rows as in `run`, so activations and buffers stay those of the first mesh
  that is tried. That mesh has the run's own number of data ranks, but at least two ranks that can
  share; then the number is doubled again and again.

  Args:
    run: resolved.
    limits: bytes of a device; the result has an entry for each, None where 1,024 times as many
      data ranks are too few.
  """
  first = run.mesh.data if run.mesh.token_shards > 1 else 2
  mesh = dataclasses.replace(run.mesh, shard_state="parameters", experts_in="device")
  if run.mesh.data == 1:  # nobody checked whether several ranks can partition this embedding
    mesh = dataclasses.replace(mesh, embedding="whole")

  def with_ranks(data: int) -> RunConfig:
    wide = dataclasses.replace(mesh, data=data)
    rows = run.train.batch_size // run.mesh.batch_shards * wide.batch_shards
    tokens = run.train.tokens_per_step
    tokens = tokens if tokens % (rows * run.data.seq_len) == 0 else 0
    train = dataclasses.replace(run.train, batch_size=rows, tokens_per_step=tokens)
    return dataclasses.replace(run, mesh=wide, train=train)

  runs = (with_ranks(first * 2**i) for i in range(11))
  found = _first_that_fit(runs, dry_run(with_ranks(first)).memory, limits)
  return [fit and (fit[0].mesh.data, fit[1]) for fit in found]
