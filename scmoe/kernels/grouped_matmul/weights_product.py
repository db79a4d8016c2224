"""The gradient of a group's matrices, on Hopper: lhs.T times rhs over the rows of each group.

    R  rows of the tiles      M, N  widths of the result      G  groups

Groups are padded with zeros, so the contraction is a plain loop over the blocks of rows in which a
group has one, without masks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul import gather
from scmoe.kernels.grouped_matmul.layout import GroupLayout
from scmoe.kernels.grouped_matmul.pipeline import (
  CONSUMERS,
  Tiling,
  Work,
  barriers,
  copy_block,
  first_of,
  launch,
  num_workers,
  paired,
  run_tiles,
  smem,
  snake,
  tiles_over,
)
from scmoe.kernels.grouped_matmul.tile_stores import CHUNK, store_tiles
from scmoe.kernels.launch import resolve_num_sms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    by_size_G: int32, groups by falling size.
    starts_G, sizes_G: int32, first tile of each group, and its rows.
    index_R: int32, row behind each row of the gathered operand; None where nothing is gathered.
    lhs: [R, M].
    rhs: operands [R, N] of one width.
  """

  by_size_G: Any
  starts_G: Any
  sizes_G: Any
  index_R: Any
  lhs: Any
  rhs: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
  """A CTA's shared memory: the ring's stages, the epilogue's chunks, barriers."""

  lhs: Any
  rhs: tuple[Any, ...]
  stores: Any
  full: Any
  empty: Any
  gathered: Any


