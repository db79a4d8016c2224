"""Each row times its group's matrices, on Hopper, with bias and activation in the epilogue.

    R  rows of the tiles      K, N  widths      G  groups      I  row tiles
    B  fp8's blocks of 128 along K              C  its blocks of 128 along N

The layout pads each group to whole tiles, so every tile belongs to one group, and no row needs a
mask; a gather reads zeros for padding rows. Where tiles do not divide N, the last column tile ends
with N, and computes some columns once more (`tile_order.first_of`).
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
  launch,
  run_tiles,
  tiled_smem,
)
from scmoe.kernels.grouped_matmul.tile_order import first_of, locate_rows, paired_tiles, tiles_over
from scmoe.kernels.grouped_matmul.tile_stores import store_buffers, store_tiles
from scmoe.kernels.launch import resolve_num_sms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    group_I: int32, group of each tile of the layout.
    num_tiles: int32 [1], tiles of the layout in use.
    index_R: int32, row of lhs that each row of the tiles reads, negative for zeros; None: the row
      of the same number.
    lhs: operands [R, K], or with `index_R` one of any number of rows; the products of all of them
      are added up in the same results.
    rhs: for each lhs the matrices of all results, [G, K, N] or transposed.
    biases: for each result [G, N], or None.
    row_scale: of fp8 operands, float32 [B, R]; else None.
    rhs_scales: of fp8 operands, for each result float32 [G, B, C]; else ().
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
    lhs, rhs: the operands' blocks in the stages of the pipeline's ring.
    store_buffers: the buffers through which `store_tiles` stores.
    full, empty: barriers of the ring's stages.
    gathered: barriers of rows that the producer gathers.
    bias, bias_loaded: the tile's biases, and the barriers of their loads; None without biases.
  """

  lhs: Any
  rhs: Any
  store_buffers: Any
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
  """Each row times its group's matrices; the kernel's epilogue adds biases, and activates if asked.

  Args:
    lhs: operands [R, K]; the products of all of them are added up in the same results.
    rhs: for each lhs, one matrix [G, K, N] for each result ([G, N, K] with `transpose_rhs`).
    layout: tiles of R; a tile has `tiling.rows` rows, or twice as many.
    tiling: tile shape; `tiling.cols` is divided among the results.
    transpose_rhs: contract the last dimension of rhs.
    biases: for each result [G, N] or None, added before the result is rounded; () adds none.
    activation: if given, the activation of the results is one more output.
    with_results: whether the results are outputs; False needs an activation.
    index_R: if given, there is one lhs, with any number of rows, and row r of the product reads row
      index_R[r] of it (zeros if that is negative), gathered while the operand is loaded.
    scales: of fp8 operands, which are one lhs and transposed rhs: float32 [R, B] of the rows, and
      [G, B, C] of each matrix (see `fp8`). The matrix unit adds up the e4m3 products of one block
      only. The kernel multiplies that sum by both scales and adds up the blocks in float32, because
      Hopper's own sums of eight-bit products keep only some 14 bits (DeepSeek-V3, arXiv 2412.19437,
      section 3.3.2).
    out_dtype: type of the outputs.
    num_sms: CTAs of the launch; where `tiling` pairs them, the largest even number that is no
      larger, but at least 2 (`pipeline.launch`). None: the number of multiprocessors.

  Returns:
    One [R, N] for each matrix in rhs[0], if `with_results`, then the activation, if given. Rows of
    tiles that are not in use are not written.
  """
  assert with_results or activation is not None
  parts = len(rhs[0])
  # Biases are rounded to the operands' type, or with fp8 to the outputs' type, so that they fit
  # into the shared memory that the stages leave. The epilogue adds them in float32.
  bias_dtype = lhs[0].dtype if scales is None else out_dtype
  cast = lambda b: None if b is None else b.astype(bias_dtype)
  biases = tuple(map(cast, biases)) or (None,) * parts
  operands = Operands(layout.tile_group_I, layout.num_tiles, index_R, lhs, rhs, biases)
  if scales is not None:
    # The rows' scales are transposed, so that those of a stage lie together.
    operands = dataclasses.replace(operands, row_scale=scales[0].T, rhs_scales=scales[1])
  shape = _Shape(
    tiling=tiling,
    n=rhs[0][0].shape[1 if transpose_rhs else 2],
    parts=parts,
    segments=len(lhs),
    steps=lhs[0].shape[1] // tiling.depth,
    divided=layout.tile // tiling.rows,
    transpose_rhs=transpose_rhs,
    gathers=index_R is not None,
    scaled=scales is not None,
    biased=tuple(part for part, bias in enumerate(biases) if bias is not None),
    activation=None if activation is None else kernel_form(activation),
    with_results=with_results,
    dtype=lhs[0].dtype,
    bias_dtype=bias_dtype,
    out_dtype=out_dtype,
  )
  shape.check()
  num_sms = resolve_num_sms(num_sms)

  def body(gmem: Operands, outs):
    row_tiles = gmem.num_tiles[0] * shape.divided

    def with_memory(smem: Memory):
      if shape.gathers:
        gather.init_barriers(smem.gathered, tiling.stages)
      work = _Cta(shape, gmem, smem, outs, row_tiles).work()
      run_tiles(tiling, work, smem.full, smem.empty, num_sms)

    pl.run_scoped(with_memory, shape.memory(), collective_axes="wg")

  out_type = [jax.ShapeDtypeStruct((layout.num_rows, shape.n), out_dtype)] * shape.num_outs
  return tuple(launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands)))


