"""The `data` section of a run's configuration, and the parser of its mixture string."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option
from scmoe.base.paths import expanded, files_below

IMAGE_SOURCES = ("images", "shapes", "digits")
SOURCES = ("auto", "stdlib", "text", "jsonl", "parquet", "arrow", "chat", "preference",
           "procedural", "mixture", *IMAGE_SOURCES)  # fmt: skip
PACKINGS = ("concat", "pack", "pad")
TEMPLATES = ("auto", "model", "plain")
NEEDS_PATH = ("text", "jsonl", "parquet", "arrow", "images")
HUB = "hf:"  # prefix of a path that names a dataset on the Hugging Face hub


@dataclasses.dataclass(frozen=True)
class DataConfig(Options, path="data"):
  """Options of the source of text or images, its tokenizer, and the packing of tokens into rows."""

  source: str = option(
    "auto",
    "kind of source: auto (by the suffix of data.path or of most files in it; mixture if "
    "data.mixture is set; stdlib without either), stdlib (the source code of Python's standard "
    "library), text, jsonl, parquet, arrow (a folder that Hugging Face datasets saved), chat "
    "(conversations in JSONL, docs/finetuning.md), preference (pairs of answers in JSONL), "
    "procedural (generated, of known entropy), mixture (several of these), or your own function as "
    "my_package.module:name; for a vision model images (Parquet files or class folders at "
    "data.path), shapes (drawn by this project) or digits (scikit-learn's)",
    choices=SOURCES,
    importable=True,
  )
  path: str = option(
    "",
    "for text, jsonl, parquet, arrow, chat and preference: a file, folder or glob, or "
    "hf:OWNER/NAME for a dataset on the Hugging Face hub (docs/data.md); for the last two empty: "
    "generated exercises; for procedural: its domains joined by '+', e.g. 'markov+recall' (empty: "
    "all); for images: a Parquet file, or a folder with such files or with a folder for each class",
  )
  image_field: str = option(
    "", "images: column of a Parquet file that holds the encoded image (empty: image or img)"
  )
  label_field: str = option("label", "images: column of a Parquet file that holds the class number")
  field: str = option("text", "column of a jsonl, parquet or arrow row that holds the text")
  domain_field: str = option(
    "",
    "column of a jsonl, parquet or arrow row that names its domain (empty: one domain per source)",
  )
  mixture: str = option(
    "",
    "weighted sources for source='mixture', written kind[:path]:weight and joined by commas, e.g. "
    "'stdlib:0.7,jsonl:/data/x.jsonl:0.3'",
  )
  document_bytes: int = option(
    16384,
    "text files longer than this are split into documents of about this many bytes, at blank "
    "lines where there are any; 0 makes every file one document",
    minimum=0,
  )
  limit_bytes: int = option(
    0, "stop reading a domain after this many bytes; 0 reads all", minimum=0
  )
  max_bad_rows: int = option(
    100,
    "unreadable rows (invalid JSON or UTF-8, missing field, empty, NUL, over 10 MB) to skip before "
    "giving up",
    minimum=0,
  )
  validation_fraction: float = option(
    0.05,
    "share of the documents held out, chosen by the hash of their content; files named train-* and "
    "validation-* override it",
    minimum=0.0,
    maximum=0.9,
  )
  tokenizer: str = option(
    "bytes", "bytes, bpe (trained on the training text), or the path of a tokenizer.json"
  )
  vocab_size: int = option(
    8192,
    "vocabulary of the trained bpe, including its end-of-text token",
    minimum=257,
    maximum=2**22,
  )
  eos_token: str = option(
    "",
    "end-of-text token of a tokenizer.json (empty: the first of the usual names, such as "
    "<|endoftext|> or </s>, that its vocabulary has)",
  )
  chat_template: str = option(
    "auto",
    "chat: how messages become text: model (by the chat template beside data.tokenizer), plain (by "
    "a template of this project), or auto (model where there is one, else plain)",
    choices=TEMPLATES,
  )
  train_on: str = option(
    "answers",
    "chat: the tokens that the loss counts: answers (the assistant's, the completions), or all",
    choices=("answers", "all"),
  )
  long_conversations: str = option(
    "refuse",
    "chat: what to do with a conversation of more than data.seq_len tokens: refuse (an error that "
    "counts them) or truncate (its first tokens stay; the header counts them)",
    choices=("refuse", "truncate"),
  )
  seq_len: int = option(
    256, "tokens in a row (S); of images the tokens that the model makes of one", minimum=2
  )
  packing: str = option(
    "concat",
    "concat (documents joined, then cut into rows: no padding), pack (best fit of whole documents, "
    "less cutting) or pad (one document, or a piece of one, per row)",
    choices=PACKINGS,
  )
  document_mask: bool = option(
    True,
    "number the documents of a row in segment_ids and restart positions at each, so that no token "
    "attends to another document; off: the whole row is one segment, as GPT-2 was trained",
  )
  cache_dir: str = option(
    "", "folder for trained tokenizers and token arrays (empty: ~/.cache/scmoe)"
  )
  read_threads: int = option(
    2, "threads that build rows ahead of training", minimum=0, maximum=1024
  )
  prefetch: int = option(4, "batches built ahead of training", minimum=1, maximum=10_000)

  def check(self) -> None:
    """Checks the paths, and the fields against each other.

    Raises:
      ConfigError: names the field, its value and a value that would work.
    """
    for name in ("path", "tokenizer", "cache_dir"):
      expanded(getattr(self, name), f"data.{name}")
    if self.source == "auto" and not self.mixture:
      check_is_text(self.path, "data.path")
    kind = self.kind
    if kind in NEEDS_PATH and not self.path:
      raise ConfigError(
        f"data.path='' is empty; data.source={self.source!r} needs a file or folder"
      )
    if kind == "mixture":
      parse_mixture(self.mixture)
    elif self.mixture:
      raise ConfigError(
        f"data.mixture={self.mixture!r} is not read by data.source={self.source!r}; "
        "set data.source='mixture' or leave data.mixture empty"
      )
    if self.reads_chats:
      self._check_rows_of_chats()

  def _check_rows_of_chats(self) -> None:
    if self.packing == "concat":
      raise ConfigError(
        "data.packing='concat' cuts conversations where a row ends; set data.packing=pack or pad"
      )
    paired = self.reads_preferences
    if not self.document_mask and (paired or self.packing == "pack"):
      raise ConfigError(
        f"data.document_mask=False lets the {'answers of a pair' if paired else 'conversations'} "
        "of a row attend to each other; set data.document_mask=True and model.document_mask=True"
        + ("" if paired else ", or data.packing=pad")
      )
    if paired and self.train_on == "all":
      raise ConfigError(
        "data.train_on='all' compares prompts, which are equal in data.source='preference'; set "
        "data.train_on=answers"
      )

  @property
  def reads_chats(self) -> bool:
    """Whether a source is one of conversations, or of pairs of answers."""
    return bool({"chat", "preference"} & {part.kind for part in self.parts()})

  @property
  def reads_preferences(self) -> bool:
    """Whether the source is one of pairs of answers."""
    return self.source == "preference"

  @property
  def reads_images(self) -> bool:
    """Whether the source is one of images."""
    return self.source in IMAGE_SOURCES

  @property
  def kind(self) -> str:
    """The kind of source, with `auto` replaced by the kind that it chooses."""
    if self.source != "auto":
      return self.source
    if self.mixture:
      return "mixture"
    return kind_of_path(self.path) if self.path else "stdlib"

  def parts(self) -> list[SourcePart]:
    """The sources to read: the parts of a mixture, else a single source of weight 1."""
    if self.kind == "mixture":
      return parse_mixture(self.mixture)
    return [SourcePart(self.kind, self.path, 1.0)]

  def cache_folder(self) -> Path:
    """The folder for caches, which this method does not create."""
    if self.cache_dir:
      return expanded(self.cache_dir, "data.cache_dir")
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "scmoe"


_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
SUFFIXES = {
  "text": (".txt", ".text", ".md", ".rst"),
  "jsonl": _JSONL,
  "parquet": (".parquet",),
  "arrow": (".arrow",),
  # After jsonl, which `kind_of_path` therefore prefers.
  "chat": _JSONL,
  "preference": _JSONL,
}


# Suffixes of tables, which `auto` would read as plain text, and the file to make of each.
_TABLES = {
  ".csv": "a .parquet or .jsonl file with a column of text",
  ".tsv": "a .parquet or .jsonl file with a column of text",
  ".json": "a .jsonl file, one object a line (data.source=jsonl if it is one already)",
}


def check_is_text(path: str, field: str) -> None:
  """Refuses tables such as .csv under `data.source=auto`.

  The model would learn their commas and quotes as text, and nothing in the run would show it. A
  user who wants that sets `data.source=text`.

  Raises:
    ConfigError: the file has the suffix of a table.
  """
  suffix = Path(path).suffix.lower()
  if suffix in _TABLES:
    raise ConfigError(
      f"{field}={path!r} is a table ({suffix}), not plain text; make {_TABLES[suffix]} of it, or "
      "set data.source=text to learn the file as it stands"
    )


def kind_of_path(path: str) -> str:
  """The kind of source that a file's suffix implies, or the suffixes of most files in a folder.

  Another suffix means text. So does a missing file; reading it later reports that it is missing.
  """
  if path.startswith(HUB):
    path = path.partition("@")[0]
    # Before a dataset is fetched its files are unknown, and nearly all datasets are Parquet.
    path = path if path.endswith(sum(SUFFIXES.values(), ())) else f"{path}.parquet"
  root = expanded(path, "data.path")
  names = [root.name]
  if root.is_dir():
    endings = sum(SUFFIXES.values(), ())
    names = [path.name for path in files_below(root, "data.path", endings)]
  counts = {kind: sum(name.endswith(ends) for name in names) for kind, ends in SUFFIXES.items()}
  return max(SUFFIXES, key=lambda kind: counts[kind])


@dataclasses.dataclass(frozen=True)
class SourcePart:
  """One source of a mixture: its kind, its path, and its share of the training rows."""

  kind: str
  path: str
  weight: float


def parse_mixture(text: str) -> list[SourcePart]:
  """Parses `kind[:path]:weight,...`; a path may contain colons but no commas.

  Raises:
    ConfigError: the text is empty, a kind unknown, a path missing, or a weight not above 0.
  """
  form = "write kind[:path]:weight joined by commas, e.g. 'stdlib:0.7,jsonl:/data/x.jsonl:0.3'"
  if not text.strip():
    raise ConfigError(f"data.mixture={text!r} is empty; {form}")
  return [_parse_part(part.strip(), form) for part in text.split(",")]


def _parse_part(text: str, form: str) -> SourcePart:
  head, _, weight_text = text.rpartition(":")
  kind, _, path = head.partition(":")
  try:
    weight = float(weight_text)
  except ValueError:
    weight = math.nan
  if not kind or math.isnan(weight):
    raise ConfigError(f"data.mixture: {text!r} has no weight; {form}")
  if not 0 < weight < math.inf:
    raise ConfigError(f"data.mixture: weight {weight_text} of {head!r} must be above 0 and finite")
  if kind == "auto" and path:
    check_is_text(path, "data.mixture: file")
    kind = kind_of_path(path)
  known = [s for s in SOURCES if s not in ("auto", "mixture", "preference", *IMAGE_SOURCES)]
  if kind not in known:
    raise ConfigError(f"data.mixture: unknown source {kind!r}; one of: {', '.join(known)}")
  if kind in NEEDS_PATH and not path:
    raise ConfigError(f"data.mixture: {text!r} names no file; write {kind}:PATH:{weight_text}")
  expanded(path, "data.mixture: file")
  return SourcePart(kind, path, weight)
