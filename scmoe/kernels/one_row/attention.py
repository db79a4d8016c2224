"""Attention of one token a row over the rows' caches, in one kernel.

    R  rows                  H  heads of queries              N  width of a head
    T  length of a cache     K  heads of keys and values, each shared by G = H / K
    P  parts of a cache      B  positions of a block
    M  rows of a matrix instruction, of which G are queries

Scores, softmax and the sum over values are three kernels of XLA's, each of which waits for the one
before. Here a warpgroup takes blocks of the cache's positions and keeps a running softmax (the
online form of Milakov and Gimelshein, arXiv 1805.02867); a CTA's warpgroups are joined in shared
memory, several CTAs of a head by who reads what they found. Both products are matrix instructions,
most of whose rows stay empty: they add up across a warpgroup's warps, which sums of vectors may
not, since all warpgroups of a CTA would do so by way of the same shared memory.

What the projections leave, parts of sums (`linear.sums`), can be finished here too: queries, keys
and values are added up, turned by their position, and the cache gets its new row. XLA takes three
kernels for that, each of a few thousand numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import KERNELS_WRITE_IN_PLACE, load_as
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.pipeline import smem
from scmoe.kernels.one_row.reading import added_up
from scmoe.kernels.running import compiled, interpretation, resolve_num_sms

_BLOCK = 64  # positions that a warpgroup looks at together
_WARPGROUP = 128  # threads
_WARPGROUPS = 2  # of a CTA, for a single row: of many, two CTAs share a multiprocessor
_STAGES = 2  # blocks of a warpgroup that are on their way
_ROWS = 64  # of a matrix instruction
_LOW = -1e30  # the score of what is not seen


@dataclasses.dataclass(frozen=True)
class _Static:
  """What the program depends on beside shapes."""

  scale: float
  window: int
  parts: int
  simulation: Any
  heads: int  # of a row
  rows: int = 1
  turned: bool = False  # of what is finished here: whether it is turned


def cache_length(length: int, dtype: Any, width: int) -> int:
  """The length of a cache of at least so many positions that the kernel takes."""
  if resolve_backend("auto", dtype, width) != "mosaic_gpu":
    return length
  return -(-length // _BLOCK) * _BLOCK


def takes(q_BSHN: Array, k_BTKN: Array, v_BTKM: Array, backend: str = "auto") -> bool:
  """Whether the kernel can compute this attention. It needs one token per row, one 16-bit float
  type for all, heads of width 64 or 128, keys and values of equal shape with a length that is a
  multiple of 64, at most 64 query heads per key head, and the kernels' backend."""
  heads, width = q_BSHN.shape[2:]
  length, kv_heads = k_BTKN.shape[1:3]
  alike = q_BSHN.dtype == k_BTKN.dtype == v_BTKM.dtype and v_BTKM.shape == k_BTKN.shape
  fits = q_BSHN.shape[1] == 1 and width in (64, 128) and length % _BLOCK == 0
  fits = fits and alike and heads // kv_heads <= _ROWS
  # Called last, because it logs its decision.
  return fits and resolve_backend(backend, q_BSHN.dtype, width) == "mosaic_gpu"


