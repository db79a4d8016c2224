"""The gradient of the down-projection with the activation's derivative in its epilogue.

    R  rows of the tiles      D  model width      F  expert width      G  groups

One product, dA' = dY @ down.T, and everything that needs it while it is in registers: the
pre-activations H are loaded, A is recomputed from them, and out come A' = s·A (for the down
weights' gradient), dH, and each row's share of ds = ⟨dA', A⟩. Neither A nor the experts' output is
kept by the forward (SonicMoE, arXiv 2512.14080).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul import gather
from scmoe.kernels.grouped_matmul.activations import Activation, kernel_form
from scmoe.kernels.grouped_matmul.layout import GroupLayout
from scmoe.kernels.grouped_matmul.pipeline import (
  CONSUMERS,
  Tiling,
  Work,
  barriers,
  copy_block,
  first_of,
  launch,
  locate_rows,
  paired_tiles,
  run_tiles,
  smem,
  tiles_over,
)
from scmoe.kernels.launch import resolve_num_sms

_COLS = 64  # columns of a chunk: one swizzle row of 2-byte elements
_ROWS = 64  # rows that are in registers at a time: a consumer's whole chunk would not fit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    group_I: int32, group of each row tile.
    num_tiles: int32 [1], tiles in use.
    index_R: int32, row of dy behind each row; None where they are the same.
    dy: gradient of the weighted output, [.., D].
    down: [G, F, D].
    weight_R: s, float32.
    pre: pre-activations [R, F].
  """

  group_I: Any
  num_tiles: Any
  index_R: Any
  dy: Any
  down: Any
  weight_R: Any
  pre: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outs:
  """The kernel's results.

  Attributes:
    scaled: s·A, [R, F].
    dpre: gradients of the pre-activations, [R, F].
    ds: each row's share of ds in each column tile, [column tiles, R], float32.
  """

  scaled: Any
  dpre: tuple[Any, ...]
  ds: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
  """A CTA's shared memory.

  Attributes:
    dy, down: the ring's stages.
    pre, scaled: chunks of the epilogue. Pre-activations are loaded into `pre`, and their gradients
      are stored from it.
    weight, ds: of a consumer's rows.
    full, empty: barriers of the ring.
    pre_loaded, weight_loaded: barriers of the epilogue's loads.
    gathered: barriers of rows that the producer gathers.
  """

  dy: Any
  down: Any
  pre: Any
  scaled: Any
  weight: Any
  ds: Any
  full: Any
  empty: Any
  pre_loaded: Any
  weight_loaded: Any
  gathered: Any


