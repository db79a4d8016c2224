"""The pieces in which experts are copied from the host's memory; tests/gpu has the copy itself."""

import jax
import jax.numpy as jnp
import pytest

from scmoe.offload import fetch


@pytest.mark.parametrize(
  ("matrix", "dtype", "piece"),
  [
    ((1024, 4096), "bfloat16", (1, 2048)),  # half a row
    ((4096, 1024), "bfloat16", (2, 1024)),
    ((1024, 4096), "int8", (1, 4096)),
    ((1, 4096), "float32", (1, 1024)),  # scales
    ((2048, 768), "bfloat16", (4, 768)),  # 6 KiB: the smallest that gives all threads as much
    ((2048, 1408), "bfloat16", (8, 1408)),
    ((2880, 2880), "bfloat16", (0, 0)),  # XLA's copy
  ],
)
def test_a_matrix_is_cut_into_small_contiguous_parts_that_keep_all_threads_busy(
  matrix, dtype, piece
):
  assert fetch._piece(jax.ShapeDtypeStruct((8, *matrix), jnp.dtype(dtype))) == piece
  rows, columns = piece
  if rows:
    assert matrix[0] % rows == matrix[1] % columns == 0
    assert rows == 1 or columns == matrix[1]
