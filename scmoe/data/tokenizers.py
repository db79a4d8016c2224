"""Tokenizers: bytes, a BPE trained on the corpus, or any tokenizer.json.

All of them turn UTF-8 text into ids without adding anything; the pipeline puts the end-of-text
token (`eos_id`) before every document, so that it both ends one document and begins the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scmoe.base.errors import ConfigError, DataError
from scmoe.data.files import atomic_write, log
from scmoe.data.packages import need

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|end|>", "[SEP]", "[EOS]")
_ENCODE_BATCH = 256  # documents handed to the tokenizer's threads at a time


class Tokenizer(Protocol):
  """What the pipeline, evaluation and generation need of a tokenizer."""

  vocab_size: int  # ids are below this
  eos_id: int
  digest: str  # of everything that decides the ids

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without an end-of-text token."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; end-of-text tokens are left out, broken UTF-8 becomes U+FFFD."""
    ...

  def token_bytes(self) -> np.ndarray:
    """int32[V]: bytes of text that each token stands for; 0 for special tokens."""
    ...

  def encode_documents(self, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    """Integer ids of each document, in order."""
    ...


class ByteTokenizer:
  """Ids 0-255 are the bytes of UTF-8; 256 is the end of text."""

  vocab_size = 257
  eos_id = 256
  digest = "bytes-257"

  def encode(self, text: str) -> list[int]:
    """Bytes of `text`."""
    return list(text.encode("utf-8"))

  def decode(self, ids: Iterable[int]) -> str:
    """Text of the bytes; ids above 255 (end of text, a padded vocabulary) are left out."""
    return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

  def token_bytes(self) -> np.ndarray:
    """int32[257]: 1 for each byte, 0 for the end of text."""
    return np.append(np.ones(256, np.int32), np.int32(0))

  def encode_documents(self, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    """uint8 arrays that share the documents' memory."""
    return (np.frombuffer(text, np.uint8) for text in texts)


class JsonTokenizer:
  """A tokenizer of the `tokenizers` library (the content of a Hugging Face tokenizer.json)."""

  def __init__(
    self,
    content: str,
    *,
    eos_token: str = "",
    name: str = "tokenizer.json",
    eos_id: int | None = None,
  ):
    """Args:
      content: the JSON text.
      eos_token: name of the end-of-text token; empty takes the first usual name found.
      name: what errors call it.
      eos_id: the end-of-text token by number instead; None: by name.

    Raises:
      DataError: not a tokenizer.
      ConfigError: it has no such end-of-text token.
    """
    library = need("tokenizers", f"data.tokenizer={name!r}")
    self.content = content
    try:
      self._tokenizer = library.Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
      raise DataError(f"data.tokenizer={name!r}: not a tokenizer.json: {error}") from None
    # Text that spells a special token stays text: data must not be able to end a document.
    self._tokenizer.encode_special_tokens = True
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(self._vocab.values()) + 1  # ids need not be dense
    if eos_id is not None and eos_id not in self._vocab.values():
      raise ConfigError(f"{name}: has no token {eos_id}, the model's eos_token_id")
    found = eos_id if eos_id is not None else self._vocab[_find_eos(self._vocab, eos_token, name)]
    self.eos_id: int = found
    self.digest = hashlib.sha256(f"{self.eos_id}\n{content}".encode()).hexdigest()[:16]
    self._parsed: dict[str, Any] = json.loads(content)

  def token(self, index: int) -> str:
    """The token of an id."""
    return next(token for token, i in self._vocab.items() if i == index)

  def encode(self, text: str) -> list[int]:
    """Ids of `text`; nothing is added."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; end-of-text tokens and ids outside the vocabulary are left out."""
    kept = [i for i in map(int, ids) if i != self.eos_id and 0 <= i < self.vocab_size]
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def token_bytes(self) -> np.ndarray:
    """int32[V]: bytes of each token; exact for byte-level tokenizers, else UTF-8 length.

    For word-piece and sentence-piece tokenizers, which drop or add spaces, the sum over a text can
    differ from its length by these spaces.
    """
    sizes = np.zeros(self.vocab_size, np.int32)
    byte_level = "ByteLevel" in _types(self._parsed.get("decoder"))
    added = {t["id"]: t for t in self._parsed.get("added_tokens", [])}
    for token, i in self._vocab.items():
      if i in added:
        sizes[i] = 0 if added[i]["special"] else len(token.encode())
      else:
        sizes[i] = len(token) if byte_level else _piece_bytes(token)
    sizes[self.eos_id] = 0
    return sizes

  def encode_documents(self, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    """int32 ids of each document; the library encodes documents in parallel."""
    for start in range(0, len(texts), _ENCODE_BATCH):
      batch = [t.decode("utf-8") for t in texts[start : start + _ENCODE_BATCH]]
      for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
        yield np.asarray(encoding.ids, np.int32)


def _find_eos(vocab: dict[str, int], wanted: str, name: str) -> str:
  for token in (wanted,) if wanted else _EOS_NAMES:
    if token in vocab:
      return token
  what = f"data.eos_token={wanted!r}" if wanted else "any of " + ", ".join(_EOS_NAMES)
  raise ConfigError(f"data.tokenizer={name!r} does not have {what}; name one in data.eos_token")


def _types(part: Any) -> set[str]:
  # Names of a decoder and of the decoders inside it (type "Sequence").
  if not isinstance(part, dict):
    return set()
  inner = [_types(p) for p in part.get("decoders", [])]
  return {str(part.get("type"))}.union(*inner)


def _piece_bytes(token: str) -> int:
  if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
    return 1  # byte fallback of sentence-piece vocabularies
  return len(token.removeprefix("##").replace("▁", " ").encode())


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
  """Trains a byte-level BPE; returns its tokenizer.json. Deterministic; round trips are exact.

  Raises:
    DataError: the text is too small for so many tokens.
  """
  library = need("tokenizers", "data.tokenizer='bpe'")
  tokenizer = library.Tokenizer(library.models.BPE())
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[EOS],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator((t.decode("utf-8") for t in texts), trainer)
  if tokenizer.get_vocab_size() < vocab_size:
    log.warning(
      "the training text gives only %d tokens of data.vocab_size=%d",
      tokenizer.get_vocab_size(),
      vocab_size,
    )
  return tokenizer.to_str()


def load_bpe(texts: Sequence[bytes], vocab_size: int, cache: Path) -> JsonTokenizer:
  """The BPE of these training texts, from `cache` or trained now and stored there."""
  digest = hashlib.sha256(f"bpe {vocab_size} {len(texts)}\n".encode())
  for text in texts:
    digest.update(len(text).to_bytes(8, "little") + text)
  path = cache / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}.json"
  if path.is_file():
    try:
      return JsonTokenizer(path.read_text("utf-8"), name="bpe")
    except (DataError, ConfigError, UnicodeDecodeError):
      log.warning("%s is damaged; training the tokenizer again", path)
  content = train_bpe(texts, vocab_size)
  with atomic_write(path) as file:
    file.write(content.encode())
  return JsonTokenizer(content, name="bpe")


def load_json(path: str, eos_token: str) -> JsonTokenizer:
  """Reads a tokenizer.json, or the one inside a folder.

  Raises:
    DataError: missing or no tokenizer.
  """
  file = Path(path).expanduser()
  file = file / "tokenizer.json" if file.is_dir() else file
  if not file.is_file():
    raise DataError(
      f"data.tokenizer={path!r} is not a file; use bytes, bpe or the path of a tokenizer.json"
    )
  try:
    content = file.read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise DataError(f"data.tokenizer={path!r}: cannot be read: {error}") from None
  return JsonTokenizer(content, eos_token=eos_token, name=path)
