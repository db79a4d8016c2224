"""An alarm for collapsed routers, which leave many experts idle or send most tokens to a few.

A collapse raises no error and hardly changes the loss at first. The per-layer statistics
(`scmoe.moe.losses.statistics`) show it at once, the quality of the model too late. So does a
balancing bias that is too slow to hold the share of zero experts: they take nearly all choices, and
the layer computes next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# A layer has collapsed if more than the share DEAD of its E experts get no token, or if its
# diversity, which is exp(entropy of the load) / E, is below DIVERSITY. E counts computing experts
# only, no zero experts.
DEAD = 0.25
DIVERSITY = 0.3
# A layer is starved if its computing experts get less than this part of the choices meant for them.
STARVED = 0.5


class CollapseAlarm:
  """Reports a collapsed or starved layer once, and again if it recovers and the fault comes anew.

  Args:
    steps: number of steps without a break for which a layer must have had the fault before it is
      reported; 0: no alarm.
    aimed_share: the share of the choices that the balancing bias aims to give to computing experts;
      None: no bias holds a share.
  """

  def __init__(self, steps: int, aimed_share: float | None = None):
    self.steps, self._aimed_share = steps, aimed_share
    self._collapsed, self._starved = _Lasting(steps), _Lasting(steps)

  def check(self, step: int, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The lines about layers that are to be reported now, one for each of the two faults.

    Args:
      step: number of the step of these statistics. A layer that has a fault in two calls in a row
        counts as having it in all steps between them.
      arrays: `dead` (share of experts without a token) and `diversity`, and with zero experts
        `zero_share` (their share of the choices), float [layers] each; what is missing is not
        checked.
    """
    if not self.steps:
      return []
    lines = []
    if {"dead", "diversity"} <= set(arrays):
      dead_L, diversity_L = arrays["dead"], arrays["diversity"]
      due = self._collapsed.due(step, (dead_L > DEAD) | (diversity_L < DIVERSITY))
      layers = (
        f"{layer} ({100 * dead_L[layer]:.0f} % of its experts without a token, diversity "
        f"{diversity_L[layer]:.2f})"
        for layer in due
      )
      remedy = "raise router.balance_loss, use router.bias, or lower optimizer.learning_rate"
      if self._aimed_share is not None:
        remedy = "raise router.bias_rate, or lower optimizer.learning_rate"
      lines += [
        f"step {step}: routers collapsed for {self.steps} steps in MoE layer {', '.join(layers)}; "
        f"{remedy}"
      ] * bool(due)
    if "zero_share" in arrays and self._aimed_share is not None:
      real_L = 1 - arrays["zero_share"]
      due = self._starved.due(step, real_L < STARVED * self._aimed_share)
      layers = ", ".join(f"{layer} ({100 * real_L[layer]:.1f} %)" for layer in due)
      lines += [
        f"step {step}: for {self.steps} steps computing experts have had less than half of the "
        f"{100 * self._aimed_share:.0f} % of the choices that the balancing bias aims at, in MoE "
        f"layer {layers}; raise router.bias_rate"
      ] * bool(due)
    return lines


class _Lasting:
  """Which layers have had a fault for a number of steps, each told once."""

  def __init__(self, steps: int):
    self._steps = steps
    self._since: dict[int, int] = {}  # layer with the fault -> step since which it has had it
    self._said: set[int] = set()

  def due(self, step: int, fault_L: np.ndarray) -> list[int]:
    """The layers to report at this step, of those with a fault."""
    found = []
    for layer, fault in enumerate(fault_L):
      if not fault:
        self._since.pop(layer, None)
        self._said.discard(layer)
        continue
      since = self._since.setdefault(layer, step)
      if step - since >= self._steps and layer not in self._said:
        self._said.add(layer)
        found.append(layer)
    return found
