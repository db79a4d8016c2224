"""Causal multi-head and grouped-query attention, with an optional key-value cache."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from scmoe.base import determinism
from scmoe.kernels.one_row import attention as decode_attention
from scmoe.kernels.one_row.attention import Unfinished, Unjoined
from scmoe.kernels.one_row.linear import products, sums
from scmoe.kernels.one_row.norm import Normalised
from scmoe.kernels.one_row.without_gradient import without_gradient
from scmoe.layers.norm import Norm, rms_normalised
from scmoe.layers.rope import PLAIN, RopeConfig, rotate, turns
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import BATCH_AXES, axis_size

QK_NORMS = ("none", "head", "all")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
  """Keys and values of one attention layer, in the order of their positions.

  Attributes:
    k_BSHN, v_BSHN: S is the cache's length; what lies beyond a row's own position is never read.
  """

  k_BSHN: Array
  v_BSHN: Array


# Queries, keys and values, each [B, S, H, N], or their parts; of latent attention see there.
Projected = tuple[Array, Array, Array] | Unfinished


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """Softmax attention.

  Attributes:
    width: D.
    num_heads, num_kv_heads: H of queries, and of keys and values; fewer of these share them over
      groups of heads.
    head_dim: N.
    rope_theta: base of rotary embeddings; 0: none.
    rope: their pairs, and how they are stretched.
    bias: whether the projections have biases, but for the keys'; key_bias: theirs.
    qk_norm: RMSNorm of queries and keys before they turn: `none`, `head` (each head by itself, one
      weight for all of them; Qwen3), or `all` (all heads at once; OLMoE).
    norm_eps: its epsilon.
    window: positions that a token sees, itself included; 0: all before it.
    clip_qkv: queries, keys and values are clipped to ± this; 0: not.
    init_std, out_std: standard deviations of the initial projections in, and of the one out.
  """

  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 0.0
  rope: RopeConfig = PLAIN
  bias: bool = False
  key_bias: bool = False
  qk_norm: str = "none"
  norm_eps: float = 1e-5
  window: int = 0
  clip_qkv: float = 0.0
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

    def zeros(shape, axes, wanted=c.bias):
      return nnx.Param(jnp.zeros(shape), axes=axes) if wanted else None

    def norm(heads, axis):
      shape, axes = ((heads, c.head_dim), (axis, None)) if c.qk_norm == "all" else (
        (c.head_dim,), (None,))  # fmt: skip
      return None if c.qk_norm == "none" else nnx.Param(jnp.ones(shape), axes=axes)

    self.query = weight((c.width, c.num_heads, c.head_dim), c.init_std, ("embed", "heads", None))
    kv = (c.width, c.num_kv_heads, c.head_dim)
    self.key = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.value = weight(kv, c.init_std, ("embed", "kv_heads", None))
    self.out = weight((c.num_heads, c.head_dim, c.width), c.out_std, ("heads", None, "embed"))
    self.query_bias = zeros((c.num_heads, c.head_dim), ("heads", None))
    # Without norms or rotations a bias on keys adds the same to all scores of a query, which
    # softmax does not see.
    self.key_bias = zeros((c.num_kv_heads, c.head_dim), ("kv_heads", None), c.key_bias)
    self.value_bias = zeros((c.num_kv_heads, c.head_dim), ("kv_heads", None))
    self.out_bias = zeros((c.width,), ("embed",))
    self.query_norm = norm(c.num_heads, "heads")
    self.key_norm = norm(c.num_kv_heads, "kv_heads")

  def __call__(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
  ) -> Float[Array, "B S D"]:
    """Attends causally: both halves in a row, without a cache."""
    return self.mix(self.project(x_BSD, positions_BS), positions_BS, segments_BS)[0]

  def project(
    self,
    x_BSD: Float[Array, "B S D"],
    positions_BS: Int[Array, "B S"],
    norm: Norm | None = None,
  ) -> Projected:
    """Queries, keys and values, turned by their positions where there are rotary embeddings.

    Args:
      x_BSD: inputs.
      positions_BS: int32 position of each token in its document.
      norm: what the inputs go through first; None: they are normalised.
    """
    c, dtype = self.config, x_BSD.dtype
    weights = [w[...].astype(dtype) for w in (self.query, self.key, self.value)]
    if (own := self._unfinished(x_BSD, weights, positions_BS, norm)) is not None:
      return own
    x_BSD = repeat(x_BSD if norm is None else norm(x_BSD), ("tensor",), "tensor")

    def finish(y, bias, norm=None):
      y = y if bias is None else y + bias[...].astype(dtype)
      y = y if norm is None else self._normalised(y, norm[...])
      return jnp.clip(y, -c.clip_qkv, c.clip_qkv) if c.clip_qkv else y

    q_BSHN, k_BSHN, v_BSHN = _into_heads(x_BSD, weights)
    q_BSHN = finish(q_BSHN, self.query_bias, self.query_norm)
    k_BSHN = finish(k_BSHN, self.key_bias, self.key_norm)
    v_BSHN = finish(v_BSHN, self.value_bias)
    if c.rope_theta:
      q_BSHN = rotate(q_BSHN, positions_BS, c.rope_theta, c.rope)
      k_BSHN = rotate(k_BSHN, positions_BS, c.rope_theta, c.rope)
    return q_BSHN, k_BSHN, v_BSHN

  def _unfinished(
    self, x_BSD: Array, weights_DHN: list[Array], positions_BS: Array, norm: Norm | None
  ) -> Unfinished | None:
    """A single token's parts, where nothing is done to them but adding up and turning."""
    c = self.config
    biased = any(b is not None for b in (self.query_bias, self.key_bias, self.value_bias))
    normalised = self.query_norm is not None or self.key_norm is not None
    if biased or normalised or c.clip_qkv or (c.rope_theta and c.rope.interleaved):
      return None
    row = x_BSD if norm is None else Normalised(x_BSD, norm.normalisation)
    row = repeat(row, ("tensor",), "tensor")
    sums_PM = sums(row, [w.reshape(w.shape[0], -1) for w in weights_DHN])
    if sums_PM is None:
      return None
    turn_2N = turns(positions_BS[0, 0], c.head_dim, c.rope_theta, c.rope) if c.rope_theta else None
    heads, kv_heads = (w.shape[1] for w in weights_DHN[:2])
    return Unfinished(sums_PM, turn_2N, heads, kv_heads, x_BSD.dtype)

  def _normalised(self, y_BSHN: Array, scale: Array) -> Array:
    """Queries or keys under their norm."""
    eps, devices = self.config.norm_eps, axis_size("tensor")
    if self.config.qk_norm == "head":
      return rms_normalised(y_BSHN, repeat(scale, ("tensor",), "tensor"), eps)
    if devices == 1:
      flat = y_BSHN.reshape(*y_BSHN.shape[:2], -1)
      return rms_normalised(flat, scale.reshape(-1), eps).reshape(y_BSHN.shape)
    # Every device has a part of the heads, and reads the squares of all.
    wide = y_BSHN.astype(jnp.float32)
    square = total(jnp.square(wide).sum((2, 3), keepdims=True), ("tensor",), "tensor")
    square = repeat(square, ("tensor",), "tensor") / (devices * wide.shape[2] * wide.shape[3])
    return (wide * jax.lax.rsqrt(square + eps) * scale).astype(y_BSHN.dtype)

  def empty_cache(self, batch: int, length: int, dtype: Any) -> KeyValues:
    """A cache of at least `length` positions; of this device's heads in the manual region."""
    heads = self.config.num_kv_heads // axis_size("tensor")
    length = decode_attention.cache_length(length, dtype, self.config.head_dim)
    shape = (batch, length, heads, self.config.head_dim)
    return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  def cache_specs(self) -> KeyValues:
    """How a cache lies on the mesh."""
    spec = P(BATCH_AXES, None, "tensor")
    return KeyValues(spec, spec)  # pyright: ignore[reportArgumentType]

  def mix(
    self,
    projected: Projected,
    positions_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"] | None = None,
    cache: KeyValues | None = None,
    *,
    begins: bool = False,
  ) -> tuple[Float[Array, "B S D"], KeyValues | None]:
    """Lets queries, keys and values meet.

    Args:
      projected: from `project`.
      positions_BS: as there; with a cache also the place where key and value are stored.
      segments_BS: int32 document of each token; attention stays inside a document. None: it
        sees the whole row.
      cache: keys and values of earlier positions; the new ones are added.
      begins: the cache is empty and the tokens are their rows' first: they see each other, in the
        same kernels as without a cache.

    Returns:
      y_BSD, and the cache with the new keys and values (None if there was none).
    """
    window = self.config.window
    if isinstance(projected, Unfinished) and cache is not None and not begins:
      weight_HND = self.out[...].astype(projected.dtype)
      y_BSD, cache = attend_unfinished(projected, cache, positions_BS, weight_HND, window=window)
      return self._on_all(y_BSD), cache
    if isinstance(projected, Unfinished):
      projected = _finished(projected)
    q_BSHN, k_BSHN, v_BSHN = projected
    dtype = q_BSHN.dtype
    if cache is not None:
      here = None if begins else positions_BS
      keys, values = stored(cache.k_BSHN, k_BSHN, here), stored(cache.v_BSHN, v_BSHN, here)
      cache = KeyValues(keys, values)
    if cache is not None and not begins:
      k_BSHN, v_BSHN = cache.k_BSHN.astype(dtype), cache.v_BSHN.astype(dtype)
      y_BSHN = attend_stored(q_BSHN, k_BSHN, v_BSHN, positions_BS, window=window)
    else:
      y_BSHN = attend(q_BSHN, k_BSHN, v_BSHN, segments_BS, window=window)
    return self._out(y_BSHN), cache

  def _out(self, y_BSHN: Array) -> Array:
    """The heads' results in the model's width: [B, S, D]."""
    return self._on_all(_out_of_heads(y_BSHN, self.out[...].astype(y_BSHN.dtype)))

  def _on_all(self, y_BSD: Array) -> Array:
    """Of this device's heads: the sum over all of them, and the bias."""
    y_BSD = total(y_BSD, ("tensor",), "tensor")
    return y_BSD if self.out_bias is None else y_BSD + self.out_bias[...].astype(y_BSD.dtype)


