"""The stages of a vision model: block pairs of one width over one grid of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.layers.grid_attention import GridAttention
from scmoe.layers.window_attention import WindowAttention
from scmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class StageConfig(ModelConfig):
  """Options of one stage's blocks, whose attention spans an image's whole grid, or windows of it.

  The other fields are those of `ModelConfig`, with the widths of this stage.

  Attributes:
    side: tokens on a side of the square grid of an image's tokens.
    window_side: tokens on a side of an attention's window; 0: the whole grid at once.
    all_blocks: number of blocks in all stages, which write to one residual stream.
  """

  side: int = 1
  window_side: int = 0
  all_blocks: int = 1

  @property
  def tokens(self) -> int:
    """Number of tokens of an image in this stage."""
    return self.side * self.side

  @property
  def seen(self) -> int:
    """Most tokens that a token attends to: those of a window, or of the grid without windows."""
    return (self.window_side or self.side) ** 2

  @property
  def depth(self) -> int:
    """Number of blocks that write to one residual stream: those of all stages."""
    return self.all_blocks

  def make_attention(self, rngs: nnx.Rngs, number: int = 0) -> GridAttention:
    """An attention over the grid or, in a Swin, its windows, which every other block shifts.

    Args:
      rngs: stream `params` for the initial weights.
      number: number of the block in its unit, from 0. Blocks of odd number have shifted windows, if
        windows are smaller than the grid.
    """
    config: Any = dataclasses.replace(self.attention, causal=False)  # pyright: ignore
    shape = {"side": self.side, "kernel_side": self.vision.value_convolution}
    if not self.window_side:
      return GridAttention(config, **shape, rngs=rngs)
    windows = {"window": self.window_side, "shifted": number % 2 == 1}
    return WindowAttention(config, **shape, **windows, rngs=rngs)


def stages_of(config: ModelConfig) -> tuple[StageConfig, ...]:
  """The stages of a resolved vision model: one for a ViT, one for each of `depths` for a Swin.

  Raises:
    ConfigError: `vision.depths` is no list of numbers, or a field of a stage is out of range.
  """
  vision = config.vision
  given = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)}
  given["architecture"] = "vit"  # a stage of a Swin is a ViT, apart from its windows
  if config.architecture == "vit":
    return (StageConfig(**given, side=vision.side, all_blocks=config.num_layers),)
  depths, found = vision.stage_depths, []
  for i, depth in enumerate(depths):
    scale, side = 2**i, vision.side // 2**i
    sizes = {
      name: getattr(config, name) * scale
      for name in ("width", "num_heads", "num_kv_heads", "mlp_hidden", "expert_hidden",
                   "shared_hidden")
    }  # fmt: skip
    found.append(
      StageConfig(
        **given | sizes | {"num_layers": depth, "wiring": wiring_of_stage(config, i)},
        side=side,
        window_side=min(vision.window, side),
        all_blocks=sum(depths),
      )
    )
  return tuple(found)


def routed_lengths(config: ModelConfig, seq_len: int) -> tuple[int, ...]:
  """For each trunk with routed experts the number of tokens of a row of text, or of an image.

  A language model has one trunk, whose number is given even without routed experts.

  Args:
    config: resolved options of a model of any architecture.
    seq_len: tokens of a row of text; the number for an image follows from `config`.
  """
  if not config.reads_images:
    return (seq_len,)
  return tuple(stage.tokens for stage in stages_of(config) if stage.wiring_rule.taps)


def wiring_of_stage(config: ModelConfig, stage: int) -> str:
  """The wiring (a word of `model.wiring`) of stage number `stage`, from 0, of a Swin."""
  vision, last = config.vision, len(config.vision.stage_depths) - 1
  if stage <= last - vision.moe_stages:
    return "dense"
  if stage < last or (not vision.last_wiring and not config.wiring_rule.is_shortcut):
    return config.wiring
  return vision.last_wiring or ("shared_expert" if config.wiring_rule.shared_expert else "top2")


def check_stages(config: ModelConfig) -> None:
  """Checks that every stage of a resolved vision model can be built.

  Raises:
    ConfigError: names the field, what was got and what would do.
  """
  vision = config.vision
  if config.architecture == "swin":
    count, side = len(vision.stage_depths), vision.side
    if side % 2 ** (count - 1):
      raise ConfigError(
        f"model.vision.size={vision.size} in patches of {vision.patch} is {side} tokens a side, "
        f"which {count - 1} mergers do not halve evenly; use a multiple of "
        f"{vision.patch * 2 ** (count - 1)} pixels, or fewer stages in model.vision.depths"
      )
    if config.moe_every % 2:
      raise ConfigError(
        f"model.moe_every={config.moe_every}: a Swin shifts the windows of every other block of a "
        "unit; use an even number"
      )
  for number, stage in enumerate(stages_of(config)):
    if stage.window_side and stage.side % stage.window_side:
      raise ConfigError(
        f"model.vision.window={vision.window} does not divide the {stage.side} tokens on a side of "
        f"stage {number + 1}; use a divisor"
      )
    try:
      stage.check()
    except ConfigError as error:
      raise ConfigError(f"stage {number + 1} of model.vision: {error}") from None
