"""Spikes: steps whose loss or gradient norm is far above that of the steps before.

A bad batch can undo days of training in one step. So the step compares before it updates: a loss or
norm above mean + sigma · standard deviation of the good steps so far, at most the last `WINDOW` of
them, skips the step, as a value that is not finite does (OLMo's skip-step optimizer;
`train.spike_sigma`). The deviation is taken as `FLOOR` · |mean| at least. No step is compared
before there are `LEAST` good ones.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

WINDOW = 128
# Number of good steps before the first comparison.
LEAST = 32
# The smallest standard deviation with which a step is compared, as a share of the mean.
FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class Spikes:
  """The test for spikes; `TrainState.recent` holds losses and norms of the last good steps.

  Attributes:
    sigma: a loss or norm more than so many standard deviations above the mean is a spike.
  """

  sigma: float

  def init(self) -> dict[str, Array]:
    """`values`, float32 [2, WINDOW], and `count`, int32 []: the state before the first step.

    The rows of `values` hold the losses and the gradient norms of the last good steps; `count` is
    the number of good steps so far.
    """
    return {"values": jnp.zeros((2, WINDOW), jnp.float32), "count": jnp.zeros((), jnp.int32)}

  def seen(self, recent: dict[str, Array], loss: Array, norm: Array) -> Array:
    """True if this loss or this norm is a spike, bool []; False before `LEAST` good steps."""
    values_2W, count = recent["values"], jnp.minimum(recent["count"], WINDOW)
    there_W = jnp.arange(WINDOW) < count
    size = jnp.maximum(count, 1)
    mean_2 = jnp.where(there_W, values_2W, 0).sum(1) / size
    square_2 = jnp.where(there_W, (values_2W - mean_2[:, None]) ** 2, 0).sum(1) / size
    width_2 = jnp.maximum(jnp.sqrt(square_2), FLOOR * jnp.abs(mean_2))
    high = (jnp.stack([loss, norm]) > mean_2 + self.sigma * width_2).any()
    return high & (recent["count"] >= LEAST)

  def after(
    self, recent: dict[str, Array], loss: Array, norm: Array, good: Array
  ) -> dict[str, Array]:
    """The recent values after this step, with its loss and norm added if the step was `good`."""
    values = recent["values"].at[:, recent["count"] % WINDOW].set(jnp.stack([loss, norm]))
    return {
      "values": jnp.where(good, values, recent["values"]),
      "count": recent["count"] + good.astype(jnp.int32),
    }
