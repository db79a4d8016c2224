"""Corpora that do not fit in memory: tokenised once into files, read a row at a time.

  CACHE/corpus-KEY/   meta.json            domains, sizes, digests; written last
                      0.train.tokens       the stream of domain 0, uint16 or int32, as it is
                      0.train.starts.npy   int64, where each document begins
                      0.train.pairs.npy    int64[257, 257], counts of byte pairs
                      0.train.pack-512.npy int32, the rows of data.packing=pack
                      tokenizer.json       of a trained BPE

KEY follows from the tokenizer, the options that decide which documents there are, and path, size
and time of every file: a second start reads none of them. Documents pass through memory in batches
of a few megabytes; the source is read twice, first to decide the split, then to tokenise, and once
more in between where a BPE is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scmoe.base.errors import DataError
from scmoe.data import tokenizers
from scmoe.data.bigram import SYMBOLS, count_pairs
from scmoe.data.config import NEEDS_PATH, DataConfig
from scmoe.data.corpus import (
  SPLITS,
  Corpus,
  Domain,
  Stream,
  bound_of,
  documents_of,
  free_name,
  hash_share,
  join_documents,
)
from scmoe.data.files import BadRows, find_files, log
from scmoe.data.text import Document

LARGE = 64 << 20  # bytes of text above which a corpus is stored instead of held in memory
BPE_BYTES = 128 << 20  # of training text that a BPE is trained on
_BATCH = 4 << 20  # bytes of documents that are tokenised at a time
_VERSION = 1
# Fields that decide which documents there are and where they go.
_DECIDING = ("field", "domain_field", "document_bytes", "limit_bytes", "max_bad_rows",
             "validation_fraction", "eos_token")  # fmt: skip
_EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}  # text over file, about


class TokenFile:
  """Tokens in a file, read where they are needed: `tokens[a:b]` is a numpy array.

  Not a memory map, whose pages would count as this process's memory, all of them in the end.
  """

  def __init__(self, path: Path, dtype: Any):
    self.dtype = np.dtype(dtype)
    self._file = open(path, "rb")  # noqa: SIM115 - open as long as the tokens are used
    self._size = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, where: slice) -> np.ndarray:
    start, stop, _ = where.indices(self._size)
    size = self.dtype.itemsize
    data = os.pread(self._file.fileno(), max(stop - start, 0) * size, start * size)
    return np.frombuffer(data, self.dtype)


def is_large(config: DataConfig) -> bool:
  """Whether the sources are files with more text than should be held in memory.

  Raises:
    DataError: files are missing.
  """
  return _text_bytes(config) > LARGE


def _text_bytes(config: DataConfig) -> int:
  total = 0
  for part in config.parts():
    if part.kind in NEEDS_PATH:
      sizes = [(f.path.suffix, f.path.stat().st_size) for f in find_files(part.kind, part.path)]
      of_part = sum(_EXPANSION.get(suffix, 1) * size for suffix, size in sizes)
      total += min(of_part, 2 * config.limit_bytes) if config.limit_bytes else of_part
  return total


def stored_corpus(config: DataConfig) -> Corpus:
  """The corpus from its files, which are made first if need be.

  Raises:
    DataError: data are missing, empty or malformed, or the cache cannot be written.
    ConfigError: a field of `config` cannot be used.
  """
  tokenizer = None
  if config.tokenizer == "bytes":
    tokenizer = tokenizers.ByteTokenizer()
  elif config.tokenizer != "bpe":
    tokenizer = tokenizers.load_json(config.tokenizer, config.eos_token)
  folder = config.cache_folder() / f"corpus-{_key(config, tokenizer)}"
  if (folder / "meta.json").is_file():
    try:
      return _opened(folder, config, tokenizer)
    except (OSError, ValueError, KeyError, TypeError):
      log.warning("%s is damaged; reading the text again", folder)
      shutil.rmtree(folder, ignore_errors=True)
  log.info("tokenising into %s", folder)
  _Building(config, tokenizer, folder).run()
  return _opened(folder, config, tokenizer)


def _key(config: DataConfig, tokenizer: tokenizers.Tokenizer | None) -> str:
  parts: list[Any] = [_VERSION, tokenizer.digest if tokenizer else f"bpe {config.vocab_size}"]
  parts += [getattr(config, name) for name in _DECIDING]
  for part in config.parts():
    parts.append((part.kind, part.path))
    for file in find_files(part.kind, part.path) if part.kind in NEEDS_PATH else ():
      stat = file.path.stat()
      parts.append((str(file.path.absolute()), file.split, stat.st_size, stat.st_mtime_ns))
  return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _opened(folder: Path, config: DataConfig, tokenizer: tokenizers.Tokenizer | None) -> Corpus:
  """Raises ValueError, KeyError or OSError where the files are not what was written."""
  meta = json.loads((folder / "meta.json").read_text("utf-8"))
  if tokenizer is None:
    tokenizer = tokenizers.JsonTokenizer((folder / "tokenizer.json").read_text("utf-8"), name="bpe")
  domains = []
  for i, of_domain in enumerate(meta["domains"]):
    streams = {}
    for split in SPLITS:
      at, own = f"{i}.{split}", of_domain[split]
      tokens = TokenFile(folder / f"{at}.tokens", meta["dtype"])
      starts = np.load(folder / f"{at}.starts.npy", allow_pickle=False)
      if len(tokens) != own["tokens"] or len(starts) != own["documents"]:
        raise ValueError(f"{at}.tokens was cut off")
      pairs = np.load(folder / f"{at}.pairs.npy", allow_pickle=False)
      streams[split] = Stream(tokens, starts, own["text_bytes"], pairs, kept=folder / at)
    domains.append(Domain(of_domain["name"], of_domain["part"], **streams))
  return Corpus(tuple(domains), tokenizer, meta["digest"], meta["documents"], meta["bad_rows"])


@dataclasses.dataclass
class _Seen:
  """What the first reading notes of a domain."""

  part: int
  shares: array = dataclasses.field(default_factory=lambda: array("d"))
  named: bool = False  # a file's name decides the split of some documents
  bound: float = 0.0
  swapped: bool = False  # what looks like validation text is all there is


class _Building:
  """Writes the files of a corpus into a folder beside its own, which then takes its name."""

  def __init__(self, config: DataConfig, tokenizer: Any, folder: Path):
    self.config, self.tokenizer, self.folder = config, tokenizer, folder
    self.seen: dict[str, _Seen] = {}
    self.names: dict[tuple[int, str], str] = {}

  def run(self) -> None:
    """Reads the source and writes everything.

    Raises:
      DataError: see `stored_corpus`.
    """
    try:
      self.folder.parent.mkdir(parents=True, exist_ok=True)
      partial = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix="corpus-"))
    except OSError as error:
      raise self._unwritable(error) from None
    try:
      bad = self._read_once()
      if self.tokenizer is None:
        self.tokenizer = self._train_bpe(partial)
      meta = self._tokenise(partial)
      meta["bad_rows"] = bad
      (partial / "meta.json").write_text(json.dumps(meta, indent=1))
      with contextlib.suppress(OSError):  # another process was faster: its files are the same
        os.replace(partial, self.folder)
    except OSError as error:
      raise self._unwritable(error) from None
    finally:
      shutil.rmtree(partial, ignore_errors=True)

  def _unwritable(self, error: OSError) -> DataError:
    return DataError(
      f"data.cache_dir: {str(self.folder.parent)!r} cannot be written ({error.strerror}); name a "
      f"folder with room for about {2 * _text_bytes(self.config) >> 20} MiB"
    )

  def _documents(self, bad: BadRows) -> Iterator[tuple[str, Document]]:
    """(domain, document) of all sources, in order."""
    for index, part in enumerate(self.config.parts()):
      for document in documents_of(part, self.config, bad):
        at = index, document.domain
        if at not in self.names:
          self.names[at] = free_name(document.domain, self.seen)
          self.seen[self.names[at]] = _Seen(index)
        yield self.names[at], document

  def _split_of(self, name: str, document: Document, share: float) -> str:
    seen = self.seen[name]
    if document.split:
      return document.split
    return "train" if seen.swapped or share >= seen.bound else "validation"

  def _read_once(self) -> int:
    """Decides the bound of each domain's split; returns the number of bad rows."""
    bad = BadRows(self.config.max_bad_rows)
    for name, document in self._documents(bad):
      seen = self.seen[name]
      seen.shares.append(hash_share(document.text))
      seen.named |= document.split is not None
    for seen in self.seen.values():
      shares = np.frombuffer(seen.shares, np.float64)
      seen.bound = bound_of(shares, self.config.validation_fraction, named=seen.named)
      seen.swapped = not seen.named and not (shares >= seen.bound).any()
      seen.shares = array("d")
    return bad.count

  def _train_bpe(self, partial: Path) -> tokenizers.Tokenizer:
    def texts() -> Iterator[bytes]:
      left = BPE_BYTES
      for name, document in self._documents(BadRows.silent()):
        if self._split_of(name, document, hash_share(document.text)) == "train":
          left -= len(document.text)
          yield document.text
        if left <= 0:
          return

    content = tokenizers.train_bpe(texts(), self.config.vocab_size)
    (partial / "tokenizer.json").write_text(content, "utf-8")
    return tokenizers.JsonTokenizer(content, name="bpe")

  def _tokenise(self, partial: Path) -> dict[str, Any]:
    """The second reading: every stream's file; what meta.json says of them."""
    writers = {
      (name, split): _Writer(partial / f"{i}.{split}", self.tokenizer)
      for i, name in enumerate(self.seen)
      for split in SPLITS
    }
    for name, document in self._documents(BadRows.silent()):
      share = hash_share(document.text)
      writers[name, self._split_of(name, document, share)].add(document.text)
    digest, domains = hashlib.blake2b(digest_size=16), []
    for name, seen in self.seen.items():
      of_domain: dict[str, Any] = {"name": name, "part": seen.part}
      for split in SPLITS:
        of_domain[split] = found = writers[name, split].close()
        digest.update(f"{name}\n{split}\n{found['documents']}\n{found['digest']}".encode())
      domains.append(of_domain)
    return {
      "domains": domains,
      "dtype": np.dtype(_dtype(self.tokenizer)).name,
      "digest": digest.hexdigest(),
      "documents": sum(d[split]["documents"] for d in domains for split in SPLITS),
    }


