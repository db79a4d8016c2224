"""The constants of `attention_kernel`, and its arguments and shared memory by name.

R  rows                  H  heads of queries              N  width of a head
T  length of a cache     K  heads of keys and values, each shared by G = H / K
P  parts of a cache      B  positions of a block (64)
M  rows of a matrix instruction (64), of which G hold queries
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.pipeline import tiled_smem

BLOCK = 64  # Positions of the cache that a warpgroup reads together.
STAGES = 2  # The most blocks that a warpgroup has in shared memory or on their way there.
ROWS = 64  # Rows of a matrix instruction.
WARPGROUP = 128  # Threads of a warpgroup.


@dataclasses.dataclass(frozen=True)
class Shape:
  """The compile-time constants of the kernel; `attend` takes them as a static argument.

  Attributes:
    rows, heads, kv_heads, length, width, parts: R, H, K, T, N and P.
    warpgroups: warpgroups of a CTA.
    dtype: of queries and caches.
    scale: factor of the scores.
    window: how many positions a token sees, its own the last; 0: all up to its own.
    partial: whether the projections come as partial sums. The kernel then adds these up, and writes
      the token's key and value to the cache, which does not hold them yet.
    rotated: whether the kernel, with `partial`, also rotates the queries and the key, by
      `Global.turn`.
    page: positions of a page, a multiple of 64, if the cache is a pool of pages; 0: each row has a
      cache of its own. Not with `partial`.
    simulation: the simulation in use, or None (`launch.interpretation`).
  """

  rows: int
  heads: int
  kv_heads: int
  length: int
  width: int
  parts: int
  warpgroups: int
  dtype: Any
  scale: float
  window: int
  partial: bool
  rotated: bool
  simulation: Any
  page: int = 0

  @property
  def group(self) -> int:
    """G, heads of queries that share a head of keys."""
    return self.heads // self.kv_heads

  @property
  def blocks(self) -> int:
    """Number of blocks in a row's cache, or in its pages."""
    return self.length // BLOCK

  @property
  def workers(self) -> int:
    """Warpgroups, of all CTAs, that share the blocks of one row's head of keys."""
    return self.parts * self.warpgroups


@dataclasses.dataclass(frozen=True)
class Global:
  """References in global memory; row 0's heads, and without pages its cache, precede row 1's.

  Attributes:
    queries: [R H, N]; None if `sums` is given.
    sums: float32 [parts of the sum, (H + 2 K) N], partial sums of queries, keys and values; None if
      `queries` is given.
    turn: float32 [2, N/2], sine and cosine, times the rotary embedding's amplitude; None without a
      rotation.
    position: int32 [R], of each row's token; with pages -1 for a row without a token.
    pages: int32 [R, T / `Shape.page`], the pages of each row; None without pages.
    keys, values: [R T, K, N]; with pages those of the whole pool, one page after the other.
    y: the result, [R H, N]; with several parts of a cache, each part's sums, float32 [P, R H, N].
    most, weight: float32 [P, R H], each head's largest score and sum of weights in every part (see
      `attention.PartialAttention`); None with one part.
  """

  queries: Any
  sums: Any
  turn: Any
  position: Any
  pages: Any
  keys: Any
  values: Any
  y: Any
  most: Any
  weight: Any


@dataclasses.dataclass(frozen=True)
class Shared:
  """References in shared memory, and barriers; `shared_types` gives their types in this order.

  Attributes:
    in_out: [M, N], without `Shape.partial` the queries on their way in; with one part the result on
      its way out.
    queries: [M, N], the tile that products read.
    shares: [warpgroups, M, B], softmax weights of a block.
    keys, values: [warpgroups, stages, B, N], blocks of the cache.
    y, most, weight: float32 [M, N], [M] and [M], a running softmax that another warpgroup reads, or
      that leaves the CTA. With one part and one warpgroup they are not used, and y is [1, N].
    query_rows: [G N], with `Shape.partial` the queries that the kernel has finished.
    key_row, value_row: [N], with `Shape.partial` the token's own key and value.
    queries_arrived: the copy of the queries is done.
    block_arrived: [warpgroups, stages], the copies of a block's keys and values are done.
    everyone: all warpgroups of the CTA have arrived.
  """

  in_out: Any
  queries: Any
  shares: Any
  keys: Any
  values: Any
  y: Any
  most: Any
  weight: Any
  query_rows: Any
  key_row: Any
  value_row: Any
  queries_arrived: Any
  block_arrived: Any
  everyone: Any


def outputs(shape: Shape) -> Any:
  """Shapes and dtypes of the kernel's results: `Global.y`; with several parts also most, weight."""
  if shape.parts == 1:
    return jax.ShapeDtypeStruct((shape.rows * shape.heads, shape.width), shape.dtype)
  numbers = jax.ShapeDtypeStruct((shape.parts, shape.rows * shape.heads), jnp.float32)
  return jax.ShapeDtypeStruct((*numbers.shape, shape.width), jnp.float32), numbers, numbers


def shared_types(shape: Shape) -> list[Any]:
  """The types of a CTA's shared memory and barriers, in the order of `Shared`."""
  width, warpgroups, dtype = shape.width, shape.warpgroups, shape.dtype
  cache = tiled_smem((warpgroups, STAGES, BLOCK, width), dtype)
  a_number = plgpu.SMEM((ROWS,), jnp.float32)
  types = Shared(
    in_out=plgpu.SMEM((ROWS, width), dtype),
    queries=tiled_smem((ROWS, width), dtype),
    shares=tiled_smem((warpgroups, ROWS, BLOCK), dtype),
    keys=cache,
    values=cache,
    y=plgpu.SMEM((ROWS if shape.workers > 1 else 1, width), jnp.float32),
    most=a_number,
    weight=a_number,
    query_rows=plgpu.SMEM((shape.group * width,), dtype),
    key_row=plgpu.SMEM((width,), dtype),
    value_row=plgpu.SMEM((width,), dtype),
    queries_arrived=plgpu.Barrier(),
    block_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=(warpgroups, STAGES)),
    everyone=plgpu.Barrier(num_arrivals=warpgroups),
  )
  return [getattr(types, field.name) for field in dataclasses.fields(types)]


def named(refs: Sequence[Any], shape: Shape) -> tuple[Global, Shared]:
  """Names the kernel's arguments, which come in the order inputs, outputs, shared memory."""
  rest = iter(refs)
  several = shape.parts > 1
  in_global = Global(
    queries=None if shape.partial else next(rest),
    sums=next(rest) if shape.partial else None,
    turn=next(rest) if shape.rotated else None,
    position=next(rest),
    pages=next(rest) if shape.page else None,
    keys=next(rest),
    values=next(rest),
    y=next(rest),
    most=next(rest) if several else None,
    weight=next(rest) if several else None,
  )
  return in_global, Shared(*rest)
