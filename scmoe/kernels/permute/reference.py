"""The specification of tiled rows and of the sum of a token's rows, as NumPy loops over choices."""

import numpy as np


def tile_rows_reference(
  expert_TK: np.ndarray, num_experts: int, tile: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Each choice's row (-1: no expert), each expert's row count, and the total with padding.

  Experts lie one after the other, each padded to whole tiles. An expert's row count leaves the
  padding out. Among an expert's rows, all first choices come before all second ones; first choices
  are in the order of their tokens, and so on.
  """
  tokens, choices = expert_TK.shape
  sizes_E = np.zeros(num_experts, np.int64)
  for e in expert_TK.reshape(-1):
    if 0 <= e < num_experts:
      sizes_E[e] += 1
  padded_E = -(-sizes_E // tile) * tile
  next_row_E = np.cumsum(padded_E) - padded_E
  row_TK = np.full((tokens, choices), -1, np.int64)
  for k in range(choices):
    for t in range(tokens):
      e = expert_TK[t, k]
      if 0 <= e < num_experts:
        row_TK[t, k] = next_row_E[e]
        next_row_E[e] += 1
  return row_TK, sizes_E, int(padded_E.sum())


def combine_reference(y_RD: np.ndarray, weight_TK: np.ndarray, row_TK: np.ndarray) -> np.ndarray:
  """Σ_k weight[t, k] · y[row[t, k]] in float64; negative row numbers add nothing."""
  out_TD = np.zeros((row_TK.shape[0], y_RD.shape[1]))
  for t in range(row_TK.shape[0]):
    for k in range(row_TK.shape[1]):
      if row_TK[t, k] >= 0:
        out_TD[t] += np.float64(weight_TK[t, k]) * y_RD[row_TK[t, k]].astype(np.float64)
  return out_TD
