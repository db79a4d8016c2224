"""Generation with routed experts in the host's memory: moves them there, and counts requests.

Experts that do not fit there can stay in the model's files. The experts' biases, all other
parameters and the attention caches stay on the device. Prefill and decode each have a `Migration`
of their own, which says when experts are copied to the device. `Usage` counts decoding's requests
to the caches of experts, and those that needed a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type, check_whole
from scmoe.inference.offload import trace as expert_trace
from scmoe.models.gpt import GPT
from scmoe.models.stacked import Apart, each_layer
from scmoe.offload.cache import CachePolicy, ExpertCache, cache_specs, empty_cache
from scmoe.offload.experts import MODES, Migration
from scmoe.offload.memory import HOST, Int8, is_on_disk, quantised
from scmoe.parallel.mesh import parameter_specs

WAYS = ("none", *MODES)


@dataclasses.dataclass(frozen=True)
class Offload:
  """How a model's experts reach the device.

  Attributes:
    prefill, decode: when experts are copied in each phase; None: they are always on the device.
      Both must be None, or neither.
    cache_size: most experts of every pair that a device keeps between decoded tokens; 0: none.

  Raises:
    ConfigError: an argument is of another type, one phase alone is None, or `cache_size` is
      negative, or above 0 although both phases are None.
  """

  prefill: Migration | None = None
  decode: Migration | None = None
  cache_size: int = 0

  def __post_init__(self) -> None:
    for name in ("prefill", "decode"):
      if getattr(self, name) is not None:
        check_type(name, getattr(self, name), Migration)
    check_type("cache_size", self.cache_size, int)
    if self.cache_size < 0:
      raise ConfigError(f"cache_size={self.cache_size} must be at least 0")
    if (self.prefill is None) != (self.decode is None):
      ways = ("none" if way is None else way.mode for way in (self.prefill, self.decode))
      raise ConfigError(
        f"offload={','.join(ways)}: prefill and decode need the experts in the same memory; use "
        "none for both, or for neither"
      )
    if self.cache_size and self.decode is None:
      raise ConfigError(
        f"cache_size={self.cache_size} has no effect with offload=none: all experts are on the "
        "device; use 0, or a Migration for prefill and for decode"
      )

  @property
  def policy(self) -> CachePolicy:
    """The policy of decode's caches of experts; the default one if `decode` is None."""
    return CachePolicy() if self.decode is None else self.decode.cache_policy

  @staticmethod
  def named(prefill: str, decode: str, cache_size: int = 0, **options: Any) -> Offload:
    """The `Offload` with one of the modes in `WAYS` for each phase.

    Args:
      prefill, decode: none, blocking, early or ring; if one is none, so must the other be.
      cache_size: see `Offload`.
      options: further fields of both `Migration`s; not read with none.

    Raises:
      ConfigError: a name is unknown; or see `Offload` and `Migration`.
      TypeError: an option is no field of `Migration`, or is `mode`.
    """
    for name in (prefill, decode):
      if name not in WAYS:
        raise ConfigError(f"offload={name!r} is unknown; one of: {', '.join(WAYS)}")
    of = lambda name: None if name == "none" else Migration(name, **options)
    return Offload(of(prefill), of(decode), cache_size)

  def checked(self, model: GPT) -> Offload:
    """Checks that the model's experts are in the memory that this `Offload` expects; returns self.

    An `Offload` with `Migration`s expects them in the host's memory or in files; one without
    `Migration`s expects them on the device.

    Raises:
      ConfigError: they are not where this `Offload` expects them.
    """
    if model.taken_apart != (self.decode is not None):
      where = "the host's memory" if model.taken_apart else "the device's memory"
      raise ConfigError(
        f"the model's experts are in {where}; use a model of scmoe.offloaded with an Offload other "
        "than Offload(), and only with one"
      )
    return self


def expert_caches(model: GPT, offload: Offload) -> dict[str, list[ExpertCache]]:
  """Empty caches of experts, as {"experts": [one for each pair]}; {} if `cache_size` is 0.

  Prefill and decoding expect this entry in one dictionary with those of `GPT.init_caches`.
  """
  if not offload.cache_size:
    return {}
  rule = model.config.wiring_rule
  calls = rule.units_per_moe * len(rule.taps)
  make = lambda params: empty_cache(params, offload.cache_size, calls)
  return {"experts": [make(params) for params in _experts_of_pairs(model)]}


