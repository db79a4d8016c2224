"""Places arrays of the state in the host's memory (`mesh.moments_in`, `mesh.experts_in`), by layer.

In a step only the update reads the optimizer's moments and every `Halves.low`
(`scmoe.training.masters`). They can stay in pinned memory of the host, from which a GPU copies at
the full speed of its link. A stack's array [L, ...] is then stored as an `Apart` of L arrays
[1, ...]: XLA copies whole arrays asynchronously, but not slices of them. Checkpoints hold the
stack, so that they load in every placement. If the host computes the update, these arrays lie in
its ordinary memory (`scmoe.training.kept`) or, where `in_files` marks them, in a file.

With AdamW's float32 moments, no average and `mesh.shard_state=none`, the device keeps 4 bytes a
parameter instead of 12, or, where parameters are stored in halves, 2. Of a routed expert's matrices
it keeps nothing with `mesh.experts_in=host`, but the expert's biases stay. `mesh.moments_kept`
leaves moments and lower halves of the last layers on the device, those of experts included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from scmoe.models.stacked import Apart, is_apart, leading_dimensions
from scmoe.offload.memory import HOST
from scmoe.training import masters
from scmoe.training.filed import InFile, Room, is_in_file
from scmoe.training.host_arrays import is_made, lies_on_host, made_on_host, shard_of
from scmoe.training.kept import Groups, cpu, filed, is_kept, whole_stack
from scmoe.training.masters import Halves, is_halves
from scmoe.training.pieced import is_pieced

PyTree = Any


def laid_out(
  params: PyTree,
  opt_state: PyTree,
  tx: optax.GradientTransformation,
  kept: int = 0,
  *,
  experts: bool = False,
) -> Any:
  """(parameters, optimizer's state) with moments and lower halves placed in the host's memory.

  Each of these that belongs to a stack becomes an `Apart`; its last `kept` layers, but never the
  first layer, stay on the device.

  Args:
    params, opt_state: `jax.ShapeDtypeStruct`s with NamedShardings, stacks whole.
    tx: the transformation to which the state belongs; says which of its arrays are moments.
    kept: see `scmoe.training.streamed_update.OnHost`.
    experts: whether the matrices of all layers' experts are placed there, too, as `Apart`s.
  """

  def place(path: Any, x: Any) -> Any:
    read = lambda x: _away(path, x, 0) if experts and _is_of_experts(path, x) else x
    return Halves(read(x.high), _away(path, x.low, kept)) if is_halves(x) else read(x)

  params = jax.tree_util.tree_map_with_path(place, params, is_leaf=is_halves)
  absent = lambda leaf: isinstance(leaf, optax.MaskedNode)
  moment = optax.tree_map_params(
    tx,
    lambda leaf: leaf if absent(leaf) else True,
    opt_state,
    transform_non_params=lambda _: False,
    is_leaf=absent,
  )
  lay = lambda path, x, goes: _away(path, x, kept) if goes else x
  return params, jax.tree_util.tree_map_with_path(lay, opt_state, moment)


def _is_of_experts(path: Any, x: Any) -> bool:
  """Whether a parameter is a stack of matrices of experts, [L, E, ...]; their biases are small."""
  names = [getattr(key, "key", None) for key in path]
  return "experts" in names and leading_dimensions(path) == 1 and len(x.shape) > 3


def in_files(tree: PyTree, folder: str) -> PyTree:
  """An abstract tree in which all that `laid_out` placed in the host's memory lies in a file.

  Args:
    tree: from `laid_out`.
    folder: of the file.
  """
  away = [x for x in jax.tree.leaves(tree) if lies_on_host(x)]
  room, groups = Room(folder), functools.cache(lambda: Groups(away))
  mark = lambda x: InFile(tuple(x.shape), x.dtype, x.sharding, room, groups)
  return jax.tree.map(lambda x: mark(x) if lies_on_host(x) else x, tree)


def _away(path: Any, x: Any, kept: int) -> Any:
  place = NamedSharding(x.sharding.mesh, x.sharding.spec, memory_kind=HOST)
  if not leading_dimensions(path):
    return x.update(sharding=place)
  count, shape = x.shape[0], (1, *x.shape[1:])
  leave = max(1, count - kept)
  gone, stays = x.update(shape=shape, sharding=place), x.update(shape=shape)
  return Apart((gone,) * leave + (stays,) * (count - leave))


def made_on_cpu(make: Callable[[], PyTree]) -> PyTree:
  """The arrays that `make` makes by a program for jax's CPU, as numpy arrays."""
  with jax.default_device(cpu("experts_in")):
    return jax.device_get(jax.jit(make)())


def taken_over(params: PyTree, like: PyTree) -> PyTree:
  """Parameters stored, placed and divided like those of a state.

  Args:
    params: float32 arrays in any memory, or numpy arrays, stacks whole.
    like: a state's parameters as `jax.ShapeDtypeStruct`s, from `laid_out`, or stacks whole.
  """

  def place(x: Any, wanted: Any) -> Any:
    if is_made(x) or not lies_on_host(wanted):
      return jax.device_put(x, wanted.sharding)
    return made_on_host(x.shape, wanted.sharding, lambda index, _: x[index])

  whole = masters.to_float32(joined(like))
  found = divided(masters.like(jax.tree.map(place, params, whole), like), like)
  return jax.device_put(found, jax.tree.map(lambda x: x.sharding, like))


def joined(tree: PyTree) -> PyTree:
  """The tree with one array [L, ...] in the host's memory in place of each `Apart`.

  Works on a state's arrays and on an abstract state. The host copies the arrays of an `Apart`, and
  every `Kept` in memory; one in a file becomes a `Pieced`, which reads it when it is asked to.
  """
  whole = lambda x: _stack(x.parts) if is_apart(x) else x.whole() if is_kept(x) else x
  return jax.tree.map(whole, tree, is_leaf=is_apart)


def divided(tree: PyTree, wanted: PyTree) -> PyTree:
  """The inverse of `joined`: an `Apart` wherever `wanted` has one. No `Kept` in memory is made.

  Args:
    tree: arrays, in the host's memory where `wanted` has an `Apart`; or traced values; or `Pieced`
      objects.
    wanted: from `laid_out` or `in_files`; its marks of absent arrays stay.
  """
  absent = lambda x: isinstance(x, optax.MaskedNode)
  leaves, structure = jax.tree.flatten(wanted, is_leaf=lambda x: is_apart(x) or absent(x))
  arrays = structure.flatten_up_to(tree)

  def cut(x: Any, like: Any) -> Any:
    if absent(like):
      return like
    if is_pieced(x):
      return Apart(x.parts) if is_apart(like) else x.parts[0]
    if is_made(x) and is_in_file(like):
      return filed(x, like).parts[0]
    return _layers(x, like) if is_apart(like) and not is_apart(x) else x

  return structure.unflatten(map(cut, arrays, leaves))


def _stack(parts: tuple[Any, ...]) -> Any:
  first, shape = parts[0], (len(parts), *parts[0].shape[1:])
  if is_kept(first):
    return whole_stack(parts)
  if is_in_file(first):
    return first.update(shape=shape, layers=len(parts))
  if not is_made(first):
    return first.update(shape=shape)
  whole = lambda index, device: np.concatenate([shard_of(part, device) for part in parts])
  return made_on_host(shape, first.sharding, whole)


def _layers(x: Any, like: Apart) -> Apart:
  if not is_made(x):
    return Apart(tuple(x[i : i + 1] for i in range(len(like.parts))))
  if is_in_file(like.parts[0]):
    first, count = like.parts[0], len(like.parts)
    return Apart(filed(x, first.update(shape=(count, *first.shape[1:]), layers=count)).parts)
  layer = lambda i: lambda index, device: shard_of(x, device)[i : i + 1]
  parts = [made_on_host(part.shape, part.sharding, layer(i)) for i, part in enumerate(like.parts)]
  return Apart(tuple(jax.device_put(x, part.sharding) for x, part in zip(parts, like.parts)))
