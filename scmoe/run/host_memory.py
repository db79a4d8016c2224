"""Bytes that a run keeps in the host's memory (`mesh.moments_in=host`), and the time of copies.

The planner's model of an update: the link carries both directions at once, each at the same rate.
Layers are fetched one after the other, and stored one after the other. The fetch of layer i waits
for the store of layer i - 1 - ahead, as the barriers of `scmoe.training.streamed_update` say. The
computation of the update is left out: the device's own memory is about sixty times as fast.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.models.stacked import is_apart
from scmoe.offload.memory import HOST
from scmoe.run.build import Built
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.step import TrainState
from scmoe.training.streamed_update import stack_of


@dataclasses.dataclass(frozen=True)
class Away:
  """Bytes that one device keeps in the host's memory.

  Attributes:
    layers: bytes of each layer, in the order of their update; first those beside the stacks.
    ahead: see `scmoe.training.streamed_update.OnHost`.
    saving: further bytes there while a checkpoint is written or read: stacks put together, and
      parameters in float32 (`TrainState.for_checkpoint`).
  """

  layers: tuple[int, ...]
  ahead: int
  saving: int = 0

  @property
  def total(self) -> int:
    """Bytes in the host's memory; as many are fetched in a step, and as many stored."""
    return sum(self.layers)

  @property
  def on_device(self) -> int:
    """The most of these bytes that the device holds at a time: those of `ahead` + 1 layers."""
    together = self.ahead + 1
    starts = range(max(1, len(self.layers) - self.ahead))
    return max((sum(self.layers[i : i + together]) for i in starts), default=0)

  def seconds(self, rate: float) -> float:
    """Seconds of a step's copies by this module's model, for a link of `rate` bytes/s each way."""
    fetched, stored = 0.0, [0.0] * (self.ahead + 1)  # when the last fetch, and each store, ended
    for size in self.layers:
      fetched = max(fetched, stored[-1 - self.ahead]) + size / rate
      stored.append(max(fetched, stored[-1]) + size / rate)
    return stored[-1]


def away(state: TrainState, ahead: int) -> Away | None:
  """Counts the bytes that a state keeps in the host's memory; None if it keeps none there.

  Args:
    state: `jax.ShapeDtypeStruct`s with shardings, or arrays.
    ahead: see `Away`.
  """
  sizes = {("", 0): 0}
  entries = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state), is_leaf=is_apart)
  for path, leaf in entries:
    parts = leaf.parts if is_apart(leaf) else [leaf] if lies_on_host(leaf) else []
    for i, part in enumerate(parts):
      layer = stack_of(path), i
      sizes[layer] = sizes.get(layer, 0) + _bytes(part)
  found = tuple(size for size in sizes.values() if size)
  return Away(found, ahead, _saving(state)) if found else None


def _saving(state: TrainState) -> int:
  abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  state = jax.tree.map(abstract, state)
  saved = jax.tree.leaves(state.for_checkpoint())
  kept = {id(x) for x in jax.tree.leaves(state)}  # what the checkpoint takes as it is
  return sum(_bytes(x) for x in saved if lies_on_host(x) and id(x) not in kept)


def _bytes(x: Any) -> int:
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def host_memory() -> int | None:
  """Bytes of the host that are free or can be freed; None where the system does not report it."""
  try:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
  except (OSError, ValueError):
    return None
  return 1024 * int(free)


def check_host_memory(built: Built) -> None:
  """Checks, before anything is allocated, that the host can keep what the run puts there.

  Every run saves, so the bytes of a save count too.

  Raises:
    ConfigError: the devices have no such memory, or the host has too little of it.
  """
  mesh = built.run.mesh
  if mesh.moments_in != "host":
    return
  device = jax.local_devices()[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ConfigError(
      f"mesh.moments_in='host' needs memory of the kind {HOST}, a {device.device_kind} of this jax "
      f"has {', '.join(kinds)}; leave mesh.moments_in=device"
    )
  plan, free = away(built.abstract_state(), mesh.moments_ahead), host_memory()
  here = sum(one.process_index == jax.process_index() for one in built.mesh.devices.flat)
  if plan is None or free is None:
    return
  kept, more = here * plan.total, here * plan.saving
  if kept + more > free:
    raise ConfigError(
      f"mesh.moments_in='host' keeps {size_of(kept)} in this host's memory and needs "
      f"{size_of(more)} more to save (devices here: {here}), got {size_of(free)} available; use "
      "optimizer.moments=bfloat16, a larger mesh.expert or mesh.shard_state, or fewer layers"
    )
