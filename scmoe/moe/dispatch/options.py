"""Options of the transports; `docs/routing.md` gives Tutel's and MegaBlocks' names for them."""

from __future__ import annotations

import dataclasses

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import is_import_path
from scmoe.base.options import Options, option, section


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of transport: what checks, predictions and `make_transport` ask about it.

  Attributes:
    drops: whether an expert has a capacity, beyond which choices are dropped; it has none if
      `dispatch.capacity_factor` is 0, or in a call that must drop nothing.
    in_rounds: whether all rows that devices exchange travel in rounds of fixed size
      (`dispatch.slack`), so that some may need overflow rounds (`dispatch.overflow`). False for
      `capacity`, whose rows travel so only where it drops nothing.
    exchanges: whether rows travel in jax's all-to-alls, which a jaxpr shows; False for `put`.
  """

  drops: bool
  in_rounds: bool
  exchanges: bool = True


def check_one_host(nodes: int) -> None:
  """Checks that rows that `put` writes stay within a host (`dispatch.nodes`).

  Raises:
    ConfigError: `nodes` is above 1.
  """
  if nodes > 1:
    raise ConfigError(
      f"dispatch.transport=put works within one host, got dispatch.nodes={nodes}; use "
      "dispatch.transport=dropless"
    )


# The words of `dispatch.transport`; `make_transport` makes their transports.
TRANSPORTS = {
  "capacity": Kind(drops=True, in_rounds=False),
  "packed": Kind(drops=True, in_rounds=True),
  "dropless": Kind(drops=False, in_rounds=True),
  "per_rank": Kind(drops=False, in_rounds=True),
  "put": Kind(drops=False, in_rounds=True, exchanges=False),
}


@dataclasses.dataclass(frozen=True)
class DispatchAblation(Options, path="dispatch.ablation"):
  """Switches that take away a part of the exchange, so that a measurement shows that part's cost.

  They are for measurements alone, but for one use: with `dispatch.overflow=repeat`, the program
  whose steps may be run again has `first_round` on.
  """

  silent: bool = option(
    False,
    "the control of a measurement: no row is exchanged, and each device's experts compute its own "
    "rows, whichever experts they were for; the result is not the model's",
  )
  first_round: bool = option(
    False,
    "packed, dropless, per_rank, put, or capacity with capacity_factor=0: no overflow rounds: rows "
    "without room in the first one add nothing to the result, except in calls that drop nothing, "
    "as of a teacher. dispatch.overflow=repeat has this in the program whose steps it may run "
    "again",
  )


@dataclasses.dataclass(frozen=True)
class DispatchConfig(Options, path="dispatch"):
  """Options of the transport: how tokens travel to the experts and back."""

  transport: str = option(
    "capacity",
    "capacity: fixed buffers, overflow is dropped and counted; packed: the same drops, but only "
    "rows that are kept travel and are computed; dropless: rounds over a fixed buffer, nothing is "
    "dropped; per_rank: as dropless, but a token travels once to each device, not once for each of "
    "its experts there; put: as dropless, by a kernel that writes rows into the other GPUs' "
    "memory, for Hopper GPUs of one host; or one's own as my_package.module:Name",
    choices=TRANSPORTS,
    importable=True,
  )
  capacity_factor: float = option(
    2.0,
    "capacity: rows of an expert's buffer over its balanced share (Tutel capacity_factor); 0: drop "
    "nothing; < 0: room for all, but at most -capacity_factor. Compiled buffers have the size of "
    "the bound, needed or not; rows of transport=packed are as many as are kept",
    minimum=-(2.0**20),
    maximum=2.0**20,
  )
  slack: float = option(
    1.25,
    "packed, dropless, per_rank, put, or capacity with capacity_factor=0: rows of a peer's buffer "
    "over its balanced share",
    minimum=1,
  )
  overflow: str = option(
    "loop",
    "packed, dropless, per_rank, put, or capacity with capacity_factor=0: how a training step "
    "sends rows without room in the first round of an exchange. loop: in a loop of overflow rounds "
    "in every layer, before which a GPU waits for the host, needed or not; repeat: a step has no "
    "such loop; one in which rows are left over changes nothing and is run again with the loops",
    choices=("loop", "repeat"),
  )
  fp8: bool = option(
    False,
    "capacity, packed, dropless or per_rank: rows travel to their experts in fp8, e4m3 with a "
    "scale for each 128 numbers: half of bfloat16's bytes. The experts' results, and gradients, "
    "travel as they are (DeepEP use_fp8)",
  )
  put_blocks: int = option(
    0,
    "put: thread blocks of the kernel on a CUDA stream of its own, so that XLA can compute beside "
    "it; fewer leave more multiprocessors to the computation and move the rows more slowly. 0: as "
    "many as are fastest alone, with nothing beside the kernel",
    minimum=0,
    maximum=132,
  )
  groups: int = option(
    0,
    "capacity groups the batch is split into; a multiple of the devices that share its tokens "
    "(data x expert x sequence), 0 for one per device. Drops do not depend on the mesh for a fixed "
    "number of groups",
    minimum=0,
  )
  chunks: int = option(
    1,
    "parts of an exchange, each with the experts of its own rows (Tutel a2a_ffn_overlap_degree)",
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
  ablation: DispatchAblation = section(
    DispatchAblation, "parts of the exchange that only ablations set apart"
  )

  @property
  def kind(self) -> Kind | None:
    """The table's entry for the transport; None if it is the user's own, which does as it likes."""
    return TRANSPORTS.get(self.transport)

  @property
  def fixed_buffers(self) -> bool:
    """Whether rows are sent once, in buffers of one size, as `capacity` does.

    False with its `capacity_factor` 0, which sends rows as `dropless` does, and for a user's own
    transport. Calls that must drop nothing may send rows otherwise than this says.
    """
    return self.kind is not None and not self.kind.in_rounds and self.capacity_factor != 0

  @property
  def in_all_to_alls(self) -> bool:
    """Whether rows that travel do so in jax's all-to-alls; taken for granted of a user's own."""
    return self.kind is None or self.kind.exchanges

  @property
  def repeats(self) -> bool:
    """Whether a training step that exchanges rows may leave some over, and is then run again.

    No step with a user's own transport is repeated; nor is one whose rows without room are to be
    lost (`ablation.first_round`).
    """
    in_rounds = self.kind is not None and not self.fixed_buffers
    asked = self.overflow == "repeat" and not self.ablation.first_round
    return asked and in_rounds and self.adaptive_r != 0

  def check_fp8(self) -> None:
    """Checks that the transport can send rows in fp8, if it is to.

    Raises:
      ConfigError: it is `put`.
    """
    if self.fp8 and not self.in_all_to_alls:
      raise ConfigError(
        "dispatch.fp8=True rounds rows for an all-to-all, and dispatch.transport=put writes them "
        "into the other device's memory as they are; use dispatch.transport=dropless"
      )

  def check_buffers(self) -> None:
    """Checks that experts get buffers of equal size, as `model.ffn.impl=batched` needs them.

    A user's own transport may make such buffers, for example one that contains `Capacity`, so it
    passes. Rows that come without them are computed as by `grouped`.

    Raises:
      ConfigError: the transport is another one of `TRANSPORTS` than `capacity`, or drops nothing.
    """
    if is_import_path(self.transport):
      return
    if self.transport != "capacity" or not self.capacity_factor:
      raise ConfigError(
        "model.ffn.impl=batched computes buffers of equal size, which only dispatch.transport="
        "capacity makes, with a dispatch.capacity_factor other than 0; got "
        f"{self.transport} and {self.capacity_factor:g}: use these, or model.ffn.impl=grouped"
      )

  def check_candidate(self, transport: str) -> None:
    """Checks that `train.tune` may try a transport: one that drops what this one drops.

    Args:
      transport: a word of `TRANSPORTS`.

    Raises:
      ConfigError: one of the two would drop choices and the other none; or this transport is the
        user's own, of which nobody knows what it drops.
    """
    if self.kind is None:
      raise ConfigError(
        f"train.tune tries transport={transport}, which may drop other choices than one's own "
        f"dispatch.transport={self.transport}, so their times do not compare: leave it out"
      )
    drops = TRANSPORTS[transport].drops
    if self.kind.drops != drops and self.capacity_factor:
      one, other = (transport, self.transport) if drops else (self.transport, transport)
      raise ConfigError(
        f"train.tune tries transport={transport} beside dispatch.transport={self.transport}: "
        f"{one} drops choices beyond its capacity, and {other} drops none; leave it out, or set "
        "dispatch.capacity_factor=0, with which no transport drops any"
      )

  @staticmethod
  def check_gathers(experts: str, *, own: bool) -> None:
    """Checks that experts gather weights, as `adaptive_r` = 0 on several devices has them do.

    Args:
      experts: their name, for the message.
      own: whether they are the user's own, which see their own device's experts only.

    Raises:
      ConfigError: they are.
    """
    if own:
      raise ConfigError(
        "dispatch.adaptive_r=0 gathers the weights of all experts on every device, which only "
        f"model.experts=ffn does, got {experts}; use dispatch.adaptive_r=1, also in train.tune"
      )

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
