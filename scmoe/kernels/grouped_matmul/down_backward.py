"""One kernel of the experts' backward pass: gradients of pre-activations and row weights, and s·A.

    R  rows of the tiles      D  model width      F  expert width      G  groups

Without a bias, the weighted output of a row is Y = s · (A @ down) = A' @ down, where s is the row's
weight and A' = s·A. The kernel computes one product, dA' = dY @ down.T, and all that needs dA'
while it is in registers. In its epilogue it reads the pre-activations H, recomputes A from them,
and stores A' (for the down weights' gradient), dH, and for each row and column tile a share of
ds = ⟨dA', A⟩. So the forward pass keeps neither A nor the experts' output (SonicMoE, arXiv
2512.14080).
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

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
  run_tiles,
  tiled_smem,
)
from scmoe.kernels.grouped_matmul.tile_order import first_of, locate_rows, paired_tiles, tiles_over
from scmoe.kernels.launch import resolve_num_sms

_COLS = 64  # Columns of a chunk: one swizzle row, 128 bytes, of 2-byte elements.
# Rows whose pre-activations are in registers at a time: those of 128 rows would not fit.
_ROWS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
  """The kernel's operands: arrays outside it, refs inside.

  Attributes:
    group_I: int32, group of each tile.
    num_tiles: int32 [1], tiles in use.
    index_R: int32, row of dy that each row of the tiles reads, negative for zeros; None: the row of
      the same number.
    dy: gradient of the weighted output, [R, D], or with `index_R` any number of rows.
    down: the down matrices, [G, F, D].
    weight_R: s, the row weights, float32.
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
    dy, down: the operands' blocks in the stages of the pipeline's ring.
    pre, scaled: chunks of the epilogue. Pre-activations are loaded into `pre`, and their gradients
      are stored from it. The weighted activation is stored from `scaled`.
    weight, ds: row weights, and shares of ds, of each consumer's rows.
    full, empty: barriers of the ring's stages.
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
  """Returns the weighted activation, and the gradients of pre-activations and of row weights.

  In the letters of the top of this file these are s·A, dH and ds, the last in float32. ds lacks
  what a bias adds to it, ⟨dY, bias⟩. In tiles that are not in use the results may hold anything.

  Args:
    dy_XD: gradient of the weighted output, in the layout or read through `index_R`.
    down_GFD: down weights.
    pre: pre-activations [R, F]: (gate, up), or one.
    row_weight_R: s in float32; on a padding row s or the row of dy must be 0.
    layout: tiles of R.
    activation: the activation between the layers.
    tiling: tile shape.
    index_R: row of dy that each row of the layout reads, negative for padding; None: the row of the
      same number.
    num_sms: CTAs of the launch; where `tiling` pairs them, the largest even number that is no
      larger, but at least 2 (`pipeline.launch`). None: the number of multiprocessors.
  """
  operands = Operands(
    layout.tile_group_I, layout.num_tiles, index_R, dy_XD, down_GFD, row_weight_R, tuple(pre)
  )
  shape = _Shape(
    tiling=tiling,
    width=dy_XD.shape[1],
    hidden=down_GFD.shape[1],
    parts=len(pre),
    activation=kernel_form(activation),
    gathers=index_R is not None,
    dtype=dy_XD.dtype,
  )
  assert not (shape.gathers and tiling.pair == "cols"), "a gathered operand cannot be shared"
  num_sms = resolve_num_sms(num_sms)

  def body(gmem: Operands, outs: Outs):
    def with_memory(smem: Memory):
      if shape.gathers:
        gather.init_barriers(smem.gathered, tiling.stages)
      work = _Cta(shape, gmem, smem, outs).work()
      run_tiles(tiling, work, smem.full, smem.empty, num_sms)

    pl.run_scoped(with_memory, shape.memory(), collective_axes="wg")

  hidden_rows = jax.ShapeDtypeStruct((layout.num_rows, shape.hidden), shape.dtype)
  shares = jax.ShapeDtypeStruct((shape.col_tiles, layout.num_rows), jnp.float32)
  out_type = Outs(hidden_rows, (hidden_rows,) * shape.parts, shares)
  leaves = launch(body, operands, out_type, tiling, num_sms)(*jax.tree.leaves(operands))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), leaves)
  return outs.scaled, outs.dpre, jnp.sum(outs.ds, axis=0)


