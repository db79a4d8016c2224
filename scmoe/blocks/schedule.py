"""Where the expert stage sits among the dense operations: the slot. Pure Python."""

from __future__ import annotations

import dataclasses

from scmoe.options import option


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
  """How communication is laid beside the dense path."""

  slot: int = option(
    -1,
    "dense operations between the shortcut and the expert stage; -1 for the last slot before the "
    "routed output is needed",
    minimum=-1,
  )
  backward_slot: int = option(
    -1,
    "the same for the backward pass, counted in forward order; -1 for the mirror image of the "
    "forward pass, -2 to leave the backward pass to XLA",
    minimum=-2,
  )
  barriers: bool = option(
    False, "tie the order of the schedule with optimization barriers, so that XLA cannot move it"
  )
  sequential: bool = option(
    False, "no dense operation beside the MoE's stages: the control arm of a measurement"
  )
  unroll: int = option(
    1,
    "stages per step of the scan over layers; 0: all. XLA moves no collective across a step",
    minimum=0,
  )


def slot_count(window: int) -> int:
  """Slots of the expert stage beside `window` dense operations (paper §3.2: Pos-2 has 3 and 4)."""
  return window + 1


def resolve_slot(slot: int, window: int) -> int:
  """The slot asked for, or the last one for -1; never beyond the window."""
  return window if slot < 0 else min(slot, window)


def resolve_backward_slot(overlap: OverlapConfig, window: int) -> int:
  """Slot of the experts' backward pass in forward order; beyond every window where XLA is free."""
  if overlap.backward_slot == -2:
    return window + 2
  if overlap.backward_slot == -1:
    return resolve_slot(overlap.slot, window)
  return resolve_slot(overlap.backward_slot, window)
