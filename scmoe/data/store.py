"""Tokenises large corpora once into files, from which rows are read one at a time.

  CACHE/corpus-KEY/   meta.json            domains, sizes, digests; written last
                      0.train.tokens       the stream of domain 0: raw uint16 or int32
                      0.train.crc.npy      uint32, CRC-32 of each 64 KiB of the tokens
                      0.train.starts.npy   int64, index at which each document begins
                      0.train.pairs.npy    int64[257, 257], counts of byte pairs
                      0.train.pack-512.CRC.npy  int32, the rows of data.packing=pack
                      tokenizer.json       the BPE, if data.tokenizer=bpe

KEY is a hash of the tokenizer, of the options that select and split documents, and of the path,
size and time of every file, so a second start finds the corpus without reading the text. Making a
corpus reads the text twice, a few megabytes at a time: first to decide the split, then to tokenise.
Training a BPE reads it once more in between.

One process of a host makes a corpus while the others wait. Checksums of small files are checked
when the corpus is opened, those of tokens when a row first needs them: so opening 10 GB of tokens
reads none of them, and a flipped bit is still found before the model is trained on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.stored import read_json
from scmoe.data import tokenizers
from scmoe.data.bigram import SYMBOLS, count_pairs
from scmoe.data.config import NEEDS_PATH, DataConfig
from scmoe.data.corpus import (
  SPLITS,
  Corpus,
  Domain,
  Stream,
  documents_of,
  free_name,
  hash_share,
  join_documents,
  split_threshold,
)
from scmoe.data.document import Document
from scmoe.data.files import BadRows, find_files, host_lock, log

LARGE = 64 << 20  # bytes of text; a larger corpus is stored in files instead of held in memory
BPE_BYTES = 128 << 20  # bytes of training text from which a BPE is trained
BLOCK = 64 << 10  # bytes of tokens per checksum
META = "meta.json"
_BATCH = 4 << 20  # bytes of documents that are tokenised at a time
_VERSION = 1
# Options that select documents and decide their domain and split.
_DECIDING = ("field", "domain_field", "document_bytes", "limit_bytes", "max_bad_rows",
             "validation_fraction", "eos_token")  # fmt: skip
_EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}  # size of the text / size of the file, roughly


class TokenFile:
  """Tokens in a file: `tokens[a:b]` reads that slice into a numpy array.

  It is not a memory map, because every page that was once read would count as this process's
  memory. The first read of each block checks its checksum.

  Args:
    path: the file of tokens.
    dtype: type of a token.
    sums: CRC-32 of each `BLOCK` bytes; None for a corpus of version 0.2, which has none.

  Raises:
    DataError: on reading a slice, a block differs from its checksum. The corpus's meta.json is
      deleted, so the next start makes the corpus again.
  """

  def __init__(self, path: Path, dtype: Any, sums: np.ndarray | None = None):
    self.dtype = np.dtype(dtype)
    self._path, self._sums = path, sums
    self._file = open(path, "rb")  # noqa: SIM115 - stays open while the tokens are used
    self._size = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize
    self._checked = bytearray(0 if sums is None else len(sums))

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, where: slice) -> np.ndarray:
    start, stop, _ = where.indices(self._size)
    size = self.dtype.itemsize
    begin, length = start * size, max(stop - start, 0) * size
    for block in range(begin // BLOCK, -(-(begin + length) // BLOCK)) if self._checked else ():
      if not self._checked[block]:
        self._check(block)
    return np.frombuffer(os.pread(self._file.fileno(), length, begin), self.dtype)

  def _check(self, block: int) -> None:
    assert self._sums is not None
    content = os.pread(self._file.fileno(), BLOCK, block * BLOCK)
    if zlib.crc32(content) != self._sums[block]:
      with contextlib.suppress(OSError):
        (self._path.parent / META).unlink()
      raise DataError(
        f"{self._path} is damaged at byte {block * BLOCK}: its checksum differs; run the same "
        "command again to make the corpus again"
      )
    self._checked[block] = 1


def is_large(config: DataConfig) -> bool:
  """True if the files of the sources have more than `LARGE` bytes of text, by an estimate.

  Conversations are always held in memory, and so are other sources that are mixed with them.

  Raises:
    DataError: files are missing.
  """
  return not config.reads_chats and _text_bytes(config) > LARGE


def _text_bytes(config: DataConfig) -> int:
  total = 0
  for part in config.parts():
    if part.kind in NEEDS_PATH:
      sizes = [(f.path.suffix, f.path.stat().st_size) for f in find_files(part.kind, part.path)]
      of_part = sum(_EXPANSION.get(suffix, 1) * size for suffix, size in sizes)
      total += min(of_part, 2 * config.limit_bytes) if config.limit_bytes else of_part
  return total


def stored_corpus(config: DataConfig) -> Corpus:
  """Opens the corpus in the cache, after making it if it is missing or damaged.

  Raises:
    DataError: data are missing, empty or malformed, or the cache cannot be written.
    ConfigError: a field of `config` cannot be used.
  """
  tokenizer = None
  if config.tokenizer == "bytes":
    tokenizer = tokenizers.ByteTokenizer()
  elif config.tokenizer != "bpe":
    tokenizer = tokenizers.load_json(config.tokenizer, config.eos_token)
  key = _key(config, tokenizer)
  folder = config.cache_folder() / f"corpus-{key}"
  if (found := _open_if_intact(folder, config, tokenizer)) is not None:
    return found
  with host_lock(folder.with_name(f".{folder.name}.lock"), f"{folder}"):
    if (
      found := _open_if_intact(folder, config, tokenizer)
    ) is not None:  # made while this one waited
      return found
    shutil.rmtree(folder, ignore_errors=True)
    log.info("tokenising into %s", folder)
    _CorpusBuilder(config, tokenizer, folder).run()
    return _open_corpus(folder, config, tokenizer)


def _open_if_intact(
  folder: Path, config: DataConfig, tokenizer: tokenizers.Tokenizer | None
) -> Corpus | None:
  """The corpus in a folder; None if there is none, or if it is damaged, with a warning."""
  if not (folder / META).is_file():
    return None
  try:
    return _open_corpus(folder, config, tokenizer)
  except (OSError, ValueError, KeyError, TypeError, RecursionError, DataError, ConfigError):
    log.warning("%s is damaged; reading the text again", folder)
    return None


def _key(config: DataConfig, tokenizer: tokenizers.Tokenizer | None) -> str:
  parts: list[Any] = [_VERSION, tokenizer.digest if tokenizer else f"bpe {config.vocab_size}"]
  parts += [getattr(config, name) for name in _DECIDING]
  for part in config.parts():
    parts.append((part.kind, part.path))
    for file in find_files(part.kind, part.path) if part.kind in NEEDS_PATH else ():
      stat = file.path.stat()
      # Copying and `touch` can set the time of modification; nobody can set that of the change.
      times = stat.st_mtime_ns, stat.st_ctime_ns
      parts.append((str(file.path.absolute()), file.split, stat.st_size, *times))
  return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _open_corpus(
  folder: Path, config: DataConfig, tokenizer: tokenizers.Tokenizer | None
) -> Corpus:
  """Opens the corpus in a folder and checks its small files.

  Raises:
    ValueError, KeyError, TypeError, OSError, DataError: a file is missing or damaged.
  """
  meta = read_json(folder / META)
  sums = meta.get("crc32", {})  # version 0.2 wrote none

  def load(name: str) -> bytes:
    content = (folder / name).read_bytes()
    if zlib.crc32(content) != sums.get(name, zlib.crc32(content)):
      raise ValueError(f"{name} differs from its checksum")
    return content

  array = lambda name: np.load(io.BytesIO(load(name)), allow_pickle=False)
  if tokenizer is None:
    tokenizer = tokenizers.JsonTokenizer(load("tokenizer.json").decode("utf-8"), name="bpe")
  domains = []
  for i, of_domain in enumerate(meta["domains"]):
    streams = {}
    for split in SPLITS:
      at, own = f"{i}.{split}", of_domain[split]
      blocks = array(f"{at}.crc.npy") if sums else None
      tokens = TokenFile(folder / f"{at}.tokens", meta["dtype"], blocks)
      starts = array(f"{at}.starts.npy")
      if len(tokens) != own["tokens"] or len(starts) != own["documents"]:
        raise ValueError(f"{at}.tokens was cut off")
      pairs = array(f"{at}.pairs.npy")
      streams[split] = Stream(tokens, starts, own["text_bytes"], pairs, files=folder / at)
    domains.append(Domain(of_domain["name"], of_domain["part"], **streams))
  return Corpus(tuple(domains), tokenizer, meta["digest"], meta["documents"], meta["bad_rows"])


@dataclasses.dataclass
class _DomainScan:
  """Figures of a domain from the first pass over its text."""

  part: int
  shares: array = dataclasses.field(default_factory=lambda: array("d"))  # documents' hashes
  named: bool = False  # whether file names decide the split of some documents
  threshold: float = 0.0  # documents with a smaller hash are validation text
  swapped: bool = False  # every document hashed to validation, so all are training text instead


class _CorpusBuilder:
  """Writes a corpus into a temporary folder, and renames that folder when it is complete."""

  def __init__(self, config: DataConfig, tokenizer: Any, folder: Path):
    self.config, self.tokenizer, self.folder = config, tokenizer, folder
    self.given = tokenizer  # None if a BPE is to be trained
    self.seen: dict[str, _DomainScan] = {}
    self.names: dict[tuple[int, str], str] = {}

  def run(self) -> None:
    """Reads the sources and writes the corpus.

    Raises:
      DataError: see `stored_corpus`.
    """
    try:
      self.folder.parent.mkdir(parents=True, exist_ok=True)
      beside = f"{self.folder.name}.partial-"
      for left in self.folder.parent.glob(f"{beside}*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
      partial = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=beside))
    except OSError as error:
      raise self._unwritable(error) from None
    try:
      bad = self._scan()
      if self.tokenizer is None:
        self.tokenizer = self._train_bpe(partial)
      meta = self._tokenise(partial)
      if self.folder.name != f"corpus-{_key(self.config, self.given)}":
        raise DataError(
          "the text changed while it was read; run the same command again when it stays as it is"
        )
      meta["bad_rows"] = bad
      small = (p for p in sorted(partial.iterdir()) if p.suffix in (".npy", ".json"))
      meta["crc32"] = {path.name: zlib.crc32(path.read_bytes()) for path in small}
      (partial / META).write_text(json.dumps(meta, indent=1))
      with contextlib.suppress(OSError):  # another host has made the same corpus meanwhile
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
    """Yields (domain, document) of all sources, in order."""
    for index, part in enumerate(self.config.parts()):
      for document in documents_of(part, self.config, bad):
        at = index, document.domain
        if at not in self.names:
          self.names[at] = free_name(document.domain, self.seen)
          self.seen[self.names[at]] = _DomainScan(index)
        yield self.names[at], document

  def _split_of(self, name: str, document: Document, share: float) -> str:
    seen = self.seen[name]
    if document.split:
      return document.split
    return "train" if seen.swapped or share >= seen.threshold else "validation"

  def _scan(self) -> int:
    """Reads all text and decides each domain's split; returns the number of bad rows."""
    bad = BadRows(self.config.max_bad_rows)
    for name, document in self._documents(bad):
      seen = self.seen[name]
      seen.shares.append(hash_share(document.text))
      seen.named |= document.split is not None
    for seen in self.seen.values():
      shares = np.frombuffer(seen.shares, np.float64)
      seen.threshold = split_threshold(shares, self.config.validation_fraction, named=seen.named)
      seen.swapped = not seen.named and not (shares >= seen.threshold).any()
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
    """Reads all text again and writes every stream's files; returns most of meta.json's content."""
    domains_seen = dict(self.seen)
    writers = {
      (name, split): _Writer(partial / f"{i}.{split}", self.tokenizer)
      for i, name in enumerate(domains_seen)
      for split in SPLITS
    }
    for name, document in self._documents(BadRows.silent()):
      share = hash_share(document.text)
      place = name, self._split_of(name, document, share)
      if place in writers:  # false only if the text has changed; `run` then raises an error
        writers[place].add(document.text)
    digest, domains = hashlib.blake2b(digest_size=16), []
    for name, seen in domains_seen.items():
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
    self.sums, self.block = array("I"), b""  # checksums of full blocks; bytes of the next block
    self.waiting: list[bytes] = []
    self.waiting_bytes = self.text_bytes = self.tokens = 0

  def add(self, text: bytes) -> None:
    """Buffers one document; tokenises and writes the buffer once it has `_BATCH` bytes."""
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
    # Each batch begins and ends with the end-of-text token. The one between two batches belongs to
    # both, so it is written once.
    first = 1 if self.tokens else 0
    offset = self.tokens - first
    self.starts.extend((ends[:-1] + offset).tolist())
    content = tokens[first:].tobytes()
    self.file.write(content)
    self._sum(content)
    self.tokens += len(tokens) - first
    for text in self.waiting:
      self.digest.update(len(text).to_bytes(8, "little"))
      self.digest.update(text)
    self.text_bytes += self.waiting_bytes
    self.waiting, self.waiting_bytes = [], 0

  def _sum(self, content: bytes) -> None:
    content = self.block + content
    whole = len(content) // BLOCK * BLOCK
    blocks = (content[start : start + BLOCK] for start in range(0, whole, BLOCK))
    self.sums.extend(map(zlib.crc32, blocks))
    self.block = content[whole:]

  def close(self) -> dict[str, Any]:
    """Writes the buffer and the small files; returns the stream's entry of meta.json."""
    if self.waiting:
      self._flush()
    self.file.close()
    if self.block:
      self.sums.append(zlib.crc32(self.block))
    np.save(f"{self.at}.crc.npy", np.array(self.sums, np.uint32))
    np.save(f"{self.at}.starts.npy", np.array(self.starts, np.int64))
    np.save(f"{self.at}.pairs.npy", self.pairs)
    return {"documents": len(self.starts), "tokens": self.tokens, "text_bytes": self.text_bytes,
            "digest": self.digest.hexdigest()}  # fmt: skip
