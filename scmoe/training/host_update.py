"""A training step whose update the host computes (`mesh.moments_update=host`).

    layer        0         1         2         3
    leaves    | grads 0 | grads 1 | grads 2 | grads 3 |
    host                | update 0  | update 1  | update 2  | update 3 |
    arrives                         | new 0 |     new 1     ...

Streaming moves a layer's moments to the device and back: if they are float32, 10 bytes a parameter
each way with lower halves. Here the moments stay. A layer's gradients leave the device, at most 4
bytes a parameter, and with them the parameters as the device stores them (upper halves, 2 bytes, or
float32) and their average, if there is one. The host runs the same update on jax's CPU and sends
the new parameters and average back. With such moments and halves less travels, but the host's
memory is slower than the device's.

The step is one program up to the norm of all gradients: no layer can be updated before it is known
whether the step is good and by how much gradients are clipped. After that program Python goes from
layer to layer; the gradients of the next `ahead` layers leave the device meanwhile.
Source of the scheme: ZeRO-Offload (J. Ren et al., arXiv 2101.06840).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.models.stacked import Apart, is_apart
from scmoe.offload.memory import HOST
from scmoe.parallel.mesh import BATCH_AXES, batch_sharding, manual, shardings_of
from scmoe.training import masters
from scmoe.training.filed import THREADS, Passage, is_in_file
from scmoe.training.host_arrays import shard_of
from scmoe.training.kept import Groups, cpu, is_away, is_kept, kept, of_devices, zeros_in_file
from scmoe.training.optimizer import Optimizer
from scmoe.training.share_update import gathered_again
from scmoe.training.streamed_update import (
  ABSENT,
  Layer,
  completed,
  count_of,
  layers_of,
  present,
  stack_of,
)
from scmoe.training.update import PARTS, Left, rule_of

PyTree = Any
# (gradients of one layer, its state, its number, the step, the norm) -> its new state.
Rule = Callable[[PyTree, PyTree, Any, Any, Any], PyTree]


def without_kept(state: Any) -> Any:
  """A state, abstract or real, with `ABSENT` for each array of `PARTS` in host memory or a file."""
  cut = lambda x: ABSENT if is_away(x) else x
  parts = {name: jax.tree.map(cut, getattr(state, name), is_leaf=is_apart) for name in PARTS}
  return dataclasses.replace(state, **parts)


def begun_on_host(state: Any, abstract: Any) -> Any:
  """A fresh state, moments being zeros that the host keeps.

  Args:
    state: `ABSENT` in place of the moments; lower halves, if there are some, in pinned memory.
    abstract: the whole state, stacks divided into layers.
  """
  return _Parts.of(abstract).keeping(state)


def without_files(tree: PyTree) -> PyTree:
  """An abstract tree with `ABSENT` in place of each array in a file."""
  return jax.tree.map(lambda x: ABSENT if is_in_file(x) else x, tree)


def begun_in_files(state: Any, abstract: Any) -> Any:
  """A fresh state in the form of a checkpoint, moments being zeros in files.

  Args:
    state: `ABSENT` in place of the moments.
    abstract: the whole state, stacks whole.
  """
  wanted, structure = jax.tree.flatten(abstract.opt_state)
  own = structure.flatten_up_to(state.opt_state)
  filled = [zeros_in_file(like) if is_in_file(like) else x for like, x in zip(wanted, own)]
  return dataclasses.replace(state, opt_state=structure.unflatten(filled))


def host_step_of(step: Any, program: Callable[..., Any]) -> Callable[..., Any]:
  """The whole step, from a jitted function or a `HostStep` and its compiled program.

  Unless it is a `HostStep`, that is the program itself.
  """
  return functools.partial(step.run, program) if isinstance(step, HostStep) else program


def make_host_step(
  local_step: Callable[..., Any],
  optimizer: Optimizer,
  abstract: Any,
  compiler_options: dict[str, Any] | None = None,
) -> HostStep:
  """The step whose update the host computes.

  Args:
    local_step: from `make_local_step` with `leave`.
    optimizer, abstract, compiler_options: as of `make_train_step`.
  """
  on_host, shares = optimizer.on_host, optimizer.shares
  assert on_host is not None
  mesh: Any = abstract.step.sharding.mesh
  rest = without_kept(abstract)
  specs = jax.tree.map(lambda s: s.spec, shardings_of(rest))
  whole_specs = masters.readable(specs.params)
  own = lambda x, spec: masters.Halves(spec, x.low) if masters.is_halves(x) else spec
  updated = whole_specs if shares is None else shares.share_specs
  own_specs = jax.tree.map(own, specs.params, updated, is_leaf=masters.is_halves)
  near = {"params": own_specs, "opt_state": specs.opt_state, "average": specs.average}
  left: Any = Left(near, updated, *(P(),) * 3)  # pyright: ignore[reportArgumentType]
  after = dataclasses.replace(specs, **dict.fromkeys(PARTS))
  place = lambda tree: jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)
  gathers = shares is not None and not shares.parameters
  program = jax.jit(
    manual(local_step, mesh, (specs, P(None, BATCH_AXES)), (after, P(), P(), left)),
    # With `gathers` the state holds whole parameters and the result only shares of them, whose
    # shapes differ: XLA could not reuse donated memory. `HostStep.run` deletes the old ones.
    donate_argnums=() if gathers else 0,
    in_shardings=(place(specs), batch_sharding(mesh, leading=1)),
    out_shardings=place((after, P(), P(), left)),
    compiler_options=compiler_options,
  )
  whole = None
  if gathers:
    gather = manual(lambda own: gathered_again(own, shares), mesh, (own_specs,), specs.params)
    whole = jax.jit(gather, out_shardings=place(specs.params))
  rule = lambda grads, old, layer, step, norm: rule_of(optimizer, step, norm, None)(
    grads, old, layer
  )
  # XLA's options are for the devices; only where these are CPUs do they fit the host's programs.
  on_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
  options = compiler_options if on_cpu else None
  filed = bool(on_host.folder)
  return HostStep(program, abstract, rule, on_host.ahead, whole=whole, options=options, filed=filed)


class HostStep:
  """A step that `make_train_step` returns: called, traced and lowered like a jitted function.

  `trace` and `lower` give the program up to the norm of the gradients; `run` calls it, compiled,
  and completes the step.

  Args:
    program: jitted; (state `without_kept`, batch) -> (state, scalars, arrays, `Left`). It donates
      the state if `whole` is None.
    abstract: the state as `jax.ShapeDtypeStruct`s with shardings.
    rule: updates one layer; runs on the host.
    ahead: number of layers whose gradients leave the device, and whose arrays in a file are read,
      before their turn.
    whole: the ranks' updated shares of parameters -> the whole parameters that the state stores, in
      one program; None: the state stores the updated arrays themselves.
    options: XLA's options for the host's programs.
    filed: whether the arrays that the host keeps lie in a file, which threads read and write.

  Attributes:
    ahead: as given; may be changed between steps.
  """

  def __init__(
    self,
    program: Any,
    abstract: Any,
    rule: Rule,
    ahead: int,
    *,
    whole: Callable[[PyTree], PyTree] | None = None,
    options: dict[str, Any] | None = None,
    filed: bool = False,
  ):
    self._program, self._rule, self.ahead, self._whole = program, rule, ahead, whole
    self._parts, self._options = _Parts.of(abstract), options
    self._updates: dict[tuple[int, ...], Any] = {}
    self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="moments") if filed else None
    self._layers = layers_of(abstract.params)

  def trace(self, state: Any, batch: Any) -> Any:
    """`jax.stages.Traced` of the program for a whole state."""
    return self._program.trace(without_kept(state), batch)

  def lower(self, state: Any, batch: Any) -> Any:
    """`jax.stages.Lowered` of the program for a whole state."""
    return self._program.lower(without_kept(state), batch)

  def __call__(self, state: Any, batch: Any) -> tuple[Any, dict, dict]:
    """The step; compiles at the first call."""
    return self.run(self._program, state, batch)

  def run(self, program: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, dict, dict]:
    """The step with its compiled program; may return while the last layers are on their way back.

    The scalars have `update_seconds` too: the seconds that the host's part took, once the norm of
    the gradients was known; about 0 for a step that changes nothing.

    Raises:
      ConfigError: as `scmoe.training.kept.cpu`.
      StorageError: the file of moments cannot be made, read or written.
    """
    state = self._parts.keeping(state)
    passage = self._passage(state)
    before = without_kept(state)
    rest, scalars, arrays, left = program(before, batch)
    values, good = self._parts.filled(left.near, state), bool(np.asarray(left.good))
    began = time.perf_counter()
    if good:
      values = self._updated(values, left, passage)
    scalars = scalars | {"update_seconds": time.perf_counter() - began}
    parts = self._parts.structure.unflatten(values)
    if self._whole is not None:
      near = jax.tree.map(lambda x: ABSENT if is_away(x) else x, parts["params"], is_leaf=is_apart)
      _give_up(before.params)
      whole = parts | {"params": self._whole(near)}
      _give_up(near)
      parts = self._parts.structure.unflatten(
        self._parts.filled(whole, dataclasses.replace(rest, **parts))
      )
    return dataclasses.replace(rest, **parts), scalars, arrays

  def _passage(self, state: Any) -> Passage:
    """The `Passage` of a step; it begins to read the first `ahead` layers if they lie in a file."""
    parts = {name: getattr(state, name) for name in PARTS}
    values = jax.tree.leaves(parts, is_leaf=is_apart)
    members = lambda layer: self._parts.members(layer, self._parts.away)
    own = [[_holder(values[i], layer) for i in members(layer)] for layer in self._layers]
    return Passage(own, self.ahead, self._pool)

  def _updated(self, values: list[Any], left: Left, passage: Passage) -> list[Any]:
    """The new arrays of the state, in order; a `Kept` stays and gets new values."""
    parts, values = self._parts, list(values)
    step, norm = np.asarray(left.step), np.asarray(left.norm)
    grads, layers = jax.tree.leaves(left.grads), self._layers
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(left.grads)]
    of_stack = lambda layer: [
      i for i, p in enumerate(paths) if stack_of(p) == layer.stack
      and layer.index < count_of(layer.stack, grads[i])
    ]  # fmt: skip
    tree, old = jax.tree.structure(left.grads), {i: np.asarray(values[i]) for i in parts.shared}
    new_shared: list[Any] = []
    leaving: collections.deque[Any] = collections.deque()

    def send(layer: Layer) -> None:
      near = parts.members(layer, parts.near)
      arrays = [grads[i] for i in of_stack(layer)] + [values[i] for i in near]
      leaving.append(_on_way_out(arrays, layer))

    for layer in layers[: self.ahead]:
      send(layer)
    for number, layer in enumerate(layers):
      if not self.ahead:
        send(layer)
      own, near = of_stack(layer), parts.members(layer, parts.near)
      away = parts.members(layer, parts.away)
      update = self._update_of(tree, tuple(own), tuple(near), tuple(away))
      arrived, results = leaving.popleft(), []
      passage.arrive(number)
      for group, devices in enumerate(parts.groups.members):
        given = [jax.device_put(shard_of(x, devices[0]), cpu()) for x in arrived]
        new, moved, new_shared = update(
          given[: len(own)],
          given[len(own) :],
          passage.take(number, group, cpu()),
          [old[i] for i in parts.shared],
          np.uint32(layer.index),
          step,
          norm,
        )
        passage.leave(number, group, moved)
        results.append(new)
      if self.ahead and number + self.ahead < len(layers):
        send(layers[number + self.ahead])
      for i, slot, like in zip(range(len(near)), near, arrived[len(own) :]):
        part = of_devices([new[i] for new in results], like, parts.groups)
        values[slot] = _into(values[slot], part, layer.index) if layer.stack else part
      if not self.ahead:
        jax.block_until_ready([values[slot] for slot in near])
    for i, new in zip(parts.shared, new_shared):
      values[i] = _everywhere(np.asarray(new), values[i].sharding)
    return values

  def _update_of(
    self, tree: Any, own: tuple[int, ...], near: tuple[int, ...], away: tuple[int, ...]
  ) -> Any:
    """The host's program for the layers with these arrays; equal layers of a stack share it.

    Args:
      tree: structure of the gradients.
      own: places of the layer's gradients in it.
      near, away: places of the layer's arrays in the state.
    """
    key = (*own, -1, *near, -1, *away)
    if key in self._updates:
      return self._updates[key]
    parts, rule = self._parts, self._rule

    def update(
      grads: Any, here: Any, there: Any, shared: Any, index: Any, step: Any, norm: Any
    ) -> Any:
      fill = lambda count, *found: [dict(found).get(i, ABSENT) for i in range(count)]
      layer = jax.tree.unflatten(tree, fill(tree.num_leaves, *zip(own, grads)))
      given = [*zip(near, here), *zip(away, there), *zip(parts.shared, shared)]
      old = parts.structure.unflatten(fill(parts.structure.num_leaves, *given))
      changed = rule(layer, present(old), index, step, norm)
      new = parts.structure.flatten_up_to(completed(changed, old))
      return tuple([new[i] for i in places] for places in (near, away, parts.shared))

    donated = () if self._pool else 2  # values read from a file do not lie in jax's own memory
    self._updates[key] = jax.jit(update, donate_argnums=donated, compiler_options=self._options)
    return self._updates[key]


@dataclasses.dataclass(frozen=True)
class _Parts:
  """The arrays of `PARTS`, in order; an `Apart` counts as one array.

  Attributes:
    structure: of the dictionary of `PARTS`.
    stacks: for each array the name of its stack, or "".
    counts: for each array the number of its layers; 1 beside the stacks.
    leaves: the arrays of the abstract state.
    near: places of the parameters (or their upper halves) and averages in the device's memory.
    away: places of arrays that the host keeps.
    shared: places of the optimizer's arrays that the host does not keep, such as counters. They
      belong to no layer: the update of each layer reads the old ones, and the last update's results
      replace them.
    groups: this process's devices, in groups that hold the same shards of the arrays in `away`.
  """

  structure: Any
  stacks: tuple[str, ...]
  counts: tuple[int, ...]
  leaves: tuple[Any, ...]
  near: tuple[int, ...]
  away: tuple[int, ...]
  shared: tuple[int, ...]
  groups: Groups

  @staticmethod
  def of(abstract: Any) -> _Parts:
    tree = {name: getattr(abstract, name) for name in PARTS}
    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_apart)
    leaves = [leaf for _, leaf in entries]
    stacks = [stack_of(path) for path, _ in entries]
    away = [i for i, leaf in enumerate(leaves) if is_away(leaf)]
    shared = [i for i, (path, _) in enumerate(entries) if path[0].key == "opt_state"]
    shared = [i for i in shared if i not in away]
    near = [i for i in range(len(leaves)) if i not in (*away, *shared)]
    counts = tuple(map(count_of, stacks, leaves))
    found = [leaf.parts[0] if is_apart(leaf) else leaf for leaf in (leaves[i] for i in away)]
    groups = Groups(found)
    places = (tuple(near), tuple(away), tuple(shared))
    return _Parts(structure, tuple(stacks), counts, tuple(leaves), *places, groups)

  def members(self, layer: Layer, places: tuple[int, ...]) -> list[int]:
    """Those of these places whose arrays have this layer."""
    return [i for i in places if self.stacks[i] == layer.stack and layer.index < self.counts[i]]

  def keeping(self, state: Any) -> Any:
    """The state with a `Kept` wherever the host keeps an array, in memory or in a file.

    Arrays in pinned memory are copied and deleted; where `state` has `ABSENT`, there are zeros to
    begin with.
    """
    parts = {name: getattr(state, name) for name in PARTS}
    found = jax.tree.flatten(parts, is_leaf=is_apart)[0]
    absent = len(found) < len(self.leaves)
    # `ABSENT` is no leaf: if moments are absent, the paths of the other arrays tell their places.
    names = [jax.tree_util.keystr(p) for p, _ in self._entries(parts)] if absent else []
    have = dict(zip(names, found)) if absent else {}
    own = self._entries(self.structure.unflatten(self.leaves))
    values = [have.get(jax.tree_util.keystr(p), leaf) for p, leaf in own] if absent else found
    values = [
      kept(x, self.leaves[i], self.groups) if i in self.away else x for i, x in enumerate(values)
    ]
    return dataclasses.replace(state, **self.structure.unflatten(values))

  def _entries(self, tree: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_apart)

  def filled(self, near: dict[str, PyTree], state: Any) -> list[Any]:
    """All arrays in order: those of `near`, and from `state` those that the host keeps."""
    parts = {name: getattr(state, name) for name in PARTS}
    held = [x for x in jax.tree.leaves(parts, is_leaf=is_apart) if is_away(x)]
    here = [x for x in jax.tree.leaves(near, is_leaf=is_apart) if not is_away(x)]
    away, there = iter(held), iter(here)
    return [next(away) if i in self.away else next(there) for i in range(len(self.leaves))]


def _give_up(tree: PyTree) -> None:
  for x in jax.tree.leaves(tree):
    x.delete()


def _everywhere(value: np.ndarray, sharding: NamedSharding) -> Array:
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _holder(value: Any, layer: Layer) -> Any:
  one = value.parts[layer.index] if isinstance(value, Apart) else value
  assert is_kept(one)
  return one


def _on_way_out(arrays: list[Array], layer: Layer) -> list[Array]:
  """One layer's arrays, [1, ...] in a stack, on their way to pinned memory; returns at once."""
  place = lambda x: NamedSharding(x.sharding.mesh, x.sharding.spec, memory_kind=HOST)
  places = tuple(place(x) for x in arrays)
  return _taker(places, bool(layer.stack))(arrays, np.int32(layer.index))


@functools.lru_cache(maxsize=64)
def _taker(places: tuple[NamedSharding, ...], stacked: bool) -> Any:
  cut = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 1) if stacked else x
  take = lambda arrays, i: [cut(x, i) for x in arrays]
  return jax.jit(take, out_shardings=list(places))


@functools.partial(jax.jit, donate_argnums=0)
def _into(whole: Array, part: Array, index: Any) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(whole, part, index, 0)
