"""Generation with experts in the host's memory: which way they come, and what that cost.

The dense part, the caches of attention and the shared experts stay on the device. Prefill and
decode each have a way of their own (`scmoe.offload.experts`, `scmoe.offload.ring`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.inference.offload import trace as expert_trace
from scmoe.models.gpt import GPT
from scmoe.models.stacked import Apart
from scmoe.offload.experts import MODES, Cached, Int8, Migration, is_on_disk, quantised
from scmoe.parallel.mesh import parameter_specs

WAYS = ("none", *MODES)
HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Offload:
  """How experts come to the device.

  Attributes:
    prefill, decode: of each; None: they are there.
    slots: experts of every pair that a device keeps between the tokens of decode; 0: none.
  """

  prefill: Migration | None = None
  decode: Migration | None = None
  slots: int = 0

  @staticmethod
  def named(prefill: str, decode: str, slots: int = 0, **options: Any) -> Offload:
    """By the names of the ways, of `WAYS`.

    Args:
      prefill, decode: none, blocking, early or ring; none for one of them is none for both.
      slots: see `Offload`.
      options: of `Migration`.

    Raises:
      ConfigError: there is no such way, or only one of them is none.
    """
    for name in (prefill, decode):
      if name not in WAYS:
        raise ConfigError(f"--offload={name!r} is unknown; one of: {', '.join(WAYS)}")
    if (prefill == "none") != (decode == "none"):
      raise ConfigError(
        f"--offload={prefill},{decode}: experts lie in one memory for both; use none for both, or "
        "for neither"
      )
    of = lambda name: None if name == "none" else Migration(name, **options)
    return Offload(of(prefill), of(decode), slots)

  def of(self, model: GPT) -> Offload:
    """The same for a model.

    Raises:
      ConfigError: its experts do not lie where this expects them.
    """
    if model.taken_apart != (self.decode is not None):
      where = "the host's memory" if model.taken_apart else "the device's memory"
      raise ConfigError(
        f"the model's experts lie in {where}; make it with scmoe.offloaded for every way of "
        "offloading but none"
      )
    return self


@dataclasses.dataclass
class Usage:
  """What the tokens of decode have asked of the experts' caches; filled by `stream`.

  Attributes:
    requests, misses: of experts, and of those that were copied; all devices and pairs.
    held, worth: int32 [pairs, C] and float32 [pairs, E], whose the slots were before each
      generation's decode, and what the policy knew by then.
    traces: of each generation, bool [pairs, calls, E] of each of its programs.
  """

  requests: int = 0
  misses: int = 0
  held: list[np.ndarray] = dataclasses.field(default_factory=list)
  worth: list[np.ndarray] = dataclasses.field(default_factory=list)
  traces: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
  _seen: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.int64))

  def begin(self, cached: Sequence[Cached]) -> None:
    """The caches as a prefill leaves them: what it has asked for does not count."""
    self._seen = _counted(cached)
    self.held.append(np.stack([np.asarray(own.expert_C) for own in cached]))
    self.worth.append(np.stack([np.asarray(own.worth_e) for own in cached]))
    self.traces.append([])

  def add(self, asked: Any, cached: Sequence[Cached]) -> None:
    """What one program of decode has asked for, and its caches afterwards."""
    self.traces[-1].append(np.asarray(asked))
    counted = _counted(cached)
    requests, misses = (counted - self._seen).tolist()
    self._seen = counted
    self.requests, self.misses = self.requests + requests, self.misses + misses

  @property
  def hit_rate(self) -> float:
    """Share of the requests that found their expert on the device; 1 without requests."""
    return 1 - self.misses / self.requests if self.requests else 1.0

  def hit_rate_of(self, policy: str) -> float:
    """The same under another policy, on the same trace: see `expert_trace.hits`. One device's."""
    found = 0
    for held_LC, worth_LE, programs in zip(self.held, self.worth, self.traces):
      if programs:
        trace, slots = np.concatenate(programs, 1), held_LC.shape[1]
        found += expert_trace.hits(trace, slots, policy, held_LC=held_LC, worth_LE=worth_LE)
    return found / self.requests if self.requests else 1.0


def _counted(cached: Sequence[Cached]) -> np.ndarray:
  total = lambda name: sum(int(np.asarray(getattr(own, name)).sum()) for own in cached)
  return np.array([total("requests"), total("misses")], np.int64)


