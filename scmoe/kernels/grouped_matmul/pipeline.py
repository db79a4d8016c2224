"""The skeleton of every kernel here: a persistent, warp-specialised loop over output tiles.

Three phases. The *producer*, one warpgroup, copies operand blocks into a ring of shared-memory
stages (TMA). Two *consumer* warpgroups multiply them (wgmma). Their *epilogue* makes the tile's
result of the accumulators and stores it. The ring runs on from tile to tile, so the producer
fetches the next tile while the consumers are still in the epilogue of this one.

Two ways to share the work:
  * cooperative: both consumers work on one tile, half of its rows each;
  * ping-pong: each consumer has its own tile, and one multiplies while the other finishes. A stage
    is consumed by one of them only, so each has its own "full" barriers, whose phases follow the
    tiles that this consumer sees.

Two CTAs can form a pair (a thread block cluster) that works on neighbouring tiles at the same pace.
Each loads half of the operand block that both need, and TMA writes it to both: less traffic from
the L2 cache. A stage is then free only once the consumers of both CTAs have left it. Both walk the
same number of steps, and each waits for all of its stages to be free before it ends, so neither
ends while the other may still write to it or signal it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.launch import compiled, simulated

CONSUMERS = 2
_GRANULE = 64  # all widths are multiples of it
_PAIR = "pair"  # name of the axis of a pair's CTAs
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232


def can_gather() -> bool:
  """Whether kernels may gather by inline code, which interpret mode cannot run."""
  return not simulated()


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Shape of the work of one CTA.

  Attributes:
    rows: rows of an output tile.
    cols: columns of an output tile, over all of its accumulators.
    depth: contracted elements in one stage.
    stages: stages of the ring.
    pingpong: whether each consumer has its own tile.
    band: row tiles that are walked together, to reuse operands in the L2 cache.
    stores: shared-memory buffers of each consumer's stores; one instead of two can leave room for
      another stage.
    pair: whether two CTAs share an operand block, and how their tiles neighbour: two "rows" of
      tiles share the columns' operand (rhs), two "cols" the rows' operand (lhs).
  """

  rows: int = 128
  cols: int = 256
  depth: int = 64
  stages: int = 4
  pingpong: bool = False
  band: int = 16
  stores: int = 2
  pair: Literal["", "rows", "cols"] = ""

  @property
  def consumer_rows(self) -> int:
    """Rows one consumer multiplies."""
    return self.rows if self.pingpong else self.rows // CONSUMERS

  @property
  def cluster(self) -> int:
    """CTAs that work on neighbouring tiles at the same pace."""
    return 2 if self.pair else 1


