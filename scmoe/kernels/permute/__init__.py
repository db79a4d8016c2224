"""Which choice of a token fills which row of a buffer, and functions on such rows and choices."""

from scmoe.kernels.permute.permutation import (
  Permutation,
  gather_rows,
  make_permutation,
  permutation_of,
  running_positions,
  sum_chunks,
  sum_copies,
  sum_rows,
  take_rows,
  take_words,
  weigh_rows,
  zero_cotangents,
)

__all__ = [
  "Permutation",
  "gather_rows",
  "make_permutation",
  "permutation_of",
  "running_positions",
  "sum_chunks",
  "sum_copies",
  "sum_rows",
  "take_rows",
  "take_words",
  "weigh_rows",
  "zero_cotangents",
]