def _dtype(tokenizer: tokenizers.Tokenizer) -> Any:
  return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


class _Writer:
  """Appends documents to the files of one stream."""

  def __init__(self, at: Path, tokenizer: tokenizers.Tokenizer):
    self.at, self.tokenizer = at, tokenizer
    self.file = open(f"{at}.tokens", "wb")  # noqa: SIM115 - closed by `close`
    self.starts, self.digest = array("q"), hashlib.blake2b(digest_size=16)
    self.pairs = np.zeros((SYMBOLS, SYMBOLS), np.int64)
    self.waiting: list[bytes] = []
    self.waiting_bytes = self.text_bytes = self.tokens = 0

  def add(self, text: bytes) -> None:
    """Takes a document; writes when there are enough of them."""
    self.waiting.append(text)
    self.waiting_bytes += len(text)
    if self.waiting_bytes >= _BATCH:
      self._flush()

  def _flush(self) -> None:
    as_bytes = join_documents(self.waiting, tokenizers.ByteTokenizer())
    tokens = as_bytes
    if not isinstance(self.tokenizer, tokenizers.ByteTokenizer):
      tokens = join_documents(self.waiting, self.tokenizer)
    self.pairs += count_pairs(as_bytes)
    ends = np.flatnonzero(tokens == self.tokenizer.eos_id)
    # Each batch has an end of text on both sides; the one that two batches share is written once.
    first = 1 if self.tokens else 0
    offset = self.tokens - first
    self.starts.extend((ends[:-1] + offset).tolist())
    tokens[first:].tofile(self.file)
    self.tokens += len(tokens) - first
    for text in self.waiting:
      self.digest.update(len(text).to_bytes(8, "little"))
      self.digest.update(text)
    self.text_bytes += self.waiting_bytes
    self.waiting, self.waiting_bytes = [], 0

  def close(self) -> dict[str, Any]:
    """Writes what is left; says what there is."""
    if self.waiting:
      self._flush()
    self.file.close()
    np.save(f"{self.at}.starts.npy", np.array(self.starts, np.int64))
    np.save(f"{self.at}.pairs.npy", self.pairs)
    return {"documents": len(self.starts), "tokens": self.tokens, "text_bytes": self.text_bytes,
            "digest": self.digest.hexdigest()}  # fmt: skip
