"""Attention of one token per row over that row's cache, in one kernel.

    R  rows                  H  heads of queries              N  width of a head
    T  length of a cache     K  heads of keys and values, each shared by G = H / K
    P  parts of a cache      M  numbers of a token's projections, (H + 2 K) N

XLA needs three kernels for scores, softmax and the sum over values, and each waits for the one
before. Here one kernel does all three (`attention_kernel`). To use more multiprocessors, several
CTAs can share the cache of a head of keys. Each leaves the result of its part of the cache;
together these are a `PartialAttention`. The next kernel joins them when it reads them, or XLA does
(`joined`).

For a single row the same kernel can also finish the projections, `PartialProjections`: it adds up
the partial sums that `linear.sums` leaves, rotates queries and key if asked to, and writes key and
value to the cache. XLA needs three kernels for that, each for a few thousand numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import KERNELS_WRITE_IN_PLACE, load_as
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.launch import interpretation, resolve_num_sms
from scmoe.kernels.one_row.attention_kernel import attend
from scmoe.kernels.one_row.attention_memory import BLOCK, ROWS, STAGES, WARPGROUP, Shape
from scmoe.kernels.one_row.matrix_vector import added_up

# Warpgroups of a CTA for a single row. With two or more rows a CTA has one warpgroup, and two CTAs
# mostly fit into a multiprocessor where the cache is not cut into parts.
_WARPGROUPS = 2
_MOST_SHARED = 8  # most heads of queries whose projections one CTA finishes


def cache_length(length: int, dtype: Any, width: int) -> int:
  """Positions to allocate for a cache that must hold `length` of them.

  They are `length` rounded up to a multiple of 64 where `resolve_backend` finds that the device has
  kernels for the dtype and the width of a head, else `length` itself.
  """
  if resolve_backend("auto", dtype, width) != "mosaic_gpu":
    return length
  return -(-length // BLOCK) * BLOCK


def takes(q_BSHN: Array, k_BTKN: Array, v_BTKM: Array, backend: str = "auto") -> bool:
  """Whether the kernel computes this attention.

  It needs one token per row, one 16-bit float type for all, heads of width 64 or 128, keys and
  values of equal shape with a length that is a multiple of 64, at most 64 query heads per key head,
  and a `backend` that stands for the kernels (`resolve_backend`).

  Raises:
    ValueError: for such sizes and one type for all, the backend is unknown or "mosaic_gpu" cannot
      take the type.
  """
  heads, width = q_BSHN.shape[2:]
  length, kv_heads = k_BTKN.shape[1:3]
  alike = q_BSHN.dtype == k_BTKN.dtype == v_BTKM.dtype and v_BTKM.shape == k_BTKN.shape
  fits = q_BSHN.shape[1] == 1 and width in (64, 128) and length % BLOCK == 0
  fits = fits and alike and heads // kv_heads <= ROWS
  # `resolve_backend` is called last, because it logs its decision.
  return fits and resolve_backend(backend, q_BSHN.dtype, width) == "mosaic_gpu"


def attend_cache(
  q_RHN: Array, k_RTKN: Array, v_RTKN: Array, position_R: Array, *, scale: float, window: int = 0
) -> Array:
  """Σ_t softmax_t(scale · q · k[t]) v[t] over the positions t that a row's token sees.

  It sees the positions t <= position, or with a window the last `window` of these. The numbers
  e^(score - most) are rounded to the dtype of the queries before they multiply the values; the
  result is divided by the sum of the unrounded ones. Not differentiable.

  Args:
    q_RHN: the queries of each row's token, of shapes and a dtype that the kernel `takes`.
    k_RTKN, v_RTKN: the rows' caches, in the queries' dtype. Values that a row's token does not see
      have weight 0, but must be finite.
    position_R: int32, position of each row's token, whose key and value the cache holds.
    scale: factor of the scores.
    window: positions that a token sees, itself included; 0: all.

  Returns:
    [R, H, N] in the dtype of the queries.
  """
  shape = _of_finished(q_RHN, k_RTKN, k_RTKN.shape[1], scale=scale, window=window)
  return _attended(q_RHN, k_RTKN, v_RTKN, position_R, shape=shape)


def attend_pages(
  q_RHN: Array,
  k_GTKN: Array,
  v_GTKN: Array,
  page_RP: Array,
  last_R: Array,
  *,
  scale: float,
  window: int = 0,
) -> Array:
  """`attend_cache` over a pool of pages; it reads only blocks that hold what a row's token sees.

  A block is 64 positions of a page.

  Args:
    q_RHN: the queries of each row's token, of shapes and a dtype that the kernel `takes` with the
      pool as cache: so a page has a multiple of 64 positions.
    k_GTKN, v_GTKN: the pool's G pages of T positions, in the queries' dtype.
    page_RP: int32, the pages that hold positions 0 to T - 1, T to 2 T - 1, ... of each row; any
      number for a page of which the row's token sees nothing.
    last_R: int32, position of each row's token; -1 for a row without one.
    scale, window: as for `attend_cache`.

  Returns:
    [R, H, N] in the dtype of the queries; 0 for rows without a token. No key or value past a row's
    position has an influence, even if it is not finite. With a window, the values before it in its
    first block have weight 0, but must be finite.
  """
  page = k_GTKN.shape[1]
  options = {"scale": scale, "window": window, "page": page}
  shape = _of_finished(q_RHN, k_GTKN, page_RP.shape[1] * page, **options)
  y_RHN = _attended(q_RHN, k_GTKN, v_GTKN, last_R, page_RP, shape=shape)
  return y_RHN if shape.parts == 1 else jnp.where(last_R[:, None, None] >= 0, y_RHN, 0)


def _of_finished(q_RHN: Array, k_BTKN: Array, length: int, **options: Any) -> Shape:
  """The kernel's constants for finished queries over rows of `length` positions."""
  rows, heads, width = q_RHN.shape
  kv_heads, warpgroups = k_BTKN.shape[2], _warpgroups(rows)
  return Shape(
    rows=rows,
    heads=heads,
    kv_heads=kv_heads,
    length=length,
    width=width,
    parts=_parts(length, rows * kv_heads, warpgroups * STAGES),
    warpgroups=warpgroups,
    dtype=k_BTKN.dtype,
    partial=False,
    rotated=False,
    simulation=interpretation(),
    **options,
  )


