"""Bytes that a run keeps in the host's memory or in files (`mesh.moments_in`), and copies' time.

The planner's model of a streamed update: the link carries both directions at once, each at the same
rate. With ahead = 1 layer 0 is fetched first; then each layer's store and the fetch of the layer
behind it begin together, and both end before the next two begin, as the barriers of
`scmoe.training.streamed_update` say. With ahead = 0 no copy runs beside another. The computation of
the update is left out: the device's own memory is about sixty times as fast.

The model of an update that the host computes (`mesh.moments_update=host`): gradients leave layer by
layer, those of layer i + ahead as the update of layer i begins (`scmoe.training.host_update`). The
host reads and writes what it keeps, what leaves and what comes back, at `HOST_RATE`. What comes
back travels beside the next update. If it keeps them in a file, its disk reads and writes by turns,
at `DISK_RATE`: layer i + ahead is read as the update of layer i begins, and layer i is written when
that ends. The first `ahead` layers are read beside the pass, the last is written beside the next.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.models.gradient_sums import group_size
from scmoe.models.stacked import STACKS, is_apart
from scmoe.offload.memory import HOST
from scmoe.run.build import Built
from scmoe.run.config import RunConfig
from scmoe.run.estimates import DISK_RATE, HOST_DEVICES, HOST_RATE
from scmoe.run.expert_copies import Passes, passes_of
from scmoe.training import masters
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.kept import cpu
from scmoe.training.masters import is_halves
from scmoe.training.step import TrainState
from scmoe.training.streamed_update import count_of, stack_of


@dataclasses.dataclass(frozen=True)
class Away:
  """Bytes that one device keeps in the host's memory, or in a file.

  Attributes:
    layers: bytes of each layer, in the order of their update; first those beside the stacks.
    ahead: see `scmoe.training.streamed_update.OnHost`.
    saving: further bytes there while a checkpoint is written or read: stacks put together, and
      parameters in float32 (`TrainState.for_checkpoint`). With files, while one is read.
    leaving, arriving: if the host computes the update, bytes of each layer that leave the device
      (gradients, and what it stores of parameters and their average), and that come back; else ().
    together: devices of the host whose updates it computes, if it does.
    filed: whether the layers lie in a file.
    drawn: bytes of each layer that the update fetches and does not store: the float32 gradients of
      experts in the host's memory; () if experts lie on the device.
    passes: what forward and backward passes fetch and store of such experts; None: nothing.
  """

  layers: tuple[int, ...]
  ahead: int
  saving: int = 0
  leaving: tuple[int, ...] = ()
  arriving: tuple[int, ...] = ()
  together: int = 1
  filed: bool = False
  drawn: tuple[int, ...] = ()
  passes: Passes | None = None

  @property
  def total(self) -> int:
    """Bytes in the host's memory or in the file.

    Streamed, as many are fetched in a step, and as many stored.
    """
    return sum(self.layers)

  @property
  def in_memory(self) -> int:
    """The most bytes of layers and of experts' gradients that the host's memory holds at a time.

    From a file those are the layer that is updated and `ahead` that are read, and two new ones: one
    that is computed, one that is written. With `ahead` 0 only one is new.
    """
    if not self.filed:
      return self.total + sum(self.drawn)
    return _window(self.layers, self.ahead + 1) + _window(self.layers, 1 + bool(self.ahead))

  @property
  def staging(self) -> int:
    """Bytes of pinned memory through which gradients pass to a host that computes the update."""
    return _window(self.leaving, self.ahead + 1)

  @property
  def on_device(self) -> int:
    """The most bytes that the device holds for layers under way.

    Streamed, it is what the update fetches of `ahead` + 1 layers. If the host computes it, they are
    the gradients and parameters cut out of the stacks for `ahead` layers, or one, and one layer's
    new parameters.
    """
    if self.leaving:
      return _window(self.leaving, max(1, self.ahead)) + max(self.arriving)
    return _window(self._fetched, self.ahead + 1)

  @property
  def _fetched(self) -> tuple[int, ...]:
    drawn = self.drawn or (0,) * len(self.layers)
    return tuple(size + more for size, more in zip(self.layers, drawn))

  def seconds(self, rate: float) -> float:
    """Seconds of the update's copies by this module's model, for a link of `rate` bytes/s each way.

    If the host computes the update, its computation is counted too.
    """
    return self._computed(rate) if self.leaving else self._streamed(rate)

  def _streamed(self, rate: float) -> float:
    first, fetches = max(self.ahead, 1), self._fetched
    seconds = sum(fetches[:first]) / rate
    for i, size in enumerate(self.layers):
      fetched = fetches[i + first] if i + first < len(fetches) else 0
      seconds += (max(size, fetched) if self.ahead else size + fetched) / rate
    return seconds

  def _computed(self, rate: float) -> float:
    begun = [0.0] * (self.ahead + 1)  # when each update began; those before the first: at once
    arrived = updated = sent = disk = 0.0
    turns = [self.together * kept / DISK_RATE * self.filed for kept in self.layers]
    ready = [0.0] * len(self.layers)  # when each layer has been read
    for i, (kept, out, back) in enumerate(zip(self.layers, self.leaving, self.arriving)):
      # With `ahead` 0 a layer leaves when the one before has come back, else as an update begins.
      arrived = max(arrived, begun[-1 - (self.ahead - 1)] if self.ahead else sent) + out / rate
      if not self.ahead:
        ready[i] = disk = max(disk, updated) + turns[i]
      begun.append(max(arrived, updated, ready[i]))
      if self.ahead and i + self.ahead < len(turns):
        ready[i + self.ahead] = disk = max(disk, begun[-1]) + turns[i + self.ahead]
      updated = begun[-1] + self.together * 2 * (kept + out + back) / HOST_RATE
      disk = max(disk, updated) + turns[i]
      sent = max(sent, updated) + back / rate
    return sent


def _window(sizes: tuple[int, ...], count: int) -> int:
  """The most bytes of `count` neighbours."""
  starts = range(max(1, len(sizes) - count + 1))
  return max((sum(sizes[i : i + count]) for i in starts), default=0)


def away(
  state: TrainState,
  ahead: int,
  *,
  computes: bool = False,
  together: int = 1,
  filed: bool = False,
  passes: tuple[int, int] = (1, 0),
) -> Away | None:
  """Counts the bytes that a state keeps in the host's memory or in a file; None if none lie there.

  Args:
    state: `jax.ShapeDtypeStruct`s with shardings, or arrays.
    ahead: see `Away`.
    computes: whether the host computes the update.
    together, filed: see `Away`.
    passes: `count` and `looks` of `Passes`.
  """
  sizes, out, back = {("", 0): 0}, {}, {}
  entries = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state), is_leaf=is_apart)
  for path, leaf in entries:
    parts = leaf.parts if is_apart(leaf) else [leaf] if lies_on_host(leaf) else []
    for i, part in enumerate(parts):
      layer = stack_of(path), i
      sizes[layer] = sizes.get(layer, 0) + (_bytes(part) if lies_on_host(part) else 0)
  layers = [layer for layer, size in sizes.items() if size]
  if not layers:
    return None
  found = tuple(sizes[layer] for layer in layers)
  if not computes:
    copies = passes_of(state.params, *passes)
    drawn = () if copies is None else tuple(
      copies.gradients[i] if stack == STACKS[0] else 0 for stack, i in layers
    )  # fmt: skip
    return Away(found, ahead, _saving(state), drawn=drawn, passes=copies)
  for layer in layers:
    out[layer], back[layer] = _passing(state, layer)
  passing = tuple(out.values()), tuple(back.values())
  more = _resuming(state) if filed else _saving(state, copies=True)
  return Away(found, ahead, more, *passing, together, filed)


def _passing(state: TrainState, layer: tuple[str, int]) -> tuple[int, int]:
  """Bytes of a layer that leave the device for an update on the host, and that come back.

  Those are float32 gradients, what the device stores of the parameters, and the average; all but
  the gradients come back.
  """
  passing = stored = 0
  entries = jax.tree_util.tree_leaves_with_path(state.params, is_leaf=is_halves)
  types = {path: masters.readable(x).dtype for path, x in entries}
  entries = jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=is_apart)
  for path, leaf in entries:
    # The first moment of each parameter has the shape of the share that a device updates.
    names = [getattr(key, "name", "") for key in path]
    if "mu" not in names or stack_of(path) != layer[0] or layer[1] >= count_of(layer[0], leaf):
      continue
    share = leaf.parts[0] if is_apart(leaf) else leaf
    count = math.prod(share.sharding.shard_shape(share.shape))
    passing += 4 * count
    stored += types[path[names.index("mu") + 1 :]].itemsize * count
    stored += 0 if state.average is None else 4 * count
  return passing + stored, stored


def _saving(state: TrainState, copies: bool = False) -> int:
  abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  state = jax.tree.map(abstract, state)
  saved = jax.tree.leaves(state.for_checkpoint())
  # What the checkpoint takes as it is; of what the host updates in place it takes copies.
  kept = set() if copies else {id(x) for x in jax.tree.leaves(state)}
  return sum(_bytes(x) for x in saved if lies_on_host(x) and id(x) not in kept)


def _resuming(state: TrainState) -> int:
  """Parameters in float32 and the largest array in a file: those are read one after the other."""
  plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  read = jax.tree.map(plain, state).for_checkpoint()
  there = lambda tree: [_bytes(x) for x in jax.tree.leaves(tree) if lies_on_host(x)]
  return sum(there(read.params)) + max(there(read.opt_state), default=0)


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
    ConfigError: the devices have no such memory, or the host has too little of it; or a folder for
      files is none, or its disk has too little room.
  """
  mesh = built.run.mesh
  if mesh.moments_in == "device":
    return
  device = jax.local_devices()[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ConfigError(
      f"mesh.moments_in={mesh.moments_in!r} needs memory of the kind {HOST}, a "
      f"{device.device_kind} of this jax has {', '.join(kinds)}; leave mesh.moments_in=device"
    )
  for field in ("moments_update", "experts_in"):
    if getattr(mesh, field) == "host":
      cpu(field)
  plan, free = planned_away(built.run, built.abstract_state()), host_memory()
  here = sum(one.process_index == jax.process_index() for one in built.mesh.devices.flat)
  if plan is None:
    return
  held = min(here, plan.together) if plan.leaving else here
  if plan.filed:
    _check_folder(mesh.moments_folder, held * plan.total)
  if free is None:
    return
  kept, more = held * plan.in_memory + here * plan.staging, held * plan.saving
  if kept + more > free:
    when = "resume" if plan.filed else "save"
    with_experts = mesh.experts_in == "host"
    other = "mesh.experts_in=device" if with_experts else "mesh.shard_state=parameters"
    raise ConfigError(
      f"mesh.moments_in={mesh.moments_in!r} keeps {size_of(kept)} in this host's memory and needs "
      f"{size_of(more)} more to {when} (devices here: {here}), got {size_of(free)} available; use "
      f"optimizer.moments=bfloat16, a larger mesh.expert, {other}, or fewer layers"
    )


def _check_folder(folder: str, size: int) -> None:
  """Checks that a file of `size` bytes can be made in a folder.

  Raises:
    ConfigError: there are several processes, the folder is none that can be written, or its disk
      has too little room.
  """
  if jax.process_count() > 1:
    raise ConfigError(
      f"mesh.moments_in='files' is for one process, got {jax.process_count()}, which would have to "
      "write the parts of one array together; set mesh.moments_in=host"
    )
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
    raise ConfigError(
      f"mesh.moments_folder={folder!r} is no folder that can be written; name one on a local disk"
    )
  if size > (free := shutil.disk_usage(folder).free):
    raise ConfigError(
      f"mesh.moments_folder={folder!r} needs {size_of(size)} for moments, got {size_of(free)} "
      "free; name a folder on another disk, or use optimizer.moments=bfloat16"
    )


def planned_away(run: RunConfig, state: TrainState) -> Away | None:
  """Counts the bytes that each device keeps in its host's memory or in files; None: nothing.

  Args:
    run: resolved.
    state: as of `away`.
  """
  mesh = run.mesh
  if mesh.moments_update == "device":
    microbatches = run.train.microbatches(run.data.seq_len)
    count = microbatches // group_size(microbatches, run.overlap.flight)
    looks = microbatches if run.router.looks_ahead(microbatches) else 0
    return away(state, mesh.moments_ahead, passes=(count, looks))
  # Data ranks that neither share nor partition have equal shards, which their host keeps and
  # updates once. If one array differs between them, it keeps all for each (`kept.Groups`).
  alike = mesh.shard_state == "none" and mesh.embedding_ranks == 1
  filed = mesh.moments_in == "files"
  apart = mesh.size // mesh.data if alike else mesh.size
  return away(
    state, mesh.moments_ahead, computes=True, together=min(apart, HOST_DEVICES), filed=filed
  )
