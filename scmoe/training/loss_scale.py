"""Loss scaling: keeps float16 gradients within float16's range.

float16's smallest positive number is 6e-8. The gradient of a mean over 8,192 tokens starts at 1e-4
and may shrink on its way back: unscaled, small gradients keep few bits or become 0. So the step
multiplies the loss by a factor before it takes gradients, and divides the gradients by it in
float32. A dynamic factor stays as large as possible: a step whose loss or gradient norm is not
finite is skipped and halves it (down to 1), `window` finite steps in a row double it (up to 2^24;
Micikevicius et al., arXiv 1710.03740; Megatron-LM `--loss-scale-window`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LARGEST, SMALLEST = 2.0**24, 1.0
START = 2.0**16  # the first value of a dynamic factor


@dataclasses.dataclass(frozen=True)
class LossScaling:
  """How the loss's factor starts and changes; `TrainState.scale` holds its value.

  Attributes:
    fixed: the factor; 0: a dynamic one.
    window: finite steps in a row after which a dynamic factor doubles.
  """

  fixed: float = 0.0
  window: int = 1000

  def init(self) -> dict[str, Array]:
    """The state before step 0: `factor`, float32 [], and `good`, int32 [].

    `good` is the number of finite steps in a row, counted anew after `window` of them. With a fixed
    factor it stays 0.
    """
    return {
      "factor": jnp.asarray(self.fixed or START, jnp.float32),
      "good": jnp.zeros((), jnp.int32),
    }

  def unscaled(self, grads: Any, state: dict[str, Array]) -> Any:
    """The gradients divided by the factor, in float32 (float64 stays float64)."""
    wide = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))
    return jax.tree.map(lambda g: wide(g) / state["factor"], grads)

  def may_fall(self, state: dict[str, Array]) -> Array:
    """True if an overflow can still lower the factor, and so is no failure yet: bool []."""
    return jnp.asarray(not self.fixed) & (state["factor"] > SMALLEST)

  def after(self, state: dict[str, Array], finite: Array) -> dict[str, Array]:
    """The state (`factor` and `good`) after a step; with a fixed factor, `state` itself.

    Args:
      state: as before the step (`init`).
      finite: bool [], whether the step's loss and gradient norm were finite.
    """
    if self.fixed:
      return state
    grows = finite & (state["good"] + 1 >= self.window)
    factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5) * state["factor"]
    good = jnp.where(finite & ~grows, state["good"] + 1, 0)
    return {"factor": jnp.clip(factor, SMALLEST, LARGEST), "good": good}
