"""Rotary position embeddings, and how their frequencies are scaled down for longer contexts."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig(Options, path="model.rope"):
  """How rotary embeddings turn; most names are those of `rope_scaling` in published models."""

  interleaved: bool = option(
    False,
    "rotate the pairs (2i, 2i+1) (DeepSeek's rope_interleave); else the pairs (i, i + N/2)",
  )
  share: float = option(
    1.0,
    "part of a head that turns, its first elements (GLM-4.5 partial_rotary_factor)",
    minimum=0,
    maximum=1,
  )
  scaling: str = option(
    "none",
    "longer contexts (rope_type): linear (divides all frequencies by factor), llama3 (the low "
    "ones), yarn (arXiv 2309.00071)",
    choices=SCALINGS,
  )
  factor: float = option(1.0, "length of the context over that of the original one", minimum=0)
  original_context: int = option(
    0, "context before stretching (original_max_position_embeddings); llama3 and yarn", minimum=0
  )
  beta_fast: float = option(32.0, "yarn: frequencies with at least so many turns in the original "
                            "context stay", minimum=0)  # fmt: skip
  beta_slow: float = option(1.0, "yarn: frequencies with at most so many turns in the original "
                            "context are divided by factor", minimum=0)  # fmt: skip
  truncate: bool = option(True, "yarn: the ramp from beta_fast to beta_slow begins and ends at "
                          "whole dimensions")  # fmt: skip
  attention_factor: float = option(
    0.0, "yarn: factor on sine and cosine; 0: from factor, mscale and mscale_all_dim", minimum=0
  )
  mscale: float = option(0.0, "yarn: see attention_factor", minimum=0)
  mscale_all_dim: float = option(
    0.0, "yarn: see attention_factor; latent attention also multiplies its scores by (0.1 · "
    "mscale_all_dim · ln factor + 1)²", minimum=0
  )  # fmt: skip
  low_freq_factor: float = option(1.0, "llama3: frequencies with at most so many turns in the "
                                  "original context are divided by factor", minimum=0)  # fmt: skip
  high_freq_factor: float = option(4.0, "llama3: frequencies with at least so many turns in the "
                                   "original context stay", minimum=0)  # fmt: skip

  def check(self) -> None:
    """Checks what depends on more than one field.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    if self.scaling != "none" and self.factor < 1:
      raise ConfigError(f"model.rope.factor={self.factor} must be at least 1")
    if self.scaling in ("llama3", "yarn") and not self.original_context:
      raise ConfigError(
        f"model.rope.original_context=0 does not go with model.rope.scaling={self.scaling!r}; give "
        "the context that the model had before it was stretched"
      )
    if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
      raise ConfigError(
        f"model.rope.high_freq_factor={self.high_freq_factor} must be larger than "
        f"model.rope.low_freq_factor={self.low_freq_factor}"
      )

    if self.scaling == "yarn" and not 0 < self.beta_slow < self.beta_fast:
      raise ConfigError(
        f"model.rope.beta_slow={self.beta_slow} must be larger than 0, and smaller than "
        f"model.rope.beta_fast={self.beta_fast}; usual are 1 and 32"
      )

  def turning(self, dim: int) -> int:
    """Elements of a head of width `dim` that turn: an even number if `dim` is even."""
    return dim if self.share == 1 else int(dim * self.share) // 2 * 2

  @property
  def amplitude(self) -> float:
    """Factor on sine and cosine: 1, but for yarn (√(1/t) of its paper, t being the temperature).

    With yarn it is `attention_factor`. If that is 0, it is m(mscale) / m(mscale_all_dim) with m(s)
    = 0.1 · s · ln factor + 1; and if one of the two is 0, m(1).
    """
    if self.scaling != "yarn":
      return 1.0
    if self.attention_factor:
      return self.attention_factor
    if self.mscale and self.mscale_all_dim:
      return _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
    return _magnitude(self.factor, 1.0)

  @property
  def score_factor(self) -> float:
    """Factor on latent attention's scores (DeepSeek-V2); 1 without yarn or `mscale_all_dim`."""
    stretched = self.scaling == "yarn" and self.mscale_all_dim
    return _magnitude(self.factor, self.mscale_all_dim) ** 2 if stretched else 1.0

  def frequencies(self, dim: int, theta: float) -> np.ndarray:
    """Radians per position of each of the dim/2 pairs, float32."""
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    stretched = plain / self.factor
    match self.scaling:
      case "linear":
        found = stretched
      case "llama3":
        # `high` is 0 for frequencies with at most the lower number of turns, 1 for those with at
        # least the higher one.
        turns = self.original_context * plain / (2 * math.pi)
        bounds = self.high_freq_factor - self.low_freq_factor
        high = np.clip((turns - self.low_freq_factor) / bounds, 0, 1)
        found = stretched * (1 - high) + plain * high
      case "yarn":
        place = lambda turns: (
          dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )
        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
          low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        found = stretched * ramp + plain * (1 - ramp)
      case _:
        found = plain
    return found.astype(np.float32)


PLAIN, NEIGHBOURS = RopeConfig(), RopeConfig(interleaved=True)


def turns(positions: Array, dim: int, theta: float, rope: RopeConfig = PLAIN) -> Array:
  """Sine and cosine, times the amplitude, of each pair at each position: float32 [2, ..., dim/2].

  Args:
    positions: int32 [...].
    dim: even number of elements that turn; `rope.share` is not applied.
    theta, rope: see `rotate`.
  """
  frequency_N = jnp.asarray(rope.frequencies(dim, theta))
  angle = positions[..., None].astype(jnp.float32) * frequency_N
  return jnp.stack([rope.amplitude * jnp.sin(angle), rope.amplitude * jnp.cos(angle)])


def rotate(x_BSHN: Array, positions_BS: Array, theta: float, rope: RopeConfig = PLAIN) -> Array:
  """Rotary position embedding; pair i turns by position · theta^(-2i/N), stretched as configured.

  Pairs are (i, i + N/2), or (2i, 2i+1) where they are interleaved; the elements of a pair keep
  their places. Sine and cosine are multiplied by `rope.amplitude`. With `rope.share` < 1 this is
  done to the first `rope.turning(N)` elements, as to a head of that width; the rest stay as they
  are.

  Args:
    x_BSHN: queries or keys, N even.
    positions_BS: int32 position of each token.
    theta: base.
    rope: pairs and scaling.
  """
  turning = rope.turning(x_BSHN.shape[-1])
  if turning < x_BSHN.shape[-1]:
    whole = dataclasses.replace(rope, share=1.0)
    turned = rotate(x_BSHN[..., :turning], positions_BS, theta, whole)
    return jnp.concatenate([turned, x_BSHN[..., turning:]], -1)
  sin, cos = turns(positions_BS[..., None], turning, theta, rope)
  wide = x_BSHN.astype(jnp.float32)
  if rope.interleaved:
    first, second = wide[..., 0::2], wide[..., 1::2]
  else:
    first, second = jnp.split(wide, 2, -1)
  turned = first * cos - second * sin, second * cos + first * sin
  if rope.interleaved:
    return jnp.stack(turned, -1).reshape(x_BSHN.shape).astype(x_BSHN.dtype)
  return jnp.concatenate(turned, -1).astype(x_BSHN.dtype)


def _magnitude(factor: float, mscale: float) -> float:
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
