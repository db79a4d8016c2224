"""The options that a vision model has and a language model has not; imports no jax."""

from __future__ import annotations

import dataclasses

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option
from scmoe.blocks.wiring import WIRINGS

STEMS = ("patch", "conv")
STEM_NORMS = ("layer", "group")
ARCHITECTURES = ("gpt", "vit", "swin")


@dataclasses.dataclass(frozen=True)
class VisionConfig(Options, path="model.vision"):
  """The image, how it becomes tokens, and the stages of a Swin."""

  size: int = option(32, "side of the square images, in pixels; others are resized", minimum=1)
  channels: int = option(3, "channels of an image: 3 (RGB) or 1 (grey)", minimum=1, maximum=3)
  classes: int = option(10, "classes that images may be of", minimum=2)
  patch: int = option(4, "side of the square of pixels that becomes a token", minimum=1)
  stem: str = option(
    "patch",
    "how pixels become tokens: patch (one product per patch; ViT, Swin), or conv (3 x 3 "
    "convolutions that halve the side; arXiv 2106.14881), for which patch is a power of 2",
    choices=STEMS,
  )
  stem_convolutions: int = option(
    1,
    "stem=conv: convolutions at each size that is halved; the last one has stride 2, those before "
    "it stride 1, which see more of an image's detail",
    minimum=1,
    maximum=16,
  )
  stem_norm: str = option(
    "layer",
    "stem=conv: norm after each convolution: layer (over a pixel's channels), or group (over an "
    "image's pixels and 16 channels, or the greatest common divisor of 16 and their number; arXiv "
    "1803.08494)",
    choices=STEM_NORMS,
  )
  value_convolution: int = option(
    0,
    "side of a convolution of each attention's values over the grid of tokens, which is added to "
    "its output and tells a token's neighbours from the rest (LePE of CSWin, arXiv 2107.00652); an "
    "odd number, 3 is usual; 0: none",
    minimum=0,
    maximum=15,
  )
  depths: str = option(
    "2,2,6,2",
    "swin: blocks of each stage. Every stage has half the tokens' side and twice the width and "
    "heads of the one before; model.width and model.num_heads are the first one's",
  )
  window: int = option(4, "swin: side of an attention's window, in tokens", minimum=1)
  moe_stages: int = option(
    2, "swin: the last stages that have a MoE; those before are dense", minimum=0
  )
  last_wiring: str = option(
    "",
    "swin: wiring of the last stage; empty: model.wiring where that has no shortcut, else its "
    "baseline (shared_expert, or top2 where there is no shared expert), as in the paper, whose "
    "ScMoE changes stage 3 alone",
    choices=("", *WIRINGS),
  )

  @property
  def side(self) -> int:
    """Tokens on a side of an image after the stem: one per patch."""
    return self.size // self.patch

  @property
  def stage_depths(self) -> tuple[int, ...]:
    """Blocks of each stage of a Swin: `depths` as numbers.

    Raises:
      ConfigError: it is no list of numbers from 1 to 999.
    """
    parts = [part.strip() for part in self.depths.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 1000 for part in parts):
      raise ConfigError(
        f"model.vision.depths={self.depths!r} is no list of numbers from 1; use e.g. 2,2,6,2"
      )
    return tuple(map(int, parts))

  def check(self) -> None:
    """Checks `channels`, `size`, `value_convolution` and the stem; `check_stages` the stages.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    if self.channels == 2:
      raise ConfigError("model.vision.channels=2 is no kind of image; use 3 (RGB) or 1 (grey)")
    if self.size % self.patch:
      raise ConfigError(
        f"model.vision.size={self.size} is not a multiple of model.vision.patch={self.patch}; use "
        f"a patch that divides {self.size}"
      )
    if self.stem == "conv" and (self.patch < 2 or self.patch & (self.patch - 1)):
      raise ConfigError(
        f"model.vision.stem='conv' halves the side with each convolution, got model.vision.patch="
        f"{self.patch}; use a power of 2, from 2"
      )
    if self.stem != "conv" and self.stem_convolutions != 1:
      raise ConfigError(
        f"model.vision.stem_convolutions={self.stem_convolutions} is of stems with convolutions, "
        f"got model.vision.stem={self.stem!r}; use model.vision.stem=conv"
      )
    if self.stem != "conv" and self.stem_norm != "layer":
      raise ConfigError(
        f"model.vision.stem_norm={self.stem_norm!r} is of stems with convolutions, got "
        f"model.vision.stem={self.stem!r}; use model.vision.stem=conv"
      )
    if self.value_convolution and not self.value_convolution % 2:
      raise ConfigError(
        f"model.vision.value_convolution={self.value_convolution} has no middle; use an odd "
        "number, or 0 for none"
      )
