"""A bigram model of bytes: the bits per byte that a trained model must beat."""

from __future__ import annotations

import numpy as np

SYMBOLS = 257  # 256 bytes and the end of text
SMOOTHING = 0.1  # added to every count; bytes never seen together keep a finite cost
_CHUNK = 1 << 20  # pairs counted at a time, to keep the scratch memory small


def count_pairs(tokens: np.ndarray) -> np.ndarray:
  """int64[257, 257]: how often token b follows token a in a stream of `ByteTokenizer` tokens.

  Args:
    tokens: uint16[N + 1], N of whose tokens have a predecessor.
  """
  counts = np.zeros(SYMBOLS * SYMBOLS, np.int64)
  for start in range(0, len(tokens) - 1, _CHUNK):
    piece = tokens[start : start + _CHUNK + 1].astype(np.int32)
    counts += np.bincount(piece[:-1] * SYMBOLS + piece[1:], minlength=len(counts))
  return counts.reshape(SYMBOLS, SYMBOLS)


def bits(fitted: np.ndarray, evaluated: np.ndarray) -> float:
  """Total bits that a bigram model needs for a text.

  Args:
    fitted: int64[257, 257], pair counts of the text to which the model is fitted (`count_pairs`).
    evaluated: int64[257, 257], pair counts of the text that it predicts.
  """
  smooth = fitted + SMOOTHING
  cost = np.log2(smooth.sum(axis=1, keepdims=True)) - np.log2(smooth)
  return float((evaluated * cost).sum())
