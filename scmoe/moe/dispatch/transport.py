"""The protocol of transports, the one that leaves out zero experts, and the choice for a call."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import construct, is_import_path
from scmoe.base.options import check_choice, check_type, check_whole
from scmoe.moe.dispatch.capacity import Capacity, capacity
from scmoe.moe.dispatch.dropless import Dropless
from scmoe.moe.dispatch.fp8_rows import Fp8Exchange
from scmoe.moe.dispatch.local import Local
from scmoe.moe.dispatch.options import DispatchConfig
from scmoe.moe.dispatch.packed import Packed
from scmoe.moe.dispatch.per_rank import PerRank
from scmoe.moe.dispatch.put import Put, check_put
from scmoe.moe.options import ORDERS
from scmoe.moe.types import Dispatched, Routing
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import TOKEN_AXES, axis_size


class Transport(Protocol):
  """The protocol of transports: how rows get to the experts and back.

  `tests/contracts/test_transports.py` tests what each transport has to fulfil. A transport may also
  have a property `sends_ahead`: True if it exchanges rows between devices, and `dispatch` can do so
  without the experts (`overlap.ahead`). One that then leaves out rows for later rounds gives
  `Dispatched.queues`, and has a method `overflow` like that of `Dropless`.
  """

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """Brings rows to the devices of their experts.

    Args:
      x_TD: the tokens of this device.
      routing: their choices.
      experts: `(rows, layout) -> rows`; for transports that compute some rows within dispatch, as
        `Dropless` does in its overflow rounds. None is passed only to transports for which
        `sends_ahead` is true; whoever reads the result then hands it to `overflow` first.

    Returns:
      The rows at their experts, and what `combine` needs.
    """
    ...

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """Brings the experts' outputs back and adds up those of each token; the result has their type.

    The result is `y[t] = Σ_k weight[t, k] · expert[t, k](x[t])` over the choices of computing
    experts that were taken and not dropped. If weights multiply the input, it is
    `Σ_k expert[t, k](weight[t, k] · x[t])`. The ablations (`dispatch.ablation`) may change the
    result.

    Args:
      sent: the result of `dispatch`, with the experts' outputs in place of its rows.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Computed:
  """A transport that leaves out zero experts and hands the other choices to another transport.

  Attributes:
    inner: the transport of the computing experts' rows.
  """

  inner: Transport

  @property
  def sends_ahead(self) -> bool:
    """That of the transport of the computing experts' rows."""
    return sends_ahead(self.inner)

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """Dispatches the choices of computing experts only; see `Transport.dispatch`."""
    return self.inner.dispatch(x_TD, routing.computed, experts)

  def overflow(
    self, x_TD: Float[Array, "T D"], routing: Routing, sent: Dispatched, experts: Any
  ) -> Dispatched:
    """Runs the overflow rounds of the computing experts' rows; see `overflow`."""
    return overflow(self.inner, x_TD, routing.computed, sent, experts)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """The computing experts' part of the output; `MoE.completed` adds the zero experts' part."""
    return self.inner.combine(sent)


def make_transport(
  config: DispatchConfig,
  *,
  tokens: int,
  num_experts: int,
  k: int,
  order: str = "choice",
  capacity_factor: float | None = None,
  no_drop: bool = False,
  buffers: bool = False,
  zero_experts: int = 0,
  real_share: float = 1.0,
) -> Transport:
  """Makes the transport of one call of a layer on this device.

  A call must not drop choices in three cases: `no_drop` is set; its capacity factor is 0; or
  `dispatch.transport` is `dropless`, `per_rank` or `put` and the argument `capacity_factor` is
  None. Without an exchange it then gets `Local`; with one it gets `PerRank` if the option is
  `per_rank`, `Put` if it is `put` (`Dropless` if `no_drop` is set), else `Dropless`. Other
  calls get `Packed` if the option is `packed`. They also get it without an exchange, where no
  buffer needs a fixed size, unless the experts take buffers of equal size. The rest get `Capacity`.

  With zero experts, `Computed` wraps the transport of the computing experts. The capacity C of
  `Capacity` and `Packed` is then that of ⌈k · real_share⌉ choices per token, at least 1. A user's
  own transport (`dispatch.transport=module:Name`) is called with `config`, `tokens`, `num_experts`,
  `k` (with zero experts that number), `order`, `capacity_factor`, `no_drop` and `exchange`,
  whatever the three cases say.

  Args:
    config: the layer's options of the transport.
    tokens: T of this device.
    num_experts: E, number of experts that compute.
    k: choices per token.
    order: who is served first; see `queue_positions`.
    capacity_factor: for this call, instead of the configured one (Tutel's runtime capacity); 0
      drops nothing. None: the configured one.
    no_drop: whether to drop nothing, whatever the configuration says (decoding, exact evaluation).
    buffers: whether the experts take buffers of equal size (`model.ffn.impl=batched`).
    zero_experts: number of zero experts, with ids from E on; their choices send no rows.
    real_share: with zero experts, the expected share of the choices that computing experts get;
      see above.

  Raises:
    ConfigError: an argument has a wrong type or value, `capacity` refuses the capacity factor,
      `dispatch.groups` does not divide evenly over the devices (for `Packed` and `Capacity`),
      `dispatch.nodes` does not divide the devices of an exchange, `dispatch.fp8` is on with the
      option `put`, the call would get `Put` where `check_put` refuses it, or the user's transport
      cannot be made.
  """
  check_type("config", config, DispatchConfig)
  check_choice("order", order, ORDERS)
  for name, value, least in (("tokens", tokens, 0), ("num_experts", num_experts, 1), ("k", k, 1)):
    check_whole(name, value, least)
  if capacity_factor is not None and not isinstance(capacity_factor, numbers.Real):
    raise ConfigError(
      f"capacity_factor={capacity_factor!r} is no number; use one such as 2.0, or 0 to drop nothing"
    )
  if capacity_factor is not None and not math.isfinite(capacity_factor):
    raise ConfigError(f"capacity_factor={capacity_factor} is not finite; use 0 to drop nothing")
  call = _Call(tokens, num_experts, k, order, capacity_factor, no_drop, buffers)
  if zero_experts:
    return Computed(_of_computing(config, call, math.ceil(k * real_share) or 1))
  return _of_computing(config, call, k)


