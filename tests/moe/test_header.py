"""Counts behind the rows: exact in every type of row, one fusion with what fills them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn, float8_e5m2

from scmoe.moe.dispatch import header, local

TYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, float8_e4m3fn, float8_e5m2]
COUNTS = [0, 1, 255, 256, 65535, 65536, 16777215, 16777216, 2**31 - 1]


def blocks(peers, rows, counts, width, dtype):
  """Rows of random numbers with room for the header behind them."""
  spare = header.header_rows(counts, width, dtype)
  values = np.random.default_rng(0).normal(size=(peers, rows + spare, width))
  return jnp.asarray(values, jnp.float32).astype(dtype)


@pytest.mark.parametrize("width", [1, 8, 64])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: np.dtype(d).name)
def test_counts_come_back_and_rows_stay(dtype, width):
  with jax.enable_x64(dtype == jnp.float64):
    counts_WN = jnp.asarray([COUNTS, COUNTS[::-1]], jnp.int32)
    rows_WBD = blocks(2, 3, len(COUNTS), width, dtype)
    written = jax.jit(header.write_header)(rows_WBD, counts_WN)
    read = jax.jit(header.read_header, static_argnums=1)(written, len(COUNTS))
    assert written.dtype == rows_WBD.dtype
    assert written.shape == rows_WBD.shape
    np.testing.assert_array_equal(read, counts_WN)
    np.testing.assert_array_equal(written[:, :3], rows_WBD[:, :3])


def test_few_rows():
  """E / W + 2 counts of four digits: one row, at any width that a model has."""
  assert header.header_rows(18, 2048, jnp.bfloat16) == 1
  assert header.header_rows(18, 64, jnp.bfloat16) == 2
  assert header.header_rows(18, 2048, jnp.float32) == 1


def test_the_rows_gradient_passes_and_the_counts_have_none():
  rows_WBD = blocks(2, 3, 2, 4, jnp.float32)
  counts_WN = jnp.ones((2, 2), jnp.int32)

  def loss(rows_WBD):
    written = header.write_header(rows_WBD, counts_WN)
    read = header.read_header(written, 2)
    return (written[:, :3] ** 2).sum() + read.sum().astype(jnp.float32)

  gradient = np.asarray(jax.grad(loss)(rows_WBD))
  np.testing.assert_array_equal(gradient[:, :3], 2 * rows_WBD[:, :3])
  np.testing.assert_array_equal(gradient[:, 3:], 0)


def test_the_header_is_filled_in_with_the_rows():
  """No buffer is written twice: one fusion gathers the rows and joins the header to them."""
  peers, rows, tokens, k, width = 4, 16, 32, 2, 128
  block = rows + header.header_rows(3, width, jnp.float32)

  def fill(x_TD, slot_TK, source_R, counts_WN):
    rows_RD = local.gather_rows(x_TD, slot_TK, source_R)
    return header.write_header(rows_RD.reshape(peers, block, width), counts_WN)

  shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)
  x = shape(tokens, width, dtype=jnp.float32)
  lowered = jax.jit(fill).lower(x, shape(tokens, k), shape(peers * block), shape(peers, 3))
  program = lowered.compile().as_text()
  entry = program[program.index("ENTRY") :]
  buffers = [line for line in entry.splitlines() if f"= f32[{peers},{block},{width}]" in line]
  buffers += [line for line in entry.splitlines() if f"= f32[{peers * block},{width}]" in line]
  assert len(buffers) == 1, entry
  assert " fusion(" in buffers[0]
