"""The update by the device, layer by layer, of moments that lie in the host's memory.

    arrives   |fetch 0|   |fetch 1|   |fetch 2|   |fetch 3|
    update            | 0 |       | 1 |       | 2 |       | 3 |
    leaves                |store 0|   |store 1|   |store 2|   |store 3|

A layer's moments, its parameters' lower halves if there are some (`scmoe.training.masters`), and
with `mesh.experts_in=host` its experts' parameters and gradients, come while an earlier layer's new
arrays leave; the link carries both directions at once. Barriers say so to XLA: with `ahead` = 1 the
fetch of layer 2 and the store of layer 1 begin when layer 0 is stored and layer 1 updated, so that
the device holds the moments of at most two layers, beside those that stay on it
(`mesh.moments_kept`).

The two go array by array: between two barriers stand the copies of one large array, the fetch of a
layer's and the store of an earlier layer's, if the layers have it. Without barriers XLA waits for
one copy before it starts the next. With one pair of barriers around all copies of a layer, XLA
deals them out to a few streams, and a copy may wait in its stream behind one of the other direction
while its own is idle.

No fetch begins before the norm of all gradients is known: no layer can be updated without it, and
until then the memory belongs to the backward pass. With `ahead` = 0 the fetch of each layer waits
for the store of the layer before, so the two do not run side by side.

Parameters beside the stacks, such as the embedding, are updated first, as one more layer.
Source of the scheme: vertical prefetch of SE-MoE (arXiv 2205.10034).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from scmoe.models.stacked import STACKS, Apart, is_apart, leading_dimensions
from scmoe.offload.memory import is_on_host
from scmoe.parallel.barriers import barrier
from scmoe.parallel.gradients import is_sent
from scmoe.training.host_arrays import to_device, to_host
from scmoe.training.masters import is_halves

PyTree = Any
# A function (gradients of one layer, the layer's state, its number in its stack) -> its new state.
UpdateLayer = Callable[[PyTree, PyTree, int], PyTree]
# Arrays of fewer bytes are copied together: each pair of copies ends before the next begins.
SMALL = 2**24
# XLA lets two copies between the memories run at a time unless this option says more. With Adam a
# layer has two for each of its parameters each way, for both moments, and a third for a lower half.
# Measured with four layers of OLMoE on one H200: a step of 786 ms takes 604 ms (experiments/LOG.md,
# 2026-11-27).
COMPILED: dict[str, Any] = {"xla_gpu_experimental_parallel_async_compute_limit": 64}
# The update of one layer sees this mark in place of other layers' arrays. It is optax's mark of a
# parameter that a rule does not see: Muon's moments have it for the embedding, for example.
ABSENT = optax.MaskedNode()


@dataclasses.dataclass(frozen=True)
class OnHost:
  """How the update handles moments and lower halves that lie in the host's memory or in a file.

  Attributes:
    ahead: number of layers whose moments are fetched while the layers before them are updated and
      stored; 0: each layer's moments are fetched when the layer before has been stored. If the host
      computes the update, the gradients of so many layers leave the device before their turn, and
      moments in a file are read so early.
    kept: number of each stack's last layers whose moments and lower halves stay on the device; at
      least the first layer's leave it.
    computes: whether the host computes the update (`scmoe.training.host_update`), so that moments
      and lower halves never leave the host.
    folder: of the file in which these lie if the host computes the update; "": they lie in memory.
    experts: type in which the model reads experts, if their matrices lie in the host's memory too,
      for the pass and for the update (`scmoe.models.fetched`); "": these lie on the device.
  """

  ahead: int = 1
  kept: int = 0
  computes: bool = False
  folder: str = ""
  experts: str = ""


@dataclasses.dataclass(frozen=True)
class Layer:
  """A name for parameters that are updated together: one layer of a stack, or all outside stacks.

  Attributes:
    stack: name of their stack (`STACKS`); "": all parameters beside the stacks.
    index: the layer's number in the stack.
  """

  stack: str = ""
  index: int = 0


def layers_of(tree: PyTree) -> list[Layer]:
  """The layers in the order of their update: first the parameters outside the stacks.

  Args:
    tree: a nested dictionary of parameters, stacks whole or `Apart`.
  """
  counts: dict[str, int] = {"": 0}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_apart):
    stack = stack_of(path)
    counts[stack] = max(counts.get(stack, 0), count_of(stack, leaf))
  return [Layer(stack, i) for stack, count in counts.items() for i in range(count)]


def count_of(stack: str, leaf: Any) -> int:
  """Number of layers of an array or `Apart` of this stack; 1 for what belongs to no stack."""
  return len(leaf.parts) if is_apart(leaf) else leaf.shape[0] if stack else 1


def stack_of(path: Any) -> str:
  """Name of the stack to which the parameter of a path belongs (`STACKS`), or ""."""
  names = [getattr(key, "key", None) for key in path]
  return next((name for name in names if name in STACKS), "") if leading_dimensions(path) else ""


def updated_by_layer(
  update: UpdateLayer, grads: PyTree, state: dict[str, PyTree], how: OnHost, norm: Array
) -> dict[str, PyTree]:
  """The state after an update; each array lies in the memory in which it lay before.

  Args:
    update: updates one layer. It sees the whole trees with `ABSENT` in place of other layers'
      arrays; arrays of a stack are [1, ...]. What it returns has `ABSENT` there too.
    grads: this device's gradients, stacks whole or `Sent`; a `Sent` is fetched with the moments.
    state: `params`, `opt_state` and `average` in the manual region. Arrays in the host's memory,
      those in `Apart`s too, are fetched and stored; stacks in the device's memory are updated in
      place. Arrays of `opt_state` that are wholly in the device's memory belong to no parameter,
      as counters do: every layer sees them.
    how: how many layers are fetched ahead.
    norm: global norm of all gradients, float32 []; every fetch waits for it.
  """
  sent = lambda grad: Apart(grad.parts) if is_sent(grad) else grad
  grads = jax.tree.map(sent, grads, is_leaf=is_sent)
  layers, given = layers_of(grads), _slots(grads)
  entries, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_apart)
  slots = [_Slot.of(path, leaf) for path, leaf in entries]
  away = [[slot.away(layer) for slot in (*slots, *given)] for layer in layers]
  first = max(how.ahead, 1)
  away[:first], norm = barrier((away[:first], norm))
  fetched = [to_device(each) for each in away[:first]]
  new: list[Any] = []
  for i, layer in enumerate(layers):
    here = [slot.here(layer) if x is None else x for slot, x in zip(slots, fetched[i])]
    old = structure.unflatten(ABSENT if x is None else x for x in here)
    own = [slot.here(layer) if x is None else x for slot, x in zip(given, fetched[i][len(slots) :])]
    changed = update(_filled(grads, own), present(old), layer.index)
    # Thanks to this barrier XLA compiles a layer's update to the same kernels as an update of whole
    # stacks.
    new = barrier(structure.flatten_up_to(completed(changed, old)))
    # `norm` passes through the barrier at the first fetch and through those below, so that they
    # are a chain; the one just above is not part of it. With `ahead` = 0 a barrier makes the fetch
    # wait for the store.
    follows = i + first
    if follows >= len(layers):
      stored = to_host(_leaving(slots, new, layer))
    elif how.ahead:
      away[follows], new, norm = barrier((away[follows], new, norm))
      leaves = [*_leaving(slots, new, layer), *[None] * len(given)]
      arrived, stored, norm = _exchanged(away[follows], leaves, norm)
      fetched.append(arrived)
    else:
      away[follows], stored, norm = barrier(
        (away[follows], to_host(_leaving(slots, new, layer)), norm)
      )
      fetched.append(to_device(away[follows]))
    for slot, x, gone in zip(slots, new, stored):
      slot.keep(x if gone is None else gone, layer)
  return structure.unflatten(x if slot.shared else slot.value for slot, x in zip(slots, new))


def _leaving(slots: list[_Slot], new: list[Any], layer: Layer) -> list[Array | None]:
  """The new arrays of a layer that go to the host's memory, and None for the others."""
  return [x if slot.is_away(layer) else None for slot, x in zip(slots, new)]


