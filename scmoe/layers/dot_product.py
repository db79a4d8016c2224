"""Softmax attention of given queries, keys and values, in training and over a cache.

This module decides which kernel computes: cuDNN's fused attention, our kernel for one token per row
(`scmoe.kernels.one_row.attention`), or XLA's products.

    B  rows      S  tokens of a row      T  positions of a cache
    H  heads of queries      K  heads of keys      N  width of a query and key      M  of a value
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base import determinism
from scmoe.kernels.launch import kernels_may_run
from scmoe.kernels.one_row import attention as one_token
from scmoe.kernels.one_row.without_gradient import without_gradient


def attend(
  q_BSHN: Float[Array, "B S H N"],
  k_BSKN: Float[Array, "B S K N"],
  v_BSKM: Float[Array, "B S K M"],
  segments_BS: Int[Array, "B S"] | None = None,
  *,
  window: int = 0,
  scale: float | None = None,
  causal: bool = True,
  sinks_H: Float[Array, " H"] | None = None,
  chunk: int = 0,
  full: Bool[Array, ""] | None = None,
) -> Float[Array, "B S H M"]:
  """Softmax attention among the tokens of each row; the result has the type of q.

  Args:
    q_BSHN, k_BSKN, v_BSKM: H is a multiple of K: consecutive heads of queries share one head of
      keys and values. M may differ from N.
    segments_BS: int32 document of each token; attention stays inside it. None: the whole row.
    window: positions that a token sees, itself included; 0: all before it. Needs `causal`.
    scale: factor on the scores; None: 1/√N.
    causal: a token sees itself and those before it; False: all tokens of its row.
    sinks_H, chunk, full: see `softmax_over` and `visible`; with any of them XLA computes. `chunk`
      and `full` need `causal`. Chunks are counted from the beginning of each document.
  """
  dtype, size = q_BSHN.dtype, v_BSKM.shape[-1]
  scale = float(q_BSHN.shape[-1] ** -0.5) if scale is None else scale
  if sinks_H is not None or full is not None or chunk:
    same_BST, place_BS = True, jnp.arange(q_BSHN.shape[1])[None]
    if segments_BS is not None:
      same_BST = segments_BS[:, :, None] == segments_BS[:, None, :]
      place_BS = place_BS - same_BST.argmax(-1)  # counted from the document's first token
    mask_BST = visible(place_BS, place_BS, window, chunk, full) if causal else (
      jnp.ones((1, *[q_BSHN.shape[1]] * 2), bool))  # fmt: skip
    mask_BST &= same_BST
    return softmax_over(q_BSHN, k_BSKN, v_BSKM, mask_BST, scale=scale, sinks_H=sinks_H)
  q_BSHN, k_BSKN, v_BSKM = _padded_to_one_width(*map(widened_on_cpu, (q_BSHN, k_BSKN, v_BSKM)))
  mask_BHSS = None
  if segments_BS is not None:
    mask_BHSS = segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
  y_BSHM = jax.nn.dot_product_attention(
    q_BSHN,
    k_BSKN,
    v_BSKM,
    mask=mask_BHSS,
    is_causal=causal,
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
  sinks_H: Float[Array, " H"] | None = None,
  chunk: int = 0,
  full: Bool[Array, ""] | None = None,
) -> Float[Array, "B S H M"]:
  """`attend` over a cache: a token at position 5 sees the cache's positions 0 to 5.

  With one token per row our kernel computes, where it takes the arrays and there are no sinks, no
  chunks and no `full`. XLA computes everything else, and every gradient.

  Args:
    q_BSHN: queries of the new tokens.
    k_BTKN, v_BTKM: caches that contain the new tokens' keys and values already.
    positions_BS: int32 position of each new token.
    window, scale, sinks_H, chunk, full: as for `attend`.
  """
  scale = 1 / math.sqrt(q_BSHN.shape[-1]) if scale is None else scale
  if sinks_H is not None or full is not None or chunk:
    mask_BST = visible(positions_BS, jnp.arange(k_BTKN.shape[1])[None], window, chunk, full)
    return softmax_over(q_BSHN, k_BTKN, v_BTKM, mask_BST, scale=scale, sinks_H=sinks_H)
  plain = functools.partial(_attend_masked, window=window, scale=scale)
  if not one_token.takes(q_BSHN, k_BTKN, v_BTKM):
    return plain(q_BSHN, k_BTKN, v_BTKM, positions_BS)
  kernel = functools.partial(one_token.attend_cache, window=window, scale=scale)
  fast = lambda q, k, v, positions: kernel(q[:, 0], k, v, positions[:, 0])[:, None]
  return without_gradient(fast, plain, q_BSHN, k_BTKN, v_BTKM, positions_BS)


def visible(
  own_BS: Int[Array, "B S"],
  seen_BT: Int[Array, "B T"],
  window: int = 0,
  chunk: int = 0,
  full: Bool[Array, ""] | None = None,
) -> Bool[Array, "B S T"]:
  """True where a token sees a position: its own, and those before it in its window and chunk.

  Example with chunks of 4: the token at position 5 sees positions 4 and 5, that at 4 only itself.

  Args:
    own_BS, seen_BT: int32 positions of the tokens, and of the keys; B may be 1.
    window: positions that a token sees, itself included; 0: all before it.
    chunk: size of the chunks into which positions are cut; 0: no chunks (Llama-4).
    full: whether window and chunks do not count; may be traced. None: they count.
  """
  own, seen = own_BS[:, :, None], seen_BT[:, None, :]
  mask_BST = seen <= own
  if not window and not chunk:
    return mask_BST
  inside = seen > own - window if window else seen // chunk == own // chunk
  if window and chunk:
    inside &= seen // chunk == own // chunk
  return mask_BST & (inside if full is None else inside | full)


def softmax_over(
  q_BSHN: Float[Array, "B S H N"],
  k_BTKN: Float[Array, "B T K N"],
  v_BTKM: Float[Array, "B T K M"],
  mask_BST: Bool[Array, "b S T"],
  *,
  scale: float,
  sinks_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B S H M"]:
  """Softmax attention by XLA's products, with any mask, and with sinks if given; in the type of q.

  A sink is a learned score of a head beside those of its keys: it takes a share of the softmax and
  has no value, so that a head may attend to nothing (GPT-OSS). With the sink s,

      y = Σ_t exp(score_t) · v_t / (exp(s) + Σ_t exp(score_t))

  Args:
    q_BSHN, k_BTKN, v_BTKM: as for `attend`.
    mask_BST: True where a token sees a position; every token sees one at least. b is B, or 1 if all
      rows have the same mask.
    scale: factor on the scores.
    sinks_H: the sink of each head of queries; None: no sinks.
  """
  dtype, (rows, length, heads, width) = q_BSHN.dtype, q_BSHN.shape
  shared = k_BTKN.shape[2]
  q_BSHN, k_BTKN, v_BTKM = map(widened_on_cpu, (q_BSHN, k_BTKN, v_BTKM))
  q_BSKGN = q_BSHN.reshape(rows, length, shared, heads // shared, width)
  wide = jnp.promote_types(dtype, jnp.float32)
  score_BKGST = jnp.einsum("bskgn,btkn->bkgst", q_BSKGN, k_BTKN, preferred_element_type=wide)
  score_BKGST = jnp.where(mask_BST[:, None, None], score_BKGST * scale, -jnp.inf)
  largest = jax.lax.stop_gradient(score_BKGST.max(-1, keepdims=True))
  if sinks_H is None:
    share_BKGST = jnp.exp(score_BKGST - largest)
    total = share_BKGST.sum(-1, keepdims=True)
  else:
    sink_KG11 = sinks_H.astype(wide).reshape(shared, heads // shared, 1, 1)
    largest = jnp.maximum(largest, jax.lax.stop_gradient(sink_KG11))
    share_BKGST = jnp.exp(score_BKGST - largest)
    total = share_BKGST.sum(-1, keepdims=True) + jnp.exp(sink_KG11 - largest)
  share_BKGST = (share_BKGST / total).astype(v_BTKM.dtype)
  y_BSKGM = jnp.einsum("bkgst,btkm->bskgm", share_BKGST, v_BTKM)
  return y_BSKGM.reshape(rows, length, heads, -1).astype(dtype)


def cache_length(length: int, dtype: Any, head_dim: int) -> int:
  """`length`, rounded up to a multiple of 64 where our kernel runs with this type and width."""
  return one_token.cache_length(length, dtype, head_dim)


def stored(cache_BT: Array, new_BS: Array, positions_BS: Array | None) -> Array:
  """A cache [B, T, ...] with the new tokens' values [B, S, ...] written into it.

  Args:
    cache_BT: values of earlier positions.
    new_BS: values of the new tokens.
    positions_BS: int32 position of each new token; None: 0 to S - 1, written as one block.
  """
  new_BS = new_BS.astype(cache_BT.dtype)
  if positions_BS is None:
    return jax.lax.dynamic_update_slice_in_dim(cache_BT, new_BS, 0, 1)
  if positions_BS.shape == (1, 1):  # XLA writes one place in the kernel that computes the value
    return jax.lax.dynamic_update_slice_in_dim(cache_BT, new_BS, positions_BS[0, 0], 1)
  row_B1 = jnp.arange(new_BS.shape[0])[:, None]
  return cache_BT.at[row_B1, positions_BS].set(new_BS)


def fusable(dtype: Any, head_dim: int, length: int, *, masked: bool, window: int = 0) -> bool:
  """Whether cuDNN's fused attention takes these shapes, on a GPU that has it.

  It takes 16-bit floats and heads whose width is a multiple of 8, at most 128. With a mask it takes
  only rows of even length, and no window.
  """
  fits = dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
  return fits and not (masked and (length % 2 or window))


def _attend_masked(
  q_BSHN: Array, k_BTKN: Array, v_BTKM: Array, positions_BS: Array, *, window: int, scale: float
) -> Array:
  """`attend_stored` by XLA, with a mask over the cache's positions."""
  dtype, size = q_BSHN.dtype, v_BTKM.shape[-1]
  q_BSHN, k_BTKN, v_BTKM = _padded_to_one_width(*map(widened_on_cpu, (q_BSHN, k_BTKN, v_BTKM)))
  mask_BST = visible(positions_BS, jnp.arange(k_BTKN.shape[1])[None], window)
  y_BSHM = jax.nn.dot_product_attention(q_BSHN, k_BTKN, v_BTKM, mask=mask_BST[:, None], scale=scale)
  return y_BSHM[..., :size].astype(dtype)


