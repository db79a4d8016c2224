"""The running softmax of `attention_kernel`, and the layouts of its numbers in registers.

The online form of Milakov and Gimelshein (arXiv 1805.02867): a worker adds one block of the cache
after the other, and two workers' results can be merged.

    M  rows of a matrix instruction (64), of which G hold queries      N  width of a head
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.one_row.attention_memory import ROWS

UNSEEN = -1e30  # the score of a position that is masked for the token

TILE = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = TILE.reduce(1), TILE.reduce(0)  # one number a row, one a column


class Softmax(NamedTuple):
  """A running softmax for each row of a tile, of which rows 0 to G - 1 hold queries.

  Attributes:
    most_M: each row's largest score so far; `UNSEEN` without a position.
    weight_M: each row's sum of the weights e^(score - most) so far.
    y_MN: each row's sum of values times these weights, which are rounded to the type of the cache
      as their block is added.
  """

  most_M: Any
  weight_M: Any
  y_MN: Any


def nothing_seen(width: int) -> Softmax:
  """A running softmax of no position."""
  low_M = plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW)
  zero_M = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
  zero_MN = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), TILE)
  return Softmax(low_M, zero_M, zero_MN)


def as_tile(x_M: Any, shape: tuple[int, ...]) -> Any:
  """A tile that repeats x, one number for each row, in every column."""
  return lax.broadcast_in_dim(x_M, shape, (0,))


def merged(one: Softmax, other: Softmax) -> Softmax:
  """The running softmax of the positions of both; `one` and `other` have none in common."""
  both_M = jnp.maximum(one.most_M, other.most_M)
  one_M, other_M = jnp.exp(one.most_M - both_M), jnp.exp(other.most_M - both_M)
  weight_M = one.weight_M * one_M + other.weight_M * other_M
  y_MN = one.y_MN * as_tile(one_M, one.y_MN.shape) + other.y_MN * as_tile(other_M, one.y_MN.shape)
  return Softmax(both_M, weight_M, y_MN)