def swizzled(minor: int, dtype) -> tuple[Any, ...]:
  """Shared-memory layout that wgmma and TMA agree on, for blocks with this minor dimension."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(8 * itemsize * minor)  # takes bits, returns bytes
  return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def smem(shape: Sequence[int], dtype) -> Any:
  """A swizzled shared-memory buffer."""
  return plgpu.SMEM(tuple(shape), dtype, transforms=swizzled(shape[-1], dtype))


@dataclasses.dataclass(frozen=True)
class Work:
  """The work of `run_tiles` for each tile.

  Attributes:
    num_tiles: how many tiles there are; a pair of CTAs takes two at a time, counted as one.
    locate: tile number -> coordinates, any tree of traced scalars.
    steps: coordinates -> K steps of the tile (may be traced, may be zero).
    producer: (coordinates, step, stage, barrier) -> None; starts the copies of one stage.
    consumer: (accumulators, stage, rows) -> None; starts the products of one stage.
    accumulators: shapes of the accumulators of one consumer.
    epilogue: (coordinates, accumulators, consumer, first row of the consumer) -> None.
    prologue: (coordinates, consumer, first row) -> None, before a consumer's first product of a
      tile; for what the epilogue will read.
    ready: (stage, parity) -> None, waits for what the barriers here do not count.
    scales: (coordinates, step, first row of the consumer) -> for each accumulator a number for each
      row. If given, each stage's products have accumulators of their own, and the epilogue is given
      the sums of the products times these.
  """

  num_tiles: Any
  locate: Callable[[Any], Any]
  steps: Callable[[Any], Any]
  producer: Callable[[Any, Any, Any, Any], None]
  consumer: Callable[[Sequence[Any], Any, Any], None]
  accumulators: Sequence[tuple[int, int]]
  epilogue: Callable[[Any, Sequence[Any], Any, Any], None]
  prologue: Callable[[Any, Any, Any], None] | None = None
  ready: Callable[[Any, Any], None] | None = None
  scales: Callable[[Any, Any, Any], tuple[Any, ...]] | None = None


def barriers(tiling: Tiling, copies: int) -> tuple[Any, Any]:
  """The "full" and "empty" barriers of the ring."""
  sets = CONSUMERS if tiling.pingpong else 1
  full = plgpu.Barrier(num_arrivals=copies, num_barriers=sets * tiling.stages)
  releases = 1 if tiling.pingpong else CONSUMERS  # by each CTA
  if tiling.pair:
    empty: Any = plgpu.ClusterBarrier(
      collective_axes=(_PAIR,), num_arrivals=releases, num_barriers=tiling.stages
    )
  else:
    empty = plgpu.Barrier(num_arrivals=releases, num_barriers=tiling.stages)
  return full, empty


def copy_block(source: Any, target: Any, barrier: Any, shared: Any = False) -> None:
  """Starts copying a block to a stage of this CTA.

  Args:
    source: GMEM ref.
    target: SMEM ref.
    barrier: counts the bytes that arrive here, whoever loads them.
    shared: whether both CTAs of the pair need this block and call this for it; may be traced. None:
      no.
  """
  if not isinstance(shared, jax.Array):
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=_PAIR if shared else None)
    return
  for value in (True, False):
    pl.when(shared == value)(functools.partial(copy_block, source, target, barrier, value))


def _wrap(turn: Any, limit: int) -> Any:
  return jnp.where(turn == limit, 0, turn)


def run_tiles(tiling: Tiling, work: Work, full: Any, empty: Any, num_sms: int) -> None:
  """The body of a CTA: its share of the tiles, by its three warpgroups."""
  stages = tiling.stages
  warpgroup = lax.axis_index("wg")
  worker, workers = lax.axis_index("worker"), num_workers(tiling, num_sms)
  my_tiles = lax.div(work.num_tiles - worker + (workers - 1), jnp.int32(workers))

  def full_barrier(stage, consumer):
    return full.at[stage + consumer * stages] if tiling.pingpong else full.at[stage]

  def stage_of(turn):
    # Consumers count two rounds of the ring: the round's parity is the phase of its barriers.
    return jnp.where(turn >= stages, turn - stages, turn)

  def locate(i):
    # A tile past the end is located too, and so is tile 0 where there are none: clipping keeps
    # what is read for them inside the arrays.
    return work.locate(jnp.clip(worker + i * workers, 0, jnp.maximum(work.num_tiles - 1, 0)))

  @pl.when(warpgroup < CONSUMERS)
  def _consumers():
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    first_row = 0 if tiling.pingpong else warpgroup * tiling.consumer_rows
    my_rows = slice(None) if tiling.pingpong else pl.ds(first_row, tiling.consumer_rows)

    def one_tile(i, first_turn):
      where = work.locate(worker + i * workers)
      steps = work.steps(where)
      if work.prologue is not None:
        work.prologue(where, warpgroup, first_row)

      def with_accumulators(*accumulators):
        def k_step(step, turn):
          stage = stage_of(turn)
          plgpu.barrier_wait(full_barrier(stage, warpgroup))
          if work.ready is not None:
            work.ready(stage, jnp.where(turn >= stages, 1, 0))
          work.consumer(accumulators, stage, my_rows)
          # All but the newest product are done, so the stage before this one is free.
          plgpu.wgmma_wait(1)

          @pl.when(step > 0)
          def _release():
            plgpu.barrier_arrive(empty.at[jnp.where(stage == 0, stages - 1, stage - 1)])

          return _wrap(turn + 1, 2 * stages)

        stage = stage_of(lax.fori_loop(0, steps, k_step, first_turn))
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _release_last():
          plgpu.barrier_arrive(empty.at[jnp.where(stage == 0, stages - 1, stage - 1)])

        work.epilogue(where, accumulators, warpgroup, first_row)

      accumulators = [plgpu.ACC(shape, jnp.float32) for shape in work.accumulators]

      def scaled_step(step, carry):
        turn, sums = carry
        stage = stage_of(turn)
        scales = work.scales(where, step, first_row)  # pyright: ignore  (read while it waits)
        plgpu.barrier_wait(full_barrier(stage, warpgroup))

        def multiplied(*accumulators):
          work.consumer(accumulators, stage, my_rows)
          plgpu.wgmma_wait(0)
          return tuple(acc[...] for acc in accumulators)

        products = pl.run_scoped(multiplied, *accumulators)
        plgpu.barrier_arrive(empty.at[stage])
        spread = (lax.broadcast_in_dim(s, p.shape, (0,)) for s, p in zip(scales, products))
        sums = tuple(total + p * s for total, p, s in zip(sums, products, spread))
        return _wrap(turn + 1, 2 * stages), sums

      if work.scales is None:
        pl.run_scoped(with_accumulators, *accumulators)
      else:
        nothing = tuple(
          plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
          for shape in work.accumulators
        )
        _, sums = lax.fori_loop(0, steps, scaled_step, (first_turn, nothing))
        work.epilogue(where, sums, warpgroup, first_row)
      return lax.rem(first_turn + steps, jnp.int32(2 * stages))

    def steps_of(i):
      return work.steps(locate(i))  # tiles alternate: with i + 1 the other consumer's

    if tiling.pingpong:

      def one_pair(j, turn):
        i = CONSUMERS * j + warpgroup
        return lax.rem(one_tile(i, turn) + steps_of(i + 1), jnp.int32(2 * stages))

      first_turn = jnp.where(warpgroup == 0, 0, lax.rem(steps_of(0), jnp.int32(2 * stages)))
      my_pairs = lax.div(my_tiles + (CONSUMERS - 1) - warpgroup, jnp.int32(CONSUMERS))
      lax.fori_loop(0, my_pairs, one_pair, first_turn)
    else:
      lax.fori_loop(0, my_tiles, one_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  @pl.when(warpgroup == CONSUMERS)
  def _producer():
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

    def one_tile(i, carry):
      *carry, where = carry
      # Located one tile ahead: that takes divisions and a read of global memory, whose result this
      # tile does not wait for.
      upcoming = locate(i + 1)
      consumer = lax.rem(i, jnp.int32(CONSUMERS))

      def k_step(step, carry):
        stage, done = carry

        @pl.when(done >= stages)
        def _wait_until_free():
          plgpu.barrier_wait(empty.at[stage])

        work.producer(where, step, stage, full_barrier(stage, consumer))
        return _wrap(stage + 1, stages), done + 1

      return *lax.fori_loop(0, work.steps(where), k_step, tuple(carry)), upcoming

    begin = jnp.int32(0), jnp.int32(0), locate(0)
    _, done, _ = lax.fori_loop(0, my_tiles, one_tile, begin)

    # Consumers release every stage that was used once more than the producer has waited for it:
    # here it waits for the last releases.
    def drain(stage, _):
      plgpu.barrier_wait(empty.at[stage])

    lax.fori_loop(0, jnp.minimum(done, stages), drain, None)


def num_workers(tiling: Tiling, num_sms: int) -> int:
  """How many CTAs or pairs of CTAs share the tiles; one pair at least."""
  return max(1, num_sms // tiling.cluster)


def launch(body, operands: Any, out_type: Any, tiling: Tiling, num_sms: int):
  """The kernel of a body on this skeleton's grid and warpgroups: to be called with the operands.

  Args:
    body: (operands, outs) -> None, with refs in the places of the arrays.
    operands: tree of arrays; None stands for what there is not.
    out_type: tree of `jax.ShapeDtypeStruct`.
    tiling, num_sms: of the launch.

  Returns:
    A function of the operands' leaves that gives the outs' leaves.
  """
  arrays, tree = jax.tree.flatten(operands)
  outs, out_tree = jax.tree.flatten(out_type)

  def flat(*refs):
    body(tree.unflatten(refs[: len(arrays)]), out_tree.unflatten(refs[len(arrays) :]))

  options: dict[str, Any] = {}
  if tiling.pair:
    options |= {"cluster": (tiling.cluster,), "cluster_names": (_PAIR,)}
  return compiled(
    flat,
    out_type=outs,
    grid=(num_workers(tiling, num_sms),),
    grid_names=("worker",),
    num_threads=CONSUMERS + 1,
    thread_name="wg",
    **options,
  )


def tiles_over(width: int, size: int, multiple: int = 1) -> int:
  """Tiles of a size that cover a width, up to a multiple of so many; see `first_of`."""
  return -(-width // (size * multiple)) * multiple


def first_of(tile: Any, size: int, width: int) -> Any:
  """The first row or column of a tile.

  What does not divide is covered by tiles that end with the width: the last ones compute a part of
  the one before once more, and store the same numbers.
  """
  if width % size == 0:
    return tile * size
  return pl.multiple_of(jnp.minimum(tile * size, width - size), _GRANULE)


def banded(tile: Any, row_tiles: Any, col_tiles: int, band: int) -> tuple[Any, Any]:
  """Tile number -> (row tile, column tile), walking `band` row tiles for each column tile.

  CTAs that run at the same time then share the columns' operand and a few rows' operand, instead of
  streaming one of the two from memory again for each tile. `row_tiles` may be traced.

  Worked example, three row tiles, two column tiles, bands of two: tiles 0 to 5 are (0, 0), (1, 0),
  (0, 1), (1, 1), (2, 0), (2, 1).
  """
  per_band = band * col_tiles
  first = lax.div(tile, jnp.int32(per_band)) * band
  width = jnp.clip(row_tiles - first, 1, band)  # at least 1, since tile 0 is located even of none
  inside = lax.rem(tile, jnp.int32(per_band))
  return first + lax.rem(inside, width), lax.div(inside, width)


def paired_tiles(tiling: Tiling, row_tiles: Any, col_tiles: int) -> Any:
  """How many tiles, or pairs of tiles, there are. `row_tiles` may be traced."""
  if tiling.pair == "rows":
    return lax.div(row_tiles + 1, jnp.int32(2)) * col_tiles
  if tiling.pair == "cols":
    assert col_tiles % 2 == 0, (tiling, col_tiles)
    return row_tiles * (col_tiles // 2)
  return row_tiles * col_tiles


def paired(tile: Any, tiling: Tiling, row_tiles: Any, col_tiles: int) -> tuple[Any, Any, Any]:
  """As `banded`, for a number of a tile or pair: this CTA's row and column tile, and the other row.

  The last of an odd number of row tiles is computed, and stored, by both CTAs of its pair.
  """
  if tiling.pair == "rows":
    band = max(tiling.band // 2, 1)
    pair, col_tile = banded(tile, lax.div(row_tiles + 1, jnp.int32(2)), col_tiles, band)
    rank = lax.axis_index(_PAIR)
    end = jnp.maximum(row_tiles - 1, 0)
    row_tile, other = (jnp.minimum(2 * pair + r, end) for r in (rank, 1 - rank))
    return row_tile, col_tile, other
  if tiling.pair == "cols":
    row_tile, pair = banded(tile, row_tiles, col_tiles // 2, tiling.band)
    return row_tile, 2 * pair + lax.axis_index(_PAIR), row_tile
  row_tile, col_tile = banded(tile, row_tiles, col_tiles, tiling.band)
  return row_tile, col_tile, row_tile


def locate_rows(
  tile: Any, tiling: Tiling, group_gmem: Any, row_tiles: Any, col_tiles: int, halves: int = 1
) -> tuple[Any, Any, Any, Any]:
  """Tile or pair number -> row tile, column tile, its group, and whether its pair shares rhs.

  The last is None where the tiling has no such pairs, or they always share it.

  Args:
    halves: row tiles (`tiling.rows`) in a tile of the layout, whose group `group_gmem` tells.
  """
  row_tile, col_tile, other = paired(tile, tiling, row_tiles, col_tiles)
  if halves > 1:
    return row_tile, col_tile, group_gmem[lax.div(row_tile, jnp.int32(halves))], None
  group = group_gmem[row_tile]
  # The two row tiles of a pair may lie on both sides of a group's end.
  shared = group == group_gmem[other] if tiling.pair == "rows" else None
  return row_tile, col_tile, group, shared


def snake(tile: Any, num_tiles: int, workers: int) -> Any:
  """Tile number -> tile number, every other full wave of `workers` tiles backwards.

  Where tiles are in order of their work, the CTA with the longest tile of a wave then has the
  shortest of the next. Eight tiles and three workers: 0 1 2, 5 4 3, 6 7.
  """
  wave, place = lax.div(tile, jnp.int32(workers)), lax.rem(tile, jnp.int32(workers))
  backwards = (lax.rem(wave, jnp.int32(2)) == 1) & ((wave + 1) * workers <= num_tiles)
  return jnp.where(backwards, wave * workers + (workers - 1 - place), tile)
