"""Multi-head and grouped-query attention, with an optional key-value cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option, section
from scmoe.kernels.grouped_matmul.activations import clamped
from scmoe.kernels.wide_sums import plus_bias
from scmoe.layers.divided_rows import attend
from scmoe.layers.dot_product import cache_length
from scmoe.layers.norm import rms_normalised
from scmoe.layers.pages import Table, attend_over, by_group, written
from scmoe.layers.rope import RopeConfig, rotate
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import TOKEN_AXES, axis_size

QK_NORMS = ("none", "head", "all", "l2")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
  """The cache of one attention layer: keys and values in the order of their positions.

  Attributes:
    k_BSHN, v_BSHN: S is the number of positions for which the cache has room, H the number of heads
      of keys and values. A token at position p never reads the positions past p.
    table: the rows' pages, if the cache is a pool of pages (`scmoe.layers.pages`); B and S are then
      the numbers of pages and of tokens of a page. None: each row has its own cache.
  """

  dimensions: ClassVar[int] = 4  # of its arrays, where those of several layers are not stacked

  k_BSHN: Array
  v_BSHN: Array
  table: Table = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKind:
  """The options in which one layer's attention may differ from that of the others.

  A scan runs the layers, and its steps are one program; so the fields may be traced.

  Attributes:
    full: bool, whether the layer's tokens see all positions before them, whatever the window and
      the chunks; None: window and chunks hold in every layer.
    straight: bool, whether the layer has no rotary embedding, although the configuration has one;
      None: no layer is without it.
  """

  full: Array | None = None
  straight: Array | None = None


# Queries [B, S, H, N], keys and values [B, S, K, N], with K heads of keys.
Projected = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Options):
  """Options of softmax attention.

  Attributes:
    width: D, the model's width.
    num_heads, num_kv_heads: number of heads of queries, H, and of keys and values. With fewer heads
      of keys, consecutive heads of queries share one.
    head_dim: N, the width of a head.
    rope_theta: base of the rotary embedding; 0: no rotary embedding.
    rope: which elements form pairs, and how frequencies are scaled down for longer contexts.
    bias: whether queries and values have biases, and the output if `out_bias`; key_bias: whether
      keys have one.
    qk_norm: RMSNorm of queries and keys before the rotation: `none`, `head` (each head by itself,
      one weight shared by all; Qwen3), or `all` (all heads at once; OLMoE). `l2`: as `head`, but
      after the rotation, without weights, and not in layers that do not rotate (Llama-4).
    norm_eps: epsilon of that norm.
    window: positions that a token sees, itself included; 0: all before it.
    chunk: size of the chunks into which positions are cut; a token sees those of its own chunk
      alone. 0: no chunks.
    temperature, temperature_floor: in layers without a rotary embedding, queries at position p are
      multiplied by 1 + temperature · ln(1 + floor((p + 1) / temperature_floor)) (Llama-4).
    clip_qkv: queries, keys and values are clipped to ± this (OLMoE); 0: no clipping.
    multiplier: factor on the scores; 0: 1/√N.
    sinks: whether each head of queries has a learned score that takes a share of its softmax and
      has no value (`scmoe.layers.dot_product.softmax_over`; GPT-OSS).
    causal: a token sees itself and those before it; False: all tokens of its row, for models that
      do not generate. Such an attention has no cache.
    init_std, out_std: standard deviations of the initial weights of the three input projections,
      and of the output projection.

  Raises:
    ConfigError: heads of queries cannot share those of keys, a window or chunks are given without
      `causal`, or a size or word is impossible.
  """

  width: int = option(minimum=1)
  num_heads: int = option(minimum=1)
  num_kv_heads: int = option(minimum=1)
  head_dim: int = option(minimum=1)
  rope_theta: float = option(0.0, minimum=0)
  rope: RopeConfig = section(RopeConfig)
  bias: bool = option(False)
  key_bias: bool = option(False)
  out_bias: bool = option(True)
  qk_norm: str = option("none", choices=QK_NORMS)
  norm_eps: float = option(1e-5, minimum=0)
  window: int = option(0, minimum=0)
  chunk: int = option(0, minimum=0)
  temperature: float = option(0.0, minimum=0)
  temperature_floor: int = option(8192, minimum=1)
  clip_qkv: float = option(0.0, minimum=0)
  multiplier: float = option(0.0, minimum=0)
  sinks: bool = option(False)
  causal: bool = option(True)
  init_std: float = option(0.02, minimum=0)
  out_std: float = option(0.02, minimum=0)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        f"attention: num_heads={self.num_heads} is not a multiple of num_kv_heads="
        f"{self.num_kv_heads}; use a divisor of {self.num_heads}"
      )
    if self.rope_theta and self.head_dim % 2:
      raise ConfigError(
        f"attention: head_dim={self.head_dim} with rotary positions; use an even number"
      )
    for name in ("window", "chunk"):
      if (value := getattr(self, name)) and not self.causal:
        raise ConfigError(
          f"attention: {name}={value} counts positions before a token, got causal=False; use 0"
        )

  @property
  def is_masked(self) -> bool:
    """Whether it has sinks or chunks, which the kernels for decoding a token do not compute."""
    return self.sinks or self.chunk > 0


class Attention(nnx.Module):
  """Softmax attention: a token sees itself and those before it, or without `causal` all of its row.

  A schedule may put other work between its two halves: `project` makes queries, keys and values,
  `mix` computes the scores and the output. Under tensor parallelism each device has some of the
  heads, and the devices' outputs are added up.

  Args:
    config: options of the attention.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
    c = self.config = config

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes, wanted=c.bias):
      return nnx.Param(jnp.zeros(shape), axes=axes) if wanted else None

    def norm(heads, axis):
      shape, axes = ((heads, c.head_dim), (axis, None)) if c.qk_norm == "all" else (
        (c.head_dim,), (None,))  # fmt: skip
      return None if c.qk_norm in ("none", "l2") else nnx.Param(jnp.ones(shape), axes=axes)

    self.query = weight((c.width, c.num_heads, c.head_dim), c.init_std, ("embed", "heads", None))
    kv = (c.width, c.num_kv_heads, c.head_dim)
    self.key = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.value = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.out = weight((c.num_heads, c.head_dim, c.width), c.out_std, ("heads", None, "embed"))
    self.query_bias = zeros((c.num_heads, c.head_dim), ("heads", None))
    # Without a norm or rotation of keys, their bias adds the same number to all scores of a query,
    # which softmax cancels, but for sinks. So only `key_bias` adds one, not `bias`.
    self.key_bias = zeros((c.num_kv_heads, c.head_dim), ("kv_heads", None), c.key_bias)
    self.value_bias = zeros((c.num_kv_heads, c.head_dim), ("kv_heads", None))
    self.out_bias = zeros((c.width,), ("embed",), c.bias and c.out_bias)
    self.sinks = zeros((c.num_heads,), ("heads",), c.sinks)
    self.query_norm = norm(c.num_heads, "heads")
    self.key_norm = norm(c.num_kv_heads, "kv_heads")

  def __call__(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B S D"]:
    """Both halves, one after the other, without a cache: [B, S, D] in the type of x.

    Args:
      x_BSD: normalised inputs.
      positions_BS, segments_BS: as for `mix`.
    """
    return self.mix(self.project(x_BSD, positions_BS), positions_BS, segments_BS)[0]

  def project(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    kind: LayerKind | None = None,
  ) -> Projected:
    """Queries [B, S, H, N], keys and values [B, S, K, N], as `mix` reads them; K is `num_kv_heads`.

    All three have their bias and clipping already, queries and keys also norm and rotation, and
    queries the `temperature` of layers that do not rotate.

    Args:
      x_BSD: normalised inputs.
      positions_BS: int32 position of each token in its document.
      kind: the options of this layer alone; None: it is like the others.
    """
    c = self.config
    q_BSHN, k_BSHN, v_BSHN = self.into_heads(repeat(x_BSD, ("tensor",), "tensor"))
    q_BSHN = self._finished(q_BSHN, self.query_bias, self.query_norm)
    k_BSHN = self._finished(k_BSHN, self.key_bias, self.key_norm)
    v_BSHN = self._finished(v_BSHN, self.value_bias)
    if c.rope_theta:
      straight = None if kind is None else kind.straight
      q_BSHN = self._turned(q_BSHN, positions_BS, straight, c.temperature)
      k_BSHN = self._turned(k_BSHN, positions_BS, straight)
    return q_BSHN, k_BSHN, v_BSHN

  def _turned(
    self, x_BSHN: Array, positions_BS: Array, straight: Array | None, temperature: float = 0.0
  ) -> Array:
    """Queries or keys after the rotation and the norm of `qk_norm=l2`; if `straight` after neither.

    Args:
      x_BSHN: queries or keys.
      positions_BS: int32 position of each token in its document.
      straight: see `LayerKind`.
      temperature: `AttentionConfig.temperature` for queries, which are then multiplied by its
        factor if `straight`; 0: no factor.
    """
    c = self.config
    turned_BSHN = rotate(x_BSHN, positions_BS, c.rope_theta, c.rope)
    if c.qk_norm == "l2":
      turned_BSHN = rms_normalised(turned_BSHN, jnp.ones(c.head_dim), c.norm_eps)
    if straight is None:
      return turned_BSHN
    if temperature:
      steps_BS = (positions_BS + 1) // c.temperature_floor
      factor_BS = 1 + temperature * jnp.log1p(steps_BS.astype(jnp.float32))
      x_BSHN = (x_BSHN * factor_BS[:, :, None, None]).astype(x_BSHN.dtype)
    return jnp.where(straight, x_BSHN, turned_BSHN)

  def into_heads(self, x_BSD: Array) -> list[Array]:
    """The three products x · W without bias: queries [B, S, H, N], keys and values [B, S, K, N]."""
    weights = (self.query, self.key, self.value)
    return [jnp.einsum("bsd,dhn->bshn", x_BSD, w[...].astype(x_BSD.dtype)) for w in weights]

  def out_of_heads(self, y_BSHN: Array) -> Array:
    """The product of all heads' outputs with the output matrix, without bias: [B, S, D]."""
    return jnp.einsum("bshn,hnd->bsd", y_BSHN, self.out[...].astype(y_BSHN.dtype))

  def _finished(self, y_BSHN: Array, bias: Any, norm: Any = None) -> Array:
    """One of the three products after its bias, norm and clipping, as far as it has them."""
    clip = self.config.clip_qkv
    y_BSHN = plus_bias(y_BSHN, bias)
    y_BSHN = y_BSHN if norm is None else self._normalised(y_BSHN, norm[...])
    return clamped(y_BSHN, -clip, clip) if clip else y_BSHN

  def _normalised(self, y_BSHN: Array, scale: Array) -> Array:
    """RMSNorm of queries or keys (`AttentionConfig.qk_norm`)."""
    eps, devices = self.config.norm_eps, axis_size("tensor")
    if self.config.qk_norm == "head":
      return rms_normalised(y_BSHN, repeat(scale, ("tensor",), "tensor"), eps)
    if devices == 1:
      flat = y_BSHN.reshape(*y_BSHN.shape[:2], -1)
      return rms_normalised(flat, scale.reshape(-1), eps).reshape(y_BSHN.shape)
    # A device has some of the heads; the norm needs the squares of all.
    wide = y_BSHN.astype(jnp.float32)
    square = total(jnp.square(wide).sum((2, 3), keepdims=True), ("tensor",), "tensor")
    square = repeat(square, ("tensor",), "tensor") / (devices * wide.shape[2] * wide.shape[3])
    return (wide * jax.lax.rsqrt(square + eps) * scale).astype(y_BSHN.dtype)

  def empty_cache(self, batch: int, length: int, dtype: Any) -> KeyValues:
    """A cache of zeros for at least `length` positions.

    Args:
      batch: rows on this device.
      length: number of positions; rounded up where our kernel needs it (`cache_length`).
      dtype: type of keys and values.
    """
    heads = self.config.num_kv_heads // axis_size("tensor")
    length = cache_length(length, dtype, self.config.head_dim)
    shape = (batch, length, heads, self.config.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  def cache_specs(self) -> KeyValues:
    """PartitionSpecs of a cache: rows over all axes of tokens, heads over the tensor axis."""
    spec = P(TOKEN_AXES, None, "tensor")
    return KeyValues(spec, spec)  # pyright: ignore[reportArgumentType]

  def mix(
    self,
    projected: Projected,
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
    cache: KeyValues | None = None,
    *,
    begins: bool = False,
    kind: LayerKind | None = None,
  ) -> tuple[Float[Array, "B S D"], KeyValues | None]:
    """Scores, softmax, the sum over values, and the output projection.

    Args:
      projected: what `project` returned.
      positions_BS: int32 position of each token; with a cache also where its key and value go.
      segments_BS: int32 document of each token; attention stays inside a document. None: it
        spans the whole row. With a cache it is read only with `begins`.
      cache: keys and values of earlier positions, to which the new ones are added; None: the tokens
        attend to each other alone.
      begins: the cache is empty and the tokens are the first of their rows. They attend to each
        other by the same kernels as without a cache. Not for pools of pages.
      kind: the options of this layer alone; None: it is like the others.

    Returns:
      y_BSD, and the cache with the new keys and values (None if there was none).
    """
    q_BSHN, k_BSHN, v_BSHN = projected
    options = {"window": self.config.window, "scale": self.config.multiplier or None}
    options |= {"sinks_H": None if self.sinks is None else self.sinks[...]}
    options |= {"full": None if kind is None else kind.full, "chunk": self.config.chunk}
    if cache is not None:
      at, table = None if begins else positions_BS, cache.table
      keys, values = cache.k_BSHN, cache.v_BSHN
      keys, values = written(keys, k_BSHN, at, table), written(values, v_BSHN, at, table)
      cache = KeyValues(keys, values, table)
    if cache is None or begins:
      causal = self.config.causal
      y_BSHN = attend(q_BSHN, k_BSHN, v_BSHN, segments_BS, causal=causal, **options)
    else:
      own = cache.k_BSHN, cache.v_BSHN
      over = lambda table, q, positions: attend_over(q, *own, positions, table, **options)
      y_BSHN = by_group(over, cache.table, q_BSHN, positions_BS)
    return self.over_devices(self.out_of_heads(y_BSHN)), cache

  def over_devices(self, y_BSD: Array) -> Array:
    """The sum of the devices' outputs, each of some heads, plus the output's bias, if any."""
    y_BSD = total(y_BSD, ("tensor",), "tensor")
    return plus_bias(y_BSD, self.out_bias)
