"""Grouped products on Hopper, in Pallas Mosaic GPU.

    R  rows of the padded layout      K, N  widths      G  groups      I  row tiles
    D  model width      F  expert width

The layout pads each group to the row tile, so every tile belongs to one group, no load or store is
ragged, and the weight gradient is a plain loop over a group's rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul import gather, tiles
from scmoe.kernels.grouped_matmul.activations import Activation, kernel_form
from scmoe.kernels.grouped_matmul.layout import GroupLayout, take_rows
from scmoe.kernels.grouped_matmul.mosaic_backward import down_backward_product
from scmoe.kernels.grouped_matmul.pipeline import (
  CONSUMERS,
  Tiling,
  Work,
  barriers,
  can_gather,
  copy_block,
  launch,
  locate_rows,
  num_workers,
  paired,
  paired_tiles,
  resolve_num_sms,
  run_tiles,
  smem,
  snake,
)

_CHUNK = 64  # columns of one store; 64 bf16 elements are one swizzle row


def _store_chunks(values, outs, first_col, first_row, buffers, consumer):
  """Stores (rows, cols) register tiles to GMEM through a ring of shared-memory chunks.

  Args:
    values: functions chunk slice -> (rows, _CHUNK) values, one for each output, with their widths.
    outs: output refs, one for each.
    first_col: first column of the tile in each output.
    first_row: first row of this consumer.
    buffers: SMEM ref [consumers, slots, rows, _CHUNK].
    consumer: which buffers to use.
  """
  slots, rows = buffers.shape[1], buffers.shape[2]
  # With a number of chunks that the ring does not divide, a tile begins at the buffer that the one
  # before it used last.
  begins_free = sum(width // _CHUNK for _, width in values) % slots == 0
  used = 0
  for (value, width), out, col in zip(values, outs, first_col):
    for chunk in range(width // _CHUNK):
      slot = used % slots
      # The store that used this buffer before has left it.
      plgpu.wait_smem_to_gmem(slots - 1 if used or begins_free else 0, wait_read_only=True)
      used += 1
      buffers[consumer, slot] = value(slice(chunk * _CHUNK, (chunk + 1) * _CHUNK))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        buffers.at[consumer, slot],
        out.at[pl.ds(first_row, rows), pl.ds(col + chunk * _CHUNK, _CHUNK)],
      )


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
  given = {part: b.astype(lhs[0].dtype) for part, b in enumerate(biases) if b is not None}
  rows, width = layout.num_rows, lhs[0].shape[1]
  depth = tiling.depth
  halves = layout.tile // tiling.rows
  same_group = tiling.pair == "rows" and halves == 2  # a pair is one tile of the layout
  fused = index_R is not None
  n = rhs[0][0].shape[1 if transpose_rhs else 2]
  cols = tiling.cols // parts
  col_tiles, steps = n // cols, width // depth
  dtype = lhs[0].dtype
  num_sms = resolve_num_sms(num_sms)
  num_outs = parts * with_results + (activation is not None)
  assert not (fused and tiling.pair == "cols"), "a gathered operand cannot be shared"
  assert halves == 1 or (tiling.pingpong and not fused), "half tiles are for ping-pong, ungathered"
  rhs_block = (cols, depth) if transpose_rhs else (depth, cols)
  consumer_rows = tiling.consumer_rows
  flat = [*lhs, *(w for ws in rhs for w in ws), *given.values()]
  form = None if activation is None else kernel_form(activation)

  def body(group_gmem, num_tiles_gmem, index_gmem, *refs):
    lhs_gmem = refs[: len(lhs)]
    rhs_gmem = refs[len(lhs) : len(flat) - len(given)]
    bias_gmem = dict(zip(given, refs[len(flat) - len(given) : len(flat)]))
    outs = refs[len(flat) :]

    def with_memory(lhs_smem, rhs_smem, out_smem, full, empty, arrived, *bias_memory):
      if fused:
        gather.init_barriers(arrived, tiling.stages)

      def locate(tile):
        return locate_rows(tile, tiling, group_gmem, num_tiles_gmem[0] * halves, col_tiles, halves)

      def load(where, step, slot, barrier):
        row_tile, col_tile, group, shared = where
        row_slice = pl.ds(row_tile * tiling.rows, tiling.rows)
        col_slice = pl.ds(col_tile * cols, cols)

        def load_segment(segment):
          k_slice = pl.ds((step - segment * steps) * depth, depth)
          if fused:
            gather.start_gather(
              lhs_gmem[0],
              index_gmem,
              lhs_smem,
              arrived,
              slot=slot,
              first_row=row_tile * tiling.rows,
              first_col=step * depth,
            )
          else:
            block = lhs_gmem[segment].at[row_slice, k_slice]
            copy_block(block, lhs_smem.at[slot], barrier, tiling.pair == "cols")
          for part in range(parts):
            w = rhs_gmem[segment * parts + part]
            block = (
              w.at[group, col_slice, k_slice] if transpose_rhs else w.at[group, k_slice, col_slice]
            )
            copy_block(block, rhs_smem.at[slot, part], barrier, same_group or shared)

        if len(lhs) == 1:
          load_segment(0)
        else:
          for segment in range(len(lhs)):
            inside = (step >= segment * steps) & (step < (segment + 1) * steps)
            pl.when(inside)(functools.partial(load_segment, segment))

      def multiply(accumulators, slot, my_rows):
        a = lhs_smem.at[slot, my_rows]
        for part in range(parts):
          b = rhs_smem.at[slot, part]
          plgpu.wgmma(accumulators[part], a, b.transpose((1, 0)) if transpose_rhs else b)

      def prepare(where, consumer, first_row):
        _, col_tile, group, *_ = where
        bias_smem, loaded = bias_memory
        for place, part in enumerate(given):
          plgpu.copy_gmem_to_smem(
            bias_gmem[part].at[group, pl.ds(col_tile * cols, cols)],
            bias_smem.at[consumer, place],
            loaded.at[consumer],
          )

      def finish(where, accumulators, consumer, first_row):
        row_tile, col_tile, *_ = where
        results = [acc[...] for acc in accumulators]
        if given:
          bias_smem, loaded = bias_memory
          plgpu.barrier_wait(loaded.at[consumer])

        def result(part, s):
          r = results[part][:, s]
          if part not in given:
            return r.astype(out_dtype)
          bias = bias_smem[consumer, list(given).index(part), s].astype(jnp.float32)
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
        _store_chunks(
          values,
          outs,
          [col_tile * cols] * num_outs,
          row_tile * tiling.rows + first_row,
          out_smem,
          consumer,
        )

      run_tiles(
        tiling,
        Work(
          num_tiles=paired_tiles(tiling, num_tiles_gmem[0] * halves, col_tiles),
          locate=locate,
          steps=lambda _: steps * len(lhs),
          load=load,
          multiply=multiply,
          accumulators=[(consumer_rows, cols)] * parts,
          finish=finish,
          prepare=prepare if given else None,
          ready=functools.partial(_wait_rows, arrived) if fused else None,
        ),
        full,
        empty,
        num_sms,
      )

    full, empty = barriers(tiling, (not fused) + parts)
    bias_memory = ()
    if given:
      bias_memory = (
        plgpu.SMEM((CONSUMERS, len(given), cols), dtype),
        plgpu.Barrier(num_arrivals=len(given), num_barriers=CONSUMERS),
      )
    pl.run_scoped(
      with_memory,
      smem((tiling.stages, tiling.rows, depth), dtype),
      smem((tiling.stages, parts, *rhs_block), dtype),
      smem((CONSUMERS, tiling.stores, consumer_rows, _CHUNK), out_dtype),
      full,
      empty,
      gather.barrier_memory(tiling.stages),
      *bias_memory,
      collective_axes="wg",
    )

  out_type = [jax.ShapeDtypeStruct((rows, n), out_dtype)] * num_outs
  index = index_R if fused else layout.num_tiles  # a kernel's operands are never None
  return tuple(
    launch(body, out_type, tiling, num_sms)(layout.tile_group_I, layout.num_tiles, index, *flat)
  )


def _wait_rows(arrived, slot, parity):
  gather.wait_gather(arrived, slot=slot, parity=parity)


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
  parts = len(rhs)
  m, n = lhs_RM.shape[1], rhs[0].shape[1]
  cols = tiling.cols // parts
  row_tiles, col_tiles = m // tiling.rows, n // cols
  depth = tiling.depth
  per_tile = layout.tile // depth
  dtype = lhs_RM.dtype
  num_sms = resolve_num_sms(num_sms)
  groups = layout.num_groups

  if (tiling.pair == "rows" and fused_rhs) or (tiling.pair == "cols" and fused_lhs):
    # `tiles.TABLE` does not tell which operand is gathered, and that one cannot be shared.
    tiling = dataclasses.replace(tiling, pair="")
  pair = tiling.pair
  assert pair != "rows" or row_tiles % 2 == 0, (tiling, row_tiles)
  assert pair != "cols" or col_tiles % 2 == 0, (tiling, col_tiles)
  per_group = row_tiles * col_tiles // tiling.cluster
  num_tiles = groups * per_group
  assert layout.runs == 1 or not fused, "rows in several runs are not gathered"

  def row_of(first_tile, step):
    if layout.runs == 1:
      return first_tile * layout.tile + step * depth
    run = lax.div(step, jnp.int32(layout.run_tiles * per_tile))
    inside = step - run * (layout.run_tiles * per_tile)
    return (first_tile + run * (groups * layout.run_tiles)) * layout.tile + inside * depth

  def body(order_gmem, starts_gmem, tiles_gmem, index_gmem, lhs_gmem, *refs):
    rhs_gmem, outs = refs[:parts], refs[parts : 2 * parts]

    def with_memory(lhs_smem, out_smem, full, empty, arrived, *rhs_smem):
      if fused:
        gather.init_barriers(arrived, tiling.stages)

      def locate(tile):
        # Large groups first, and back and forth over the SMs: each gets its share of long tiles.
        tile = snake(tile, num_tiles, num_workers(tiling, num_sms))
        group = order_gmem[lax.div(tile, jnp.int32(per_group))]
        inside = lax.rem(tile, jnp.int32(per_group))
        row_tile, col_tile, _ = paired(inside, tiling, jnp.int32(row_tiles), col_tiles)
        return group, row_tile, col_tile, starts_gmem[group], tiles_gmem[group] * per_tile

      def load(where, step, slot, barrier):
        _, row_tile, col_tile, first_tile, _ = where
        # Computed here: a loop's variable is not known to be a multiple.
        first_row = row_of(first_tile, step)
        k_slice = pl.ds(first_row, depth)
        start = functools.partial(
          gather.start_gather,
          index=index_gmem,
          barriers=arrived,
          slot=slot,
          first_row=first_row,
          prefetch=tiling.stages * depth,
        )
        if fused_lhs:
          start(lhs_gmem, stage=lhs_smem, first_col=row_tile * tiling.rows)
        else:
          block = lhs_gmem.at[k_slice, pl.ds(row_tile * tiling.rows, tiling.rows)]
          copy_block(block, lhs_smem.at[slot], barrier, pair == "cols")
        for part in range(parts):
          if fused_rhs:
            start(rhs_gmem[part], stage=rhs_smem[part], first_col=col_tile * cols)
          else:
            block = rhs_gmem[part].at[k_slice, pl.ds(col_tile * cols, cols)]
            copy_block(block, rhs_smem[part].at[slot], barrier, pair == "rows")

      def multiply(accumulators, slot, my_rows):
        a = lhs_smem.at[slot, :, my_rows].transpose((1, 0))
        for part in range(parts):
          plgpu.wgmma(accumulators[part], a, rhs_smem[part].at[slot])

      def finish(where, accumulators, consumer, first_row):
        group, row_tile, col_tile, _, _ = where
        results = [acc[...] for acc in accumulators]
        _store_chunks(
          [(lambda s, r=r: r[:, s].astype(out_dtype), cols) for r in results],
          [out.at[group] for out in outs],
          [col_tile * cols] * parts,
          row_tile * tiling.rows + first_row,
          out_smem,
          consumer,
        )

      run_tiles(
        tiling,
        Work(
          num_tiles=jnp.int32(num_tiles),
          locate=locate,
          steps=lambda where: where[-1],
          load=load,
          multiply=multiply,
          accumulators=[(tiling.consumer_rows, cols)] * parts,
          finish=finish,
          ready=functools.partial(_wait_rows, arrived) if fused else None,
        ),
        full,
        empty,
        num_sms,
      )

    full, empty = barriers(tiling, 1 + parts - fused)
    pl.run_scoped(
      with_memory,
      smem((tiling.stages, depth, tiling.rows), dtype),
      smem((CONSUMERS, tiling.stores, tiling.consumer_rows, _CHUNK), out_dtype),
      full,
      empty,
      gather.barrier_memory(tiling.stages),
      *[smem((tiling.stages, depth, cols), dtype)] * parts,
      collective_axes="wg",
    )

  out_type = [jax.ShapeDtypeStruct((groups, m, n), out_dtype)] * parts
  index = lhs_index_R if fused_lhs else rhs_index_R if fused_rhs else layout.num_tiles
  return tuple(
    launch(body, out_type, tiling, num_sms)(
      layout.by_size_G, layout.tile_starts_G, layout.tiles_G, index, lhs_RM, *rhs
    )
  )


def _split_gather(x_XN, index_R, fuse: bool):
  """(x, index) for a kernel that gathers by itself, else the gathered rows and None."""
  if index_R is None or (fuse and can_gather()):
    return x_XN, index_R
  return take_rows(x_XN, index_R), None


# Where gathering inside the product beats a gather before it (experiments/kernels).
FUSED_GATHERS = frozenset({"rows", "up", "down_backward", "weights_lhs", "weights_rhs"})


def grouped_rows(
  lhs_XK: jax.Array,
  rhs_GKN: jax.Array,
  layout: GroupLayout,
  *,
  index_R: jax.Array | None = None,
  transpose_rhs: bool = False,
  bias_GN: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """As `xla.grouped_rows`; rows of tiles that are not in use are not written."""
  del precision  # 2-byte operands are exact in the matrix unit
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  n = rhs_GKN.shape[1 if transpose_rhs else 2]
  lhs, index_R = _split_gather(lhs_XK, index_R, "rows" in FUSED_GATHERS)
  gathered = index_R is not None
  tiling = tiles.choose("rows", lhs.shape[1], n, out_dtype.itemsize, gathered=gathered)
  (out_RN,) = rows_product(
    (lhs,),
    ((rhs_GKN,),),
    layout,
    tiling,
    transpose_rhs=transpose_rhs,
    biases=(bias_GN,),
    index_R=index_R,
    out_dtype=out_dtype,
    num_sms=num_sms,
  )
  return out_RN


def grouped_weights(
  lhs_XK: jax.Array,
  rhs_XN: jax.Array,
  layout: GroupLayout,
  *,
  lhs_index_R: jax.Array | None = None,
  rhs_index_R: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """As `xla.grouped_weights`."""
  del precision
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  lhs, lhs_index_R = _split_gather(lhs_XK, lhs_index_R, "weights_lhs" in FUSED_GATHERS)
  fuse_rhs = "weights_rhs" in FUSED_GATHERS and lhs_index_R is None
  rhs, rhs_index_R = _split_gather(rhs_XN, rhs_index_R, fuse_rhs)
  gathered = lhs_index_R is not None or rhs_index_R is not None
  widths = lhs.shape[1], rhs.shape[1]
  tiling = tiles.choose("weights", *widths, out_dtype.itemsize, gathered=gathered)
  (out_GKN,) = weights_product(
    lhs,
    (rhs,),
    layout,
    tiling,
    lhs_index_R=lhs_index_R,
    rhs_index_R=rhs_index_R,
    out_dtype=out_dtype,
    num_sms=num_sms,
  )
  return out_GKN


def up_activate(
  x_XD: jax.Array,
  up_weights: tuple[jax.Array, ...],
  biases: tuple[jax.Array | None, ...],
  layout: GroupLayout,
  activation: Activation,
  *,
  index_R: jax.Array | None = None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """As `xla.up_activate`; biases and activation are in the product's epilogue."""
  del precision
  kind = "up" if len(up_weights) == 2 else "activated"
  x, index_R = _split_gather(x_XD, index_R, "up" in FUSED_GATHERS)
  gathered = index_R is not None
  tiling = tiles.choose(kind, x.shape[1], up_weights[0].shape[2], gathered=gathered)
  *pre, a_RF = rows_product(
    (x,),
    (up_weights,),
    layout,
    tiling,
    transpose_rhs=False,
    biases=biases,
    activation=activation,
    index_R=index_R,
    out_dtype=x_XD.dtype,
    num_sms=num_sms,
  )
  return tuple(pre), a_RF


