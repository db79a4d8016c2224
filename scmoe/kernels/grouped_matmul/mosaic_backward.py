"""The gradient of the down-projection with the activation's derivative in its epilogue.

    R  rows of the padded layout      D  model width      F  expert width      G  groups

One product, dA' = dY @ down.T, and everything that needs it while it is in registers: the
pre-activations H are loaded, A is recomputed from them, and out come A' = s·A (for the down
weights' gradient), dH, and each row's share of ds = ⟨dA', A⟩. Neither A nor the experts' output is
kept by the forward (SonicMoE, arXiv 2512.14080).
"""

import functools
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
  launch,
  locate_rows,
  paired_tiles,
  resolve_num_sms,
  run_tiles,
  smem,
)

_COLS = 64  # columns of a chunk: one swizzle row of 2-byte elements
_ROWS = 64  # rows that are in registers at a time: a consumer's whole chunk would not fit


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
  parts = len(pre)
  rows, width, hidden = layout.num_rows, dy_XD.shape[1], down_GFD.shape[1]
  dtype = dy_XD.dtype
  depth, cols = tiling.depth, tiling.cols
  col_tiles, steps = hidden // cols, width // depth
  consumer_rows = tiling.consumer_rows
  fused = index_R is not None
  assert not (fused and tiling.pair == "cols"), "a gathered operand cannot be shared"
  num_sms = resolve_num_sms(num_sms)

  def body(group_gmem, num_tiles_gmem, index_gmem, dy_gmem, down_gmem, s_gmem, *refs):
    pre_gmem, refs = refs[:parts], refs[parts:]
    scaled_gmem, dpre_gmem, ds_gmem = refs[0], refs[1 : 1 + parts], refs[1 + parts]

    def with_memory(
      dy_smem,
      down_smem,
      chunk_smem,
      scaled_smem,
      s_smem,
      ds_smem,
      full,
      empty,
      loaded,
      s_loaded,
      arrived,
    ):
      if fused:
        gather.init_barriers(arrived, tiling.stages)

      def locate(tile):
        return locate_rows(tile, tiling, group_gmem, num_tiles_gmem[0], col_tiles)

      def load(where, step, slot, barrier):
        row_tile, col_tile, group, shared = where
        k_slice = pl.ds(step * depth, depth)
        if fused:
          gather.start_gather(
            dy_gmem,
            index_gmem,
            dy_smem,
            arrived,
            slot=slot,
            first_row=row_tile * tiling.rows,
            first_col=step * depth,
          )
        else:
          row_slice = pl.ds(row_tile * tiling.rows, tiling.rows)
          block = dy_gmem.at[row_slice, k_slice]
          copy_block(block, dy_smem.at[slot], barrier, tiling.pair == "cols")
        block = down_gmem.at[group, pl.ds(col_tile * cols, cols), k_slice]
        copy_block(block, down_smem.at[slot], barrier, shared)

      def multiply(accumulators, slot, my_rows):
        plgpu.wgmma(
          accumulators[0], dy_smem.at[slot, my_rows], down_smem.at[slot].transpose((1, 0))
        )

      def load_chunk(where, chunk, consumer, first_row):
        row_tile, col_tile, *_ = where
        row_slice = pl.ds(row_tile * tiling.rows + first_row, consumer_rows)
        col_slice = pl.ds(col_tile * cols + chunk * _COLS, _COLS)
        for part in range(parts):
          plgpu.copy_gmem_to_smem(
            pre_gmem[part].at[row_slice, col_slice],
            chunk_smem.at[consumer, part],
            loaded.at[consumer],
          )

      def prepare(where, consumer, first_row):
        # The previous tile's stores have left the buffers.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        row_tile = where[0]
        plgpu.copy_gmem_to_smem(
          s_gmem.at[pl.ds(row_tile * tiling.rows + first_row, consumer_rows)],
          s_smem.at[consumer],
          s_loaded.at[consumer],
        )
        load_chunk(where, 0, consumer, first_row)

      def finish(where, accumulators, consumer, first_row):
        row_tile, col_tile, *_ = where
        row_slice = pl.ds(row_tile * tiling.rows + first_row, consumer_rows)
        da_tile = accumulators[0][...]
        plgpu.barrier_wait(s_loaded.at[consumer])
        ds: list[Any] = [None] * (consumer_rows // _ROWS)
        for chunk in range(cols // _COLS):
          if chunk:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_chunk(where, chunk, consumer, first_row)
          plgpu.barrier_wait(loaded.at[consumer])
          for half in range(consumer_rows // _ROWS):
            part_rows = slice(half * _ROWS, (half + 1) * _ROWS)
            da = da_tile[part_rows, chunk * _COLS : (chunk + 1) * _COLS]
            h = [chunk_smem[consumer, part, part_rows].astype(jnp.float32) for part in range(parts)]
            s = plgpu.layout_cast(s_smem[consumer, part_rows], plgpu.Layout.WGMMA.reduce(1))
            s_full = lax.broadcast_in_dim(s, da.shape, (0,))
            value, derivative = activation.value_and_derivative(h[0])
            a = value * h[1] if activation.gated else value
            share = jnp.sum(da * a, axis=1)
            ds[half] = share if ds[half] is None else ds[half] + share
            da = da * s_full
            if activation.gated:
              dpre = (da * h[1] * derivative, da * value)
            else:
              dpre = (da * derivative,)
            for part in range(parts):
              chunk_smem[consumer, part, part_rows] = dpre[part].astype(dtype)
            # The half before this one has left the buffer that both use.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scaled_smem[consumer] = (a * s_full).astype(dtype)
            plgpu.commit_smem()
            target = (
              pl.ds(row_tile * tiling.rows + first_row + half * _ROWS, _ROWS),
              pl.ds(col_tile * cols + chunk * _COLS, _COLS),
            )
            for part in range(parts):
              plgpu.copy_smem_to_gmem(
                chunk_smem.at[consumer, part, part_rows], dpre_gmem[part].at[target]
              )
            plgpu.copy_smem_to_gmem(scaled_smem.at[consumer], scaled_gmem.at[target])
        for half, share in enumerate(ds):
          ds_smem[consumer, slice(half * _ROWS, (half + 1) * _ROWS)] = share
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ds_smem.at[consumer], ds_gmem.at[col_tile, row_slice])

      run_tiles(
        tiling,
        Work(
          num_tiles=paired_tiles(tiling, num_tiles_gmem[0], col_tiles),
          locate=locate,
          steps=lambda _: steps,
          load=load,
          multiply=multiply,
          accumulators=[(consumer_rows, cols)],
          finish=finish,
          prepare=prepare,
          ready=functools.partial(_wait_rows, arrived) if fused else None,
        ),
        full,
        empty,
        num_sms,
      )

    full, empty = barriers(tiling, (not fused) + 1)
    pl.run_scoped(
      with_memory,
      smem((tiling.stages, tiling.rows, depth), dtype),
      smem((tiling.stages, cols, depth), dtype),
      smem((CONSUMERS, parts, consumer_rows, _COLS), dtype),
      smem((CONSUMERS, _ROWS, _COLS), dtype),
      plgpu.SMEM((CONSUMERS, consumer_rows), jnp.float32),
      plgpu.SMEM((CONSUMERS, consumer_rows), jnp.float32),
      full,
      empty,
      plgpu.Barrier(num_arrivals=parts, num_barriers=CONSUMERS),
      plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
      gather.barrier_memory(tiling.stages),
      collective_axes="wg",
    )

  hidden_rows = jax.ShapeDtypeStruct((rows, hidden), dtype)
  out_type = [hidden_rows] * (1 + parts) + [jax.ShapeDtypeStruct((col_tiles, rows), jnp.float32)]
  index = index_R if fused else layout.num_tiles
  scaled_RF, *rest = launch(body, out_type, tiling, num_sms)(
    layout.tile_group_I, layout.num_tiles, index, dy_XD, down_GFD, row_weight_R, *pre
  )
  return scaled_RF, tuple(rest[:parts]), jnp.sum(rest[parts], axis=0)


def _wait_rows(arrived, slot, parity):
  gather.wait_gather(arrived, slot=slot, parity=parity)