def attend_cache(
  q_RHN: Array, k_RTKN: Array, v_RTKN: Array, position_R: Array, *, scale: float, window: int = 0
) -> Array:
  """Σ_t softmax_t(scale · q · k[t]) v[t] over t <= position, [R, H, N] in the type of q, of what
  the kernel `takes`; not differentiable. The softmax is rounded to the type of q before it meets v.

  Args:
    q_RHN: queries of each row's token.
    k_RTKN, v_RTKN: the rows' caches, in the type of the queries. What lies beyond a position does
      not come into the result, if its values are finite: as in XLA's form they are multiplied by 0.
    position_R: int32, of the tokens.
    scale: of the scores.
    window: positions that a token sees, itself included; 0: all.
  """
  rows, length, kv_heads, width = k_RTKN.shape
  parts = _parts(length, rows * kv_heads, _warpgroups(rows) * _STAGES)
  static = _Static(scale, window, parts, interpretation(), q_RHN.shape[1], rows)
  # All rows' heads, and all rows' positions, lie one after the other.
  q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q_RHN, k_RTKN, v_RTKN))
  found = _attend((q,), k, v, position_R, static=static)[0]
  found = found.joined() if isinstance(found, Unjoined) else found
  return found.reshape(rows, -1, width)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unfinished:
  """Queries, keys and values of one token, not added up and not turned.

  Attributes:
    sums_PM: float32, parts of the sums (`linear.sums`) of queries, keys and values, in this order;
      M is (H + 2 K) N.
    turn_2N: float32 [2, N/2], sine and cosine by which pairs (i, i + N/2) of queries and keys are
      turned; None: they are not.
    heads, kv_heads: H and K.
    dtype: of what they will be.
  """

  sums_PM: Array
  turn_2N: Array | None
  heads: int = dataclasses.field(metadata={"static": True})
  kv_heads: int = dataclasses.field(metadata={"static": True})
  dtype: Any = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """N."""
    return self.sums_PM.shape[1] // (self.heads + 2 * self.kv_heads)

  def finished(self) -> tuple[Array, Array, Array]:
    """What the kernel makes of it: queries [H, N], keys and values [K, N]."""
    y_HN = added_up(self.sums_PM).astype(self.dtype).reshape(-1, self.width)
    q_HN, k_KN, v_KN = jnp.split(y_HN, (self.heads, self.heads + self.kv_heads))
    return self._turned(q_HN), self._turned(k_KN), v_KN

  def _turned(self, x_HN: Array) -> Array:
    if self.turn_2N is None:
      return x_HN
    sin, cos = self.turn_2N
    first, second = jnp.split(x_HN.astype(jnp.float32), 2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, -1).astype(x_HN.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unjoined:
  """What each part of a cache says, as `linear.Made`: what follows joins the parts.

  Attributes:
    y_PHN: float32, sums over the part's values, of weights e^(score - most).
    most_PH, weight_PH: float32, each head's largest score of the part, and the sum of its weights.
    dtype: of the result.
  """

  y_PHN: Array
  most_PH: Array
  weight_PH: Array
  dtype: Any = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """H N."""
    return self.y_PHN.shape[1] * self.y_PHN.shape[2]

  @property
  def size(self) -> int:
    """Of one row."""
    return self.width

  @property
  def arrays(self) -> tuple[Array, ...]:
    """All of it."""
    return self.y_PHN, self.most_PH, self.weight_PH

  def takes(self, rows: int, backend: str) -> bool:
    """Whole heads."""
    del backend
    return rows % self.y_PHN.shape[2] == 0

  def write(self, arrays: Any, part: Any, to: Any) -> None:
    """See `linear.Made`."""
    y, most, weight = arrays
    parts, _, width = y.shape
    whole, across = width % _WARPGROUP == 0, plgpu.Layout.WGMMA.reduce(0)
    for i in range(part.size // width):
      head = lax.div(part.start, width) + i
      as_row = lambda of, p, head=head: jnp.broadcast_to(of[p, head], (width,))
      load = lambda p, head=head: y[p, head] if whole else load_as(y.at[p, head], across)
      most_N = functools.reduce(jnp.maximum, [as_row(most, p) for p in range(parts)])
      share_N = [jnp.exp(as_row(most, p) - most_N) for p in range(parts)]
      y_N = _total([load(p) * share_N[p] for p in range(parts)])
      weight_N = _total([as_row(weight, p) * share_N[p] for p in range(parts)])
      to[i * width : (i + 1) * width] = (y_N / weight_N).astype(self.dtype).astype(jnp.float32)

  def joined(self) -> Array:
    """The result, [H, N]."""
    share_PH = jnp.exp(self.most_PH - self.most_PH.max(0))
    sums_HN = jnp.sum(self.y_PHN * share_PH[..., None], 0)
    return (sums_HN / jnp.sum(self.weight_PH * share_PH, 0)[:, None]).astype(self.dtype)

  def __call__(self) -> Array:
    """The result in one row, [1, H N]."""
    return self.joined().reshape(1, -1)


def _total(terms: list[Array]) -> Array:
  return functools.reduce(operator.add, terms)


_MOST_SHARED = 8  # heads of queries that one CTA finishes


def finishes(own: Unfinished, k_BTKN: Array, v_BTKN: Array, backend: str = "auto") -> bool:
  """Whether `attend_unfinished` takes this: what `takes` asks of one row, whose keys at most 8
  heads of queries share, and jax from 0.11 on."""
  q_BSHN: Any = jax.ShapeDtypeStruct((1, 1, own.heads, own.width), own.dtype)
  few = own.heads // own.kv_heads <= _MOST_SHARED and k_BTKN.shape[0] == 1
  return KERNELS_WRITE_IN_PLACE and few and takes(q_BSHN, k_BTKN, v_BTKN, backend)


def attend_unfinished(
  own: Unfinished, k_TKN: Array, v_TKN: Array, position: Array, *, scale: float, window: int = 0
) -> tuple[Array | Unjoined, Array, Array]:
  """As `attend_cache` over a single row's cache that does not have the token yet; not
  differentiable.

  Args:
    own: of the token, that `finishes` takes.
    k_TKN, v_TKN: the cache.
    position: int32 [1], of the token.
    scale, window: as there.

  Returns:
    [H, N], or what it is joined of, and both parts of the cache with the token at its position,
    written in place.
  """
  length, kv_heads, _ = k_TKN.shape
  turned = own.turn_2N is not None
  # A block each: they come sooner to many multiprocessors, and who reads the parts joins them.
  parts = _parts(length, kv_heads, _WARPGROUPS)
  static = _Static(scale, window, parts, interpretation(), own.heads, turned=turned)
  given = (own.sums_PM, own.turn_2N) if turned else (own.sums_PM,)
  return _attend(given, k_TKN, v_TKN, position, static=static)


def _warpgroups(rows: int) -> int:
  """Warpgroups of a CTA."""
  return _WARPGROUPS if rows == 1 else 1


def _parts(length: int, heads: int, blocks: int) -> int:
  """CTAs that a head's cache is shared out among, so many blocks each where there are enough.
  `heads` are all rows' heads of keys."""
  each = blocks * _BLOCK
  return max(min(-(-length // each), resolve_num_sms(None) // heads), 1)


@functools.partial(jax.jit, static_argnames="static")
def _attend(
  given: tuple[Array, ...], k_TKN: Array, v_TKN: Array, position: Array, *, static: _Static
) -> tuple[Array | Unjoined, Array, Array]:
  """The result and the cache; of given queries, or of sums (and turn), which are finished first.
  The queries, the caches and the result are those of all rows, one after the other."""
  length, kv_heads, width = k_TKN.shape[0] // static.rows, *k_TKN.shape[1:]
  heads, parts, dtype = static.heads, static.parts, k_TKN.dtype
  finishing = given[0].dtype == jnp.float32
  shared, blocks = heads // kv_heads, length // _BLOCK
  warpgroups = _warpgroups(static.rows)
  workers = parts * warpgroups
  tile = plgpu.Layout.WGMMA
  row, across = tile.reduce(1), tile.reduce(0)  # the layouts of one number a row, and a column

  def body(*refs):
    given_refs, (position, k, v, y, *rest) = refs[: len(given)], refs[len(given) :]
    outs, scratch = rest[:-14], rest[-14:-3]
    in_out, queries, shares, keys, values, other, tops, totals, q_row, k_row, v_row = scratch
    here_is_q, loaded, joined = rest[-3:]
    of_row, kv, part, wg = (lax.axis_index(name) for name in ("row", "kv", "part", "wg"))
    mine = part * warpgroups + wg
    first_head = of_row * heads + kv * shared

    def load(block, slot):
      at = pl.ds(of_row * length + block * _BLOCK, _BLOCK)
      plgpu.copy_gmem_to_smem(k.at[at, kv], keys.at[wg, slot], loaded.at[wg, slot])
      plgpu.copy_gmem_to_smem(v.at[at, kv], values.at[wg, slot], loaded.at[wg, slot])

    def load_first(first_block, end):
      for slot in range(_STAGES):
        block = first_block + mine + slot * workers
        pl.when(block < end)(functools.partial(load, block, slot))

    def added(head, to, first_of=0):
      """Writes one head's numbers, added up and rounded."""
      sums = given_refs[0]
      # A thread has one of 128 numbers; as columns of a tile it would read half of 64.
      whole = width % _WARPGROUP == 0
      load = lambda p, at: sums[p, at] if whole else load_as(sums.at[p, at], across)
      size = width if whole else width // 2
      for first in range(0, width, size):
        at = pl.ds(head * width + first, size)
        x = load(0, at)
        for p in range(1, sums.shape[0]):
          x = x + load(p, at)
        to[first_of + first : first_of + first + size] = x.astype(dtype)

    def angles():
      """Asked for before the sums, else after all of them."""
      return [load_as(given_refs[1].at[i], across) for i in range(2 * static.turned)]

    def turn(of_head, turns, first_of=0):
      """Turns what has been written."""
      places = [slice(first_of + half, first_of + half + width // 2) for half in (0, width // 2)]
      sin, cos = turns
      first, second = (load_as(of_head.at[at], across).astype(jnp.float32) for at in places)
      plgpu.commit_smem()  # all have read
      for at, x in zip(places, (first * cos - second * sin, second * cos + first * sin)):
        of_head[at] = x.astype(dtype)

    def as_rows(row):
      """A head's numbers in every row of a tile."""
      return lax.broadcast_in_dim(load_as(row, across), (_ROWS, width), (1,))

    if not finishing:

      @pl.when(wg == 0)
      def _():
        mine_of_q = pl.ds(first_head, shared)
        plgpu.copy_gmem_to_smem(given_refs[0].at[mine_of_q], in_out.at[pl.ds(0, shared)], here_is_q)

    # Asked for now, looked at as late as may be: without a window the first blocks are known.
    here = position[of_row]

    def places():
      """The first position that is seen, its block, and the end of the blocks."""
      first = jnp.maximum(here - (static.window - 1), 0) if static.window else jnp.int32(0)
      # What is finished here is not in the cache: of that, only what is before it is looked at.
      return first, first // _BLOCK, (here + (_BLOCK - 1 if finishing else _BLOCK)) // _BLOCK

    load_first(*(places()[1:] if static.window else (0, blocks)))

    if finishing:  # the cache's first blocks are on their way meanwhile

      @pl.when(wg == 0)
      def _():
        turns = angles()
        for g in range(shared):
          added(kv * shared + g, q_row, g * width)
        plgpu.commit_smem()
        for g in range(shared if static.turned else 0):
          turn(q_row, turns, g * width)
        plgpu.commit_smem()

      @pl.when(wg == 1)
      def _():
        turns = angles()
        added(heads + kv, k_row)
        added(heads + kv_heads + kv, v_row)
        plgpu.commit_smem()
        if static.turned:
          turn(k_row, turns)
          plgpu.commit_smem()

    first, first_block, end = places()
    steps = jnp.maximum((end - first_block - mine + workers - 1) // workers, 0)

    @pl.when(wg == 0)
    def _():
      if finishing:
        q_MN = as_rows(q_row.at[pl.ds(0, width)])
        row_MN = plgpu.broadcasted_iota(jnp.int32, q_MN.shape, 0, layout=tile)
        for g in range(1, shared):
          q_MN = jnp.where(row_MN == g, as_rows(q_row.at[pl.ds(g * width, width)]), q_MN)
      else:
        plgpu.barrier_wait(here_is_q)
        # Rows behind the queries hold whatever was there: nothing of a row comes into another.
        q_MN = load_as(in_out, tile)
      queries[...] = q_MN
      plgpu.commit_smem()

    plgpu.barrier_arrive(joined)
    plgpu.barrier_wait(joined)

    def step(i, carry):
      most_M, weight_M, y_MN = carry
      slot, start = lax.rem(i, _STAGES), (first_block + mine + i * workers) * _BLOCK
      plgpu.barrier_wait(loaded.at[wg, slot])

      keys_NB = plgpu.transpose_ref(keys.at[wg, slot], (1, 0))
      score_MB = _product(queries, keys_NB) * static.scale
      place = start + plgpu.broadcasted_iota(jnp.int32, score_MB.shape, 1, layout=tile)
      seen = (place >= first) & ((place < here) if finishing else (place <= here))
      score_MB = jnp.where(seen, score_MB, jnp.full_like(score_MB, _LOW))
      # Of every block that is looked at something is seen, but for a window of the token alone:
      # its own score is larger than `_LOW`.
      new_M = jnp.maximum(most_M, jnp.max(score_MB, axis=1))
      share_MB = jnp.exp(score_MB - lax.broadcast_in_dim(new_M, score_MB.shape, (0,)))
      old_M = jnp.exp(most_M - new_M)
      weight_M = weight_M * old_M + jnp.sum(share_MB, axis=1)
      y_MN = y_MN * lax.broadcast_in_dim(old_M, y_MN.shape, (0,))
      shares[wg] = share_MB.astype(dtype)
      plgpu.commit_smem()
      y_MN = y_MN + _product(shares.at[wg], values.at[wg, slot])
      plgpu.commit_smem()  # all of the warpgroup has read before the next block is written there
      following = first_block + mine + (i + _STAGES) * workers
      pl.when(following < end)(functools.partial(load, following, slot))
      return new_M, weight_M, y_MN

    low_M = plgpu.layout_cast(jnp.full((_ROWS,), _LOW, jnp.float32), row)
    zero_M = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row)
    zero_MN = plgpu.layout_cast(jnp.zeros((_ROWS, width), jnp.float32), tile)
    begun = low_M, zero_M, zero_MN
    # The token itself belongs to whoever has its block of the cache.
    is_mine = lax.rem(here // _BLOCK - first_block, workers) == mine
    if finishing:
      q_MN = load_as(queries, tile).astype(jnp.float32)
      k_MN, v_MN = (as_rows(of_head).astype(jnp.float32) for of_head in (k_row, v_row))
      score_M = jnp.sum(q_MN * k_MN, axis=1) * static.scale
      own = score_M, plgpu.layout_cast(jnp.full((_ROWS,), 1.0, jnp.float32), row), v_MN
      begun = tuple(jnp.where(jnp.broadcast_to(is_mine, a.shape), a, b) for a, b in zip(own, begun))
    most_M, weight_M, y_MN = lax.fori_loop(0, steps, step, begun)
    if not static.window:
      for slot in range(_STAGES):  # nothing may arrive after the end
        unused = (slot >= steps) & (mine + slot * workers < blocks)
        pl.when(unused)(functools.partial(plgpu.barrier_wait, loaded.at[wg, slot]))

    if finishing:  # the block has been read

      @pl.when(is_mine)
      def _():
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_row, k.at[here, kv])
        plgpu.copy_smem_to_gmem(v_row, v.at[here, kv])

    if warpgroups > 1:

      @pl.when(wg == 1)
      def _():
        other[...], tops[...], totals[...] = y_MN, most_M, weight_M

      plgpu.barrier_arrive(joined)
      plgpu.barrier_wait(joined)

    def both():
      """What this warpgroup and the other found."""
      others_M = load_as(tops, row)
      both_M = jnp.maximum(most_M, others_M)
      own_M, others_M = jnp.exp(most_M - both_M), jnp.exp(others_M - both_M)
      joint_M = weight_M * own_M + load_as(totals, row) * others_M
      joint_MN = y_MN * as_tile(own_M) + load_as(other, tile) * as_tile(others_M)
      return both_M, joint_M, joint_MN

    as_tile = lambda x_M: lax.broadcast_in_dim(x_M, y_MN.shape, (0,))

    @pl.when(wg == 0)
    def _():
      both_M, joint_M, joint_MN = both() if warpgroups > 1 else (most_M, weight_M, y_MN)
      if parts == 1:
        in_out[...] = (joint_MN / as_tile(joint_M)).astype(dtype)
        plgpu.commit_smem()
        written, to = in_out, y.at[pl.ds(first_head, shared)]
      else:
        other[...], tops[...], totals[...] = joint_MN, both_M, joint_M
        plgpu.commit_smem()
        most_of, weight_of = outs
        for g in range(shared):
          most_of[part, first_head + g] = tops[g]
          weight_of[part, first_head + g] = totals[g]
        written, to = other, y.at[part, pl.ds(first_head, shared)]
      plgpu.copy_smem_to_gmem(written.at[pl.ds(0, shared)], to)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  cache = smem((warpgroups, _STAGES, _BLOCK, width), dtype)
  a_number = plgpu.SMEM((_ROWS,), jnp.float32)
  numbers = jax.ShapeDtypeStruct((parts, static.rows * heads), jnp.float32)
  several = jax.ShapeDtypeStruct((*numbers.shape, width), jnp.float32), numbers, numbers
  run = compiled(
    body,
    out_type=jax.ShapeDtypeStruct((static.rows * heads, width), dtype) if parts == 1 else several,
    grid=(static.rows, kv_heads, parts),
    grid_names=("row", "kv", "part"),
    num_threads=warpgroups,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((_ROWS, width), dtype),
      smem((_ROWS, width), dtype),
      smem((warpgroups, _ROWS, _BLOCK), dtype),
      cache,
      cache,
      plgpu.SMEM((_ROWS if workers > 1 else 1, width), jnp.float32),
      a_number,
      a_number,
      plgpu.SMEM((shared * width,), dtype),
      plgpu.SMEM((width,), dtype),
      plgpu.SMEM((width,), dtype),
      plgpu.Barrier(),
      plgpu.Barrier(num_arrivals=2, num_barriers=(warpgroups, _STAGES)),
      plgpu.Barrier(num_arrivals=warpgroups),
    ],
  )
  cached: list[Any] = [jax.new_ref(x) if finishing else x for x in (k_TKN, v_TKN)]
  found = run(*given, position, *cached)
  if finishing:
    k_TKN, v_TKN = (jax.freeze(ref) for ref in cached)
  return Unjoined(*found, dtype=dtype) if parts > 1 else found, k_TKN, v_TKN


def _product(x_MK: Any, matrix_KN: Any) -> Array:
  """x · W in float32, of two matrices in shared memory."""

  def multiplied(sums):
    plgpu.wgmma(sums, x_MK, matrix_KN)
    return sums[...]

  return pl.run_scoped(multiplied, plgpu.ACC((_ROWS, matrix_KN.shape[1]), jnp.float32))
