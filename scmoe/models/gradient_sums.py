"""How the gradients of one training step are made, added and reduced over devices.

Example: three layers, a step of two microbatches, two devices that hold the same weights. On device
0 one weight of each layer has these gradients:

                  layer 1   layer 2   layer 3
  microbatch 1       1         2         3
  microbatch 2      10        20        30

The backward pass of microbatch 1 runs from layer 3 to layer 1. It adds each gradient to a float32
total of this device, which began at 0: after it the totals are 1, 2, 3, and nothing has travelled.
Microbatch 2 is the step's last. Its backward pass adds 30 to layer 3's total, and as soon as that
is 33 the sum over both devices can start, while the devices compute layer 2's gradient. Layer 2
follows with 22, layer 1 with 11. If device 1 has the same numbers, both end with 22, 44, 66.

Why so:
- One sum over devices per step instead of one per microbatch: half the traffic here, a sixteenth
  with 16 microbatches.
- It starts inside the backward pass, layer by layer, so that the layers that are still to come hide
  it. Only layer 1's has nothing left beside it (SE-MoE's fused slices, arXiv 2205.10034).
- Totals are float32, because bfloat16 gradients of many microbatches lose what they add.
- The kernel that makes a gradient adds it to the total: no copy of all gradients is written.

`jax.grad` has no option for this, so the totals are an argument of the loss. `added` returns the
parameters as they are; its backward rule says that the gradient *with respect to a total* is the
total plus the parameter's gradient. `jax.grad(losses, 3)` then returns the new totals, and XLA sees
each addition, and each sum over devices, at the place where the gradient is made.

Two cases need less. A parameter that no other device holds (an expert, with as many devices as
experts) has no sum over devices; in a step of one microbatch it needs no total either. And where
nothing travels at all, the last microbatch runs in the same loop as the others.

`sum_gradients` drives this for a step; models call `added`, `added_by_scan` or `added_by_layer` on
the parameters they are about to read. `scmoe.parallel.gradients` says which devices hold the same
parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.models.stacked import (
  Apart,
  each_layer,
  is_apart,
  padded_stack,
  split_layers,
  stacked_again,
  unstacked,
)
from scmoe.parallel.barriers import barrier
from scmoe.parallel.gradients import sum_over_devices, travels_over

PyTree = Any
Losses = Callable[[list[PyTree], PyTree, Any, PyTree], tuple[Array, list[PyTree]]]

# Elements of one layer's array from which its total is an array of its own. Smaller ones of all
# layers stay stacked and share one kernel.
LARGE_LAYER = 1 << 18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientTotal:
  """What this device's microbatches have added up for one parameter.

  A pytree with one child: `jax.grad` with respect to it gives a `GradientTotal` with the new value.

  Attributes:
    value: float32 like the parameter, or `Apart` with one array per layer of a stack.
    axes: mesh axes over which the total is summed once the last microbatch is added; () for none.
    dtype: in which it travels.
    last: the microbatches that are differentiated now are the step's last.
    empty: there were no earlier microbatches: `value` has the shape and is not read.
  """

  value: Any
  axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
  dtype: str = dataclasses.field(default="float32", metadata={"static": True})
  last: bool = dataclasses.field(default=False, metadata={"static": True})
  empty: bool = dataclasses.field(default=False, metadata={"static": True})


# -- the step's side ------------------------------------------------------------------------------


def sum_gradients(
  losses: Losses,
  params: PyTree,
  specs: PyTree,
  groups: PyTree,
  *,
  size: int = 1,
  dtype: str = "float32",
  layout: Callable[[PyTree], PyTree] = lambda totals: totals,
) -> tuple[PyTree, PyTree]:
  """Results and gradients of a step's microbatches, summed over microbatches and devices.

  Args:
    losses: (copies of the parameters, one per microbatch; microbatches of a group; number of its
      first microbatch; totals or None) -> (sum of their losses, result of each). Each parameter
      goes through one of this module's functions with its totals before it is read.
    params: in the types in which the losses read them.
    specs: PartitionSpecs like the parameters.
    groups: leaves [G, size, ...]: groups of microbatches that run side by side.
    size: microbatches of a group.
    dtype: in which gradients travel between devices.
    layout: float32 zeros like the parameters -> the same with `Apart` where layers add to arrays
      of their own.

  Returns:
    the sum of the results, and gradients like the parameters: float32; in the parameters' types
    for a single microbatch without a sum over devices.
  """
  number = jax.tree.leaves(groups)[0].shape[0]
  copies, group = [params] * size, lambda which: jax.tree.map(lambda x: x[which], groups)
  differentiate = jax.grad(losses, (0, 3), has_aux=True)
  reduces = any(travels_over(spec) for spec in jax.tree.leaves(specs))
  if number * size == 1 and not reduces:
    ((grads,), _), (result,) = differentiate(copies, group(0), 0, None)
    return result, grads
  early = number - reduces  # groups before the one whose backward pass reduces
  shapes = jax.eval_shape(losses, copies, group(0), 0, None)[1][0]
  with jax.named_scope("accumulate"):
    done, zeros = jax.tree.map(_zeros, (shapes, params))
    totals = jax.tree.map(GradientTotal, layout(zeros) if early else zeros, is_leaf=is_apart)

  def add_group(carry: PyTree, item: tuple[PyTree, Array]) -> tuple[PyTree, None]:
    done, totals = carry
    totals, results = jax.grad(losses, 3, has_aux=True)(copies, *item, totals)
    return (_added_up(results, done), totals), None

  if early:
    items = group(slice(early)), size * jnp.arange(early)
    (done, totals), _ = jax.lax.scan(add_group, (done, totals), items)
  if reduces:
    last = group(-1)
    if early:
      # XLA unrolls a loop of one iteration, and would then mix its group with the last one.
      last, (done, totals) = barrier((last, (done, totals)))
    given = for_last_group(totals, specs, dtype, empty=not early)
    (grads, found), results = differentiate(copies, last, (number - 1) * size, given)
    done, totals = _added_up(results, done), _completed(found, grads, totals)
  with jax.named_scope("accumulate"):
    values = jax.tree.map(lambda total: total.value, totals, is_leaf=_is_total)
    return done, stacked_again(jax.tree.map(lambda g: g / (number * size), values))


def _zeros(like: Any) -> Array:
  return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))


def _added_up(new: Sequence[PyTree], done: PyTree) -> PyTree:
  # Each is widened as it is added, so that no float32 copy of it is written.
  with jax.named_scope("accumulate"):
    add = lambda total, one: jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one)
    return functools.reduce(add, new, done)


def for_last_group(totals: PyTree, specs: PyTree, dtype: str, *, empty: bool) -> PyTree:
  """Totals for the last group of a step; None for a parameter that needs none.

  Args:
    totals: of the earlier groups.
    specs: PartitionSpecs like the parameters.
    dtype: in which gradients travel.
    empty: there were no earlier groups: `totals` only has the shapes.
  """

  def prepare(spec: Any, total: GradientTotal) -> GradientTotal | None:
    axes = travels_over(spec)
    if empty and not axes:
      return None
    return GradientTotal(total.value, axes, dtype, last=True, empty=empty)

  return jax.tree.map(prepare, specs, totals)


def _completed(found: PyTree, grads: list[PyTree], zeros: PyTree) -> PyTree:
  """All totals: those found, and the plain gradients of the parameters that had none."""

  def complete(found: Any, zero: GradientTotal, *grads: Array) -> GradientTotal:
    return GradientTotal(_added_up(grads, zero.value)) if found is None else found

  absent_or_total = lambda x: x is None or _is_total(x)
  return jax.tree.map(complete, found, zeros, *grads, is_leaf=absent_or_total)


# -- the model's side -----------------------------------------------------------------------------


def added(copies: Sequence[PyTree], totals: PyTree) -> list[PyTree]:
  """The same parameters; their gradients are added to their totals, and reduced if it is time.

  The gradient with respect to a total is the total plus the gradients of all copies, summed over
  `GradientTotal.axes`. Parameters with a total have no gradient of their own.

  Args:
    copies: the parameters, once for each microbatch of a group, before they are read.
    totals: like one of them, of `GradientTotal`s; None for a parameter whose gradient is taken as
      usual, or for all of them.
  """
  found = _total_leaves(totals)
  here = [i for i, total in enumerate(found) if total is not None]
  if not here:
    return list(copies)
  leaves, structures = zip(*map(jax.tree.flatten, copies))
  assert all(len(own) == len(found) for own in leaves), "the totals are those of other parameters"
  picked: Any = _added([[own[i] for i in here] for own in leaves], [found[i] for i in here])
  for own, replaced in zip(leaves, picked):
    for i, leaf in zip(here, replaced):
      own[i] = leaf
  return [jax.tree.unflatten(tree, own) for tree, own in zip(structures, leaves)]


def added_by_scan(copies: Sequence[PyTree], totals: PyTree) -> tuple[list[PyTree], PyTree]:
  """(copies, totals) of a stack of layers for a scan, whose body calls `added` with its slices.

  Before the last group the scan stacks the layers' gradients and this function adds the stack, so
  that the body gets None for totals; in the last group the body adds and reduces its own layer's.
  """
  if _before_last(totals):
    return added(copies, totals), None
  return list(copies), totals


def added_by_layer(
  copies: Sequence[PyTree], totals: PyTree, count: int
) -> tuple[list[list[PyTree]], list[PyTree]]:
  """(copies, totals) of every layer of a stack, for layers that are written out.

  As of `added_by_scan`, each layer calls `added` with its own. Before the last group this function
  adds: to each layer's array where the total is `Apart`, else to the stack.

  Args:
    copies: leaves [L, ...] or `Apart`.
    totals: like one of them; leaves may be None, and so may all.
    count: L.
  """
  if _before_last(totals):
    trees = jax.tree.structure(copies[0])
    like_copies = jax.tree.unflatten(trees, _total_leaves(totals))
    own: Any = _added_to_stack(like_copies, list(copies), count)
    return own, [None] * count
  split: Any = unstacked(list(copies), count), unstacked(totals, count)
  return split


def large_layers_apart(zeros: PyTree, count: int) -> PyTree:
  """Zeros of a stack's totals, with one array per layer where layers are large.

  A layer's kernel then adds to its own array in place and reads nothing else.

  Args:
    zeros: leaves [L, ...].
    count: L.
  """
  return split_layers(zeros, count, keep=lambda _, x: x.size < LARGE_LAYER * count)


def _is_total(leaf: Any) -> bool:
  return isinstance(leaf, GradientTotal)


def _total_leaves(totals: PyTree) -> list[GradientTotal | None]:
  return jax.tree.leaves(totals, is_leaf=lambda leaf: leaf is None or _is_total(leaf))


def _before_last(totals: PyTree) -> bool:
  return any(total is not None and not total.last for total in _total_leaves(totals))


@jax.custom_vjp
def _added(copies: list[list[Array]], totals: list[GradientTotal]) -> list[list[Array]]:
  return copies


def _added_fwd(copies, totals):
  unread = lambda total: dataclasses.replace(total, value=None) if total.empty else total
  return copies, [unread(total) for total in totals]


def _added_bwd(totals, bars):
  with jax.named_scope("gradients" if any(total.last for total in totals) else "accumulate"):
    values = [total.value for total in totals]
    for copy in bars:
      wide = [bar.astype(jnp.promote_types(bar.dtype, jnp.float32)) for bar in copy]
      values = [w if value is None else value + w for value, w in zip(values, wide)]
    reduce = lambda total, value: dataclasses.replace(
      total, value=sum_over_devices(value, total.axes, total.dtype)
    )
    return None, [reduce(total, value) for total, value in zip(totals, values)]


_added.defvjp(_added_fwd, _added_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _added_to_stack(totals: PyTree, copies: list[PyTree], count: int) -> list[list[PyTree]]:
  return each_layer(copies, count)


def _added_to_stack_bwd(count: int, totals: PyTree, bars: list[list[PyTree]]) -> Any:
  del count

  def add(total: GradientTotal, *layers: Array) -> GradientTotal:
    if is_apart(total.value):
      values = (own + layer.astype(own.dtype) for own, layer in zip(total.value.parts, layers))
      return dataclasses.replace(total, value=Apart(tuple(values)))
    return dataclasses.replace(total, value=total.value + padded_stack(total.value, *layers))

  with jax.named_scope("accumulate"):
    for copy in zip(*bars):
      totals = jax.tree.map(add, totals, *copy, is_leaf=_is_total)
    return totals, None


_added_to_stack.defvjp(
  lambda totals, copies, count: (each_layer(copies, count), totals), _added_to_stack_bwd
)
