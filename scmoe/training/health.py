"""An alarm for collapsed routers, which leave many experts idle or send most tokens to a few.

A collapse raises no error and hardly changes the loss at first. The per-layer statistics
(`scmoe.moe.losses.statistics`) show it at once, the quality of the model too late.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# A layer has collapsed if more than the share DEAD of its E experts get no token, or if its
# diversity, which is exp(entropy of the load) / E, is below DIVERSITY. E counts computing experts
# only, no zero experts.
DEAD = 0.25
DIVERSITY = 0.3


class CollapseAlarm:
  """Reports a collapsed router once for each layer, and again if it recovers and collapses anew.

  Args:
    steps: number of steps without a break for which a layer must have been collapsed before it is
      reported; 0: no alarm.
  """

  def __init__(self, steps: int):
    self.steps = steps
    self._since: dict[int, int] = {}  # collapsed layer -> step since which it has been collapsed
    self._said: set[int] = set()

  def check(self, step: int, arrays: Mapping[str, np.ndarray]) -> str | None:
    """One line about the layers whose collapse is to be reported now, or None.

    Args:
      step: number of the step of these statistics. A layer that is collapsed in two calls in a row
        counts as collapsed in all steps between them.
      arrays: `dead` (share of experts without a token) and `diversity`, float [layers] each;
        without them the result is None.
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
