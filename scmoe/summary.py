"""What a run says: its header, its result, and how a stored run is opened again."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax

from scmoe import build
from scmoe.config import RunConfig, from_dict
from scmoe.data import Data, Tokenizer, bigram_bits_per_byte
from scmoe.data.tokenizers import ByteTokenizer, JsonTokenizer
from scmoe.dry_run import model_lines, size_of
from scmoe.errors import ConfigError, StorageError
from scmoe.models.flops import count_parameters, forward_flops
from scmoe.training.checkpoint import FOLDER, list_steps, read_meta
from scmoe.training.metrics import read_metrics
from scmoe.training.workdir import prepare_workdir

TOKENIZER = "tokenizer.json"


def header(built: build.Built, data: Data, workdir: Path) -> str:
  """Model, parameters, FLOPs per token, mesh, memory, data and where things are written."""
  run, mesh = built.run, built.run.mesh
  parameters = count_parameters(run.model, built.shapes)
  state = jax.tree.leaves(built.abstract_state())
  held = sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in state)
  lines = [
    f"run          {run.name} -> {workdir}",
    *model_lines(run, parameters, forward_flops(run.model, run.data.seq_len)),
    f"mesh         data {mesh.data} x expert {mesh.expert} x tensor {mesh.tensor}: {mesh.size} of "
    f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    f"memory       {size_of(held)} of parameters and optimizer on each device; --dry_run has more",
    data.summary(),
  ]
  if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
    lines.append(
      "WARNING      jax uses the CPU although this machine has nvidia-smi: install the CUDA build "
      "of jax, or unset JAX_PLATFORMS"
    )
  return "\n".join(lines)


def result(data: Data, workdir: Path) -> str:
  """The last evaluation beside the bigram byte model, and what to do next."""
  lines = []
  evaluations = read_metrics(workdir, "eval")
  if evaluations:
    last = evaluations[-1]
    lines.append(
      f"validation loss {last['loss']:.4f}, bits per byte {last['bits_per_byte']:.4f} "
      f"(a bigram model of bytes: {bigram_bits_per_byte(data).total:.4f})"
    )
  lines += [
    f"next: python -m scmoe.evaluate --workdir {workdir}",
    f'      python -m scmoe.generate --workdir {workdir} --prompt "def main("',
  ]
  return "\n".join(lines)


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
    path.write_text(tokenizer.content, "utf-8")
  except OSError as error:
    raise StorageError(f"{path} cannot be written: {error}") from None


class Stored(NamedTuple):
  """A run read back from its checkpoint: the resolved configuration and the step."""

  run: RunConfig
  step: int


def open_run(workdir: str, step: int | None) -> Stored:
  """Reads the configuration that a checkpoint stores; runs no config file.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: the stored configuration is not one of this version.
  """
  meta: dict[str, Any] = read_meta(workdir, step)
  return Stored(from_dict(meta["config"], f"{workdir} (stored)"), meta["step"])


def load_tokenizer(run: RunConfig, workdir: str) -> Tokenizer:
  """The tokenizer that a run was trained with.

  Raises:
    ConfigError: it was not stored with the run.
  """
  if run.data.tokenizer == "bytes":
    return ByteTokenizer()
  path = Path(workdir) / TOKENIZER
  try:
    content = path.read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path}: the tokenizer of the run cannot be read: {error}") from None
  return JsonTokenizer(content, eos_token=run.data.eos_token, name=str(path))
