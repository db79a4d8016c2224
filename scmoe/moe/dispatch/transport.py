"""The protocol of transports, and the choice of one for a call of the layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from jax import Array
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import construct, is_import_path
from scmoe.base.options import check_choice, check_type
from scmoe.moe.dispatch.capacity import Capacity, capacity
from scmoe.moe.dispatch.dropless import Dropless
from scmoe.moe.dispatch.local import Local
from scmoe.moe.dispatch.options import DispatchConfig
from scmoe.moe.dispatch.packed import Packed
from scmoe.moe.options import ORDERS
from scmoe.moe.types import Dispatched, Routing
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import BATCH_AXES, axis_size


class Transport(Protocol):
  """How rows get to the experts and back; `tests/contracts/test_transports.py` is the contract."""

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """Brings rows to the devices of their experts.

    Args:
      x_TD: the tokens of this device.
      routing: their choices.
      experts: `(rows, layout) -> rows`; for transports that compute some rows within dispatch, as
        `Dropless` does in its overflow rounds.
    """
    ...

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """The inverse, after the experts: y[t] = Σ_k weight[t, k] · expert[t, k](x[t]), in the rows'
    type.

    Args:
      sent: the result of `dispatch`, with the experts' outputs in place of its rows.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Computed:
  """Hands the choices of computing experts to another transport, without those of zero experts.

  Attributes:
    inner: the transport of the computing experts' rows.
  """

  inner: Transport

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """See `Transport.dispatch`."""
    return self.inner.dispatch(x_TD, routing.computed, experts)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """The computing experts' part; `MoE.completed` adds the zero experts'. See `Transport`."""
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
  """The transport of a layer on this device.

  Without an exchange no buffer needs a fixed size. `capacity` then runs as `Packed`, unless the
  experts take buffers of equal size. A user's own transport (`dispatch.transport=module:Name`) is
  called with `config`, `tokens`, `num_experts`, `k`, `order`, `capacity_factor`, `no_drop` and
  `exchange`.

  Args:
    config: of the layer.
    tokens: T of this device.
    num_experts: E, those that compute.
    k: choices per token.
    order: who is served first; see `queue_positions`.
    capacity_factor: for this call, instead of the configured one (Tutel's runtime capacity); 0
      drops nothing.
    no_drop: whatever the configuration says, drop nothing (decoding, exact evaluation).
    buffers: the experts take buffers of equal size (`model.ffn.impl=batched`).
    zero_experts: number of zero experts, with ids from E on; their choices send no rows.
    real_share: expected share of the choices that computing experts get; buffers are sized for it.

  Raises:
    ConfigError: an argument is out of range, a buffer would have no rows, or groups do not divide.
  """
  check_type("config", config, DispatchConfig)
  check_choice("order", order, ORDERS)
  for name, value, least in (("tokens", tokens, 0), ("num_experts", num_experts, 1), ("k", k, 1)):
    if value < least:
      raise ConfigError(f"{name}={value} is too small; the least is {least}")
  if capacity_factor is not None and not math.isfinite(capacity_factor):
    raise ConfigError(f"capacity_factor={capacity_factor} is not finite; use 0 to drop nothing")
  if zero_experts:
    of_computed = make_transport(
      config,
      tokens=tokens,
      num_experts=num_experts,
      k=math.ceil(k * real_share) or 1,
      order=order,
      capacity_factor=capacity_factor,
      no_drop=no_drop,
      buffers=buffers,
    )
    return Computed(of_computed)
  exchange = make_exchange(config)
  if is_import_path(config.transport):
    given = {"tokens": tokens, "num_experts": num_experts, "k": k, "order": order}
    given |= {"capacity_factor": capacity_factor, "no_drop": no_drop, "exchange": exchange}
    needs = ("dispatch", "combine")
    return construct(config.transport, "dispatch.transport", config, **given, needs=needs)
  factor = config.capacity_factor if capacity_factor is None else capacity_factor
  lossless = no_drop or factor == 0
  lossless |= capacity_factor is None and config.transport == "dropless"
  if lossless and exchange.size == 1:
    return Local()
  if lossless:
    return Dropless(exchange, config.slack, config.chunks, order)
  groups = _local_groups(config)
  size = tokens // groups
  rows = capacity(factor, tokens=size, num_experts=num_experts, k=k)
  rows = min(size, rows)  # a queue never holds more than the tokens of its group
  if config.transport == "packed" or (exchange.size == 1 and not buffers):
    local = num_experts // exchange.size
    longest = min(tokens * k, local * groups * rows)
    inner = Dropless(exchange, config.slack, config.chunks, order, longest)
    return Packed(rows, inner if exchange.size > 1 else Local(), groups, order)
  rows += -rows % config.chunks
  return Capacity(rows, exchange, groups, config.chunks, order)


def make_exchange(config: DispatchConfig) -> Exchange:
  """The exchange of rows over the expert axis. It moves nothing if that axis has one device, or if
  weights are gathered instead of rows (`adaptive_r` = 0)."""
  size = axis_size("expert")
  if size == 1 or config.adaptive_r == 0:
    return Exchange()
  return Exchange("expert", size, config.nodes, config.ablation.silent)


def _local_groups(config: DispatchConfig) -> int:
  """Capacity groups of one device: `dispatch.groups` divided by the number of batch shards."""
  shards = axis_size(*BATCH_AXES)
  groups = config.groups or shards
  if groups % shards:
    raise ConfigError(
      f"dispatch.groups={groups} is not a multiple of mesh.data x mesh.expert = {shards}; "
      f"use 0 (one per device) or a multiple of {shards}"
    )
  return groups // shards
