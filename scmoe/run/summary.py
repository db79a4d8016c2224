"""The lines that a run prints at its start, and changes that help where memory is short."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import duration, size_of
from scmoe.models.config import ModelConfig
from scmoe.models.flops import count_parameters, forward_flops
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.dry_run import dry_run
from scmoe.run.dry_run_text import model_lines
from scmoe.run.estimates import BUS_SHARE, DEVICES
from scmoe.run.host_memory import check_host_memory, host_memory, planned_away
from scmoe.run.nearest import all_shared, changed_fields, on_as_many_devices, smallest_data
from scmoe.run.on_host import experts_refused
from scmoe.run.sharing import bytes_per_device

MANY_PASSES = 20  # passes over a text after which a small model has memorised it


def header(built: build.Built, data: Any, workdir: Path) -> str:
  """The lines that a run prints first: work directory, model, mesh, memory, data, warnings."""
  run, mesh = built.run, built.run.mesh
  parameters = count_parameters(run.model, built.shapes)
  held = state_bytes(built)
  lines = [
    f"run          {run.name} -> {workdir}",
    *model_lines(run, parameters, forward_flops(run.model, run.data.seq_len)),
    f"mesh         {mesh.words}: {mesh.size} of "
    f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    f"memory       {size_of(held)} of parameters and optimizer on each device; --dry_run has more",
    *_host_lines(built),
    data.summary(),
    *passes(built, data),
  ]
  if not data.validation_domains:
    lines.append(
      "WARNING      no validation data: nothing will be evaluated; set data.validation_fraction, "
      "or give more than one document"
    )
  if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
    lines.append(
      "WARNING      jax uses the CPU although this machine has nvidia-smi: install the CUDA build "
      "of jax, or unset JAX_PLATFORMS"
    )
  return "\n".join(lines)


def passes(built: build.Built, data: Any) -> list[str]:
  """A line on how often the run reads each domain's training text, and a warning if too often."""
  run = built.run
  rows = run.train.steps * run.train.microbatches(run.data.seq_len) * run.train.batch_size
  found = data.passes(rows)
  if not found:
    return []
  shown = ", ".join(f"{name} {count:.2g}" for name, count in found.items())
  lines = [f"passes       {shown} times over the training text in {run.train.steps:,} steps"]
  name, most = max(found.items(), key=lambda item: item[1])
  if most > MANY_PASSES:
    fewer = max(1, int(run.train.steps * MANY_PASSES / most))
    lines.append(
      f"WARNING      {name} is read {most:.0f} times, so the model memorises it: give more text "
      f"(data.path), or at most train.steps={fewer:,}"
    )
  return lines


def _host_lines(built: build.Built) -> list[str]:
  plan = planned_away(built.run, built.abstract_state())
  if plan is None:
    return []
  kept, more, kind = size_of(plan.in_memory), size_of(plan.saving), jax.devices()[0].device_kind
  what = "copies and the host's update take" if plan.leaving else "copies take"
  rates = [BUS_SHARE * device.bus for device in DEVICES if device.name in kind]
  planned = [f"; {what} {duration(plan.seconds(rate))} a step by the plan" for rate in rates]
  filed = f"{size_of(plan.total)} in files and " * plan.filed
  when = "when it resumes" if plan.filed else "during a save"
  passes = [] if plan.passes is None else [
    f"; copies of experts {duration(plan.passes.seconds(rate))} beside the passes" for rate in rates
  ]  # fmt: skip
  return [
    f"             {filed}{kept} in the host's memory for each device, {more} more {when}"
    + "".join(planned[:1] + passes[:1])
  ]


def state_bytes(built: build.Built) -> int:
  """Bytes of the whole training state on each device, without those in the host's memory.

  Beside parameters and optimizer, a teacher's or a frozen base's arrays count.
  """
  return bytes_per_device(built.abstract_state())


