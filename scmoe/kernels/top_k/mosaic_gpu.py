"""The gate as one kernel on Hopper: logits, and the K largest while they are in registers.

    T  tokens      D  model width      E  experts      K  experts per token

XLA needs a product, 2·K reductions and as many selections, whose launches cost more than their work
when experts are small. Every tile of tokens reads all terms of the gate (see `api`), more bytes
than its tokens have; so pairs of CTAs share one copy of them.
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
from scmoe.kernels.grouped_matmul.tile_stores import CHUNK, store_tiles
from scmoe.kernels.grouped_matmul.tiles import SMEM_LIMIT
from scmoe.kernels.launch import resolve_num_sms

_ROWS = 128  # tokens of a tile; half if there would be fewer tiles than multiprocessors
_LARGE = 1e9  # larger than every expert id
_RESERVED = 8_192  # bytes: the chosen experts, barriers and their alignment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """Inputs in global memory: tokens [T, D], and the terms of the gate's weights, each [D, E]."""

  x: Any
  gate: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outs:
  """Outputs in global memory: logits [T, E] in float32, chosen experts [K, T] in int32."""

  logits: Any
  expert: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
  """A CTA's shared memory.

  Attributes:
    x, gate: stages of the ring of operand tiles.
    stores, expert: the epilogue's buffers for logits and chosen experts.
    full, empty: barriers of each stage.
  """

  x: Any
  gate: Any
  stores: Any
  expert: Any
  full: Any
  empty: Any


def gate_top_k_kernel(
  x_TD: jax.Array, terms: jax.Array, top_k: int, num_sms: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Logits and experts of `gate_top_k`.

  Args:
    x_TD: tokens; T is a multiple of 128, D of 64.
    terms: [terms, D, E] in the tokens' type; their sum is the gate's weights. E is at most 192.
    top_k: K.
    num_sms: number of CTAs; None: one per multiprocessor.

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
  rows, consumer_rows, steps = tiling.rows, tiling.consumer_rows, width // tiling.depth
  # A tensor core truncates the accumulator at every addition. The small terms have their own, so
  # that the large sum is truncated only as often as in a single product.
  sums = min(num_terms, 2)

  def body(gmem: Operands, outs: Outs):
    row_tiles = jnp.int32(tokens // rows)

    def with_memory(shared: Memory):
      def producer(tile, step, stage, barrier):
        k_slice = pl.ds(step * tiling.depth, tiling.depth)
        copy_block(gmem.x.at[pl.ds(tile * rows, rows), k_slice], shared.x.at[stage], barrier)
        for term, gate in enumerate(gmem.gate):
          copy_block(gate.at[k_slice, :], shared.gate.at[stage, term], barrier, True)

      def consumer(accumulators, stage, my_rows):
        for term in range(num_terms):
          weights = shared.gate.at[stage, term]
          plgpu.wgmma(accumulators[min(term, sums - 1)], shared.x.at[stage, my_rows], weights)

      def epilogue(tile, accumulators, consumer, first_row):
        logits = accumulators[0][...]
        for smaller in accumulators[1:]:
          logits = logits + smaller[...]
        first = tile * rows + first_row
        values = [(lambda s: logits[:, s], padded)]
        store_tiles(values, [outs.logits], [0], first, shared.stores, consumer)
        shape = logits.shape
        ids = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        ids = ids.astype(jnp.float32)
        lowest = jnp.full_like(logits, -jnp.inf)
        left = logits if padded == experts else jnp.where(ids < experts, logits, lowest)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k in range(top_k):
          value = jnp.max(left, axis=1)
          is_largest = left == lax.broadcast_in_dim(value, shape, (0,))
          # The smallest id among equals, as `lax.top_k` chooses.
          chosen = -jnp.max(jnp.where(is_largest, -ids, jnp.full_like(ids, -_LARGE)), axis=1)
          left = jnp.where(ids == lax.broadcast_in_dim(chosen, shape, (0,)), lowest, left)
          # NaN equals nothing, so `chosen` is not an expert. Any expert will do, since the step is
          # skipped (`RouterSums.nonfinite`).
          chosen = jnp.minimum(chosen, jnp.full_like(chosen, experts - 1))
          shared.expert[consumer, k] = chosen.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
          shared.expert.at[consumer], outs.expert.at[:, pl.ds(first, consumer_rows)]
        )

      work = Work(
        num_tiles=paired_tiles(tiling, row_tiles, 1),
        locate=lambda tile: paired(tile, tiling, row_tiles, 1)[0],
        steps=lambda _: jnp.int32(steps),
        producer=producer,
        consumer=consumer,
        accumulators=[(consumer_rows, padded)] * sums,
        epilogue=epilogue,
      )
      run_tiles(tiling, work, shared.full, shared.empty, num_sms)

    full, empty = barriers(tiling, 1 + num_terms)
    memory = Memory(
      x=tiled_smem((tiling.stages, rows, tiling.depth), x_TD.dtype),
      gate=tiled_smem((tiling.stages, num_terms, tiling.depth, padded), x_TD.dtype),
      stores=tiled_smem((CONSUMERS, tiling.stores, consumer_rows, CHUNK), jnp.float32),
      expert=plgpu.SMEM((CONSUMERS, top_k, consumer_rows), jnp.int32),
      full=full,
      empty=empty,
    )
    pl.run_scoped(with_memory, memory, collective_axes="wg")

  out_type = Outs(
    jax.ShapeDtypeStruct((tokens, padded), jnp.float32),
    jax.ShapeDtypeStruct((top_k, tokens), jnp.int32),
  )
  leaves = launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), leaves)
  return outs.logits[:, :experts], outs.expert.T


def _fit(rows: int, padded: int, terms: int) -> Tiling:
  """The tiling with as many stages as fit into shared memory, at most 6.

  A matrix instruction has 64 rows. A tile of 128 rows gives each consumer one; of half tiles each
  consumer computes its own (ping-pong).
  """
  pingpong = rows < _ROWS
  stage = (rows + terms * padded) * 64 * 2
  stores = CONSUMERS * (_ROWS // CONSUMERS) * CHUNK * 4
  stages = min(6, (SMEM_LIMIT - _RESERVED - stores) // stage)
  return Tiling(rows=rows, cols=padded, stages=stages, stores=1, pingpong=pingpong, pair="rows")
