"""Gradients of an embedding table that travel between devices as rows, not as a table.

A microbatch of 8,192 tokens looks up 8,192 rows of a table, and its gradient is 0 in all others. As
a float32 table of 50,304 rows of width 2,048 that gradient is 412 MB. It is complete when the
backward pass has ended, so its sum over devices has no computation beside it. The 8,192 rows are
34 MB in bfloat16.

So with `overlap.embedding_rows` each device gathers the rows and token ids of all devices
(`looked_up_apart`), and adds the rows to a table by itself. That needs a step whose table gets no
other gradient: one group of microbatches, and a model with a head of its own. Otherwise the table
has to be summed as well; to begin that sum earlier did not make a step faster
(experiments/LOG.md, "in the middle of the backward pass").

Frameworks with sparse gradients gather rows so, too (Horovod's `IndexedSlices`; Parallax, arXiv
1808.02621).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.kernels.wide_sums import added_rows
from scmoe.models.gradient_totals import GradientTotal
from scmoe.parallel.mesh import axis_index, axis_size, own_share

PyTree = Any


# Path of the token table in a tree like a language model's parameters.
TABLE = ("embedding", "tokens")


def table_of(tree: PyTree) -> Any:
  """The leaf of the token table, in a tree like a language model's parameters."""
  module, name = TABLE
  return tree[module][name]


def without_table(totals: PyTree) -> PyTree:
  """The totals, with None for that of the token table."""
  module, name = TABLE
  return {**totals, module: {**totals[module], name: None}}


def rows_are_fewer(
  tokens: int, vocab: int, *, itemsize: int, table_itemsize: int, scattered: bool
) -> bool:
  """Whether rows take at most half the bytes that the table's sum would send from each device.

  Half, because each device also adds up all devices' rows, which takes time of its own.

  Of n devices each sends its rows to the n - 1 others. A ring sends (n - 1)/n of the table, twice
  for a sum. So n is on neither side of the comparison: two devices with 16,384 tokens each send as
  many bytes of rows, for the same table, as eight with 4,096.

  Args:
    tokens: looked up by all devices that sum the gradient.
    vocab: rows of each device's table.
    itemsize, table_itemsize: bytes of an element, as rows and as a table.
    scattered: whether each rank needs only its share of the table: a ring then sends it once, not
      twice.
  """
  return 2 * tokens * itemsize <= (1 if scattered else 2) * vocab * table_itemsize


def total_by_rows(
  total: GradientTotal | None, table_VD: Float[Array, "V D"], tokens: int, dtype: jnp.dtype
) -> GradientTotal | None:
  """The total of a table's gradient for `looked_up_apart`; None if it is to travel as a table.

  Args:
    total: from a tree that is given to `scmoe.models.gradient_totals.added`, too.
    table_VD: this device's table.
    tokens: looked up by this device in the group.
    dtype: of the rows' gradients.
  """
  if total is None or not (total.rows and total.last and total.empty and total.axes):
    return None
  fewer = rows_are_fewer(
    tokens * axis_size(*total.axes),
    len(table_VD),
    itemsize=min(jnp.dtype(dtype).itemsize, jnp.dtype(total.dtype).itemsize),
    table_itemsize=jnp.dtype(total.dtype).itemsize,
    scattered=total.into is not None,
  )
  return total if fewer else None


@jax.custom_vjp
def looked_up_apart(
  total: GradientTotal, table_VD: Float[Array, "V D"], index: Int[Array, "*n"]
) -> Float[Array, "*n D"]:
  """`scmoe.kernels.wide_sums.looked_up`, whose gradient is one with respect to the table's total.

  It is the sum over all devices on `GradientTotal.axes`, or this rank's share of it, float32. The
  table has no gradient of its own.

  Args:
    total: from `total_by_rows`.
    table_VD: the table.
    index: rows to look up, on each device as many.
  """
  del total
  return table_VD[index]


def _looked_up_fwd(total, table_VD, index):
  bare = dataclasses.replace(total, value=None, into=None)
  like = jnp.zeros((0, len(table_VD)), jnp.int8)
  return table_VD[index], (bare, total.into is not None, index, like)


def _looked_up_bwd(kept, bar):
  total, scattered, index, like = kept
  vocab, width = like.shape[1], bar.shape[-1]
  with jax.named_scope("gradients"):
    narrow = jnp.dtype(total.dtype).itemsize < bar.dtype.itemsize
    sent = bar.astype(total.dtype) if narrow else bar
    everyones = lambda x: jax.lax.all_gather(x, total.axes, tiled=True)
    index_N, rows_ND = everyones(index.reshape(-1)), everyones(sent.reshape(-1, width))
    if scattered:
      how = total.division
      if how.dimension == -1:
        rows_ND = own_share(rows_ND, 1, *how.axes)
      else:
        vocab //= how.ranks
        index_N = index_N - axis_index(*how.axes) * vocab
    # Rows of another rank's share are left out; an index below 0 would count from the end.
    index_N = jnp.where(index_N < 0, vocab, index_N)
    found = added_rows(index_N, rows_ND, vocab)
  if scattered:
    return dataclasses.replace(total, into=found), None, None
  return dataclasses.replace(total, value=found), None, None


looked_up_apart.defvjp(_looked_up_fwd, _looked_up_bwd)