def expert_cache_specs(model: GPT, offload: Offload) -> dict[str, list[ExpertCache]]:
  """The PartitionSpecs of what `expert_caches` returns, in the same structure."""
  if not offload.cache_size:
    return {}
  return {"experts": [cache_specs(params) for params in _experts_of_pairs(model)]}


def _experts_of_pairs(model: GPT) -> list[Any]:
  """The parameters of each pair's routed experts, one tree for each pair."""
  return each_layer(nnx.split(model.stages.moe.experts)[1], model.config.num_pairs)


@dataclasses.dataclass
class Usage:
  """A record of decoding's requests to the caches of experts.

  The shapes below are those on one device. On several, the last dimension of `held` has the C
  places of every position on the axes `scmoe.offload.cache.HOLDERS`, one after the other, and the
  experts there are counted from the device's first one; that of `worth` and `traces` has E columns
  for each position on the data and sequence axes. Devices that differ on the tensor axis alone
  request the same experts, and count once.

  Attributes:
    policy: the policy of the caches.
    requests, misses: numbers of requested experts, and of those that had to be copied, summed over
      positions on `HOLDERS`, pairs, their calls and generations.
    held: for each generation, int32 [pairs, C], the expert in each of C places before decode; -1
      for an empty place.
    worth: for each generation, float32 [pairs, E], the score by which the policy keeps experts,
      before decode.
    traces: for each generation a list with one array for each run of the decode program: bool
      [pairs, calls, E], the experts that each call of a layer requested of its cache.
  """

  policy: CachePolicy = CachePolicy()
  requests: int = 0
  misses: int = 0
  held: list[np.ndarray] = dataclasses.field(default_factory=list)
  worth: list[np.ndarray] = dataclasses.field(default_factory=list)
  traces: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
  _seen: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.int64))

  def begin(self, caches: Sequence[ExpertCache], policy: CachePolicy) -> None:
    """Begins the record of a generation.

    Args:
      caches: the caches of all pairs before the first run of the decode program to record; the
        requests counted so far are left out.
      policy: the policy of the caches, which is the same for all generations.
    """
    self.policy, self._seen = policy, _counted(caches)
    self.held.append(np.stack([np.asarray(own.expert_C) for own in caches]))
    self.worth.append(np.stack([np.asarray(own.worth_e) for own in caches]))
    self.traces.append([])

  def add(self, requested: Any, caches: Sequence[ExpertCache]) -> None:
    """Adds one run of the decode program to the record.

    Args:
      requested: bool [pairs, calls, E], the experts that each call of a layer requested of its
        cache.
      caches: the caches of all pairs after the run.
    """
    self.traces[-1].append(np.asarray(requested))
    counted = _counted(caches)
    requests, misses = (counted - self._seen).tolist()
    self._seen = counted
    self.requests, self.misses = self.requests + requests, self.misses + misses

  @property
  def hit_rate(self) -> float:
    """Share of decoding's requests that found their expert in the cache; 1 without requests."""
    return 1 - self.misses / self.requests if self.requests else 1.0

  def hit_rate_of(self, policy: str) -> float:
    """The hit rate that a policy would have had on the recorded requests, in caches as large.

    It is 1 without requests. Only for records of a single device. The caches' own policy begins
    with the worths that they had; any other begins with a worth of 0 for every expert.

    Args:
      policy: see `scmoe.inference.offload.trace.hits`.

    Raises:
      ValueError: the policy is unknown, and a run of the decode program was recorded.
    """
    found = 0
    for held_LC, worth_LE, programs in zip(self.held, self.worth, self.traces):
      if programs:
        trace, size = np.concatenate(programs, 1), held_LC.shape[1]
        worth = worth_LE if policy == self.policy.name else None
        before = {"held_LC": held_LC, "worth_LE": worth, "decay": self.policy.decay}
        found += expert_trace.hits(trace, size, policy, **before)
    return found / self.requests if self.requests else 1.0


