"""Attention inside windows of a square grid of tokens, with a bias by relative position (Swin).

Swin Transformer (arXiv 2103.14030): a grid of tokens is cut into windows of M x M tokens, and each
token attends to those of its window. In every other block the cuts are moved by M/2 in both
directions, so that information passes between windows. The grid is then rolled, which puts tokens
of opposite edges into one window; a mask keeps these apart.

Example: a grid of 4 x 4 tokens in windows of 2 x 2, moved by 1. Rolled by 1 the last window holds
the grid's four corners, each of another side: every token there sees only itself.

    B  images    S  tokens of an image, G·G    G  side of the grid    M  side of a window
    W  windows of an image, (G/M)²    Q  tokens of a window, M·M    H  heads    N  width of a head
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.kernels.wide_sums import looked_up
from scmoe.layers.attention import AttentionConfig
from scmoe.layers.grid_attention import GridAttention


class WindowAttention(GridAttention):
  """`GridAttention` whose tokens see those of their window only.

  Args:
    config: options of the attention. `mix` ignores `causal`, `window`, `chunk`, `multiplier` and
      `sinks`. Leave out `rope_theta`: rotary positions have no meaning in a grid.
    side: G.
    window: M, a divisor of G.
    shifted: the windows are moved by ⌊M/2⌋, as in every other block; not if M = G.
    kernel_side: side of a convolution of the values over the whole grid, which is added to the
      windows' outputs (`ValueConvolution`); 0: none.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: the windows do not tile the grid, or heads of queries share those of keys.
  """

  def __init__(
    self,
    config: AttentionConfig,
    *,
    side: int,
    window: int,
    shifted: bool = False,
    kernel_side: int = 0,
    rngs: nnx.Rngs,
  ):
    if window < 1 or side % window:
      raise ConfigError(
        f"a window of {window} x {window} tokens does not tile a grid of {side} x {side}; use a "
        f"divisor of {side}"
      )
    if config.num_kv_heads != config.num_heads:
      raise ConfigError(
        f"windowed attention has as many heads of keys as of queries, got num_kv_heads="
        f"{config.num_kv_heads} and num_heads={config.num_heads}"
      )
    super().__init__(config, side=side, kernel_side=kernel_side, rngs=rngs)
    self.window = window
    # A window that is the whole grid has nothing beside it to move to.
    self.shift = window // 2 if shifted and window < side else 0
    shape = ((2 * window - 1) ** 2, config.num_heads)
    table = config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
    self.relative_bias = nnx.Param(table, axes=(None, "heads"))

  def attended(self, q_BSHN: Array, k_BSKN: Array, v_BSKN: Array) -> Float[Array, "B S H N"]:
    """The sum of the values of a token's window, weighted by the softmax of scores plus bias."""
    q_BWQHN, k_BWQHN, v_BWQHN = (
      into_windows(x, self.side, self.window, self.shift) for x in (q_BSHN, k_BSKN, v_BSKN)
    )
    # Scores and softmax in float32: a bfloat16 score of 30 is a multiple of 1/8.
    wide = jnp.promote_types(q_BWQHN.dtype, jnp.float32)
    scores = jnp.einsum("bwqhn,bwkhn->bwhqk", q_BWQHN, k_BWQHN, preferred_element_type=wide)
    scores = scores * q_BWQHN.shape[-1] ** -0.5 + self.bias_HQQ.astype(wide)
    if self.shift:
      seen_WQQ = neighbours(self.side, self.window, self.shift)
      scores = jnp.where(seen_WQQ[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(v_BWQHN.dtype)
    y_BWQHN = jnp.einsum("bwhqk,bwkhn->bwqhn", weights, v_BWQHN)
    return out_of_windows(y_BWQHN, self.side, self.window, self.shift)

  @property
  def bias_HQQ(self) -> Float[Array, "H Q Q"]:
    """The bias of each pair of places of a window, of this device's heads."""
    places_QQ = jnp.asarray(relative_places(self.window))
    return jnp.moveaxis(looked_up(self.relative_bias[...], places_QQ), -1, 0)


def into_windows(x_BSHN: Array, side: int, window: int, shift: int) -> Array:
  """[B, G·G, H, N] -> [B, W, Q, H, N], after the grid is rolled by `shift` up and to the left."""
  batch, _, *rest = x_BSHN.shape
  count = side // window
  x = x_BSHN.reshape(batch, side, side, *rest)
  if shift:
    x = jnp.roll(x, (-shift, -shift), (1, 2))
  x = x.reshape(batch, count, window, count, window, *rest).swapaxes(2, 3)
  return x.reshape(batch, count * count, window * window, *rest)


def out_of_windows(x_BWQHN: Array, side: int, window: int, shift: int) -> Array:
  """The inverse of `into_windows`: [B, G·G, H, N]."""
  batch, _, _, *rest = x_BWQHN.shape
  count = side // window
  x = x_BWQHN.reshape(batch, count, count, window, window, *rest).swapaxes(2, 3)
  x = x.reshape(batch, side, side, *rest)
  if shift:
    x = jnp.roll(x, (shift, shift), (1, 2))
  return x.reshape(batch, side * side, *rest)


@functools.cache
def relative_places(window: int) -> Int[np.ndarray, "Q Q"]:
  """Row of the table of biases for each pair (query, key) of a window's places.

  Query and key are from -(M-1) to M-1 rows and as many columns apart: (2M - 1)² cases.
  """
  at = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
  apart = at[:, :, None] - at[:, None, :] + window - 1
  return apart[0] * (2 * window - 1) + apart[1]


@functools.cache
def neighbours(side: int, window: int, shift: int) -> Bool[np.ndarray, "W Q Q"]:
  """Which tokens of each window of the rolled grid see each other: those of one part of the grid.

  The last window's rows are M - shift of the grid's lower edge and then, rolled to there, `shift`
  of its upper edge; the same holds of columns. Tokens of different parts do not see each other.
  """
  part = np.searchsorted([side - window, side - shift], np.arange(side), side="right")
  of_grid = 3 * part[:, None] + part[None, :]
  count = side // window
  parts = of_grid.reshape(count, window, count, window).swapaxes(1, 2).reshape(count * count, -1)
  return parts[:, :, None] == parts[:, None, :]
