"""Attention of a single token over its cache, in one kernel.

    H  heads of queries      K  heads of keys and values, each shared by G = H / K
    T  length of the cache   N  width of a head               P  parts of the cache

Scores, softmax and the sum over values are three kernels of XLA's, each of which waits for the one
before. Here a warpgroup takes blocks of the cache's positions and keeps a running softmax (the
online form of Milakov and Gimelshein, arXiv 1805.02867); a CTA's warpgroups are joined in shared
memory, and several CTAs of a long cache by XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe._compat import load_as
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.pipeline import (
  compiled,
  interpretation,
  resolve_num_sms,
  swizzled,
)

_BLOCK = 64  # positions that a warpgroup looks at together
_WARPGROUPS = 4  # of a CTA
_BLOCKS_EACH = 2  # of a warpgroup, before a second CTA shares the cache
_HELD = 512  # numbers of the result that a warpgroup holds, over its heads
_LOW = -1e30  # the score of what is not seen


@dataclasses.dataclass(frozen=True)
class _Static:
  """What the program depends on beside shapes."""

  scale: float
  window: int
  parts: int
  simulation: Any


def cache_length(length: int, dtype: Any, width: int) -> int:
  """The length of a single row's cache of at least so many positions that the kernel takes."""
  if resolve_backend("auto", dtype, width) != "mosaic_gpu":
    return length
  return -(-length // _BLOCK) * _BLOCK


def takes(q_BSHN: Array, k_BTKN: Array, v_BTKM: Array, backend: str = "auto") -> bool:
  """Whether the kernel takes this: one token's 16-bit floats, widths of 64 and 128, a cache whose
  length 64 divides, and up to 512 numbers of queries that share keys."""
  heads, width = q_BSHN.shape[2:]
  length, kv_heads = k_BTKN.shape[1:3]
  alike = q_BSHN.dtype == k_BTKN.dtype == v_BTKM.dtype and v_BTKM.shape == k_BTKN.shape
  fits = q_BSHN.shape[:2] == (1, 1) and width in (64, 128) and length % _BLOCK == 0
  fits = fits and alike and heads // kv_heads * width <= _HELD
  # Asked last: it says what it decides.
  return fits and resolve_backend(backend, q_BSHN.dtype, width) == "mosaic_gpu"


def attend_cache(
  q_HN: Array, k_TKN: Array, v_TKN: Array, position: Array, *, scale: float, window: int = 0
) -> Array:
  """Σ_t softmax_t(scale · q · k[t]) v[t] over t <= position, [H, N] in the type of q, of what the
  kernel `takes`; not differentiable.

  Args:
    q_HN: queries of one token.
    k_TKN, v_TKN: its cache, in the type of the queries; what lies beyond the position is not read
      into the result.
    position: int32 [1], of the token.
    scale: of the scores.
    window: positions that the token sees, itself included; 0: all.
  """
  length, kv_heads, _ = k_TKN.shape
  each = _WARPGROUPS * _BLOCKS_EACH * _BLOCK
  parts = min(-(-length // each), resolve_num_sms(None) // kv_heads)
  static = _Static(scale, window, max(parts, 1), interpretation())
  return _attend(q_HN, k_TKN, v_TKN, position, static=static)


@functools.partial(jax.jit, static_argnames="static")
def _attend(q_HN: Array, k_TKN: Array, v_TKN: Array, position: Array, *, static: _Static) -> Array:
  kv_heads, width = k_TKN.shape[1:]
  heads, parts = q_HN.shape[0], static.parts
  shared = heads // kv_heads
  workers = parts * _WARPGROUPS
  tile = plgpu.Layout.WGMMA

  def body(q, k, v, position, y, *rest):
    *rest, keys, values, tops, totals, sums, result, loaded, joined = rest
    kv, part, wg = (lax.axis_index(name) for name in ("kv", "part", "wg"))
    here = position[0]
    first = jnp.maximum(here - (static.window - 1), 0) if static.window else jnp.int32(0)
    first_block = first // _BLOCK
    mine = first_block + part * _WARPGROUPS + wg
    steps = jnp.maximum((here // _BLOCK - mine + workers) // workers, 0)
    across = tile.reduce(0)  # a row's layout beside tiles
    queries = [load_as(q.at[kv * shared + g], across).astype(jnp.float32) for g in range(shared)]

    def step(i, carry):
      start = (mine + i * workers) * _BLOCK
      at = pl.ds(start, _BLOCK)
      plgpu.copy_gmem_to_smem(k.at[at, kv], keys.at[wg], loaded.at[wg])
      plgpu.copy_gmem_to_smem(v.at[at, kv], values.at[wg], loaded.at[wg])
      plgpu.barrier_wait(loaded.at[wg])
      k_BN = plgpu.layout_cast(keys[wg], tile).astype(jnp.float32)
      v_BN = plgpu.layout_cast(values[wg], tile).astype(jnp.float32)
      plgpu.commit_smem()  # all of the warpgroup has read before the next block is written there
      place = start + plgpu.broadcasted_iota(jnp.int32, (_BLOCK, width), 0, layout=tile)
      seen = (place >= first) & (place <= here)
      v_BN = jnp.where(seen, v_BN, jnp.zeros_like(v_BN))  # nothing times what is not finite
      out = []
      for x_N, (most, weight, y_N) in zip(queries, carry):
        product = k_BN * lax.broadcast_in_dim(x_N, k_BN.shape, (1,))
        score_B = jnp.sum(product, axis=1) * static.scale
        score_BN = lax.broadcast_in_dim(score_B, k_BN.shape, (0,))
        score_BN = jnp.where(seen, score_BN, jnp.full_like(score_BN, _LOW))
        score_B = jnp.max(score_BN, axis=1)
        new = jnp.maximum(most, jnp.max(score_B))
        old = jnp.exp(most - new)
        # Of a block in which nothing is seen all weights are exp(0): they are taken out.
        share_B = jnp.exp(score_B - new)
        share_B = jnp.where(score_B > _LOW / 2, share_B, jnp.zeros_like(share_B))
        weighted = v_BN * lax.broadcast_in_dim(share_B, v_BN.shape, (0,))
        y_N = y_N * old + jnp.sum(weighted, axis=0)
        out.append((new, weight * old + jnp.sum(share_B), y_N))
      return tuple(out)

    zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), across)
    begun = tuple((jnp.float32(_LOW), jnp.float32(0), zero) for _ in queries)
    for g, (most, weight, y_N) in enumerate(lax.fori_loop(0, steps, step, begun)):
      tops[g, wg], totals[g, wg], sums[g, wg] = most, weight, y_N
    plgpu.barrier_arrive(joined)
    plgpu.barrier_wait(joined)

    @pl.when(wg == 0)
    def _():
      for g in range(shared):
        most = tops[g, 0]
        for w in range(1, _WARPGROUPS):
          most = jnp.maximum(most, tops[g, w])
        scales = [jnp.exp(tops[g, w] - most) for w in range(_WARPGROUPS)]
        weight = sum(totals[g, w] * scales[w] for w in range(_WARPGROUPS))
        joint = load_as(sums.at[g, 0], across) * scales[0]
        for w in range(1, _WARPGROUPS):
          joint = joint + load_as(sums.at[g, w], across) * scales[w]
        head = kv * shared + g
        if parts == 1:
          result[g] = (joint / weight).astype(y.dtype)
        else:
          most_of, weight_of = rest
          y[head, part], most_of[head, part], weight_of[head, part] = joint, most, weight
      if parts == 1:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, y.at[pl.ds(kv * shared, shared)])
        plgpu.wait_smem_to_gmem(0)

  block = (_WARPGROUPS, _BLOCK, width)
  cache = plgpu.SMEM(block, k_TKN.dtype, transforms=swizzled(width, k_TKN.dtype))
  number = plgpu.SMEM((shared, _WARPGROUPS), jnp.float32)
  numbers = jax.ShapeDtypeStruct((heads, parts), jnp.float32)
  several = jax.ShapeDtypeStruct((heads, parts, width), jnp.float32), numbers, numbers
  run = compiled(
    body,
    out_type=jax.ShapeDtypeStruct((heads, width), q_HN.dtype) if parts == 1 else several,
    grid=(kv_heads, parts),
    grid_names=("kv", "part"),
    num_threads=_WARPGROUPS,
    thread_name="wg",
    scratch_types=[
      cache,
      cache,
      number,
      number,
      plgpu.SMEM((shared, _WARPGROUPS, width), jnp.float32),
      plgpu.SMEM((shared, width), q_HN.dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=_WARPGROUPS),
      plgpu.Barrier(num_arrivals=_WARPGROUPS),
    ],
  )
  if parts == 1:
    return run(q_HN, k_TKN, v_TKN, position)
  y_HPN, most_HP, weight_HP = run(q_HN, k_TKN, v_TKN, position)
  share_HP = jnp.exp(most_HP - most_HP.max(1, keepdims=True))
  y_HN = jnp.sum(y_HPN * share_HP[..., None], 1) / jnp.sum(weight_HP * share_HP, 1)[:, None]
  return y_HN.astype(q_HN.dtype)