def _exchanged(
  arrives: list[Array | None], leaves: list[Array | None], norm: Array
) -> tuple[list[Array | None], list[Array | None], Array]:
  """Fetches the arrays of one layer and stores those of another.

  Args:
    arrives: arrays in the host's memory, one for each slot, or None.
    leaves: the same in the device's memory.
    norm: passes through all barriers.

  Returns:
    the fetched arrays, the stored ones, and `norm`.
  """
  arrives, leaves = list(arrives), list(leaves)
  bytes_of = lambda x: 0 if x is None else x.size * x.dtype.itemsize
  sizes = [max(map(bytes_of, pair)) for pair in zip(arrives, leaves)]
  large = [[slot] for slot, size in enumerate(sizes) if size >= SMALL]
  small = [slot for slot, size in enumerate(sizes) if 0 < size < SMALL]
  for group in [*large, small] if small else large:
    pair = [arrives[slot] for slot in group], [leaves[slot] for slot in group]
    coming, going, norm = barrier((*pair, norm))
    coming, going, norm = barrier((to_device(coming), to_host(going), norm))
    for slot, here, gone in zip(group, coming, going):
      arrives[slot], leaves[slot] = here, gone
  return arrives, leaves, norm


def present(tree: PyTree) -> PyTree:
  """The tree with one `ABSENT` in place of each `Halves` whose two arrays are `ABSENT`."""
  absent = lambda x: is_halves(x) and _is_absent(x.low)
  return jax.tree.map(lambda x: ABSENT if absent(x) else x, tree, is_leaf=is_halves)


