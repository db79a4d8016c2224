"""The skeleton of kernels that multiply: a persistent, warp-specialised loop over output tiles.

A tile has three phases. The *producer*, one warpgroup, copies operand blocks into a ring of
shared-memory stages (by TMA; gathered rows by `gather`). Two *consumer* warpgroups multiply the
blocks (wgmma). Their *epilogue* makes the tile's result of the accumulators and stores it. The ring
runs on from tile to tile, so the producer fetches the next tile while the consumers are still in
the epilogue of this one.

Two ways to share the work:
  * cooperative: both consumers work on one tile, half of its rows each;
  * ping-pong: each consumer has its own tile, and one multiplies while the other finishes. A stage
    is consumed by one of them only, so each has its own "full" barriers, whose phases follow the
    tiles that this consumer sees.

Two CTAs can form a pair (a thread block cluster) that works on neighbouring tiles at the same pace.
Each loads half of an operand block that both need, and TMA writes that half to both: less traffic
from the L2 cache. A stage is then free only once the consumers of both CTAs have left it. Both CTAs
walk the same number of steps, and each waits for all of its stages to be free before it ends, so
neither ends while the other may still write to it or signal it.
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
PAIR = "pair"  # name of the axis along which a pair's two CTAs are numbered
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232


def can_gather() -> bool:
  """Whether kernels may gather rows by inline PTX: not in the simulation, which cannot run it."""
  return not simulated()


@dataclasses.dataclass(frozen=True)
class Tiling:
  """The shape of an output tile, and how the CTAs of a kernel share and stage the work on tiles.

  Attributes:
    rows: rows of an output tile.
    cols: columns of an output tile, over all of its accumulators.
    depth: contracted elements in one stage.
    stages: stages of the ring.
    pingpong: whether each consumer has its own tile.
    band: row tiles that are walked together, to reuse operands in the L2 cache.
    store_buffers: buffers in shared memory that each consumer stores through; in `down_backward`
      the most blocks of 64 rows whose pre-activations a consumer's buffers hold at once. One
      instead of two can leave room for another stage.
    pair: "": CTAs work alone. "rows": two CTAs work on neighbouring row tiles of one column tile
      (for an odd number see `tile_order`) and share the columns' operand (rhs), unless their groups
      differ. "cols": two CTAs work on neighbouring column tiles of one row tile and share the rows'
      operand (lhs).
  """

  rows: int = 128
  cols: int = 256
  depth: int = 64
  stages: int = 4
  pingpong: bool = False
  band: int = 16
  store_buffers: int = 2
  pair: Literal["", "rows", "cols"] = ""

  @property
  def consumer_rows(self) -> int:
    """Rows of a tile that one consumer multiplies: all of them in ping-pong, else half."""
    return self.rows if self.pingpong else self.rows // CONSUMERS

  @property
  def cluster(self) -> int:
    """CTAs that work on neighbouring tiles at the same pace: 2 in a pair, else 1."""
    return 2 if self.pair else 1


def swizzled(minor: int, dtype) -> tuple[Any, ...]:
  """Shared-memory layout that wgmma and TMA agree on, for blocks with this minor dimension."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(8 * itemsize * minor)  # takes bits, returns bytes
  return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def tiled_smem(shape: Sequence[int], dtype) -> Any:
  """Declares a buffer in shared memory, in the layout that wgmma and TMA agree on."""
  return plgpu.SMEM(tuple(shape), dtype, transforms=swizzled(shape[-1], dtype))


@dataclasses.dataclass(frozen=True)
class Work:
  """A kernel's number of tiles, its accumulators, and what `run_tiles` calls for each tile.

  Attributes:
    num_tiles: how many tiles there are; a pair of CTAs takes two at a time, counted as one.
    locate: tile number -> coordinates, any tree of traced scalars.
    steps: coordinates -> how many stages the tile contracts (may be traced, may be zero).
    producer: (coordinates, step, stage, barrier) -> None; starts the copies of one stage.
    consumer: (accumulators, stage, rows) -> None; starts the products of one stage.
    accumulators: shapes of the accumulators of one consumer.
    epilogue: (coordinates, accumulators, consumer, first row of the consumer) -> None.
    prologue: (coordinates, consumer, first row) -> None, before a consumer's first product of a
      tile; for what the epilogue will read.
    ready: (stage, parity) -> None, waits for copies that the "full" barriers do not count; not
      together with `scales`.
    scales: (coordinates, step, first row of the consumer) -> for each accumulator a number for each
      row. If given, each stage's products have accumulators of their own; they are multiplied by
      the scales and added up, and the epilogue is given these sums.
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
  """The "full" and "empty" barriers of the ring's stages; `copies` TMA copies fill a stage."""
  sets = CONSUMERS if tiling.pingpong else 1
  full = plgpu.Barrier(num_arrivals=copies, num_barriers=sets * tiling.stages)
  releases = 1 if tiling.pingpong else CONSUMERS  # arrivals of each CTA that free a stage
  if tiling.pair:
    empty: Any = plgpu.ClusterBarrier(
      collective_axes=(PAIR,), num_arrivals=releases, num_barriers=tiling.stages
    )
  else:
    empty = plgpu.Barrier(num_arrivals=releases, num_barriers=tiling.stages)
  return full, empty


