"""Generation with experts in the host's memory: which way they come, and what that cost.

The dense part, the caches of attention and the shared experts stay on the device. Prefill and
decode each have a way of their own (`scmoe.moe.migration`, `scmoe.models.ring`).
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

from scmoe.errors import ConfigError
from scmoe.models.gpt import GPT
from scmoe.models.stacked import Apart
from scmoe.moe.migration import MODES, Cached, Migration, quantised
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
    trace: bool [pairs, calls, E] of each program.
  """

  requests: int = 0
  misses: int = 0
  trace: list[np.ndarray] = dataclasses.field(default_factory=list)

  _seen: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.int64))

  def begin(self, cached: Sequence[Cached]) -> None:
    """The caches as a prefill leaves them: what it has asked for does not count."""
    self._seen = _counted(cached)

  def add(self, asked: Any, cached: Sequence[Cached]) -> None:
    """What one program of decode has asked for, and its caches afterwards."""
    self.trace.append(np.asarray(asked))
    counted = _counted(cached)
    requests, misses = (counted - self._seen).tolist()
    self._seen = counted
    self.requests, self.misses = self.requests + requests, self.misses + misses

  @property
  def hit_rate(self) -> float:
    """Share of the requests that found their expert on the device; 1 without requests."""
    return 1 - self.misses / self.requests if self.requests else 1.0


def _counted(cached: Sequence[Cached]) -> np.ndarray:
  total = lambda name: sum(int(np.asarray(getattr(own, name)).sum()) for own in cached)
  return np.array([total("requests"), total("misses")], np.int64)


def offloaded(model: GPT, mesh: Mesh, *, int8: bool = False) -> GPT:
  """The same model with its routed experts in the host's memory.

  Its pairs are taken apart and run one after the other. The model that is given can be dropped.

  Args:
    model: any; parameters in the types in which they are computed.
    mesh: where it lies.
    int8: the experts' matrices in eight bits, half of the bytes to move (`Int8`).

  Raises:
    ConfigError: it has no experts, or devices share one.
  """
  check(model, mesh)
  params = nnx.split(model.stages)[1]
  count, wanted = model.config.num_pairs, parameter_specs(params)
  is_param = lambda x: isinstance(x, nnx.Variable)

  def lay(path: tuple, param: Any, spec: Any) -> Any:
    stack, axes = param.get_value(), spec.get_value()[1:]
    # Biases are too small to be worth a copy of their own.
    goes = "experts" in jax.tree_util.keystr(path) and stack.ndim > 3
    kind = HOST if goes else None
    return param.replace(Apart(tuple(
      to_memory(stack[i], NamedSharding(mesh, type(spec.get_value())(*axes)), kind, int8=int8)
      for i in range(count)
    )))  # fmt: skip

  apart = jax.tree_util.tree_map_with_path(lay, params, wanted, is_leaf=is_param)
  return with_stages(model, apart)


def with_stages(model: GPT, params: Any) -> GPT:
  """The model with these parameters of its pairs, taken apart."""
  graph, rest = nnx.split(model)
  model = nnx.merge(graph, rest)
  model.overlap = dataclasses.replace(model.overlap, unroll=0)
  model.stages = nnx.merge(nnx.split(model.stages)[0], params)
  return model


def to_memory(x: Any, sharding: NamedSharding, kind: str | None, *, int8: bool = False) -> Any:
  """An array where it belongs.

  Args:
    x: [E, ...] of one layer.
    sharding: of it.
    kind: memory; None: the device's.
    int8: a matrix of experts in eight bits.
  """
  if kind is None:
    return jax.device_put(x, sharding)
  where = sharding.with_memory_kind(kind)
  if not int8 or x.ndim < 3:
    return jax.device_put(x, where)
  packed = jax.jit(quantised, static_argnums=1)(x, jnp.dtype(x.dtype).name)
  own = lambda a: tuple(
    None if n == 1 else s for n, s in zip(a.shape, (*sharding.spec, None, None))
  )
  return jax.tree.map(
    lambda a: jax.device_put(a, NamedSharding(where.mesh, type(sharding.spec)(*own(a)),
                                              memory_kind=kind)), packed)  # fmt: skip


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
