"""The kernel of `attention`: one token's queries against its row's cache.

    R  rows                  H  heads of queries              N  width of a head
    T  length of a cache     K  heads of keys and values, each shared by G = H / K
    P  parts of a cache      B  positions of a block (64)
    M  rows of a matrix instruction (64), of which G hold queries

The grid has a CTA for each row, head of keys and part of the cache. Each warpgroup of these CTAs is
a worker. The workers of one row's head of keys take turns at the head's blocks: if the token sees
16 blocks, and 2 parts of 2 warpgroups are 4 workers, worker 1 adds blocks 1, 5, 9 and 13 of these.
So a part is the blocks of one CTA's workers, not a run of positions. A worker keeps a running
softmax over its blocks (the online form of Milakov and Gimelshein, arXiv 1805.02867).

    1  Begin to copy the queries, if they are finished, and each worker's first blocks, at most
       two, to shared memory.
    2  If projections come as partial sums: add them up, and rotate queries and key if asked to,
       while the blocks arrive.
    3  Write the G queries into the rows of one tile.
    4  For each block: scores, softmax weights and the weighted sum of values, by two products.
    5  Write the token's own key and value into the cache, if stage 2 made them.
    6  Merge the results of the CTA's warpgroups, if it has two. Write the heads' results, or with
       several parts the results of this part.

The rows' caches can be pages of a common pool. Then the kernel reads from a table where each block
lies, and reads only blocks that the token sees.

Of a matrix instruction's 64 rows only G hold queries, often few. The kernel still uses this
instruction, because it also adds up across the warps of a warpgroup. A sum of vectors would add up
across warps through shared memory that all warpgroups of a CTA have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import load_as
from scmoe.kernels.launch import compiled
from scmoe.kernels.one_row.attention_memory import (
  BLOCK,
  ROWS,
  STAGES,
  WARPGROUP,
  Global,
  Shape,
  Shared,
  named,
  outputs,
  shared_types,
)
from scmoe.kernels.one_row.running_softmax import (
  PER_COLUMN,
  PER_ROW,
  TILE,
  UNSEEN,
  Softmax,
  as_tile,
  merged,
  nothing_seen,
)


class _Seen(NamedTuple):
  """The first position that a token sees, itself included, and the cache's blocks to add.

  Attributes:
    first: the first position.
    first_block: the block of the first position; the first block that a worker adds.
    end_block: the block after the last one that a worker adds; `first_block` if there is none.
  """

  first: Any
  first_block: Any
  end_block: Any


@functools.partial(jax.jit, static_argnames="shape")
def attend(
  projections: Sequence[Array],
  keys: Array,
  values: Array,
  position: Array,
  pages: Array | None = None,
  *,
  shape: Shape,
) -> tuple[Any, Array, Array]:
  """Runs the kernel; returns the attention of each row's token over its cache, and the caches.

  Args:
    projections: `Global.queries`; or `Global.sums`, and `Global.turn` for a rotation.
    keys, values, position, pages: as in `Global`.
    shape: the sizes of these arrays, and the kernel's other constants.

  Returns:
    `Global.y`, with `Global.most` and `Global.weight` where there are several parts, and the
    caches. If the projections came as partial sums, the caches now hold the token.
  """

  def body(*refs: Any) -> None:
    _Cta(shape, *named(refs, shape)).run()

  run = compiled(
    body,
    out_type=outputs(shape),
    grid=(shape.rows, shape.kv_heads, shape.parts),
    grid_names=("row", "kv", "part"),
    num_threads=shape.warpgroups,
    thread_name="wg",
    scratch_types=shared_types(shape),
  )
  caches: list[Any] = [jax.new_ref(x) if shape.partial else x for x in (keys, values)]
  table = () if pages is None else (pages,)
  found = run(*projections, position, *table, *caches)
  if shape.partial:
    keys, values = (jax.freeze(ref) for ref in caches)
  return found, keys, values


class _Cta:
  """One CTA, as each of its warpgroups runs it; the methods are in the order of the six stages."""

  def __init__(self, shape: Shape, gmem: Global, smem: Shared):
    self.shape, self.gmem, self.smem = shape, gmem, smem
    names = ("row", "kv", "part", "wg")
    self.row, self.kv, self.part, self.wg = (lax.axis_index(name) for name in names)
    self.worker = self.part * shape.warpgroups + self.wg
    self.first_head = self.row * shape.heads + self.kv * shape.group

  def run(self) -> None:
    """Runs this CTA's stages."""
    shape = self.shape
    if not shape.partial:
      self.copy_queries()
    # The position is read now. Without a window and pages it is used late: then the first blocks do
    # not depend on it.
    self.position = self.gmem.position[self.row]
    self.copy_first_blocks()
    if shape.partial:
      self.finish_projections()
    seen = self.seen()
    left = seen.end_block - seen.first_block - self.worker
    steps = jnp.maximum((left + shape.workers - 1) // shape.workers, 0)
    self.write_query_tile()
    self.wait_for_everyone()
    begin = nothing_seen(shape.width)
    at = lax.rem(self.position // BLOCK - seen.first_block, shape.workers)
    has_token = at == self.worker  # with partial sums this worker adds the token
    if shape.partial:
      begin = self.with_token(begin, has_token)
    found = lax.fori_loop(0, steps, functools.partial(self.add_block, seen), begin)
    if not self.copies_only_seen:
      self.wait_for_unused_blocks(steps)
    if shape.partial:
      self.write_token(has_token)
    if shape.warpgroups > 1:
      self.hand_over(found)
    self.write_result(found)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  # -- 1: copies ---------------------------------------------------------------------------------

  def copy_queries(self) -> None:
    """Begins the copy of the queries that share this head of keys."""

    @pl.when(self.wg == 0)
    def _():
      shape, smem = self.shape, self.smem
      own = pl.ds(self.first_head, shape.group)
      to = smem.in_out.at[pl.ds(0, shape.group)]
      plgpu.copy_gmem_to_smem(self.gmem.queries.at[own], to, smem.queries_arrived)

  def place(self, block: Any) -> Any:
    """The place in `Global.keys` at which a block of the row begins.

    With pages the kernel finds it in the row's table. There a block past the last one that the
    token sees may have no place; then the result has no meaning, and the block is not copied.
    """
    shape = self.shape
    if not shape.page:
      return self.row * shape.length + block * BLOCK
    of_page = shape.page // BLOCK  # blocks
    page = self.gmem.pages[self.row, jnp.minimum(block // of_page, shape.length // shape.page - 1)]
    return page * shape.page + lax.rem(block, of_page) * BLOCK

  def copy_block(self, place: Any, stage: Any) -> None:
    """Begins the copies of the keys and values of the block that begins at `place`."""
    gmem, smem, kv, wg = self.gmem, self.smem, self.kv, self.wg
    at = pl.ds(place, BLOCK)
    arrived = smem.block_arrived.at[wg, stage]
    plgpu.copy_gmem_to_smem(gmem.keys.at[at, kv], smem.keys.at[wg, stage], arrived)
    arrived = smem.block_arrived.at[wg, stage]
    plgpu.copy_gmem_to_smem(gmem.values.at[at, kv], smem.values.at[wg, stage], arrived)

  def copy_first_blocks(self) -> None:
    """Begins the copies of the worker's first blocks, at most two.

    Without a window and pages they begin before the position is known, so some blocks may lie past
    it.
    """
    first, end = self.seen()[1:] if self.copies_only_seen else (0, self.shape.blocks)
    for stage in range(STAGES):
      block = first + self.worker + stage * self.shape.workers
      pl.when(block < end)(functools.partial(self.copy_block, self.place(block), stage))

  @property
  def copies_only_seen(self) -> bool:
    """Whether even the first copies are only of blocks that the token sees.

    With pages no others may be copied, since a row may have no page for them.
    """
    return bool(self.shape.window or self.shape.page)

  def seen(self) -> _Seen:
    """The part of the cache that a token sees; with partial sums it lacks the token itself yet."""
    window = self.shape.window
    first = jnp.maximum(self.position - (window - 1), 0) if window else jnp.int32(0)
    round_up = BLOCK - 1 if self.shape.partial else BLOCK
    return _Seen(first, first // BLOCK, (self.position + round_up) // BLOCK)

  # -- 2: projections ----------------------------------------------------------------------------

  def finish_projections(self) -> None:
    """Adds up and rotates the projections: one warpgroup the queries, the other key and value.

    The results stay in shared memory. The value is not rotated, and without `Shape.rotated` queries
    and key are not, either.
    """
    shape, smem, width = self.shape, self.smem, self.shape.width

    @pl.when(self.wg == 0)
    def _():
      turn = self.load_turn()
      for g in range(shape.group):
        self.add_up(self.kv * shape.group + g, smem.query_rows, g * width)
      plgpu.commit_smem()
      for g in range(shape.group if shape.rotated else 0):
        self.rotate(smem.query_rows, turn, g * width)
      plgpu.commit_smem()

    @pl.when(self.wg == 1)
    def _():
      turn = self.load_turn()
      self.add_up(shape.heads + self.kv, smem.key_row)
      self.add_up(shape.heads + shape.kv_heads + self.kv, smem.value_row)
      plgpu.commit_smem()
      if shape.rotated:
        self.rotate(smem.key_row, turn)
        plgpu.commit_smem()

  def load_turn(self) -> list[Any]:
    """Loads the two rows of `Global.turn`; returns an empty list if there is no rotation.

    The kernel loads them before the partial sums: a load behind the additions of the partial sums
    would wait for the additions.
    """
    return [load_as(self.gmem.turn.at[i], PER_COLUMN) for i in range(2 * self.shape.rotated)]

  def add_up(self, head: Any, to: Any, start: int = 0) -> None:
    """Adds up one head's partial sums, and writes the totals, rounded, to `to[start:]`.

    `head` is the index among all H + 2 K heads of queries, keys and values, in this order. A head
    of 128 numbers gives each of 128 threads one number. A head of 64 is read in halves, in the
    layout of a tile's columns: several threads read the same number.
    """
    sums, width, dtype = self.gmem.sums, self.shape.width, self.shape.dtype
    whole = width % WARPGROUP == 0
    load = lambda p, at: sums[p, at] if whole else load_as(sums.at[p, at], PER_COLUMN)
    size = width if whole else width // 2
    for first in range(0, width, size):
      at = pl.ds(head * width + first, size)
      x = load(0, at)
      for p in range(1, sums.shape[0]):
        x = x + load(p, at)
      to[start + first : start + first + size] = x.astype(dtype)

  def rotate(self, row: Any, turn: list[Any], start: int = 0) -> None:
    """Rotates the pairs (i, i + width / 2) of the head at `row[start:]`, in place."""
    half = self.shape.width // 2
    places = [slice(start + first, start + first + half) for first in (0, half)]
    sin, cos = turn
    first, second = (load_as(row.at[at], PER_COLUMN).astype(jnp.float32) for at in places)
    plgpu.commit_smem()  # no thread writes before all threads have read
    for at, x in zip(places, (first * cos - second * sin, second * cos + first * sin)):
      row[at] = x.astype(self.shape.dtype)

  # -- 3: the tile of queries --------------------------------------------------------------------

  def write_query_tile(self) -> None:
    """Writes the queries to the tile that products read, query g in row g."""

    @pl.when(self.wg == 0)
    def _():
      if self.shape.partial:
        q_MN = self.finished_queries()
      else:
        plgpu.barrier_wait(self.smem.queries_arrived)
        # Only rows 0 to G - 1 hold queries; the others are not initialised. They do no harm, since
        # no row's result depends on another row.
        q_MN = load_as(self.smem.in_out, TILE)
      self.smem.queries[...] = q_MN
      plgpu.commit_smem()

  def finished_queries(self) -> Any:
    """The queries that `finish_projections` made, as rows of a tile; the rest repeat query 0."""
    width, query_rows = self.shape.width, self.smem.query_rows
    q_MN = self.in_every_row(query_rows.at[pl.ds(0, width)])
    row_MN = plgpu.broadcasted_iota(jnp.int32, q_MN.shape, 0, layout=TILE)
    for g in range(1, self.shape.group):
      own = query_rows.at[pl.ds(g * width, width)]
      q_MN = jnp.where(row_MN == g, self.in_every_row(own), q_MN)
    return q_MN

  def in_every_row(self, row: Any) -> Any:
    """A tile that repeats `row`, one head's numbers in shared memory, in every row."""
    return lax.broadcast_in_dim(load_as(row, PER_COLUMN), (ROWS, self.shape.width), (1,))

  def wait_for_everyone(self) -> None:
    """Lets the CTA's warpgroups wait for each other."""
    plgpu.barrier_arrive(self.smem.everyone)
    plgpu.barrier_wait(self.smem.everyone)

  # -- 4: blocks of the cache --------------------------------------------------------------------

  def with_token(self, nothing: Softmax, has_token: Any) -> Softmax:
    """A worker's running softmax before its first block, where projections are partial sums.

    For the worker whose turn the token's block is (`has_token`), it is the softmax of the token
    alone. For the other workers it is `nothing`.
    """
    smem = self.smem
    q_MN = load_as(smem.queries, TILE).astype(jnp.float32)
    rows = (smem.key_row, smem.value_row)
    k_MN, v_MN = (self.in_every_row(row).astype(jnp.float32) for row in rows)
    score_M = jnp.sum(q_MN * k_MN, axis=1) * self.shape.scale
    one_M = plgpu.layout_cast(jnp.full((ROWS,), 1.0, jnp.float32), PER_ROW)
    choose = lambda a, b: jnp.where(jnp.broadcast_to(has_token, a.shape), a, b)
    return Softmax(*map(choose, Softmax(score_M, one_M, v_MN), nothing))

  def add_block(self, seen: _Seen, step: Any, state: Softmax) -> Softmax:
    """Adds a worker's step-th block to its running softmax; begins to copy a later one, if any.

    Every block that is added holds at least one unmasked position, so `new_M` is a real score. The
    exception is a sliding window of one token with partial sums, where only the token itself is
    unmasked: `state` already holds the token's score.
    """
    shape, smem, wg = self.shape, self.smem, self.wg
    stage = lax.rem(step, STAGES)
    start = (seen.first_block + self.worker + step * shape.workers) * BLOCK
    following = seen.first_block + self.worker + (step + STAGES) * shape.workers
    place = self.place(following)  # with pages a load, which returns while the products run
    plgpu.barrier_wait(smem.block_arrived.at[wg, stage])
    if shape.page:
      self.clear_unseen_values(stage, start)
    score_MB = self.scores(stage, start, seen)
    new_M = jnp.maximum(state.most_M, jnp.max(score_MB, axis=1))
    share_MB = jnp.exp(score_MB - lax.broadcast_in_dim(new_M, score_MB.shape, (0,)))
    old_M = jnp.exp(state.most_M - new_M)
    weight_M = state.weight_M * old_M + jnp.sum(share_MB, axis=1)
    y_MN = state.y_MN * lax.broadcast_in_dim(old_M, state.y_MN.shape, (0,))
    smem.shares[wg] = share_MB.astype(shape.dtype)
    plgpu.commit_smem()
    y_MN = y_MN + _product(smem.shares.at[wg], smem.values.at[wg, stage])
    plgpu.commit_smem()  # the warpgroup has read the block, which the next copy overwrites
    copy = functools.partial(self.copy_block, place, stage)
    pl.when(following < seen.end_block)(copy)
    return Softmax(new_M, weight_M, y_MN)

  def clear_unseen_values(self, stage: Any, start: Any) -> None:
    """Sets the values past the row's position to 0, in the block that begins at position `start`.

    An earlier request may have left infinite ones in the page, and 0 · inf is NaN.
    """

    @pl.when(start + BLOCK - 1 > self.position)
    def _():
      values = self.smem.values.at[self.wg, stage]
      v_BN = load_as(values, TILE)
      place_BN = start + plgpu.broadcasted_iota(jnp.int32, v_BN.shape, 0, layout=TILE)
      values[...] = jnp.where(place_BN <= self.position, v_BN, jnp.zeros_like(v_BN))
      plgpu.commit_smem()

  def scores(self, stage: Any, start: Any, seen: _Seen) -> Any:
    """The scaled scores of the block that begins at position `start`; -1e30 where masked."""
    smem, position = self.smem, self.position
    keys_NB = plgpu.transpose_ref(smem.keys.at[self.wg, stage], (1, 0))
    score_MB = _product(smem.queries, keys_NB) * self.shape.scale
    place_MB = start + plgpu.broadcasted_iota(jnp.int32, score_MB.shape, 1, layout=TILE)
    after_first = place_MB >= seen.first
    before_end = (place_MB < position) if self.shape.partial else (place_MB <= position)
    return jnp.where(after_first & before_end, score_MB, jnp.full_like(score_MB, UNSEEN))

  def wait_for_unused_blocks(self, steps: Any) -> None:
    """Waits for copies of first blocks that no step used: none may arrive after the CTA's end."""
    for stage in range(STAGES):
      workers, blocks = self.shape.workers, self.shape.blocks
      unused = (stage >= steps) & (self.worker + stage * workers < blocks)
      arrived = self.smem.block_arrived.at[self.wg, stage]
      pl.when(unused)(functools.partial(plgpu.barrier_wait, arrived))

  # -- 5: the token in the cache -----------------------------------------------------------------

  def write_token(self, has_token: Any) -> None:
    """Writes the token's key and value to the cache, if `has_token`: one worker of a head does."""
    gmem, smem = self.gmem, self.smem

    @pl.when(has_token)
    def _():
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(smem.key_row, gmem.keys.at[self.position, self.kv])
      plgpu.copy_smem_to_gmem(smem.value_row, gmem.values.at[self.position, self.kv])

  # -- 6: the result -----------------------------------------------------------------------------

  def hand_over(self, found: Softmax) -> None:
    """The second warpgroup writes its running softmax to shared memory; the first waits for it."""

    @pl.when(self.wg == 1)
    def _():
      self.store(found)

    self.wait_for_everyone()

  def store(self, found: Softmax) -> None:
    """Writes a running softmax to shared memory."""
    self.smem.y[...], self.smem.most[...] = found.y_MN, found.most_M
    self.smem.weight[...] = found.weight_M

  def write_result(self, found: Softmax) -> None:
    """Writes the heads' results; with several parts, this part's sums, scores and weights."""

    @pl.when(self.wg == 0)
    def _():
      shape = self.shape
      whole = found
      if shape.warpgroups > 1:
        smem = self.smem
        most_M, weight_M = load_as(smem.most, PER_ROW), load_as(smem.weight, PER_ROW)
        whole = merged(found, Softmax(most_M, weight_M, load_as(smem.y, TILE)))
      write = self.quotient if shape.parts == 1 else self.part_of_result
      written, to = write(whole)
      plgpu.copy_smem_to_gmem(written.at[pl.ds(0, shape.group)], to)

  def quotient(self, found: Softmax) -> tuple[Any, Any]:
    """Writes the result to shared memory; returns that memory, and its target in `Global.y`.

    It is 0 for a row without a token, whose weights add up to 0. Otherwise they add up to 1 at
    least, since the largest score has the weight e^0.
    """
    in_out, weight_M = self.smem.in_out, found.weight_M
    if self.shape.page:
      weight_M = jnp.maximum(weight_M, jnp.full_like(weight_M, 1.0))
    in_out[...] = (found.y_MN / as_tile(weight_M, found.y_MN.shape)).astype(self.shape.dtype)
    plgpu.commit_smem()
    return in_out, self.gmem.y.at[pl.ds(self.first_head, self.shape.group)]

  def part_of_result(self, found: Softmax) -> tuple[Any, Any]:
    """Writes a part's results: sums to shared memory, scores and weights to global memory.

    The sums are those of the weighted values. The scores are each head's largest, the weights each
    head's sum of weights.

    Returns:
      The shared memory of the sums, and their target in `Global.y`.
    """
    shape, gmem, smem = self.shape, self.gmem, self.smem
    self.store(found)
    plgpu.commit_smem()
    for g in range(shape.group):
      gmem.most[self.part, self.first_head + g] = smem.most[g]
      gmem.weight[self.part, self.first_head + g] = smem.weight[g]
    return smem.y, gmem.y.at[self.part, pl.ds(self.first_head, shape.group)]


def _product(x_MK: Any, matrix_KN: Any) -> Array:
  """x · W of two matrices in shared memory; the product is in registers, in float32."""

  def multiplied(sums: Any) -> Any:
    plgpu.wgmma(sums, x_MK, matrix_KN)
    return sums[...]

  return pl.run_scoped(multiplied, plgpu.ACC((ROWS, matrix_KN.shape[1]), jnp.float32))
