"""Operations with one operand for many rows, whose gradient is a sum that is added in float32.

Where a model computes in bfloat16, the derivative that jax makes of such an operation adds bfloat16
numbers. XLA's programs for GPUs then round each partial sum, and a sum of many equal numbers stops
growing: 256 + 1 is 256. Here the sum is float32, and is rounded to the operand's own type.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int


@jax.custom_vjp
def looked_up(table_VD: Float[Array, "V D"], index: Int[Array, "*n"]) -> Float[Array, "*n D"]:
  """Rows of a table: result [*n, D], in the table's type.

  The gradient of a row is the sum over all tokens that look it up. In bfloat16 that would also be
  slow: on a Hopper GPU each addition of a bfloat16 number is a loop that repeats until no other
  thread has changed the number meanwhile, while one instruction adds four float32 numbers.
  """
  return table_VD[index]


def _looked_up_fwd(table_VD, index):
  return table_VD[index], (index, jnp.zeros((0, len(table_VD)), table_VD.dtype))


def _looked_up_bwd(kept, bar):
  index, like = kept
  wide = jnp.promote_types(like.dtype, jnp.float32)
  return added_rows(index, bar.astype(wide), like.shape[1]).astype(like.dtype), None


def added_rows(
  index: Int[Array, "*n"], rows: Float[Array, "*n D"], count: int
) -> Float[Array, "count D"]:
  """A table of `count` rows with `rows` added up at their indices: float32 (float64 stays).

  An index of `count` or more is left out; one below 0 counts from the end.
  """
  wide = jnp.promote_types(rows.dtype, jnp.float32)
  zeros = jnp.zeros((count, rows.shape[-1]), wide)
  return zeros.at[index].add(rows.astype(wide), mode="drop")


looked_up.defvjp(_looked_up_fwd, _looked_up_bwd)


def plus_bias(y: Float[Array, "*rows *shape"], bias: Any) -> Float[Array, "*rows *shape"]:
  """y plus a bias that is rounded to y's type, in that type; y itself without a bias.

  Args:
    y: a product's rows.
    bias: a parameter or an array [*shape]; None: there is none.
  """
  return y if bias is None else _plus(y, bias[...])


@jax.custom_vjp
def _plus(y: Array, bias: Array) -> Array:
  return y + bias.astype(y.dtype)


def _plus_fwd(y, bias):
  return _plus(y, bias), jnp.zeros((*bias.shape, 0), bias.dtype)


def _plus_bwd(like, bar):
  rows = tuple(range(bar.ndim - like.ndim + 1))
  return bar, _wide(bar).sum(rows).astype(like.dtype)


_plus.defvjp(_plus_fwd, _plus_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_heads(x: Float[Array, "*n D"], heads: int) -> Float[Array, "*n H D"]:
  """A row that all heads of an attention share, once for each: [..., H, D] in its own type.

  The row's gradient is the sum over the heads.
  """
  return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], heads, x.shape[-1]))


def _for_heads_fwd(x, heads):
  return for_heads(x, heads), None


def _for_heads_bwd(heads, kept, bar):
  del heads, kept
  return (_wide(bar).sum(-2).astype(bar.dtype),)


for_heads.defvjp(_for_heads_fwd, _for_heads_bwd)


@jax.custom_vjp
def weighed(coefficient_BS1: Float[Array, "*B 1"], y_BSD: Float[Array, "*B D"]) -> Array:
  """Each token's row times its coefficient, which is rounded to y's type: [..., D] in that type."""
  return coefficient_BS1.astype(y_BSD.dtype) * y_BSD


def _weighed_fwd(coefficient_BS1, y_BSD):
  return weighed(coefficient_BS1, y_BSD), (coefficient_BS1, y_BSD)


def _weighed_bwd(kept, bar_BSD):
  coefficient_BS1, y_BSD = kept
  wide = jnp.promote_types(y_BSD.dtype, jnp.float32)
  coefficient_bar = (bar_BSD.astype(wide) * y_BSD.astype(wide)).sum(-1, keepdims=True)
  y_bar = coefficient_BS1.astype(y_BSD.dtype) * bar_BSD
  return coefficient_bar.astype(coefficient_BS1.dtype), y_bar


weighed.defvjp(_weighed_fwd, _weighed_bwd)


def _wide(x: Array) -> Array:
  """x in float32, made of the bits of bfloat16 numbers; float64 stays as it is.

  By a cast, XLA would leave out the rounding to bfloat16 before it. Where an activation made x, its
  kernel then writes float32 numbers for sum and product, of twice the bytes, and a second kernel
  rounds and adds them; now one kernel makes both.
  """
  if x.dtype != jnp.bfloat16:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
  bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
  return lax.bitcast_convert_type(bits << 16, jnp.float32)
