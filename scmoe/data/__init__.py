"""Reads text and makes batches of tokens: `open_data` opens the data of a run."""

from scmoe.base.batch import Batch
from scmoe.data.config import DataConfig
from scmoe.data.pipeline import (
  BitsPerByte,
  Data,
  TrainIterator,
  bigram_bits_per_byte,
  check_fingerprint,
  check_vocab,
  open_data,
)
from scmoe.data.tokenizers import Tokenizer

__all__ = [
  "Batch",
  "BitsPerByte",
  "Data",
  "DataConfig",
  "Tokenizer",
  "TrainIterator",
  "bigram_bits_per_byte",
  "check_fingerprint",
  "check_vocab",
  "open_data",
]
