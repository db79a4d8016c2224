"""Attention caches in pages, which many requests share.

A pool of pages is an attention cache whose rows are pages: with pages of 64 tokens, a pool of 100
pages is a cache [100, 64, ...]. A page table says which pages hold the positions of a row: if the
table of a row is [7, 2], page 7 holds its positions 0 to 63, and page 2 its positions 64 to 127.
The idea is PagedAttention's (vLLM, arXiv 2309.06180).

A row's new tokens are written up to its last one, the padding after it is not; and a row reads the
values of its pages up to its last token only. So padding and rows without a request change no page,
and the values of other requests reach no row.

    G  pages of the pool      T  tokens of a page      B  rows      P  pages of a row
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.kernels.one_row import attention as one_token
from scmoe.kernels.one_row.without_gradient import without_gradient
from scmoe.layers.dot_product import attend_stored, stored

NO_PAGE = 2**30  # past the end of every pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
  """Which pages hold each row's positions, in one pass.

  Attributes:
    page_BP: int32, the pages of each row in the order of its positions; any number where a row has
      no page, such as `NO_PAGE`.
    last_B: int32, the position of each row's last new token; -1 for a row without one.
  """

  page_BP: Any
  last_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTables:
  """The tables of several groups of rows in one pass; the rows of a group have equally many tokens.

  The pass has one row, [1, N], with the tokens of all rows of all groups one after the other.
  Example: a group of 64 rows of one token and one of 4 rows of 128 tokens make N = 576.

  Attributes:
    tables: each group's table.
    tokens: for each group the number of tokens of a row, with padding.
  """

  tables: tuple[PageTable, ...]
  tokens: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def groups(self, *new_1N: Array) -> list[tuple[Any, ...]]:
    """For each group its table, and its part of each of the arrays [1, N, ...] as [B, S, ...]."""
    found, begin = [], 0
    for table, count in zip(self.tables, self.tokens):
      rows = table.last_B.shape[0]
      end = begin + rows * count
      own = (x[0, begin:end].reshape(rows, count, *x.shape[2:]) for x in new_1N)
      found.append((table, *own))
      begin = end
    return found


Table = PageTable | PageTables | None


def by_group(function: Callable[..., Array], table: Table, *new_BS: Array) -> Array:
  """function(table, *new_BS); with `PageTables` the results for each group, joined to [1, N, ...].

  Args:
    function: (table, arrays [B, S, ...]) -> an array [B, S, ...].
    table: the table or tables of the pass.
    new_BS: arrays of the new tokens.
  """
  if not isinstance(table, PageTables):
    return function(table, *new_BS)
  found = [function(*group) for group in table.groups(*new_BS)]
  return jnp.concatenate([y.reshape(1, -1, *y.shape[2:]) for y in found], 1)


def written(cache: Array, new_BS: Array, positions_BS: Array | None, table: Table) -> Array:
  """A cache with the new tokens' values [B, S, ...] written into it.

  With a table, tokens after their row's last one (`PageTable.last_B`) are not written.

  Args:
    cache: without a table the rows' own cache [B, T, ...], else the pool [G, T, ...].
    new_BS: values of the new tokens; converted to the cache's dtype.
    positions_BS: int32 position of each new token. Without a table also None: 0 to S - 1.
    table: the rows' pages; None: each row has its own cache.
  """
  if table is None:
    return stored(cache, new_BS, positions_BS)
  if isinstance(table, PageTables):
    assert positions_BS is not None
    for own, new, positions in table.groups(new_BS, positions_BS):
      cache = written(cache, new, positions, own)
    return cache
  assert positions_BS is not None
  size, count = cache.shape[1], table.page_BP.shape[1]
  column_BS = jnp.minimum(positions_BS // size, count - 1)
  page_BS = jnp.take_along_axis(table.page_BP, column_BS, 1)
  page_BS = jnp.where(positions_BS <= table.last_B[:, None], page_BS, NO_PAGE)
  at = cache.at[page_BS, positions_BS % size]
  return at.set(new_BS.astype(cache.dtype), mode="drop")


def read(cache: Array, table: PageTable | None) -> Array:
  """The values at the positions 0, 1, ... of each row: without a table the cache, else a copy.

  The copy, [B, P · T, ...], has zeros at the positions after a row's last new token. An earlier
  request may have left values there. An infinite one would make the row's result NaN although its
  score is masked: the sum over values has the term 0 · inf.

  Args:
    cache, table: as for `written`.
  """
  if table is None:
    return cache
  pages = jnp.take(cache, table.page_BP, axis=0, mode="clip")
  rows = pages.reshape(pages.shape[0], -1, *cache.shape[2:])
  seen_BT = jnp.arange(rows.shape[1]) <= table.last_B[:, None]
  return jnp.where(seen_BT.reshape(*seen_BT.shape, *[1] * (rows.ndim - 2)), rows, 0)


# Whether the kernel may read pages where they lie, rather than copies of them.
IN_PLACE = True


def attend_over(
  q_BSHN: Array,
  k_cache: Array,
  v_cache: Array,
  positions_BS: Array,
  table: PageTable | None,
  *,
  scale: float | None = None,
  window: int = 0,
  sinks_H: Array | None = None,
  chunk: int = 0,
  full: Array | None = None,
) -> Array:
  """`attend_stored` over caches of rows, or with a table over pools of pages: [B, S, H, N].

  With `IN_PLACE`, a table and one token per row our kernel reads the pages where they lie, and only
  up to the row's token, if it takes the arrays and there are no sinks, no chunks and no `full`.
  Otherwise, and for every gradient, it attends to what `read` returns: with a table a copy of all P
  pages of every row.

  Args:
    q_BSHN: queries of the new tokens.
    k_cache, v_cache: caches or pools that contain the new tokens' keys and values already.
    positions_BS: int32 position of each new token.
    table: as for `written`.
    scale, window, sinks_H, chunk, full: as for `attend_stored`.
  """
  special: dict[str, Any] = {"sinks_H": sinks_H, "chunk": chunk, "full": full}

  def copied(q: Array, k: Array, v: Array, positions: Array, table: PageTable | None) -> Array:
    k, v = (read(x, table).astype(q.dtype) for x in (k, v))
    return attend_stored(q, k, v, positions, scale=scale, window=window, **special)

  given = q_BSHN, k_cache, v_cache, positions_BS, table
  plain = IN_PLACE and sinks_H is None and full is None and not chunk
  if table is None or not plain or not one_token.takes(q_BSHN, k_cache, v_cache):
    return copied(*given)
  factor = q_BSHN.shape[-1] ** -0.5 if scale is None else scale

  def in_place(q: Array, k: Array, v: Array, positions: Array, table: PageTable) -> Array:
    del positions  # a row's only token is its last one
    rows = table.page_BP, table.last_B
    return one_token.attend_pages(q[:, 0], k, v, *rows, scale=factor, window=window)[:, None]

  return without_gradient(in_place, copied, *given)


def with_table(caches: Any, table: Table) -> Any:
  """Attention caches with this table in place of the one that they have; None: without a table.

  Args:
    caches: a tree of pools (`KeyValues`, `Latents`), as `Trunk.init_caches` makes it with a row for
      each page. Where the arrays of several layers are stacked, every layer gets the same table.
      Other objects in the tree, such as caches of experts, stay as they are.
    table: the rows' pages.
  """

  def one(cache: Any) -> Any:
    if not is_cache(cache):
      return cache
    bare = dataclasses.replace(cache, table=None)
    shape = jax.tree.leaves(bare)[0].shape
    layers = shape[: len(shape) - cache.dimensions]
    own = jax.tree.map(lambda x: jnp.broadcast_to(x, (*layers, *x.shape)), table)
    return dataclasses.replace(cache, table=own)

  return jax.tree.map(one, caches, is_leaf=is_cache)


def is_cache(x: Any) -> bool:
  """Whether x is the cache of an attention: only these have a field `table`."""
  return hasattr(x, "table")
