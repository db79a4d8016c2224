"""Makes a released model step 0 of a run: `scmoe.convert --from`.

It also writes `SOURCE` into the run's folder: the data from which `scmoe.convert --to` restores the
released folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError, DataError, NonFiniteError, StorageError
from scmoe.base.sizes import number, size_of
from scmoe.base.stored import write_json
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.models.config import ModelConfig
from scmoe.models.flops import count_parameters
from scmoe.models.low_rank import Adapters
from scmoe.parallel.mesh import shardings_of
from scmoe.pretrained.adapter_folder import AdapterFolder
from scmoe.pretrained.conventions import (
  check_kept,
  eos_ids,
  eos_token,
  kept_files,
  read_conventions,
)
from scmoe.pretrained.families import FAMILIES
from scmoe.pretrained.folder import CONFIG
from scmoe.pretrained.header import LIMITS, read_object, read_text
from scmoe.pretrained.inference_files import MANIFEST
from scmoe.pretrained.released import Released, open_released
from scmoe.pretrained.stream import flat, leaves_of, nested
from scmoe.pretrained.upcycle import Upcycling, fill, plan
from scmoe.run import build
from scmoe.run.config import RunConfig, to_dict
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.meters import memory_in_use
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import FOLDER, list_steps
from scmoe.training.workdir import RunLock, prepare_workdir

SOURCE = "source.json"  # in the run's folder; `scmoe.convert --to` reads it
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def import_model(
  path: str, workdir: Path, *, mesh: str = "", upcycle: str = "", adapter: str = ""
) -> str:
  """Makes a released model step 0 of a run; returns lines for the user.

  Args:
    path: the model's folder.
    workdir: the run's folder.
    mesh: see `--mesh`.
    upcycle: request for another architecture; see `scmoe.pretrained.upcycle`.
    adapter: folder of adapters in PEFT's layout, which are added to the model's matrices; "": none.

  Raises:
    DataError: a file or a tensor cannot be used, or a tensor holds NaN or infinity, or the adapters
      are those of another model, or their sum with a weight is not finite.
    ConfigError: tokenizer or mesh do not fit, or the workdir has a run already.
    StorageError: the run cannot be written.
  """
  started = time.monotonic()
  check_new(workdir)
  released = open_released(path, mesh=mesh)
  run, tokenizer = released.built.run, _tokenizer(released)
  if tokenizer is not None:
    eos = tokenizer.token(tokenizer.eos_id)
    data = dataclasses.replace(run.data, tokenizer=str(workdir / TOKENIZER), eos_token=eos)
    run = dataclasses.replace(run, data=data)
  adapters = None
  if adapter:
    adapters = AdapterFolder(adapter, released.family, run.model, released.tensors)
  built, begun, planned = dataclasses.replace(released.built, run=run), {}, None
  if upcycle:
    planned = plan(upcycle, run.model, run.router)
    run = dataclasses.replace(run, model=planned.model, router=planned.router)
    run = run.resolve(num_devices=jax.device_count(), vocab_size=0)
    built = build.build(run, list(built.mesh.devices.flat))
  origin = _origin(released)

  def describe() -> None:
    """Writes the run's descriptive files, after all tensors are read and before the step exists."""
    if tokenizer is not None:
      _write_tokenizer(tokenizer, workdir)
    if not upcycle:
      write_json(workdir / SOURCE, origin)
    write_json(workdir / "config.json", built.config)

  with new_run(workdir) as keeper, _weights_are_finite(released, adapters):
    if planned is None and adapters is None and jax.process_count() == 1:
      keeper.save_pieces(0, *released.pieces(), {}, _meta(built), describe)
    else:
      leaves = dict(released.leaves())
      if adapters is not None:
        leaves = _merged(leaves, released.built, adapters)
      if planned is not None:
        leaves, begun = upcycled(leaves, built, planned)
      describe()
      save_start(keeper, built, leaves)
  seconds = time.monotonic() - started
  said = _report(released, workdir, seconds, tokenizer is not None, adapters)
  return f"{said}\n{said_of(run.model, begun)}" if upcycle else said


def _merged(
  leaves: dict[str, Array], built: build.Built, folder: AdapterFolder
) -> dict[str, Array]:
  """The parameters with adapters added, in their own types.

  Args:
    leaves: parameters and router state by dotted name; their memory is reused.
    built: the model, on the mesh that holds them.
    folder: its adapters.
  """
  adapters = Adapters(folder.lora, built.shapes)
  like = {"params": adapters.shapes}
  own = nested(folder.factors(flat(like)), like)["params"]
  own = jax.device_put(own, shardings_of(adapters.shapes))
  merge = jax.jit(adapters.merged, out_shardings=shardings_of(built.shapes), donate_argnums=0)
  params = merge(nested(leaves, {"params": built.shapes})["params"], own)
  router = {name: x for name, x in leaves.items() if name.startswith("router.")}
  return flat({"params": params}) | router