@dataclasses.dataclass(frozen=True)
class _Shape:
  """The compile-time constants that the code of a CTA (`_Cta`) reads.

  Attributes:
    tiling: the launch's tile shape.
    width, hidden: D and F.
    parts: how many pre-activations there are.
    activation: in its form for kernels.
    gathers: whether the producer gathers dy.
    dtype: type of dy, the down matrices and the pre-activations, and of the results but ds.
  """

  tiling: Tiling
  width: int
  hidden: int
  parts: int
  activation: Activation
  gathers: bool
  dtype: Any

  @property
  def cols(self) -> int:
    """Columns of a tile."""
    return self.tiling.cols

  @property
  def col_tiles(self) -> int:
    """Tiles over F, the columns of a pre-activation; an even number for pairs of "cols"."""
    return tiles_over(self.hidden, self.cols, 2 if self.tiling.pair == "cols" else 1)

  @property
  def blocks(self) -> int:
    """How many blocks of 64 rows a consumer has; its epilogue takes them one after the other."""
    return self.tiling.consumer_rows // _ROWS

  @property
  def together(self) -> int:
    """How many blocks of 64 rows are in the buffers of pre-activations at once."""
    return min(self.tiling.store_buffers, self.blocks)

  def memory(self) -> Memory:
    """The types of a CTA's shared memory and barriers."""
    tiling, parts, dtype = self.tiling, self.parts, self.dtype
    full, empty = barriers(tiling, (not self.gathers) + 1)
    return Memory(
      dy=tiled_smem((tiling.stages, tiling.rows, tiling.depth), dtype),
      down=tiled_smem((tiling.stages, self.cols, tiling.depth), dtype),
      pre=tiled_smem((CONSUMERS, parts, self.together * _ROWS, _COLS), dtype),
      scaled=tiled_smem((CONSUMERS, _ROWS, _COLS), dtype),
      weight=plgpu.SMEM((CONSUMERS, tiling.consumer_rows), jnp.float32),
      ds=plgpu.SMEM((CONSUMERS, tiling.consumer_rows), jnp.float32),
      full=full,
      empty=empty,
      pre_loaded=plgpu.Barrier(num_arrivals=parts, num_barriers=CONSUMERS),
      weight_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
      gathered=gather.barrier_memory(tiling.stages),
    )


class _Block(NamedTuple):
  """The place of 64 rows and 64 columns of a tile; the epilogue takes such blocks one by one.

  Attributes:
    index: number of the block of 64 rows among those of the consumer.
    first: whether it is the first of those whose pre-activations are in the buffers together.
    row, col: the first row and column, in global memory.
    consumer: number of the consumer in the CTA.
  """

  index: int
  first: bool
  row: Any
  col: Any
  consumer: Any


