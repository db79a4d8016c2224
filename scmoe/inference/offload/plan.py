"""Plans where a model's experts are kept and when they are copied to a device.

They are kept on the device, in the host's memory or, if the host's memory is too small, in the
model's files. The planner needs shapes and rates only, so it runs before parameters are loaded.
Three rates decide the cost of an `Offload`: the device's FLOP/s and the bytes/s of its memory, both
taken from a table (`scmoe.profiling.roofline.MACHINES`), and the bytes/s from the host to the
device, which are measured. If no `Offload` fits, the error names the number of bytes needed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.inference.offload.model import Offload
from scmoe.inference.offload.needs import Needs, Workload, needs
from scmoe.layers.mlp import is_gated
from scmoe.models.config import ModelConfig
from scmoe.offload.experts import Migration
from scmoe.offload.memory import HOST
from scmoe.profiling.roofline import MACHINES, Machine, Sizes, StageSeconds, model_times

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# The least modelled seconds of a stage, for the launch of its kernels. Dispatch and combine of at
# most 1,024 tokens are modelled as taking no time.
FLOOR = 8e-6


@dataclasses.dataclass(frozen=True)
class OffloadRequest:
  """The user's options on where experts are kept; the planner chooses what they leave open.

  Errors name these fields; the flags of `scmoe.generate` have the same names.

  Attributes:
    offload: none, blocking, early or ring for both phases; two of these words as PREFILL,DECODE; or
      auto: the planner chooses.
    gpu_memory: bytes of one device that may be used; 0: all.
    host_memory: bytes of pinned memory that may be used for all devices together; 0: no limit.
    expert_cache: most experts of every layer that a device caches; -1: with auto the planner
      chooses, otherwise none. Not read where auto finds that all experts fit on the device.
    cache_policy, ring_sections: see `policy` and `sections` of `Migration`; with auto the planner
      chooses the sections.
    int8_experts: whether the host keeps the experts' matrices in eight bits.
  """

  offload: str = "auto"
  gpu_memory: int = 0
  host_memory: int = 0
  expert_cache: int = -1
  cache_policy: str = Migration.policy
  ring_sections: int = Migration.sections
  int8_experts: bool = False

  @property
  def named(self) -> Offload:
    """The `Offload` of this request; the field `offload` must name modes, not auto.

    Raises:
      ConfigError: the field names an unknown mode, one phase is none and the other is not, both are
        none and `expert_cache` is larger than 0, or neither is and `cache_policy` is unknown.
    """
    prefill, _, decode = (part.strip() for part in self.offload.partition(","))
    decode = decode or prefill
    if prefill == decode == "none" and self.expert_cache > 0:
      raise ConfigError(
        f"expert_cache={self.expert_cache} has no effect with offload={self.offload!r}: all "
        "experts are on the device; leave expert_cache out, or use another offload"
      )
    options = {"policy": self.cache_policy, "sections": self.ring_sections}
    return Offload.named(prefill, decode, max(self.expert_cache, 0), **options)


@dataclasses.dataclass(frozen=True)
class Plan:
  """An `Offload` with its expected memory and speed.

  Attributes:
    offload: when experts are copied, and how many the device keeps.
    device: bytes needed on each device.
    host: bytes of pinned memory needed for all devices together.
    prefill, decode: tokens/s of all rows together.
    hit_rate: the share of requests that find their expert in the cache, as assumed for `decode`,
      but not if decode is in mode ring, which copies all experts.
    hidden: share of the time of decode's copies during which the device computes; 0 without copies.
    pinned: number of pairs whose experts are in pinned memory; those of the others stay in their
      files. None: no experts stay in files.
  """

  offload: Offload
  device: int
  host: int
  prefill: float
  decode: float
  hit_rate: float
  hidden: float
  pinned: int | None = None


def chosen(
  model: ModelConfig,
  shapes: Any,
  load: Workload,
  request: OffloadRequest,
  *,
  files: bool = False,
) -> tuple[Plan, list[str]]:
  """The plan for a user's request, and lines that describe it.

  If all experts stay on the device, as with none, or with auto where they fit, nothing is measured
  or modelled: the plan's rates and shares are 0, and there are no lines.

  Args:
    model: the model's resolved options.
    shapes: its parameters as `jax.ShapeDtypeStruct` with shardings.
    load: the size of the generation.
    request: the user's options.
    files: whether experts that do not fit the host's memory can stay in their files.

  Raises:
    ConfigError: the request does not fit the devices' or the host's memory; or see `plan` and
      `OffloadRequest.named`.
  """
  needed = needs(model, shapes, load, int8=request.int8_experts)
  # Every device has its experts, or its copies of another device's, in the host's memory.
  devices = jax.tree.leaves(shapes)[0].sharding.mesh.size
  limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
  budget = request.gpu_memory or limit or 2**62
  everything = needed.fixed + needed.pairs * needed.layer
  named = None if request.offload == "auto" else request.named
  if named == Offload() or (named is None and everything <= budget):
    _check_fits(everything, budget, request.offload)
    return Plan(Offload(), everything, 0, 0.0, 0.0, 0.0, 0.0), []
  bandwidth, host = measured_bandwidth(), request.host_memory or 2**62
  pinned = None
  if files and needed.host * devices > host:
    pinned, host = host * needed.pairs // (needed.host * devices), 2**62
  if named is None:
    found = plan(
      model,
      needed,
      load,
      gpu_memory=budget,
      host_memory=host,
      bandwidth=bandwidth,
      devices=devices,
    ).offload
    size = found.cache_size if request.expert_cache < 0 else request.expert_cache
    ours = lambda way: dataclasses.replace(way, policy=request.cache_policy)
    offload = Offload(ours(found.prefill), ours(found.decode), size)
  else:
    _check_host(needed, devices, host)
    offload = named
  result = expected(offload, model, needed, load, bandwidth, devices=devices)
  _check_fits(result.device, budget, request.offload)
  if pinned is not None:
    share = result.host * pinned // needed.pairs
    result = dataclasses.replace(result, pinned=pinned, host=share)
  return result, described(result, needed, bandwidth)


def _check_fits(size: int, budget: int, way: str) -> None:
  if size > budget:
    raise ConfigError(
      f"gpu_memory: {size_of(budget)} is less than the {size_of(size)} that offload={way!r} needs; "
      "use offload='auto', or a smaller expert_cache"
    )


def _check_host(needed: Needs, devices: int, budget: int) -> None:
  host = needed.host * devices
  if host > budget:
    raise ConfigError(
      f"host_memory: {size_of(budget)} is less than the {size_of(host)} of the experts; "
      "int8_experts halves them, and those of a folder of scmoe.convert --inference can stay on "
      "disk"
    )


def bytes_of(text: str, name: str) -> int:
  """The number of bytes that a text such as 8GiB, 0.5GB or 1048576 stands for, rounded down.

  Args:
    text: a number with or without a unit.
    name: the option's name, for the message.

  Raises:
    ConfigError: the text is not a size of at least one byte with a unit of `UNITS` or none.
  """
  number = text.strip().rstrip("TGMKiB ")
  unit = text.strip()[len(number) :].strip()
  try:
    # As a float, 64.1 MB would be a byte too few. Fraction alone would take 1/2, and would fill the
    # memory with the digits of 1e999999999.
    within = 0.5 < float(number) * UNITS[unit] < math.inf
    size = int(Fraction(number) * UNITS[unit]) if within else 0
  except (ValueError, KeyError):
    size = 0
  if size < 1:  # to callers, 0 bytes means that no size was given
    raise ConfigError(
      f"{name}={text!r} is not a size of at least one byte; write it as 8GiB, 500MB or in bytes"
    )
  return size


def plan(
  model: ModelConfig,
  needed: Needs,
  load: Workload,
  *,
  gpu_memory: int,
  host_memory: int,
  bandwidth: float,
  machine: Machine = MACHINES["h200-nvlink"],
  devices: int = 1,
) -> Plan:
  """Chooses an `Offload` that fits the memories, and computes its expected memory and speed.

  All experts stay on the device if they fit. If not, each phase, prefill and decode, gets a
  `Migration`. If a gating of one pass makes at least as many choices as the device has experts of a
  layer, a ring copies whole layers; it holds two layers at once if they fit, else one. In a phase
  with fewer choices only chosen experts are copied: early if the wiring has a shortcut, blocking if
  not. If decode is such a phase, it gets a cache of as many experts as fit, or none if a gating can
  choose more than fit. Example: with 64 experts and k = 2, a gating of a prefill of 1,000 tokens
  makes 2,000 choices, so the ring is used; in a decode step of 4 rows it makes 8, and needs at most
  8 experts.

  Args:
    model: the model's resolved options.
    needed: the bytes needed on each device; see `needs`.
    load: the size of the generation.
    gpu_memory: bytes of one device that may be used.
    host_memory: bytes of pinned memory that may be used, for all devices.
    bandwidth: bytes/s from the host to a device.
    machine: rates of a device.
    devices: number of devices, each of which needs so many bytes.

  Raises:
    ConfigError: one layer's experts do not fit beside the dense part, caches and activations; the
      experts do not all fit the host; or a model without experts does not fit the device. The
      message names the number of bytes needed.
  """
  everything = needed.fixed + needed.pairs * needed.layer
  if everything <= gpu_memory:
    return expected(Offload(), model, needed, load, bandwidth, machine, devices)
  if not model.wiring_rule.taps or needed.fixed + needed.layer > gpu_memory:
    least = needed.fixed + needed.layer if model.wiring_rule.taps else everything
    raise ConfigError(
      f"gpu_memory: {size_of(gpu_memory)} is less than the {size_of(least)} that the dense "
      f"part ({size_of(needed.dense)}), caches and activations "
      f"({size_of(needed.caches + needed.scratch)}) and one layer's experts "
      f"({size_of(needed.layer)}) need; shorten the prompt, or use more devices (mesh.expert)"
    )
  _check_host(needed, devices, host_memory)
  k = model.wiring_rule.routed_per_gating(model.top_k)
  at_once = min(load.rows * k, needed.experts)
  sections = 2 if needed.fixed + 2 * needed.layer <= gpu_memory else 1
  early = "early" if model.wiring_rule.is_shortcut else "blocking"
  prefill = Migration("ring", sections=sections)
  if load.read * k < needed.experts:
    prefill = Migration(early)
  if at_once == needed.experts:
    return expected(
      Offload(prefill, Migration("ring", sections=sections)),
      model, needed, load, bandwidth, machine, devices,
    )  # fmt: skip
  # A cache is filled during prefill. Beside it there is a ring's every section on the device, or
  # without a ring the chosen experts of one layer, which may be all.
  beside = sections if prefill.mode == "ring" else 1
  left = gpu_memory - needed.fixed - beside * needed.layer
  size = min(left // (needed.pairs * needed.expert), needed.experts)
  offload = Offload(prefill, Migration(early), size if size >= at_once else 0)
  return expected(offload, model, needed, load, bandwidth, machine, devices)


def expected(
  offload: Offload,
  model: ModelConfig,
  needed: Needs,
  load: Workload,
  bandwidth: float,
  machine: Machine = MACHINES["h200-nvlink"],
  devices: int = 1,
) -> Plan:
  """Computes the expected memory and speed of an `Offload`.

  If experts are not on the device, a prefill is taken to copy all of them, in every mode. A decode
  step copies all in mode ring. In the other modes the choices of one gating are taken to be
  different experts, as far as there are so many, and those that miss the cache are copied. In
  wirings with a shortcut, a copy of mode early is hidden for as long as the computation between
  gate and experts takes. A copy of mode ring is hidden for as long as a whole pair
  computes, if the ring has more than one section. The expected hit rate is the share of the experts
  that the cache holds; uneven routing usually gives a higher one.

  Args:
    offload: the `Offload`, which need not fit.
    model, needed, load, bandwidth, machine, devices: see `plan`.
  """
  k = model.wiring_rule.routed_per_gating(model.top_k)
  pairs = max(needed.pairs, 1)
  at_once = min(load.rows * k, needed.experts)
  hit = (
    min(offload.cache_size / needed.experts, 1.0) if needed.experts and offload.cache_size else 0.0
  )

  def seconds(tokens: int, way: Migration | None, copied: float) -> tuple[float, float]:
    """Seconds of one pass over all pairs, and the share of the copies' time that computation hides.

    Args:
      tokens: number of tokens of the pass.
      way: when experts are copied; None: they are on the device.
      copied: number of experts of each pair that are copied.
    """
    stages = _stages(model, tokens, load.prompt, machine)
    pair = sum(dataclasses.asdict(stages).values())
    if way is None or not copied:
      return pairs * pair, 0.0
    copy = copied * needed.moved / bandwidth
    window = {"blocking": 0.0, "ring": pair * (way.sections > 1)}.get(way.mode, _window(stages))
    hidden = min(copy, window if model.wiring_rule.is_shortcut or way.mode == "ring" else 0.0)
    return pairs * (pair + copy - hidden), hidden / copy

  first, _ = seconds(load.read, offload.prefill, needed.experts)
  whole = offload.decode is not None and offload.decode.mode == "ring"
  step, hidden = seconds(
    load.rows, offload.decode, needed.experts if whole else at_once * (1 - hit)
  )
  if offload.decode is None:
    device, host = needed.fixed + pairs * needed.layer, 0
  else:
    ring = offload.prefill is not None and offload.prefill.mode == "ring"
    held = offload.prefill.sections * needed.layer if ring and offload.prefill else needed.layer
    device = needed.fixed + held + pairs * offload.cache_size * needed.expert
    host = needed.host * devices
  return Plan(offload, device, host, load.read / first, load.rows / step, hit, hidden)


def _stages(model: ModelConfig, tokens: int, seq: int, machine: Machine) -> StageSeconds:
  sizes = Sizes(
    tokens=tokens,
    seq=seq,
    width=model.width,
    mlp=model.mlp_hidden,
    expert=model.expert_hidden,
    shared=model.shared_hidden,
    head_width=model.num_heads * model.head_dim,
    kv_width=model.num_kv_heads * model.head_dim,
    experts=model.num_experts,
    k=model.wiring_rule.routed_per_gating(model.top_k),
    matrices=3 if is_gated(model.ffn.activation) else 2,
  )
  found = dataclasses.asdict(model_times(sizes, machine))
  never = () if tokens > 1024 else ("dispatch", "combine")
  return StageSeconds(**{n: max(s, FLOOR * (n not in never)) for n, s in found.items()})


def _window(stages: StageSeconds) -> float:
  """Seconds that a pair computes between its gate and its experts, which can hide a copy.

  In wiring scmoe_pos2 it computes an MLP, an attention and the shared expert there. The same is
  assumed for the other wirings with a shortcut.
  """
  return stages.mlp + stages.projections + stages.mixing + stages.shared


def measured_bandwidth(size: int = 256 * 2**20, calls: int = 3) -> float:
  """Measures bytes/s from pinned host memory to the first device.

  Args:
    size: bytes of a copy.
    calls: number of timed copies, of which the fastest counts.
  """
  device = jax.local_devices()[0]
  there = SingleDeviceSharding(device)
  host = jax.device_put(jnp.zeros((size,), jnp.uint8), there.with_memory_kind(HOST))
  copy = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=there)
  jax.block_until_ready(copy(host))
  times = []
  for _ in range(calls):
    begin = time.perf_counter()
    jax.block_until_ready(copy(host))
    times.append(time.perf_counter() - begin)
  return size / min(times)


def described(found: Plan, needed: Needs, bandwidth: float) -> list[str]:
  """Lines that tell the user a plan: its modes, memory, expected speed and experts on disk."""
  offload = found.offload
  name = lambda way: "none" if way is None else way.mode
  lines = [f"offload      prefill {name(offload.prefill)}, decode {name(offload.decode)}"]
  if offload.cache_size:
    lines[0] += (
      f", {offload.cache_size} of {needed.experts} experts of every layer stay on the device"
    )
  experts = found.device - needed.fixed
  lines.append(
    f"memory       {size_of(found.device)} of each device (dense {size_of(needed.dense)}, caches "
    f"{size_of(needed.caches)}, experts {size_of(experts)}, activations "
    f"{size_of(needed.scratch)}), {size_of(found.host)} of the host"
  )
  rates = f"prefill {found.prefill:,.0f} tokens/s, decode {found.decode:,.0f}"
  if offload.decode is not None:
    rates += f" with {100 * found.hidden:.0f} % of its copies hidden"
    rates += f" and {100 * found.hit_rate:.0f} % of the experts found" * bool(offload.cache_size)
    rates += f"; {bandwidth / 1e9:.1f} GB/s from the host, measured"
  lines.append(f"expected     {rates}; computation as modelled for an H200")
  if found.pinned is not None:
    lines.append(
      f"disk         the experts of {needed.pairs - found.pinned} of {needed.pairs} layers stay in "
      "their files; the expected speed leaves out the time to read them"
    )
  return lines
