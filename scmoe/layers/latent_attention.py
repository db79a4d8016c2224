"""Multi-head latent attention: keys and values of all heads from one narrow vector per token.

DeepSeek-V2 (arXiv 2405.04434, §2.1), with the scaled latents of LongCat-Flash. A cache keeps that
vector, the latent, and one rotary key that all heads share:

  c_t = norm(W_down x_t),  k_t = rope(W_rope x_t)      kept in the cache
  score = q_nope · (W_k c_t) + q_rope · k_t            expanded: computes every head's keys
        = (W_kᵀ q_nope) · c_t + q_rope · k_t           absorbed: multiplies the query by W_k instead
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from scmoe.base.options import Options, option, section
from scmoe.kernels.wide_sums import for_heads, plus_bias
from scmoe.layers.divided_rows import attend
from scmoe.layers.dot_product import attend_stored
from scmoe.layers.norm import Norm
from scmoe.layers.pages import PageTable, Table, by_group, read, written
from scmoe.layers.rope import NEIGHBOURS, RopeConfig, rotate
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import TOKEN_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latents:
  """The cache of one latent attention.

  Attributes:
    latent_BSR: R is the latent's width plus the rotary key's. First the normalised and scaled
      latent, then the rotated key.
    table: see `KeyValues.table`.
  """

  dimensions: ClassVar[int] = 3  # of its array, where those of several layers are not stacked

  latent_BSR: Array
  table: Table = None


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig(Options):
  """Options of latent attention; most are named as in the config.json of released models.

  Attributes:
    width, num_heads: the model's width D, and the number of heads H.
    q_lora_rank: width of the queries' latent; 0: queries are projected from x directly.
    kv_lora_rank: width of the latent of keys and values.
    qk_nope_head_dim, qk_rope_head_dim: widths of a query's two parts, without and with rotation.
    v_head_dim: width of a value.
    rope_theta, rope: see `rotate`.
    scale_q, scale_kv: whether a latent is multiplied by √(D / its width) (LongCat-Flash
      mla_scale_q_lora, mla_scale_kv_lora).
    norm_eps: epsilon of the latents' norms.
    bias: whether the projections from x to latents and the output projection have biases. Queries
      that are projected from x directly have none.
    init_std, out_std: see `AttentionConfig`.
  """

  width: int = option(minimum=1)
  num_heads: int = option(minimum=1)
  kv_lora_rank: int = option(minimum=1)
  qk_nope_head_dim: int = option(minimum=1)
  qk_rope_head_dim: int = option(minimum=1)
  v_head_dim: int = option(minimum=1)
  q_lora_rank: int = option(0, minimum=0)
  rope_theta: float = option(10000.0, minimum=1)
  rope: RopeConfig = section(RopeConfig, default=NEIGHBOURS)
  scale_q: bool = option(False)
  scale_kv: bool = option(False)
  norm_eps: float = option(1e-6, minimum=0)
  bias: bool = option(False)
  init_std: float = option(0.02, minimum=0)
  out_std: float = option(0.02, minimum=0)


class LatentAttention(nnx.Module):
  """Latent attention in the same two halves as `Attention`: `project` and `mix`.

  Under tensor parallelism each device has some of the heads; every device has the whole latent.

  Args:
    config: options of the attention.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: LatentAttentionConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    query = c.qk_nope_head_dim + c.qk_rope_head_dim

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(size, wanted):
      return nnx.Param(jnp.zeros(size), axes=(None,)) if wanted else None

    heads, down = (None, "heads", None), ("embed", None)
    rank = c.q_lora_rank or c.width
    self.query_down = weight((c.width, rank), c.init_std, down) if c.q_lora_rank else None
    self.query_down_bias = zeros(rank, c.bias and c.q_lora_rank)
    self.query_norm = Norm(rank, "rmsnorm", c.norm_eps) if c.q_lora_rank else None
    self.query = weight((rank, c.num_heads, query), c.init_std, heads)
    kept = c.kv_lora_rank + c.qk_rope_head_dim
    self.kv_down = weight((c.width, kept), c.init_std, down)
    self.kv_down_bias = zeros(kept, c.bias)
    self.kv_norm = Norm(c.kv_lora_rank, "rmsnorm", c.norm_eps)
    made = c.qk_nope_head_dim + c.v_head_dim
    self.kv_up = weight((c.kv_lora_rank, c.num_heads, made), c.init_std, heads)
    out = (c.num_heads, c.v_head_dim, c.width)
    self.out = weight(out, c.out_std, ("heads", None, "embed"))
    self.out_bias = zeros(c.width, c.bias)

  def __call__(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B S D"]:
    """Both halves, one after the other, without a cache: [B, S, D] in the type of x."""
    return self.mix(self.project(x_BSD, positions_BS), positions_BS, segments_BS)[0]

  def project(
    self, x_BSD: Float[Array, "B S D"], positions_BS: Int[Array, "B S"]
  ) -> tuple[Array, Array, Array]:
    """Queries [B, S, H, N], the latent [B, S, R] and the rotary key [B, S, P] that all heads share.

    R is `kv_lora_rank` here, P is `qk_rope_head_dim`, and N is `qk_nope_head_dim` + P. The latent
    has its norm and scale already; the key, and the last P numbers of each query, which meet it,
    are rotated.

    Args:
      x_BSD: normalised inputs.
      positions_BS: int32 position of each token in its document.
    """
    c = self.config
    read_BSR = x_BSD
    if self.query_down is not None and self.query_norm is not None:
      read_BSR = self.query_norm(_down(x_BSD, self.query_down, self.query_down_bias))
      read_BSR = _scaled(read_BSR, c.width / c.q_lora_rank if c.scale_q else 1)
    read_BSR = repeat(read_BSR, ("tensor",), "tensor")
    q_BSHN = jnp.einsum("bsr,rhn->bshn", read_BSR, self.query[...].astype(x_BSD.dtype))
    straight, turning = jnp.split(q_BSHN, [c.qk_nope_head_dim], -1)
    turning = rotate(turning, positions_BS, c.rope_theta, c.rope)
    made = _down(x_BSD, self.kv_down, self.kv_down_bias)
    c_BSR, k_BSN = jnp.split(made, [c.kv_lora_rank], -1)
    c_BSR = _scaled(self.kv_norm(c_BSR), c.width / c.kv_lora_rank if c.scale_kv else 1)
    k_BSN = rotate(k_BSN[:, :, None], positions_BS, c.rope_theta, c.rope)[:, :, 0]
    c_BSR, k_BSN = repeat((c_BSR, k_BSN), ("tensor",), "tensor")
    return jnp.concatenate([straight, turning], -1), c_BSR, k_BSN

  def mix(
    self,
    projected: tuple[Array, Array, Array],
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
    cache: Latents | None = None,
    *,
    begins: bool = False,
  ) -> tuple[Float[Array, "B S D"], Latents | None]:
    """Scores, softmax, values and output projection; arguments and results as for `Attention.mix`.

    With a cache, one token per row attends to the cached latents themselves (absorbed). With
    several tokens per row, without a cache, or with `begins`, every head's keys and values are
    computed (expanded): for many tokens this costs less than scores of the latents' width.
    """
    q_BSHN, c_BSR, k_BSN = projected
    dtype = q_BSHN.dtype
    if cache is not None:
      new = jnp.concatenate([c_BSR, k_BSN], -1)
      at, table = None if begins else positions_BS, cache.table
      cache = Latents(written(cache.latent_BSR, new, at, table), table)
    if cache is None or begins:
      y_BSHV = self.expanded(q_BSHN, c_BSR, k_BSN, segments_BS=segments_BS)
    else:
      pool_BSR = cache.latent_BSR

      def over(table: PageTable | None, q_BSHN: Array, positions_BS: Array) -> Array:
        kept = jnp.split(read(pool_BSR, table).astype(dtype), [self.config.kv_lora_rank], -1)
        meet = self.absorbed if q_BSHN.shape[1] == 1 else self.expanded
        return meet(q_BSHN, *kept, positions_BS=positions_BS)

      y_BSHV = by_group(over, cache.table, q_BSHN, positions_BS)
    y_BSD = jnp.einsum("bshv,hvd->bsd", y_BSHV, self.out[...].astype(dtype))
    y_BSD = total(y_BSD, ("tensor",), "tensor")
    return plus_bias(y_BSD, self.out_bias), cache

  def expanded(
    self,
    q_BSHN: Array,
    c_BTR: Array,
    k_BTN: Array,
    *,
    segments_BS: Array | None = None,
    positions_BS: Array | None = None,
  ) -> Float[Array, "B S H V"]:
    """Attention with the keys and values of every head, computed from the latents.

    Args:
      q_BSHN, c_BTR, k_BTN: as `project` returns them; the last two may come from a cache.
      segments_BS: int32 document of each token, without a cache; None: rows of one document.
      positions_BS: int32 positions of the queries, with a cache; None without one.
    """
    c, up = self.config, self.kv_up[...].astype(q_BSHN.dtype)
    made = jnp.einsum("btr,rhn->bthn", c_BTR, up)
    straight, v_BTHV = jnp.split(made, [c.qk_nope_head_dim], -1)
    k_BTHN = jnp.concatenate([straight, for_heads(k_BTN, straight.shape[2])], -1)
    if positions_BS is None:
      return attend(q_BSHN, k_BTHN, v_BTHV, segments_BS, scale=self.score_scale)
    return attend_stored(q_BSHN, k_BTHN, v_BTHV, positions_BS, scale=self.score_scale)

  def absorbed(
    self, q_BSHN: Array, c_BTR: Array, k_BTN: Array, *, positions_BS: Array
  ) -> Float[Array, "B S H V"]:
    """Attention that computes no head's keys or values; its result is that of `expanded`.

    Queries are multiplied by the keys' matrix and attend to the latents; the sum over latents is
    multiplied by the values' matrix.
    """
    c, up = self.config, self.kv_up[...].astype(q_BSHN.dtype)
    key_RHN, value_RHV = jnp.split(up, [c.qk_nope_head_dim], -1)
    straight, turning = jnp.split(q_BSHN, [c.qk_nope_head_dim], -1)
    wide = jnp.concatenate([jnp.einsum("bshn,rhn->bshr", straight, key_RHN), turning], -1)
    stored = jnp.concatenate([c_BTR, k_BTN], -1)[:, :, None]
    y_BSHR = attend_stored(wide, stored, c_BTR[:, :, None], positions_BS, scale=self.score_scale)
    return jnp.einsum("bshr,rhv->bshv", y_BSHR, value_RHV)

  @property
  def score_scale(self) -> float:
    """The factor on the scores: 1/√(width of a query), times the long-context correction."""
    c = self.config
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * c.rope.score_factor

  def empty_cache(self, batch: int, length: int, dtype: Any) -> Latents:
    """A cache of zeros; every device of the tensor axis holds all of it.

    Args:
      batch: rows on this device.
      length: positions.
      dtype: type of the latents.
    """
    kept = self.config.kv_lora_rank + self.config.qk_rope_head_dim
    return Latents(jnp.zeros((batch, length, kept), dtype))

  def cache_specs(self) -> Latents:
    """PartitionSpecs of a cache: rows over all axes of tokens."""
    return Latents(P(TOKEN_AXES))  # pyright: ignore[reportArgumentType]


def _down(x_BSD: Array, weight: Any, bias: Any) -> Array:
  return plus_bias(x_BSD @ weight[...].astype(x_BSD.dtype), bias)


def _scaled(x: Array, square: float) -> Array:
  return x if square == 1 else x * math.sqrt(square)