def copy_block(source: Any, target: Any, barrier: Any, shared: Any = False) -> None:
  """Starts copying a block to a stage of this CTA, or half of a shared block to both CTAs' stages.

  Args:
    source: GMEM ref.
    target: SMEM ref.
    barrier: counts the bytes that arrive in this CTA's stage, whichever CTA loads them.
    shared: whether both CTAs of the pair need this block, and both call this function for it; may
      be traced. None: no.
  """
  if not isinstance(shared, jax.Array):
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=PAIR if shared else None)
    return
  for value in (True, False):
    pl.when(shared == value)(functools.partial(copy_block, source, target, barrier, value))


def run_tiles(tiling: Tiling, work: Work, full: Any, empty: Any, num_sms: int) -> None:
  """The body of a CTA: its share of the tiles, by its three warpgroups.

  Args:
    tiling: the launch's tile shape.
    work: what is done for each tile.
    full, empty: the ring's barriers, as `barriers` declares them.
    num_sms: as for `launch`.
  """
  cta = _Cta(tiling, work, full, empty, num_sms)
  pl.when(cta.warpgroup < CONSUMERS)(lambda: _Consumer(cta).run())
  pl.when(cta.warpgroup == CONSUMERS)(lambda: _Producer(cta).run())


class _Cta:
  """The state and the methods that a CTA's producer and consumers share.

  A worker is a CTA or a pair of CTAs. A CTA counts its own tiles from 0 on: with 132 workers, tiles
  0, 1 and 2 of worker 5 are tiles 5, 137 and 269 of all.

  Attributes:
    tiling, work, full, empty: as for `run_tiles`.
    warpgroup: of this thread; the first two are consumers, the last one is the producer.
    worker, workers: number of the CTA's worker, and how many workers there are.
    my_tiles: how many tiles the CTA has.
  """

  def __init__(self, tiling: Tiling, work: Work, full: Any, empty: Any, num_sms: int):
    self.tiling, self.work, self.full, self.empty = tiling, work, full, empty
    self.warpgroup = lax.axis_index("wg")
    self.worker, self.workers = lax.axis_index("worker"), num_workers(tiling, num_sms)
    self.my_tiles = lax.div(
      work.num_tiles - self.worker + (self.workers - 1), jnp.int32(self.workers)
    )

  def full_barrier(self, stage: Any, consumer: Any) -> Any:
    """The barrier that says that a stage is full, as this consumer sees it."""
    if self.tiling.pingpong:
      return self.full.at[stage + consumer * self.tiling.stages]
    return self.full.at[stage]

  def locate(self, i: Any) -> Any:
    """The coordinates of this CTA's tile i."""
    return self.work.locate(self.worker + i * self.workers)

  def locate_clipped(self, i: Any) -> Any:
    """The coordinates of this CTA's tile i, or of the last of all tiles if i is past the end.

    The producer, and in ping-pong the consumers too, locate a tile past the end, and tile 0 even
    where there is none. A clipped number keeps what they read for it inside the arrays.
    """
    tile = self.worker + i * self.workers
    return self.work.locate(jnp.clip(tile, 0, jnp.maximum(self.work.num_tiles - 1, 0)))


