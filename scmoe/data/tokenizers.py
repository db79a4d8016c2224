"""Tokenizers: bytes, a BPE trained on the corpus, or any tokenizer.json.

`encode` turns text into ids and adds no special token. In a token stream the end-of-text token
(`eos_id`) stands before each document and after the last: it ends one document and begins the next.
A released model may begin its texts with another token (`scmoe.data.conventions`): `bos_id` then
replaces the end-of-text token in a row's inputs, and `prompt_ids` begins a prompt with the ids
with which that model's own tokenizer begins it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.paths import expanded
from scmoe.base.stored import StoredError, parse_json, read_text
from scmoe.data.chat import render
from scmoe.data.conventions import FILE, Conventions, conventions_beside
from scmoe.data.files import log, read_cached, write_cached
from scmoe.data.packages import need

TOKENIZER = "tokenizer.json"
EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|end|>", "[SEP]", "[EOS]")
_ENCODE_BATCH = 256  # documents handed to the tokenizer's threads at a time
_MOST_BYTES = 2**27  # size of a tokenizer.json
_MOST_TOKENS = 2**24  # size of a vocabulary; `token_bytes` allocates an array of that length


class Tokenizer(Protocol):
  """The tokenizer's interface for data pipeline, evaluation and generation.

  Attributes:
    vocab_size: all ids are below it.
    eos_id: the end-of-text token.
    bos_id: the token that begins a document for the model; `eos_id` unless conventions differ.
    begin_ids: tokens that precede every prompt.
    stop_ids: tokens at which generation ends, including `eos_id`.
    digest: a hash of everything that decides the ids.
  """

  vocab_size: int
  eos_id: int
  bos_id: int
  begin_ids: tuple[int, ...]
  stop_ids: frozenset[int]
  digest: str

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without an end-of-text token."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; omits end-of-text tokens, and writes U+FFFD for broken UTF-8."""
    ...

  def token_bytes(self) -> np.ndarray:
    """int32[V]: the number of bytes of text that each token stands for; 0 for special tokens."""
    ...

  def encode_documents(self, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    """Integer ids of each document, in order."""
    ...


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
  """Ids of a prompt, preceded by `begin_ids`; if there are no ids at all, `bos_id` alone."""
  return [*tokenizer.begin_ids, *tokenizer.encode(text)] or [tokenizer.bos_id]


class ByteTokenizer:
  """Ids 0-255 are the bytes of UTF-8; 256 is the end of text."""

  vocab_size = 257
  eos_id = bos_id = 256
  begin_ids: tuple[int, ...] = (256,)
  stop_ids: frozenset[int] = frozenset({256})
  digest = "bytes-257"

  def encode(self, text: str) -> list[int]:
    """Bytes of `text`."""
    return list(text.encode("utf-8"))

  def decode(self, ids: Iterable[int]) -> str:
    """Text of the bytes; omits ids above 255 (the end of text, or padding of the vocabulary)."""
    return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

  def token_bytes(self) -> np.ndarray:
    """int32[257]: 1 for each byte, 0 for the end of text."""
    return np.append(np.ones(256, np.int32), np.int32(0))

  def encode_documents(self, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    """Ids of each document as a uint8 array, which shares the document's memory."""
    return (np.frombuffer(text, np.uint8) for text in texts)


class JsonTokenizer:
  """A tokenizer of the `tokenizers` library (the content of a Hugging Face tokenizer.json).

  Attributes:
    content: the JSON text.
    parsed: the same as a dictionary.
    name: the file's name in messages.
    conventions: those of a released model, or None.
  """

  def __init__(
    self,
    content: str,
    *,
    eos_token: str = "",
    name: str = "tokenizer.json",
    eos_id: int | None = None,
    conventions: Conventions | None = None,
  ):
    """Args:
      content: the JSON text.
      eos_token: text of the end-of-text token; "" takes the first usual one in the vocabulary.
      name: the file's name in messages.
      eos_id: id of the end-of-text token, used instead of `eos_token`; None to use `eos_token`.
      conventions: how a released model's texts begin and end; None: with the end-of-text token.

    Raises:
      DataError: the text is not a tokenizer.json, or its vocabulary cannot be used.
      ConfigError: the vocabulary has no such end-of-text token.
    """
    library = need("tokenizers", f"data.tokenizer={name!r}")
    self.content, self.name = content, name
    try:
      self._tokenizer = library.Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
      raise DataError(f"data.tokenizer={name!r}: not a tokenizer.json: {error}") from None
    # Text that spells a special token is encoded as text, so that data cannot end a document.
    self._tokenizer.encode_special_tokens = True
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
    self.parsed: dict[str, Any] = parse_json(content, name)
    _check_vocabulary(self._vocab, name)
    self.vocab_size = max(self._vocab.values()) + 1  # ids need not be dense
    if eos_id is not None and eos_id not in self._vocab.values():
      raise ConfigError(f"{name}: has no token {eos_id}, the model's eos_token_id")
    found = eos_id if eos_id is not None else self._vocab[_find_eos(self._vocab, eos_token, name)]
    self.eos_id: int = found
    self.adopt(conventions)

  def adopt(self, conventions: Conventions | None) -> None:
    """Sets the conventions; None begins and ends texts with the end-of-text token."""
    self.conventions = conventions
    said = conventions or Conventions(begin_ids=(self.eos_id,))
    self.bos_id = self.eos_id if said.bos_id is None else said.bos_id
    self.begin_ids = said.begin_ids
    self.stop_ids = frozenset({self.eos_id, *said.stop_ids})
    # `content` does not decide the token that begins a document, so the digest includes it.
    begins = "" if self.bos_id == self.eos_id else f" {self.bos_id}"
    digest = hashlib.sha256(f"{self.eos_id}{begins}\n{self.content}".encode())
    self.digest = digest.hexdigest()[:16]

  @property
  def can_chat(self) -> bool:
    """True if the model's folder has a chat template."""
    return bool(self.template)

  def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation, as the model's chat template writes it.

    Text in the template that spells a special token becomes that token, as in transformers. So does
    such text in a message.

    Args:
      messages: turns in order, each with `role` and `content`.

    Raises:
      ConfigError: jinja2 is not installed.
      DataError: the template fails.
    """
    text = render(self.template, messages, **self.names_of_ends())
    return self.encode_written(text)[0]

  @property
  def template(self) -> str:
    """The chat template of the model's folder, or ""."""
    return "" if self.conventions is None else self.conventions.chat_template

  def names_of_ends(self) -> dict[str, str]:
    """`bos_token` and `eos_token` as texts, which a chat template may use; "" for none."""
    has_bos = self.conventions is not None and self.conventions.bos_id is not None
    return {
      "bos_token": self.token(self.bos_id) if has_bos else "",
      "eos_token": self.token(self.eos_id),
    }

  def encode_written(self, text: str) -> tuple[list[int], list[int]]:
    """Ids of a text that a chat template wrote, and the character at which each token begins.

    Text that spells a special token becomes that token.

    Raises:
      DataError: the vocabulary has no token for a part of the text, and none for unknown text.
    """
    self._tokenizer.encode_special_tokens = False
    try:
      found = self._tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
      raise self._cannot_encode(error) from None
    finally:
      self._tokenizer.encode_special_tokens = True
    return found.ids, [begin for begin, _ in found.offsets]

  def write(self, folder: Path) -> None:
    """Writes tokenizer.json into a folder, and conventions.json if there are conventions.

    Raises:
      OSError: a file cannot be written.
    """
    for name, text in self.files().items():
      (folder / name).write_text(text, "utf-8")

  def files(self) -> dict[str, str]:
    """The contents of the files that describe this tokenizer, by file name."""
    found = {TOKENIZER: self.content}
    return found | ({FILE: self.conventions.to_json()} if self.conventions else {})

  @property
  def vocab(self) -> Mapping[str, int]:
    """The id of every token."""
    return self._vocab

  def token(self, index: int) -> str:
    """The text of the token with this id; "" if the vocabulary has no such id."""
    return next((token for token, i in self._vocab.items() if i == index), "")

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, without special tokens.

    Raises:
      DataError: the vocabulary has no token for a part of the text, and none for unknown text.
    """
    try:
      return self._tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises plain Exception
      raise self._cannot_encode(error) from None

  def _cannot_encode(self, error: Exception) -> DataError:
    return DataError(
      f"data.tokenizer={self.name!r} cannot encode the text: {' '.join(str(error).split())[:200]}"
    )

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; omits tokens that begin or end texts, and ids outside the vocabulary."""
    left_out = self.stop_ids | {self.bos_id}
    kept = [i for i in map(int, ids) if i not in left_out and 0 <= i < self.vocab_size]
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def token_bytes(self) -> np.ndarray:
    """int32[V]: bytes of text of each token.

    The numbers are exact for byte-level tokenizers. Word-piece and sentence-piece tokenizers drop
    or add spaces, so the sum over a text's tokens can differ from its length by these spaces.
    """
    sizes = np.zeros(self.vocab_size, np.int32)
    byte_level = "ByteLevel" in _types(self.parsed.get("decoder"))
    added = {t["id"]: t for t in self.parsed.get("added_tokens", [])}
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
      try:
        found = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
      except Exception as error:  # the library raises plain Exception
        raise self._cannot_encode(error) from None
      for encoding in found:
        yield np.asarray(encoding.ids, np.int32)


def _check_vocabulary(vocab: Mapping[str, int], name: str) -> None:
  """Checks the size of a vocabulary.

  Raises:
    DataError: the vocabulary is empty, or has an id that is too large to index an array by.
  """
  if not vocab:
    raise DataError(f"data.tokenizer={name!r} has no token: its vocabulary is empty")
  token, worst = max(vocab.items(), key=lambda item: item[1])
  if worst >= _MOST_TOKENS:
    raise DataError(
      f"data.tokenizer={name!r} gives {token[:40]!r} the id {worst}; ids are below {_MOST_TOKENS}"
    )


def _find_eos(vocab: dict[str, int], wanted: str, name: str) -> str:
  for token in (wanted,) if wanted else _EOS_NAMES:
    if token in vocab:
      return token
  what = f"data.eos_token={wanted!r}" if wanted else "any of " + ", ".join(_EOS_NAMES)
  raise ConfigError(f"data.tokenizer={name!r} does not have {what}; name one in data.eos_token")


def _types(part: Any) -> set[str]:
  # The types of a decoder and, if it is a "Sequence", of the decoders in it.
  if not isinstance(part, dict):
    return set()
  inner = [_types(p) for p in part.get("decoders", [])]
  return {str(part.get("type"))}.union(*inner)


def _piece_bytes(token: str) -> int:
  if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
    return 1  # sentence-piece vocabularies write a single byte as <0x0A>
  return len(token.removeprefix("##").replace("▁", " ").encode())


def byte_tokenizer_json() -> str:
  """A tokenizer.json with the ids of `ByteTokenizer`: a byte-level BPE without merges.

  A byte-level BPE writes each byte as a character: a byte that prints as one stands for itself, the
  others are 256, 257, ... in their order.
  """
  printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printed]
  signs = {chr(byte): byte for byte in printed}
  signs |= {chr(256 + i): byte for i, byte in enumerate(others)}
  level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
  end = {"id": ByteTokenizer.eos_id, "content": EOS, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
  model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
           "ignore_merges": False, "merges": [],
           "vocab": {**signs, EOS: ByteTokenizer.eos_id}}  # fmt: skip
  return json.dumps({
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
    "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
    "model": model,
  })  # fmt: skip


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
  """Trains a byte-level BPE and returns its tokenizer.json.

  The result is deterministic, and decoding restores the text exactly. A small text can give fewer
  tokens than `vocab_size`, with a warning.
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
  """The BPE trained on these texts, read from `cache`, or trained now and written there."""
  digest = hashlib.sha256(f"bpe {vocab_size} {len(texts)}\n".encode())
  for text in texts:
    digest.update(len(text).to_bytes(8, "little") + text)
  path = cache / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}.json"
  if (found := read_cached(path)) is not None:
    try:
      return JsonTokenizer(found.decode("utf-8"), name="bpe")
    except DataError:
      log.warning("%s was written by another version of tokenizers; training it again", path)
  content = train_bpe(texts, vocab_size)
  write_cached(path, content.encode())
  return JsonTokenizer(content, name="bpe")


def load_json(path: str, eos_token: str) -> JsonTokenizer:
  """Reads a tokenizer.json and the conventions.json beside it, if there is one.

  Args:
    path: the file, or the folder that holds it.
    eos_token: see `JsonTokenizer`.

  Raises:
    DataError: the file is missing or is not a tokenizer.json.
    ConfigError: the vocabulary has no such end-of-text token.
  """
  file = expanded(path, "data.tokenizer")
  file = file / TOKENIZER if file.is_dir() else file
  if not file.is_file():
    raise DataError(
      f"data.tokenizer={path!r} is not a file; use bytes, bpe or the path of a tokenizer.json"
    )
  if file.suffix == ".model":
    raise DataError(
      f"data.tokenizer={path!r} is a SentencePiece model; give the tokenizer.json of the same "
      "model (transformers' AutoTokenizer.from_pretrained(...).save_pretrained writes one)"
    )
  try:
    content = read_text(file, _MOST_BYTES)
  except (FileNotFoundError, StoredError) as error:
    raise DataError(f"data.tokenizer={path!r}: {error}") from None
  conventions = conventions_beside(file)
  return JsonTokenizer(content, eos_token=eos_token, name=path, conventions=conventions)
