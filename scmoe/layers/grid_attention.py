"""Attention over a square grid of tokens, which may add a convolution of the values to its outputs.

The score of two tokens does not say whether they are neighbours in the image; a model learns that
from their positions, which takes many images. The convolution knows it from the start: it is the
locally enhanced positional encoding of CSWin (arXiv 2107.00652, section 3.3).

    B  images    S  tokens of an image, G·G    G  side of the grid
    H  heads of queries    K  heads of keys, values    N  width of a head    T  side of the kernel
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from scmoe.layers.attention import Attention, AttentionConfig, KeyValues, Projected
from scmoe.layers.divided_rows import attend


class ValueConvolution(nnx.Module):
  """A convolution of an attention's values over the grid, each channel by itself.

  Its kernel begins as zeros, so that the attention begins as one without it.

  Args:
    config: options of the attention: its heads of keys and values, and their width.
    side: G.
    kernel_side: T, an odd number.
  """

  def __init__(self, config: AttentionConfig, *, side: int, kernel_side: int):
    self.side, self.repeats = side, config.num_heads // config.num_kv_heads
    shape = (kernel_side, kernel_side, config.num_kv_heads, config.head_dim)
    self.taps = nnx.Param(jnp.zeros(shape), axes=(None, None, "kv_heads", None))

  def __call__(self, v_BSKN: Float[Array, "B S K N"]) -> Float[Array, "B S H N"]:
    """The weighted sum of the values at the T · T places around each token, zero outside the grid.

    Args:
      v_BSKN: values in the order of the grid's rows.

    Returns:
      One row for each head of queries, as the attention's outputs have, in the type of the values.
    """
    y_BSKN: Any = convolved(v_BSKN, self.taps[...], self.side)
    return y_BSKN if self.repeats == 1 else jnp.repeat(y_BSKN, self.repeats, 2)


class GridAttention(Attention):
  """`Attention` over the tokens of an image, which may add a `ValueConvolution`.

  Args:
    config: options of the attention. `mix` ignores `causal`, `window`, `chunk` and `sinks`.
    side: G.
    kernel_side: T, an odd number; 0: no convolution.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: AttentionConfig, *, side: int, kernel_side: int, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.side = side
    self.local = (
      ValueConvolution(config, side=side, kernel_side=kernel_side) if kernel_side else None
    )

  def mix(
    self,
    projected: Projected,
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
    cache: KeyValues | None = None,
    *,
    begins: bool = False,
  ) -> tuple[Float[Array, "B S D"], KeyValues | None]:
    """The attention's outputs, plus the convolution of its values, through the output projection.

    Args:
      projected: what `project` returned, S = G·G tokens in the order of the grid's rows.
      positions_BS, segments_BS, begins: not used: images have no documents, and the order of the
        tokens says where they are.
      cache: None: images have no cache.

    Returns:
      y_BSD, and None in place of a cache.
    """
    del positions_BS, segments_BS, begins
    assert cache is None, "attention over a grid has no cache"
    y_BSHN = self.attended(*projected)
    if self.local is not None:
      y_BSHN += self.local(projected[2])
    return self.over_devices(self.out_of_heads(y_BSHN)), None

  def attended(self, q_BSHN: Array, k_BSKN: Array, v_BSKN: Array) -> Float[Array, "B S H N"]:
    """The sum of the values of all tokens of an image, weighted by the softmax of the scores."""
    scale = self.config.multiplier or None
    return attend(q_BSHN, k_BSKN, v_BSKN, None, causal=False, scale=scale)

  def empty_cache(self, batch: int, length: int, dtype: Any) -> KeyValues:
    """Raises TypeError: a model that reads images does not generate."""
    raise TypeError("attention over a grid has no cache")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolved(x_BSKN: Array, taps: Array, side: int) -> Array:
  """y[i, j] = Σ taps[r, c] · x[i + r - T//2, j + c - T//2] for every image and channel.

  The sums are float32 or wider. They are element-wise operations on shifted grids, which XLA fuses;
  `cifar10_vit` was measured with them, and XLA's grouped convolution was not tried. The backward
  pass keeps x and the kernel alone: automatic differentiation would keep a shifted copy of x for
  each of the T · T places.

  Args:
    x_BSKN: [B, G·G, K, N], in the order of the grid's rows.
    taps: the kernel [T, T, K, N], T odd.
    side: G.
  """
  return _convolved_fwd(x_BSKN, taps, side)[0]


def _convolved_fwd(x, taps, side):
  return _summed(x, taps, side), (x, taps)


def _convolved_bwd(side, kept, bar):
  x, taps = kept
  # A place reads its neighbour by the tap on that side, so the neighbour's gradient comes by the
  # tap on the opposite side.
  x_bar = _summed(bar, taps[::-1, ::-1], side)
  wide_bar = bar.astype(jnp.promote_types(bar.dtype, jnp.float32))
  products = [(shifted * wide_bar).sum((0, 1)) for shifted in _shifted(x, taps.shape[0], side)]
  return x_bar, jnp.stack(products).reshape(taps.shape).astype(taps.dtype)


def _summed(x: Array, taps: Array, side: int) -> Array:
  """The weighted sum over shifted grids, in the type of x."""
  flat = taps.reshape(-1, *taps.shape[2:])
  parts = (shifted * tap for shifted, tap in zip(_shifted(x, taps.shape[0], side), flat))
  return functools.reduce(jnp.add, parts).astype(x.dtype)


def _shifted(x: Array, across: int, side: int) -> Iterator[Array]:
  """x as each place of the kernel sees it, row by row, float32 or wider; outside the grid zero."""
  reach, batch, rest = across // 2, x.shape[0], x.shape[2:]
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(batch, side, side, *rest)
  framed = jnp.pad(wide, ((0, 0), (reach, reach), (reach, reach), (0, 0), (0, 0)))
  for row in range(across):
    for column in range(across):
      yield framed[:, row : row + side, column : column + side].reshape(x.shape)


convolved.defvjp(_convolved_fwd, _convolved_bwd)
