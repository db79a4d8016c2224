"""Attention of a single token over its cache, in one kernel.

    H  heads of queries      K  heads of keys and values, each shared by G = H / K
    T  length of the cache   N  width of a head               P  parts of the cache
    B  positions of a block  M  rows of a matrix instruction, of which G are queries

Scores, softmax and the sum over values are three kernels of XLA's, each of which waits for the one
before. Here a warpgroup takes blocks of the cache's positions and keeps a running softmax (the
online form of Milakov and Gimelshein, arXiv 1805.02867); a CTA's warpgroups are joined in shared
memory, and several CTAs of a long cache by XLA. Both products are matrix instructions, most of
whose rows stay empty: they add up across a warpgroup's warps, which sums of vectors may not, since
all warpgroups of a CTA would do so by way of the same shared memory.
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
  smem,
)

_BLOCK = 64  # positions that a warpgroup looks at together
_WARPGROUPS = 2  # of a CTA
_STAGES = 2  # blocks of a warpgroup that are on their way
_ROWS = 64  # of a matrix instruction
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
  length 64 divides, and up to 64 heads of queries that share keys."""
  heads, width = q_BSHN.shape[2:]
  length, kv_heads = k_BTKN.shape[1:3]
  alike = q_BSHN.dtype == k_BTKN.dtype == v_BTKM.dtype and v_BTKM.shape == k_BTKN.shape
  fits = q_BSHN.shape[:2] == (1, 1) and width in (64, 128) and length % _BLOCK == 0
  fits = fits and alike and heads // kv_heads <= _ROWS
  # Asked last: it says what it decides.
  return fits and resolve_backend(backend, q_BSHN.dtype, width) == "mosaic_gpu"


