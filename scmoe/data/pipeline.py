"""Batches for training and validation, the same on every machine and after every restart.

config -> corpus -> rows -> shuffle per domain, mix, batch (by grain) -> one process's share
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, DataError
from scmoe.data import bigram
from scmoe.data.config import DataConfig
from scmoe.data.corpus import Corpus, Domain, Stream, load_corpus
from scmoe.data.packages import need
from scmoe.data.packing import Rows, make_rows
from scmoe.data.store import is_large, stored_corpus
from scmoe.data.tokenizers import Tokenizer

__all__ = [
  "Batch",
  "Data",
  "DataConfig",
  "TrainIterator",
  "bigram_bits_per_byte",
  "check_fingerprint",
  "check_vocab",
  "open_data",
]

Row = dict[str, np.ndarray]  # the fields of one row of a `Batch`
_SHARDING = "contiguous rows of one global batch"
_MOST_ROWS = 1 << 53
_HASHED = 1 << 16  # rows whose positions are hashed at a time
# Fields of a fingerprint that may differ: any number of processes reads the same global batches in
# the same order.
INFORMATIVE = ("process_count",)


def open_data(
  cfg: DataConfig,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
  evaluated: bool = False,
  trained: bool = True,
) -> Data:
  """Reads, splits, tokenises and packs the data of a run.

  Args:
    cfg: the `data` section of the run's configuration.
    batch_size: rows of the global batch; each process gets batch_size / process_count of them.
    seed: decides the order in which rows are visited, nothing else.
    process_index, process_count: this process's index and the number of processes.
    evaluated: whether the caller only evaluates. All text is then validation text, unless file
      names mark some of it as such.
    trained: whether the caller reads training batches, so that there must be one at least.

  Raises:
    ConfigError: a field cannot be used.
    DataError: data are missing, empty, malformed or, to train, smaller than one batch.
  """
  cfg.check()
  if batch_size < 1 or batch_size % process_count:
    raise ConfigError(
      f"train.batch_size={batch_size} is not divisible by the {process_count} processes; "
      f"use a multiple of {process_count}"
    )
  need("grain", "reading data")
  corpus = stored_corpus(cfg) if is_large(cfg) else load_corpus(cfg)
  if evaluated and not any(domain.validation.size for domain in corpus.domains):
    swap = lambda d: dataclasses.replace(d, train=d.validation, validation=d.train)
    corpus = dataclasses.replace(corpus, domains=tuple(map(swap, corpus.domains)))
  data = Data(cfg, corpus, batch_size, seed, process_index, process_count)
  if trained and not evaluated:
    data.check_size()
  return data


class Data:
  """The data of a run, made by `open_data`.

  Each `Batch` holds this process's rows, B = batch_size / process_count of them. `Batch.domain` is
  an index into `domains`.
  """

  def __init__(
    self,
    config: DataConfig,
    corpus: Corpus,
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int,
  ):
    self.config = config
    self.corpus = corpus
    self.batch_size = batch_size
    self.seed = seed
    self.process_index = process_index
    self.process_count = process_count
    self.tokenizer: Tokenizer = corpus.tokenizer
    self.domains: tuple[str, ...] = tuple(d.name for d in corpus.domains)
    self._train = _Rows([d.train for d in corpus.domains], config, self.tokenizer)
    self._validation = _Rows([d.validation for d in corpus.domains], config, self.tokenizer)
    self._validation_order: dict[int | None, np.ndarray] = {}  # cache: domain (None: all) -> rows

  @property
  def validation_domains(self) -> tuple[str, ...]:
    """The domains that have validation text."""
    return tuple(d for d, table in zip(self.domains, self._validation.tables) if len(table))

  # --- batches ------------------------------------------------------------------------------------

  def train(self) -> TrainIterator:
    """An endless iterator over training batches, reshuffled at every pass over a domain."""
    import grain

    rows = _ProcessRows(
      self.training_order(), self.batch_size, self.process_index, self.process_count
    )
    batches = (
      grain.MapDataset.source(rows)
      .map(self.training_row)
      .batch(self.batch_size // self.process_count)
    )
    options = grain.ReadOptions(
      num_threads=self.config.read_threads, prefetch_buffer_size=self.config.prefetch
    )
    return TrainIterator(iter(batches.to_iter_dataset(options)))

  def validation(self, domain: str | None = None, max_batches: int | None = None) -> Validation:
    """Validation batches of one domain or all, the same rows in the same order every time.

    Rows of weight 0 fill up the last batch. The order is a fixed shuffle, so the first
    `max_batches` batches are a fair sample.

    Raises:
      DataError: there is no such domain, or it has no validation text.
    """
    if domain is not None and domain not in self.domains:
      raise DataError(f"no domain {domain!r} in the data; one of: {', '.join(self.domains)}")
    index = None if domain is None else self.domains.index(domain)
    if index not in self._validation_order:
      self._validation_order[index] = shuffled(self._validation.keys(index))
    keys = self._validation_order[index]
    if not len(keys):
      of = f"domain {domain!r}" if domain else "the data"
      raise DataError(
        f"{of} has no validation text; raise data.validation_fraction="
        f"{self.config.validation_fraction} or give more than one document"
      )
    return Validation(self, keys, max_batches)

  def training_order(self) -> Any:
    """An endless dataset of row keys: each domain shuffled by itself, all mixed by weight."""
    import grain

    parts, weights = [], []
    for index, weight in enumerate(self._mixing_weights()):
      keys = self._train.keys(index)
      if len(keys):
        seed = _derived_seed(self.seed, self.domains[index])
        ordered = grain.MapDataset.range(keys.start, keys.stop).shuffle(seed=seed)
        parts.append(ordered.repeat())
        weights.append(weight)
    return grain.MapDataset.mix(parts, weights)

  def _mixing_weights(self) -> list[float]:
    # The domains of a source share its weight in proportion to their rows.
    sizes = [len(table) for table in self._train.tables]
    of_part = [p.weight for p in self.config.parts()]
    total = [0] * len(of_part)
    for domain, size in zip(self.corpus.domains, sizes):
      total[domain.part] += size
    return [
      of_part[domain.part] * size / total[domain.part] if size else 0.0
      for domain, size in zip(self.corpus.domains, sizes)
    ]

  def training_row(self, key: int) -> Row:
    """The training row with this key."""
    return self._train.read(key, self.config.document_mask)

  @property
  def training_rows(self) -> int:
    """Number of training rows."""
    return len(self._train)

  def validation_keys(self) -> range:
    """Keys of all validation rows, for `validation_row`."""
    return self._validation.keys(None)

  def validation_row(self, key: int) -> Row:
    """The validation row with this key; of a pair of answers only the chosen one counts."""
    row = self._validation.read(key, self.config.document_mask)
    if self.config.reads_preferences:
      row["weights"] = row["weights"] * (row["segment_ids"] % 2)
    return row

  def passes(self, rows: int) -> dict[str, float]:
    """How many times a run of `rows` rows reads each domain's training text."""
    weights = self._mixing_weights()
    shares = [weight / sum(weights) for weight in weights]
    return {
      name: rows * share / len(table)
      for name, share, table in zip(self.domains, shares, self._train.tables)
      if len(table)
    }

  @property
  def masked(self) -> bool:
    """True if the loss leaves out tokens of some domain: the prompts of conversations."""
    return any(d.train.learned is not None for d in self.corpus.domains)

  # --- size, identity and summary -----------------------------------------------------------------

  def check_size(self) -> None:
    """Checks that the training rows fill at least one batch.

    Raises:
      DataError: there are fewer.
    """
    if not len(self._train):
      raise DataError(
        "the training data are empty: all documents went to validation; give more documents or "
        "lower data.validation_fraction"
      )
    if len(self._train) < self.batch_size:
      raise DataError(
        f"the training data are {len(self._train)} sequences of data.seq_len="
        f"{self.config.seq_len}, less than one batch of train.batch_size={self.batch_size}; "
        f"use a batch of at most {len(self._train)}, shorter sequences or more data"
      )

  def fingerprint(self) -> dict[str, Any]:
    """Everything that decides the order and content of batches, as values for JSON.

    `check_fingerprint` compares two of them.
    """
    cfg = self.config
    return {
      "source": "+".join(part.kind for part in cfg.parts()),
      "digest": self.corpus.digest,
      "documents": self.corpus.documents,
      "domains": list(self.domains),
      "rows": [len(table) for table in self._train.tables],
      "weights": [round(weight, 9) for weight in self._mixing_weights()],
      "tokenizer": self.tokenizer.digest,
      "vocab_size": self.tokenizer.vocab_size,
      "seq_len": cfg.seq_len,
      "packing": cfg.packing,
      "document_mask": cfg.document_mask,
      "seed": self.seed,
      "batch_size": self.batch_size,
      "order": self._order_digest(),
      "sharding": _SHARDING,
      "process_count": self.process_count,
    }

  def _order_digest(self) -> str:
    # grain may change its order between versions, so the first rows are part of the fingerprint.
    order = self.training_order()
    first = np.array([order[i] for i in range(256)], "<i8")
    return hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()

  def summary(self) -> str:
    """A few lines for the run's header: documents, tokens and rows, in total and per domain."""
    corpus, weights = self.corpus, self._mixing_weights()
    skipped = f", {corpus.bad_rows} bad rows skipped" if corpus.bad_rows else ""
    lines = [
      f"data {self.config.mixture or self.config.source}: {corpus.documents:,} documents, "
      f"vocabulary {self.tokenizer.vocab_size:,} ({self.config.tokenizer}){skipped}"
    ]
    for index, domain in enumerate(corpus.domains):
      share = weights[index] / sum(weights)
      lines.append(
        f"  {domain.name}: {share:.1%} of rows, {domain.train.size:,} training tokens "
        f"({domain.train.text_bytes:,} bytes, {len(self._train.tables[index]):,} rows), "
        f"{domain.validation.size:,} validation tokens{_learned(domain)}"
      )
    return "\n".join(lines)


