"""Dispatch and combine: how rows travel to the experts and back. One file per transport."""

from __future__ import annotations

import dataclasses

from scmoe.errors import ConfigError
from scmoe.options import option

TRANSPORTS = ("capacity", "dropless")


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
  """How tokens travel to the experts."""

  transport: str = option(
    "capacity",
    "capacity: fixed buffers, overflow is dropped and counted; dropless: rounds over a fixed "
    "buffer, nothing is dropped",
    choices=TRANSPORTS,
  )
  capacity_factor: float = option(
    2.0,
    "capacity: rows of an expert's buffer over its balanced share (Tutel capacity_factor); 0: drop "
    "nothing; < 0: room for all, but at most -capacity_factor",
  )
  slack: float = option(
    1.25, "dropless: rows of a peer's buffer over its balanced share", minimum=1
  )
  further: str = option(
    "auto",
    "dropless: who decides on further rounds. layer: each one, where the host reads their number; "
    "retry: a microbatch is tried without and repeated if a queue was longer than its buffer, so "
    "that no layer waits for the host; the step after one that was repeated has them at once; "
    "auto: retry on GPUs, layer elsewhere",
    choices=("auto", "layer", "retry"),
  )
  groups: int = option(
    0,
    "capacity groups the batch is split into; a multiple of data x expert devices, 0 for one per "
    "device. Drops do not depend on the mesh for a fixed number of groups",
    minimum=0,
  )
  chunks: int = option(
    1,
    "parts of an exchange, pipelined with the experts (Tutel a2a_ffn_overlap_degree)",
    minimum=1,
    maximum=32,
  )
  nodes: int = option(
    1, "hosts under the expert axis; > 1 exchanges in two steps (Tutel use_2dh)", minimum=1
  )
  adaptive_r: int = option(
    1,
    "0: gather the experts' weights, no exchange; 1: expert parallel; up to the devices that share "
    "an expert: send each token to r of them, which add partial sums (Tutel adaptive_r)",
    minimum=0,
  )

  def retries(self, platform: str) -> bool:
    """Whether a training step first tries a microbatch without further rounds.

    Left to itself, on GPUs, which wait for a host that reads the number of rounds in every layer;
    elsewhere a second program would be compiled for nothing.

    Args:
      platform: of the devices, as jax names it.
    """
    further = self.further
    if further == "auto":
      further = "retry" if platform == "gpu" else "layer"
    return self.transport == "dropless" and further == "retry"

  def check_shards(self, shards: int) -> None:
    """Checks `adaptive_r` against the number of devices that share an expert.

    Raises:
      ConfigError: r is neither 0 nor a divisor of `shards`.
    """
    if self.adaptive_r and shards % self.adaptive_r:
      fits = [r for r in range(shards + 1) if r == 0 or shards % r == 0]
      raise ConfigError(
        f"dispatch.adaptive_r={self.adaptive_r} must be 0 or divide the {shards} devices that "
        f"share an expert; one of: {', '.join(map(str, fits))}"
      )