class _Producer:
  """The warpgroup that starts the copies."""

  def __init__(self, cta: _Cta):
    self.cta = cta

  def run(self) -> None:
    """Fills stage after stage, tile after tile, and waits until all stages are free again."""
    cta = self.cta
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
    begin = jnp.int32(0), jnp.int32(0), cta.locate_clipped(0)
    _, done, _ = lax.fori_loop(0, cta.my_tiles, self.one_tile, begin)
    self.drain(done)

  def one_tile(self, i: Any, carry: Any) -> Any:
    """Starts all copies of a tile. The carry: next stage, stages filled so far, coordinates."""
    *carry, where = carry
    # The next tile is located now: that may take divisions and reads of global memory, for whose
    # results this tile does not wait.
    upcoming = self.cta.locate_clipped(i + 1)
    consumer = lax.rem(i, jnp.int32(CONSUMERS))
    step = functools.partial(self.one_step, where, consumer)
    return *lax.fori_loop(0, self.cta.work.steps(where), step, tuple(carry)), upcoming

  def one_step(self, where: Any, consumer: Any, step: Any, carry: Any) -> Any:
    """Starts the copies of one stage, as soon as the stage is free."""
    cta, (stage, done) = self.cta, carry

    @pl.when(done >= cta.tiling.stages)
    def _wait_until_free():
      plgpu.barrier_wait(cta.empty.at[stage])

    cta.work.producer(where, step, stage, cta.full_barrier(stage, consumer))
    return _wrap(stage + 1, cta.tiling.stages), done + 1

  def drain(self, done: Any) -> None:
    """Waits for the last releases, so that no consumer signals a CTA that has ended.

    `one_step` waits for a release only before it fills a stage again. So the last release of every
    stage that was used has not been waited for.
    """

    def one_stage(stage, _):
      plgpu.barrier_wait(self.cta.empty.at[stage])

    lax.fori_loop(0, jnp.minimum(done, self.cta.tiling.stages), one_stage, None)


