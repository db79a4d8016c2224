"""Experts that lie in the host's memory, and come to the device when tokens choose them.

A gate names the experts of its tokens; `bring` copies those, and nothing else, beside whatever the
device computes until they are read. ScMoE's gate fires a block before its experts (paper A.3, early
determinate migration): `early` begins the copy there, `blocking` where the experts compute. Nothing
is guessed, so nothing is copied that is not read.

Which experts are copied is an index that the device computes: `scmoe.offload.fetch` reads them from
pinned memory on a stream of its own; where it does not run, a slice is copied. All experts of a
layer go by a copy engine. So a whole generation stays one program, and the host is not asked, but
for experts that lie on disk (`OnDisk`).

A cache keeps C experts of every layer on the device. What it holds is decided on the device too.

    e  experts of this device     C  slots of a layer's cache     N  experts that a call can ask for
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Int

from scmoe.kernels.grouped_matmul import RowLayout
from scmoe.moe.experts import Experts
from scmoe.moe.types import Routing
from scmoe.offload.fetch import fetch, has_kernel
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import axis_size, own_share, parameter_specs

MODES = ("blocking", "early", "ring")
POLICIES = ("lfu", "lru")
HOLDERS = ("data", "expert")  # axes of devices that hold experts of their own, or copies of them


@dataclasses.dataclass(frozen=True)
class Migration:
  """When the experts come, and which of them the device keeps.

  Attributes:
    mode: early: the copy begins behind the gate; blocking: where the experts compute; ring: a
      layer's experts are there before it begins (`scmoe.offload.ring`).
    policy: of the cache: lfu, the number of requests, each worth `decay` of the next; lru, the
      latest request.
    decay: of a request's worth, for each further call of the layer (SE-MoE's β, of every call).
    sections: of a ring: layers whose experts are on the device at once (SE-MoE's K).
  """

  mode: str = "early"
  policy: str = "lfu"
  decay: float = 0.95
  sections: int = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cached:
  """The experts of one layer that the device keeps.

  Attributes:
    params: the experts' parameters, [C, ...] of each.
    expert_C: int32, whose each slot is; -1 for nobody's.
    worth_e: float32, what the policy knows of every expert; the least of those at hand goes first.
    asked_Ne: bool, what the calls of a token asked for, one for each gating of the layer: the trace
      behind every figure.
    calls, requests, misses: int32 [1]: of this layer, of experts, and those that were copied.
  """

  params: Any
  expert_C: Int[Array, " C"]
  worth_e: Array
  asked_Ne: Bool[Array, "N e"]
  calls: Array
  requests: Array
  misses: Array

  @property
  def slots(self) -> int:
    """C."""
    return self.expert_C.shape[0]


class Guests:
  """The experts of a layer while its tokens are on their way; of each of its gatings.

  Args:
    experts: what is applied to rows; a module whose parameters lie in the host's memory, if they
      migrate.
    migration: how they come; None: they are there.
    cached: what the device has of them, or None.
  """

  def __init__(self, experts: Any, migration: Migration | None, cached: Cached | None):
    self._home, self._migration, self.cached = experts, migration, cached
    self._asked: dict[int, Asked] = {}
    self._brought: dict[int, Any] = {}

  def chosen(self, gating: int, routing: Routing, main: Any) -> Any:
    """What follows the gate: an early copy begins.

    Args:
      gating: which.
      routing: what it has chosen.
      main: what the main path reads next.

    Returns:
      `main`.
    """
    how = self._migration
    if how is None:
      return main
    if how.mode == "ring":
      if self.cached is not None:
        self.cached = filled(self.cached, self._home, routing, how)
      return main
    self._asked[gating] = ask(self._home, routing, how, self.cached)
    self._brought.pop(gating, None)  # of the unit before, with the same experts
    if how.mode == "early":
      self._bring(gating)
    elif axis_size("expert") > 1:  # rounds of an overflow compute within the dispatch
      return self._bring(gating, main)
    return main

  def needed(self, gating: int, main: Any) -> Any:
    """What comes before the experts: a copy that has not begun does, and nothing stands beside it.

    Arguments and result as of `chosen`.
    """
    if gating in self._asked and gating not in self._brought:
      return self._bring(gating, main)
    return main

  def experts(self, gating: int) -> Any:
    """(rows, layout) -> rows, by the experts as they are at hand."""
    return self._brought.get(gating, self._home)

  def _bring(self, gating: int, main: Any = None) -> Any:
    asked = self._asked[gating]
    brought, main = asked.bring(main)
    self._brought[gating] = brought
    if asked.cached is not None:
      self.cached = dataclasses.replace(asked.cached, params=brought.params)
    elif asked.everything and self.cached is not None:
      assert self._migration is not None
      self.cached = filled(self.cached, brought.module, asked.routing, self._migration)
    return main


@dataclasses.dataclass(frozen=True)
class Brought:
  """Experts of one call, on the device.

  Attributes:
    graph, params: of the module of C experts.
    slot_e: int32, where each expert is among them; C for one that was not asked for.
    count: C.
  """

  graph: nnx.GraphDef
  params: Any
  slot_e: Int[Array, " e"]
  count: int

  @property
  def module(self) -> Experts:
    """The module of these experts."""
    return nnx.merge(self.graph, self.params)

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """The rows' experts applied to them; see `Experts`."""
    return self.module(rows, layout.renamed(self.slot_e, self.count))


@dataclasses.dataclass(frozen=True)
class Asked:
  """What one call asks for, before it is brought.

  Attributes:
    home: the experts, whose parameters lie in the host's memory.
    routing: the choices.
    need_e: which of them.
    id_N: the experts to copy, the first `copies` of them; e for none.
    place_N: the slots they go to.
    copies: int32 scalar, how many; None: all N, known beforehand.
    slot_e, count: as of `Brought`, after the copies.
    cached: the layer's cache after them, with its parameters from before; or None.
  """

  home: Experts
  routing: Routing
  need_e: Array
  id_N: Array
  place_N: Array
  copies: Array | None
  slot_e: Array
  count: int
  cached: Cached | None = None

  @property
  def everything(self) -> bool:
    """Whether all of the layer's experts are copied."""
    return self.count == self.need_e.shape[0] and self.cached is None

  def bring(self, after: Any = None) -> tuple[Brought, Any]:
    """Copies them.

    Args:
      after: values behind which the copy begins; None: as soon as the gate has chosen.

    Returns:
      the experts on the device, and the values.
    """
    with jax.named_scope("migration"):
      graph, params = nnx.split(self.home)
      tied = self.id_N, self.place_N, self.copies
      slot_e = self.slot_e
      if self.everything:
        # It reads no ids, which could hold it: it is tied to what the gate has chosen, by something
        # that is read later. XLA forgets what goes into a barrier and is not.
        params, slot_e, after = barrier((params, slot_e, after))
        made = on_device(params)
      else:
        if after is not None:
          tied, after = barrier((tied, after))
        made = self._copied(params, *tied)  # pyright: ignore[reportArgumentType]
      return Brought(graph, made, slot_e, self.count), after

  def _copied(self, params: Any, id_N: Array, place_N: Array, copies: Array | None) -> Any:
    if not _come_by_kernel(params):
      return self._sliced(params, id_N, place_N, copies)
    turn_N = jnp.arange(id_N.shape[0], dtype=jnp.int32)
    if copies is None:
      return multiplied_out(_fetched(params, id_N, turn_N, id_N.shape[0]))
    held = self._held(params)
    if jax.tree.structure(held) == jax.tree.structure(params):
      return _fetched(params, id_N, place_N, copies, held)
    # Eight bits are multiplied out before they lie in their slots.
    new = multiplied_out(_fetched(params, id_N, turn_N, copies))
    return jax.tree.map(lambda slots, x: _put(slots, x, place_N, copies), held, new)

  def _sliced(self, params: Any, id_N: Array, place_N: Array, copies: Array | None) -> Any:
    """The same where there is no kernel for it."""
    if copies is None:
      parts = [_taken(params, id_N[i]) for i in range(id_N.shape[0])]
      return jax.tree.map(lambda *some: jnp.concatenate(some), *parts)

    def one(i: Array, held: Any) -> Any:
      put = lambda h, new: jax.lax.dynamic_update_slice_in_dim(h, new, place_N[i], 0)
      return jax.tree.map(put, held, _taken(params, id_N[i]))

    return jax.lax.fori_loop(0, copies, one, self._held(params))

  def _held(self, params: Any) -> Any:
    """What the slots hold before the copies."""
    return self.cached.params if self.cached is not None else _room(params, self.count)


def ask(
  experts: Experts, routing: Routing, migration: Migration, cached: Cached | None = None
) -> Asked:
  """Which experts a layer's tokens need, and where they will lie.

  Args:
    experts: of the layer; its parameters lie in the host's memory.
    routing: this device's choices.
    migration: how they come.
    cached: what the device has of them. It is passed by where a call can ask for more experts than
      it has slots.
  """
  routing = routing.computed
  e = jax.tree.leaves(nnx.split(experts)[1])[0].shape[0]
  ranks = routing.num_experts // e
  choices = routing.expert_TK.size * ranks
  most = min(choices, e)
  one = ranks == 1 and routing.expert_TK.shape[0] == 1 and not routing.zero_experts
  if one and most < e and cached is None:
    # A token's experts are all different, so that their number is known.
    id_N = routing.expert_TK[0]
    slot_e = jnp.full((e,), most, jnp.int32).at[id_N].set(jnp.arange(most, dtype=jnp.int32))
    need_e = jnp.zeros((e,), bool).at[id_N].set(True)
    return Asked(experts, routing, need_e, id_N, id_N, None, slot_e, most)
  need_e = _needed(routing, ranks)
  index_e = jnp.arange(e, dtype=jnp.int32)
  if cached is not None and most <= cached.slots:
    return _ask_cache(experts, routing, need_e, most, migration, cached)
  if most == e:
    slot_e = jnp.where(need_e, index_e, e)
    return Asked(experts, routing, need_e, index_e, index_e, None, slot_e, e)
  place_e = jnp.cumsum(need_e, dtype=jnp.int32) - 1
  slot_e = jnp.where(need_e, place_e, most)
  id_N = jnp.full((most,), e, jnp.int32).at[slot_e].set(index_e, mode="drop")
  places_N = jnp.arange(most, dtype=jnp.int32)
  return Asked(experts, routing, need_e, id_N, places_N, need_e.sum(dtype=jnp.int32), slot_e, most)


def _needed(routing: Routing, ranks: int) -> Array:
  """bool [e]: which of this device's experts any token of its exchange has chosen."""
  size = routing.num_experts
  id_TK = jnp.where(routing.taken_TK, routing.expert_TK, size)
  need_E = jnp.zeros((size,), jnp.int32).at[id_TK.reshape(-1)].max(1, mode="drop")
  if ranks > 1:
    need_E = own_share(total(need_E, ("expert",), "counts"), 0, "expert")
  return need_E > 0


def _ask_cache(
  experts: Experts,
  routing: Routing,
  need_e: Array,
  most: int,
  migration: Migration,
  cached: Cached,
) -> Asked:
  """Looks a layer's experts up, and finds slots for those that are missing.

  There always are some: what is asked for now is never replaced, and a call asks for no more than
  there are slots.
  """
  e, slots = need_e.shape[0], cached.slots
  held, index_C = _index(cached.expert_C, e), jnp.arange(slots, dtype=jnp.int32)
  slot_e = jnp.full((e,), slots, jnp.int32).at[held].set(index_C, mode="drop")
  missing_e = need_e & (slot_e == slots)
  copies = missing_e.sum(dtype=jnp.int32)
  worth_e = worth(cached.worth_e, need_e, cached.calls, migration)
  worth_C = jnp.append(worth_e, -jnp.inf)[held]
  worth_C = jnp.where(jnp.append(need_e, False)[held], jnp.inf, worth_C)
  place_N = jnp.argsort(worth_C)[:most].astype(jnp.int32)
  turn_e = jnp.cumsum(missing_e, dtype=jnp.int32) - 1
  index_e = jnp.arange(e, dtype=jnp.int32)
  at_e = jnp.where(missing_e, turn_e, most)
  id_N = jnp.full((most,), e, jnp.int32).at[at_e].set(index_e, mode="drop")
  used_N = jnp.where(id_N < e, place_N, slots)
  gone_N = jnp.where(id_N < e, held[place_N], e)
  slot_e = slot_e.at[gone_N].set(slots, mode="drop")
  slot_e = slot_e.at[id_N].set(used_N, mode="drop")
  after = dataclasses.replace(
    cached,
    expert_C=cached.expert_C.at[used_N].set(id_N, mode="drop"),
    worth_e=worth_e,
    asked_Ne=cached.asked_Ne.at[cached.calls[0] % cached.asked_Ne.shape[0]].set(need_e),
    calls=cached.calls + 1,
    requests=cached.requests + need_e.sum(dtype=jnp.int32),
    misses=cached.misses + copies,
  )
  return Asked(experts, routing, need_e, id_N, place_N, copies, slot_e, slots, after)


def filled(cached: Cached, experts: Any, routing: Routing, migration: Migration) -> Cached:
  """The cache after a call that had all of a layer's experts on the device: those most asked for.

  Their worth is what as many requests a call would have made it in the long run.

  Args:
    cached: before it; its counts of requests stay.
    experts: the layer's, all on the device.
    routing: this device's choices.
    migration: the policy.
  """
  params = nnx.split(experts)[1]
  e = cached.worth_e.shape[0]
  ranks = routing.num_experts // e
  count_E = routing.computed.count_E
  if ranks > 1:
    count_E = own_share(total(count_E, ("expert",), "counts"), 0, "expert")
  _, id_C = jax.lax.top_k(count_E, cached.slots)
  share_e = count_E / jnp.maximum(routing.mask_T.sum() * ranks, 1)
  return dataclasses.replace(
    cached,
    params=jax.tree.map(lambda x: x[id_C], params),
    expert_C=id_C.astype(jnp.int32),
    worth_e=share_e / (1 - migration.decay) if migration.policy == "lfu" else share_e,
  )


def worth(worth_e: Array, need_e: Array, calls: Any, migration: Migration) -> Array:
  """What the policy knows of every expert after a call: the least worth is replaced first.

  Args:
    worth_e: before it.
    need_e: what it asks for.
    calls: number of calls before it.
    migration: the policy.
  """
  if migration.policy == "lru":
    return jnp.where(need_e, jnp.asarray(calls + 1, jnp.float32), worth_e)
  return worth_e * migration.decay + need_e


def empty_cache(params: Any, slots: int, calls: int = 1) -> Cached:
  """A cache of `slots` experts of one layer.

  Args:
    params: of its experts, on this device or in the host's memory.
    slots: C; no more than there are experts.
    calls: of the layer for each token.
  """
  slots = min(slots, jax.tree.leaves(params)[0].shape[0])
  e, none = jax.tree.leaves(params)[0].shape[0], jnp.zeros((1,), jnp.int32)
  return Cached(
    params=_room(params, slots),
    expert_C=jnp.full((slots,), -1, jnp.int32),
    worth_e=jnp.zeros((e,), jnp.float32),
    asked_Ne=jnp.zeros((calls, e), bool),
    calls=none,
    requests=none,
    misses=none,
  )


def cache_specs(params: Any) -> Cached:
  """How such a cache lies on the mesh: every device of the batch has its own.

  Args:
    params: of the layer's experts.
  """
  of_param = lambda spec: P(HOLDERS, *spec[1:])
  specs = jax.tree.map(of_param, parameter_specs(jax.eval_shape(multiplied_out, params)))
  own: Any = P(HOLDERS)
  asked: Any = P(None, HOLDERS)
  return Cached(specs, own, own, asked, own, own, own)


# -- between the memories -------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
  """Matrices of experts in eight bits: value = int8 · scale of its expert and output channel.

  Attributes:
    value: int8 [..., M, N].
    scale: float32 [..., 1, N].
    dtype: static, what they are multiplied out to.
  """

  value: Any
  scale: Any
  dtype: str = dataclasses.field(default="float32", metadata={"static": True})

  @property
  def whole(self) -> Array:
    """The matrices."""
    return (self.value.astype(jnp.float32) * self.scale).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnDisk:
  """Matrices of experts that lie in a file, of which a program reads those that it needs.

  Attributes:
    number: int32 [e, 1, 1], which of the file's experts these are.
    read: static, hashable: int32 [n] -> [n, M, N], the experts of these numbers; on the host.
    matrix: static, M and N.
    dtype: static, of the file.
  """

  number: Any
  read: Callable[[Any], np.ndarray] = dataclasses.field(metadata={"static": True})
  matrix: tuple[int, int] = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})

  @property
  def ndim(self) -> int:
    """Of the matrices of all experts."""
    return 1 + len(self.matrix)

  @property
  def whole(self) -> Array:
    """The matrices, on the device."""
    shape = jax.ShapeDtypeStruct((self.number.shape[0], *self.matrix), self.dtype)
    return jax.pure_callback(self.read, shape, self.number.reshape(-1))