def down_backward_product(
  dy_XD: jax.Array,
  down_GFD: jax.Array,
  pre: tuple[jax.Array, ...],
  row_weight_R: jax.Array,
  layout: GroupLayout,
  activation: Activation,
  tiling: Tiling,
  *,
  index_R: jax.Array | None = None,
  num_sms: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
  """s·A, the gradients of the pre-activations, and ds_R (float32).

  Args:
    dy_XD: gradient of the weighted output, in the layout or read through `index_R`.
    down_GFD: down weights.
    pre: pre-activations [R, F]: (gate, up), or one.
    row_weight_R: s in float32; zero on padding.
    layout: tiles of R.
    activation: the kind.
    tiling: tile shape.
    index_R: as in `rows_product`.
    num_sms: CTAs.
  """
  activation = kernel_form(activation)
  operands = Operands(
    layout.tile_group_I, layout.num_tiles, index_R, dy_XD, down_GFD, row_weight_R, tuple(pre)
  )
  parts = len(pre)
  rows, width, hidden = layout.num_rows, dy_XD.shape[1], down_GFD.shape[1]
  dtype = dy_XD.dtype
  depth, cols = tiling.depth, tiling.cols
  col_tiles = tiles_over(hidden, cols, 2 if tiling.pair == "cols" else 1)
  steps = width // depth
  consumer_rows = tiling.consumer_rows
  halves = consumer_rows // _ROWS
  together = min(tiling.stores, halves)  # that the epilogue's buffers take
  fused = index_R is not None
  assert not (fused and tiling.pair == "cols"), "a gathered operand cannot be shared"
  num_sms = resolve_num_sms(num_sms)

  def body(gmem: Operands, outs: Outs):
    def with_memory(shared: Memory):
      if fused:
        gather.init_barriers(shared.gathered, tiling.stages)

      def locate(tile):
        return locate_rows(tile, tiling, gmem.group_I, gmem.num_tiles[0], col_tiles)

      def producer(where, step, stage, barrier):
        row_tile, col_tile, group, shared_rhs = where
        k_slice = pl.ds(step * depth, depth)
        if fused:
          gather.start_gather(
            gmem.dy,
            gmem.index_R,
            shared.dy,
            shared.gathered,
            stage=stage,
            first_row=row_tile * tiling.rows,
            first_col=step * depth,
          )
        else:
          row_slice = pl.ds(row_tile * tiling.rows, tiling.rows)
          block = gmem.dy.at[row_slice, k_slice]
          copy_block(block, shared.dy.at[stage], barrier, tiling.pair == "cols")
        block = gmem.down.at[group, pl.ds(first_of(col_tile, cols, hidden), cols), k_slice]
        copy_block(block, shared.down.at[stage], barrier, shared_rhs)

      def consumer(accumulators, stage, my_rows):
        plgpu.wgmma(
          accumulators[0], shared.dy.at[stage, my_rows], shared.down.at[stage].transpose((1, 0))
        )

      def first_place(where, first_row):
        row_tile, col_tile, *_ = where
        return row_tile * tiling.rows + first_row, first_of(col_tile, cols, hidden)

      def load_chunk(row, col, consumer):
        """Starts to load the block of pre-activations at (row, col) into the consumer's buffers."""
        for part in range(parts):
          plgpu.copy_gmem_to_smem(
            gmem.pre[part].at[pl.ds(row, together * _ROWS), pl.ds(col, _COLS)],
            shared.pre.at[consumer, part],
            shared.pre_loaded.at[consumer],
          )

      def prologue(where, consumer, first_row):
        # The previous tile's stores have left the buffers.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        row, col = first_place(where, first_row)
        plgpu.copy_gmem_to_smem(
          gmem.weight_R.at[pl.ds(row, consumer_rows)],
          shared.weight.at[consumer],
          shared.weight_loaded.at[consumer],
        )
        load_chunk(row, col, consumer)

      def epilogue(where, accumulators, consumer, first_row):
        first, first_col = first_place(where, first_row)
        col_tile = where[1]
        da_tile = accumulators[0][...]
        plgpu.barrier_wait(shared.weight_loaded.at[consumer])
        ds: list[Any] = [None] * halves
        for chunk, half in itertools.product(range(cols // _COLS), range(halves)):
          row, col = first + half * _ROWS, first_col + chunk * _COLS
          begins = half % together == 0
          if begins and (chunk or half):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_chunk(row, col, consumer)
          if begins:
            plgpu.barrier_wait(shared.pre_loaded.at[consumer])
          in_buffer = slice(half % together * _ROWS, (half % together + 1) * _ROWS)
          part_rows = slice(half * _ROWS, (half + 1) * _ROWS)
          da = da_tile[part_rows, chunk * _COLS : (chunk + 1) * _COLS]
          h = [shared.pre[consumer, part, in_buffer].astype(jnp.float32) for part in range(parts)]
          s = plgpu.layout_cast(shared.weight[consumer, part_rows], plgpu.Layout.WGMMA.reduce(1))
          s_full = lax.broadcast_in_dim(s, da.shape, (0,))
          value, derivative = activation.value_and_derivative(h[0])
          a = value * h[1] if activation.gated else value
          share = jnp.sum(da * a, axis=1)
          if hidden % cols:  # of columns that two tiles compute, the first one's counts
            counts = jnp.where(col >= col_tile * cols, 1.0, 0.0)
            share = share * lax.broadcast_in_dim(counts, share.shape, ())
          ds[half] = share if ds[half] is None else ds[half] + share
          da = da * s_full
          if activation.gated:
            dpre = (da * h[1] * derivative, da * value)
          else:
            dpre = (da * derivative,)
          for part in range(parts):
            shared.pre[consumer, part, in_buffer] = dpre[part].astype(dtype)
          if not begins:  # the half before this one has left the buffer that both use
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          shared.scaled[consumer] = (a * s_full).astype(dtype)
          plgpu.commit_smem()
          target = pl.ds(row, _ROWS), pl.ds(col, _COLS)
          for part in range(parts):
            source = shared.pre.at[consumer, part, in_buffer]
            plgpu.copy_smem_to_gmem(source, outs.dpre[part].at[target])
          plgpu.copy_smem_to_gmem(shared.scaled.at[consumer], outs.scaled.at[target])
        for half, share in enumerate(ds):
          shared.ds[consumer, slice(half * _ROWS, (half + 1) * _ROWS)] = share
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
          shared.ds.at[consumer], outs.ds.at[col_tile, pl.ds(first, consumer_rows)]
        )

      work = Work(
        num_tiles=paired_tiles(tiling, gmem.num_tiles[0], col_tiles),
        locate=locate,
        steps=lambda _: steps,
        producer=producer,
        consumer=consumer,
        accumulators=[(consumer_rows, cols)],
        epilogue=epilogue,
        prologue=prologue,
        ready=functools.partial(gather.wait_rows, shared.gathered) if fused else None,
      )
      run_tiles(tiling, work, shared.full, shared.empty, num_sms)

    full, empty = barriers(tiling, (not fused) + 1)
    memory = Memory(
      dy=smem((tiling.stages, tiling.rows, depth), dtype),
      down=smem((tiling.stages, cols, depth), dtype),
      pre=smem((CONSUMERS, parts, together * _ROWS, _COLS), dtype),
      scaled=smem((CONSUMERS, _ROWS, _COLS), dtype),
      weight=plgpu.SMEM((CONSUMERS, consumer_rows), jnp.float32),
      ds=plgpu.SMEM((CONSUMERS, consumer_rows), jnp.float32),
      full=full,
      empty=empty,
      pre_loaded=plgpu.Barrier(num_arrivals=parts, num_barriers=CONSUMERS),
      weight_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
      gathered=gather.barrier_memory(tiling.stages),
    )
    pl.run_scoped(with_memory, memory, collective_axes="wg")

  hidden_rows = jax.ShapeDtypeStruct((rows, hidden), dtype)
  shares = jax.ShapeDtypeStruct((col_tiles, rows), jnp.float32)
  out_type = Outs(hidden_rows, (hidden_rows,) * parts, shares)
  leaves = launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), leaves)
  return outs.scaled, outs.dpre, jnp.sum(outs.ds, axis=0)
