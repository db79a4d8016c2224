"""The skeleton of every kernel here: a persistent, warp-specialised loop over output tiles.

One producer warpgroup copies operand blocks into a ring of shared-memory stages (TMA); two consumer
warpgroups multiply them (wgmma) and finish the tile. The ring runs on from tile to tile, so the
producer fetches the next tile while the consumers are still finishing this one.

Two ways to share the work:
  * cooperative: both consumers work on one tile, half of its rows each;
  * ping-pong: each consumer has its own tile, and one multiplies while the other finishes. A stage
    is consumed by one of them only, so each has its own "full" barriers, whose phases follow the
    tiles that this consumer sees.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)
_default_sms: contextvars.ContextVar[int] = contextvars.ContextVar("default_sms", default=132)


@contextlib.contextmanager
def interpreted(params: Any, num_sms: int = 2) -> Iterator[None]:
  """Traces kernels for GPU interpret mode (on a CPU) inside this context; for tests."""
  tokens = _interpret.set(params), _default_sms.set(num_sms)
  try:
    yield
  finally:
    _interpret.reset(tokens[0])
    _default_sms.reset(tokens[1])


def can_gather() -> bool:
  """Whether kernels may gather by inline code, which interpret mode cannot run."""
  return _interpret.get() is None


def resolve_num_sms(num_sms: int | None) -> int:
  """The number of CTAs to launch: what was asked for, else every multiprocessor of the GPU."""
  if num_sms is not None:
    return num_sms
  if _interpret.get() is not None:
    return _default_sms.get()
  device = jax.devices()[0]
  return getattr(device, "core_count", None) or 132 if device.platform == "gpu" else 132


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
  """

  rows: int = 128
  cols: int = 256
  depth: int = 64
  stages: int = 4
  pingpong: bool = False
  band: int = 16

  @property
  def consumer_rows(self) -> int:
    """Rows one consumer multiplies."""
    return self.rows if self.pingpong else self.rows // CONSUMERS


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
  """What `run_tiles` does for each tile.

  Attributes:
    num_tiles: how many tiles there are.
    locate: tile number -> coordinates, any tree of scalars.
    steps: coordinates -> K steps of the tile (may be traced, may be zero).
    load: (coordinates, step, slot, barrier) -> None; starts the copies of one stage.
    copies: how many copies `load` starts.
    multiply: (accumulators, slot, rows) -> None; starts the products of one stage.
    accumulators: shapes of the accumulators of one consumer.
    finish: (coordinates, accumulators, consumer, first row of the consumer) -> None.
    prepare: (coordinates, consumer, first row) -> None, before the products; for prefetches.
    ready: (slot, parity) -> None, waits for what the barriers here do not count.
  """

  num_tiles: Any
  locate: Callable[[Any], Any]
  steps: Callable[[Any], Any]
  load: Callable[[Any, Any, Any, Any], None]
  multiply: Callable[[Sequence[Any], Any, Any], None]
  accumulators: Sequence[tuple[int, int]]
  finish: Callable[[Any, Sequence[Any], Any, Any], None]
  prepare: Callable[[Any, Any, Any], None] | None = None
  ready: Callable[[Any, Any], None] | None = None


def barriers(tiling: Tiling, copies: int) -> tuple[Any, Any]:
  """The "full" and "empty" barriers of the ring."""
  sets = CONSUMERS if tiling.pingpong else 1
  full = plgpu.Barrier(num_arrivals=copies, num_barriers=sets * tiling.stages)
  empty = plgpu.Barrier(
    num_arrivals=1 if tiling.pingpong else CONSUMERS, num_barriers=tiling.stages
  )
  return full, empty


def _wrap(turn: Any, limit: int) -> Any:
  return jnp.where(turn == limit, 0, turn)