def is_on_disk(x: Any) -> bool:
  """Whether a leaf of a tree of parameters is an `OnDisk`, for `is_leaf`."""
  return isinstance(x, OnDisk)


def quantised(matrix: Any, dtype: Any) -> Int8:
  """Rounds to the nearest of 255 steps of every expert's output channel, 127 for its largest.

  Args:
    matrix: float [..., M, N].
    dtype: what it is multiplied out to.
  """
  matrix = jnp.asarray(matrix, jnp.float32)
  largest = jnp.abs(matrix).max(-2, keepdims=True)
  scale = jnp.where(largest > 0, largest / 127, 1)
  value = jnp.round(matrix / scale).astype(jnp.int8)
  return Int8(value, scale, jnp.dtype(dtype).name)


def on_device(params: Any) -> Any:
  """Parameters in the device's memory, multiplied out where they were in eight bits."""
  there = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), params)
  return multiplied_out(there)


def multiplied_out(params: Any) -> Any:
  """`OnDisk` and `Int8` as matrices, everything else as it is."""
  read = lambda x: x.whole if is_on_disk(x) else x
  params = jax.tree.map(read, params, is_leaf=is_on_disk)
  packed = lambda x: isinstance(x, Int8)
  return jax.tree.map(lambda x: x.whole if packed(x) else x, params, is_leaf=packed)


