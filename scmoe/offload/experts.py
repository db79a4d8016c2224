"""Copies experts from the host's memory to the device when tokens have chosen them.

`Migration` predicts nothing: in modes `early` and `blocking` it copies the experts that a gate has
chosen, or all experts of the layer if a call has so many tokens that it may choose all. In mode
`early` the copy starts right after the gate. ScMoE's gate runs a block before its experts compute
(paper A.3, early determinate migration), so the device computes that block during the copy. In mode
`blocking` the copy starts when the experts are about to compute. Mode `ring` copies all experts of
a layer before the layer begins.

The device computes which experts to copy, and `scmoe.offload.fetch` reads them from pinned memory
on a stream of its own. Where that kernel does not run, XLA copies slices. A copy engine copies all
experts of a layer, where a call copies all. So a generation runs without the host, except for
experts on disk (`OnDisk`).

    e  experts of this device     C  places on the device     N  experts that a call can request
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Int

from scmoe.base.options import check_choice
from scmoe.kernels.grouped_matmul import RowLayout
from scmoe.moe.experts import ApplyExperts, Experts, LayerExperts, LayerParams
from scmoe.moe.types import Routing
from scmoe.offload.cache import POLICIES, CachePolicy, ExpertCache, filled, look_up
from scmoe.offload.fetch import fetch, has_kernel
from scmoe.offload.memory import (
  empty_places,
  is_on_disk,
  is_on_host,
  multiplied_out,
  on_device,
)
from scmoe.offload.ring import Ring
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import axis_size, own_share

MODES = ("blocking", "early", "ring")


@dataclasses.dataclass(frozen=True)
class Migration:
  """An `ExpertSource`: when experts are copied from the host, and which the device keeps.

  Attributes:
    mode: early: the copy starts right after the gate; blocking: when the experts are about to
      compute; ring: a layer's experts are on the device before it begins (`scmoe.offload.ring`).
    policy: policy of the cache, lfu or lru; see `CachePolicy`.
    decay: see `CachePolicy`.
    sections: for a ring, the number of layers whose experts are on the device at once (SE-MoE's K).

  Raises:
    ConfigError: the mode or the policy is unknown.
  """

  mode: str = "early"
  policy: str = "lfu"
  decay: float = 0.95
  sections: int = 2

  def __post_init__(self) -> None:
    check_choice("offload", self.mode, MODES)
    check_choice("cache_policy", self.policy, POLICIES)

  @property
  def cache_policy(self) -> CachePolicy:
    """The cache's policy."""
    return CachePolicy(self.policy, self.decay)

  def of_layer(self, experts: Experts, kept: ExpertCache | None) -> LayerExperts:
    """See `ExpertSource`; `kept` is the layer's cache."""
    if self.mode == "ring":
      return ExpertsInRing(experts, self, kept)
    return ExpertsOnRequest(experts, self, kept)

  def of_pairs(self, params: Sequence[Any], *, prompts: bool) -> LayerParams:
    """See `ExpertSource`."""
    if self.mode == "ring":
      return Ring(params, self.sections)
    return ParamsInOrder(params, prompts)


@dataclasses.dataclass(frozen=True)
class ParamsInOrder:
  """`LayerParams` whose experts are copied layer by layer.

  Attributes:
    params: the parameters of every pair.
    ordered: whether a pair waits until the one before has computed all its results, its filled
      cache among them. Without this order the experts of all layers would stay on the device until
      the end of a prefill.
  """

  params: Sequence[Any]
  ordered: bool

  def take(self, pair: int) -> Any:
    """See `LayerParams`."""
    return self.params[pair]

  def advance(self, pair: int, after: Any) -> Any:
    """See `LayerParams`."""
    del pair
    return barrier(after) if self.ordered else after


# -- one layer's experts --------------------------------------------------------------------------


class ExpertsInRing:
  """`LayerExperts` that a ring has already copied to the device.

  Args:
    experts: the layer's module, on the device.
    how: its `cache_policy` decides which experts the cache keeps.
    cache: the layer's cache, to be filled with the most requested experts; None: no cache.
  """

  def __init__(self, experts: Experts, how: Migration, cache: ExpertCache | None):
    self._experts, self._how, self.kept = experts, how, cache

  def chosen(self, gating: int, routing: Routing, main: Any) -> Any:
    """See `LayerExperts`."""
    del gating
    if self.kept is not None:
      self.kept = filled(self.kept, self._experts, routing, self._how.cache_policy)
    return main

  def ready(self, gating: int, main: Any) -> Any:
    """See `LayerExperts`."""
    del gating
    return main

  def of(self, gating: int) -> ApplyExperts:
    """See `LayerExperts`."""
    del gating
    return self._experts


class ExpertsOnRequest:
  """`LayerExperts` that are copied after a gate has chosen them: at once, or before they compute.

  Args:
    experts: the layer's module, whose matrices are in the host's memory or on disk.
    how: when the copy starts, and the policy of the cache.
    cache: the layer's cache; None: no cache.
  """

  def __init__(self, experts: Experts, how: Migration, cache: ExpertCache | None):
    self._experts, self._how, self.kept = experts, how, cache
    self._requests: dict[int, ExpertRequest] = {}
    self._fetched: dict[int, FetchedExperts] = {}

  def chosen(self, gating: int, routing: Routing, main: Any) -> Any:
    """See `LayerExperts`: requests the experts, and may start their copy.

    It starts the copy in mode early and, in every mode, on an expert axis of several devices.
    """
    request = request_experts(self._experts, routing, self._how.cache_policy, self.kept)
    self._requests[gating] = request
    # Drops the experts that an earlier unit with the same parameters requested.
    self._fetched.pop(gating, None)
    if self._how.mode == "early":
      self._fetch(gating)
    elif axis_size("expert") > 1:  # the dispatch itself computes the experts of overflow rounds
      return self._fetch(gating, main)
    return main

  def ready(self, gating: int, main: Any) -> Any:
    """See `LayerExperts`: a copy that starts here is not overlapped with computation."""
    return main if gating in self._fetched else self._fetch(gating, main)

  def of(self, gating: int) -> ApplyExperts:
    """See `LayerExperts`."""
    return self._fetched.get(gating, self._experts)

  def _fetch(self, gating: int, main: Any = None) -> Any:
    request = self._requests[gating]
    fetched, main = request.fetched(main)
    self._fetched[gating] = fetched
    if request.cache is not None:
      self.kept = dataclasses.replace(request.cache, params=fetched.params)
    elif request.everything and self.kept is not None:
      policy = self._how.cache_policy
      self.kept = filled(self.kept, fetched.module, request.routing, policy)
    return main


@dataclasses.dataclass(frozen=True)
class FetchedExperts:
  """The experts of one call, on the device.

  Attributes:
    graph, params: the module with C experts, and their parameters.
    place_e: int32, the index of every expert among these C; C for an expert that is none of them.
    count: C.
  """

  graph: nnx.GraphDef
  params: Any
  place_e: Int[Array, " e"]
  count: int

  @property
  def module(self) -> Experts:
    """The module of these experts."""
    return nnx.merge(self.graph, self.params)

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """Applies each row's expert to it; see `Experts`."""
    return self.module(rows, layout.renamed(self.place_e, self.count))


@dataclasses.dataclass(frozen=True)
class ExpertRequest:
  """The experts that one call requests, before they are copied.

  Attributes:
    experts: the module, whose matrices are in the host's memory or on disk.
    routing: the gate's choices.
    needed_e: bool, the requested experts.
    id_N: int32, the first `copies` are the experts to copy; e stands for no expert.
    place_N: int32, the place to which each is copied; not read if `copies` is None.
    copies: int32 scalar; None: all N are copied in their order, the first to place 0, which is
      known at compile time.
    place_e, count: see `FetchedExperts`; they hold after the copies.
    cache: the layer's cache after the call, except that its parameters are those before the
      copies; None: the call uses no cache.
  """

  experts: Experts
  routing: Routing
  needed_e: Array
  id_N: Array
  place_N: Array
  copies: Array | None
  place_e: Array
  count: int
  cache: ExpertCache | None = None

  @property
  def everything(self) -> bool:
    """Whether the call copies all experts of the layer."""
    return self.count == self.needed_e.shape[0] and self.cache is None

  def fetched(self, after: Any = None) -> tuple[FetchedExperts, Any]:
    """Copies the experts.

    Args:
      after: values; the copy starts only when they are computed. None: it starts as soon as the
        gate has chosen.

    Returns:
      The experts on the device, and `after` behind a barrier: the caller must read these values
      instead of its own.
    """
    with jax.named_scope("migration"):
      graph, params = nnx.split(self.experts)
      place_e = self.place_e
      if self.everything:
        # This copy reads no expert ids, so it would start before the gate. A barrier makes it wait
        # for `place_e`. The experts read the barrier's `place_e`: XLA drops an operand whose result
        # has no reader.
        params, place_e, after = barrier((params, place_e, after))
        copied = on_device(params)
      else:
        tied = self.id_N, self.place_N, self.copies
        if after is not None:
          tied, after = barrier((tied, after))
        copied = self._copied(params, *tied)  # pyright: ignore[reportArgumentType]
      return FetchedExperts(graph, copied, place_e, self.count), after

  def _copied(self, params: Any, id_N: Array, place_N: Array, copies: Array | None) -> Any:
    """The parameters in all C places after the copies, made by the kernel if it supports them."""
    if not _kernel_takes(params):
      return self._sliced(params, id_N, place_N, copies)
    turn_N = jnp.arange(id_N.shape[0], dtype=jnp.int32)
    if copies is None:
      return multiplied_out(_fetched(params, id_N, turn_N, id_N.shape[0]))
    held = self._held(params)
    if jax.tree.structure(held) == jax.tree.structure(params):
      return _fetched(params, id_N, place_N, copies, held)
    # The places hold matrices in the computing type, so 8-bit matrices are converted first.
    new = multiplied_out(_fetched(params, id_N, turn_N, copies))
    return jax.tree.map(lambda places, x: _written(places, x, place_N, copies), held, new)

  def _sliced(self, params: Any, id_N: Array, place_N: Array, copies: Array | None) -> Any:
    """Does the same as `_copied` without the kernel: copies one expert after the other."""
    if copies is None:
      parts = [_slice_on_device(params, id_N[i]) for i in range(id_N.shape[0])]
      return jax.tree.map(lambda *some: jnp.concatenate(some), *parts)

    def one(i: Array, held: Any) -> Any:
      write = lambda h, new: jax.lax.dynamic_update_slice_in_dim(h, new, place_N[i], 0)
      return jax.tree.map(write, held, _slice_on_device(params, id_N[i]))

    return jax.lax.fori_loop(0, copies, one, self._held(params))

  def _held(self, params: Any) -> Any:
    """The parameters in all places before the copies."""
    return self.cache.params if self.cache is not None else empty_places(params, self.count)


def request_experts(
  experts: Experts,
  routing: Routing,
  policy: CachePolicy = CachePolicy(),
  cache: ExpertCache | None = None,
) -> ExpertRequest:
  """The experts that a layer's tokens need, and the places that they will have on the device.

  Args:
    experts: the layer's module; its matrices are in the host's memory or on disk.
    routing: this device's choices.
    policy: policy of the cache.
    cache: the layer's cache, or None. It is ignored if a call can request more experts than it has
      places.
  """
  routing = routing.computed
  e = jax.tree.leaves(nnx.split(experts)[1])[0].shape[0]
  ranks = routing.num_experts // e
  most = min(routing.expert_TK.size * ranks, e)
  one = ranks == 1 and routing.expert_TK.shape[0] == 1 and not routing.zero_experts
  if one and most < e and cache is None:
    return _of_one_token(experts, routing, e)
  needed_e = _needed(routing, ranks)
  index_e = jnp.arange(e, dtype=jnp.int32)
  if cache is not None and most <= cache.size:
    found = look_up(cache, needed_e, most, policy)
    copies = found.id_N, found.place_N, found.copies, found.place_e
    return ExpertRequest(experts, routing, needed_e, *copies, cache.size, found.cache)
  if most == e:
    place_e = jnp.where(needed_e, index_e, e)
    return ExpertRequest(experts, routing, needed_e, index_e, index_e, None, place_e, e)
  place_e = jnp.where(needed_e, jnp.cumsum(needed_e, dtype=jnp.int32) - 1, most)
  id_N = jnp.full((most,), e, jnp.int32).at[place_e].set(index_e, mode="drop")
  copies = id_N, jnp.arange(most, dtype=jnp.int32), needed_e.sum(dtype=jnp.int32), place_e
  return ExpertRequest(experts, routing, needed_e, *copies, most)


def _of_one_token(experts: Experts, routing: Routing, e: int) -> ExpertRequest:
  """The request of a single token: its K experts differ, so it always needs K copies."""
  id_N = routing.expert_TK[0]
  k = id_N.shape[0]
  place_e = jnp.full((e,), k, jnp.int32).at[id_N].set(jnp.arange(k, dtype=jnp.int32))
  needed_e = jnp.zeros((e,), bool).at[id_N].set(True)
  return ExpertRequest(experts, routing, needed_e, id_N, id_N, None, place_e, k)


def _needed(routing: Routing, ranks: int) -> Array:
  """bool [e]: this device's experts that a token on any device of the expert axis has chosen."""
  size = routing.num_experts
  id_TK = jnp.where(routing.taken_TK, routing.expert_TK, size)
  needed_E = jnp.zeros((size,), jnp.int32).at[id_TK.reshape(-1)].max(1, mode="drop")
  if ranks > 1:
    needed_E = own_share(total(needed_E, ("expert",), "counts"), 0, "expert")
  return needed_E > 0


# -- copies ---------------------------------------------------------------------------------------


def _kernel_takes(params: Any) -> bool:
  """Whether no parameter is on disk, and `fetch` supports all that are in the host's memory."""
  if any(map(is_on_disk, jax.tree.leaves(params, is_leaf=is_on_disk))):
    return False
  return has_kernel([x for x in jax.tree.leaves(params) if is_on_host(x)])


def _fetched(params: Any, id_N: Array, place_N: Array, copies: Any, held: Any = None) -> Any:
  """`fetch` for a tree of parameters; those that lie on the device already are gathered there.

  Args:
    params: the parameters of all experts, each [e, ...].
    id_N, place_N, copies: see `fetch`.
    held: the parameters in all places, in the same tree; None: N new places.
  """
  leaves, tree = jax.tree.flatten(params)
  places = jax.tree.leaves(held) if held is not None else [None] * len(leaves)
  of_host = lambda some: [own for own, x in zip(some, leaves) if is_on_host(x)]
  into = None if held is None else of_host(places)
  found = iter(fetch(of_host(leaves), id_N, place_N, copies, into))
  near = lambda x, own: x[id_N] if own is None else _written(own, x[id_N], place_N, copies)
  return tree.unflatten(
    [next(found) if is_on_host(x) else near(x, own) for x, own in zip(leaves, places)]
  )


def _written(places: Array, new_N: Array, place_N: Array, copies: Any) -> Array:
  """Writes the first `copies` of `new_N` into their places; returns all places."""
  place_N = jnp.where(jnp.arange(place_N.shape[0]) < copies, place_N, places.shape[0])
  return places.at[place_N].set(new_N, mode="drop")


def _slice_on_device(params: Any, index: Array) -> Any:
  """Copies one expert to the device: [1, ...] of each parameter."""
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1)
  return on_device(jax.tree.map(take, params))
