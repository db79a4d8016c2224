"""From token streams to rows of a fixed length.

A row is a list of segments: ranges of the stream, each within one document. `data.packing` decides
these ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from scmoe.base.errors import DataError
from scmoe.data.corpus import Stream
from scmoe.data.files import read_cached_array, write_cached_array
from scmoe.data.packages import need

_BINS = 64  # rows that best-fit packing fills at once; a larger number pads less and takes longer


class Rows(Protocol):
  """The rows of a stream."""

  def __len__(self) -> int: ...

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """One row: inputs, targets, segment_ids and positions, int32[S], and weights, float32[S]."""
    ...


@dataclasses.dataclass(frozen=True)
class JoinedRows:
  """Rows of a stream that is cut every S tokens. Needs no memory besides the documents' starts.

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
class PaddedRows:
  """Rows that each hold one document, or S tokens of one. Needs 8 bytes for each document.

  Attributes:
    stream: the tokens.
    seq_len: S.
    first: int64[documents + 1], the number of rows before each document.
  """

  stream: Stream
  seq_len: int
  first: np.ndarray

  def __len__(self) -> int:
    return int(self.first[-1])

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """See `Rows`."""
    document = int(np.searchsorted(self.first, row, side="right")) - 1
    start = int(self.stream.starts[document]) + (row - int(self.first[document])) * self.seq_len
    length = min(self.seq_len, self.stream.end(document) - start)
    return _row(self.stream, np.array([start]), np.array([length]), self.seq_len, document_mask)


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """First a row for each full piece of S tokens, then rows shared by the documents' remainders.

  With S = 4, documents 0, 1 and 2 of 6, 3 and 5 tokens have one, no and one full piece, and
  remainders of 2, 3 and 1 tokens. `left` = [1, 2, 0] and `first` = [0, 2, 3] put the remainders of
  documents 1 and 2 into one row and that of document 0 into another.

  Attributes:
    full: the rows of full pieces.
    left: int64, the documents with a remainder, in the order of the shared rows.
    first: int64[rows + 1]; shared row r holds the remainders of left[first[r] : first[r + 1]].
  """

  full: PaddedRows
  left: np.ndarray
  first: np.ndarray

  def __len__(self) -> int:
    return len(self.full) + len(self.first) - 1

  def read(self, row: int, document_mask: bool = True) -> dict[str, np.ndarray]:
    """See `Rows`."""
    shared = row - len(self.full)
    if shared < 0:
      return self.full.read(row, document_mask)
    stream, size = self.full.stream, self.full.seq_len
    documents = self.left[self.first[shared] : self.first[shared + 1]]
    ends = np.array([stream.end(int(document)) for document in documents])
    lengths = (ends - stream.starts[documents]) % size
    return _row(stream, ends - lengths, lengths, size, document_mask)


def _row(
  stream: Stream, starts: np.ndarray, lengths: np.ndarray, size: int, document_mask: bool
) -> dict[str, np.ndarray]:
  """The row that consists of these segments, padded to `size` tokens."""
  inputs, targets, segments, positions = np.zeros((4, size), np.int32)
  weights = np.zeros(size, np.float32)
  at = 0
  for number, (start, length) in enumerate(_texts(stream, starts, lengths), start=1):
    piece, tokens = slice(at, at + length), stream.tokens[start : start + length + 1]
    inputs[piece], targets[piece] = tokens[:-1], tokens[1:]
    segments[piece] = number
    positions[piece] = np.arange(length)
    predicted = slice(start + 1, start + length + 1)
    weights[piece] = 1.0 if stream.learned is None else stream.learned[predicted]
    at += length
  if not document_mask:
    segments[:at] = 1
    positions[:at] = np.arange(at)
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
    "segment_ids": segments,
    "positions": positions,
  }


def _texts(stream: Stream, starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
  """Yields start and length of each segment; a pair of answers is two."""
  for start, length in zip(starts, lengths):
    if stream.second is None:
      yield start, length
      continue
    first = int(stream.second[np.searchsorted(stream.starts, start)])
    yield start, first
    yield start + first, length - first


def make_rows(stream: Stream, packing: str, seq_len: int) -> Rows:
  """The rows of a stream under `concat`, `pack` or `pad`.

  Each token is a target exactly once; of conversations, each token but the first of each.
  """
  if packing == "concat":
    return JoinedRows(stream, seq_len)
  sizes = np.diff(stream.starts, append=stream.size)
  rows = -(-sizes // seq_len) if packing == "pad" else sizes // seq_len
  padded = PaddedRows(stream, seq_len, np.append(0, np.cumsum(rows)))
  if packing == "pad":
    return padded
  left = np.flatnonzero(sizes % seq_len)
  rows = _kept_fit(stream, sizes[left] % seq_len, seq_len)
  order = np.argsort(rows, kind="stable")
  count = int(rows.max()) + 1 if len(rows) else 0
  return PackedRows(padded, left[order], np.searchsorted(rows[order], np.arange(count + 1)))


def _kept_fit(stream: Stream, lengths: np.ndarray, seq_len: int) -> np.ndarray:
  """`_best_fit`, cached beside a stream on disk, since a million pieces take seconds."""
  if stream.files is None:
    return _best_fit(lengths, seq_len)
  path = stream.files.with_name(f"{stream.files.name}.pack-{seq_len}.npy")
  rows = read_cached_array(path)
  if rows is not None and _fits(rows, lengths, seq_len):
    return rows
  rows = _best_fit(lengths, seq_len)
  # If the folder belongs to another user and cannot be written, every start packs again.
  with contextlib.suppress(DataError):
    write_cached_array(path, rows)
  return rows


def _fits(rows: np.ndarray, lengths: np.ndarray, seq_len: int) -> bool:
  """True if `rows` gives each piece a row, and no row is empty or longer than `seq_len`."""
  if rows.dtype != np.int32 or rows.shape != lengths.shape:
    return False
  if not len(rows):
    return True
  return bool(rows.min() == 0) and bool(
    ((filled := np.bincount(rows, lengths)) > 0).all() and filled.max() <= seq_len
  )


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
  # The row of each piece, int32, by grain's best-fit packer. The packer packs arrays, not lengths:
  # piece 3 of length 5 is given to it as [3, 3, 3, 3, 3].
  grain = need("grain", "data.packing='pack'")
  rows = np.zeros(len(lengths), np.int32)
  if not len(lengths):
    return rows
  pieces = grain.MapDataset.range(len(lengths)).map(
    lambda number: {"number": np.full(lengths[number], number, np.int64)}
  )
  packed = grain.experimental.BestFitPackIterDataset(
    pieces.to_iter_dataset(grain.ReadOptions(num_threads=0)),
    length_struct={"number": seq_len},
    num_packing_bins=min(_BINS, len(lengths)),
    shuffle_bins=False,
  )
  row = 0
  for packed_row in packed:
    filled = packed_row["number_segment_ids"] > 0
    if not filled.any():
      continue  # grain always returns full sets of bins, some of them empty
    rows[np.unique(packed_row["number"][filled])] = row
    row += 1
  return rows
