"""From token streams to rows of a fixed length.

A row is a list of segments, each a range of the stream that stays inside one document. How
documents are cut and put together (`data.packing`) only decides these ranges; reading a row is the
same for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Protocol

import numpy as np

from scmoe.base.errors import DataError
from scmoe.data.corpus import Stream
from scmoe.data.files import atomic_write, log
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
class PaddedRows:
  """Rows of one document, or of a piece of S tokens of one: 8 bytes are held for each document.

  Attributes:
    stream: the tokens.
    seq_len: S.
    first: int64[documents + 1], rows before each document.
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
  """Full pieces of S tokens first, then rows that what is left over of documents shares.

  Attributes:
    full: the rows of full pieces.
    left: int64[documents with a piece left over], these documents in the order of their rows.
    first: int64[rows + 1]; row r of the shared ones has left[first[r] : first[r + 1]].
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
  """`_best_fit`, which takes seconds for a million pieces: of a stored stream, from its folder."""
  if stream.kept is None:
    return _best_fit(lengths, seq_len)
  path = stream.kept.with_name(f"{stream.kept.name}.pack-{seq_len}.npy")
  try:
    rows = np.load(path, allow_pickle=False)
    if rows.dtype == np.int32 and rows.shape == lengths.shape and _fits(rows, lengths, seq_len):
      return rows
    log.warning("%s is damaged; packing again", path)
  except FileNotFoundError:
    pass
  except (OSError, ValueError, EOFError):
    log.warning("%s is damaged; packing again", path)
  rows = _best_fit(lengths, seq_len)
  # The folder may be one that others made and only they can write: then every start packs anew.
  with contextlib.suppress(DataError), atomic_write(path) as file:
    np.save(file, rows, allow_pickle=False)
  return rows


def _fits(rows: np.ndarray, lengths: np.ndarray, seq_len: int) -> bool:
  """Whether these are rows without gaps that hold their pieces."""
  if not len(rows):
    return True
  return bool(rows.min() == 0) and bool(
    ((filled := np.bincount(rows, lengths)) > 0).all() and filled.max() <= seq_len
  )


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
  # The row of each piece, int32, by grain's best-fit packer. It packs arrays, so that each piece is
  # handed over as an array of its length that holds its number.
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
      continue  # a bin of the last, partly filled set
    rows[np.unique(packed_row["number"][filled])] = row
    row += 1
  return rows
