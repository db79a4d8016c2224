"""Advice in words: which exchanges of a trace are not hidden, why, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from scmoe.profiling.overlap import StageTime

ENOUGH = 0.9  # of a communication hidden: nothing is said
SMALL = 0.01  # of the step bare: neither
EXCHANGES = ("dispatch", "combine")
DENSE = ("attention", "mlp")


def advice(
  stages: Sequence[StageTime],
  step: float,
  *,
  shortcut: bool,
  window_share: float = 1.0,
  capacity_factor: float = 0.0,
) -> list[str]:
  """A line on exposed communication, the longest first; it ends with a remedy.

  Args:
    stages: times of one step's stages (`stage_times`).
    step: milliseconds of the step.
    shortcut: True if the routed experts read an earlier value than the current one.
    window_share: fraction of the dense computation after the shortcut.
    capacity_factor: that of padded buffers; 0 if only kept rows travel.
  """
  found = []
  for stage in stages:
    bare = stage.communication - stage.hidden
    if not stage.communication or stage.hidden >= ENOUGH * stage.communication:
      continue
    if bare < SMALL * step:
      continue
    if stage.stage in EXCHANGES:
      why = _of_exchange(stages, stage.direction, shortcut, window_share, capacity_factor)
    else:
      why = _OTHERS.get(stage.stage, "nothing independent of it stands beside it")
    found.append(
      (bare, f"{stage.stage} {stage.direction} is bare for {bare:.1f} of its "
             f"{stage.communication:.1f} ms: {why}")
    )  # fmt: skip
  return [line for _, line in sorted(found, reverse=True)]


_OTHERS = {
  "gradients": "the backward pass of the last microbatch is too short beside them; use "
  "overlap.gradient_dtype=bfloat16, or larger microbatches",
  "counts": "devices wait for each other to learn how many rows come; most of it is imbalance "
  "between devices and not the link",
  "statistics": "devices wait for each other at the loss; most of it is imbalance between devices",
}


def _of_exchange(
  stages: Sequence[StageTime],
  direction: str,
  shortcut: bool,
  window_share: float,
  capacity_factor: float,
) -> str:
  if not shortcut:
    return (
      "the routed experts read the current value, so that all dense work waits for them; use a "
      "wiring with a shortcut (model.wiring=scmoe_pos2), or dispatch.chunks=2"
    )
  own = [stage for stage in stages if stage.direction == direction]
  sent = sum(stage.communication for stage in own if stage.stage in EXCHANGES)
  window = window_share * sum(stage.computation for stage in own if stage.stage in DENSE)
  if sent > window:
    less = "a larger share of dense work (model.wiring=scmoe_pos3) or fewer bytes"
    if capacity_factor > 1:
      less = f"dispatch.transport=packed (capacity_factor={capacity_factor:g} sends mostly padding)"
    return (
      f"dispatch and combine take {sent:.1f} ms, the dense work that may stand beside them "
      f"{window:.1f} ms; use {less}"
    )
  return (
    f"{window:.1f} ms of dense work may stand beside {sent:.1f} ms of dispatch and combine, but "
    "the program puts it elsewhere; try overlap.order=barriers with a slot of overlap.schedule"
  )
