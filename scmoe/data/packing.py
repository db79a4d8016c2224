"""From token streams to rows of a fixed length.

A row is a list of segments, each a range of the stream that stays inside one document. How
documents are cut and put together (`data.packing`) only decides these ranges; reading a row is the
same for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from scmoe.data.corpus import Stream
from scmoe.data.packages import need

_BINS = 64  # rows that best-fit packing keeps open: more waste less and take longer


class Rows(Protocol):
  """The rows of a stream."""

  def __len__(self) -> int: ...

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """One row: inputs, targets, segment_ids, positions int32[S] and weights float32[S]."""
    ...


@dataclasses.dataclass(frozen=True)
class JoinedRows:
  """Rows of a stream that is cut every S tokens: nothing is held but where documents start.

  Attributes:
    stream: the tokens.
    seq_len: S.
  """

  stream: Stream
  seq_len: int

  def __len__(self) -> int:
    return -(-self.stream.size // self.seq_len)

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """See `Rows`."""
    start = row * self.seq_len
    end = min(start + self.seq_len, self.stream.size)
    first, last = np.searchsorted(self.stream.starts, (start, end), side="left")
    starts = np.unique(np.append(start, self.stream.starts[first:last]))
    return _row(self.stream, starts, np.diff(starts, append=end), self.seq_len, document_mask)


@dataclasses.dataclass(frozen=True)
class RowTable:
  """Where each row's segments lie in the stream.

  Attributes:
    stream: the tokens.
    starts, lengths: int64[segments], in row order.
    first: int64[rows + 1]; row r has segments first[r] to first[r + 1].
    seq_len: S.
  """

  stream: Stream
  starts: np.ndarray
  lengths: np.ndarray
  first: np.ndarray
  seq_len: int

  def __len__(self) -> int:
    return len(self.first) - 1

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """See `Rows`."""
    own = slice(self.first[row], self.first[row + 1])
    return _row(self.stream, self.starts[own], self.lengths[own], self.seq_len, document_mask)


def _row(
  stream: Stream, starts: np.ndarray, lengths: np.ndarray, size: int, document_mask: bool
) -> dict[str, np.ndarray]:
  """One row of these segments, one after the other."""
  inputs, targets, segments, positions = np.zeros((4, size), np.int32)
  at = 0
  for number, (start, length) in enumerate(zip(starts, lengths), start=1):
    piece, tokens = slice(at, at + length), stream.tokens[start : start + length + 1]
    inputs[piece], targets[piece] = tokens[:-1], tokens[1:]
    segments[piece] = number
    positions[piece] = np.arange(length)
    at += length
  if not document_mask:
    segments[:at] = 1
    positions[:at] = np.arange(at)
  weights = (segments > 0).astype(np.float32)
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
    "segment_ids": segments,
    "positions": positions,
  }


def make_rows(stream: Stream, packing: str, seq_len: int) -> Rows:
  """The rows of a stream under `concat`, `pack` or `pad`; every token is predicted in one row."""
  if packing == "concat":
    return JoinedRows(stream, seq_len)
  starts, lengths = _pieces(stream, seq_len)
  rows = np.arange(len(starts)) if packing == "pad" else _best_fit(lengths, seq_len)
  order = np.argsort(rows, kind="stable")
  starts, lengths, rows = starts[order], lengths[order], rows[order]
  count = int(rows[-1]) + 1 if len(rows) else 0
  first = np.searchsorted(rows, np.arange(count + 1))
  return RowTable(stream, starts, lengths, first, seq_len)


def _pieces(stream: Stream, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  # Each document by itself, cut into pieces of S where it is longer.
  sizes = np.diff(stream.starts, append=stream.size)
  counts = -(-sizes // seq_len)
  inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
  starts = np.repeat(stream.starts, counts) + inside * seq_len
  ends = np.minimum(starts + seq_len, np.repeat(stream.starts + sizes, counts))
  return starts, ends - starts


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
  # The row of each piece, by grain's best-fit packer. It packs arrays, so that each piece is handed
  # over as an array of its length that holds its number.
  grain = need("grain", "data.packing='pack'")
  rows = np.zeros(len(lengths), np.int64)
  short = np.flatnonzero(lengths < seq_len)
  full = np.flatnonzero(lengths == seq_len)  # a row each: nothing to pack
  rows[full] = np.arange(len(full))
  if not len(short):
    return rows
  pieces = grain.MapDataset.source(short.tolist()).map(
    lambda number: {"number": np.full(lengths[number], number, np.int64)}
  )
  packed = grain.experimental.BestFitPackIterDataset(
    pieces.to_iter_dataset(grain.ReadOptions(num_threads=0)),
    length_struct={"number": seq_len},
    num_packing_bins=min(_BINS, len(short)),
    shuffle_bins=False,
  )
  row = len(full)
  for packed_row in packed:
    filled = packed_row["number_segment_ids"] > 0
    if not filled.any():
      continue  # a bin of the last, partly filled set
    rows[np.unique(packed_row["number"][filled])] = row
    row += 1
  return rows
