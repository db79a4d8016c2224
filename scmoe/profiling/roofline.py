"""Models a step's times: FLOPs and memory traffic over a device's rates, bytes over a link's rate.

The model chooses a slot for the experts before anything has run, and shows how far a measurement is
from the hardware's limit. Where `scmoe.profile` has measured times, it uses those instead.
"""

from __future__ import annotations

import dataclasses

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, check_type, option


@dataclasses.dataclass(frozen=True)
class Machine(Options):
  """Rates of one device and its link.

  Attributes:
    flops: dense matrix FLOP/s that large products reach.
    memory: bytes/s of device memory.
    link: bytes/s that leave a device in an all-to-all; the part that it keeps does not count.
    latency: seconds of an empty exchange.
  """

  flops: float = option(above=0)
  memory: float = option(above=0)
  link: float = option(above=0)
  latency: float = option(minimum=0)


# FLOP/s in bf16 and memory rate: about what one H200 reaches (experiments/LOG.md). Links: measured
# in all-to-alls of 4 H200s of one host (2026-11), over NVLink and with NCCL_P2P_DISABLE=1. A device
# sends three quarters of its buffer. Two H200s, which send half of it, reach 23 GB/s without P2P.
MACHINES = {
  "h200-nvlink": Machine(flops=700e12, memory=4.0e12, link=193e9, latency=60e-6),
  "h200-slow": Machine(flops=700e12, memory=4.0e12, link=22.9e9, latency=60e-6),
}


def machine(name: str) -> Machine:
  """The machine of that name.

  Raises:
    ConfigError: the name is unknown.
  """
  if name not in MACHINES:
    raise ConfigError(f"machine={name!r} is unknown; one of: {', '.join(MACHINES)}")
  return MACHINES[name]


@dataclasses.dataclass(frozen=True)
class Sizes(Options):
  """One block pair on one device.

  Attributes:
    tokens: T, one device's tokens of a microbatch; seq: S. Both are 0 if no prompt is known yet.
    width, mlp, expert, shared: D, and hidden widths of MLP, routed and shared expert.
    head_width, kv_width: H·N of queries, and of keys or values.
    experts, k: E, and the mean number of routed experts that compute for a token.
    capacity_factor: rows of a buffer over the balanced share.
    devices: number of devices on the expert axis.
    matrices: products of a feed-forward layer: 2, or 3 with a gated activation.
    bytes: size of one number of the compute type.
    inward: number of weights of attention's input projections; 0: those of queries, keys, values.
    value_width: width of all heads' values; 0: `head_width`.
    sent: rows that a device sends for each of its tokens; 0: k · capacity_factor.
  """

  tokens: int = option(minimum=0)
  seq: int = option(minimum=0)
  width: int = option(minimum=1)
  mlp: int = option(minimum=0)
  expert: int = option(minimum=0)
  shared: int = option(minimum=0)
  head_width: int = option(minimum=1)
  kv_width: int = option(minimum=1)
  experts: int = option(minimum=0)
  k: float = option(minimum=0)
  capacity_factor: float = option(1.0, minimum=0)
  devices: int = option(1, minimum=1)
  matrices: int = option(2, minimum=1)
  bytes: int = option(2, minimum=1)
  inward: int = option(0, minimum=0)
  value_width: int = option(0, minimum=0)
  sent: float = option(0.0, minimum=0)


@dataclasses.dataclass(frozen=True)
class StageSeconds:
  """Modelled seconds of the steps of one block pair's forward pass."""

  projections: float
  mixing: float
  mlp: float
  shared: float
  route: float
  dispatch: float
  experts: float
  combine: float
  add: float

  def milliseconds(self) -> dict[str, float]:
    """Milliseconds by field name, for `scmoe.blocks.timeline.unit_times`."""
    return {name: 1e3 * seconds for name, seconds in dataclasses.asdict(self).items()}


def model_times(sizes: Sizes, machine: Machine) -> StageSeconds:
  """Seconds of every step, from its arithmetic, its memory traffic and its bytes over the link."""
  check_type("sizes", sizes, Sizes)
  check_type("machine", machine, Machine)
  z = sizes
  rows = z.tokens * z.k * z.capacity_factor  # rows of a device's experts, on average
  stream = z.bytes * z.width / machine.memory  # seconds per token read or written once

  def feed_forward(tokens: float, hidden: int) -> float:
    work = 2 * z.matrices * tokens * z.width * hidden / machine.flops
    weights = z.matrices * z.width * hidden * z.bytes / machine.memory
    # Norm and residual read and write the tokens, the activation reads and writes the hidden layer.
    around = tokens * (4 * stream + 2 * z.bytes * hidden / machine.memory)
    return max(work, weights) + around

  inward = 2 * z.tokens * (z.inward or z.width * (z.head_width + 2 * z.kv_width))
  values = z.value_width or z.head_width
  outward = 2 * z.tokens * z.width * values
  scores = z.tokens * z.seq * (z.head_width + values)  # causal: half of 2 · T · S · width each
  exchange = 0.0
  if z.devices > 1:
    sent = (z.tokens * z.sent or rows) * z.width * z.bytes * (z.devices - 1) / z.devices
    exchange = machine.latency + sent / machine.link
  return StageSeconds(
    projections=inward / machine.flops + 4 * z.tokens * stream,
    mixing=(scores + outward) / machine.flops + 4 * z.tokens * stream,
    mlp=feed_forward(z.tokens, z.mlp),
    shared=feed_forward(z.tokens, z.shared),
    # Scores in float32, a sort, and a copy of the rows to the order of their experts.
    route=6 * z.tokens * stream + 2 * rows * stream,
    dispatch=exchange,
    experts=feed_forward(rows, z.expert) + 4 * rows * stream,
    combine=exchange,
    add=(rows + 2 * z.tokens) * stream,
  )