def attend_cache(
  q_HN: Array, k_TKN: Array, v_TKN: Array, position: Array, *, scale: float, window: int = 0
) -> Array:
  """Σ_t softmax_t(scale · q · k[t]) v[t] over t <= position, [H, N] in the type of q, of what the
  kernel `takes`; not differentiable. The softmax is rounded to the type of q before it meets v.

  Args:
    q_HN: queries of one token.
    k_TKN, v_TKN: its cache, in the type of the queries. What lies beyond the position does not come
      into the result, if its values are finite: as in XLA's form they are multiplied by 0.
    position: int32 [1], of the token.
    scale: of the scores.
    window: positions that the token sees, itself included; 0: all.
  """
  length, kv_heads, _ = k_TKN.shape
  each = _WARPGROUPS * _STAGES * _BLOCK
  parts = min(-(-length // each), resolve_num_sms(None) // kv_heads)
  static = _Static(scale, window, max(parts, 1), interpretation())
  return _attend(q_HN, k_TKN, v_TKN, position, static=static)


@functools.partial(jax.jit, static_argnames="static")
def _attend(q_HN: Array, k_TKN: Array, v_TKN: Array, position: Array, *, static: _Static) -> Array:
  length, kv_heads, width = k_TKN.shape
  heads, parts, dtype = q_HN.shape[0], static.parts, q_HN.dtype
  shared, blocks = heads // kv_heads, length // _BLOCK
  workers = parts * _WARPGROUPS
  tile = plgpu.Layout.WGMMA
  row = tile.reduce(1)  # the layout of one number a row

  def body(q, k, v, position, y, *rest):
    outs, (in_out, queries, shares, keys, values, other, tops, totals) = rest[:-11], rest[-11:-3]
    here_is_q, loaded, joined = rest[-3:]
    kv, part, wg = (lax.axis_index(name) for name in ("kv", "part", "wg"))
    mine = part * _WARPGROUPS + wg

    def load(block, slot):
      at = pl.ds(block * _BLOCK, _BLOCK)
      plgpu.copy_gmem_to_smem(k.at[at, kv], keys.at[wg, slot], loaded.at[wg, slot])
      plgpu.copy_gmem_to_smem(v.at[at, kv], values.at[wg, slot], loaded.at[wg, slot])

    def load_first(first_block, end):
      for slot in range(_STAGES):
        block = first_block + mine + slot * workers
        pl.when(block < end)(functools.partial(load, block, slot))

    @pl.when(wg == 0)
    def _():
      mine_of_q = pl.ds(kv * shared, shared)
      plgpu.copy_gmem_to_smem(q.at[mine_of_q], in_out.at[pl.ds(0, shared)], here_is_q)

    # Without a window the first blocks are known before the position is.
    if not static.window:
      load_first(0, blocks)
    here = position[0]
    first = jnp.maximum(here - (static.window - 1), 0) if static.window else jnp.int32(0)
    first_block, end = first // _BLOCK, here // _BLOCK + 1
    if static.window:
      load_first(first_block, end)
    steps = jnp.maximum((end - first_block - mine + workers - 1) // workers, 0)

    @pl.when(wg == 0)
    def _():
      plgpu.barrier_wait(here_is_q)
      # Rows behind the queries hold whatever was there: nothing of a row comes into another.
      queries[...] = load_as(in_out, tile)
      plgpu.commit_smem()

    plgpu.barrier_arrive(joined)
    plgpu.barrier_wait(joined)

    def step(i, carry):
      most_M, weight_M, y_MN = carry
      slot, start = lax.rem(i, _STAGES), (first_block + mine + i * workers) * _BLOCK
      plgpu.barrier_wait(loaded.at[wg, slot])

      keys_NB = plgpu.transpose_ref(keys.at[wg, slot], (1, 0))
      score_MB = _product(queries, keys_NB) * static.scale
      place = start + plgpu.broadcasted_iota(jnp.int32, score_MB.shape, 1, layout=tile)
      seen = (place >= first) & (place <= here)
      score_MB = jnp.where(seen, score_MB, jnp.full_like(score_MB, _LOW))
      # Of every block that is looked at something is seen.
      new_M = jnp.maximum(most_M, jnp.max(score_MB, axis=1))
      share_MB = jnp.exp(score_MB - lax.broadcast_in_dim(new_M, score_MB.shape, (0,)))
      old_M = jnp.exp(most_M - new_M)
      weight_M = weight_M * old_M + jnp.sum(share_MB, axis=1)
      y_MN = y_MN * lax.broadcast_in_dim(old_M, y_MN.shape, (0,))
      shares[wg] = share_MB.astype(dtype)
      plgpu.commit_smem()
      y_MN = y_MN + _product(shares.at[wg], values.at[wg, slot])
      plgpu.commit_smem()  # all of the warpgroup has read before the next block is written there
      following = first_block + mine + (i + _STAGES) * workers
      pl.when(following < end)(functools.partial(load, following, slot))
      return new_M, weight_M, y_MN

    low_M = plgpu.layout_cast(jnp.full((_ROWS,), _LOW, jnp.float32), row)
    zero_M = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row)
    zero_MN = plgpu.layout_cast(jnp.zeros((_ROWS, width), jnp.float32), tile)
    most_M, weight_M, y_MN = lax.fori_loop(0, steps, step, (low_M, zero_M, zero_MN))
    if not static.window:
      for slot in range(_STAGES):  # nothing may arrive after the end
        unused = (slot >= steps) & (mine + slot * workers < blocks)
        pl.when(unused)(functools.partial(plgpu.barrier_wait, loaded.at[wg, slot]))

    @pl.when(wg == 1)
    def _():
      other[...], tops[...], totals[...] = y_MN, most_M, weight_M

    plgpu.barrier_arrive(joined)
    plgpu.barrier_wait(joined)

    @pl.when(wg == 0)
    def _():
      others_M = load_as(tops, row)
      both_M = jnp.maximum(most_M, others_M)
      own_M, others_M = jnp.exp(most_M - both_M), jnp.exp(others_M - both_M)
      joint_M = weight_M * own_M + load_as(totals, row) * others_M
      as_tile = lambda x_M: lax.broadcast_in_dim(x_M, y_MN.shape, (0,))
      joint_MN = y_MN * as_tile(own_M) + load_as(other, tile) * as_tile(others_M)
      if parts == 1:
        in_out[...] = (joint_MN / as_tile(joint_M)).astype(dtype)
        plgpu.commit_smem()
        written, to = in_out, y.at[pl.ds(kv * shared, shared)]
      else:
        other[...], tops[...], totals[...] = joint_MN, both_M, joint_M
        plgpu.commit_smem()
        most_of, weight_of = outs
        for g in range(shared):
          most_of[part, kv * shared + g] = tops[g]
          weight_of[part, kv * shared + g] = totals[g]
        written, to = other, y.at[part, pl.ds(kv * shared, shared)]
      plgpu.copy_smem_to_gmem(written.at[pl.ds(0, shared)], to)
      plgpu.wait_smem_to_gmem(0)

  cache = smem((_WARPGROUPS, _STAGES, _BLOCK, width), dtype)
  a_number = plgpu.SMEM((_ROWS,), jnp.float32)
  numbers = jax.ShapeDtypeStruct((parts, heads), jnp.float32)
  several = jax.ShapeDtypeStruct((parts, heads, width), jnp.float32), numbers, numbers
  run = compiled(
    body,
    out_type=jax.ShapeDtypeStruct((heads, width), dtype) if parts == 1 else several,
    grid=(kv_heads, parts),
    grid_names=("kv", "part"),
    num_threads=_WARPGROUPS,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((_ROWS, width), dtype),
      smem((_ROWS, width), dtype),
      smem((_WARPGROUPS, _ROWS, _BLOCK), dtype),
      cache,
      cache,
      plgpu.SMEM((_ROWS, width), jnp.float32),
      a_number,
      a_number,
      plgpu.Barrier(),
      plgpu.Barrier(num_arrivals=2, num_barriers=(_WARPGROUPS, _STAGES)),
      plgpu.Barrier(num_arrivals=_WARPGROUPS),
    ],
  )
  if parts == 1:
    return run(q_HN, k_TKN, v_TKN, position)
  y_PHN, most_PH, weight_PH = run(q_HN, k_TKN, v_TKN, position)
  share_PH = jnp.exp(most_PH - most_PH.max(0))
  y_HN = jnp.sum(y_PHN * share_PH[..., None], 0) / jnp.sum(weight_PH * share_PH, 0)[:, None]
  return y_HN.astype(dtype)


def _product(x_MK: Any, matrix_KN: Any) -> Array:
  """x · W in float32, of two matrices in shared memory."""

  def multiplied(sums):
    plgpu.wgmma(sums, x_MK, matrix_KN)
    return sums[...]

  return pl.run_scoped(multiplied, plgpu.ACC((_ROWS, matrix_KN.shape[1]), jnp.float32))
