"""Gradients of an embedding table that travel between devices as rows, not as a table.

A microbatch of 8,192 tokens looks up 8,192 rows of a table, and its gradient is 0 in all others. As
a float32 table of 50,304 rows of width 1,280 that gradient is 258 MB. It is complete when the
backward pass has ended, so its sum over devices has no computation beside it: 9.7 ms over a link of
26.6 GB/s. The 8,192 rows are 21 MB in bfloat16.

So with `overlap.embedding_rows` the last group of a step sums the table's gradient in two parts:

- as a table, what earlier groups have added to the total, and the head's gradient if the table is
  also the head. The backward pass makes the head's gradient first, so the sum can run beside the
  rest of the pass (`summed_early`).
- as rows, what the last group's lookups add (`looked_up_apart`). Each device gathers the rows and
  token ids of all devices, and adds the rows to the sum by itself.

Both parts are gradients with respect to the same total, so they add up by themselves. A table that
is only looked up has no first part in a step of one group.

Why the mark: XLA's scheduler for GPUs runs one sum at a time, and puts that of the table last,
though its operand is there first. So the gradient of the residual stream waits, in the middle of
the backward pass, for an element of the sum times 0 (`marked`): XLA has to end the sum before that,
beside the pairs behind the mark. A scan over pairs has no mark, and XLA puts the sum behind it; so
rows travel there only if they travel alone.

Frameworks with sparse gradients gather rows so, too (Horovod's `IndexedSlices`; Parallax, arXiv
1808.02621); they gather them in place of the table, not beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.kernels.wide_sums import added_rows
from scmoe.models.gradient_totals import GradientTotal, reduced
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
  tokens: int, vocab: int, ranks: int, *, itemsize: int, table_itemsize: int, scattered: bool
) -> bool:
  """Whether rows take at most half the bytes that the table's sum would send from each device.

  Half, because the table's sum usually stays, beside other work, and the rows come in addition.

  Args:
    tokens: looked up on each device.
    vocab: rows of this device's table.
    ranks: devices that sum the gradient.
    itemsize, table_itemsize: bytes of an element, as rows and as a table.
    scattered: whether each rank needs only its share of the table: a ring then sends it once, not
      twice.
  """
  rows = (ranks - 1) * tokens * itemsize
  table = (1 if scattered else 2) * (ranks - 1) / ranks * vocab * table_itemsize
  return 2 * rows <= table


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
  if total is None or not (total.rows and total.last and total.axes):
    return None
  fewer = rows_are_fewer(
    tokens,
    len(table_VD),
    axis_size(*total.axes),
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


# -- the sum of the table -------------------------------------------------------------------------


def summed_early(models: Sequence[Any], outs: Sequence[Any], total: GradientTotal) -> list[Any]:
  """Returns `outs`; their gradients begin the sum of the table, which the heads of `models` read.

  The first output passes through the rule, too, so that it runs if no head reads the table.

  Args:
    models: language models, one for each microbatch of a group; each gets a table whose gradient
      goes to the total.
    outs: each model's `scmoe.models.trunk.Output`.
    total: from `total_by_rows`.
  """
  heads = [model.embedding for model in models if model.embedding.head is None]
  if total.empty and not heads:  # nothing was added to it, and nothing will be but rows
    return list(outs)
  first, *rest = outs
  tables = [head.tokens[...] for head in heads]
  h_BSD, tables = _summed_early(total, first.h_BSD, tables, first.mark)
  for head, table in zip(heads, tables):
    head.tokens[...] = table
  return [dataclasses.replace(first, h_BSD=h_BSD), *rest]


@jax.custom_vjp
def _summed_early(
  total: GradientTotal, h_BSD: Array, tables: list[Array], mark: Array | None
) -> tuple[Array, list[Array]]:
  del total, mark
  return h_BSD, tables


def _summed_early_fwd(total, h_BSD, tables, mark):
  unread = dataclasses.replace(total, value=None) if total.empty else total
  return (h_BSD, tables), (unread, mark is not None)


def _summed_early_bwd(kept, bars):
  total, has_mark = kept
  h_bar, table_bars = bars
  with jax.named_scope("gradients"):
    wide = [bar.astype(jnp.promote_types(bar.dtype, jnp.float32)) for bar in table_bars]
    addends = wide if total.value is None else [total.value, *wide]
    (new,) = reduced([total], [functools.reduce(jnp.add, addends)])
    found = new.value if new.into is None else new.into
    # XLA cannot fold this to 0, since infinity times 0 is NaN. An infinite element makes the
    # gradients' norm infinite, and the step skips such gradients in any case.
    mark_bar = found[0, 0] * 0 if has_mark else None
  return new, h_bar, [None] * len(table_bars), mark_bar


_summed_early.defvjp(_summed_early_fwd, _summed_early_bwd)


@jax.custom_vjp
def marked(h_BSD: Array) -> tuple[Array, Array]:
  """The residual stream, and a scalar 0 whose gradient is added to that of the whole stream."""
  return h_BSD, jnp.zeros(())


marked.defvjp(
  lambda h_BSD: (marked(h_BSD), None), lambda _, bars: (bars[0] + bars[1].astype(bars[0].dtype),)
)