def offloaded(model: GPT, mesh: Mesh, *, int8: bool = False, pinned: int | None = None) -> GPT:
  """The same model with its routed experts in the host's memory.

  Its pairs are taken apart and run one after the other. The model that is given can be dropped.

  Args:
    model: any; parameters in the types in which they are computed.
    mesh: where it lies.
    int8: the experts' matrices in eight bits, half of the bytes to move (`Int8`).
    pinned: of so many pairs, the first ones; the others' stay in their files (`OnDisk`), which only
      a model of `InferenceFolder.mapped` has. None: of all.

  Raises:
    ConfigError: it has no experts, or devices share one.
  """
  check(model, mesh)
  pinned = model.config.num_pairs if pinned is None else pinned
  if pinned < model.config.num_pairs and mesh.shape["tensor"] > 1:
    raise ConfigError("--host_memory: experts stay in their files where mesh.tensor=1; use that")
  graph, params = nnx.split(model)
  count, is_param = model.config.num_pairs, lambda x: isinstance(x, nnx.Variable)

  def lay(path: tuple, param: Any, spec: Any) -> Any:
    stack, axes = param.get_value(), spec.get_value()
    if not jax.tree_util.keystr(path).startswith("['stages']"):
      return param.replace(to_memory(stack, NamedSharding(mesh, axes)))
    goes = HOST if is_routed(path, stack) else None
    own = NamedSharding(mesh, P(*axes[1:]))
    at = lambda i: stack[i] if i < pinned or goes is None else stack.on_disk(i)
    parts = (to_memory(at(i), own, goes, int8=int8) for i in range(count))
    return param.replace(Apart(tuple(parts)))

  laid = jax.tree_util.tree_map_with_path(lay, params, parameter_specs(params), is_leaf=is_param)
  model = nnx.merge(graph, laid)
  model.overlap = dataclasses.replace(model.overlap, unroll=0)
  return model


def allow_pinned_memory() -> None:
  """Lets pinned memory grow to all that the host has; jax would stop at 64 GB. Before any device is
  used."""
  size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(size // 10**9))


def is_routed(path: tuple[Any, ...], leaf: Any) -> bool:
  """Whether a parameter of the stacked pairs is a matrix of routed experts.

  Their biases are too small to be worth a copy of their own.
  """
  return "experts" in jax.tree_util.keystr(path) and len(leaf.shape) > 3


def to_memory(
  x: Any, sharding: NamedSharding, kind: str | None = None, *, int8: bool = False
) -> Any:
  """An array where it belongs.

  Args:
    x: of any memory, NumPy's or `OnDisk`; or an `Int8` of such.
    sharding: of it.
    kind: memory; None: the device's.
    int8: a matrix [E, M, N] of experts becomes an `Int8`.
  """

  def place(x: Any, *spec: Any) -> Any:
    if is_on_disk(x):  # stays there; who has which of its experts is what is placed
      own = NamedSharding(sharding.mesh, P(*spec[:1]))
      return dataclasses.replace(x, number=jax.device_put(x.number, own))
    return jax.device_put(x, NamedSharding(sharding.mesh, P(*spec), memory_kind=kind))

  if isinstance(x, Int8):
    packed = x
  elif int8 and kind is not None and not is_on_disk(x) and x.ndim > 2:
    packed = jax.jit(quantised, static_argnums=1)(x, jnp.dtype(x.dtype).name)
  else:
    return place(x, *sharding.spec)
  whole = [*sharding.spec, *[None] * (packed.value.ndim - len(sharding.spec))]
  value, scale = place(packed.value, *whole), place(packed.scale, *whole[:-2], None, whole[-1])
  return dataclasses.replace(packed, value=value, scale=scale)


def check(model: GPT, mesh: Mesh) -> None:
  """Whether this model's experts can lie in the host's memory.

  Raises:
    ConfigError: it has no experts, or devices share one.
  """
  if not model.config.wiring_rule.taps:
    raise ConfigError(
      f"--offload: model.wiring={model.config.wiring!r} has no experts; use --offload=none"
    )
  if mesh.shape["shard"] > 1 or model.dispatch.adaptive_r != 1:
    raise ConfigError(
      "--offload needs devices that each hold whole experts: at most as many on the expert axis as "
      "there are experts, and dispatch.adaptive_r=1"
    )
