"""Rows times their group's matrices, on Hopper, with bias and activation in the epilogue.

    R  rows of the tiles      K, N  widths      G  groups      I  row tiles

The layout pads each group to the row tile, so every tile belongs to one group and no load or store
is ragged.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import load_as
from scmoe.kernels.grouped_matmul import gather
from scmoe.kernels.grouped_matmul.activations import Activation, kernel_form
from scmoe.kernels.grouped_matmul.fp8 import BLOCK
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
from scmoe.kernels.grouped_matmul.tile_stores import CHUNK, store_tiles
from scmoe.kernels.launch import resolve_num_sms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    group_I: int32, group of each row tile.
    num_tiles: int32 [1], tiles in use.
    index_R: int32, row of lhs behind each row; None where they are the same.
    lhs: operands [R, K], contracted one after the other into one result.
    rhs: for each lhs the matrices of all results, [G, K, N] or transposed.
    biases: for each result [G, N], or None.
    row_scale: of fp8 operands, float32 [B, R]; else None.
    rhs_scales: likewise, for each result float32 [G, B, C].
  """

  group_I: Any
  num_tiles: Any
  index_R: Any
  lhs: tuple[Any, ...]
  rhs: tuple[tuple[Any, ...], ...]
  biases: tuple[Any, ...]
  row_scale: Any = None
  rhs_scales: tuple[Any, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
  """A CTA's shared memory.

  Attributes:
    lhs, rhs: the ring's stages.
    stores: the epilogue's chunks.
    full, empty: barriers of the ring.
    gathered: barriers of rows that the producer gathers.
    bias, bias_loaded: the tile's biases, where there are any.
  """

  lhs: Any
  rhs: Any
  stores: Any
  full: Any
  empty: Any
  gathered: Any
  bias: Any = None
  bias_loaded: Any = None


def rows_product(
  lhs: tuple[jax.Array, ...],
  rhs: tuple[tuple[jax.Array, ...], ...],
  layout: GroupLayout,
  tiling: Tiling,
  *,
  transpose_rhs: bool,
  biases: tuple[jax.Array | None, ...] = (),
  activation: Activation | None = None,
  with_results: bool = True,
  index_R: jax.Array | None = None,
  scales: tuple[jax.Array, tuple[jax.Array, ...]] | None = None,
  out_dtype,
  num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
  """The rows' product with their group's matrices, and what is fused into its end.

  Args:
    lhs: operands [R, K]; several are contracted one after the other into the same result.
    rhs: for each lhs, one matrix [G, K, N] for each result ([G, N, K] with `transpose_rhs`).
    layout: tiles of R, each one or two times `tiling.rows` rows.
    tiling: tile shape; `tiling.cols` is shared between the results.
    transpose_rhs: contract the last dimension of rhs.
    biases: for each result [G, N] or None, added before the result is rounded; () adds none.
    activation: if given, the activation of the results is one more output.
    with_results: whether the results are outputs; only together with an activation they need not.
    index_R: if given, the only lhs has any number of rows and row r of the product reads row
      index[r] of it (zero if that is negative), gathered while the operand is loaded.
    scales: of fp8 operands, which are one lhs and transposed rhs: float32 [R, B] of the
      rows, and [G, B, C] of each matrix (see `fp8`). A block's product is made of their numbers,
      multiplied by both scales and added up in float32: Hopper's own sums of eight-bit products
      keep some 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    out_dtype: type of the outputs.
    num_sms: CTAs.

  Returns:
    One [R, N] for each matrix in rhs[0], then the activation. Rows of tiles that are not in use are
    not written.
  """
  assert with_results or activation is not None
  parts = len(rhs[0])
  # Of the operands' type, as XLA adds a bias to a product: in shared memory they then fit into what
  # the stages leave.
  bias_dtype = lhs[0].dtype if scales is None else out_dtype
  cast = lambda b: None if b is None else b.astype(bias_dtype)
  biases = tuple(map(cast, biases)) or (None,) * parts
  places = [part for part, bias in enumerate(biases) if bias is not None]
  operands = Operands(layout.tile_group_I, layout.num_tiles, index_R, lhs, rhs, biases)
  if scales is not None:
    # A stage's scales lie together.
    operands = dataclasses.replace(operands, row_scale=scales[0].T, rhs_scales=scales[1])
  rows, depth = layout.num_rows, tiling.depth
  halves = layout.tile // tiling.rows
  same_group = tiling.pair == "rows" and halves == 2  # a pair is one tile of the layout
  fused = index_R is not None
  n = rhs[0][0].shape[1 if transpose_rhs else 2]
  cols = tiling.cols // parts
  col_tiles = tiles_over(n, cols, 2 if tiling.pair == "cols" else 1)
  steps = lhs[0].shape[1] // depth
  dtype = lhs[0].dtype
  num_sms = resolve_num_sms(num_sms)
  num_outs = parts * with_results + (activation is not None)
  assert not (fused and tiling.pair == "cols"), "a gathered operand cannot be shared"
  assert halves == 1 or (tiling.pingpong and not fused), "half tiles are for ping-pong, ungathered"
  if scales is not None:
    assert len(lhs) == 1, "fp8 operands have one scale each"
    assert transpose_rhs, "wgmma reads fp8 along the contracted dimension"
    assert not fused, "scales would have to be gathered too"
    assert depth == BLOCK, (tiling, "a stage has one scale")
    assert n % BLOCK == BLOCK % cols == 0, (tiling, n, "a tile has one scale of rhs")
  rhs_block = (cols, depth) if transpose_rhs else (depth, cols)
  consumer_rows = tiling.consumer_rows
  form = None if activation is None else kernel_form(activation)

  def body(gmem: Operands, outs):
    row_tiles = gmem.num_tiles[0] * halves

    def with_memory(shared: Memory):
      if fused:
        gather.init_barriers(shared.gathered, tiling.stages)

      def locate(tile):
        return locate_rows(tile, tiling, gmem.group_I, row_tiles, col_tiles, halves)

      def producer(where, step, stage, barrier):
        row_tile, col_tile, group, shared_rhs = where
        row_slice = pl.ds(row_tile * tiling.rows, tiling.rows)
        col_slice = pl.ds(first_of(col_tile, cols, n), cols)

        def load_segment(segment):
          k_slice = pl.ds((step - segment * steps) * depth, depth)
          if fused:
            gather.start_gather(
              gmem.lhs[0],
              gmem.index_R,
              shared.lhs,
              shared.gathered,
              stage=stage,
              first_row=row_tile * tiling.rows,
              first_col=step * depth,
            )
          else:
            block = gmem.lhs[segment].at[row_slice, k_slice]
            copy_block(block, shared.lhs.at[stage], barrier, tiling.pair == "cols")
          for part, w in enumerate(gmem.rhs[segment]):
            block = (
              w.at[group, col_slice, k_slice] if transpose_rhs else w.at[group, k_slice, col_slice]
            )
            copy_block(block, shared.rhs.at[stage, part], barrier, same_group or shared_rhs)

        if len(lhs) == 1:
          load_segment(0)
        else:
          for segment in range(len(lhs)):
            inside = (step >= segment * steps) & (step < (segment + 1) * steps)
            pl.when(inside)(functools.partial(load_segment, segment))

      def consumer(accumulators, stage, my_rows):
        a = shared.lhs.at[stage, my_rows]
        for part in range(parts):
          b = shared.rhs.at[stage, part]
          plgpu.wgmma(accumulators[part], a, b.transpose((1, 0)) if transpose_rhs else b)

      def both_scales(where, step, first_row):
        row_tile, col_tile, group, *_ = where
        block = lax.div(jnp.int32(first_of(col_tile, cols, n)), jnp.int32(BLOCK))
        rows_here = pl.ds(row_tile * tiling.rows + first_row, consumer_rows)
        row_scale = load_as(gmem.row_scale.at[step, rows_here], plgpu.Layout.WGMMA.reduce(1))
        return tuple(row_scale * w[group, step, block] for w in gmem.rhs_scales)

      def load_biases(where, consumer, first_row):
        _, col_tile, group, *_ = where
        for place, part in enumerate(places):
          plgpu.copy_gmem_to_smem(
            gmem.biases[part].at[group, pl.ds(first_of(col_tile, cols, n), cols)],
            shared.bias.at[consumer, place],
            shared.bias_loaded.at[consumer],
          )

      def epilogue(where, accumulators, consumer, first_row):
        row_tile, col_tile, *_ = where
        results = [acc[...] for acc in accumulators]
        if places:
          plgpu.barrier_wait(shared.bias_loaded.at[consumer])

        def result(part, s):
          r = results[part][:, s]
          if part not in places:
            return r.astype(out_dtype)
          bias = shared.bias[consumer, places.index(part), s].astype(jnp.float32)
          bias = plgpu.layout_cast(bias, plgpu.Layout.WGMMA.reduce(0))
          return (r + lax.broadcast_in_dim(bias, r.shape, (1,))).astype(out_dtype)

        values: list[Any] = []
        if with_results:
          values += [(functools.partial(result, part), cols) for part in range(parts)]
        if form is not None:

          def activated(s, form=form):
            # Rounded first, so that the backward recomputes the same value from what is stored.
            h = [result(part, s).astype(jnp.float32) for part in range(parts)]
            a = form.value(h[0])
            return (a * h[1] if form.gated else a).astype(out_dtype)

          values.append((activated, cols))
        store_tiles(
          values,
          outs,
          [first_of(col_tile, cols, n)] * num_outs,
          row_tile * tiling.rows + first_row,
          shared.stores,
          consumer,
        )

      work = Work(
        num_tiles=paired_tiles(tiling, row_tiles, col_tiles),
        locate=locate,
        steps=lambda _: steps * len(lhs),
        producer=producer,
        consumer=consumer,
        accumulators=[(consumer_rows, cols)] * parts,
        epilogue=epilogue,
        prologue=load_biases if places else None,
        ready=functools.partial(gather.wait_rows, shared.gathered) if fused else None,
        scales=both_scales if scales is not None else None,
      )
      run_tiles(tiling, work, shared.full, shared.empty, num_sms)

    full, empty = barriers(tiling, (not fused) + parts)
    memory = Memory(
      lhs=smem((tiling.stages, tiling.rows, depth), dtype),
      rhs=smem((tiling.stages, parts, *rhs_block), dtype),
      stores=smem((CONSUMERS, tiling.stores, consumer_rows, CHUNK), out_dtype),
      full=full,
      empty=empty,
      gathered=gather.barrier_memory(tiling.stages),
    )
    if places:
      memory = dataclasses.replace(
        memory,
        bias=plgpu.SMEM((CONSUMERS, len(places), cols), bias_dtype),
        bias_loaded=plgpu.Barrier(num_arrivals=len(places), num_barriers=CONSUMERS),
      )
    pl.run_scoped(with_memory, memory, collective_axes="wg")

  out_type = [jax.ShapeDtypeStruct((rows, n), out_dtype)] * num_outs
  return tuple(launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands)))