def _counted(caches: Sequence[ExpertCache]) -> np.ndarray:
  """The (requests, misses) that all caches together have counted so far, int64 [2]."""
  total = lambda name: sum(int(np.asarray(getattr(own, name)).sum()) for own in caches)
  return np.array([total("requests"), total("misses")], np.int64)


def offloaded(model: GPT, mesh: Mesh, *, int8: bool = False, pinned: int | None = None) -> GPT:
  """A copy of a model with its routed experts in the host's memory, in their files, or in both.

  The experts' biases stay on the device. In `stages` the copy has arrays for each pair instead of
  stacks, and programs that run it unroll the loop over pairs.

  Args:
    model: any model whose parameters have the dtypes in which it computes.
    mesh: the devices that are to hold the copy.
    int8: whether matrices that go to pinned memory become eight bits (`Int8`), which about halves
      the copied bytes of a 16-bit model; those in files stay as they are.
    pinned: number of pairs, from the first, whose experts go to pinned memory; None: all. The
      experts of the other pairs stay in their files (`OnDisk`), which needs a model of
      `InferenceFolder.mapped`.

  Raises:
    ConfigError: an argument is of another type; see `check`; `pinned` is below 0, leaves experts in
      their files on a mesh with tensor > 1, or does so with a model that has no files.
  """
  check_type("model", model, GPT)
  check_type("mesh", mesh, Mesh)
  check_type("int8", int8, bool)
  if pinned is not None:
    check_whole("pinned", pinned, 0)
  check(model, mesh)
  pinned = model.config.num_pairs if pinned is None else pinned
  if pinned < model.config.num_pairs and mesh.shape["tensor"] > 1:
    raise ConfigError(
      "host_memory: experts can stay in their files only with mesh.tensor=1; use that, or more "
      "host memory"
    )
  graph, params = nnx.split(model)
  count, is_param = model.config.num_pairs, lambda x: isinstance(x, nnx.Variable)
  if pinned < count and not any(hasattr(x, "on_disk") for x in jax.tree.leaves(params)):
    raise ConfigError(
      f"pinned={pinned} leaves experts in their files, and this model has none; open it with "
      "InferenceFolder.mapped, or leave pinned out"
    )

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


def is_routed(path: tuple[Any, ...], leaf: Any) -> bool:
  """Whether a parameter of the stacked pairs holds matrices of routed experts: [pairs, E, M, N].

  False for experts' biases [pairs, E, N], which stay on the device: they are too small to be worth
  a copy.

  Args:
    path: the parameter's path in the model, as `jax.tree_util` gives it.
    leaf: the parameter's array, or its `jax.ShapeDtypeStruct`.
  """
  return "experts" in jax.tree_util.keystr(path) and len(leaf.shape) > 3


def to_memory(
  x: Any, sharding: NamedSharding, kind: str | None = None, *, int8: bool = False
) -> Any:
  """Copies an array to a memory of the devices, in eight bits if asked; an `OnDisk` stays on disk.

  Of an `OnDisk` only the experts' indices in their file are copied.

  Args:
    x: a jax array in any memory, a NumPy array, an `OnDisk`, or an `Int8` of these.
    sharding: how the devices share it.
    kind: kind of memory, e.g. "pinned_host"; None: the devices' default.
    int8: whether an array becomes an `Int8` if `kind` is given and it has more than two dimensions,
      as experts' matrices [E, M, N] have; not one on disk.
  """

  def place(x: Any, *spec: Any) -> Any:
    if is_on_disk(x):
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
  """Checks that a model's experts can be in the host's memory.

  Raises:
    ConfigError: the model has no experts, several devices of the expert axis share one expert, or
      `dispatch.adaptive_r` is not 1.
  """
  if not model.config.wiring_rule.taps:
    raise ConfigError(
      f"offload: model.wiring={model.config.wiring!r} has no experts; use offload=none"
    )
  if mesh.shape["shard"] > 1 or model.dispatch.adaptive_r != 1:
    raise ConfigError(
      "offload needs devices that each hold whole experts: at most as many on the expert axis as "
      "there are experts, and dispatch.adaptive_r=1"
    )