def is_away(params: Any) -> bool:
  """Whether any of these parameters is not in the device's memory."""
  leaves = jax.tree.leaves(params, is_leaf=is_on_disk)
  return any(is_on_disk(x) or _is_on_host(x) for x in leaves)


def _is_on_host(x: Any) -> bool:
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def _come_by_kernel(params: Any) -> bool:
  """Whether `fetch` takes all that is on the host."""
  if any(map(is_on_disk, jax.tree.leaves(params, is_leaf=is_on_disk))):
    return False
  return has_kernel([x for x in jax.tree.leaves(params) if _is_on_host(x)])


def _fetched(params: Any, id_N: Array, place_N: Array, copies: Any, held: Any = None) -> Any:
  """`fetch` for a tree; what lies on the device already is taken from there.

  Args:
    params: [E, ...] of every parameter.
    id_N, place_N, copies: as of `fetch`.
    held: what the slots hold, in the same tree; None: N new ones.
  """
  leaves, tree = jax.tree.flatten(params)
  slots = jax.tree.leaves(held) if held is not None else [None] * len(leaves)
  of = lambda some: [own for own, x in zip(some, leaves) if _is_on_host(x)]
  found = iter(fetch(of(leaves), id_N, place_N, copies, None if held is None else of(slots)))
  near = lambda x, own: x[id_N] if own is None else _put(own, x[id_N], place_N, copies)
  return tree.unflatten(
    [next(found) if _is_on_host(x) else near(x, own) for x, own in zip(leaves, slots)]
  )


def _put(slots: Array, new_N: Array, place_N: Array, copies: Any) -> Array:
  """The first `copies` of `new_N` in their slots."""
  place_N = jnp.where(jnp.arange(place_N.shape[0]) < copies, place_N, slots.shape[0])
  return slots.at[place_N].set(new_N, mode="drop")


def _taken(params: Any, index: Array) -> Any:
  """One expert, [1, ...] of each parameter, in the device's memory."""
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1)
  return on_device(jax.tree.map(take, params))


def _room(params: Any, slots: int) -> Any:
  """Zeros for so many experts, in the types that they are computed in."""
  shapes = jax.eval_shape(multiplied_out, params)
  return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), shapes)


def _index(expert_C: Array, e: int) -> Array:
  """Indices for `mode="drop"`, in which a negative one would count from the end."""
  return jnp.where(expert_C < 0, e, expert_C)