def run_tiles(tiling: Tiling, work: Work, full: Any, empty: Any, num_sms: int) -> None:
  """The body of a CTA: its share of the tiles, by its three warpgroups."""
  stages = tiling.stages
  warpgroup = lax.axis_index("wg")
  sm = lax.axis_index("sm")
  my_tiles = lax.div(work.num_tiles - sm + (num_sms - 1), jnp.int32(num_sms))

  def full_barrier(slot, consumer):
    return full.at[slot + consumer * stages] if tiling.pingpong else full.at[slot]

  def slot_of(turn):
    # Consumers count two rounds of the ring: the round's parity is the phase of its barriers.
    return jnp.where(turn >= stages, turn - stages, turn)

  @pl.when(warpgroup < CONSUMERS)
  def _consume():
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    first_row = 0 if tiling.pingpong else warpgroup * tiling.consumer_rows
    my_rows = slice(None) if tiling.pingpong else pl.ds(first_row, tiling.consumer_rows)

    def one_tile(i, first_turn):
      where = work.locate(sm + i * num_sms)
      steps = work.steps(where)
      if work.prepare is not None:
        work.prepare(where, warpgroup, first_row)

      def with_accumulators(*accumulators):
        def k_step(step, turn):
          slot = slot_of(turn)
          plgpu.barrier_wait(full_barrier(slot, warpgroup))
          if work.ready is not None:
            work.ready(slot, jnp.where(turn >= stages, 1, 0))
          work.multiply(accumulators, slot, my_rows)
          # All but the newest product are done, so the stage before this one is free.
          plgpu.wgmma_wait(1)

          @pl.when(step > 0)
          def _release():
            plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, stages - 1, slot - 1)])

          return _wrap(turn + 1, 2 * stages)

        slot = slot_of(lax.fori_loop(0, steps, k_step, first_turn))
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _release_last():
          plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, stages - 1, slot - 1)])

        work.finish(where, accumulators, warpgroup, first_row)

      pl.run_scoped(
        with_accumulators, *(plgpu.ACC(shape, jnp.float32) for shape in work.accumulators)
      )
      return lax.rem(first_turn + steps, jnp.int32(2 * stages))

    def steps_of(i):
      # The other consumer's tile may lie past the end; its coordinates must still be readable.
      tile = jnp.minimum(sm + i * num_sms, work.num_tiles - 1)
      return work.steps(work.locate(tile))

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
  def _produce():
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

    def one_tile(i, carry):
      where = work.locate(sm + i * num_sms)
      consumer = lax.rem(i, jnp.int32(CONSUMERS))

      def k_step(step, carry):
        slot, done = carry

        @pl.when(done >= stages)
        def _wait_until_free():
          plgpu.barrier_wait(empty.at[slot])

        work.load(where, step, slot, full_barrier(slot, consumer))
        return _wrap(slot + 1, stages), done + 1

      return lax.fori_loop(0, work.steps(where), k_step, carry)

    _, done = lax.fori_loop(0, my_tiles, one_tile, (jnp.int32(0), jnp.int32(0)))

    # Every stage that was used is released once more than it was waited for.
    def drain(slot, _):
      plgpu.barrier_wait(empty.at[slot])

    lax.fori_loop(0, jnp.minimum(done, stages), drain, None)


def launch(body, out_type, num_sms: int):
  """`plgpu.kernel` with this skeleton's grid and warpgroups."""
  interpret = _interpret.get()
  return plgpu.kernel(
    body,
    out_type=out_type,
    grid=(num_sms,),
    grid_names=("sm",),
    num_threads=CONSUMERS + 1,
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # the default differs by version
      approx_math=True,
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )


def banded(tile: Any, row_tiles: Any, col_tiles: int, band: int) -> tuple[Any, Any]:
  """Tile number -> (row tile, column tile), walking `band` row tiles for each column tile.

  CTAs that run at the same time then share the columns' operand and a few rows' operand, instead of
  streaming one of the two from memory again for each tile. `row_tiles` may be traced.
  """
  per_band = band * col_tiles
  first = lax.div(tile, jnp.int32(per_band)) * band
  width = jnp.minimum(row_tiles - first, band)
  inside = lax.rem(tile, jnp.int32(per_band))
  return first + lax.rem(inside, width), lax.div(inside, width)


def snake(tile: Any, num_tiles: int, num_sms: int) -> Any:
  """Tile number -> tile number, every other full wave of `num_sms` tiles backwards.

  Where tiles are in order of their work, the SM with the longest tile of a wave then has the
  shortest of the next.
  """
  wave, place = lax.div(tile, jnp.int32(num_sms)), lax.rem(tile, jnp.int32(num_sms))
  backwards = (lax.rem(wave, jnp.int32(2)) == 1) & ((wave + 1) * num_sms <= num_tiles)
  return jnp.where(backwards, wave * num_sms + (num_sms - 1 - place), tile)