def _learned(domain: Domain) -> str:
  """The end of a domain's line in the summary, if it has conversations; "" for plain text."""
  learned = domain.train.learned
  if learned is None:
    return ""
  cut, left_out = (
    getattr(domain.train, name) + getattr(domain.validation, name) for name in ("cut", "left_out")
  )
  return (
    f"; the loss counts {int(learned.sum()):,} of the training tokens"
    + (f"; {cut} conversations cut to data.seq_len" if cut else "")
    + (f"; {left_out} left out, without a token to learn" if left_out else "")
  )


class TrainIterator:
  """Training batches without end; its position can be stored and restored."""

  def __init__(self, iterator: Any):
    self._iterator = iterator

  def __iter__(self) -> TrainIterator:
    return self

  def __next__(self) -> Batch:
    return Batch(**next(self._iterator))

  def state(self) -> dict[str, Any]:
    """The position after the last batch that was returned, as values for JSON.

    It is only a count of batches. Store `Data.fingerprint` beside it, which identifies the data.
    """
    return dict(self._iterator.get_state())

  def restore(self, state: dict[str, Any]) -> None:
    """Continues after the batch at which `state` was taken.

    Raises:
      DataError: `state` did not come from `state()`.
    """
    position = state.get("next_index") if isinstance(state, dict) else None
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
      raise DataError(f"data position {state!r} is not one of this version: needs next_index >= 0")
    self._iterator.set_state(dict(state))