def _into_heads(x_BSD: Array, weights_DHN: list[Array]) -> list[Array]:
  """Σ_d x · W for each of several W: [B, S, H, N]."""
  flat = [w.reshape(w.shape[0], -1) for w in weights_DHN]
  if found := products(x_BSD, flat):
    return [y.reshape(*y.shape[:-1], *w.shape[1:]) for y, w in zip(found, weights_DHN)]
  return [jnp.einsum("bsd,dhn->bshn", x_BSD, w) for w in weights_DHN]


def _out_of_heads(y: Array | Unjoined, weight_HND: Array) -> Array:
  """Σ_hn y · W, of y [B, S, H, N] or of one token that is not joined: [B, S, D]."""
  row = y if isinstance(y, Unjoined) else y.reshape(*y.shape[:2], -1)
  if found := products(row, [weight_HND.reshape(-1, weight_HND.shape[-1])]):
    return found[0] if isinstance(y, Array) else found[0][None]
  y_BSHN = y if isinstance(y, Array) else y.joined()[None, None]
  return jnp.einsum("bshn,hnd->bsd", y_BSHN, weight_HND)


def attend(
  q_BSHN: Float[Array, "B S H N"],
  k_BSHN: Float[Array, "B S K N"],
  v_BSHN: Float[Array, "B S K M"],
  segments_BS: Int[Array, "B S"] | None = None,
  *,
  window: int = 0,
  scale: float | None = None,
) -> Float[Array, "B S H M"]:
  """Causal softmax attention of a row's tokens, whoever computes it.

  Args:
    q_BSHN, k_BSHN, v_BSHN: heads of keys and values are shared by groups of queries'; values may be
      narrower or wider than keys.
    segments_BS: int32 document of each token; attention stays inside it. None: the whole row.
    window: positions that a token sees, itself included; 0: all before it.
    scale: of the scores; None: 1/√N.
  """
  dtype, size = q_BSHN.dtype, v_BSHN.shape[-1]
  scale = q_BSHN.shape[-1] ** -0.5 if scale is None else scale
  q_BSHN, k_BSHN, v_BSHN = _of_one_width(*map(_computable, (q_BSHN, k_BSHN, v_BSHN)))
  mask_BHSS = None
  if segments_BS is not None:
    mask_BHSS = segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
  y_BSHM = jax.nn.dot_product_attention(
    q_BSHN,
    k_BSHN,
    v_BSHN,
    mask=mask_BHSS,
    is_causal=True,
    scale=scale,
    local_window_size=(window - 1, 0) if window else None,
    implementation=_implementation(q_BSHN, masked=mask_BHSS is not None, window=window),
  )
  return y_BSHM[..., :size].astype(dtype)


