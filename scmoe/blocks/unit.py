"""A transformer block, and a unit of blocks around one expert stage, as modules with several parts.

They fix no order of their parts: `scmoe.blocks.walk` runs the parts in the order of a schedule.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from scmoe.blocks.block import BlockConfig
from scmoe.blocks.mix import Mix
from scmoe.blocks.wiring import Tap, is_handed_over
from scmoe.layers.mlp import MLP


def times(x: Array, factor: float) -> Array:
  """x · factor in the type of x; x itself for a factor of 1."""
  return x if factor == 1 else x * factor


class Block(nnx.Module):
  """One transformer block: attention and, with `hidden` > 0, a feed-forward sublayer.

  The sublayer is a dense MLP or the shared expert. A block has none where only routed experts
  follow its attention.

  Args:
    config: options of the blocks.
    hidden: width of the sublayer; 0: none.
    number: of the block in its unit, from 0; windowed attention shifts every other block's windows.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: BlockConfig, hidden: int, *, number: int = 0, rngs: nnx.Rngs):
    self.residual_multiplier = config.residual_multiplier
    self.norm_attention = config.norm()
    self.attention = config.make_attention(rngs, number)
    self.norm_mlp = config.norm()
    self.mlp = MLP(config.mlp(hidden), rngs=rngs) if hidden else None

  def project(
    self, h_BSD: Float[Array, "B S D"], positions_BS: Int[Array, "B S"], **kind: Any
  ) -> Any:
    """The first half of the attention: queries, keys and values from the normalised h.

    Args:
      h_BSD: the value that the attention reads: the residual stream, or `Tap.UNROUTED`.
      positions_BS, kind: see `Attention.project`.
    """
    return self.attention.project(self.norm_attention(h_BSD), positions_BS, **kind)

  def mix(self, h_BSD: Float[Array, "B S D"], projected: Any, *args: Any, **options: Any) -> Any:
    """The second half: the residual stream with the attention's output added, and the cache.

    Args:
      h_BSD: the residual stream.
      projected: what `project` returned.
      args, options: positions, segments, cache, `begins` and `kind`; see `Attention.mix`.
    """
    y_BSD, cache = self.attention.mix(projected, *args, **options)
    return self.added(h_BSD, y_BSD), cache

  def added(self, h_BSD: Array, y_BSD: Array) -> Array:
    """The residual stream plus a sublayer's output times `model.residual_multiplier`."""
    return h_BSD + times(y_BSD, self.residual_multiplier)

  def dense(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The output of the dense MLP or shared expert, which the block must have.

    Args:
      h_BSD: what the sublayer reads, not normalised yet.
    """
    assert self.mlp is not None
    return self.mlp(self.norm_mlp(h_BSD))


class Unit(nnx.Module):
  """`moe_every` blocks; the last one ends in the expert stage, whose norms and mix are here too.

  With the wiring `dense` there is no expert stage.

  `model.shortcut_norm` says what normalises the value that the shortcut hands to the experts:
  "shared": the norm of the sublayer that reads the same value (LongCat-Flash); "own": a norm of its
  own; "megatron": a norm of its own, and another one on shared + routed before the residual
  addition (Megatron-LM ShortcutMoE). Only wirings with a shortcut have such norms; with
  `model.ablation.norm_after` every wiring has the one on shared + routed.

  Args:
    config: options of the blocks.
    skips: see `Wiring.skips`; a unit without experts can be one of a model that skips.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: BlockConfig, *, skips: bool = False, rngs: nnx.Rngs):
    rule = config.wiring_rule
    dense = [config.mlp_hidden] * config.moe_every
    if rule.taps:
      dense[-1] = config.shared_hidden if rule.shared_expert else 0
    self.blocks = nnx.List(
      [Block(config, hidden, number=i, rngs=rngs) for i, hidden in enumerate(dense)]
    )
    self.shared_norm = config.shortcut_norm == "shared"
    self.mix_current = config.ablation.mix_input == "current"
    self.skips = skips
    own = rule.is_shortcut and not self.shared_norm
    self.own_norm = config.norm() if own else None
    post = rule.is_shortcut and config.shortcut_norm == "megatron"
    post |= bool(rule.taps) and config.ablation.norm_after
    self.post_norm = config.norm() if post else None
    mix = lambda: Mix(config.mix, config.width, init_std=config.init_std, rngs=rngs)
    self.mix = mix() if rule.shared_expert else None

  def tapped(self, tap: Tap, h_BSD: Array, handed_BSD: Array | None) -> Array:
    """The normalised value that routed experts read.

    Args:
      tap: which value of the main path.
      h_BSD: the residual stream at the tap.
      handed_BSD: the value that `hand_over` of the unit before returned, where `is_handed_over`.
    """
    blocks = self.blocks
    if is_handed_over(tap, len(blocks)):
      assert handed_BSD is not None
      return handed_BSD if self.own_norm is None else self.own_norm(handed_BSD)
    if tap is Tap.CURRENT:
      return blocks[-1].norm_mlp(h_BSD)
    if self.own_norm is not None:
      return self.own_norm(h_BSD)
    if self.skips:  # any shared expert reads the same value, so its norm serves both
      return blocks[-1].norm_mlp(h_BSD)
    # The norm of the sublayer that reads the same value.
    norms = {
      Tap.BLOCK_INPUT: lambda: blocks[-2].norm_attention,
      Tap.ATTENTION: lambda: blocks[-2].norm_mlp,
      Tap.BLOCK_OUTPUT: lambda: blocks[-1].norm_attention,
    }
    return norms[tap]()(h_BSD)

  def hand_over(self, tap: Tap, h_BSD: Array) -> Array:
    """The value that this unit hands over to the next one's experts or, with `skips`, attention.

    For experts it is normalised here if the norm is shared; such units have one block. An attention
    normalises the value itself.

    Args:
      tap: which value of the main path.
      h_BSD: the residual stream at the tap.
    """
    if self.skips or not self.shared_norm:
      return h_BSD
    (block,) = self.blocks
    return (block.norm_mlp if tap is Tap.ATTENTION else block.norm_attention)(h_BSD)

  def add(
    self,
    h_BSD: Array,
    shared_BSD: Array | None,
    routed_BSD: Array,
    tapped_BSD: Any,
    fed_BSD: Array,
  ) -> Array:
    """The residual stream after the unit: h plus the routed output, mixed with any shared one.

    With `shortcut_norm=megatron` or `ablation.norm_after` a norm follows the mix. What is added to
    h is multiplied by `model.residual_multiplier`.

    Args:
      h_BSD: the residual stream before this output is added.
      shared_BSD: the shared expert's output; None without one.
      routed_BSD: the sum of all gatings' outputs.
      tapped_BSD: the input of the first gating.
      fed_BSD: the residual stream that the shared expert's norm reads.
    """
    if shared_BSD is not None and self.mix is not None:
      read_BSD = self.blocks[-1].norm_mlp(fed_BSD) if self.mix_current else tapped_BSD
      routed_BSD = self.mix(shared_BSD, routed_BSD, read_BSD)
    y_BSD = routed_BSD if self.post_norm is None else self.post_norm(routed_BSD)
    return self.blocks[-1].added(h_BSD, y_BSD)