def device_memory() -> int | None:
  """Bytes that each device here can hold; on a CPU its share of the host's free memory.

  None where neither the device nor the operating system reports it.
  """
  device = jax.local_devices()[0]
  if limit := (device.memory_stats() or {}).get("bytes_limit"):
    return limit
  free = host_memory()
  return free if free is None else free // jax.local_device_count()


def check_memory(built: build.Built) -> None:
  """Checks, before anything is allocated, that devices and host can hold the training state.

  Raises:
    ConfigError: parameters and optimizer need more memory than a device, or the host, has.
  """
  check_host_memory(built)
  held, limit = state_bytes(built), device_memory()
  if limit is not None and held > limit:
    raise ConfigError(
      f"parameters and optimizer need {size_of(held)} on each device, which has {size_of(limit)}; "
      f"{levers(built.run, limit)}"
    )


def out_of_memory(built: build.Built, error: Exception) -> ConfigError | None:
  """The error for a step that did not fit in memory; None if `error` has another cause."""
  text = str(error)
  if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
    return None
  if os.strerror(errno.ENOSPC) in text:  # jax has the same word for a full disk
    return None
  memory, limit = dry_run(built.run).memory, device_memory()
  parts = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
  shown = ", ".join(f"{name} {size_of(size)}" for name, size in parts.items())
  return ConfigError(
    f"out of memory: a step needs about {size_of(memory.total)} on each device ({shown})"
    + (f", which has {size_of(limit)}" if limit else "")
    + f"; {levers(built.run, limit)}"
  )


@dataclasses.dataclass(frozen=True)
class Lever:
  """A change of the configuration with which a step needs less memory.

  Attributes:
    words: the fields as a user types them.
    memory: bytes of each device that a step needs with the change; None where the change does not
      fit the rest of the configuration.
    limit: bytes that each device has with the change; None if unknown.
  """

  words: str
  memory: int | None
  limit: int | None

  @property
  def fits(self) -> bool:
    """True if the step fits with the change, or if that is unknown."""
    return self.limit is None or self.memory is None or self.memory <= self.limit

  def __str__(self) -> str:
    return self.words if self.memory is None else f"{self.words} ({size_of(self.memory)})"


def levers(run: RunConfig, limit: int | None = None) -> str:
  """Suggests changes with which a step fits, or says that none suffices.

  Args:
    run: resolved configuration.
    limit: bytes that a device has; None: unknown, so every change is suggested.
  """
  found = [
    Lever(words, _needed(changed), _limit_on(changed.mesh.size, run.mesh.size, limit))
    for words, changed in _smaller(run)
  ]
  layers = [f"fewer than model.num_layers={run.model.num_layers}"]
  if run.model.num_layers <= 2 * run.model.moe_every:
    layers = []
  if useful := [str(lever) for lever in found if lever.fits]:
    return "try " + ", ".join(useful + layers)
  if not found:
    return f"try {layers[0]}" if layers else "use a smaller model"
  none = f"try a smaller model: none of these suffices alone: {', '.join(map(str, found))}"
  parts = [none, _nearest_mesh(run, limit), _largest_that_fits(run, limit)]
  return "; ".join(part for part in parts if part)


