"""A block pair: transformer blocks and their MoE, run in the order of a schedule.

With the usual two blocks per unit this is the paper's pair, Block-MLP + Block-MoE. The order
changes no value: sequential and overlapped executions compute the same function.
"""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.options import check_array, check_type
from scmoe.blocks.block import BlockConfig
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.schedule import make_schedule
from scmoe.blocks.turns import in_turns
from scmoe.blocks.unit import Unit
from scmoe.blocks.walk import Context, PairOutput, PairWalk
from scmoe.blocks.wiring import Tap, is_handed_over
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.experts import Experts
from scmoe.moe.layer import MoE
from scmoe.moe.options import RouterConfig


class BlockPair(nnx.Module):
  """The blocks around one MoE: a unit, or two that share its experts (dgmoe_share).

  With the wiring `dense` it is a unit without MoE. It works on one device as it is, and in the
  manual region (`scmoe.manual`) on many.

  Args:
    config: wiring and sizes.
    router, dispatch, overlap: options of routing, transport and schedule.
    experts, gates: the user's own; see `MoE`.
    hands_over: for a pair without experts: which of its values the next pair reads.
    rngs: stream `params` for the initial weights.

  Attributes:
    passed_on: which of its values the next pair reads (`_passed_on`).

  Raises:
    ConfigError: an argument is of another type, options do not fit each other, or see
      `make_schedule` and `MoE`.
  """

  def __init__(
    self,
    config: BlockConfig,
    *,
    router: RouterConfig = RouterConfig(),
    dispatch: DispatchConfig = DispatchConfig(),
    overlap: OverlapConfig = OverlapConfig(),
    experts: Experts | None = None,
    gates: list[Any] | None = None,
    hands_over: Tap | None = None,
    rngs: nnx.Rngs,
  ):
    for name, value, cls in (
      ("config", config, BlockConfig),
      ("router", router, RouterConfig),
      ("dispatch", dispatch, DispatchConfig),
      ("overlap", overlap, OverlapConfig),
      ("rngs", rngs, nnx.Rngs),
    ):
      check_type(name, value, cls)
    config = config.resolve()
    rule = config.wiring_rule
    self.config, self.wiring, self.hands_over = config, rule, hands_over
    self.schedule = make_schedule(rule, config.moe_every, overlap, dispatch.chunks)
    opening = rule.opening if config.moe_every > 1 else rule
    self.opening = opening, make_schedule(opening, config.moe_every, overlap, dispatch.chunks)
    self.chunks = dispatch.chunks
    self.skips = rule.skips or hands_over is Tap.UNROUTED
    unit = functools.partial(Unit, config, skips=self.skips, rngs=rngs)
    self.units = nnx.List([unit() for _ in range(rule.units_per_moe)])
    moe = config.moe(router, dispatch, copy_engines=overlap.copy_engines)
    self.moe = MoE(moe, experts=experts, gates=gates, rngs=rngs) if rule.taps else None
    self.passed_on = self._passed_on()

  def __call__(
    self,
    h_BSD: Float[Array, "B S D"],
    context: Context = Context(),
    *,
    handed_BSD: Float[Array, "B S D"] | None = None,
    caches: list[list[Any]] | None = None,
  ) -> PairOutput:
    """Runs the steps of the schedule, one unit after the other.

    Args:
      h_BSD: the residual stream.
      context: see `Context`.
      handed_BSD: `PairOutput.handed_BSD` of the pair before. None if no pair precedes: then the
        experts or the attention that would read it read the input of this pair (for experts this is
        the paper's L0 Pos-1).
      caches: of the attentions [units][blocks], as `empty_cache` makes them, or None.

    Raises:
      ConfigError: h is not [batch, sequence, width], or `context` no `Context`, or an array of it
        no array.
    """
    check_array("h_BSD", h_BSD)
    check_type("context", context, Context)
    for name in ("positions_BS", "segments_BS", "mask_BS"):
      if (value := getattr(context, name)) is not None:
        check_array(name, value)
    walk = PairWalk(self, h_BSD, context, handed_BSD, caches)
    for run, step in in_turns([walk]):
      run(step)
    return walk.output

  def as_first(self) -> BlockPair:
    """Gives this pair the wiring and schedule of a model's first pair (`Wiring.first`); returns it.

    The pair itself changes; so it must be one that a pass has merged for its own use.
    """
    self.wiring, self.schedule = self.opening
    self.passed_on = self._passed_on()
    return self

  def _passed_on(self) -> Tap | None:
    """The value that this pair hands over to the next one; None if the next one reads none.

    With experts it follows from the wiring (`is_handed_over`, `Wiring.skips`); without experts it
    is `hands_over`.
    """
    if not self.wiring.taps:
      return self.hands_over
    if self.wiring.skips:
      return Tap.UNROUTED
    tap = self.wiring.taps[0]
    return tap if is_handed_over(tap, self.config.moe_every) else None
