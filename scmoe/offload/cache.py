"""A cache of experts on the device: C of a layer's experts stay there between tokens.

The device alone decides which experts the cache holds, so decoding never waits for the host. A
place is room for one expert. An expert's worth is the policy's score: the cache keeps the experts
of the largest worth.

    e  experts of this device      C  places of a layer's cache
    N  experts that a call can request
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Int

from scmoe.moe.types import Routing
from scmoe.offload.memory import empty_places, multiplied_out
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import SEQUENCE_AXES, own_share, parameter_specs

POLICIES = ("lfu", "lru")
# Every device along these axes has caches of its own: along `expert` devices hold different
# experts, along the others copies of the same ones for different rows.
HOLDERS = ("data", "expert", *SEQUENCE_AXES)


class CachePolicy(NamedTuple):
  """Which expert is replaced first.

  Attributes:
    name: lfu replaces the expert with the fewest requests, of which older ones count less; lru
      replaces the expert whose last request is the oldest.
    decay: for lfu, the factor by which each call of the layer reduces the weight of earlier
      requests (SE-MoE's β).
  """

  name: str = "lfu"
  decay: float = 0.95

  def worth(self, worth_e: Array, needed_e: Array, calls: Any) -> Array:
    """The worth of every expert after a call of the layer.

    Args:
      worth_e: float32, the worth before the call.
      needed_e: bool, the experts that the call requests.
      calls: int32, the number of earlier calls.
    """
    if self.name == "lru":
      return jnp.where(needed_e, jnp.asarray(calls + 1, jnp.float32), worth_e)
    return worth_e * self.decay + needed_e


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertCache:
  """The experts of one layer that stay on the device.

  Attributes:
    params: parameters [C, ...] of the experts.
    expert_C: int32, the expert in each place; -1 for an empty place.
    worth_e: float32, the worth of every expert.
    requested_Ne: bool, the experts that the last step of decoding requested. Here N is the number
      of calls of the layer in a step: it has one row for each of these calls.
    calls, requests, misses: int32 [1], numbers of calls of the layer that have read the cache, of
      the experts that they requested, and of those that had to be copied.
  """

  params: Any
  expert_C: Int[Array, " C"]
  worth_e: Array
  requested_Ne: Bool[Array, "N e"]
  calls: Array
  requests: Array
  misses: Array

  @property
  def size(self) -> int:
    """C, the number of places."""
    return self.expert_C.shape[0]


class Lookup(NamedTuple):
  """The places of the experts that a call requests, and the copies that it needs.

  Attributes:
    cache: the cache after the call, except that its parameters are those before the copies.
    id_N: int32, the `copies` missing experts, then e, which stands for no expert.
    place_N: int32, the place to which each of them is copied.
    copies: int32 scalar, the number of missing experts.
    place_e: int32, the place of every expert after the copies; C if it is not in the cache.
  """

  cache: ExpertCache
  id_N: Array
  place_N: Array
  copies: Array
  place_e: Array


def look_up(cache: ExpertCache, needed_e: Array, most: int, policy: CachePolicy) -> Lookup:
  """Looks up the requested experts, and chooses places for those that are missing.

  It never replaces an expert that the same call requests. A call requests at most C experts, so
  there are always enough places.

  Args:
    cache: the cache before the call.
    needed_e: bool, the experts that the call requests.
    most: N, the most experts that a call can request, at most C.
    policy: decides which experts are replaced.
  """
  e, size = needed_e.shape[0], cache.size
  held, index_C = _dropped_if_empty(cache.expert_C, e), jnp.arange(size, dtype=jnp.int32)
  place_e = jnp.full((e,), size, jnp.int32).at[held].set(index_C, mode="drop")
  missing_e = needed_e & (place_e == size)
  copies = missing_e.sum(dtype=jnp.int32)
  worth_e = policy.worth(cache.worth_e, needed_e, cache.calls)
  place_N = _replaced_first(held, worth_e, needed_e)[:most]
  turn_e = jnp.cumsum(missing_e, dtype=jnp.int32) - 1
  index_e = jnp.arange(e, dtype=jnp.int32)
  at_e = jnp.where(missing_e, turn_e, most)
  id_N = jnp.full((most,), e, jnp.int32).at[at_e].set(index_e, mode="drop")
  used_N = jnp.where(id_N < e, place_N, size)
  gone_N = jnp.where(id_N < e, held[place_N], e)
  place_e = place_e.at[gone_N].set(size, mode="drop")
  place_e = place_e.at[id_N].set(used_N, mode="drop")
  after = _counted(cache, needed_e, copies)
  expert_C = cache.expert_C.at[used_N].set(id_N, mode="drop")
  after = dataclasses.replace(after, expert_C=expert_C, worth_e=worth_e)
  return Lookup(after, id_N, place_N, copies, place_e)


def _replaced_first(held_C: Array, worth_e: Array, needed_e: Array) -> Array:
  """All places in the order in which they are replaced.

  Empty places come first, then the others by rising worth of their expert; those whose expert this
  call requests are last.
  """
  worth_C = jnp.append(worth_e, -jnp.inf)[held_C]
  worth_C = jnp.where(jnp.append(needed_e, False)[held_C], jnp.inf, worth_C)
  return jnp.argsort(worth_C).astype(jnp.int32)


def _counted(cache: ExpertCache, needed_e: Array, copies: Array) -> ExpertCache:
  """The cache with this call added to its counters."""
  call = cache.calls[0] % cache.requested_Ne.shape[0]
  return dataclasses.replace(
    cache,
    requested_Ne=cache.requested_Ne.at[call].set(needed_e),
    calls=cache.calls + 1,
    requests=cache.requests + needed_e.sum(dtype=jnp.int32),
    misses=cache.misses + copies,
  )


def filled(cache: ExpertCache, experts: Any, routing: Routing, policy: CachePolicy) -> ExpertCache:
  """Fills the cache after a prefill, which has all experts on the device, with the most requested.

  Let s be the share of the prefill's tokens that requested an expert. With lfu its worth becomes
  s / (1 - decay), the limit of the worth if each call requested the expert as often as these tokens
  did. With lru it becomes s, which is no more than the worth of any later request. On several
  devices of the expert axis s counts the tokens of all, taken to be as many on each as on this one.

  Args:
    cache: the cache before the call; its counters do not change.
    experts: the layer's module, with all experts on the device.
    routing: this device's choices.
    policy: decides which experts are replaced.
  """
  params = nnx.split(experts)[1]
  e = cache.worth_e.shape[0]
  ranks = routing.num_experts // e
  count_E = routing.computed.count_E
  if ranks > 1:
    count_E = own_share(total(count_E, ("expert",), "counts"), 0, "expert")
  _, id_C = jax.lax.top_k(count_E, cache.size)
  share_e = count_E / jnp.maximum(routing.mask_T.sum() * ranks, 1)
  return dataclasses.replace(
    cache,
    params=jax.tree.map(lambda x: x[id_C], params),
    expert_C=id_C.astype(jnp.int32),
    worth_e=share_e / (1 - policy.decay) if policy.name == "lfu" else share_e,
  )


def empty_cache(params: Any, size: int, calls: int = 1) -> ExpertCache:
  """An empty cache for experts of one layer.

  Args:
    params: parameters of the layer's experts, in the device's or the host's memory.
    size: C; a larger size than the number of experts is reduced to it.
    calls: number of calls of the layer in a step of decoding.
  """
  e = jax.tree.leaves(params)[0].shape[0]
  size, none = min(size, e), jnp.zeros((1,), jnp.int32)
  return ExpertCache(
    params=empty_places(params, size),
    expert_C=jnp.full((size,), -1, jnp.int32),
    worth_e=jnp.zeros((e,), jnp.float32),
    requested_Ne=jnp.zeros((calls, e), bool),
    calls=none,
    requests=none,
    misses=none,
  )


def cache_specs(params: Any) -> ExpertCache:
  """PartitionSpecs of a cache: every device that holds experts has a cache of its own.

  Args:
    params: parameters of the layer's experts.
  """
  of_param = lambda spec: P(HOLDERS, *spec[1:])
  specs = jax.tree.map(of_param, parameter_specs(jax.eval_shape(multiplied_out, params)))
  own: Any = P(HOLDERS)
  requested: Any = P(None, HOLDERS)
  return ExpertCache(specs, own, own, requested, own, own, own)


def _dropped_if_empty(expert_C: Array, e: int) -> Array:
  """The expert in each place, with e instead of -1 for an empty place.

  As an index, -1 would mean the last expert; `mode="drop"` ignores e.
  """
  return jnp.where(expert_C < 0, e, expert_C)