def weights_product(
  lhs_RM: jax.Array,
  rhs: tuple[jax.Array, ...],
  layout: GroupLayout,
  tiling: Tiling,
  *,
  lhs_index_R: jax.Array | None = None,
  rhs_index_R: jax.Array | None = None,
  out_dtype,
  num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
  """out[g] = lhs[rows of g].T @ rhs[rows of g], for each of several rhs; zero for empty groups.

  Args:
    lhs_RM: the operand whose width becomes the result's rows.
    rhs: operands [R, N] of one width.
    layout: tiles of R; with several runs, nothing is gathered.
    tiling: tile shape; `tiling.cols` is shared between the results.
    lhs_index_R: if given, lhs is gathered as in `rows_product`.
    rhs_index_R: if given, the only rhs is gathered; not together with lhs.
    out_dtype: type of the outputs.
    num_sms: CTAs.
  """
  assert lhs_index_R is None or rhs_index_R is None
  fused_lhs, fused_rhs = lhs_index_R is not None, rhs_index_R is not None
  fused = fused_lhs or fused_rhs
  operands = Operands(
    layout.by_size_G,
    layout.tile_starts_G,
    layout.group_sizes_G,
    lhs_index_R if fused_lhs else rhs_index_R,
    lhs_RM,
    tuple(rhs),
  )
  parts = len(rhs)
  m, n = lhs_RM.shape[1], rhs[0].shape[1]
  cols = tiling.cols // parts
  depth = tiling.depth
  per_tile = layout.tile // depth
  dtype = lhs_RM.dtype
  num_sms = resolve_num_sms(num_sms)
  groups = layout.num_groups

  if (tiling.pair == "rows" and fused_rhs) or (tiling.pair == "cols" and fused_lhs):
    # `tiles.TABLE` does not tell which operand is gathered, and that one cannot be shared.
    tiling = dataclasses.replace(tiling, pair="")
  pair = tiling.pair
  row_tiles = tiles_over(m, tiling.rows, 2 if pair == "rows" else 1)
  col_tiles = tiles_over(n, cols, 2 if pair == "cols" else 1)
  per_group = row_tiles * col_tiles // tiling.cluster
  num_tiles = groups * per_group
  assert layout.runs == 1 or not fused, "rows in several runs are not gathered"

  def row_of(first_tile, step):
    if layout.runs == 1:
      return first_tile * layout.tile + step * depth
    run = lax.div(step, jnp.int32(layout.run_tiles * per_tile))
    inside = step - run * (layout.run_tiles * per_tile)
    return (first_tile + run * (groups * layout.run_tiles)) * layout.tile + inside * depth

  def body(gmem: Operands, outs):
    def with_memory(shared: Memory):
      if fused:
        gather.init_barriers(shared.gathered, tiling.stages)

      def locate(tile):
        # Large groups first, and back and forth over the SMs: each gets its share of long tiles.
        tile = snake(tile, num_tiles, num_workers(tiling, num_sms))
        group = gmem.by_size_G[lax.div(tile, jnp.int32(per_group))]
        inside = lax.rem(tile, jnp.int32(per_group))
        row_tile, col_tile, _ = paired(inside, tiling, jnp.int32(row_tiles), col_tiles)
        steps = lax.div(gmem.sizes_G[group] + (depth - 1), jnp.int32(depth))
        return group, row_tile, col_tile, gmem.starts_G[group], steps

      def producer(where, step, stage, barrier):
        _, row_tile, col_tile, first_tile, _ = where
        # Computed here: a loop's variable is not known to be a multiple.
        first_row = row_of(first_tile, step)
        k_slice = pl.ds(first_row, depth)
        start = functools.partial(
          gather.start_gather,
          index=gmem.index_R,
          barriers=shared.gathered,
          stage=stage,
          first_row=first_row,
          prefetch=tiling.stages * depth,
        )
        if fused_lhs:
          start(gmem.lhs, ring=shared.lhs, first_col=first_of(row_tile, tiling.rows, m))
        else:
          block = gmem.lhs.at[k_slice, pl.ds(first_of(row_tile, tiling.rows, m), tiling.rows)]
          copy_block(block, shared.lhs.at[stage], barrier, pair == "cols")
        for operand, ring in zip(gmem.rhs, shared.rhs):
          if fused_rhs:
            start(operand, ring=ring, first_col=first_of(col_tile, cols, n))
          else:
            block = operand.at[k_slice, pl.ds(first_of(col_tile, cols, n), cols)]
            copy_block(block, ring.at[stage], barrier, pair == "rows")

      def consumer(accumulators, stage, my_rows):
        a = shared.lhs.at[stage, :, my_rows].transpose((1, 0))
        for accumulator, ring in zip(accumulators, shared.rhs):
          plgpu.wgmma(accumulator, a, ring.at[stage])

      def epilogue(where, accumulators, consumer, first_row):
        group, row_tile, col_tile, _, _ = where
        results = [acc[...] for acc in accumulators]
        store_tiles(
          [(lambda s, r=r: r[:, s].astype(out_dtype), cols) for r in results],
          [out.at[group] for out in outs],
          [first_of(col_tile, cols, n)] * parts,
          first_of(row_tile, tiling.rows, m) + first_row,
          shared.stores,
          consumer,
        )

      work = Work(
        num_tiles=jnp.int32(num_tiles),
        locate=locate,
        steps=lambda where: where[-1],
        producer=producer,
        consumer=consumer,
        accumulators=[(tiling.consumer_rows, cols)] * parts,
        epilogue=epilogue,
        ready=functools.partial(gather.wait_rows, shared.gathered) if fused else None,
      )
      run_tiles(tiling, work, shared.full, shared.empty, num_sms)

    full, empty = barriers(tiling, 1 + parts - fused)
    memory = Memory(
      lhs=smem((tiling.stages, depth, tiling.rows), dtype),
      rhs=(smem((tiling.stages, depth, cols), dtype),) * parts,
      stores=smem((CONSUMERS, tiling.stores, tiling.consumer_rows, CHUNK), out_dtype),
      full=full,
      empty=empty,
      gathered=gather.barrier_memory(tiling.stages),
    )
    pl.run_scoped(with_memory, memory, collective_axes="wg")

  out_type = [jax.ShapeDtypeStruct((groups, m, n), out_dtype)] * parts
  return tuple(launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands)))
