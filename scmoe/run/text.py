"""Text for the commands: the model of a run, its batches, data and figures (`Modality`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, StorageError
from scmoe.base.stored import StoredError, read_text
from scmoe.data import Data, DataConfig, Tokenizer, bigram_bits_per_byte, check_vocab, open_data
from scmoe.data.conventions import FILE, conventions_beside
from scmoe.data.tokenizers import TOKENIZER, ByteTokenizer, JsonTokenizer
from scmoe.inference.decode import generate
from scmoe.inference.evaluation import evaluate, flat_scalars
from scmoe.inference.sampling import Sampling
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT
from scmoe.models.objective import LanguageModelObjective
from scmoe.run.config import RunConfig, from_json
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import FOLDER, list_steps
from scmoe.training.workdir import prepare_workdir


class Text:
  """See `scmoe.run.modality.Modality`."""

  path_source, noun = "auto", "sequence"

  def make_model(self, config: ModelConfig, key: Array, **options: Any) -> GPT:
    """See `Modality.make_model`."""
    return GPT(config, **options, rngs=nnx.Rngs(params=key))

  def make_objective(self, run: RunConfig, graph: nnx.GraphDef) -> LanguageModelObjective:
    """See `Modality.make_objective`."""
    return LanguageModelObjective(graph, run.router, remat=run.train.remat)

  def batch_shapes(self, run: RunConfig, rows: tuple[int, ...]) -> Batch:
    """See `Modality.batch_shapes`."""
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    ids = of((*rows, run.data.seq_len), np.int32)
    return Batch(ids, ids, of(ids.shape, np.float32), ids, ids, of(rows, np.int32))

  def random_batch(self, run: RunConfig, rows: tuple[int, ...], seed: int) -> Batch:
    """See `Modality.random_batch`."""
    draw = np.random.default_rng(seed).integers
    shape = (*rows, run.data.seq_len)
    return Batch.of_tokens(draw(0, run.model.vocab_size, shape, dtype=np.int32))

  def open_data(self, run: RunConfig, **options: Any) -> Data:
    """See `Modality.open_data`."""
    train = run.train
    data = open_data(run.data, batch_size=train.batch_size, seed=train.seed, **options)
    check_vocab(data, run.model.vocab_size)
    return data

  def evaluate(self, model: Any, data: Any, **options: Any) -> dict[str, Any] | None:
    """See `Modality.evaluate`."""
    return evaluate(model, data, **options)

  def add_baseline(self, data: Any, figures: dict[str, Any]) -> None:
    """Adds `bigram_bits_per_byte`, in all and of each domain; nothing if prompts are masked.

    The bigram model predicts all of the text, so it is no measure for the loss of answers alone.
    """
    if data.masked:
      return
    bigram = bigram_bits_per_byte(data)
    figures["bigram_bits_per_byte"] = bigram.total
    for name, of_domain in figures["domains"].items():
      of_domain["bigram_bits_per_byte"] = bigram.domains[name]

  def flat(self, figures: Mapping[str, Any]) -> dict[str, float]:
    """See `Modality.flat`."""
    return flat_scalars(dict(figures))

  def keep(self, data: Data, workdir: Path) -> None:
    """Stores the tokenizer, so that text can be generated without the training data.

    Raises:
      StorageError: it cannot be written.
    """
    store_tokenizer(data.tokenizer, workdir)

  def load_tokenizer(self, run: RunConfig, workdir: str) -> Tokenizer:
    """See `Modality.load_tokenizer`; raises ConfigError if it was not stored with the run."""
    return load_tokenizer(run, workdir)

  def card(self, data: Data) -> dict[str, Any]:
    """See `Modality.card`."""
    return {"tokenizer": data.tokenizer.digest}

  def sampling(self, built: Any, data: Data) -> Callable[[Any], str] | None:
    """See `Modality.sampling`; None with several processes."""
    if jax.process_count() > 1:
      return None

    def run(state: Any) -> str:
      start = [data.tokenizer.bos_id]
      room = built.run.model.context - len(start)
      (tokens,) = generate(
        built.generating_model(state.params, state.teacher),
        [start],
        Sampling(temperature=0.8),
        max_new_tokens=min(built.run.train.sample_tokens, room),
        seed=built.run.train.seed,
        eos_id=data.tokenizer.stop_ids,
        router=state.router,
        mesh=built.mesh,
      )
      return data.tokenizer.decode(tokens)

    return run

  def result(self, data: Data, workdir: Path) -> str:
    """The last evaluation, beside the bigram byte model if all text counts, and what to do next."""
    lines = []
    evaluations = read_metrics(workdir, "eval")
    if evaluations:
      last = evaluations[-1]
      beside = (
        "" if data.masked else f" (a bigram model of bytes: {bigram_bits_per_byte(data).total:.4f})"
      )
      lines.append(
        f"validation loss {last['loss']:.4f}, bits per byte {last['bits_per_byte']:.4f}"
        f"{_sample(data, workdir)}{beside}"
      )
    asked = "--chat" if data.masked else '--prompt "def main("'
    lines += [
      f"next: python -m scmoe.evaluate --workdir {workdir}",
      f"      python -m scmoe.generate --workdir {workdir}{self._which(data)} {asked}",
    ]
    return "\n".join(lines)

  def _which(self, data: Any) -> str:
    """The flag of scmoe.generate that chooses one of several tasks; empty without tasks."""
    del data
    return ""


def _sample(data: Data, workdir: Path) -> str:
  """How much of the validation text the run's evaluations read; empty where it is all of it."""
  try:
    asked = from_json(read_text(workdir / "config.json")).train.eval_batches
  except (FileNotFoundError, StoredError, ConfigError):
    return ""
  there = len(data.validation())
  return f" on {asked} of {there:,} batches, scmoe.evaluate reads all" if 0 < asked < there else ""


def store_tokenizer(tokenizer: Tokenizer, workdir: Path) -> None:
  """Keeps a tokenizer with the run, so that text can be generated without its training data.

  Raises:
    StorageError: it cannot be written.
  """
  if not isinstance(tokenizer, JsonTokenizer):
    return
  path = prepare_workdir(workdir) / TOKENIZER
  if path.exists() and list_steps(path.parent / FOLDER):
    return  # it belongs to what was trained here, whatever this command was given
  try:
    tokenizer.write(path.parent)
  except OSError as error:
    raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None


def with_tokenizer(data: DataConfig, workdir: str | Path) -> DataConfig:
  """The data section with the tokenizer that was stored with the run."""
  if data.tokenizer == "bytes":
    return data
  return dataclasses.replace(data, tokenizer=str(Path(workdir) / TOKENIZER))


def load_tokenizer(run: RunConfig, workdir: str) -> Tokenizer:
  """The tokenizer that a run was trained with.

  Raises:
    ConfigError: it was not stored with the run.
  """
  if run.data.tokenizer == "bytes":
    return ByteTokenizer()
  path = Path(workdir) / TOKENIZER
  try:
    content = read_text(path)
  except (FileNotFoundError, StoredError) as error:
    raise ConfigError(f"the tokenizer of the run cannot be read: {error}") from None
  conventions = conventions_beside(path)
  if conventions is not None:
    conventions.check(run.model.vocab_size, str(path.with_name(FILE)))
  options: dict[str, Any] = {"eos_token": run.data.eos_token, "conventions": conventions}
  return JsonTokenizer(content, name=str(path), **options)