class _Consumer:
  """A warpgroup that multiplies.

  A *turn* counts the stages that it has used, or skipped in ping-pong, modulo two rounds of the
  ring. The parity of a round is the phase that `Work.ready` waits for: with 4 stages, turn 6 is
  stage 2 in a round of parity 1.
  """

  def __init__(self, cta: _Cta):
    self.cta = cta

  def run(self) -> None:
    """Runs all tiles of this consumer: the CTA's tiles, or in ping-pong every other one."""
    cta, tiling = self.cta, self.cta.tiling
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    self.first_row = 0 if tiling.pingpong else cta.warpgroup * tiling.consumer_rows
    whole = slice(None)
    self.my_rows = whole if tiling.pingpong else pl.ds(self.first_row, tiling.consumer_rows)
    if tiling.pingpong:
      first_turn = jnp.where(cta.warpgroup == 0, 0, self.as_turn(self.steps_of(0)))
      my_pairs = lax.div(cta.my_tiles + (CONSUMERS - 1) - cta.warpgroup, jnp.int32(CONSUMERS))
      lax.fori_loop(0, my_pairs, self.one_pair, first_turn)
    else:
      lax.fori_loop(0, cta.my_tiles, self.one_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def one_pair(self, j: Any, turn: Any) -> Any:
    """Runs this consumer's tile of the CTA's tiles 2j and 2j + 1; then skips the next tile.

    It skips the stages of the next tile, which the other consumer runs: consumer 0 runs tile 2j and
    skips 2j + 1, and consumer 1 runs 2j + 1 and skips 2j + 2.
    """
    i = CONSUMERS * j + self.cta.warpgroup
    return self.as_turn(self.one_tile(i, turn) + self.steps_of(i + 1))

  def steps_of(self, i: Any) -> Any:
    """Steps of the CTA's tile i; past the end, those of the last of all tiles."""
    return self.cta.work.steps(self.cta.locate_clipped(i))

  def as_turn(self, used: Any) -> Any:
    """The turn once `used` stages have been used or skipped."""
    return lax.rem(used, jnp.int32(2 * self.cta.tiling.stages))

  def stage_of(self, turn: Any) -> Any:
    """The stage that this turn uses: `turn` modulo the number of stages."""
    stages = self.cta.tiling.stages
    return jnp.where(turn >= stages, turn - stages, turn)

  def one_tile(self, i: Any, first_turn: Any) -> Any:
    """Runs prologue, products and epilogue of a tile; returns the turn after it."""
    cta, work = self.cta, self.cta.work
    where = cta.locate(i)
    steps = work.steps(where)
    if work.prologue is not None:
      work.prologue(where, cta.warpgroup, self.first_row)
    if work.scales is None:
      self.multiply(where, steps, first_turn)
    else:
      self.multiply_scaled(where, steps, first_turn)
    return self.as_turn(first_turn + steps)

  def multiply(self, where: Any, steps: Any, first_turn: Any) -> None:
    """Adds up all products of a tile in accumulators, and runs its epilogue."""
    cta, work = self.cta, self.cta.work

    def with_accumulators(*accumulators):
      step = functools.partial(self.one_step, accumulators)
      stage = self.stage_of(lax.fori_loop(0, steps, step, first_turn))
      plgpu.wgmma_wait(0)
      pl.when(steps > 0)(functools.partial(self.release_before, stage))
      work.epilogue(where, accumulators, cta.warpgroup, self.first_row)

    pl.run_scoped(with_accumulators, *self.accumulators())

  def one_step(self, accumulators: Any, step: Any, turn: Any) -> Any:
    """Starts the products of a stage, and releases the stage of the step before, if any."""
    cta, stage = self.cta, self.stage_of(turn)
    plgpu.barrier_wait(cta.full_barrier(stage, cta.warpgroup))
    if cta.work.ready is not None:
      cta.work.ready(stage, jnp.where(turn >= cta.tiling.stages, 1, 0))
    cta.work.consumer(accumulators, stage, self.my_rows)
    # After this wait only the newest product may still run, and it reads this stage. So the stage
    # before this one is free.
    plgpu.wgmma_wait(1)
    pl.when(step > 0)(functools.partial(self.release_before, stage))
    return _wrap(turn + 1, 2 * cta.tiling.stages)

  def release_before(self, stage: Any) -> None:
    """Tells the producer, or both producers of a pair, that the stage before this one is free."""
    last = self.cta.tiling.stages - 1
    plgpu.barrier_arrive(self.cta.empty.at[jnp.where(stage == 0, last, stage - 1)])

  def multiply_scaled(self, where: Any, steps: Any, first_turn: Any) -> None:
    """Does `multiply`, but scales each stage's products before it adds them up."""
    work = self.cta.work
    zeros = tuple(
      plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
      for shape in work.accumulators
    )
    step = functools.partial(self.one_scaled_step, where)
    _, sums = lax.fori_loop(0, steps, step, (first_turn, zeros))
    work.epilogue(where, sums, self.cta.warpgroup, self.first_row)

  def one_scaled_step(self, where: Any, step: Any, carry: Any) -> Any:
    """Adds a stage's products times their scales to the sums, and frees the stage."""
    cta, (turn, sums) = self.cta, carry
    assert cta.work.scales is not None
    stage = self.stage_of(turn)
    scales = cta.work.scales(where, step, self.first_row)  # loaded before the wait, not after
    plgpu.barrier_wait(cta.full_barrier(stage, cta.warpgroup))

    def multiplied(*accumulators):
      cta.work.consumer(accumulators, stage, self.my_rows)
      plgpu.wgmma_wait(0)
      return tuple(acc[...] for acc in accumulators)

    products = pl.run_scoped(multiplied, *self.accumulators())
    plgpu.barrier_arrive(cta.empty.at[stage])
    per_row = (lax.broadcast_in_dim(s, p.shape, (0,)) for s, p in zip(scales, products))
    sums = tuple(total + p * s for total, p, s in zip(sums, products, per_row))
    return _wrap(turn + 1, 2 * cta.tiling.stages), sums

  def accumulators(self) -> list[Any]:
    """Declares the registers in which one consumer's products are added up."""
    return [plgpu.ACC(shape, jnp.float32) for shape in self.cta.work.accumulators]


def _wrap(turn: Any, limit: int) -> Any:
  """`turn`, which counts turns or stages, or 0 if it has reached the limit."""
  return jnp.where(turn == limit, 0, turn)


def num_workers(tiling: Tiling, num_sms: int) -> int:
  """How many CTAs, or pairs of CTAs, share the tiles; at least one."""
  return max(1, num_sms // tiling.cluster)


def launch(body, operands: Any, out_type: Any, tiling: Tiling, num_sms: int):
  """Builds the kernel that runs a body on this skeleton's grid and warpgroups.

  Args:
    body: (operands, outs) -> None, with references in the places of the arrays.
    operands: tree of arrays; None for an operand that is absent.
    out_type: tree of `jax.ShapeDtypeStruct`.
    tiling: the launch's tile shape.
    num_sms: CTAs of the launch. Where `tiling` pairs them, the largest even number that is no
      larger, but at least 2 (`num_workers`).

  Returns:
    A function of the operands' leaves that gives the outs' leaves.
  """
  arrays, tree = jax.tree.flatten(operands)
  outs, out_tree = jax.tree.flatten(out_type)

  def flat(*refs):
    body(tree.unflatten(refs[: len(arrays)]), out_tree.unflatten(refs[len(arrays) :]))

  options: dict[str, Any] = {}
  if tiling.pair:
    options |= {"cluster": (tiling.cluster,), "cluster_names": (PAIR,)}
  return compiled(
    flat,
    out_type=outs,
    grid=(num_workers(tiling, num_sms),),
    grid_names=("worker",),
    num_threads=CONSUMERS + 1,
    thread_name="wg",
    **options,
  )