def _attended(q_RHN: Array, k_BTKN: Array, v_BTKN: Array, *where: Array, shape: Shape) -> Array:
  """Runs the kernel and joins the parts; `where` are the positions, and with pages the table."""
  # All rows' heads, and all rows' or pages' positions, lie one after the other.
  q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q_RHN, k_BTKN, v_BTKN))
  found = attend((q,), k, v, *where, shape=shape)[0]
  found = found if shape.parts == 1 else PartialAttention(*found, dtype=shape.dtype).joined()
  return found.reshape(q_RHN.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialProjections:
  """Queries, keys and values of one token as partial sums, before the rotary embedding, if any.

  Attributes:
    sums_PM: float32, the partial sums (`linear.sums`) of queries, keys and values, in this order.
    turn_2N: float32 [2, N/2], sine and cosine of the angles by which the pairs (i, i + N/2) of
      queries and keys are rotated, times an amplitude (`layers.rope.turns`); None: nothing is
      rotated.
    heads, kv_heads: H and K.
    dtype: the type that the finished sums are rounded to.
  """

  sums_PM: Array
  turn_2N: Array | None
  heads: int = dataclasses.field(metadata={"static": True})
  kv_heads: int = dataclasses.field(metadata={"static": True})
  dtype: Any = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """N, the width of a head."""
    return self.sums_PM.shape[1] // (self.heads + 2 * self.kv_heads)

  def finished(self) -> tuple[Array, Array, Array]:
    """The finished projections without a kernel: queries [H, N], keys [K, N] and values [K, N]."""
    y_HN = added_up(self.sums_PM).astype(self.dtype).reshape(-1, self.width)
    q_HN, k_KN, v_KN = jnp.split(y_HN, (self.heads, self.heads + self.kv_heads))
    return self._rotated(q_HN), self._rotated(k_KN), v_KN

  def _rotated(self, x_HN: Array) -> Array:
    if self.turn_2N is None:
      return x_HN
    sin, cos = self.turn_2N
    first, second = jnp.split(x_HN.astype(jnp.float32), 2, -1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(rotated, -1).astype(x_HN.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialAttention:
  """One token's attention over each part of a cache, still to be joined: a `linear.ComputedRow`.

  For several tokens, one per row, the heads of all rows stand in H; then only `joined` is used.

  Attributes:
    y_PHN: float32, sums of the part's values with the weights e^(score - most).
    most_PH: float32, each head's largest score in the part; -1e30 in a part of which the token sees
      nothing.
    weight_PH: float32, each head's sum of the weights e^(score - most).
    dtype: of the joined result.
  """

  y_PHN: Array
  most_PH: Array
  weight_PH: Array
  dtype: Any = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """Width of the joined row: the number of heads times the width of a head."""
    return self.y_PHN.shape[1] * self.y_PHN.shape[2]

  @property
  def size(self) -> int:
    """How many numbers the joined row has."""
    return self.width

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The inputs of a kernel that joins the parts: sums, largest scores and sums of weights."""
    return self.y_PHN, self.most_PH, self.weight_PH

  def takes(self, rows: int, backend: str) -> bool:
    """Whether a CTA can join `rows` of the row's numbers: they must be whole heads."""
    del backend
    return rows % self.y_PHN.shape[2] == 0

  def write(self, arrays: Any, part: Any, to: Any) -> None:
    """Joins the parts' results of some heads, and writes them, rounded to `dtype`, as float32.

    Args:
      arrays: references to the inputs that the property `arrays` lists.
      part: slice of the row, whole heads.
      to: float32 reference, as long as the slice.
    """
    y, most, weight = arrays
    parts, _, width = y.shape
    whole, across = width % WARPGROUP == 0, plgpu.Layout.WGMMA.reduce(0)
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
    """The attention over all parts of the cache, in `dtype`, computed without a kernel."""
    share_PH = jnp.exp(self.most_PH - self.most_PH.max(0))
    sums_HN = jnp.sum(self.y_PHN * share_PH[..., None], 0)
    return (sums_HN / jnp.sum(self.weight_PH * share_PH, 0)[:, None]).astype(self.dtype)

  def __call__(self) -> Array:
    """The joined result as one row, [1, `width`], computed without a kernel."""
    return self.joined().reshape(1, -1)


def _total(terms: list[Array]) -> Array:
  return functools.reduce(operator.add, terms)


def takes_partial(
  own: PartialProjections, k_BTKN: Array, v_BTKN: Array, backend: str = "auto"
) -> bool:
  """Whether `attend_partial` takes these arrays.

  Besides the conditions of `takes`, it needs a single row, at most 8 heads of queries for each head
  of keys, and jax 0.11 or later, where a kernel can write into the caches in place.

  Raises:
    ValueError: as for `takes`, where the further conditions hold.
  """
  q_BSHN: Any = jax.ShapeDtypeStruct((1, 1, own.heads, own.width), own.dtype)
  few = own.heads // own.kv_heads <= _MOST_SHARED and k_BTKN.shape[0] == 1
  return KERNELS_WRITE_IN_PLACE and few and takes(q_BSHN, k_BTKN, v_BTKN, backend)


def attend_partial(
  own: PartialProjections,
  k_TKN: Array,
  v_TKN: Array,
  position: Array,
  *,
  scale: float,
  window: int = 0,
) -> tuple[Array | PartialAttention, Array, Array]:
  """Finishes one token's projections, computes its attention, and adds the token to the cache.

  The attention is that of `attend_cache` over the cache with the token, up to rounding. Not
  differentiable.

  Args:
    own: the token's projections, for which `takes_partial` is True.
    k_TKN, v_TKN: the cache, without the token; v_TKN must be finite at all positions.
    position: int32 [1], of the token.
    scale: factor of the scores.
    window: positions that the token sees, itself included; 0: all.

  Returns:
    The attention, [H, N], or with several parts a `PartialAttention` that joins to it; and the
    cache's keys and values with the token at its position, written in place.
  """
  length, kv_heads, width = k_TKN.shape
  rotated = own.turn_2N is not None
  shape = Shape(
    rows=1,
    heads=own.heads,
    kv_heads=kv_heads,
    length=length,
    width=width,
    # One block for each warpgroup, if there are enough multiprocessors: the more of them read the
    # cache, the sooner it is read, and joining the parts costs the kernel that reads them little.
    parts=_parts(length, kv_heads, _WARPGROUPS),
    warpgroups=_WARPGROUPS,
    dtype=k_TKN.dtype,
    scale=scale,
    window=window,
    partial=True,
    rotated=rotated,
    simulation=interpretation(),
  )
  projections = (own.sums_PM, own.turn_2N) if rotated else (own.sums_PM,)
  found, k_TKN, v_TKN = attend(projections, k_TKN, v_TKN, position, shape=shape)
  found = found if shape.parts == 1 else PartialAttention(*found, dtype=shape.dtype)
  return found, k_TKN, v_TKN


def _warpgroups(rows: int) -> int:
  """Warpgroups of a CTA: two for a single row, one for several rows."""
  return _WARPGROUPS if rows == 1 else 1


def _parts(length: int, heads: int, blocks: int) -> int:
  """P, the number of CTAs that share the cache of one row's head of keys.

  They are as many as it takes for each to read at most `blocks` blocks of 64 positions. If all
  heads' CTAs together would then outnumber the multiprocessors, they are the most that do not, but
  at least one.

  Args:
    length: T.
    heads: R K, heads of keys of all rows.
    blocks: the most blocks that a CTA should read.
  """
  return max(min(-(-length // (blocks * BLOCK)), resolve_num_sms(None) // heads), 1)