def _smaller(run: RunConfig) -> list[tuple[str, RunConfig]]:
  """(fields as typed, changed run) of the changes that save memory and keep training's result."""
  train, mesh, length = run.train, run.mesh, run.data.seq_len
  found = []
  tokens = train.microbatches(length) * train.batch_size * length
  if train.batch_size % (2 * mesh.batch_shards) == 0:
    half = dataclasses.replace(train, batch_size=train.batch_size // 2, tokens_per_step=tokens)
    words = f"train.batch_size={half.batch_size} train.tokens_per_step={tokens}"
    found.append((words, dataclasses.replace(run, train=half)))
  if train.remat != "full":
    full = dataclasses.replace(train, remat="full")
    found.append(("train.remat=full", dataclasses.replace(run, train=full)))
  if run.model.wiring_rule.taps and run.model.num_experts % (2 * mesh.expert) == 0:
    wide = dataclasses.replace(mesh, expert=2 * mesh.expert)
    if train.batch_size % wide.batch_shards == 0:
      words = f"mesh.expert={wide.expert} on {wide.size} devices"
      found.append((words, dataclasses.replace(run, mesh=wide)))
  if (
    mesh.moments_in == "device" and not run.lora.rank and jax.default_backend() != "cpu"
  ):  # a CPU has one memory
    host = dataclasses.replace(mesh, moments_in="host")
    found.append(("mesh.moments_in=host", dataclasses.replace(run, mesh=host)))
    both = dataclasses.replace(host, experts_in="host")
    changed = dataclasses.replace(run, mesh=both)
    if run.model.wiring_rule.taps and not experts_refused(changed):
      found.append(("mesh.moments_in=host mesh.experts_in=host", changed))
  if mesh.token_shards > 1 and not run.lora.rank:
    modes = ("none", "moments", "parameters")
    for word in modes[modes.index(mesh.shard_state) + 1 :]:
      shared = dataclasses.replace(mesh, shard_state=word, experts_in="device")
      found.append((changed_fields(mesh, shared), dataclasses.replace(run, mesh=shared)))
  return found


def _nearest_mesh(run: RunConfig, limit: int | None) -> str:
  """Suggests the nearest mesh that holds the state.

  It has as many devices, or else the fewest data ranks with which a step fits if all ranks share.
  "" if 1,024 times as many are too few, on a CPU, with adapters, or if `limit` is unknown.
  """
  if limit is None or jax.default_backend() == "cpu":  # simulated devices share one memory
    return ""
  if run.lora.rank:  # adapters have no shares
    return ""
  (near,) = on_as_many_devices(run, dry_run(run).memory, [limit])
  if near is not None:
    return f"{changed_fields(run.mesh, near[0])} would fit ({size_of(near[1])})"
  (need,) = smallest_data(run, [limit])
  if need is None:
    return ""
  devices = need[0] * run.mesh.size // run.mesh.data
  return (
    f"{all_shared(run.mesh)} mesh.data={need[0]} on {devices} devices would fit "
    f"({size_of(need[1])})"
  )


def _needed(run: RunConfig) -> int | None:
  try:
    return dry_run(run).memory.total
  except ConfigError:
    return None


def _limit_on(devices: int, before: int, limit: int | None) -> int | None:
  """Bytes that each of `devices` devices has; simulated devices share the host's memory."""
  if limit is None or jax.default_backend() != "cpu":
    return limit
  return limit * before // devices


def _largest_that_fits(run: RunConfig, limit: int | None) -> str:
  """Suggests a number of layers, found by halving, with which the smallest microbatch fits.

  If there is none, or `limit` is unknown, it says that no number of layers fits here. "" for a
  Swin, which has `model.vision.depths` instead.
  """
  if run.model.architecture == "swin":
    return ""
  step = run.model.moe_every * run.model.wiring_rule.units_per_moe
  batch, layers = run.mesh.batch_shards, run.model.num_layers // 2
  train = dataclasses.replace(run.train, batch_size=batch, tokens_per_step=0, remat="full")
  while limit is not None and layers >= step:
    layers -= layers % step
    model = run.model.with_layers(layers)
    needed = _needed(dataclasses.replace(run, model=model, train=train))
    if needed is not None and needed <= limit:
      return (
        f"{_typed(run.model, model)} train.batch_size={batch} train.tokens_per_step=0 "
        f"train.remat=full would fit ({size_of(needed)})"
      )
    layers //= 2
  return (
    "no number of layers fits here: use another --config (--list_configs), or --dry_run for GPUs"
  )


def _typed(before: ModelConfig, after: ModelConfig) -> str:
  """The fields with which a user makes the model `after` from `before`."""
  names = [field.name for field in dataclasses.fields(after)]
  changed = [name for name in names if getattr(before, name) != getattr(after, name)]
  return " ".join(f"model.{name}={getattr(after, name)}" for name in changed)
