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
  barriers: bool = option(
    False, "tie the order of the schedule with optimization barriers, so that XLA cannot move it"
  )


def slot_count(window: int) -> int:
  """Slots of the expert stage beside `window` dense operations (paper §3.2: Pos-2 has 3 and 4)."""
  return window + 1


def resolve_slot(slot: int, window: int) -> int:
  """The slot asked for, or the last one for -1; never beyond the window."""
  return window if slot < 0 else min(slot, window)