@contextlib.contextmanager
def _weights_are_finite(released: Released, adapters: AdapterFolder | None) -> Iterator[None]:
  """If a step is refused because an array is not finite, names the file that is to blame.

  Raises:
    DataError: a tensor of the folder holds NaN or infinity; or none does, and the sum with the
      adapters overflows the type of a weight.
  """
  try:
    yield
  except NonFiniteError:
    for name in dict.fromkeys(tensor.name for tensor in released.tensors):
      if not np.isfinite(released.folder.read(name).astype(np.float32)).all():
        raise DataError(
          f"{released.folder.entries[name].file}: tensor {name} holds NaN or infinity; give a "
          "folder whose weights are all finite"
        ) from None
    if adapters is None:
      raise
    raise DataError(
      f"{adapters.path}: the model's weights are finite, but not their sum with these adapters, "
      "which their types cannot hold; lower lora_alpha, or give other adapters"
    ) from None


def upcycled(
  leaves: Mapping[str, Array], built: build.Built, planned: Upcycling
) -> tuple[dict[str, Array], dict[str, str]]:
  """`scmoe.pretrained.upcycle.fill` for a built run; what it draws, it draws from seed 0."""
  fresh = lambda: flat(dict(zip(("params", "router"), built.init(jax.random.key(0)))))
  return fill(leaves, leaves_of(built), fresh, planned)


def said_of(model: ModelConfig, begun: Mapping[str, str]) -> str:
  """Lines for the user: each parameter that `fill` did not copy as it was, and how it begins."""
  if not begun:
    return f"{model.wiring}, upcycled: every parameter is a copy"
  lines = [f"{model.wiring}, upcycled; parameters that are not copies from the same layer:"]
  lines += [f"  {name.removeprefix('params.')}: {how}" for name, how in begun.items()]
  return "\n".join(lines)


def save_start(
  keeper: Checkpointer, built: build.Built, leaves: dict[str, Array], run: RunConfig | None = None
) -> None:
  """Writes parameters and router state as step 0 of a run.

  Args:
    keeper: of the run.
    built: its model, on the mesh that holds the arrays.
    leaves: the arrays, by dotted name.
    run: the configuration to store, if it has another mesh than `built`; None: that of `built`.
  """
  like = {"params": built.shapes, "router": built.router_shapes}
  state = nested(leaves, like if built.router_shapes else {"params": built.shapes})
  keeper.save_now(0, state, {}, _meta(built, run))


def _origin(released: Released) -> dict[str, Any]:
  """The content of `SOURCE`: the folder's config.json, its tensors' types and its `KEPT` files.

  Without `quantization_config`: a run has no weights in fp8, and so has no folder made from it.
  """
  entries = released.folder.entries
  types = {t.name: entries[t.name].dtype for t in released.tensors}
  usual = max(types.values(), key=list(types.values()).count)
  other = {name: kind for name, kind in types.items() if kind != usual}
  config = {n: v for n, v in released.folder.config.items() if n != "quantization_config"}
  source = {"family": released.family, "config": config}
  files = kept_files(released.folder.path)
  return source | {"dtype": usual, "other_dtypes": other, "files": files}


def source_of(workdir: Path) -> dict[str, Any]:
  """The content of `SOURCE` in a run's folder; {} for a run that was trained from random weights.

  Raises:
    DataError: the file is damaged.
  """
  path = workdir / SOURCE
  if not path.is_file():
    return {}
  source = read_object(path, LIMITS["index"])
  kinds = {"family": str, "config": dict, "dtype": str, "other_dtypes": dict}
  if wrong := next((n for n, k in kinds.items() if not isinstance(source.get(n), k)), None):
    raise DataError(f"{path} has no {wrong}, which scmoe.convert writes there")
  kinds_named = [source["dtype"], *source["other_dtypes"].values()]
  if unknown := [kind for kind in kinds_named if kind not in DTYPES.values()]:
    raise DataError(
      f"{path}: type {str(unknown[0])[:40]!r} is unknown; one of: {', '.join(DTYPES.values())}"
    )
  if source["family"] not in FAMILIES:
    raise DataError(
      f"{path}: family {source['family'][:40]!r} is unknown; one of: {', '.join(FAMILIES)}"
    )
  check_kept(source.setdefault("files", {}), path)  # version 0.2 stored no files
  return source


