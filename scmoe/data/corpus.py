"""From documents to token streams: split into training and validation, hash, tokenise, cache.

A domain is a kind of text, e.g. "code", for which loss is reported by itself. A stream is one flat
array for each domain and split:

    E d1 d1 d1 E d2 d2 E

E, the end-of-text token, stands before each document and after the last. Position i of a stream is
one training example: the model reads tokens[i] and predicts tokens[i + 1]. So each token of a
document, and its end, is predicted exactly once. Bits per byte counts these predictions.

A stream of conversations also says which tokens the loss counts (`Stream.learned`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scmoe.base.errors import DataError
from scmoe.data import tokenizers
from scmoe.data.bigram import count_pairs
from scmoe.data.config import NEEDS_PATH, DataConfig, SourcePart
from scmoe.data.conversations import ids_of
from scmoe.data.document import Document
from scmoe.data.files import BadRows, log, read_cached_array, write_cached_array
from scmoe.data.text import read_documents

SPLITS = ("train", "validation")
MOST_DOMAINS = 500  # each needs 1 MB for its pair counts, and files and metrics of its own


@dataclasses.dataclass(frozen=True)
class Stream:
  """The tokens of one domain and split.

  Attributes:
    tokens: uint16[N + 1], or int32[N + 1] for a vocabulary above 65536; an array in memory, or a
      `scmoe.data.store.TokenFile`, which reads each requested slice from disk.
    starts: int64[documents], index of each document's leading end-of-text token.
    text_bytes: bytes of text, the denominator of bits per byte.
    pairs: int64[257, 257], counts of byte pairs; the end of text counts as byte 256.
    files: for a corpus on disk, the path of its files without suffix; None for one in memory.
    learned: of conversations bool[N + 1], the tokens that the loss counts where they are predicted;
      None: all of them.
    second: of pairs of answers int64[documents], tokens of each document before its second text;
      None where each document is one text.
    cut, left_out: numbers of conversations that were cut to `data.seq_len` tokens, and of those
      that have no token to learn (after the cut) and are not in the stream.
  """

  tokens: Any
  starts: np.ndarray
  text_bytes: int
  pairs: np.ndarray
  files: Path | None = None
  learned: np.ndarray | None = None
  second: np.ndarray | None = None
  cut: int = 0
  left_out: int = 0

  def end(self, document: int) -> int:
    """Index of the end-of-text token that follows a document."""
    return int(self.starts[document + 1]) if document + 1 < len(self.starts) else self.size

  @property
  def size(self) -> int:
    """Number of predicted tokens, N."""
    return max(len(self.tokens) - 1, 0)


@dataclasses.dataclass(frozen=True)
class Domain:
  """One domain: its two streams and the source it came from."""

  name: str
  part: int  # index of the source in the mixture
  train: Stream
  validation: Stream


@dataclasses.dataclass(frozen=True)
class Corpus:
  """All domains and the tokenizer, with a digest that identifies the text."""

  domains: tuple[Domain, ...]
  tokenizer: tokenizers.Tokenizer
  digest: str  # a hash of every document's content, domain and split, in order
  documents: int
  bad_rows: int


@dataclasses.dataclass
class _Texts:
  # The documents of one domain before they are tokenised.
  part: int
  train: list[Document] = dataclasses.field(default_factory=list)
  validation: list[Document] = dataclasses.field(default_factory=list)


def load_corpus(config: DataConfig) -> Corpus:
  """Reads, splits and tokenises all sources in memory; see `scmoe.data.store` for larger ones.

  Raises:
    DataError: data are missing, empty or malformed.
    ConfigError: a field of `config` cannot be used.
  """
  bad = BadRows(config.max_bad_rows)
  texts: dict[str, _Texts] = {}
  for index, part in enumerate(config.parts()):
    found = _read_part(part, index, config, bad)
    for name, domain in found.items():
      texts[free_name(name, texts)] = domain
  digest = _digest(texts, config)
  tokenizer = _make_tokenizer(config, texts)
  domains = tuple(
    Domain(
      name,
      domain.part,
      _make_stream(domain.train, tokenizer, config),
      _make_stream(domain.validation, tokenizer, config),
    )
    for name, domain in texts.items()
  )
  documents = sum(len(t.train) + len(t.validation) for t in texts.values())
  return Corpus(domains, tokenizer, digest, documents, bad.count)


def _read_part(part: SourcePart, index: int, config: DataConfig, bad: BadRows) -> dict[str, _Texts]:
  by_domain: dict[str, list[Document]] = {}
  for document in documents_of(part, config, bad):
    by_domain.setdefault(document.domain, []).append(document)
  return {
    name: _split(documents, index, config.validation_fraction)
    for name, documents in by_domain.items()
  }


def documents_of(part: SourcePart, config: DataConfig, bad: BadRows) -> Iterator[Document]:
  """Yields the documents of one source, up to `data.limit_bytes` of each domain and split.

  Raises:
    DataError: the source has no usable document or too many domains; or see `read_documents`.
  """
  used: dict[tuple[str, str | None], int] = {}
  one_domain = part.kind in NEEDS_PATH and not config.domain_field
  for document in read_documents(part, config, bad):
    key = (document.domain, document.split)
    if len(used) >= MOST_DOMAINS and key not in used:
      raise DataError(
        f"{part.path or part.kind} has more than {MOST_DOMAINS} domains, the last "
        f"{document.domain!r}; data.domain_field={config.domain_field!r} should name a column "
        "with a few different values"
      )
    if config.limit_bytes and used.get(key, 0) >= config.limit_bytes:
      if one_domain and document.split is None:
        break  # the rest of a large file need not be read
      continue
    used[key] = used.get(key, 0) + len(document.text)
    yield document
  if not used:
    where = f"data.path={part.path!r}" if part.path else f"data.source={part.kind!r}"
    rows = f"{bad.count} bad row{'s' * (bad.count != 1)}"
    why = f"the first is {bad.first}" if bad.first else "give text to train on"
    raise DataError(f"{where} has no usable document ({rows}); {why}")


def free_name(name: str, taken: Iterable[str]) -> str:
  """`name`, or the first free one of `name#2`, `name#3`, ... if another source has that domain."""
  free, n = name, 1
  while free in taken:
    n += 1
    free = f"{name}#{n}"
  return free


def hash_share(text: bytes) -> float:
  """A hash of the text as a number in [0, 1)."""
  return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2.0**64


def _split(documents: list[Document], part: int, fraction: float) -> _Texts:
  # The hash of a document's content decides its split. So adding documents moves no old one, and
  # copies of a document stay together: no validation text is trained on.
  texts = _Texts(part)
  shares = np.array([hash_share(d.text) for d in documents])
  threshold = split_threshold(shares, fraction, named=any(d.split is not None for d in documents))
  for document, share in zip(documents, shares):
    split = document.split or ("validation" if share < threshold else "train")
    (texts.train if split == "train" else texts.validation).append(document)
  if not texts.train and all(d.split is None for d in documents):
    texts.train, texts.validation = texts.validation, []  # one document: train on it
  return texts


def split_threshold(shares: np.ndarray, fraction: float, *, named: bool) -> float:
  """The threshold of a domain's split: documents with a smaller hash are validation text.

  Args:
    shares: float64[documents], the results of `hash_share`.
    fraction: `data.validation_fraction`.
    named: whether file names decide the split of some documents.
  """
  low, high = shares.min(), shares.max()
  if fraction > 0 and not named and low < high:
    # Keeps at least one document for validation and one for training, however few there are.
    return float(min(max(fraction, np.nextafter(low, 1.0)), high))
  return fraction


def _digest(texts: dict[str, _Texts], config: DataConfig) -> str:
  digest = hashlib.blake2b(digest_size=16)
  for name, domain in texts.items():
    for split in SPLITS:
      documents: list[Document] = getattr(domain, split)
      digest.update(f"{name}\n{split}\n{len(documents)}\n".encode())
      for document in documents:
        digest.update(len(document.text).to_bytes(8, "little"))
        digest.update(document.text)
        if (learned := document.learned) is not None:
          chosen: tuple[Any, ...] = (learned.spans, learned.apart, learned.second)
          chosen += (config.train_on, config.long_conversations)
          digest.update(repr(chosen).encode())
  return digest.hexdigest()


def _make_tokenizer(config: DataConfig, texts: dict[str, _Texts]) -> tokenizers.Tokenizer:
  if config.tokenizer == "bytes":
    return tokenizers.ByteTokenizer()
  if config.tokenizer == "bpe":
    training = [document.text for domain in texts.values() for document in domain.train]
    return tokenizers.load_bpe(training, config.vocab_size, config.cache_folder())
  return tokenizers.load_json(config.tokenizer, config.eos_token)


def _make_stream(
  documents: list[Document], tokenizer: tokenizers.Tokenizer, config: DataConfig
) -> Stream:
  texts = [document.text for document in documents]
  byte_tokens = join_documents(texts, tokenizers.ByteTokenizer())
  counted = sum(map(len, texts)), count_pairs(byte_tokens)
  if documents and documents[0].learned is not None:  # so are all of a domain
    return _conversations(documents, tokenizer, config, *counted)
  if isinstance(tokenizer, tokenizers.ByteTokenizer):
    tokens = byte_tokens
  else:
    tokens = _cached_tokens(texts, tokenizer, config.cache_folder())
  # `join_documents` refuses text that contains the end-of-text token, so each one is a boundary.
  starts = np.flatnonzero(tokens == tokenizer.eos_id)[:-1].astype(np.int64)
  return Stream(tokens, starts, *counted)


def _conversations(
  documents: list[Document],
  tokenizer: tokenizers.Tokenizer,
  config: DataConfig,
  text_bytes: int,
  pairs: np.ndarray,
) -> Stream:
  """The stream of conversations, each as `ids_of` writes it, one after the other.

  With conversations a b c and d e it is a b c d e E. The model reads c and predicts d, but
  `learned` is False for a conversation's first token, so the loss does not count this prediction.

  Raises:
    DataError: with `data.long_conversations=refuse`, some are longer than `data.seq_len`.
  """
  everything = config.train_on == "all"
  ids, learned, starts, second, at = [], [], [], [], 0
  cut = left_out = longest = 0
  first = ""
  for document in documents:
    texts = [ids_of(text, tokenizer) for text in document.texts()]
    size = sum(len(own) for own, _ in texts)
    if size > config.seq_len:
      cut, longest = cut + 1, max(longest, size)
      assert document.learned is not None
      first = first or f"{document.learned.where}, with {size}"
      most = config.seq_len // len(texts)
      texts = [(own[:most], counts[:most]) for own, counts in texts]
    if not all(any(counts[1:]) for _, counts in texts):
      left_out += 1
      continue
    starts.append(at)
    second.append(len(texts[0][0]))
    for own, counts in texts:
      at += len(own)
      ids.append(np.array(own))
      learned.append(np.array([False, *(everything or count for count in counts[1:])]))
  if cut and config.long_conversations == "refuse":
    raise DataError(
      f"{cut} of {len(documents)} conversations have more than data.seq_len={config.seq_len} "
      f"tokens, the first {first}, the longest {longest}; raise data.seq_len, or set "
      "data.long_conversations=truncate"
    )
  dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
  end = [np.array([tokenizer.eos_id])] if ids else []
  tokens = np.concatenate([*ids, *end] or [np.zeros(0)]).astype(dtype)
  counts_of_all = np.concatenate(
    [*learned, *(np.zeros(1, bool) for _ in end)] or [np.zeros(0, bool)]
  )
  paired = documents[0].learned is not None and documents[0].learned.second is not None
  second_of = np.array(second, np.int64) if paired else None
  return Stream(tokens, np.array(starts, np.int64), text_bytes, pairs,
                learned=counts_of_all, second=second_of, cut=cut, left_out=left_out)  # fmt: skip


def join_documents(texts: list[bytes], tokenizer: tokenizers.Tokenizer) -> np.ndarray:
  """The flat stream of these documents, uint16 or int32; empty for no documents.

  Raises:
    DataError: the tokenizer produces its end-of-text token inside a document.
  """
  dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
  if not texts:
    return np.zeros(0, dtype)
  eos = np.array([tokenizer.eos_id], dtype)
  pieces, lost = [eos], 0
  for ids in tokenizer.encode_documents(texts):
    pieces += [ids.astype(dtype), eos]
    lost += not len(ids)
  tokens = np.concatenate(pieces)
  if lost:
    log.warning("data.tokenizer makes no token of %d of %d documents", lost, len(texts))
  if int((tokens == eos).sum()) != len(texts) + 1:
    raise DataError(
      f"the text spells the end-of-text token {tokenizer.eos_id} of data.tokenizer, which would "
      "end a document; name another, special token in data.eos_token"
    )
  return tokens


def _cached_tokens(texts: list[bytes], tokenizer: tokenizers.Tokenizer, cache: Path) -> np.ndarray:
  digest = hashlib.blake2b(tokenizer.digest.encode(), digest_size=12)
  for text in texts:
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text)
  path = cache / f"tokens-{digest.hexdigest()}.npy"
  if (tokens := read_cached_array(path)) is None:
    tokens = join_documents(texts, tokenizer)
    write_cached_array(path, tokens)
  return tokens
