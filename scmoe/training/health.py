"""The alarm for routers that collapse: experts without tokens, and all tokens at a few.

A collapsed router costs no error and hardly any loss at first; it is seen in the per-layer
statistics (`scmoe.moe.losses.statistics`) or, too late, in the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

DEAD = 0.25  # share of a layer's experts without a token above which it counts as collapsed
DIVERSITY = 0.3  # exp(entropy of the load) / E below which it does


class CollapseAlarm:
  """Says once, for each layer and episode, that its router has collapsed.

  Args:
    steps: how long a layer has to be collapsed; 0 for no alarm.
  """

  def __init__(self, steps: int):
    self.steps = steps
    self._since: dict[int, int] = {}  # layer -> first of its collapsed steps in a row
    self._said: set[int] = set()

  def check(self, step: int, arrays: Mapping[str, np.ndarray]) -> str | None:
    """One line about layers that are due, or None.

    Args:
      step: whose statistics these are; steps between two calls count as the later one.
      arrays: `dead` and `diversity`, float [layers] each; without them there is nothing to say.
    """
    if not self.steps or not {"dead", "diversity"} <= set(arrays):
      return None
    dead_L, diversity_L = arrays["dead"], arrays["diversity"]
    collapsed_L = (dead_L > DEAD) | (diversity_L < DIVERSITY)
    due = []
    for layer in range(len(collapsed_L)):
      if not collapsed_L[layer]:
        self._since.pop(layer, None)
        self._said.discard(layer)
        continue
      since = self._since.setdefault(layer, step)
      if step - since >= self.steps and layer not in self._said:
        self._said.add(layer)
        due.append(layer)
    if not due:
      return None
    layers = ", ".join(
      f"{layer} ({100 * dead_L[layer]:.0f} % of its experts without a token, diversity "
      f"{diversity_L[layer]:.2f})"
      for layer in due
    )
    return (
      f"step {step}: routers collapsed for {self.steps} steps in MoE layer {layers}; raise "
      "router.balance_loss, use router.bias, or lower optimizer.learning_rate"
    )