def check_new(workdir: Path) -> None:
  """Checks that a new run in a folder would overwrite nothing.

  Raises:
    ConfigError: the folder has a run, a released model, an inference checkpoint or a config.json.
  """
  if list_steps(workdir / FOLDER):
    raise ConfigError(f"--workdir={str(workdir)!r} has a run already; give a new folder")
  named = (workdir / name for name in (MANIFEST, CONFIG))
  there = [path for path in named if path.exists()] or sorted(workdir.glob("*.safetensors"))
  if there:
    raise ConfigError(
      f"--workdir={str(workdir)!r} holds {there[0].name}, which belongs to another model or run; "
      "give a new folder"
    )


@contextlib.contextmanager
def new_run(workdir: Path) -> Iterator[Checkpointer]:
  """Locks a new run's folder and opens its checkpoints; a failure in the block deletes the folder.

  A folder that existed before stays.

  Raises:
    StorageError: the folder cannot be written.
  """
  there = workdir.exists()
  workdir = prepare_workdir(workdir)
  # The lock comes first, so that a folder in which another process works is never removed.
  with RunLock(workdir):
    try:
      keeper = Checkpointer(workdir, CheckpointConfig(async_save=False))
      try:
        yield keeper
      finally:
        keeper.close()
    except BaseException:
      if not there:
        shutil.rmtree(workdir, ignore_errors=True)
      raise


def _meta(built: build.Built, run: RunConfig | None = None) -> dict[str, Any]:
  return {
    "config": built.config if run is None else to_dict(run),
    "data_fingerprint": {},
    "mesh": dict(built.mesh.shape),
    "processes": jax.process_count(),
    "tokens": 0,
    WEIGHTS_ONLY: True,
  }


def _tokenizer(released: Released) -> JsonTokenizer | None:
  """The folder's tokenizer, if it has one, with the model's conventions.

  The end-of-text token is the first that config.json, generation_config.json or
  tokenizer_config.json names.

  Raises:
    ConfigError: it has more tokens than the model, or lacks that end-of-text token.
    DataError: it is not a tokenizer.json, or a file with conventions cannot be used.
  """
  folder, config = released.folder.path, released.folder.config
  path, ends = folder / TOKENIZER, eos_ids(folder, config)
  if not path.is_file():
    return None
  content = read_text(path, LIMITS[TOKENIZER])
  eos_id = next(iter(ends), None)
  named = eos_token(folder) if eos_id is None else ""
  tokenizer = JsonTokenizer(content, name=str(path), eos_id=eos_id, eos_token=named)
  conventions = read_conventions(folder, config, tokenizer)
  size = released.built.run.model.vocab_size
  conventions.check(size, str(folder))
  tokenizer.adopt(conventions)
  if tokenizer.vocab_size > size:
    raise ConfigError(
      f"{path} has {tokenizer.vocab_size} tokens and {CONFIG} vocab_size={size}; give files of the "
      "same model"
    )
  return tokenizer


def _write_tokenizer(tokenizer: JsonTokenizer, folder: Path) -> None:
  try:
    tokenizer.write(folder)
  except OSError as error:
    raise StorageError(
      f"{folder / TOKENIZER} cannot be written: {error.strerror or error}"
    ) from None


def _report(
  released: Released,
  workdir: Path,
  seconds: float,
  has_tokenizer: bool,
  adapters: AdapterFolder | None,
) -> str:
  """Lines for the user: the model that was read, the time it took, and the next commands."""
  built, folder = released.built, released.folder
  counts = count_parameters(built.run.model, built.shapes)
  lines = [
    f"{released.family} from {folder.path}: {len(released.tensors)} tensors, "
    f"{size_of(folder.size)}, {number(counts.total)} parameters ({number(counts.active)} active) "
    f"in {seconds:.1f} s",
    f"kept as step 0 of {workdir}, on {built.mesh.size} device(s); peak host memory "
    f"{size_of(memory_in_use().get('host_memory_bytes', 0))}",
  ]
  if adapters is not None:
    lines.append(
      f"with {len(adapters.held)} adapters of {adapters.path} on "
      f"{', '.join(adapters.lora.wanted)}, added to the model's matrices"
    )
  if released.skipped:
    some = ", ".join(released.skipped[:3]) + (", ..." if len(released.skipped) > 3 else "")
    lines.append(f"not read: {len(released.skipped)} tensors that the model does not use: {some}")
  if not has_tokenizer:
    lines.append(
      f"{folder.path} has no {TOKENIZER}: texts are bytes (data.tokenizer); give one with "
      "--config.data.tokenizer=FILE"
    )
  return "\n".join([
    *lines,
    f"next: python -m scmoe.evaluate --workdir {workdir}",
    f"      python -m scmoe.train --config_json {workdir}/config.json --workdir {workdir}",
  ])  # fmt: skip