def _padded_to_one_width(*heads: Array) -> tuple[Array, ...]:
  """Queries, keys and values padded with zeros to the widest of them, as jax's attention requires.

  The zeros change no score; the caller cuts the result back to the values' width.
  """
  width = max(x.shape[-1] for x in heads)
  pad = lambda x: [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
  return tuple(x if x.shape[-1] == width else jnp.pad(x, pad(x)) for x in heads)


def widened_on_cpu(x_BSHN: Array) -> Array:
  """x, on a CPU as float32 if it is float16: XLA has no float16 products for attention there."""
  if x_BSHN.dtype != jnp.float16 or jax.default_backend() != "cpu":
    return x_BSHN
  _say_once("attention runs in float32: XLA has no float16 products for it on a CPU")
  return x_BSHN.astype(jnp.float32)


@functools.cache
def _say_once(text: str) -> None:
  logging.getLogger(__name__).warning(text)


def _implementation(q_BSHN: Array, *, masked: bool, window: int = 0) -> Literal["cudnn"] | None:
  """The name of cuDNN's fused attention for jax where it runs; else None, and jax chooses."""
  return "cudnn" if runs_fused(q_BSHN, masked=masked, window=window) else None


def runs_fused(q_BSHN: Array, *, masked: bool, window: int = 0) -> bool:
  """Whether cuDNN's fused attention runs here on these queries and as many keys.

  It needs Ampere or later (compute capability 8.0 at least; a T4 has 7.5). cuDNN reads a mask as a
  bias, which is not deterministic after Hopper (9.0), so with a mask it does not run there. Under
  `--deterministic` it never runs: jax 0.11.2 ends the first such step with an IndexError. Nor does
  it in a program of several seeds (`without_kernels`): jax's batching rule for it fails with a mask
  of one head for all.
  """
  _, length, _, head_dim = q_BSHN.shape
  fits = fusable(q_BSHN.dtype, head_dim, length, masked=masked, window=window)
  major = _compute_capability(jax.devices()[0])
  runs = major >= 8 and not (masked and major > 9) and not determinism.is_requested()
  runs = runs and kernels_may_run()
  return fits and runs


def _compute_capability(device: Any) -> int:
  """Major compute capability of a GPU; 0 for any other device."""
  major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
  return int(major) if device.platform == "gpu" else 0