def attend_stored(
  q_BSHN: Float[Array, "B S H N"],
  k_BTKN: Float[Array, "B T K N"],
  v_BTKM: Float[Array, "B T K M"],
  positions_BS: Int[Array, "B S"],
  *,
  window: int = 0,
  scale: float | None = None,
) -> Float[Array, "B S H M"]:
  """The same over a cache of T positions, of which each token sees those up to its own."""
  scale = 1 / math.sqrt(q_BSHN.shape[-1]) if scale is None else scale
  plain = functools.partial(_attend_masked, window=window, scale=scale)
  if not decode_attention.takes(q_BSHN, k_BTKN, v_BTKM):
    return plain(q_BSHN, k_BTKN, v_BTKM, positions_BS)
  kernel = functools.partial(decode_attention.attend_cache, window=window, scale=scale)
  fast = lambda q, k, v, positions: kernel(q[:, 0], k, v, positions[:, 0])[:, None]
  return without_gradient(fast, plain, q_BSHN, k_BTKN, v_BTKM, positions_BS)


def attend_unfinished(
  own: Unfinished,
  cache: KeyValues,
  positions_BS: Int[Array, "1 1"],
  weight_HND: Float[Array, "H N D"],
  *,
  window: int = 0,
) -> tuple[Float[Array, "1 1 D"], KeyValues]:
  """A token's attention in the model's width, and the cache with its key and value; by kernels
  where they take it."""
  fast = functools.partial(_attend_fast, window=window)
  plain = functools.partial(_attend_plain, window=window)
  if not decode_attention.finishes(own, cache.k_BSHN, cache.v_BSHN):
    return plain(own, cache, positions_BS, weight_HND)
  return without_gradient(fast, plain, own, cache, positions_BS, weight_HND)