@dataclasses.dataclass(frozen=True)
class _Cta:
  """One CTA with its references to memory: how it finds a tile, and what it does for the tile.

  The coordinates of a tile are its row tile, its column tile, its group, and whether its pair
  shares the down matrix (see `locate_rows`).
  """

  shape: _Shape
  gmem: Operands
  smem: Memory
  outs: Outs

  def work(self) -> Work:
    """The work of the CTA's producer and consumers on a tile, for `run_tiles`."""
    shape, ready = self.shape, functools.partial(gather.wait_rows, self.smem.gathered)
    steps = shape.width // shape.tiling.depth
    return Work(
      num_tiles=paired_tiles(shape.tiling, self.gmem.num_tiles[0], shape.col_tiles),
      locate=self.locate,
      steps=lambda _: steps,
      producer=self.load,
      consumer=self.multiply,
      accumulators=[(shape.tiling.consumer_rows, shape.cols)],
      epilogue=self.finish,
      prologue=self.load_first,
      ready=ready if shape.gathers else None,
    )

  def locate(self, tile: Any) -> tuple[Any, ...]:
    """Number of a tile or pair -> its coordinates (see the class)."""
    gmem, shape = self.gmem, self.shape
    return locate_rows(tile, shape.tiling, gmem.group_I, gmem.num_tiles[0], shape.col_tiles)

  def first_place(self, where: Any, first_row: Any) -> tuple[Any, Any]:
    """The first row and column of a consumer's part of a tile."""
    row_tile, col_tile, *_ = where
    row = row_tile * self.shape.tiling.rows + first_row
    return row, first_of(col_tile, self.shape.cols, self.shape.hidden)

  # -- producer ----------------------------------------------------------------------------------

  def load(self, where: Any, step: Any, stage: Any, barrier: Any) -> None:
    """Starts the copies of one stage: blocks of dy and of the down matrix."""
    shape, tiling, gmem, smem = self.shape, self.shape.tiling, self.gmem, self.smem
    row_tile, col_tile, group, shared_down = where
    k_slice = pl.ds(step * tiling.depth, tiling.depth)
    if shape.gathers:
      gather.start_gather(
        gmem.dy,
        gmem.index_R,
        smem.dy,
        smem.gathered,
        stage=stage,
        first_row=row_tile * tiling.rows,
        first_col=step * tiling.depth,
      )
    else:
      block = gmem.dy.at[pl.ds(row_tile * tiling.rows, tiling.rows), k_slice]
      copy_block(block, smem.dy.at[stage], barrier, tiling.pair == "cols")
    down_rows = pl.ds(first_of(col_tile, shape.cols, shape.hidden), shape.cols)
    block = gmem.down.at[group, down_rows, k_slice]
    copy_block(block, smem.down.at[stage], barrier, shared_down)

  # -- consumer ----------------------------------------------------------------------------------

  def multiply(self, accumulators: Any, stage: Any, my_rows: Any) -> None:
    """Starts the product of one stage: dy times the transposed down matrix."""
    dy, down = self.smem.dy.at[stage, my_rows], self.smem.down.at[stage].transpose((1, 0))
    plgpu.wgmma(accumulators[0], dy, down)

  # -- epilogue: loads ---------------------------------------------------------------------------

  def load_first(self, where: Any, consumer: Any, first_row: Any) -> None:
    """Starts to load what the epilogue reads first: row weights and its first pre-activations."""
    gmem, smem = self.gmem, self.smem
    # The previous tile's stores must have left the buffers.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    row, col = self.first_place(where, first_row)
    plgpu.copy_gmem_to_smem(
      gmem.weight_R.at[pl.ds(row, self.shape.tiling.consumer_rows)],
      smem.weight.at[consumer],
      smem.weight_loaded.at[consumer],
    )
    self.load_pre(row, col, consumer)

  def load_pre(self, row: Any, col: Any, consumer: Any) -> None:
    """Starts to load the pre-activations at (row, col) into the consumer's buffers."""
    for part in range(self.shape.parts):
      plgpu.copy_gmem_to_smem(
        self.gmem.pre[part].at[pl.ds(row, self.shape.together * _ROWS), pl.ds(col, _COLS)],
        self.smem.pre.at[consumer, part],
        self.smem.pre_loaded.at[consumer],
      )

  # -- epilogue: results -------------------------------------------------------------------------

  def finish(self, where: Any, accumulators: Any, consumer: Any, first_row: Any) -> None:
    """Stores a consumer's part of a tile of the three results: s·A, dH and shares of ds."""
    shape = self.shape
    first, first_col = self.first_place(where, first_row)
    da_tile = accumulators[0][...]
    plgpu.barrier_wait(self.smem.weight_loaded.at[consumer])
    ds: list[Any] = [None] * shape.blocks
    for chunk, index in itertools.product(range(shape.cols // _COLS), range(shape.blocks)):
      row, col = first + index * _ROWS, first_col + chunk * _COLS
      block = _Block(index, index % shape.together == 0, row, col, consumer)
      if block.first:
        self.wait_for_pre(block, loaded_before=not (chunk or index))
      da = da_tile[_rows(index), chunk * _COLS : (chunk + 1) * _COLS]
      self.finish_block(block, da, ds, where[1])
    self.store_shares(ds, where[1], first, consumer)

  def wait_for_pre(self, block: _Block, loaded_before: bool) -> None:
    """Waits for the pre-activations of a block and of the blocks that share its buffers.

    With `loaded_before` their load has begun in `load_first`. Otherwise it begins here, once the
    stores of the blocks before have left the buffers.
    """
    if not loaded_before:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      self.load_pre(block.row, block.col, block.consumer)
    plgpu.barrier_wait(self.smem.pre_loaded.at[block.consumer])

  def finish_block(self, block: _Block, da: Any, ds: list[Any], col_tile: Any) -> None:
    """Makes a block's results from `da`: adds its rows' share to ds[block.index], stores the rest.

    The activation A is recomputed from the pre-activations. The share is ⟨da, A⟩ of each row, or 0
    for columns that the tile before computes too (`counted_once`); s·A and dH are stored.
    """
    shape, smem, activation = self.shape, self.smem, self.shape.activation
    in_buffer = _rows(block.index % shape.together)
    h = [
      smem.pre[block.consumer, part, in_buffer].astype(jnp.float32) for part in range(shape.parts)
    ]
    s = smem.weight[block.consumer, _rows(block.index)]
    s = plgpu.layout_cast(s, plgpu.Layout.WGMMA.reduce(1))
    s_full = lax.broadcast_in_dim(s, da.shape, (0,))
    a, gradients = activation.pullback(h)
    share = self.counted_once(jnp.sum(da * a, axis=1), block.col, col_tile)
    ds[block.index] = share if ds[block.index] is None else ds[block.index] + share
    self.store_block(block, gradients(da * s_full), a, s_full)

  def counted_once(self, share: Any, col: Any, col_tile: Any) -> Any:
    """The share of ds, or 0 for columns that the tile before computes too (see `first_of`)."""
    if self.shape.hidden % self.shape.cols == 0:
      return share
    counts = jnp.where(col >= col_tile * self.shape.cols, 1.0, 0.0)
    return share * lax.broadcast_in_dim(counts, share.shape, ())

  def store_block(self, block: _Block, dpre: Any, a: Any, s_full: Any) -> None:
    """Stores a block's gradients of pre-activations (`dpre`), and its weighted activation."""
    shape, smem, outs, consumer = self.shape, self.smem, self.outs, block.consumer
    in_buffer = _rows(block.index % shape.together)
    for part in range(shape.parts):
      smem.pre[consumer, part, in_buffer] = dpre[part].astype(shape.dtype)
    if not block.first:  # the block before must have left `scaled`, which both use
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.scaled[consumer] = (a * s_full).astype(shape.dtype)
    plgpu.commit_smem()
    target = pl.ds(block.row, _ROWS), pl.ds(block.col, _COLS)
    for part in range(shape.parts):
      source = smem.pre.at[consumer, part, in_buffer]
      plgpu.copy_smem_to_gmem(source, outs.dpre[part].at[target])
    plgpu.copy_smem_to_gmem(smem.scaled.at[consumer], outs.scaled.at[target])

  def store_shares(self, ds: list[Any], col_tile: Any, first: Any, consumer: Any) -> None:
    """Stores each row's share of ds in this column tile."""
    for index, share in enumerate(ds):
      self.smem.ds[consumer, _rows(index)] = share
    plgpu.commit_smem()
    rows = pl.ds(first, self.shape.tiling.consumer_rows)
    plgpu.copy_smem_to_gmem(self.smem.ds.at[consumer], self.outs.ds.at[col_tile, rows])


def _rows(index: int) -> slice:
  """Rows of the block with this index, `_ROWS` of them, within a consumer's rows."""
  return slice(index * _ROWS, (index + 1) * _ROWS)
