"""An exponential moving average of the weights (EMA), in float32.

After the first steps, in which decays may be smaller (`Average.decay_at`), the weights of k updates
ago count decay^k times as much as the last ones: with a decay of 0.999 the last 1,000 updates make
up 63 % of the average. It is less noisy than the last step's weights. No training step computes its
gradients with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Average:
  """Says how the average of the weights follows them, step by step.

  Attributes:
    decay: share of the average that an update keeps, below 1; early ones may keep less; see
      `decay_at`.
  """

  decay: float

  def init(self, params: PyTree) -> PyTree:
    """The average before the first step: a copy of the weights.

    A step may donate weights and average, so they must not share a buffer.
    """
    return jax.tree.map(jnp.copy, params)

  def decay_at(self, step: Array) -> Array:
    """The decay in step n + 1, with `step` = n steps before: min(decay, (1 + n) / (10 + n)).

    That is the warm-up of TensorFlow's `ExponentialMovingAverage` (`num_updates`). Without it the
    first weights would have a share of decay^n in the average after n updates.
    """
    count = step.astype(jnp.float32)
    return jnp.minimum(self.decay, (1 + count) / (10 + count))

  def after(self, average: PyTree, params: PyTree, step: Array) -> PyTree:
    """The average after a step, from the one before it and the weights after the step.

    Args:
      average: before the step, float32.
      params: weights after the step, float32.
      step: int32 [], number of steps done before it.
    """
    rest = 1 - self.decay_at(step)
    return jax.tree.map(lambda a, p: a + rest * (p - a), average, params)
