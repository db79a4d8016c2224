"""Causal multi-head and grouped-query attention, with an optional key-value cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
  """Keys and values of one attention layer, in the order of their positions.

  Attributes:
    k_BSHN, v_BSHN: S is the cache's length; what lies beyond a row's own position is never read.
  """

  k_BSHN: Array
  v_BSHN: Array


# Queries, keys and values, each [B, S, H, N].
Projected = tuple[Array, Array, Array]


class Attention(nnx.Module):
  """Softmax attention; each position sees itself and what came before it.

  `num_kv_heads` < `num_heads` shares keys and values over groups of heads. `rope_theta` > 0 turns
  queries and keys by rotary embeddings (half-split pairs).
  """

  def __init__(
    self,
    width: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float,
    bias: bool,
    init_std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes):
      return nnx.Param(jnp.zeros(shape), axes=axes) if bias else None

    self.rope_theta = rope_theta
    self.query = weight((width, num_heads, head_dim), init_std, ("embed", "heads", None))
    self.key = weight((width, num_kv_heads, head_dim), init_std, ("embed", "kv_heads", None))
    self.value = weight((width, num_kv_heads, head_dim), init_std, ("embed", "kv_heads", None))
    self.out = weight((num_heads, head_dim, width), out_std, ("heads", None, "embed"))
    self.query_bias = zeros((num_heads, head_dim), ("heads", None))
    # No bias on keys: it adds the same to all scores of a query, which softmax does not see.
    self.value_bias = zeros((num_kv_heads, head_dim), ("kv_heads", None))
    self.out_bias = zeros((width,), ("embed",))

  def __call__(
    self,
    x_BSD: Array,
    positions_BS: Array,
    *,
    segments_BS: Array | None = None,
    cache: KeyValues | None = None,
    projected: Callable[[Projected], Projected] = lambda qkv: qkv,
  ) -> tuple[Array, KeyValues | None]:
    """Attends causally.

    Args:
      x_BSD: inputs.
      positions_BS: int32 position of each token in its document; with a cache also the place
        where its key and value are stored.
      segments_BS: int32 document of each token; attention stays inside a document. None: it
        sees the whole row.
      cache: keys and values of earlier positions; the new ones are added.
      projected: sees queries, keys and values before they meet, and returns them. Where a schedule
        lays other work into the middle of the layer.

    Returns:
      y_BSD, and the cache with the new keys and values (None if there was none).
    """
    dtype = x_BSD.dtype

    def project(weight, bias):
      y = jnp.einsum("bsd,dhn->bshn", x_BSD, weight[...].astype(dtype))
      return y if bias is None else y + bias[...].astype(dtype)

    q_BSHN = project(self.query, self.query_bias)
    k_BSHN = project(self.key, None)
    v_BSHN = project(self.value, self.value_bias)
    if self.rope_theta:
      q_BSHN = rotate(q_BSHN, positions_BS, self.rope_theta)
      k_BSHN = rotate(k_BSHN, positions_BS, self.rope_theta)
    q_BSHN, k_BSHN, v_BSHN = projected((q_BSHN, k_BSHN, v_BSHN))
    if cache is not None:
      cache = _store(cache, k_BSHN, v_BSHN, positions_BS)
      k_BSHN, v_BSHN = cache.k_BSHN.astype(dtype), cache.v_BSHN.astype(dtype)
      stored_S = jnp.arange(k_BSHN.shape[1])
      mask_BHSS = (stored_S <= positions_BS[..., None])[:, None]
      y_BSHN = jax.nn.dot_product_attention(q_BSHN, k_BSHN, v_BSHN, mask=mask_BHSS)
    else:
      mask_BHSS = None
      if segments_BS is not None:
        mask_BHSS = segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
      y_BSHN = jax.nn.dot_product_attention(
        q_BSHN,
        k_BSHN,
        v_BSHN,
        mask=mask_BHSS,
        is_causal=True,
        implementation=_implementation(q_BSHN, masked=mask_BHSS is not None),
      )
    y_BSD = jnp.einsum("bshn,hnd->bsd", y_BSHN, self.out[...].astype(dtype))
    return (y_BSD if self.out_bias is None else y_BSD + self.out_bias[...].astype(dtype)), cache


def rotate(x_BSHN: Array, positions_BS: Array, theta: float) -> Array:
  """Rotary position embedding; dimension i turns with i + N/2 by position · theta^(-2i/N)."""
  half = x_BSHN.shape[-1] // 2
  frequency_N = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BS1N = positions_BS[..., None, None].astype(jnp.float32) * frequency_N
  sin, cos = jnp.sin(angle_BS1N), jnp.cos(angle_BS1N)
  first, second = jnp.split(x_BSHN.astype(jnp.float32), 2, -1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
  return turned.astype(x_BSHN.dtype)


def _store(cache: KeyValues, k_BSHN: Array, v_BSHN: Array, positions_BS: Array) -> KeyValues:
  row_B1 = jnp.arange(k_BSHN.shape[0])[:, None]
  return KeyValues(
    cache.k_BSHN.at[row_B1, positions_BS].set(k_BSHN.astype(cache.k_BSHN.dtype)),
    cache.v_BSHN.at[row_B1, positions_BS].set(v_BSHN.astype(cache.v_BSHN.dtype)),
  )


def _implementation(q_BSHN: Array, *, masked: bool) -> Literal["cudnn"] | None:
  """cuDNN's fused attention where it can run: a GPU, 16-bit floats, heads of 8 to 128, no mask."""
  head_dim = q_BSHN.shape[-1]
  fits = q_BSHN.dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
  return "cudnn" if fits and not masked and jax.default_backend() == "gpu" else None
