"""The planner's model of experts in the host's memory in training (`mesh.experts_in=host`).

A forward pass fetches the experts of every pair, and the backward pass those of all but the last
pair again, whose experts are still there. `overlap.flight` microbatches that run side by side share
a pass. Each pair's float32 gradients leave the device; with several passes the total of the earlier
ones comes first. With `router.balance_over=step` a forward pass more reads each microbatch. The
link carries both directions at once. All this runs beside the computation of the passes, one pair
apart (`scmoe.models.fetched`), so what counts is the longer of the two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from scmoe.models.stacked import is_apart
from scmoe.training import masters
from scmoe.training.host_arrays import lies_on_host

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Passes:
  """Bytes that the passes of one device fetch and store.

  Attributes:
    experts: of each pair's experts, as they are stored in the host's memory.
    gradients: of each pair's gradients of them, float32.
    count: passes forward and backward of a step.
    looks: further forward passes, which only look at the gates' choices.
  """

  experts: tuple[int, ...]
  gradients: tuple[int, ...]
  count: int
  looks: int = 0

  @property
  def on_device(self) -> int:
    """The most bytes that the device holds of them.

    They are two pairs' experts and two pairs' gradients, and one pair's total with several passes.
    A pair whose type of storage is not that of its computation has one more copy,
    which is not counted.
    """
    totals = 1 if self.count > 1 else 0
    return min(2, len(self.experts)) * max(self.experts) + (
      (min(2, len(self.gradients)) + totals) * max(self.gradients)
    )

  def seconds(self, rate: float) -> float:
    """Seconds of all copies of a step's passes, for a link of `rate` bytes/s each way.

    In the backward pass the slower direction counts.
    """
    experts, gradients = sum(self.experts), sum(self.gradients)
    totals = gradients if self.count > 1 else 0
    backward = max(experts - self.experts[-1] + totals, gradients)
    return (self.count * (experts + backward) + self.looks * experts) / rate


def passes_of(params: PyTree, count: int, looks: int = 0) -> Passes | None:
  """Counts the bytes of a state's experts in the host's memory; None if none lie there.

  Args:
    params: of a state, `jax.ShapeDtypeStruct`s with shardings, or arrays.
    count, looks: see `Passes`.
  """
  read = jax.tree.leaves(masters.readable(params), is_leaf=is_apart)
  stacks = [x.parts for x in read if is_apart(x) and lies_on_host(x.parts[0])]
  if not stacks:
    return None
  counts = [[math.prod(x.sharding.shard_shape(x.shape)) for x in parts] for parts in zip(*stacks)]
  sizes = [x[0].dtype.itemsize for x in stacks]
  experts = tuple(sum(n * size for n, size in zip(own, sizes)) for own in counts)
  return Passes(experts, tuple(4 * sum(own) for own in counts), count, looks)
