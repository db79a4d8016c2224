"""Advice on a trace: which communication is exposed, why, and which option to change."""

from __future__ import annotations

from collections.abc import Sequence

from scmoe.profiling.overlap import StageTime

ENOUGH = 0.9  # share of a communication that is hidden, from which there is no advice on it
SMALL = 0.01  # share of the step that is exposed, below which there is none either
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
  """One line per exposed communication, the longest first; each ends with a remedy.

  Args:
    stages: times of one step's stages (`stage_times`).
    step: milliseconds of the step.
    shortcut: True if the routed experts read an earlier block's value (`model.wiring`).
    window_share: share of the dense computation that does not precede the routing.
    capacity_factor: `dispatch.capacity_factor` if padded buffers are sent; 0 if only rows are.
  """
  found = []
  for stage in stages:
    exposed = stage.communication - stage.hidden
    if not stage.communication or stage.hidden >= ENOUGH * stage.communication:
      continue
    if exposed < SMALL * step:
      continue
    if stage.stage in EXCHANGES:
      why = _why_exchange(stages, stage.direction, shortcut, window_share, capacity_factor)
    else:
      why = _OTHERS.get(stage.stage, "no independent computation runs beside it")
    found.append(
      (exposed, f"{stage.stage} {stage.direction} is exposed for {exposed:.1f} of its "
                f"{stage.communication:.1f} ms: {why}")
    )  # fmt: skip
  return [line for _, line in sorted(found, reverse=True)]


_OTHERS = {
  "gradients": "the backward pass of the last microbatch is too short to hide them; use "
  "overlap.gradient_dtype=bfloat16, larger microbatches, or, if mesh.shard_state is none, moments",
  "counts": "each device waits until the slowest has told how many rows it sends; most of the time "
  "is imbalance between devices, not the link",
  "statistics": "each device waits for the slowest at the loss; most of the time is imbalance "
  "between devices",
}


def _why_exchange(
  stages: Sequence[StageTime],
  direction: str,
  shortcut: bool,
  window_share: float,
  capacity_factor: float,
) -> str:
  if not shortcut:
    return (
      "the next dense computation needs the routed experts' result; use a wiring with a shortcut "
      "(model.wiring=scmoe_pos2), or dispatch.chunks=2"
    )
  own = [stage for stage in stages if stage.direction == direction]
  sent = sum(stage.communication for stage in own if stage.stage in EXCHANGES)
  window = window_share * sum(stage.computation for stage in own if stage.stage in DENSE)
  if sent > window:
    less = "a larger share of dense computation (model.wiring=scmoe_pos3) or fewer bytes"
    if capacity_factor > 1:
      less = f"dispatch.transport=packed (capacity_factor={capacity_factor:g} sends mostly padding)"
    return (
      f"dispatch and combine take {sent:.1f} ms, but the dense computation that can run beside "
      f"them only {window:.1f} ms; use {less}"
    )
  return (
    f"{window:.1f} ms of dense computation could hide {sent:.1f} ms of dispatch and combine, but "
    "XLA scheduled it elsewhere; try overlap.order=barriers with a slot of overlap.schedule"
  )
