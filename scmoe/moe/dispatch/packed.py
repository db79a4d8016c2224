"""The packed transport: capacity's drops, without capacity's buffer of C rows for every expert.

`Capacity` sends C rows for every expert and capacity group, filled or not. With a capacity factor
of 2, usually half of the rows that travel and that the experts compute, or more, are padding. This
transport drops the same choices (`kept_choices`) and sends the kept ones as `Dropless` does: in
rounds, over a buffer per rank of at most `dispatch.slack` times the balanced share of the choices,
rounded up. Without an exchange they stay on their device (`Local`). The experts compute only kept
rows. Unless an ablation (`dispatch.ablation`) is on, the results are, but for rounding, those of
`Capacity` with the same C at another cost.

Worked example: two ranks with one expert each, C = 2. Four tokens of rank 0 choose the experts 0,
0, 0 and 1; token 2 is dropped. `Packed` queues the tokens 0 and 1 for rank 0 and the token 3 for
rank 1, and rank 1's expert computes one row of rank 0. `Capacity` sends two rows to each rank, one
of the two to rank 1 empty, and rank 1's expert computes both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.base.options import check_type
from scmoe.moe.dispatch.capacity import kept_choices
from scmoe.moe.dispatch.dropless import Dropless
from scmoe.moe.dispatch.local import Local
from scmoe.moe.types import Dispatched, Routing


@dataclasses.dataclass(frozen=True)
class Packed:
  """The transport that drops the choices that `Capacity` drops, and sends those that are kept.

  Attributes:
    rows: C, the most rows that an expert takes from one capacity group of one device.
    inner: the transport of the kept choices: `Dropless`, or `Local` without an exchange.
    groups: G, capacity groups of this device.
    order: who is served first; see `queue_positions`.
  """

  rows: int
  inner: Dropless | Local
  groups: int = 1
  order: str = "choice"

  @property
  def sends_ahead(self) -> bool:
    """Whether the kept rows travel to other devices, or would but for the ablation `silent`.

    See `Transport`.
    """
    return isinstance(self.inner, Dropless) and self.inner.sends_ahead

  def dispatch(self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any) -> Dispatched:
    """Drops and counts choices beyond capacity, and sends the rest; see `Transport.dispatch`.

    Raises:
      ConfigError: T is not a multiple of G, `order` is unknown, or `routing` is no `Routing`.
    """
    check_type("routing", routing, Routing)
    _, kept_TK, count_GE = kept_choices(routing, self.rows, self.groups, self.order)
    kept_GE = jnp.minimum(count_GE, self.rows)
    kept = dataclasses.replace(routing, made_TK=kept_TK, count_E=kept_GE.sum(0, dtype=jnp.int32))
    sent = self.inner.dispatch(x_TD, kept, experts)
    return dataclasses.replace(sent, dropped=(count_GE - kept_GE).sum(dtype=jnp.int32))

  def overflow(
    self, x_TD: Float[Array, "T D"], routing: Routing, sent: Dispatched, experts: Any
  ) -> Dispatched:
    """Runs the overflow rounds of the kept rows; see `Dropless.overflow`."""
    assert isinstance(self.inner, Dropless), "rows that stay on their device need no round"
    return self.inner.overflow(x_TD, routing, sent, experts)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """Adds up the kept rows' outputs for each token, as `inner` does; see `Transport.combine`."""
    return self.inner.combine(sent)