def down_backward(
  dy_XD: jax.Array,
  down_GFD: jax.Array,
  pre: tuple[jax.Array, ...],
  row_weight_R: jax.Array,
  layout: GroupLayout,
  activation: Activation,
  *,
  index_R: jax.Array | None = None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
  """As `xla.down_backward`, in one kernel."""
  del precision
  dy, index_R = _split_gather(
    dy_XD.astype(down_GFD.dtype), index_R, "down_backward" in FUSED_GATHERS
  )
  gathered = index_R is not None
  tiling = tiles.choose("down_backward", dy.shape[1], down_GFD.shape[1], gathered=gathered)
  return down_backward_product(
    dy,
    down_GFD,
    pre,
    row_weight_R.astype(jnp.float32),
    layout,
    activation,
    tiling,
    index_R=index_R,
    num_sms=num_sms,
  )


def up_input_gradient(
  dpre: tuple[jax.Array, ...],
  up_weights: tuple[jax.Array, ...],
  layout: GroupLayout,
  *,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> jax.Array:
  """As `xla.up_input_gradient`, both products into one accumulator."""
  del precision
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  kind = "dx" if len(dpre) == 2 else "rows"
  tiling = tiles.choose(kind, dpre[0].shape[1], up_weights[0].shape[1], out_dtype.itemsize)
  (dx_RD,) = rows_product(
    dpre,
    tuple((w,) for w in up_weights),
    layout,
    tiling,
    transpose_rhs=True,
    out_dtype=out_dtype,
    num_sms=num_sms,
  )
  return dx_RD


def up_weight_gradients(
  x_XD: jax.Array,
  dpre: tuple[jax.Array, ...],
  layout: GroupLayout,
  *,
  index_R: jax.Array | None = None,
  out_dtype=None,
  precision=None,
  num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
  """As `xla.up_weight_gradients`, both products from one read of x."""
  del precision
  out_dtype = jnp.dtype(out_dtype or jnp.float32)
  kind = "weights_pair" if len(dpre) == 2 else "weights"
  x, index_R = _split_gather(x_XD, index_R, "weights_lhs" in FUSED_GATHERS)
  widths, gathered = (x.shape[1], dpre[0].shape[1]), index_R is not None
  tiling = tiles.choose(kind, *widths, out_dtype.itemsize, gathered=gathered)
  return weights_product(
    x, dpre, layout, tiling, lhs_index_R=index_R, out_dtype=out_dtype, num_sms=num_sms
  )