class Validation:
  """A finite, repeatable sequence of validation batches.

  Args:
    data: gives sizes and rows.
    keys: of all rows, in order.
    max_batches: limit on the number of batches; None: all rows.
  """

  def __init__(self, data: Any, keys: Any, max_batches: int | None):
    self._data, self._keys = data, keys
    batches = -(-len(keys) // data.batch_size)
    self._batches = batches if max_batches is None else min(batches, max_batches)

  def __len__(self) -> int:
    return self._batches

  def __iter__(self) -> Iterator[Batch]:
    data = self._data
    share = data.batch_size // data.process_count
    for batch in range(self._batches):
      start = batch * data.batch_size + data.process_index * share
      rows = [self._read(i) for i in range(start, start + share)]
      yield Batch(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})

  def _read(self, i: int) -> Row:
    if i < len(self._keys):
      return self._data.validation_row(int(self._keys[i]))
    padding = self._data.validation_row(int(self._keys[0]))
    return {name: np.zeros_like(a) for name, a in padding.items()}


class _Rows:
  # Numbers the rows of all domains: domain d has the keys offsets[d] to offsets[d + 1] - 1.

  def __init__(self, streams: list[Stream], config: DataConfig, tokenizer: Tokenizer):
    self._streams, self._tokenizer = streams, tokenizer
    self.tables: list[Rows] = [make_rows(s, config.packing, config.seq_len) for s in streams]
    self.offsets = np.cumsum([0] + [len(t) for t in self.tables])

  def __len__(self) -> int:
    return int(self.offsets[-1])

  def keys(self, domain: int | None) -> range:
    if domain is None:
      return range(len(self))
    return range(int(self.offsets[domain]), int(self.offsets[domain + 1]))

  def read(self, key: int, document_mask: bool) -> Row:
    domain = int(np.searchsorted(self.offsets, key, side="right")) - 1
    row = self.tables[domain].read(key - int(self.offsets[domain]), document_mask)
    eos, bos = self._tokenizer.eos_id, self._tokenizer.bos_id
    if bos != eos and self._streams[domain].learned is None:
      # In a stream the end-of-text token begins each document, but this model was trained with
      # documents that begin with `bos`. Conversations lie in a stream with their own first token.
      row["inputs"] = np.where(row["inputs"] == eos, np.int32(bos), row["inputs"])
    return {**row, "domain": np.int32(domain)}  # pyright: ignore[reportReturnType]


