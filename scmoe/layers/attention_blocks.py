"""Attention in blocks, each of some queries to some keys, and joining blocks to one softmax.

A block gives for each query its result over the block's keys alone, and the logarithm of the sum of
its exponentiated scores. From these `joined` makes the result over the keys of two blocks, and the
gradients of each block follow from the result and the logarithm over all keys (FlashAttention-2,
arXiv 2307.08691, section 3.1).

    B  rows      S  queries of a row      T  keys of a row
    H  heads of queries      K  heads of keys      N  width of a query and key      M  of a value
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.base.compat import cudnn_attention, cudnn_attention_gradients

SCORES = 1 << 28  # most scores that XLA computes at a time, 1 GiB of float32; see `_by_parts`

# A block's results, float32 (float64 stays) [B, S, H, M], and the logarithms of the sums of its
# exponentiated scores [B, H, S]. For a query that sees no key of the block they are 0 and -inf.
Result = tuple[Array, Array]


class Places(NamedTuple):
  """The places of the queries or of the keys of a block.

  Attributes:
    row_S: int32 [S], position of each in its row.
    segments_BS: int32 [B, S], document of each; None: attention crosses documents.
    window: for queries only: int32 [], positions that each sees, itself included; may be traced,
      for layers of which some have a window. None: all before it.
  """

  row_S: Array
  segments_BS: Array | None = None
  window: Array | None = None


@dataclasses.dataclass(frozen=True)
class Block:
  """Computes blocks and their gradients, by cuDNN or by XLA.

  Attributes:
    scale: factor on the scores.
    fused: whether cuDNN computes; it knows neither windows nor documents here.
  """

  scale: float
  fused: bool = False

  def attend(
    self,
    q_BSHN: Float[Array, "B S H N"],
    k_BTKN: Float[Array, "B T K N"],
    v_BTKM: Float[Array, "B T K M"],
    seen: tuple[Places, Places] | None,
  ) -> Result:
    """Each query's result over these keys alone, and the logarithms of the sums (`Result`).

    Args:
      q_BSHN, k_BTKN, v_BTKM: H is a multiple of K.
      seen: places of queries and keys: a query sees the key at its own place and those before it,
        within window and document. cuDNN takes places only where those of queries and keys are the
        same. None: every query sees every key.
    """
    if self.fused:
      causal = seen is not None
      return cudnn_attention(q_BSHN, k_BTKN, v_BTKM, scale=self.scale, causal=causal)

    def some(part: tuple[Array, Places | None]) -> Result:
      scores = self._scores(part[0], k_BTKN, part[1] and seen and (part[1], seen[1]))
      largest = scores.max(-1, keepdims=True)
      largest = jnp.where(largest == -jnp.inf, 0.0, largest)
      share = jnp.exp(scores - largest)
      total = share.sum(-1)
      y = jnp.einsum("bkgst,btkm->bskgm", share.astype(v_BTKM.dtype), v_BTKM, **_in(share.dtype))
      y = y / jnp.moveaxis(jnp.where(total == 0, 1.0, total), 3, 1)[..., None]
      return _flat(y), _by_head(jnp.log(total) + largest[..., 0])

    y, logs = self._by_parts(some, (q_BSHN, seen and seen[0]), k_BTKN)
    return _rejoined(y, 1), _rejoined(logs, 2)

  def gradients(
    self,
    q_BSHN: Float[Array, "B S H N"],
    k_BTKN: Float[Array, "B T K N"],
    v_BTKM: Float[Array, "B T K M"],
    seen: tuple[Places, Places] | None,
    *,
    y_BSHM: Array,
    logs_BHS: Array,
    dy_BSHM: Array,
  ) -> tuple[Array, Array, Array]:
    """This block's part of the gradients of queries, keys and values, float32 (float64 stays).

    Args:
      q_BSHN, k_BTKN, v_BTKM, seen: as for `attend`.
      y_BSHM, logs_BHS: results over all keys of all blocks.
      dy_BSHM: gradient of `y_BSHM`, in the type of the queries.
    """
    wide = logs_BHS.dtype
    if self.fused:
      causal, given = seen is not None, (q_BSHN, k_BTKN, v_BTKM, y_BSHM, logs_BHS, dy_BSHM)
      found = cudnn_attention_gradients(*given, scale=self.scale, causal=causal)
      return tuple(x.astype(wide) for x in found)  # pyright: ignore[reportReturnType]
    heads = k_BTKN.shape[2]
    dot_BSH = (y_BSHM.astype(wide) * dy_BSHM.astype(wide)).sum(-1)

    def some(part: Any) -> tuple[Array, Array, Array]:
      q, at, dy, dot, logs = part
      scores = self._scores(q, k_BTKN, at and seen and (at, seen[1]))
      share = jnp.exp(scores - _grouped(logs, heads)[..., None])
      dy = dy.reshape(*dy.shape[:2], heads, -1, dy.shape[-1])
      dv = jnp.einsum("bkgst,bskgm->btkm", share.astype(dy.dtype), dy, **_in(wide))
      d_share = jnp.einsum("bskgm,btkm->bkgst", dy, v_BTKM, **_in(wide))
      dot = _grouped(jnp.moveaxis(dot, 2, 1), heads)[..., None]
      d_scores = (share * (d_share - dot) * self.scale).astype(q.dtype)
      dq = jnp.einsum("bkgst,btkn->bskgn", d_scores, k_BTKN, **_in(wide))
      q = q.reshape(*q.shape[:2], heads, -1, q.shape[-1])
      return _flat(dq), jnp.einsum("bkgst,bskgn->btkn", d_scores, q, **_in(wide)), dv

    # `_by_parts` cuts the second dimension. In the logarithms [B, H, S] the queries are the third
    # one, so they become the second before the cut, and the third again in each part.
    logs_BSH = jnp.moveaxis(logs_BHS, 2, 1)
    turned: Any = lambda part: some((*part[:4], jnp.moveaxis(part[4], 1, 2)))
    given = (q_BSHN, seen and seen[0], dy_BSHM, dot_BSH, logs_BSH)
    dq, dk, dv = self._by_parts(turned, given, k_BTKN)
    return _rejoined(dq, 1), dk.sum(0), dv.sum(0)

  def _scores(self, q_BSHN: Array, k_BTKN: Array, seen: Any) -> Array:
    """Scores [B, K, H / K, S, T] in at least float32; -inf where a query does not see a key."""
    wide = jnp.promote_types(q_BSHN.dtype, jnp.float32)
    q = q_BSHN.reshape(*q_BSHN.shape[:2], k_BTKN.shape[2], -1, q_BSHN.shape[-1])
    scores = self.scale * jnp.einsum("bskgn,btkn->bkgst", q, k_BTKN, **_in(wide))
    if not seen:
      return scores
    return jnp.where(visible(seen[0], seen[1])[:, None, None], scores, -jnp.inf)

  def _by_parts(self, function: Any, given: Any, k_BTKN: Array) -> Any:
    """Calls a function on equal parts of the queries, one after the other, and stacks its results.

    Their number is doubled from 1 until a part has at most `SCORES` scores, so that the scores of
    long rows fit the memory, or until the queries cannot be halved once more.
    """
    rows, queries, heads = given[0].shape[:3]
    scores, count = rows * heads * k_BTKN.shape[1], 1
    while scores * queries // count > SCORES and queries % (2 * count) == 0:
      count *= 2

    def cut(x: Array) -> Array:
      if x.ndim == 0:
        return jnp.broadcast_to(x, (count,))
      axis = 0 if x.ndim == 1 else 1  # `Places.row_S` has no dimension of rows
      parts = x.reshape(*x.shape[:axis], count, queries // count, *x.shape[axis + 1 :])
      return jnp.moveaxis(parts, axis, 0)

    return jax.lax.map(function, jax.tree.map(cut, given))


def visible(queries: Places, keys: Places) -> Array:
  """Which keys each query sees: bool [B, S, T], or [1, S, T] if attention crosses documents."""
  distance_ST = queries.row_S[:, None] - keys.row_S[None]
  seen = (distance_ST >= 0)[None]
  if queries.window is not None:
    seen &= distance_ST < queries.window
  if queries.segments_BS is None or keys.segments_BS is None:
    return seen
  return seen & (queries.segments_BS[:, :, None] == keys.segments_BS[:, None])


def any_visible(queries: Places, keys: Places) -> Array:
  """False only if no query sees any key; True does not promise that one does. Computes no score.

  All keys must lie before all queries. Documents are numbered in their order, so the blocks share
  one only if the last document of the keys is not before the first one of the queries. Padding has
  the number 0, and queries with padding count as sharing a document.
  """
  seen = jnp.ones((), bool)
  if queries.window is not None:
    seen &= queries.row_S[0] - keys.row_S[-1] < queries.window
  if queries.segments_BS is None or keys.segments_BS is None:
    return seen
  return seen & (keys.segments_BS.max(1) >= queries.segments_BS.min(1)).any()


def joined(one: Result, other: Result) -> Result:
  """The results over the keys of two blocks together, from the results of each.

  No key may be in both blocks, and each query must see a key of `one`.
  """
  logs_BHS = jnp.logaddexp(one[1], other[1])
  weigh = lambda result: result[0] * jnp.moveaxis(jnp.exp(result[1] - logs_BHS), 2, 1)[..., None]
  return weigh(one) + weigh(other), logs_BHS


def _in(dtype: Any) -> dict[str, Any]:
  return {"preferred_element_type": dtype}


def _flat(y: Array) -> Array:
  return y.reshape(*y.shape[:2], -1, y.shape[-1])


def _by_head(x_BKGS: Array) -> Array:
  return x_BKGS.reshape(x_BKGS.shape[0], -1, x_BKGS.shape[-1])


def _grouped(x_BHS: Array, heads: int) -> Array:
  return x_BHS.reshape(x_BHS.shape[0], heads, -1, x_BHS.shape[-1])


def _rejoined(parts: Array, axis: int) -> Array:
  """Joins parts of the queries [parts, ...] to one array, whose dimension `axis` counts queries."""
  moved = jnp.moveaxis(parts, 0, axis)
  return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
