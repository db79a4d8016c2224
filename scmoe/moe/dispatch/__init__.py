"""Dispatch and combine: how rows get to the experts and back.

Each transport has a file of its own, except `Computed`, which wraps another one (`transport`).
"""

from scmoe.moe.dispatch.capacity import Capacity, capacity, exact_capacity
from scmoe.moe.dispatch.dropless import Dropless
from scmoe.moe.dispatch.local import Local
from scmoe.moe.dispatch.options import TRANSPORTS, DispatchConfig
from scmoe.moe.dispatch.packed import Packed
from scmoe.moe.dispatch.per_rank import PerRank
from scmoe.moe.dispatch.positions import queue_positions
from scmoe.moe.dispatch.put import Put
from scmoe.moe.dispatch.transport import Transport, make_transport, overflow, sends_ahead

__all__ = [
  "TRANSPORTS",
  "Capacity",
  "DispatchConfig",
  "Dropless",
  "Local",
  "Packed",
  "PerRank",
  "Put",
  "Transport",
  "capacity",
  "exact_capacity",
  "make_transport",
  "overflow",
  "queue_positions",
  "sends_ahead",
]
