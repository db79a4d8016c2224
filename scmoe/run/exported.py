"""Writes a run's model as a released model's folder (`scmoe.convert --to`), or for inference."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.pretrained.conventions import config_fields
from scmoe.pretrained.families import read_config, write_config
from scmoe.pretrained.folder import CONFIG, TYPES, Planned, atomic_folder, write_weights
from scmoe.pretrained.imported import DTYPES, SOURCE, source_of
from scmoe.pretrained.inference_files import (
  check_dtype,
  inference_run,
  parts,
  values_of,
  write_folder,
)
from scmoe.pretrained.names import Tensor, tensors
from scmoe.pretrained.stream import leaves_of, unload
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.modality import needs_text
from scmoe.run.opened import Stored, open_run
from scmoe.run.text import load_tokenizer
from scmoe.training.metrics import memory_in_use
from scmoe.training.restore import restore_stored, with_newest


def export_model(
  workdir: Path, folder: Path, *, step: int | None = None, dtype: str = "", mesh: str = ""
) -> str:
  """Writes a run's model so that transformers can load it; returns a line for the user.

  Raises:
    ConfigError: no released family has the run's architecture, or `dtype` is unknown.
    CheckpointError: there is no such step.
    StorageError: the folder exists already, or cannot be written.
  """
  if dtype and dtype not in DTYPES:
    raise ConfigError(f"--dtype={dtype!r} is unknown; one of: {', '.join(DTYPES)}")
  source = source_of(workdir)

  def opened_step() -> tuple[Stored, dict[str, Any], list[Tensor], dict[str, Array]]:
    stored = open_run(str(workdir), step)
    needs_text(stored.run, "scmoe.convert")
    run = build.on_mesh(stored.run, mesh)
    config = write_config(run.model, run.router, source.get("family", ""))
    listed = list(tensors(config["model_type"], run.model))
    return stored, config, listed, restore_stored(workdir, leaves_of(build.build(run)), stored.step)

  stored, config, listed, leaves = with_newest(opened_step, step)
  run, family = stored.run, config["model_type"]
  if missing := sorted({t.leaf for t in listed} - set(leaves)):  # e.g. a router without a bias
    raise ConfigError(f"{workdir} has no {missing[0]}, which a {family} has; set router.bias")
  types, usual = source.get("other_dtypes", {}), source.get("dtype", "F32")
  kind_of = lambda name: DTYPES[dtype] if dtype else types.get(name, usual)
  planned = [Planned(t.name, t.shape, kind_of(t.name)) for t in listed]
  values = unload(leaves, listed)
  typed = (value.astype(TYPES[p.dtype], copy=False) for p, value in zip(planned, values))
  word = next(name for name, kind in DTYPES.items() if kind == kind_of(listed[0].name))
  with atomic_folder(folder) as partial:
    files = write_weights(partial, planned, typed)
    read = source.get("config", {})
    # The released config.json has priority if it describes the same model as ours.
    same = bool(read) and read_config(read, SOURCE)[1:] == read_config(config)[1:]
    written = {**config, **read} if same else {**read, **config}
    written["dtype"] = word
    written.pop("torch_dtype", None)
    if (workdir / TOKENIZER).is_file():
      shutil.copyfile(workdir / TOKENIZER, partial / TOKENIZER)
      if not read:
        written |= _text_fields(run, workdir)
    write_json(partial / CONFIG, written)
    for name, text in source.get("files", {}).items():
      (partial / name).write_text(text, "utf-8")
  size = size_of(sum(p.size for p in planned))
  return (
    f"{family} of {workdir}, step {stored.step}: {len(planned)} tensors, {size}, in {folder} "
    + (f"({len(files)} file{'s' if len(files) > 1 else ''})")
  )


def export_inference(
  workdir: Path, folder: Path, *, step: int | None = None, dtype: str = "", mesh: str = ""
) -> str:
  """Writes a run's model as an inference folder; returns lines for the user.

  The checkpoint is restored on the devices and fetched from there one tensor at a time.

  Args:
    workdir: folder of the run.
    folder: folder to write, which must not exist; see `scmoe.pretrained.inference`.
    step: step of the checkpoint; None: the newest.
    dtype: see `--dtype`.
    mesh: see `--mesh`.

  Raises:
    ConfigError: `dtype` is unknown, or the tokenizer was not stored with the run.
    CheckpointError: there is no such step.
    StorageError: the folder exists already, or cannot be written.
  """
  started = time.monotonic()

  def opened_step() -> tuple[Stored, str, dict[str, str], RunConfig, dict[str, Array]]:
    stored = open_run(str(workdir), step)
    needs_text(stored.run, "scmoe.convert")
    kind = check_dtype(dtype, stored.run)
    tokenizer = load_tokenizer(stored.run, str(workdir))
    files = tokenizer.files() if isinstance(tokenizer, JsonTokenizer) else {}
    run = build.on_mesh(inference_run(stored.run, kind), mesh)
    leaves = restore_stored(workdir, leaves_of(build.build(run)), stored.step)
    return stored, kind, files, run, leaves

  stored, dtype, files, run, leaves = with_newest(opened_step, step)
  planned = parts(run, dtype)
  if missing := sorted({part.leaf for part in planned} - set(leaves)):
    raise ConfigError(f"{workdir} has no {missing[0]}; its checkpoint has another configuration")
  options = {"dtype": dtype, "step": stored.step, "tokenizer": files}
  write_folder(folder, run, values_of(leaves, planned), **options)
  size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
  return (
    f"{workdir}, step {stored.step}: {len(planned)} tensors, {size_of(size)} ({dtype}), in "
    f"{folder} after {time.monotonic() - started:.1f} s; peak host memory "
    f"{size_of(memory_in_use().get('host_memory_bytes', 0))}\n"
    f'next: python -m scmoe.generate --model {folder} --prompt "def main("'
  )


def _text_fields(run: RunConfig, workdir: Path) -> dict[str, Any]:
  """config.json's fields about the beginning and end of texts, from the run's own tokenizer."""
  tokenizer = load_tokenizer(run, str(workdir))
  others = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
  return config_fields(tokenizer.bos_id, (tokenizer.eos_id, *others))