class _ProcessRows:
  # The rows of one process, as a data source for grain: a contiguous slice of every global batch.
  # Not every n-th row, because jax expects a contiguous slice of a sharded batch of each process.

  def __init__(self, order: Any, batch_size: int, index: int, count: int):
    self._order, self._batch = order, batch_size
    self._share, self._index = batch_size // count, index

  def __len__(self) -> int:
    # grain divides this length in float64, which is exact up to 2^53. No run reads so many rows.
    return min(len(self._order) // self._batch, _MOST_ROWS // self._share) * self._share

  def __getitem__(self, index: int) -> int:
    batch, row = divmod(int(index), self._share)
    return self._order[batch * self._batch + self._index * self._share + row]


def _derived_seed(seed: int, name: str) -> int:
  # Hashes the seed, because grain adds the epoch's number to it. Otherwise the second epoch of a
  # run with seed 0 would have the order of the first epoch of a run with seed 1.
  return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big")


def shuffled(keys: range) -> np.ndarray:
  """The keys in a fixed order that looks random: the same on every machine and in every version."""
  # Sorts by a hash of the position, `_HASHED` rows at a time, because millions of digest objects
  # can need more memory than the data.
  hashes = np.zeros(len(keys), ">u8")
  for start in range(0, len(keys), _HASHED):
    places = range(start, min(start + _HASHED, len(keys)))
    digests = (hashlib.blake2b(b"%d" % i, digest_size=8).digest() for i in places)
    hashes[start : start + _HASHED] = np.frombuffer(b"".join(digests), ">u8")
  return keys.start + np.argsort(hashes, kind="stable")


def check_fingerprint(stored: dict[str, Any], now: dict[str, Any]) -> None:
  """Checks that the data have the fingerprint that was stored with a position.

  Raises:
    DataError: names the first field that differs.
  """
  for name in dict.fromkeys([*now, *stored]):
    if name in INFORMATIVE or stored.get(name) == now.get(name):
      continue
    raise DataError(
      f"data fingerprint: {name} was {stored.get(name)!r} when the run was saved and is "
      f"{now.get(name)!r} now; continue with the data and options of the saved run, or start anew"
    )


def check_vocab(data: Data, model_vocab_size: int) -> None:
  """Checks that the model's vocabulary has every token id of the data.

  Without this check a run would go on with wrong inputs: the embedding's lookup clamps ids that are
  too large.

  Raises:
    DataError: the tokenizer's vocabulary is larger than the model's.
  """
  if data.tokenizer.vocab_size > model_vocab_size:
    raise DataError(
      f"model.vocab_size={model_vocab_size} is smaller than the {data.tokenizer.vocab_size} tokens "
      f"of data.tokenizer={data.config.tokenizer!r}; use at least {data.tokenizer.vocab_size}"
    )


class BitsPerByte(NamedTuple):
  """Bits per byte of all validation text, and of each domain that has some."""

  total: float
  domains: dict[str, float]


def bigram_bits_per_byte(data: Data) -> BitsPerByte:
  """Bits per byte of a bigram model of bytes: fitted to training text, measured on validation text.

  As for a trained model, predicting the end of each document costs bits, and adds no byte to the
  denominator.

  Raises:
    DataError: there is no validation text.
  """
  fitted = np.sum([d.train.pairs for d in data.corpus.domains], axis=0)
  held = [d for d in data.corpus.domains if d.validation.text_bytes]
  if not held:
    raise DataError(
      "the data has no validation text; raise data.validation_fraction="
      f"{data.config.validation_fraction} or give more than one document"
    )
  costs = {d.name: bigram.bits(fitted, d.validation.pairs) for d in held}
  total = sum(costs.values()) / sum(d.validation.text_bytes for d in held)
  return BitsPerByte(total, {d.name: costs[d.name] / d.validation.text_bytes for d in held})
