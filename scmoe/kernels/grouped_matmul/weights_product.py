"""The gradients of a group's matrices, on Hopper: lhs.T times one or more rhs over a group's rows.

    R  rows of the tiles      M, N  widths of the result      G  groups

Groups are padded with zeros, in one operand at least, so the contraction is a plain loop, without
masks, over the blocks of rows that hold at least one row of the group.
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
  Tiling,
  Work,
  barriers,
  copy_block,
  launch,
  num_workers,
  run_tiles,
  tiled_smem,
)
from scmoe.kernels.grouped_matmul.tile_order import first_of, paired, snake, tiles_over
from scmoe.kernels.grouped_matmul.tile_stores import store_buffers, store_tiles
from scmoe.kernels.launch import resolve_num_sms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    by_size_G: int32, groups by falling number of tiles.
    starts_G, sizes_G: int32, first tile of each group (in the first run), and number of its rows
      without padding.
    index_R: int32, row of the gathered operand that each row of the tiles reads; None where nothing
      is gathered.
    lhs: the operand [R, M].
    rhs: operands [R, N] of one width. A gathered operand may have any number of rows.
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
  store_buffers: Any
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
  """out[g] = lhs[rows of g].T @ rhs[rows of g], for one rhs or more; zero for empty groups.

  Args:
    lhs_RM: the operand whose width becomes the result's rows.
    rhs: operands [R, N] of one width.
    layout: tiles of R; with several runs, no index may be given.
    tiling: tile shape; `tiling.cols` is divided among the results.
    lhs_index_R: if given, the kernel reads row index[r] of lhs_RM as row r, zero if it is negative.
    rhs_index_R: likewise for rhs, if there is only one rhs; not together with lhs_index_R.
    out_dtype: type of the outputs.
    num_sms: CTAs of the launch; where they work in pairs, the largest even number that is no
      larger, but at least 2 (`pipeline.launch`). None: the number of multiprocessors.

  Returns:
    One [G, M, N] for each rhs. Padding rows must be zero in one operand, and finite in the other.
  """
  assert lhs_index_R is None or rhs_index_R is None
  fused_lhs, fused_rhs = lhs_index_R is not None, rhs_index_R is not None
  if (tiling.pair == "rows" and fused_rhs) or (tiling.pair == "cols" and fused_lhs):
    # A pair cannot share the gathered operand. `tiles.choose` may give a pair all the same, since
    # the keys of its tables do not say which operand is gathered.
    tiling = dataclasses.replace(tiling, pair="")
  assert layout.runs == 1 or not (fused_lhs or fused_rhs), "rows in several runs are not gathered"
  operands = Operands(
    layout.by_size_G,
    layout.tile_starts_G,
    layout.group_sizes_G,
    lhs_index_R if fused_lhs else rhs_index_R,
    lhs_RM,
    tuple(rhs),
  )
  shape = _Shape(
    tiling=tiling,
    m=lhs_RM.shape[1],
    n=rhs[0].shape[1],
    parts=len(rhs),
    groups=layout.num_groups,
    layout_tile=layout.tile,
    tiles_per_run=layout.run_tiles if layout.runs > 1 else None,
    gathers_lhs=fused_lhs,
    gathers_rhs=fused_rhs,
    dtype=lhs_RM.dtype,
    out_dtype=out_dtype,
    num_sms=resolve_num_sms(num_sms),
  )

  def body(gmem: Operands, outs):
    def with_memory(smem: Memory):
      if shape.gathers:
        gather.init_barriers(smem.gathered, tiling.stages)
      work = _Cta(shape, gmem, smem, outs).work()
      run_tiles(tiling, work, smem.full, smem.empty, shape.num_sms)

    pl.run_scoped(with_memory, shape.memory(), collective_axes="wg")

  out_type = [jax.ShapeDtypeStruct((shape.groups, shape.m, shape.n), out_dtype)] * shape.parts
  run = launch(body, operands, out_type, tiling, shape.num_sms)
  return tuple(run(*jax.tree.leaves(operands)))


@dataclasses.dataclass(frozen=True)
class _Shape:
  """The compile-time constants that the code of a CTA (`_Cta`) reads.

  Attributes:
    tiling: the launch's tile shape.
    m, n: M and N.
    parts: how many results there are.
    groups: G.
    layout_tile: rows of a tile of the layout.
    tiles_per_run: tiles of a group in each of several runs; None with one run.
    gathers_lhs, gathers_rhs: which operand the producer gathers.
    dtype: type of the operands.
    out_dtype: type of the results.
    num_sms: CTAs of the launch (see `pipeline.launch`).
  """

  tiling: Tiling
  m: int
  n: int
  parts: int
  groups: int
  layout_tile: int
  tiles_per_run: int | None
  gathers_lhs: bool
  gathers_rhs: bool
  dtype: Any
  out_dtype: Any
  num_sms: int

  @property
  def gathers(self) -> bool:
    """Whether the producer gathers one of the two operands."""
    return self.gathers_lhs or self.gathers_rhs

  @property
  def cols(self) -> int:
    """Columns of a tile in each result."""
    return self.tiling.cols // self.parts

  @property
  def row_tiles(self) -> int:
    """Tiles over M, the rows of a result; an even number for pairs of "rows"."""
    return tiles_over(self.m, self.tiling.rows, 2 if self.tiling.pair == "rows" else 1)

  @property
  def col_tiles(self) -> int:
    """Tiles over N, the columns of a result; an even number for pairs of "cols"."""
    return tiles_over(self.n, self.cols, 2 if self.tiling.pair == "cols" else 1)

  @property
  def tiles_per_group(self) -> int:
    """Tiles of a group's result, or pairs of tiles if the tiling has pairs."""
    return self.row_tiles * self.col_tiles // self.tiling.cluster

  @property
  def num_tiles(self) -> int:
    """Tiles of all groups' results, or pairs of tiles if the tiling has pairs."""
    return self.groups * self.tiles_per_group

  def memory(self) -> Memory:
    """The types of a CTA's shared memory and barriers."""
    tiling, cols = self.tiling, self.cols
    full, empty = barriers(tiling, 1 + self.parts - self.gathers)
    return Memory(
      lhs=tiled_smem((tiling.stages, tiling.depth, tiling.rows), self.dtype),
      rhs=(tiled_smem((tiling.stages, tiling.depth, cols), self.dtype),) * self.parts,
      store_buffers=store_buffers(tiling, self.out_dtype),
      full=full,
      empty=empty,
      gathered=gather.barrier_memory(tiling.stages),
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
  """One CTA with its references to memory: how it finds a tile, and what it does for the tile."""

  shape: _Shape
  gmem: Operands
  smem: Memory
  outs: Any

  def work(self) -> Work:
    """The work of the CTA's producer and consumers on a tile, for `run_tiles`."""
    shape, ready = self.shape, functools.partial(gather.wait_rows, self.smem.gathered)
    return Work(
      num_tiles=jnp.int32(shape.num_tiles),
      locate=self.locate,
      steps=lambda where: where[-1],
      producer=self.load,
      consumer=self.multiply,
      accumulators=[(shape.tiling.consumer_rows, shape.cols)] * shape.parts,
      epilogue=self.store,
      ready=ready if shape.gathers else None,
    )

  def locate(self, tile: Any) -> tuple[Any, ...]:
    """Tile number -> group, row tile, column tile, the group's first tile of rows, steps.

    Tiles of large groups come first, and every other full wave takes its tiles backwards (`snake`),
    so that long tiles are spread over the CTAs.
    """
    shape, tiling = self.shape, self.shape.tiling
    tile = snake(tile, shape.num_tiles, num_workers(tiling, shape.num_sms))
    group = self.gmem.by_size_G[lax.div(tile, jnp.int32(shape.tiles_per_group))]
    inside = lax.rem(tile, jnp.int32(shape.tiles_per_group))
    row_tile, col_tile, _ = paired(inside, tiling, jnp.int32(shape.row_tiles), shape.col_tiles)
    depth = tiling.depth
    steps = lax.div(self.gmem.sizes_G[group] + (depth - 1), jnp.int32(depth))
    return group, row_tile, col_tile, self.gmem.starts_G[group], steps

  def contracted_row(self, first_tile: Any, step: Any) -> Any:
    """The first row that a step contracts.

    With several runs, a group's rows continue in the next run, after the other groups' rows.
    """
    shape, depth = self.shape, self.shape.tiling.depth
    if shape.tiles_per_run is None:
      return first_tile * shape.layout_tile + step * depth
    steps_per_run = shape.tiles_per_run * (shape.layout_tile // depth)
    run = lax.div(step, jnp.int32(steps_per_run))
    inside = step - run * steps_per_run
    tile = first_tile + run * (shape.groups * shape.tiles_per_run)
    return tile * shape.layout_tile + inside * depth

  def load(self, where: Any, step: Any, stage: Any, barrier: Any) -> None:
    """Starts the copies of one stage: the rows of lhs and of every rhs that a step contracts."""
    shape, tiling, gmem, smem = self.shape, self.shape.tiling, self.gmem, self.smem
    _, row_tile, col_tile, first_tile, _ = where
    # The row is computed here, not carried from step to step: a loop's variable is not known to be
    # a multiple of the depth.
    first_row = self.contracted_row(first_tile, step)
    k_slice = pl.ds(first_row, tiling.depth)
    start_gather = functools.partial(
      gather.start_gather,
      index=gmem.index_R,
      barriers=smem.gathered,
      stage=stage,
      first_row=first_row,
      prefetch=tiling.stages * tiling.depth,
    )
    if shape.gathers_lhs:
      start_gather(gmem.lhs, ring=smem.lhs, first_col=first_of(row_tile, tiling.rows, shape.m))
    else:
      m_slice = pl.ds(first_of(row_tile, tiling.rows, shape.m), tiling.rows)
      block = gmem.lhs.at[k_slice, m_slice]
      copy_block(block, smem.lhs.at[stage], barrier, tiling.pair == "cols")
    for operand, ring in zip(gmem.rhs, smem.rhs):
      if shape.gathers_rhs:
        start_gather(operand, ring=ring, first_col=first_of(col_tile, shape.cols, shape.n))
      else:
        n_slice = pl.ds(first_of(col_tile, shape.cols, shape.n), shape.cols)
        copy_block(operand.at[k_slice, n_slice], ring.at[stage], barrier, tiling.pair == "rows")

  def multiply(self, accumulators: Any, stage: Any, my_rows: Any) -> None:
    """Starts the products of one stage: lhs.T times every rhs."""
    lhs = self.smem.lhs.at[stage, :, my_rows].transpose((1, 0))
    for accumulator, ring in zip(accumulators, self.smem.rhs):
      plgpu.wgmma(accumulator, lhs, ring.at[stage])

  def store(self, where: Any, accumulators: Any, consumer: Any, first_row: Any) -> None:
    """Casts the sums to the type of the results and stores them."""
    shape = self.shape
    group, row_tile, col_tile, _, _ = where
    results = [acc[...] for acc in accumulators]
    store_tiles(
      [(lambda s, r=r: r[:, s].astype(shape.out_dtype), shape.cols) for r in results],
      [out.at[group] for out in self.outs],
      [first_of(col_tile, shape.cols, shape.n)] * shape.parts,
      first_of(row_tile, shape.tiling.rows, shape.m) + first_row,
      self.smem.store_buffers,
      consumer,
    )
