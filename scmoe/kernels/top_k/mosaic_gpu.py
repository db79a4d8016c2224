"""The gate of many tokens as one kernel on Hopper: logits, and each token's K best experts.

    T  tokens      D  model width      E  experts      K  experts per token

XLA launches several kernels for the product and the choice, and their launches can cost more than
their work. This kernel chooses the experts while the logits are still in registers. Every tile of
tokens reads all terms of the gate (see `api`). The terms of a float32 gate have more bytes than the
tile's tokens, so each of the two CTAs of a pair loads half of every term for both.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.pipeline import (
  CONSUMERS,
  Tiling,
  Work,
  barriers,
  copy_block,
  launch,
  run_tiles,
  tiled_smem,
)
from scmoe.kernels.grouped_matmul.tile_order import paired, paired_tiles
from scmoe.kernels.grouped_matmul.tile_stores import CHUNK, store_buffers, store_tiles
from scmoe.kernels.grouped_matmul.tiles import SMEM_LIMIT
from scmoe.kernels.launch import resolve_num_sms

_ROWS = 128  # Tokens of a tile; half if there would be fewer tiles than CTAs.
_LARGE = 1e9  # Larger than every expert's id.
_LEAST = float(jnp.finfo(jnp.float32).min)  # Stands for a logit of -inf, which may be chosen.
# Bytes of shared memory that the ring does not take, for chosen experts, barriers and their
# alignment. With many choices these need more, and use what whole stages leave over, which suffices
# for 32.
_RESERVED = 8_192


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """Inputs in global memory: tokens [T, D], and the terms of the gate's weights, each [D, E].

  E is padded to a multiple of 64.
  """

  x: Any
  gate: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outs:
  """Outputs in global memory: logits [T, E] in float32, chosen experts [K, T] in int32.

  E is padded to a multiple of 64.
  """

  logits: Any
  expert: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
  """A CTA's shared memory.

  Attributes:
    x, gate: stages of the ring of operand tiles.
    store_buffers, expert: the epilogue's buffers for logits and chosen experts.
    full, empty: barriers of each stage of the ring.
  """

  x: Any
  gate: Any
  store_buffers: Any
  expert: Any
  full: Any
  empty: Any


def gate_top_k_kernel(
  x_TD: jax.Array, terms: jax.Array, top_k: int, num_sms: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Logits of a linear gate, and each token's K experts with the largest, by the kernel.

  Args:
    x_TD: tokens; T is a multiple of 128, D of 64.
    terms: [terms, D, E] in the tokens' type; their sum stands for the weights. E is at most 192.
    top_k: K, at most 32.
    num_sms: CTAs of the launch, in whole pairs (`pipeline.launch`); None: the number of
      multiprocessors.

  Returns:
    logits_TE in float32, expert_TK in int32.
  """
  tokens, width = x_TD.shape
  num_terms, _, experts = terms.shape
  padded = -(-experts // 64) * 64
  terms = jnp.pad(terms, ((0, 0), (0, 0), (0, padded - experts)))
  operands = Operands(x_TD, tuple(terms))
  num_sms = resolve_num_sms(num_sms)
  few = tokens // _ROWS < num_sms
  tiling = _fit(_ROWS // 2 if few else _ROWS, padded, num_terms)
  shape = _Shape(tiling, tokens, width, experts, padded, num_terms, top_k, x_TD.dtype)

  def body(gmem: Operands, outs: Outs):
    row_tiles = jnp.int32(tokens // tiling.rows)

    def with_memory(smem: Memory):
      work = _Cta(shape, gmem, smem, outs, row_tiles).work()
      run_tiles(tiling, work, smem.full, smem.empty, num_sms)

    pl.run_scoped(with_memory, shape.memory(), collective_axes="wg")

  out_type = Outs(
    jax.ShapeDtypeStruct((tokens, padded), jnp.float32),
    jax.ShapeDtypeStruct((top_k, tokens), jnp.int32),
  )
  leaves = launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), leaves)
  return outs.logits[:, :experts], outs.expert.T


@dataclasses.dataclass(frozen=True)
class _Shape:
  """The compile-time constants of the kernel.

  Attributes:
    tiling: the launch's tile shape.
    tokens, width, experts: T, D and E.
    padded: E rounded up to a multiple of 64, the columns of a tile.
    terms: terms of the gate's weights.
    top_k: K.
    dtype: type of the tokens.
  """

  tiling: Tiling
  tokens: int
  width: int
  experts: int
  padded: int
  terms: int
  top_k: int
  dtype: Any

  @property
  def sums(self) -> int:
    """Number of accumulators: 2 if there are several terms, else 1.

    Tensor cores truncate a sum each time that they add to it. All terms but the largest share an
    accumulator of their own, so that the largest term's sum is truncated no more often than in a
    product of one term.
    """
    return min(self.terms, 2)

  def memory(self) -> Memory:
    """The types of a CTA's shared memory and barriers."""
    tiling, rows = self.tiling, self.tiling.consumer_rows
    full, empty = barriers(tiling, 1 + self.terms)
    return Memory(
      x=tiled_smem((tiling.stages, tiling.rows, tiling.depth), self.dtype),
      gate=tiled_smem((tiling.stages, self.terms, tiling.depth, self.padded), self.dtype),
      store_buffers=store_buffers(tiling, jnp.float32),
      expert=plgpu.SMEM((CONSUMERS, self.top_k, rows), jnp.int32),
      full=full,
      empty=empty,
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
  """One CTA with its references to memory; the methods say what it does for a tile.

  The only coordinate of a tile is its row tile: a tile has all experts.
  """

  shape: _Shape
  gmem: Operands
  smem: Memory
  outs: Outs
  row_tiles: Any

  def work(self) -> Work:
    """The work of the CTA's producer and consumers on a tile, for `run_tiles`."""
    shape, tiling = self.shape, self.shape.tiling
    return Work(
      num_tiles=paired_tiles(tiling, self.row_tiles, 1),
      locate=lambda tile: paired(tile, tiling, self.row_tiles, 1)[0],
      steps=lambda _: jnp.int32(shape.width // tiling.depth),
      producer=self.load,
      consumer=self.multiply,
      accumulators=[(tiling.consumer_rows, shape.padded)] * shape.sums,
      epilogue=self.finish,
    )

  def load(self, tile: Any, step: Any, stage: Any, barrier: Any) -> None:
    """Starts the copies of one stage: a block of tokens, and one of each term of the gate.

    Both CTAs of a pair need the same weights, and each loads half of them.
    """
    tiling, gmem, smem = self.shape.tiling, self.gmem, self.smem
    k_slice = pl.ds(step * tiling.depth, tiling.depth)
    tokens = pl.ds(tile * tiling.rows, tiling.rows)
    copy_block(gmem.x.at[tokens, k_slice], smem.x.at[stage], barrier)
    for term, gate in enumerate(gmem.gate):
      copy_block(gate.at[k_slice, :], smem.gate.at[stage, term], barrier, True)

  def multiply(self, accumulators: Any, stage: Any, my_rows: Any) -> None:
    """Starts the products of one stage: the block of tokens times that of every term."""
    for term in range(self.shape.terms):
      total = accumulators[min(term, self.shape.sums - 1)]
      weights = self.smem.gate.at[stage, term]
      plgpu.wgmma(total, self.smem.x.at[stage, my_rows], weights)

  def finish(self, tile: Any, accumulators: Any, consumer: Any, first_row: Any) -> None:
    """Stores the logits, and the ids of each token's K experts with the largest."""
    smem = self.smem
    logits = accumulators[0][...]
    for smaller in accumulators[1:]:
      logits = logits + smaller[...]
    first = tile * self.shape.tiling.rows + first_row
    values = [(lambda s: logits[:, s], self.shape.padded)]
    store_tiles(values, [self.outs.logits], [0], first, smem.store_buffers, consumer)
    self.choose(logits, consumer)
    plgpu.commit_smem()
    tokens = pl.ds(first, self.shape.tiling.consumer_rows)
    plgpu.copy_smem_to_gmem(smem.expert.at[consumer], self.outs.expert.at[:, tokens])

  def choose(self, logits: Any, consumer: Any) -> None:
    """Writes the experts with the K largest logits of each token to shared memory, largest first.

    Ids are compared as float32, which is exact for them.
    """
    experts, shape = self.shape.experts, logits.shape
    ids = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    ids = ids.astype(jnp.float32)
    # -inf marks columns that cannot be chosen: padding, and experts that were chosen before. An
    # expert whose own logit is -inf can be chosen, after all others.
    lowest = jnp.full_like(logits, -jnp.inf)
    left = jnp.where(logits == lowest, jnp.full_like(logits, _LEAST), logits)
    left = left if shape[1] == experts else jnp.where(ids < experts, left, lowest)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile's ids have left
    for k in range(self.shape.top_k):
      value = jnp.max(left, axis=1)
      is_largest = left == lax.broadcast_in_dim(value, shape, (0,))
      # The smallest id among equals, as `lax.top_k` chooses; but here 0.0 and -0.0 are equal.
      chosen = -jnp.max(jnp.where(is_largest, -ids, jnp.full_like(ids, -_LARGE)), axis=1)
      left = jnp.where(ids == lax.broadcast_in_dim(chosen, shape, (0,)), lowest, left)
      # If the largest is NaN, it equals nothing: no id is found, and the last expert is taken
      # (`moe.route.route` says what follows from NaN logits).
      chosen = jnp.minimum(chosen, jnp.full_like(chosen, experts - 1))
      self.smem.expert[consumer, k] = chosen.astype(jnp.int32)


def _fit(rows: int, padded: int, terms: int) -> Tiling:
  """The tiling with as many stages as fit into shared memory, at most 6.

  A matrix instruction has 64 rows. With tiles of 128 rows each of the two consumers computes half a
  tile; with tiles of 64 rows each computes a tile of its own (ping-pong).
  """
  pingpong = rows < _ROWS
  stage = (rows + terms * padded) * 64 * 2
  stores = CONSUMERS * (_ROWS // CONSUMERS) * CHUNK * 4
  stages = min(6, (SMEM_LIMIT - _RESERVED - stores) // stage)
  form = Tiling(rows=rows, cols=padded, stages=stages, pingpong=pingpong, pair="rows")
  return dataclasses.replace(form, store_buffers=1)