def _attend_fast(
  own: Unfinished, cache: KeyValues, positions_BS: Array, weight_HND: Array, *, window: int
):
  scale, given = 1 / math.sqrt(own.width), (cache.k_BSHN[0], cache.v_BSHN[0], positions_BS[0])
  options = {"scale": scale, "window": window}
  y, k_TKN, v_TKN = decode_attention.attend_unfinished(own, *given, **options)
  cache = KeyValues(k_TKN[None], v_TKN[None])
  return _out_of_heads(y if isinstance(y, Unjoined) else y[None, None], weight_HND), cache


def _attend_plain(
  own: Unfinished, cache: KeyValues, positions_BS: Array, weight_HND: Array, *, window: int
):
  q_BSHN, k_BSHN, v_BSHN = _finished(own)
  keys = stored(cache.k_BSHN, k_BSHN, positions_BS)
  cache = KeyValues(keys, stored(cache.v_BSHN, v_BSHN, positions_BS))
  k_BTKN, v_BTKN = (x.astype(own.dtype) for x in (cache.k_BSHN, cache.v_BSHN))
  y_BSHN = attend_stored(q_BSHN, k_BTKN, v_BTKN, positions_BS, window=window)
  return _out_of_heads(y_BSHN, weight_HND), cache


def _finished(own: Unfinished) -> tuple[Array, Array, Array]:
  """Queries, keys and values of one token, [1, 1, H, N]."""
  q_HN, k_KN, v_KN = own.finished()
  return q_HN[None, None], k_KN[None, None], v_KN[None, None]