def completed(tree: PyTree, like: PyTree) -> PyTree:
  """The tree with the `Halves` of `like` in place of each `ABSENT` that `present` put there."""
  again = lambda old, new: old if _is_absent(new) else new
  return jax.tree.map(again, like, tree, is_leaf=is_halves)


def _is_absent(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)


def _slots(grads: PyTree) -> list[_Slot]:
  entries = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_apart)
  return [_Slot(stack_of(path), leaf, on_host=is_apart(leaf)) for path, leaf in entries]


def _filled(like: PyTree, own: list[Any]) -> PyTree:
  """The arrays of one layer, [1, ...] if they are stacked, and `ABSENT` in place of all others."""
  structure = jax.tree.structure(like, is_leaf=is_apart)
  return structure.unflatten(ABSENT if x is None else x for x in own)


@dataclasses.dataclass
class _Slot:
  """One array of the state or of the gradients. `keep` changes the state's, a layer at a time.

  Attributes:
    stack: name of its stack, or "".
    value: an `Apart` or an array, in which `keep` replaces old layers by new ones.
    on_host: whether it lies in the host's memory; for an `Apart`, whether some of its layers do.
    shared: whether it belongs to no parameter, e.g. a counter: every layer sees it, and the last
      layer's result is kept.
  """

  stack: str
  value: Any
  on_host: bool = False
  shared: bool = False

  @staticmethod
  def of(path: Any, leaf: Any) -> _Slot:
    on_host = any(map(is_on_host, leaf.parts if is_apart(leaf) else [leaf]))
    shared = path[0].key == "opt_state" and not on_host
    return _Slot(stack_of(path), leaf, on_host, shared)

  def _is_of(self, layer: Layer) -> bool:
    if self.stack != layer.stack:
      return False
    return layer.index < count_of(self.stack, self.value)

  def _own(self, layer: Layer) -> Any:
    return self.value.parts[layer.index] if is_apart(self.value) else self.value

  def is_away(self, layer: Layer) -> bool:
    """Whether the slot's array of this layer lies in the host's memory."""
    return self.on_host and self._is_of(layer) and is_on_host(self._own(layer))

  def away(self, layer: Layer) -> Any:
    """The slot's array of this layer, if it lies in the host's memory; else None."""
    return self._own(layer) if self.is_away(layer) else None

  def here(self, layer: Layer) -> Any:
    """The slot's array of this layer, if it lies in the device's memory; else None.

    A shared array belongs to every layer.
    """
    if self.shared:
      return self.value
    if self.is_away(layer) or not self._is_of(layer):
      return None
    if is_apart(self.value) or not self.stack:
      return self._own(layer)
    return jax.lax.slice_in_dim(self.value, layer.index, layer.index + 1)

  def keep(self, new: Any, layer: Layer) -> None:
    """Replaces the layer's array in `value` by `new`; does nothing if the slot has no such array.

    A shared array keeps its old value here, so that the layers that follow see the old value, too.
    """
    if self.shared or not self._is_of(layer):
      return
    if is_apart(self.value):
      parts = list(self.value.parts)
      parts[layer.index] = new
      self.value = Apart(tuple(parts))
    elif self.stack:
      # XLA does this in place, since the next layer's slice is read from the result.
      self.value = jax.lax.dynamic_update_slice_in_dim(self.value, new, layer.index, 0)
    else:
      self.value = new
