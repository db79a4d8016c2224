"""A header: counts that travel in the rows' own exchange, in further rows behind each block.

An exchange of its own costs a launch and a meeting of all devices, however few bytes it moves. Rows
are floating-point numbers, so a count is written as digits that their type holds exactly: bf16
holds integers to 2**8, and takes four digits of 8 bits. Every count from 0 to 2**31 - 1 comes back
as it was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

COUNT_BITS = 31  # of a count that is not negative, in int32


def _digits(dtype: Any) -> tuple[int, int]:
  """Digits of a count, and the bits of one digit: what the mantissa holds."""
  bits = min(jnp.finfo(dtype).nmant + 1, COUNT_BITS)
  return -(-COUNT_BITS // bits), bits


def header_rows(counts: int, width: int, dtype: Any) -> int:
  """Rows of D numbers that `counts` counts take."""
  return -(-_digits(dtype)[0] * counts // width)


@jax.custom_vjp
def write_header(rows_WBD: Array, counts_WN: Array) -> Array:
  """Puts counts_WN[w] in the place of the last rows of block w, which nobody reads otherwise.

  The gradient passes through as it is, unread rows and all: cutting it would cost a copy.
  """
  peers, block, width = rows_WBD.shape
  digits, bits = _digits(rows_WBD.dtype)
  rows = header_rows(counts_WN.shape[1], width, rows_WBD.dtype)
  shift_C1 = bits * jnp.arange(digits, dtype=jnp.int32)[:, None]
  digit_WCN = (counts_WN[:, None, :] >> shift_C1) & (2**bits - 1)
  digit_WF = digit_WCN.reshape(peers, -1).astype(rows_WBD.dtype)
  digit_WF = jnp.pad(digit_WF, ((0, 0), (0, rows * width - digit_WF.shape[1])))
  # Joined, not added: it fuses with what makes the rows, and only the header itself is ever stored.
  return jnp.concatenate([rows_WBD[:, : block - rows], digit_WF.reshape(peers, rows, width)], 1)


def _write_header_fwd(rows_WBD, counts_WN):
  return write_header(rows_WBD, counts_WN), None


def _write_header_bwd(_, bar_WBD):
  return bar_WBD, None


write_header.defvjp(_write_header_fwd, _write_header_bwd)


def read_header(rows_WBD: Array, counts: int) -> Array:
  """int32 [W, N]: the counts behind the blocks that arrived, by sender. They have no gradient."""
  peers, block, width = rows_WBD.shape
  digits, bits = _digits(rows_WBD.dtype)
  rows = header_rows(counts, width, rows_WBD.dtype)
  header_WF = jax.lax.stop_gradient(rows_WBD)[:, block - rows :].reshape(peers, rows * width)
  digit_WCN = header_WF[:, : digits * counts].reshape(peers, digits, counts).astype(jnp.int32)
  # Spelled out, not a sum over an axis: it fuses with whatever reads the counts.
  return sum((digit_WCN[:, c] << bits * c for c in range(1, digits)), digit_WCN[:, 0])
