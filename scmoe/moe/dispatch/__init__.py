"""Dispatch and combine: how rows travel to the experts and back. One file per transport."""

from __future__ import annotations

import dataclasses

from scmoe.options import option


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
  """How tokens travel to the experts."""

  capacity_factor: float = option(
    2.0, "rows of an expert's buffer over its balanced share; what does not fit is dropped"
  )
  groups: int = option(
    0,
    "capacity groups the batch is split into; a multiple of data x expert devices, 0 for one per "
    "device. Drops do not depend on the mesh for a fixed number of groups",
    minimum=0,
  )
