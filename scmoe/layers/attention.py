"""Causal multi-head and grouped-query attention, with an optional key-value cache."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from scmoe.parallel.collectives import repeat, total


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


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """Softmax attention.

  Attributes:
    width: D.
    num_heads, num_kv_heads: H of queries, and of keys and values; fewer of these share them over
      groups of heads.
    head_dim: N.
    rope_theta: base of rotary embeddings (half-split pairs); 0: none.
    bias: whether the projections have biases, but for the keys'.
    init_std, out_std: standard deviations of the initial projections in, and of the one out.
  """

  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 0.0
  bias: bool = False
  init_std: float = 0.02
  out_std: float = 0.02


class Attention(nnx.Module):
  """Softmax attention; each position sees itself and what came before it.

  In two halves, between which a schedule may lay other work: `project` makes queries, keys and
  values, `mix` lets them meet. Under tensor parallelism each device has a part of the heads; the
  result is a sum.
  """

  def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
    c = self.config = config

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes):
      return nnx.Param(jnp.zeros(shape), axes=axes) if c.bias else None

    self.query = weight((c.width, c.num_heads, c.head_dim), c.init_std, ("embed", "heads", None))
    kv = (c.width, c.num_kv_heads, c.head_dim)
    self.key = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.value = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.out = weight((c.num_heads, c.head_dim, c.width), c.out_std, ("heads", None, "embed"))
    self.query_bias = zeros((c.num_heads, c.head_dim), ("heads", None))
    # No bias on keys: it adds the same to all scores of a query, which softmax does not see.
    self.value_bias = zeros((c.num_kv_heads, c.head_dim), ("kv_heads", None))
    self.out_bias = zeros((c.width,), ("embed",))

  def __call__(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B S D"]:
    """Attends causally: both halves in a row, without a cache."""
    return self.mix(self.project(x_BSD, positions_BS), positions_BS, segments_BS)[0]

  def project(self, x_BSD: Float[Array, "B S D"], positions_BS: Int[Array, "B S"]) -> Projected:
    """Queries, keys and values, turned by their positions where there are rotary embeddings.

    Args:
      x_BSD: normalised inputs.
      positions_BS: int32 position of each token in its document.
    """
    dtype = x_BSD.dtype
    x_BSD = repeat(x_BSD, ("tensor",), "tensor")

    def project(weight, bias):
      y = jnp.einsum("bsd,dhn->bshn", x_BSD, weight[...].astype(dtype))
      return y if bias is None else y + bias[...].astype(dtype)

    q_BSHN = project(self.query, self.query_bias)
    k_BSHN = project(self.key, None)
    v_BSHN = project(self.value, self.value_bias)
    if self.config.rope_theta:
      q_BSHN = rotate(q_BSHN, positions_BS, self.config.rope_theta)
      k_BSHN = rotate(k_BSHN, positions_BS, self.config.rope_theta)
    return q_BSHN, k_BSHN, v_BSHN

  def mix(
    self,
    projected: Projected,
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
    cache: KeyValues | None = None,
  ) -> tuple[Float[Array, "B S D"], KeyValues | None]:
    """Lets queries, keys and values meet.

    Args:
      projected: from `project`.
      positions_BS: as there; with a cache also the place where key and value are stored.
      segments_BS: int32 document of each token; attention stays inside a document. None: it
        sees the whole row.
      cache: keys and values of earlier positions; the new ones are added.

    Returns:
      y_BSD, and the cache with the new keys and values (None if there was none).
    """
    dtype = projected[0].dtype
    q_BSHN, k_BSHN, v_BSHN = (_computable(x) for x in projected)
    if cache is not None:
      cache = _store(cache, k_BSHN, v_BSHN, positions_BS)
      k_BSHN, v_BSHN = cache.k_BSHN.astype(q_BSHN.dtype), cache.v_BSHN.astype(q_BSHN.dtype)
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
    y_BSHN = y_BSHN.astype(dtype)
    y_BSD = jnp.einsum("bshn,hnd->bsd", y_BSHN, self.out[...].astype(dtype))
    y_BSD = total(y_BSD, ("tensor",), "tensor")
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


def _computable(x_BSHN: Array) -> Array:
  """In a type in which attention has a form here: XLA has no such float16 product for a CPU."""
  if x_BSHN.dtype != jnp.float16 or jax.default_backend() != "cpu":
    return x_BSHN
  _say_once("attention runs in float32: XLA has no float16 products for it on a CPU")
  return x_BSHN.astype(jnp.float32)


@functools.cache
def _say_once(text: str) -> None:
  logging.getLogger(__name__).warning(text)


def _implementation(q_BSHN: Array, *, masked: bool) -> Literal["cudnn"] | None:
  """cuDNN's fused attention where it can run: a GPU, 16-bit floats, heads of 8 to 128, no mask."""
  head_dim = q_BSHN.shape[-1]
  fits = q_BSHN.dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
  return "cudnn" if fits and not masked and jax.default_backend() == "gpu" else None