class _Call(NamedTuple):
  """Arguments of `make_transport` for the computing experts, as that function explains them."""

  tokens: int
  num_experts: int
  k: int
  order: str
  capacity_factor: float | None
  no_drop: bool
  buffers: bool


def _of_computing(config: DispatchConfig, call: _Call, expected: int) -> Transport:
  """The transport of the computing experts; its capacity is that of `expected` choices per token.

  A token may choose more computing experts than expected, up to `call.k`.
  """
  tokens, num_experts, k, order, capacity_factor, no_drop, buffers = call
  config.check_fp8()
  exchange = make_exchange(config)
  if is_import_path(config.transport):
    given = {"tokens": tokens, "num_experts": num_experts, "k": expected, "order": order}
    given |= {"capacity_factor": capacity_factor, "no_drop": no_drop, "exchange": exchange}
    needs = ("dispatch", "combine")
    return construct(config.transport, "dispatch.transport", config, **given, needs=needs)
  # A call with `no_drop` runs its overflow rounds even in a training step that leaves out those of
  # other calls. Such a call is of a second model, for example of a teacher; the step does not count
  # the rows that this model would leave over, and so would not be run again.
  first = config.ablation.first_round and not no_drop
  factor = config.capacity_factor if capacity_factor is None else capacity_factor
  lossless = no_drop or factor == 0
  kind = config.kind
  lossless |= capacity_factor is None and kind is not None and not kind.drops
  if lossless and exchange.size == 1:
    return Local()
  # Puts were not tried in programs without gradients, and a batch to decode has few rows.
  if lossless and config.transport == "put" and not no_drop:
    check_put(exchange)
    options = {"first_round": first, "blocks": config.put_blocks}
    return Put(exchange, config.slack, config.chunks, order, **options)
  if lossless:
    sends = PerRank if config.transport == "per_rank" else Dropless
    return sends(exchange, config.slack, config.chunks, order, first_round=first)
  groups = _local_groups(config)
  size = tokens // groups
  rows = capacity(factor, tokens=size, num_experts=num_experts, k=expected)
  rows = min(size, rows)  # A queue never holds more than the tokens of its group.
  rows += -rows % config.chunks  # `Packed` rounds up too: it drops what `Capacity` drops.
  if config.transport == "packed" or (exchange.size == 1 and not buffers):
    local = num_experts // exchange.size
    longest = min(tokens * k, local * groups * rows)
    inner = Dropless(exchange, config.slack, config.chunks, order, longest, first)
    return Packed(rows, inner if exchange.size > 1 else Local(), groups, order)
  return Capacity(rows, exchange, groups, config.chunks, order)


def sends_ahead(transport: Transport) -> bool:
  """Whether a transport exchanges rows between devices, and can dispatch them without the experts.

  The transport's property of this name says so. A transport without it may compute rows within
  dispatch, so it counts as one that cannot. The ablation `silent`, which moves no row, counts as an
  exchange.
  """
  return getattr(transport, "sends_ahead", False)


def overflow(
  transport: Transport, x_TD: Array, routing: Routing, sent: Dispatched, experts: Any
) -> Dispatched:
  """Runs the overflow rounds that `dispatch` leaves out if its `experts` are None.

  Args:
    transport: one for which `sends_ahead` is true.
    x_TD, routing, experts: as for `Transport.dispatch`.
    sent: what `transport.dispatch` returned without experts.

  Returns:
    `sent` with the overflow rounds' output (`overflow_TD`); unchanged if there are no such rounds.
  """
  if sent.queues is None:
    return sent
  rounds: Any = transport
  return rounds.overflow(x_TD, routing, sent, experts)


def make_exchange(config: DispatchConfig) -> Exchange:
  """The exchange of rows over the expert axis, as the options configure it.

  The exchange moves nothing if that axis has one device, if experts' matrices are gathered and rows
  stay where they are (`adaptive_r` = 0), or in the ablation `silent`.

  Raises:
    ConfigError: the exchange would move rows, or is silent, and `dispatch.nodes` does not divide
      the axis' devices.
  """
  size = axis_size("expert")
  if size == 1 or config.adaptive_r == 0:
    return Exchange()
  kind = Fp8Exchange if config.fp8 else Exchange
  return kind("expert", size, config.nodes, config.ablation.silent)


def _local_groups(config: DispatchConfig) -> int:
  """Number of capacity groups of a device: `dispatch.groups` / shards, or 1 if that option is 0.

  The number of shards is the product of the sizes of `TOKEN_AXES`.

  Raises:
    ConfigError: `dispatch.groups` is not a multiple of the number of shards.
  """
  shards = axis_size(*TOKEN_AXES)
  groups = config.groups or shards
  if groups % shards:
    raise ConfigError(
      f"dispatch.groups={groups} is not a multiple of mesh.data x mesh.expert x mesh.sequence = "
      f"{shards}; "
      f"use 0 (one per device) or a multiple of {shards}"
    )
  return groups // shards
