"""Embeddings that data ranks partition (`mesh.embedding`): which part each has, and what travels.

Every data rank needs rows of the whole table, those of its own tokens, and scores of the whole
vocabulary. With a copy on each rank, N ranks hold the table and its moments N times. Partitioned,
each part of the table lives once (SE-MoE's embedding partition, arXiv 2205.10034).

A table that is only looked up is cut along its width: each rank has a slice of every row. Example:
two ranks, a width of 4, and the tokens [7, 2] on rank 0, [2, 2] on rank 1. Each rank gathers all
four tokens and looks up its two columns of their rows. One all-to-all then gives rank 0 the other
two columns of rows 7 and 2, and rank 1 those of row 2, twice. So each row travels once, and the
buffers have the same size whatever the tokens are. Cut by rows, rank 0 might need all its rows from
one rank, and every buffer would need room for that. The gradients of the rows go back the same way,
and each rank adds up those of its columns for the tokens of all ranks.

A head is cut along the vocabulary, so that each rank scores its part for the tokens of all ranks
(`scmoe.layers.cross_entropy`): hidden states travel, and their gradients. A table that is also the
head is cut so, too. For the lookup one all-to-all of its parts, 1/N of the table, turns parts of
the vocabulary into slices of the width.

Hidden states of many tokens can be more bytes than the table. Then the table travels, once for each
microbatch: the ranks gather it, and each gets its part of the gradient's sum (`rows_travel`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.parallel.collectives import gathered, summed_parts
from scmoe.parallel.mesh import axis_size

AXIS = "data"  # the mesh axis whose ranks partition embeddings
NAME = "vocabulary"  # of the collectives
_GRADIENT = 4  # bytes of an element of a table's gradient, which travels in float32


class Travels(NamedTuple):
  """The choice between rows and tables, for an embedding that data ranks partition.

  Attributes:
    lookup: whether rows of the table travel to the tokens; if not, the table is gathered.
    head: whether hidden states travel to the parts of the head; if not, the head is gathered. A
      tied head has the same choice as the lookup, because one gather serves both.
  """

  lookup: bool
  head: bool


def rows_travel(*, tokens: int, vocab: int, ranks: int, itemsize: int, tied: bool) -> Travels:
  """Whether rows travel: they do if they are no more bytes than the table, in one microbatch.

  The bytes that leave a rank in the forward and the backward pass count, as multiples of
  D · (N - 1) / N for a width D and N ranks. With V = 50,304, N = 2 and bfloat16, a table costs
  301,824, and the hidden states of 16,384 tokens a rank for the head 131,072. Token ids and sums of
  the softmax, a few bytes a token, are left out.

  Args:
    tokens: of a rank in a microbatch.
    vocab: V, divided by the devices of the tensor axis.
    ranks: N, of the data axis.
    itemsize: bytes of an element of the compute type.
    tied: whether the table is also the head.
  """
  table = vocab * (itemsize + _GRADIENT)  # an all-gather, and a reduce-scatter of the gradient
  lookup = 2 * itemsize * tokens
  head = 2 * itemsize * tokens * ranks
  if tied:
    turned = 2 * itemsize * vocab // ranks
    both = lookup + turned + head <= table
    return Travels(both, both)
  return Travels(lookup <= table, head <= table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(part: Array, dimension: int) -> Array:
  """The table whose parts the data ranks have, joined along `dimension`.

  The gradient of a part is the sum of the ranks' gradients of it, added in float32 and then rounded
  to the part's type.
  """
  return gathered(part, dimension, (AXIS,), NAME)


def _whole_fwd(part, dimension):
  return whole(part, dimension), jnp.zeros((0,), part.dtype)


def _whole_bwd(dimension, like, bar):
  wide = bar.astype(jnp.promote_types(bar.dtype, jnp.float32))
  return (summed_parts(wide, dimension, (AXIS,), NAME).astype(like.dtype),)


whole.defvjp(_whole_fwd, _whole_bwd)


def columns_of(part: Float[Array, "v D"]) -> Float[Array, "V d"]:
  """This rank's columns of the table, from the ranks' parts of the vocabulary; d = D / ranks."""
  with jax.named_scope(NAME):
    return jax.lax.all_to_all(part, AXIS, 1, 0, tiled=True)


def tokens_of_all_ranks(tokens_BS: Int[Array, "B S"]) -> Int[Array, "N B S"]:
  """The token ids of all data ranks, each with B rows of S."""
  with jax.named_scope(NAME):
    return jax.lax.all_gather(tokens_BS, AXIS)


def to_own_tokens(h_NBSd: Float[Array, "N B S d"]) -> Float[Array, "B S D"]:
  """Whole rows for this rank's tokens, from all ranks' columns of the rows of all ranks' tokens."""
  with jax.named_scope(NAME):
    return jax.lax.all_to_all(h_NBSd, AXIS, 0, 3, tiled=True)[0]


def is_part(elements: int, vocab: int, width: int) -> bool:
  """Whether a table's array in the manual region is a data rank's part of it.

  Args:
    elements: of the array.
    vocab, width: of the whole table.
  """
  return elements * axis_size("tensor") < vocab * width
