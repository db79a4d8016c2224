"""Rows that travel to their experts in fp8: half of bfloat16's bytes (`dispatch.fp8`).

A row leaves as e4m3 numbers with a scale for each 128 of them, in the blocks of DeepSeek-V3 (arXiv
2412.19437, section 3.3), whose dispatch is in fp8 too. Scales are powers of two, so a byte holds
one: its exponent. Numbers and exponents of a row are one piece of bytes, so that a dispatch stays
one all-to-all. A row of 2,048 bfloat16 numbers, 4,096 bytes, leaves as 2,064: 2,048 numbers and 16
exponents.

The experts' results come back as they are computed, and gradients travel in both directions in
their own type: the gradient of a row is that of the rounded row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

from scmoe.kernels.grouped_matmul.fp8 import BLOCK, E4M3, dequantised_rows, quantised_rows
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import Exchange, wait

_MANTISSA = 23  # bits of a float32 below its exponent
_ALIGN = 16  # rows of bytes begin at multiples of so many bytes, which kernels read at once


class Fp8Exchange(Exchange):
  """An exchange whose rows travel to their experts in fp8; in all else as `Exchange`.

  In float16 a number of 63,488 or more arrives infinite (`rounded_rows`).
  """

  def to_experts(self, x: Array, chunk: int | None = None) -> Array:
    """Does what `Exchange.all_to_all` does, with rows that arrive rounded (`rounded_rows`).

    A device's rows for its own experts are rounded too, so the result does not depend on where an
    expert lies. On one device no row travels, and it returns x.
    """
    if self.axis is None or self.size == 1:
      return x
    sent = row_bytes(jax.lax.stop_gradient(x))
    if chunk is not None:
      # The first barrier has the bytes made before the dense step that is to hide the exchange may
      # start: XLA cannot put that step before the rounding. The last one holds the bytes back until
      # the values for which the chunk waits (`waiting`) are computed. In the backward pass x has
      # the barriers of a plain exchange.
      x, sent = barrier((x, sent), "forward")
      x, sent = barrier((wait(x, chunk), sent), "forward")
    return _exchanged(self, x, sent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange: Exchange, x_RD: Array, sent: Array) -> Array:
  """Exchanges `sent`, the bytes of x's rows, and returns the rows that arrive.

  The gradient is that of exchanging x itself.
  """
  return read_rows(exchange.all_to_all(sent), x_RD.shape[-1], x_RD.dtype)


_exchanged.defvjp(
  lambda exchange, x_RD, sent: (_exchanged(exchange, x_RD, sent), None),
  lambda exchange, _, bar_RD: (exchange.all_to_all(bar_RD), None),
)


def row_size(width: int) -> int:
  """Bytes of a row of `width` numbers: numbers, exponents, and zeros up to a multiple of 16."""
  return -(-(width + -(-width // BLOCK)) // _ALIGN) * _ALIGN


def row_bytes(x_RD: Float[Array, "*R D"]) -> UInt8[Array, "*R bytes"]:
  """Rounds rows to fp8, and writes each as bytes (`row_size`)."""
  q_RD, scale_RB = quantised_rows(x_RD)
  numbers = jax.lax.bitcast_convert_type(q_RD, jnp.uint8)
  exponents = jax.lax.bitcast_convert_type(scale_RB, jnp.uint32) >> _MANTISSA
  row = jnp.concatenate([numbers, exponents.astype(jnp.uint8)], -1)
  rest = row_size(x_RD.shape[-1]) - row.shape[-1]
  return jnp.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, rest)])


def read_rows(
  row: UInt8[Array, "*R bytes"], width: int, dtype: jnp.dtype
) -> Float[Array, "*R width"]:
  """The rows, of `width` numbers of type `dtype`, that `row_bytes` wrote."""
  blocks = -(-width // BLOCK)
  q_RD = jax.lax.bitcast_convert_type(row[..., :width], E4M3)
  exponents = row[..., width : width + blocks].astype(jnp.uint32) << _MANTISSA
  scale_RB = jax.lax.bitcast_convert_type(exponents, jnp.float32)
  return dequantised_rows(q_RD, scale_RB, dtype)