@dataclasses.dataclass(frozen=True)
class _Shape:
  """The compile-time constants that the code of a CTA (`_Cta`) reads.

  Attributes:
    tiling: the launch's tile shape.
    n: N, columns of a result.
    parts: how many results there are.
    segments: how many lhs operands are contracted one after the other.
    steps: steps along K, of `tiling.depth` elements, for each lhs operand.
    divided: row tiles of the tiling in a tile of the layout, 1 or 2.
    transpose_rhs: whether the last dimension of rhs is contracted.
    gathers: whether the producer gathers the rows.
    scaled: whether the operands are fp8 and have scales.
    biased: indices of the results that have a bias.
    activation: in its form for kernels, or None.
    with_results: whether the results, beside the activation, are outputs.
    dtype, bias_dtype, out_dtype: types of the operands, the biases and the outputs.
  """

  tiling: Tiling
  n: int
  parts: int
  segments: int
  steps: int
  divided: int
  transpose_rhs: bool
  gathers: bool
  scaled: bool
  biased: tuple[int, ...]
  activation: Activation | None
  with_results: bool
  dtype: Any
  bias_dtype: Any
  out_dtype: Any

  @property
  def cols(self) -> int:
    """Columns of a tile in each result."""
    return self.tiling.cols // self.parts

  @property
  def col_tiles(self) -> int:
    """Tiles over N, the columns of a result; an even number for pairs of "cols"."""
    return tiles_over(self.n, self.cols, 2 if self.tiling.pair == "cols" else 1)

  @property
  def num_outs(self) -> int:
    """Number of outputs: the results, if `with_results`, and the activation, if there is one."""
    return self.parts * self.with_results + (self.activation is not None)

  @property
  def pair_in_one_group(self) -> bool:
    """Whether a pair's two row tiles are always one tile of the layout, and so share rhs."""
    return self.tiling.pair == "rows" and self.divided == 2

  def check(self) -> None:
    """Asserts that a gather, half tiles and scales, if any, fit the tiling and the operands."""
    gathers, tiling = self.gathers, self.tiling
    assert not (gathers and tiling.pair == "cols"), "a gathered operand cannot be shared"
    one_each = self.divided == 1 or (tiling.pingpong and not gathers)
    assert one_each, "half tiles are for ping-pong, ungathered"
    if self.scaled:
      assert self.segments == 1, "fp8 operands have one scale each"
      assert self.transpose_rhs, "wgmma reads fp8 along the contracted dimension"
      assert not gathers, "scales would have to be gathered too"
      assert tiling.depth == BLOCK, (tiling, "a stage has one scale")
      assert self.n % BLOCK == BLOCK % self.cols == 0, (tiling, self.n, "a tile has one rhs scale")

  def memory(self) -> Memory:
    """The types of a CTA's shared memory and barriers."""
    tiling, cols, depth = self.tiling, self.cols, self.tiling.depth
    rhs_block = (cols, depth) if self.transpose_rhs else (depth, cols)
    full, empty = barriers(tiling, (not self.gathers) + self.parts)
    memory = Memory(
      lhs=tiled_smem((tiling.stages, tiling.rows, depth), self.dtype),
      rhs=tiled_smem((tiling.stages, self.parts, *rhs_block), self.dtype),
      store_buffers=store_buffers(tiling, self.out_dtype),
      full=full,
      empty=empty,
      gathered=gather.barrier_memory(tiling.stages),
    )
    if not self.biased:
      return memory
    return dataclasses.replace(
      memory,
      bias=plgpu.SMEM((CONSUMERS, len(self.biased), cols), self.bias_dtype),
      bias_loaded=plgpu.Barrier(num_arrivals=len(self.biased), num_barriers=CONSUMERS),
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
  """One CTA with its references to memory: how it finds a tile, and what it does for the tile.

  The coordinates of a tile are its row tile, its column tile, its group, and whether its pair
  shares rhs (see `locate_rows`).
  """

  shape: _Shape
  gmem: Operands
  smem: Memory
  outs: Any
  row_tiles: Any

  def work(self) -> Work:
    """The work of the CTA's producer and consumers on a tile, for `run_tiles`."""
    shape, ready = self.shape, functools.partial(gather.wait_rows, self.smem.gathered)
    return Work(
      num_tiles=paired_tiles(shape.tiling, self.row_tiles, shape.col_tiles),
      locate=self.locate,
      steps=lambda _: shape.steps * shape.segments,
      producer=self.load,
      consumer=self.multiply,
      accumulators=[(shape.tiling.consumer_rows, shape.cols)] * shape.parts,
      epilogue=self.finish,
      prologue=self.load_biases if shape.biased else None,
      ready=ready if shape.gathers else None,
      scales=self.scales if shape.scaled else None,
    )

  def locate(self, tile: Any) -> tuple[Any, ...]:
    """Number of a tile or pair -> its coordinates (see the class)."""
    shape, group_I = self.shape, self.gmem.group_I
    return locate_rows(tile, shape.tiling, group_I, self.row_tiles, shape.col_tiles, shape.divided)

  def first_col(self, col_tile: Any) -> Any:
    """The first column of a column tile."""
    return first_of(col_tile, self.shape.cols, self.shape.n)

  # -- producer ----------------------------------------------------------------------------------

  def load(self, where: Any, step: Any, stage: Any, barrier: Any) -> None:
    """Starts the copies of one stage: a block of rows, and one of each result's matrix.

    Step 40 of two operands with 32 steps each is step 8 of the second one.
    """
    shape = self.shape
    row_tile, col_tile, group, shared_rhs = where
    rows = pl.ds(row_tile * shape.tiling.rows, shape.tiling.rows)
    cols = pl.ds(self.first_col(col_tile), shape.cols)

    def load_segment(segment):
      depth = shape.tiling.depth
      k_slice = pl.ds((step - segment * shape.steps) * depth, depth)
      if shape.gathers:
        self.start_gather(row_tile, step, stage)
      else:
        block = self.gmem.lhs[segment].at[rows, k_slice]
        copy_block(block, self.smem.lhs.at[stage], barrier, shape.tiling.pair == "cols")
      shared = shape.pair_in_one_group or shared_rhs
      for part, w in enumerate(self.gmem.rhs[segment]):
        block = w.at[group, cols, k_slice] if shape.transpose_rhs else w.at[group, k_slice, cols]
        copy_block(block, self.smem.rhs.at[stage, part], barrier, shared)

    if shape.segments == 1:
      load_segment(0)
      return
    for segment in range(shape.segments):
      inside = (step >= segment * shape.steps) & (step < (segment + 1) * shape.steps)
      pl.when(inside)(functools.partial(load_segment, segment))

  def start_gather(self, row_tile: Any, step: Any, stage: Any) -> None:
    """Starts to gather the rows of one stage to shared memory."""
    gather.start_gather(
      self.gmem.lhs[0],
      self.gmem.index_R,
      self.smem.lhs,
      self.smem.gathered,
      stage=stage,
      first_row=row_tile * self.shape.tiling.rows,
      first_col=step * self.shape.tiling.depth,
    )

  # -- consumer ----------------------------------------------------------------------------------

  def load_biases(self, where: Any, consumer: Any, first_row: Any) -> None:
    """Starts to copy the tile's biases, which the epilogue reads."""
    del first_row
    _, col_tile, group, *_ = where
    for place, part in enumerate(self.shape.biased):
      plgpu.copy_gmem_to_smem(
        self.gmem.biases[part].at[group, pl.ds(self.first_col(col_tile), self.shape.cols)],
        self.smem.bias.at[consumer, place],
        self.smem.bias_loaded.at[consumer],
      )

  def multiply(self, accumulators: Any, stage: Any, my_rows: Any) -> None:
    """Starts the products of one stage: the rows times each result's matrix."""
    lhs = self.smem.lhs.at[stage, my_rows]
    for part in range(self.shape.parts):
      rhs = self.smem.rhs.at[stage, part]
      rhs = rhs.transpose((1, 0)) if self.shape.transpose_rhs else rhs
      plgpu.wgmma(accumulators[part], lhs, rhs)

  def scales(self, where: Any, step: Any, first_row: Any) -> tuple[Any, ...]:
    """For each result the product of both operands' scales in one step, a number for each row."""
    row_tile, col_tile, group, *_ = where
    block = lax.div(jnp.int32(self.first_col(col_tile)), jnp.int32(BLOCK))
    tiling = self.shape.tiling
    rows = pl.ds(row_tile * tiling.rows + first_row, tiling.consumer_rows)
    row_scale = load_as(self.gmem.row_scale.at[step, rows], plgpu.Layout.WGMMA.reduce(1))
    return tuple(row_scale * w[group, step, block] for w in self.gmem.rhs_scales)

  # -- epilogue ----------------------------------------------------------------------------------

  def finish(self, where: Any, accumulators: Any, consumer: Any, first_row: Any) -> None:
    """Stores a consumer's part of a tile's outputs: rounded sums with biases, and the activation.

    `_Shape.with_results` and `_Shape.activation` say which of these are outputs.
    """
    shape = self.shape
    row_tile, col_tile, *_ = where
    sums = [acc[...] for acc in accumulators]
    if shape.biased:
      plgpu.barrier_wait(self.smem.bias_loaded.at[consumer])
    results = [
      functools.partial(self.rounded, total, part, consumer) for part, total in enumerate(sums)
    ]
    values = list(results) if shape.with_results else []
    if shape.activation is not None:
      values.append(functools.partial(self.activated, shape.activation, results))
    store_tiles(
      [(value, shape.cols) for value in values],
      self.outs,
      [self.first_col(col_tile)] * shape.num_outs,
      row_tile * shape.tiling.rows + first_row,
      self.smem.store_buffers,
      consumer,
    )

  def rounded(self, total: Any, part: int, consumer: Any, columns: slice) -> Any:
    """Columns of a result, with its bias if it has one, in the outputs' type."""
    biased, out_dtype = self.shape.biased, self.shape.out_dtype
    r = total[:, columns]
    if part not in biased:
      return r.astype(out_dtype)
    bias = self.smem.bias[consumer, biased.index(part), columns].astype(jnp.float32)
    bias = plgpu.layout_cast(bias, plgpu.Layout.WGMMA.reduce(0))
    return (r + lax.broadcast_in_dim(bias, r.shape, (1,))).astype(out_dtype)

  def activated(self, activation: Activation, results: Any, columns: slice) -> Any:
    """Columns of the activation, computed from the rounded results.

    The backward pass, if there is one, recomputes it from these results, which it finds stored.
    """
    h = [result(columns).astype(jnp.float32) for result in results]
    return activation.of(h).astype(self.shape.out_dtype)
