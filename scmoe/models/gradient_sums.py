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
  with 16 microbatches. (Parameters that ranks share are the exception: a rank has no room for
  a total of them all, so each group's gradients are scattered at once; `_into_shares`.)
- The sums start inside the backward pass, layer by layer: while a layer's sum travels, the devices
  compute the gradients of the layers that are still to come. Only the sum of layer 1, the last one,
  has no computation beside it (SE-MoE's fused slices, arXiv 2205.10034). In a language model that
  is the embedding; its gradient may travel as rows (`scmoe.models.row_gradients`).
- Totals are float32, because a bfloat16 total of many microbatches would round small addends away.
- The kernel that makes a gradient adds it to the total: no copy of all gradients is written. A scan
  over layers hands the totals from layer to layer, so that each adds in place (`Turn` of
  `scmoe.models.gradient_totals`).

The loss of a step is a sum over all its tokens, divided once by the number of these tokens. The
number follows from the batch alone (`Losses.counts`), so it is known before the first microbatch,
and each microbatch's gradient is computed as its part of the step's gradient. With 6 tokens in
microbatch 1 and 2 in microbatch 2 the two have the weights 6/8 and 2/8; a mean of the two means
would give each the weight 1/2.

JAX has no option to add a gradient to a total, so the totals are an argument of the losses
(`scmoe.models.gradient_totals`): the gradient *with respect to a total* is the total plus the
parameter's gradient. A `jax.vjp` of the losses then returns the new totals, and XLA sees each
addition, and each sum over devices, where the gradient is made.

Two cases need less. A parameter that no other device holds (an expert's, with as many devices as
experts) has no sum over devices; in a step of one microbatch it needs no total either. And if no
parameter has a sum over devices, the last microbatch runs in the same loop as the others.

Microbatches that run side by side are a *group*, and the loop runs one group at a time. In the
example each group is one microbatch.

`accumulate` drives this for a step. `scmoe.parallel.gradients` says which devices hold the same
parameter.
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
from scmoe.models.fetched import elsewhere_in, is_elsewhere, is_in_host_memory
from scmoe.models.gradient_totals import GradientTotal, is_total
from scmoe.models.stacked import is_apart, stacked_again
from scmoe.offload.memory import is_on_host
from scmoe.parallel.barriers import barrier
from scmoe.parallel.gradients import travels_over
from scmoe.parallel.shares import WHOLE, Division, StateShares, is_share

PyTree = Any


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
        parameter through a function of `scmoe.models.gradient_totals` that calls `added` before it
        reads it.
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


def group_size(microbatches: int, flight: int) -> int:
  """How many microbatches run side by side: `overlap.flight` if it divides their number, else 1."""
  return flight if microbatches % flight == 0 else 1


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
  embedding_rows: bool = False,
) -> tuple[Array, PyTree, PyTree]:
  """Loss and gradients of a step over all its microbatches and devices, and the sum of their aux.

  Args:
    objective: gives the losses and their counts.
    params: in the dtypes in which the loss reads them; `Share`s where ranks share them.
    router: state that gradients do not train.
    batch: this device's share, leaves [A, B, ...] of A microbatches. Microbatch i has the key `rng`
      folded with i.
    rng: random key of the step.
    specs: PartitionSpecs like the whole parameters.
    gradient_dtype: dtype in which gradients travel between devices.
    flight: see `group_size`. The results do not depend on it.
    factor: multiplies the loss before it is differentiated, and so the gradients (`LossScaling`);
      the returned loss is without it.
    shares: says for which parameters a rank gets only its share of the gradient; None: for
      none.
    embedding_rows: whether gradients of looked-up rows may travel as rows in a step of one group
      (`scmoe.models.row_gradients`).

  Returns:
    The loss, float32 []; gradients like the parameters or their shares; aux, summed over the
    microbatches. Gradients are float32, but those of a single microbatch without a sum over devices
    have the parameters' dtypes.
  """
  count = jax.tree.leaves(batch)[0].shape[0]
  size = group_size(count, flight)
  key_of = lambda number: jax.random.fold_in(rng, number)
  counts = objective.counts(batch)
  ahead = objective.look_ahead(params, router, batch, key_of)
  # A microbatch's part of the loss is about 1/A of the mean over its own tokens: too small for
  # float16's range, so a scaled loss is multiplied by A too.
  scale = 1.0 if factor is None else jnp.asarray(factor) * count
  slopes = {name: scale / jnp.maximum(number, 1) for name, number in counts.items()}
  bucket = 0 if shares is None else shares.how.bucket
  how = gradient_dtype, bucket, embedding_rows
  step = _Step(objective, [params] * size, router, ahead, key_of, slopes, *how)
  reduces = any(travels_over(spec) for spec in jax.tree.leaves(specs))
  # Gradients of experts in the host's memory leave the device from where the last group sums.
  reduces = reduces or any(map(is_in_host_memory, elsewhere_in(params)))
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
    values = jax.tree.map(lambda total: total.summed, totals, is_leaf=is_total)
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
    bucket: see `scmoe.parallel.shares.Gathering`.
    rows: see `GradientTotal.rows`.
  """

  objective: Losses
  copies: list[PyTree]
  router: PyTree
  ahead: PyTree
  key_of: Callable[[Any], Array]
  slopes: dict[str, Array]
  dtype: str
  bucket: int
  rows: bool

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
      done, zeros = jax.tree.map(
        lambda x: _zeros(x, read=early > 0), (shapes, _bare(self.copies[0]))
      )
      zeros = self.objective.lay_out_totals(zeros) if early else zeros
    total = lambda zero: GradientTotal.begun(zero, self.dtype, self.bucket)
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
  # Ranks that share parameters scatter each group's gradients, those of the table among them.
  rows = step.rows and not (shares is not None and shares.parameters)
  given = for_last_group(totals, specs, step.dtype, empty=not early, rows=rows)
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


def _zeros(like: Any, read: bool = True) -> Array:
  """Zeros of the type of a total, in the memory in which `like` lies.

  Args:
    like: an array, or a `jax.ShapeDtypeStruct`.
    read: False: only their type matters. jax marks each copy between memories as an effect, so XLA
      may keep one whose result nothing reads; it removes such a broadcast.
  """
  dtype = jnp.promote_types(like.dtype, jnp.float32)
  if not is_on_host(like):
    return jnp.zeros(like.shape, dtype)
  zeros = jax.device_put(jnp.zeros(like.shape if read else (), dtype), jax.memory.Space.Host)
  return zeros if read else jnp.broadcast_to(zeros, like.shape)


def _added_up(new: Sequence[PyTree], done: PyTree) -> PyTree:
  # Each array is cast to float32 where it is added, so that XLA writes no float32 copy of it.
  with jax.named_scope("accumulate"):
    add = lambda total, one: jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one)
    return functools.reduce(add, new, done)


def for_last_group(
  totals: PyTree, specs: PyTree, dtype: str, *, empty: bool, rows: bool = False
) -> PyTree:
  """Totals for the last group of a step; None for a parameter that needs none.

  A parameter needs none if its gradient is neither added to earlier ones nor summed over devices,
  and stays on the device.

  Args:
    totals: the totals of the earlier groups.
    specs: PartitionSpecs like the parameters.
    dtype: dtype in which gradients travel.
    empty: whether there were no earlier groups: `totals` then only has the shapes.
    rows: see `GradientTotal.rows`.
  """

  def prepare(spec: Any, total: GradientTotal) -> GradientTotal | None:
    axes = travels_over(spec)
    if empty and not axes and total.squares is None:
      return None
    return dataclasses.replace(total, axes=axes, dtype=dtype, last=True, empty=empty, rows=rows)

  return jax.tree.map(prepare, specs, totals)


def _into_shares(totals: PyTree, params: PyTree, shares: StateShares) -> PyTree:
  """Prepares the last group's totals of gradients of which a rank gets only its share.

  If ranks share the parameter too, the total is a share from the beginning: each group's
  gradient is scattered before it is added. If they share only its moments, the last group's
  backward pass scatters the total (`GradientTotal.into`). Other totals stay as they are.
  """

  def tell(how: Division, total: GradientTotal | None, param: Any) -> GradientTotal | None:
    if how == WHOLE or total is None:
      return total
    if is_share(param):
      others = tuple(axis for axis in total.axes if axis not in how.axes)
      return dataclasses.replace(total, axes=others)
    shape = list(param.shape)
    shape[how.dimension] //= how.ranks
    into = jnp.zeros(shape, jnp.promote_types(param.dtype, jnp.float32))
    value = None if total.empty else total.value
    return dataclasses.replace(total, value=value, into=into, division=how)

  return jax.tree.map(tell, shares.divisions, totals, params)


def _bare(params: PyTree) -> PyTree:
  """The parameters with every `Share` and `InHostMemory` replaced by its array."""
  return jax.tree.map(lambda x: x.value if is_elsewhere(x) else x, params, is_leaf=is_elsewhere)


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

  absent_or_total = lambda x: x is None or is_total(x)
  return jax.tree.map(complete, found, zeros, *map(_bare, grads), is_leaf=absent_or_total)