def _attend_masked(
  q_BSHN: Array, k_BTKN: Array, v_BTKM: Array, positions_BS: Array, *, window: int, scale: float
) -> Array:
  dtype, size = q_BSHN.dtype, v_BTKM.shape[-1]
  q_BSHN, k_BTKN, v_BTKM = _of_one_width(*map(_computable, (q_BSHN, k_BTKN, v_BTKM)))
  stored_T = jnp.arange(k_BTKN.shape[1])
  mask_BST = stored_T <= positions_BS[..., None]
  if window:
    mask_BST &= stored_T > positions_BS[..., None] - window
  y_BSHM = jax.nn.dot_product_attention(q_BSHN, k_BTKN, v_BTKM, mask=mask_BST[:, None], scale=scale)
  return y_BSHM[..., :size].astype(dtype)


def stored(cache_BT: Array, new_BS: Array, positions_BS: Array | None) -> Array:
  """A cache [B, T, ...] with new tokens' values [B, S, ...].

  Args:
    cache_BT: of earlier positions.
    new_BS: of the new tokens.
    positions_BS: where they go; None: to the beginning, as one block.
  """
  new_BS = new_BS.astype(cache_BT.dtype)
  if positions_BS is None:
    return jax.lax.dynamic_update_slice_in_dim(cache_BT, new_BS, 0, 1)
  if positions_BS.shape == (1, 1):  # one place, which XLA writes in the kernel that makes the value
    return jax.lax.dynamic_update_slice_in_dim(cache_BT, new_BS, positions_BS[0, 0], 1)
  row_B1 = jnp.arange(new_BS.shape[0])[:, None]
  return cache_BT.at[row_B1, positions_BS].set(new_BS)


def _of_one_width(*heads: Array) -> tuple[Array, ...]:
  """Queries, keys and values as wide as the widest, which jax's attention asks for: zeros change no
  score, and the values' are cut off again."""
  width = max(x.shape[-1] for x in heads)
  pad = lambda x: [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
  return tuple(x if x.shape[-1] == width else jnp.pad(x, pad(x)) for x in heads)


def _computable(x_BSHN: Array) -> Array:
  """In a type in which attention has a form here: XLA has no such float16 product for a CPU."""
  if x_BSHN.dtype != jnp.float16 or jax.default_backend() != "cpu":
    return x_BSHN
  _say_once("attention runs in float32: XLA has no float16 products for it on a CPU")
  return x_BSHN.astype(jnp.float32)


@functools.cache
def _say_once(text: str) -> None:
  logging.getLogger(__name__).warning(text)


def fusable(dtype: Any, head_dim: int, length: int, *, masked: bool, window: int = 0) -> bool:
  """Whether cuDNN's fused attention takes it, on a GPU that has it: 16-bit floats, heads of 8 to
  128; with a mask, of even lengths and without a window."""
  fits = dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
  return fits and not (masked and (length % 2 or window))


def _implementation(q_BSHN: Array, *, masked: bool, window: int = 0) -> Literal["cudnn"] | None:
  """cuDNN's fused attention where it can run: from Ampere on (compute capability 8.0; a T4 has
  7.5). With a mask, which cuDNN reads as a bias, up to Hopper: not deterministic on later ones.
  Nowhere under `--deterministic`: jax 0.11.2 ends its first step with an IndexError."""
  _, length, _, head_dim = q_BSHN.shape
  fits = fusable(q_BSHN.dtype, head_dim, length, masked=masked, window=window)
  major = _generation(jax.devices()[0])
  runs = major >= 8 and not (masked and major > 9) and not determinism.is_requested()
  return "cudnn" if fits and runs else None


def _generation(device: Any) -> int:
  """Major compute capability of a GPU; 0 of what is none."""
  major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
  return int(major) if device.platform == "gpu" else 0
