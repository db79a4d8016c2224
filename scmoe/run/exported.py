"""Writes a run's model as a released model's folder (`scmoe.convert --to`), or for inference.

Of a run with adapters, it also writes these alone (`--peft`).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.models.low_rank import A, Adapters, B
from scmoe.pretrained import adapter_folder, own
from scmoe.pretrained.adapter_names import Place, check_family, described, places
from scmoe.pretrained.conventions import config_fields
from scmoe.pretrained.families import read_config, write_config
from scmoe.pretrained.folder import (
  CONFIG,
  TYPES,
  Planned,
  atomic_folder,
  write_file,
  write_weights,
)
from scmoe.pretrained.imported import DTYPES, SOURCE, source_of
from scmoe.pretrained.inference_files import (
  check_dtype,
  inference_run,
  parts,
  values_of,
  write_folder,
)
from scmoe.pretrained.names import Tensor, tensors
from scmoe.pretrained.own_files import CARD, card, text_files
from scmoe.pretrained.stream import flat, leaves_of, unload
from scmoe.run import build, placement
from scmoe.run.adapters import BASE
from scmoe.run.config import RunConfig
from scmoe.run.modality import needs_text
from scmoe.run.multitask import of_task
from scmoe.run.opened import Stored, check_average, open_run, weights_of
from scmoe.run.successor import PLACED, PRUNED
from scmoe.run.text import load_tokenizer
from scmoe.training.card import read_card
from scmoe.training.meters import memory_in_use
from scmoe.training.restore import restore_on_host, restore_part, with_newest


def export_model(
  workdir: Path,
  folder: Path,
  *,
  step: int | None = None,
  dtype: str = "",
  mesh: str = "",
  ema: bool = False,
  task: str = "",
) -> str:
  """Writes a run's model so that transformers can load it; returns a line for the user.

  A model that a released family can express is written as one of that family; any other one with
  its own code and model card (`scmoe.pretrained.own`). Arguments as of `export_inference`.

  Raises:
    ConfigError: the model is partly code of the user's own or reads images, `dtype` is unknown, the
      run keeps no average, or `task` does not fit it.
    CheckpointError: there is no such step.
    StorageError: the folder exists already, or cannot be written.
  """
  _check_dtype(dtype)
  source = source_of(workdir)

  def opened_step() -> tuple[Stored, dict[str, Any], list[Tensor], dict[str, Array]]:
    stored, gate = _of_task(open_run(str(workdir), step), task)
    run = placement.on_mesh(stored.run, mesh)
    built = build.build(run)
    config, listed = _planned(run, source.get("family", ""), leaves_of(built))
    leaves = weights_of(workdir, stored.run, built, stored.step, ema, gate)
    return stored, config, listed, leaves

  stored, config, listed, leaves = with_newest(opened_step, step)
  run, family = stored.run, config["model_type"]
  if missing := sorted({t.leaf for t in listed} - set(leaves)):
    raise ConfigError(f"{workdir} has no {missing[0]}; its checkpoint has another configuration")
  types, usual = source.get("other_dtypes", {}), source.get("dtype", "F32")
  kind_of = lambda name: DTYPES[dtype] if dtype else types.get(name, usual)
  shapes = {t.name: t.shape for t in listed}  # slices may share a tensor
  planned = [Planned(name, shape, kind_of(name)) for name, shape in shapes.items()]
  values = unload(leaves, listed)
  typed = (value.astype(TYPES[p.dtype], copy=False) for p, value in zip(planned, values))
  word = next(name for name, kind in DTYPES.items() if kind == kind_of(listed[0].name))
  read = source["config"] if source.get("family") == family else {}
  # The released config.json has priority if it describes the same model as ours.
  same = bool(read) and read_config(read, SOURCE)[1:] == read_config(config)[1:]
  written = {**config, **read} if same else {**read, **config}
  written["dtype"] = word
  written.pop("torch_dtype", None)
  files = dict(source.get("files", {}))
  if (workdir / TOKENIZER).is_file():
    files[TOKENIZER] = (workdir / TOKENIZER).read_bytes().decode("utf-8")
  if family == own.FAMILY:
    count = sum(math.prod(p.shape) for p in planned)
    made = card(run, stored.step, read_card(workdir), dtype=word, parameters=count)
    files |= {own.CODE: own.code(), CARD: made}
    made_here = _tokenizer_files(run, workdir, bool(source))
    # A tokenizer.json that was made here gets the tokens with which prompts begin.
    files = made_here | files | ({} if source else made_here)
  if TOKENIZER in files and not read:
    written |= _text_fields(run, workdir)
  with atomic_folder(folder) as partial:
    names = write_weights(partial, planned, typed)
    write_json(partial / CONFIG, written)
    for name, text in files.items():
      (partial / name).write_bytes(text.encode("utf-8"))
  size = size_of(sum(p.size for p in planned))
  return (
    f"{family} of {workdir}, step {stored.step}: {len(planned)} tensors, {size}, in {folder} "
    + f"({len(names)} file{'s' if len(names) > 1 else ''})"
    + (f"; transformers runs its {own.CODE} with trust_remote_code=True" * (family == own.FAMILY))
  )


def _of_task(stored: Stored, task: str) -> tuple[Stored, int | None]:
  """A stored run that reads a single text, and the index of its task (`of_task`).

  Raises:
    ConfigError: the run has tasks and none is named, has no such task, or reads images.
  """
  run, gate = of_task(stored.run, task)
  needs_text(run, "scmoe.convert")
  return stored._replace(run=run), gate


def _planned(
  run: RunConfig, family: str, shapes: dict[str, Any]
) -> tuple[dict[str, Any], list[Tensor]]:
  """The config.json and the tensors of a run's model.

  Args:
    run: the resolved configuration.
    family: the family that the model came from, or "".
    shapes: parameters and router state by name. A family may have a tensor that the run lacks, e.g.
      a balancing bias. Then the model is written with its own code (`scmoe.pretrained.own`).
  """
  config = write_config(run.model, run.router, family)
  listed = list(tensors(config["model_type"], run.model, run.router))
  if all(tensor.leaf in shapes for tensor in listed):
    return config, listed
  return own.write(run.model, run.router), list(tensors(own.FAMILY, run.model, run.router))


def _tokenizer_files(run: RunConfig, workdir: Path, is_released: bool) -> dict[str, str]:
  """The run's tokenizer as files for transformers.

  {} for a released model whose folder had no tokenizer: it does not read bytes.
  """
  if is_released and not (workdir / TOKENIZER).is_file():
    return {}
  return text_files(run, load_tokenizer(run, str(workdir)))


def _check_dtype(dtype: str) -> None:
  if dtype and dtype not in DTYPES:
    raise ConfigError(f"--dtype={dtype!r} is unknown; one of: {', '.join(DTYPES)}")


def export_adapters(
  workdir: Path,
  folder: Path,
  *,
  step: int | None = None,
  dtype: str = "",
  mesh: str = "",
  ema: bool = False,
  task: str = "",
) -> str:
  """Writes a run's adapters alone, in PEFT's layout; returns a line for the user.

  Arguments as of `export_inference`; `dtype` is as of `export_model`, by default float32.

  Raises:
    ConfigError: the run has no adapters, PEFT has no names for those of its model, `dtype` is
      unknown, the run keeps no average, or `task` does not fit it.
    CheckpointError: there is no such step.
    StorageError: the folder exists already, or cannot be written.
  """
  _check_dtype(dtype)
  source = source_of(workdir)

  def opened_step() -> tuple[Stored, list[Place], dict[str, Any], bool]:
    stored, _ = _of_task(open_run(str(workdir), step), task)
    lora = stored.run.lora
    if not lora.rank:
      raise ConfigError(
        f"--peft: {workdir} has no adapters (lora.rank=0); --to FOLDER writes its whole model"
      )
    if ema:
      check_average(stored.run, str(workdir))
    built = build.build(placement.on_mesh(stored.run, mesh))
    config, listed = _planned(built.run, source.get("family", ""), leaves_of(built))
    check_family(config["model_type"], lora)
    adapters, part = Adapters(lora, built.shapes), "average" if ema else "params"
    found = restore_on_host(workdir, adapters.shapes, stored.step, part=part)
    own = {f"params.{name}": value for name, value in flat(found).items()}
    every = places(config["model_type"], stored.run.model, listed)
    held = [place for place in every if f"{place.parts[0][0]}.{A}" in own]
    return stored, held, own, _biases_moved(workdir, stored, built)

  stored, held, own, moved = with_newest(opened_step, step)
  kind, lora = DTYPES[dtype or "float32"], stored.run.lora
  planned = [
    Planned(name, shape, kind)
    for place in held
    for name, shape in zip(place.names, place.shapes(len(place.parts) * lora.rank))
  ]
  slices = lambda place: [
    (own[f"{leaf}.{A}"][index], own[f"{leaf}.{B}"][index]) for leaf, index in place.parts
  ]
  values = (value for place in held for value in place.packed(slices(place)))
  typed = (np.asarray(value).astype(TYPES[kind], copy=False) for value in values)
  with atomic_folder(folder, "peft") as partial:
    write_file(partial / adapter_folder.WEIGHTS, planned, typed)
    write_json(partial / adapter_folder.CONFIG, described(lora, held))
  return (
    f"{len(held)} adapters of {workdir}, step {stored.step}, on {', '.join(lora.wanted)}: "
    f"{size_of(sum(p.size for p in planned))}, in {folder}"
    + "; its balancing biases have moved since the base, and stay behind: --to writes them" * moved
    + _rearranged(stored.run.train.init_from)
  )


def _rearranged(base: str) -> str:
  """Words about a base whose experts are not those of the model before it; "" about any other.

  Args:
    base: folder of the run in `train.init_from`, which may have been deleted.
  """
  found = next((name for name in (PLACED, PRUNED) if (Path(base) / name).is_file()), None)
  if not found:
    return ""
  return (
    f"; they are for the experts of {base}, which {found} gives another order or number than the "
    f"model before it has: add them to the folder that --workdir {base} --to writes"
  )


def _biases_moved(workdir: Path, stored: Stored, built: build.Built) -> bool:
  """Whether the balancing biases of a run with adapters are others than those of its base."""
  if "bias" not in built.router_shapes:
    return False
  wanted = {"router": {"bias": built.router_shapes["bias"]}}
  held = restore_part(workdir, wanted, stored.step), restore_part(workdir / BASE, wanted)
  own, base = (np.asarray(state["router"]["bias"]) for state in held)
  return not np.array_equal(own, base)


def export_inference(
  workdir: Path,
  folder: Path,
  *,
  step: int | None = None,
  dtype: str = "",
  mesh: str = "",
  ema: bool = False,
  task: str = "",
) -> str:
  """Writes a run's model as an inference folder; returns lines for the user.

  The checkpoint is restored on the devices and fetched from there one tensor at a time.

  Args:
    workdir: folder of the run.
    folder: folder to write, which must not exist; see `scmoe.pretrained.inference`.
    step: step of the checkpoint; None: the newest.
    dtype: see `--dtype`.
    mesh: see `--mesh`.
    ema: the moving average of the weights instead of the weights.
    task: of a run of several tasks, the one whose gates the model has.

  Raises:
    ConfigError: `dtype` is unknown, the tokenizer was not stored with the run, the run keeps no
      average, or it has tasks and `task` is none of them.
    CheckpointError: there is no such step.
    StorageError: the folder exists already, or cannot be written.
  """
  started = time.monotonic()

  def opened_step() -> tuple[Stored, str, dict[str, str], RunConfig, dict[str, Array]]:
    stored, gate = _of_task(open_run(str(workdir), step), task)
    kind = check_dtype(dtype, stored.run)
    tokenizer = load_tokenizer(stored.run, str(workdir))
    files = tokenizer.files() if isinstance(tokenizer, JsonTokenizer) else {}
    run = placement.on_mesh(inference_run(stored.run, kind), mesh)
    leaves = weights_of(workdir, stored.run, build.build(run), stored.step, ema, gate)
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
