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
  with 16 microbatches. (Parameters that data ranks share are the exception: a rank has no room for
  a total of them all, so each microbatch's gradients are scattered at once; `_into_shares`.)
- The sums start inside the backward pass, layer by layer: while a layer's sum travels, the devices
  compute the gradients of the layers that are still to come. Only the sum of layer 1, the last one,
  has no computation beside it (SE-MoE's fused slices, arXiv 2205.10034).
- Totals are float32, because a bfloat16 total of many microbatches would round small addends away.
- The kernel that makes a gradient adds it to the total: no copy of all gradients is written.

The loss of a step is a sum over all its tokens, divided once by the number of these tokens. The
number follows from the batch alone (`Losses.counts`), so it is known before the first microbatch,
and each microbatch's gradient is computed as its part of the step's gradient. With 6 tokens in
microbatch 1 and 2 in microbatch 2 the two have the weights 6/8 and 2/8; a mean of the two means
would give each the weight 1/2.

JAX has no option to add a gradient to a total, so the totals are an argument of the losses. `added`
returns the parameters as they are; its backward rule says that the gradient *with respect to a
total* is the total plus the parameter's gradient. A `jax.vjp` of the losses then returns the new
totals, and XLA sees each addition, and each sum over devices, where the gradient is made.

Two cases need less. A parameter that no other device holds (an expert's, with as many devices as
experts) has no sum over devices; in a step of one microbatch it needs no total either. And if no
parameter has a sum over devices, the last microbatch runs in the same loop as the others.

Microbatches that run side by side are a *group*, and the loop runs one group at a time. In the
example each group is one microbatch.

`accumulate` drives this for a step. Parameters pass through this module, with their totals, before
a model reads them. `run_trunks` hands the stack of pairs to `added_by_scan` or `added_by_layer`,
and each pair's own parameters to `ready`: it calls `added`, and gathers what data ranks share. The
objective hands all other parameters to `ready_beside_pairs`. Adapters, which are small, pass
through `added` together. `scmoe.parallel.gradients` says which devices hold the same parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.batch import Batch
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
from scmoe.parallel.mesh import axis_size
from scmoe.parallel.shares import (
  AXIS,
  WHOLE,
  Share,
  StateShares,
  gathered,
  is_share,
  scattered,
  shares_in,
)

PyTree = Any

# A layer's array of at least so many elements has a total of its own. The totals of smaller arrays
# stay stacked over all layers, and one kernel adds to them.
LARGE_LAYER = 1 << 18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientTotal:
  """The sum of one parameter's gradients over this device's microbatches so far, and its options.

  A pytree: its gradient is a `GradientTotal` too, with the new total in place of the old one.

  Attributes:
    value: the total before this backward pass, float32 like the parameter, or `Apart` with one
      array per layer of a stack.
    axes: mesh axes over which the total is summed once the last group is added; () for none.
    dtype: dtype in which the total travels between devices.
    last: whether the group that is differentiated now is the step's last.
    empty: whether there was no earlier group: only the shape of `value` is then read.
    dimension: the dimension that data ranks divide, for a total with `into`.
    bucket: see `scmoe.parallel.shares.Gathering`.
    into: zeros like this rank's share of the parameter; the gradient with respect to them is this
      rank's share of the sum, and nothing is differentiated with respect to `value`. None: the
      total keeps its shape.
  """

  value: Any
  axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
  dtype: str = dataclasses.field(default="float32", metadata={"static": True})
  last: bool = dataclasses.field(default=False, metadata={"static": True})
  empty: bool = dataclasses.field(default=False, metadata={"static": True})
  dimension: int = dataclasses.field(default=WHOLE, metadata={"static": True})
  bucket: int = dataclasses.field(default=0, metadata={"static": True})
  into: Any = None


# -- the step's side ------------------------------------------------------------------------------


class Losses(Protocol):
  """The methods of an objective that `accumulate` calls, in the manual region.

  Parameters and batches are one device's shares.
  """

  def losses(
    self,
    params: Sequence[PyTree],
    totals: PyTree = None,
    *,
    router: PyTree,
    batches: Sequence[Batch],
    rngs: Sequence[Array],
    ahead: PyTree = None,
  ) -> tuple[list[dict[str, Array]], list[PyTree]]:
    """The terms of the loss, and `aux`, for each microbatch of a group (leaves [B, ...]).

    A term is a sum over the global microbatch, float32 [], the same on all devices, of which each
    device differentiates its own part (`scmoe.parallel.collectives.total`). The step divides it by
    the count of the same name. `aux` is a pytree of sums over the global microbatch, such as those
    for metrics. Terms and `aux` add up over microbatches.

    Args:
      params: the parameters, once for each microbatch: their gradients stay separate.
      totals: `GradientTotal`s of the parameters, or None. If given, the objective passes each
        parameter through a function of this module that calls `added` before it reads it.
      router: state that gradients do not train.
      batches, rngs: for each microbatch this device's share of the batch, and a typed key.
      ahead: what `look_ahead` returned.
    """
    ...

  def counts(self, batch: Batch) -> dict[str, Array]:
    """For each term the number by which the step divides it, over all devices and microbatches.

    Args:
      batch: this device's share of the step's batch, leaves [A, B, ...].
    """
    ...

  def look_ahead(
    self, params: PyTree, router: PyTree, batch: Batch, key_of: Callable[[Any], Array]
  ) -> PyTree:
    """Sums over all microbatches of the step, for losses that need them; None if none does.

    Args:
      params, router: as in `losses`.
      batch: as in `counts`.
      key_of: number of a microbatch -> its key.
    """
    ...

  def lay_out_totals(self, zeros: PyTree) -> PyTree:
    """Float32 zeros like the parameters, with `Apart` where layers add to arrays of their own."""
    ...


def accumulate(
  objective: Losses,
  params: PyTree,
  router: PyTree,
  batch: Batch,
  rng: Array,
  specs: PyTree,
  gradient_dtype: str = "float32",
  flight: int = 1,
  factor: Array | None = None,
  shares: StateShares | None = None,
) -> tuple[Array, PyTree, PyTree]:
  """Loss and gradients of a step over all its microbatches and devices, and the sum of their aux.

  Args:
    objective: gives the losses and their counts.
    params: in the dtypes in which the loss reads them; `Share`s where data ranks share them.
    router: state that gradients do not train.
    batch: this device's share, leaves [A, B, ...] of A microbatches. Microbatch i has the key `rng`
      folded with i.
    rng: random key of the step.
    specs: PartitionSpecs like the whole parameters.
    gradient_dtype: dtype in which gradients travel between devices.
    flight: number of microbatches that run side by side; if it does not divide A, they run one by
      one. The results do not depend on it.
    factor: multiplies the loss before it is differentiated, and so the gradients (`LossScaling`);
      the returned loss is without it.
    shares: says for which parameters a data rank gets only its share of the gradient; None: for
      none.

  Returns:
    The loss, float32 []; gradients like the parameters or their shares; aux, summed over the
    microbatches. Gradients are float32, but those of a single microbatch without a sum over devices
    have the parameters' dtypes.
  """
  count = jax.tree.leaves(batch)[0].shape[0]
  size = flight if count % flight == 0 else 1
  key_of = lambda number: jax.random.fold_in(rng, number)
  counts = objective.counts(batch)
  ahead = objective.look_ahead(params, router, batch, key_of)
  # A microbatch's part of the loss is about 1/A of the mean over its own tokens: too small for
  # float16's range, so a scaled loss is multiplied by A too.
  scale = 1.0 if factor is None else jnp.asarray(factor) * count
  slopes = {name: scale / jnp.maximum(number, 1) for name, number in counts.items()}
  step = _Step(objective, [params] * size, router, ahead, key_of, slopes, gradient_dtype)
  reduces = any(travels_over(spec) for spec in jax.tree.leaves(specs))
  if count == 1 and not reduces:
    (terms,), pull, (aux,) = jax.vjp(step.losses(batch, 0), step.copies, has_aux=True)
    ((grads,),) = pull(step.slopes_of([terms]))
  else:
    groups = jax.tree.map(lambda x: x.reshape(count // size, size, *x.shape[1:]), batch)
    early = count // size - reduces  # groups in the loop: not the last if it sums over devices
    results = jax.eval_shape(step.losses(_at(groups, 0), 0), step.copies)
    done, totals = step.begin(results, early)
    if early:
      items = _at(groups, slice(early)), size * jnp.arange(early)
      (done, totals), _ = jax.lax.scan(step.add_group, (done, totals), items)
    if reduces:
      done, totals = _last_group(step, groups, early, done, totals, specs, shares)
    values = jax.tree.map(lambda total: total.value, totals, is_leaf=_is_total)
    with jax.named_scope("accumulate"):
      (terms, aux), grads = done, stacked_again(values)
  if factor is not None and count > 1:
    grads = jax.tree.map(lambda g: g / count, grads)
  return divided(terms, counts).astype(jnp.float32), grads, aux


@dataclasses.dataclass(frozen=True)
class _Step:
  """The arguments that all groups of a step have in common.

  Attributes:
    objective, router: see `accumulate`.
    copies: the parameters, once for each microbatch of a group.
    ahead: what `Losses.look_ahead` returned.
    key_of: number of a microbatch -> its key.
    slopes: gradient of the loss with respect to each term: 1 / count, times the loss scale.
    dtype: dtype in which gradients travel.
  """

  objective: Losses
  copies: list[PyTree]
  router: PyTree
  ahead: PyTree
  key_of: Callable[[Any], Array]
  slopes: dict[str, Array]
  dtype: str

  def losses(self, group: Batch, first: Any) -> Callable[..., Any]:
    """`Losses.losses` of one group, as a function of (copies, totals).

    Args:
      group: the group's microbatches, leaves [size, B, ...].
      first: number of the group's first microbatch in the step.
    """
    numbers = range(len(self.copies))
    batches = [_at(group, i) for i in numbers]
    rngs = [self.key_of(first + i) for i in numbers]
    given = {"router": self.router, "batches": batches, "rngs": rngs, "ahead": self.ahead}
    return functools.partial(self.objective.losses, **given)

  def begin(self, results: tuple[list[Any], list[Any]], early: int) -> tuple[Any, PyTree]:
    """The zeros with which a step begins: ((terms, aux) of one microbatch, totals).

    Args:
      results: shapes of what `losses` gives.
      early: number of groups that the loop runs.
    """
    with jax.named_scope("accumulate"):
      shapes = tuple(each[0] for each in results)
      done, zeros = jax.tree.map(_zeros, (shapes, _bare(self.copies[0])))
      zeros = self.objective.lay_out_totals(zeros) if early else zeros
    total = lambda zero: GradientTotal(zero, dtype=self.dtype)
    return done, jax.tree.map(total, zeros, is_leaf=is_apart)

  def add_group(self, carry: PyTree, item: tuple[Batch, Array]) -> tuple[PyTree, None]:
    """Body of the loop over groups: adds a group's results and gradients to ((terms, aux), totals).

    Args:
      carry: the sums over the groups before.
      item: the group, and the number of its first microbatch.
    """
    done, totals = carry
    losses = functools.partial(self.losses(*item), self.copies)
    terms, pull, aux = jax.vjp(losses, totals, has_aux=True)
    (totals,) = pull(self.slopes_of(terms))
    return (_added_up(list(zip(terms, aux)), done), totals), None

  def slopes_of(self, terms: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """The gradient of the loss with respect to each microbatch's terms, in their dtypes."""
    slope = lambda name, term: jnp.asarray(self.slopes[name], term.dtype)
    return [{name: slope(name, term) for name, term in each.items()} for each in terms]


def _last_group(
  step: _Step,
  groups: Batch,
  early: int,
  done: PyTree,
  totals: PyTree,
  specs: PyTree,
  shares: StateShares | None,
) -> tuple[PyTree, PyTree]:
  """(terms, aux) and totals after the last group, whose backward pass sums over devices."""
  group = _at(groups, -1)
  if early:
    # XLA unrolls a loop of one iteration; without this barrier it would then interleave the loop's
    # group with the last group.
    group, (done, totals) = barrier((group, (done, totals)))
  given = for_last_group(totals, specs, step.dtype, empty=not early)
  if shares is not None:
    given = _into_shares(given, step.copies[0], shares)
  losses = step.losses(group, early * len(step.copies))
  terms, pull, aux = jax.vjp(losses, step.copies, given, has_aux=True)
  grads, found = pull(step.slopes_of(terms))
  return _added_up(list(zip(terms, aux)), done), _completed(found, grads, totals)


def _at(tree: PyTree, index: Any) -> PyTree:
  return jax.tree.map(lambda x: x[index], tree)


def divided(terms: dict[str, Array], counts: dict[str, Array]) -> Array:
  """A loss: the sum of its terms, each divided by the step's count of the same name, float32 [].

  A count below 1 divides as 1: without tokens the loss is 0.
  """
  parts = [term / jnp.maximum(counts[name], 1) for name, term in terms.items()]
  return functools.reduce(jnp.add, parts)


def _zeros(like: Any) -> Array:
  return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))


def _added_up(new: Sequence[PyTree], done: PyTree) -> PyTree:
  # Each array is cast to float32 where it is added, so that XLA writes no float32 copy of it.
  with jax.named_scope("accumulate"):
    add = lambda total, one: jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one)
    return functools.reduce(add, new, done)


def for_last_group(totals: PyTree, specs: PyTree, dtype: str, *, empty: bool) -> PyTree:
  """Totals for the last group of a step; None for a parameter that needs none.

  A parameter needs none if its gradient is neither added to earlier ones nor summed over devices.

  Args:
    totals: the totals of the earlier groups.
    specs: PartitionSpecs like the parameters.
    dtype: dtype in which gradients travel.
    empty: whether there were no earlier groups: `totals` then only has the shapes.
  """

  def prepare(spec: Any, total: GradientTotal) -> GradientTotal | None:
    axes = travels_over(spec)
    if empty and not axes:
      return None
    return GradientTotal(total.value, axes, dtype, last=True, empty=empty)

  return jax.tree.map(prepare, specs, totals)


def _into_shares(totals: PyTree, params: PyTree, shares: StateShares) -> PyTree:
  """Prepares the last group's totals of gradients of which a data rank gets only its share.

  If ranks share the parameter too, the total is a share from the beginning: each microbatch's
  gradient is scattered before it is added. If they share only its moments, the last group's
  backward pass scatters the total (`GradientTotal.into`). Other totals stay as they are.
  """
  bucket, ranks = shares.how.bucket, axis_size(AXIS)

  def tell(dimension: int, total: GradientTotal | None, param: Any) -> GradientTotal | None:
    if dimension == WHOLE or total is None:
      return total
    if is_share(param):
      others = tuple(axis for axis in total.axes if axis != AXIS)
      return dataclasses.replace(total, axes=others, bucket=bucket)
    shape = list(param.shape)
    shape[dimension] //= ranks
    into = jnp.zeros(shape, jnp.promote_types(param.dtype, jnp.float32))
    value = None if total.empty else total.value
    return dataclasses.replace(total, value=value, into=into, dimension=dimension, bucket=bucket)

  return jax.tree.map(tell, shares.dimensions, totals, params)


def _bare(params: PyTree) -> PyTree:
  """The parameters with every `Share` replaced by its array."""
  return jax.tree.map(lambda x: x.value if is_share(x) else x, params, is_leaf=is_share)


def _completed(found: PyTree, grads: list[PyTree], zeros: PyTree) -> PyTree:
  """All parameters' totals after the last group.

  Args:
    found: the gradients with respect to the totals of `for_last_group`; None if there was no total.
    grads: for each microbatch the parameters' gradients, read only where `found` is None.
    zeros: like `found`, the zeros to which such gradients are added.
  """

  def complete(found: Any, zero: GradientTotal, *grads: Array) -> GradientTotal:
    if found is None:
      return GradientTotal(_added_up(grads, zero.value))
    return found if found.into is None else GradientTotal(found.into)

  absent_or_total = lambda x: x is None or _is_total(x)
  return jax.tree.map(complete, found, zeros, *map(_bare, grads), is_leaf=absent_or_total)


# -- the model's side -----------------------------------------------------------------------------


def added(copies: Sequence[PyTree], totals: PyTree) -> list[PyTree]:
  """Returns the parameters; the backward pass adds their gradients to totals.

  The gradient with respect to a total is the total plus the gradients of all copies; in the last
  group it is also summed over the devices on `GradientTotal.axes`. Parameters with a total have no
  gradient of their own. A `Share` with a total is gathered, and its gradient scattered over the
  data ranks.

  Args:
    copies: the parameters, once for each microbatch of a group, before the model reads them.
    totals: a tree like one copy, of `GradientTotal`s; None for a parameter whose gradient is taken
      as usual, or in place of the whole tree.
  """
  found = _total_leaves(totals)
  here = [i for i, total in enumerate(found) if total is not None]
  if not here:
    return list(copies)
  leaves, structures = zip(*(jax.tree.flatten(own, is_leaf=is_share) for own in copies))
  assert all(len(own) == len(found) for own in leaves), "the totals are those of other parameters"
  picked: Any = _added([[own[i] for i in here] for own in leaves], [found[i] for i in here])
  for own, replaced in zip(leaves, picked):
    for i, leaf in zip(here, replaced):
      own[i] = leaf
  return [jax.tree.unflatten(tree, own) for tree, own in zip(structures, leaves)]


def ready(copies: Sequence[PyTree], totals: PyTree) -> list[PyTree]:
  """`added`, with all `Share`s gathered: the parameters of one pair, as it reads them.

  Args:
    copies, totals: as of `added`.
  """
  return _all_gathered(added(copies, totals), lambda _: True)


def ready_beside_pairs(copies: Sequence[PyTree], totals: PyTree = None) -> list[PyTree]:
  """`ready` for all parameters of a model except those of its pairs, which are left unchanged.

  The loop over the pairs calls `ready` for those.

  Args:
    copies: a model's parameters, once for each microbatch of a group.
    totals: see `added`.
  """
  own = copies if totals is None else added(copies, beside_pairs(totals))
  return _all_gathered(own, lambda path: not _of_pairs(path))


def _all_gathered(copies: Sequence[PyTree], wanted: Callable[[Any], bool]) -> list[PyTree]:
  """The copies with whole arrays in place of `Share`s whose path is `wanted`.

  Copies have equal values, so the shares of the first one are gathered, for all of them.
  """
  if not shares_in(copies[0]):
    return list(copies)
  flat, tree = jax.tree_util.tree_flatten_with_path(copies[0], is_leaf=is_share)
  here = [i for i, (path, leaf) in enumerate(flat) if is_share(leaf) and wanted(path)]
  wholes = gathered([flat[i][1] for i in here])
  results = []
  for own in copies:
    leaves = jax.tree.leaves(own, is_leaf=is_share)
    for i, whole in zip(here, wholes):
      leaves[i] = whole
    results.append(jax.tree.unflatten(tree, leaves))
  return results


def added_by_scan(copies: Sequence[PyTree], totals: PyTree) -> tuple[list[PyTree], PyTree]:
  """(copies, totals) of a stack of layers for a scan, whose body calls `added` with its slices.

  Before the last group the scan stacks the layers' gradients, and this function adds the stack to
  the totals: the body gets None for totals. In the last group the body adds its own layer's
  gradients, so that their sum over devices starts there. If data ranks share parameters, the body
  adds in every group, because it gathers the shares and scatters their gradients.

  Args:
    copies, totals: see `added`; leaves [L, ...].
  """
  if _before_last(totals) and not shares_in(copies[0]):
    return added(copies, totals), None
  return list(copies), totals


def added_by_layer(
  copies: Sequence[PyTree], totals: PyTree, count: int
) -> tuple[list[list[PyTree]], list[PyTree]]:
  """(copies, totals) of every layer of a stack, for layers that are written out.

  In the last group, and in every group if data ranks share parameters, each layer calls `added`
  with its own totals, as the scan's body does after `added_by_scan`. In other groups this function
  adds the gradients: to each layer's array where the total is `Apart`, else to the stack. The
  layers then get None for totals.

  Args:
    copies: the stack, once for each microbatch of a group; leaves [L, ...] or `Apart`.
    totals: see `added`.
    count: L.
  """
  if _before_last(totals) and not shares_in(copies[0]):
    trees = jax.tree.structure(copies[0])
    like_copies = jax.tree.unflatten(trees, _total_leaves(totals))
    own: Any = _added_to_stack(like_copies, list(copies), count)
    return own, [None] * count
  split: Any = unstacked(list(copies), count), unstacked(totals, count)
  return split


def beside_pairs(totals: PyTree) -> PyTree:
  """The totals of a model's parameters, with None for those of its pairs (`Trunk.stages`).

  The loop over the pairs adds to the totals of the pairs; one call of `added` serves all others.

  Args:
    totals: a tree like the model's parameters, of `GradientTotal`s.
  """

  def keep(path: tuple, total: GradientTotal | None) -> GradientTotal | None:
    return None if _of_pairs(path) else total

  is_leaf = lambda leaf: leaf is None or _is_total(leaf)
  return jax.tree_util.tree_map_with_path(keep, totals, is_leaf=is_leaf)


def _of_pairs(path: Any) -> bool:
  return any(getattr(key, "key", None) == "stages" for key in path)


def large_layers_apart(zeros: PyTree, count: int) -> PyTree:
  """Zeros of a stack's totals, with one array per layer if a layer has `LARGE_LAYER` elements.

  The kernel that makes a layer's gradient then adds it in place, and reads no other layer's total.

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
def _added(copies: list[list[Any]], totals: list[GradientTotal]) -> list[list[Array]]:
  return _all_gathered(copies, lambda _: True)


def _added_fwd(copies, totals):
  unread = lambda total: dataclasses.replace(total, value=None) if total.empty else total
  divided_at = [Share(None, x.dimension if is_share(x) else WHOLE) for x in copies[0]]
  # This does not call `_added`: policies of rematerialisation could not see the gathers inside it.
  whole = _all_gathered(copies, lambda _: True)
  return whole, (divided_at, [unread(total) for total in totals])


def _added_bwd(kept, bars):
  divided_at, totals = kept
  with jax.named_scope("gradients" if any(total.last for total in totals) else "accumulate"):
    wide = [
      [bar.astype(jnp.promote_types(bar.dtype, jnp.float32)) for bar in copy] for copy in bars
    ]
    values = [total.value for total in totals]
    here = [i for i, divided in enumerate(divided_at) if divided.dimension != WHOLE]
    addends = [functools.reduce(jnp.add, [copy[i] for copy in wide]) for i in here]
    dimensions = [divided_at[i].dimension for i in here]
    for i, share in zip(here, _scattered(addends, dimensions, [totals[i] for i in here])):
      values[i] = share if values[i] is None else values[i] + share
    for copy in wide:
      for i in set(range(len(totals))) - set(here):
        values[i] = copy[i] if values[i] is None else values[i] + copy[i]
    return None, _reduced(totals, values)


def _reduced(totals: list[GradientTotal], values: list[Array]) -> list[GradientTotal]:
  """The gradients with respect to totals: this device's new totals, summed over `axes`.

  A total with `into` is scattered over the data ranks, and summed over the other axes.
  """
  here = [i for i, total in enumerate(totals) if total.into is not None]
  ending = [totals[i] for i in here]
  shares = _scattered([values[i] for i in here], [total.dimension for total in ending], ending)
  found = []
  for i, (total, value) in enumerate(zip(totals, values)):
    if total.into is None:
      value = sum_over_devices(value, total.axes, total.dtype)
      found.append(dataclasses.replace(total, value=value))
    else:
      others = tuple(axis for axis in total.axes if axis != AXIS)
      share = sum_over_devices(shares[here.index(i)], others, total.dtype)
      found.append(dataclasses.replace(total, value=None, into=share))
  return found


def _scattered(
  addends: Sequence[Array], dimensions: Sequence[int], totals: Sequence[GradientTotal]
) -> list[Array]:
  if not addends:
    return []
  return scattered(addends, dimensions, totals[0].dtype, totals[0].bucket)


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
