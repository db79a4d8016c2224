"""python -m scmoe.convert: a released model to a run, and a run to a released model.

  python -m scmoe.convert --from ~/models/OLMoE-1B-7B --workdir runs/olmoe
  python -m scmoe.convert --workdir runs/olmoe --to exports/olmoe
  python -m scmoe.convert --from ~/models/OLMoE-1B-7B --workdir runs/a --upcycle wiring=scmoe_pos2
  python -m scmoe.convert --workdir runs/a --inference exports/a --dtype int8

Reads and writes model folders in the layout of Hugging Face transformers: config.json, safetensors,
tokenizer.json, and the files that say how texts begin and end. --from makes the model step 0 of a
run, in the types of its tensors; scmoe.evaluate, scmoe.generate and scmoe.train take it from there.
Families: OLMoE, Mixtral, Qwen3-MoE, DeepSeek-V2 and V3, LongCat-Flash, and Llama, Mistral and Qwen3
as sources of experts. Everything is checked before anything is written. --inference writes a folder
for --model of scmoe.generate, scmoe.evaluate and scmoe.serve: any run's weights without optimizer,
with checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array

from scmoe.base.errors import ConfigError, DataError, StorageError, run_main
from scmoe.base.paths import expanded
from scmoe.base.sizes import number, size_of
from scmoe.base.stored import write_json
from scmoe.data.config import DataConfig
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.models.flops import count_parameters
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.pretrained.conventions import (
  check_kept,
  config_fields,
  eos_ids,
  eos_token,
  kept_files,
  read_conventions,
)
from scmoe.pretrained.families import FAMILIES, read_config, write_config
from scmoe.pretrained.folder import CONFIG, TYPES, Folder, Planned, appearing, write_weights
from scmoe.pretrained.header import LIMITS, read_object, read_text
from scmoe.pretrained.inference_files import (
  check_dtype,
  inference_run,
  parts,
  values_of,
  write_folder,
)
from scmoe.pretrained.names import Tensor, tensors
from scmoe.pretrained.stream import (
  check_tensors,
  flat,
  leaves_of,
  load,
  nested,
  pieced,
  pieces,
  stored_types,
  unload,
)
from scmoe.pretrained.upcycle import fill, plan
from scmoe.run import build
from scmoe.run.command_line import HELP, Flag, help_text, parse
from scmoe.run.config import RunConfig
from scmoe.run.names import check_workdir
from scmoe.run.opened import load_tokenizer, open_run
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.options import CheckpointConfig
from scmoe.training.pieces import Piece, PiecedArray
from scmoe.training.restore import FOLDER, list_steps, restore_stored
from scmoe.training.workdir import RunLock, prepare_workdir

SOURCE = "source.json"  # in the run: what `--to` needs to give back the folder that was read
FLAGS = (
  Flag("from", str, "", "folder of a released model to read"),
  Flag("to", str, "", "folder to write the run's model to; must not exist yet"),
  Flag(
    "inference",
    str,
    "",
    "folder to write the run's model to, for --model of other commands; must not exist yet",
  ),
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "with --to, --inference: step of the checkpoint; -1: the newest"),
  Flag(
    "dtype",
    str,
    "",
    "with --to: bfloat16, float16 or float32; as the model that was read had it, if not given. "
    "With --inference: bfloat16, float32 or int8 (experts; the rest bfloat16); as the run computes",
  ),
  Flag(
    "mesh",
    str,
    "",
    "axes such as data=2,expert=2; all devices on the expert axis, if not given and they divide",
  ),
  Flag(
    "upcycle",
    str,
    "",
    "with --from: start another architecture from it: wiring=scmoe_pos2 from one with experts, "
    "experts=8 (or experts=8,top_k=2,wiring=...) from a dense one",
  ),
  HELP,
)
_WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def main(argv: list[str]) -> None:
  """Runs the command line: one of --from, --to and --inference."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  if sum(bool(values[name]) for name in ("from", "to", "inference")) != 1:
    raise ConfigError(
      "give one of: --from FOLDER to read a released model, --to FOLDER to write one, --inference "
      "FOLDER to write a folder for inference"
    )
  workdir = check_workdir(values["workdir"])
  if values["from"]:
    options = {"mesh": values["mesh"], "upcycle": values["upcycle"]}
    return print(import_model(values["from"], workdir, **options))
  if values["upcycle"]:
    raise ConfigError("--upcycle goes with --from: it starts a run from a released model")
  step = None if values["step"] < 0 else values["step"]
  options = {"step": step, "dtype": values["dtype"], "mesh": values["mesh"]}
  write = export_model if values["to"] else export_inference
  flag = "to" if values["to"] else "inference"
  folder = expanded(values[flag], f"--{flag}")
  return print(write(workdir, folder, **options))


# -- in -------------------------------------------------------------------------------------------


class Released(NamedTuple):
  """A released model that has been checked but not read.

  Attributes:
    folder: its files.
    family: one of `FAMILIES`.
    tensors: those that are read; skipped: names of those that are not.
    built: its model on a mesh.
  """

  folder: Folder
  family: str
  tensors: list[Tensor]
  skipped: list[str]
  built: build.Built

  def leaves(self) -> Iterator[tuple[str, Array]]:
    """Yields parameters and router state by dotted name, on the mesh, in the types of the files.

    Threads read the following ones meanwhile.
    """
    types = stored_types(self.folder, self.tensors)
    return load(self.folder.read, types, self.tensors, leaves_of(self.built))

  def pieces(self) -> tuple[list[PiecedArray], Iterator[Callable[[], Piece]]]:
    """Parameters and router state as arrays of a checkpoint, and functions that read their pieces.

    The pieces come in the order of the files, so that the disk reads forward.
    """
    types, entries = stored_types(self.folder, self.tensors), self.folder.entries
    lies = lambda tensor: (str(entries[tensor.name].file), entries[tensor.name].start)
    ordered = sorted(self.tensors, key=lies)
    arrays = pieced(types, ordered, leaves_of(self.built))
    return arrays, pieces(self.folder.read, types, ordered)


def open_released(
  path: str, *, mesh: str = "", dtype: str = "", data: DataConfig | None = None
) -> Released:
  """Opens a folder and compares it with the architecture that its config.json asks for.

  Args:
    path: of the folder.
    mesh: see `--mesh`.
    dtype: type to compute in; by default float32 for a folder in float32, else bfloat16.
    data: section of the run; by default with rows of at most the model's context.

  Raises:
    DataError: a file or a tensor is not what it should be.
    ConfigError: the mesh does not fit.
  """
  folder = Folder(path)
  family, model, router = read_config(folder.config, str(folder.path / CONFIG))
  listed, skipped = check_tensors(folder, family, model)
  folder.read_ahead()
  if not dtype:
    wide = all(folder.entries[t.name].dtype == "F32" for t in listed)
    dtype = "float32" if wide else "bfloat16"
  model = dataclasses.replace(model, dtype=dtype)
  data = data or DataConfig(seq_len=min(DataConfig.seq_len, model.context))
  name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.path.resolve().name)
  run = RunConfig(
    name=name.strip("._-")[:64] or family,
    model=model,
    router=router,
    dispatch=DispatchConfig(transport="dropless"),  # a released model drops nothing
    data=data,
  )
  devices = jax.device_count()
  run = dataclasses.replace(run, mesh=_mesh(run, devices))
  run = build.on_mesh(run, mesh) if mesh else run
  shards = run.mesh.batch_shards
  batch = -(-run.train.batch_size // shards) * shards
  run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=batch))
  run = run.resolve(num_devices=devices, vocab_size=0)
  return Released(folder, family, listed, skipped, build.build(run))


def _mesh(run: RunConfig, devices: int) -> MeshConfig:
  """All devices on the expert axis; one device where their number does not divide the experts."""
  fits = bool(run.model.wiring_rule.taps) and run.model.num_experts % devices == 0
  return MeshConfig(data=1, expert=devices if fits else 1)


def import_model(path: str, workdir: Path, *, mesh: str = "", upcycle: str = "") -> str:
  """Makes a released model step 0 of a run; returns lines for the user.

  Args:
    path: folder of the model.
    workdir: of the run.
    mesh: see `--mesh`.
    upcycle: request for another architecture; see `scmoe.pretrained.upcycle`.

  Raises:
    DataError: a file or a tensor is not what it should be; nothing has been written.
    ConfigError: tokenizer or mesh do not fit, or the workdir has a run already.
    StorageError: the run cannot be written.
  """
  started = time.monotonic()
  if list_steps(workdir / FOLDER):
    raise ConfigError(f"--workdir={str(workdir)!r} has a run already; give a new folder")
  released = open_released(path, mesh=mesh)
  run, tokenizer = released.built.run, _tokenizer(released)
  if tokenizer is not None:
    eos = tokenizer.token(tokenizer.eos_id)
    data = dataclasses.replace(run.data, tokenizer=str(workdir / TOKENIZER), eos_token=eos)
    run = dataclasses.replace(run, data=data)
  built, begun, planned = dataclasses.replace(released.built, run=run), {}, None
  if upcycle:
    planned = plan(upcycle, run.model, run.router)
    run = dataclasses.replace(run, model=planned.model, router=planned.router)
    run = run.resolve(num_devices=jax.device_count(), vocab_size=0)
    built = build.build(run, list(built.mesh.devices.flat))
  there, origin = workdir.exists(), _origin(released)
  workdir = prepare_workdir(workdir)

  def describe() -> None:
    """Writes the files that describe the run: after everything is read, before the step appears."""
    if tokenizer is not None:
      _write_tokenizer(tokenizer, workdir)
    if not upcycle:
      write_json(workdir / SOURCE, origin)
    write_json(workdir / "config.json", built.config)

  # The lock comes first, so that a folder in which another process works is never removed.
  with RunLock(workdir), _gone_if_it_fails(workdir, there):
    keeper = Checkpointer(workdir, CheckpointConfig(async_save=False))
    try:
      if planned is None and jax.process_count() == 1:
        keeper.save_pieces(0, *released.pieces(), {}, _meta(built), describe)
      else:
        leaves = dict(released.leaves())
        if planned is not None:
          fresh = lambda: flat(dict(zip(("params", "router"), built.init(jax.random.key(0)))))
          leaves, begun = fill(leaves, leaves_of(built), fresh, planned)
        like = {"params": built.shapes, "router": built.router_shapes}
        state = nested(leaves, like if built.router_shapes else {"params": built.shapes})
        describe()
        keeper.save_now(0, state, {}, _meta(built))
    finally:
      keeper.close()
  seconds = time.monotonic() - started
  said = _said(released, workdir, seconds, tokenizer is not None)
  if upcycle:
    said += f"\n{run.model.wiring}, upcycled; without a source of their own:"
    said += "".join(f"\n  {name.removeprefix('params.')}: {how}" for name, how in begun.items())
  return said


def _origin(released: Released) -> dict[str, Any]:
  """The content of `SOURCE`: the folder's config.json, types of tensors and files about texts."""
  entries = released.folder.entries
  types = {t.name: entries[t.name].dtype for t in released.tensors}
  usual = max(types.values(), key=list(types.values()).count)
  other = {name: kind for name, kind in types.items() if kind != usual}
  source = {"family": released.family, "config": released.folder.config}
  files = kept_files(released.folder.path)
  return source | {"dtype": usual, "other_dtypes": other, "files": files}


@contextlib.contextmanager
def _gone_if_it_fails(folder: Path, there: bool) -> Iterator[None]:
  """Removes a folder if the block fails, unless `there`: it existed before."""
  try:
    yield
  except BaseException:
    if not there:
      shutil.rmtree(folder, ignore_errors=True)
    raise


def _meta(built: build.Built) -> dict[str, Any]:
  return {
    "config": built.config,
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
    ConfigError: it has more tokens than the model, or not that one.
    DataError: it is none, or a file about conventions is not what it should be.
  """
  folder, config = released.folder.path, released.folder.config
  path = folder / TOKENIZER
  if not path.is_file():
    return None
  content = read_text(path, LIMITS[TOKENIZER])
  eos_id = next(iter(eos_ids(folder, config)), None)
  named = eos_token(folder) if eos_id is None else ""
  tokenizer = JsonTokenizer(content, name=str(path), eos_id=eos_id, eos_token=named)
  conventions = read_conventions(folder, config, tokenizer)
  size = released.built.run.model.vocab_size
  conventions.check(size, str(folder))
  tokenizer.adopt(conventions)
  if tokenizer.vocab_size > size:
    raise ConfigError(
      f"{path} has {tokenizer.vocab_size} tokens, {CONFIG} has vocab_size={size}: they are not of "
      "the same model"
    )
  return tokenizer


def _write_tokenizer(tokenizer: JsonTokenizer, folder: Path) -> None:
  try:
    tokenizer.write(folder)
  except OSError as error:
    raise StorageError(f"{folder / TOKENIZER} cannot be written: {error}") from None


def _said(released: Released, workdir: Path, seconds: float, has_tokenizer: bool) -> str:
  """Lines for the user: what was read, how long it took, and what to do next."""
  built, folder = released.built, released.folder
  counts = count_parameters(built.run.model, built.shapes)
  lines = [
    f"{released.family} from {folder.path}: {len(released.tensors)} tensors, "
    f"{size_of(folder.size)}, {number(counts.total)} parameters ({number(counts.active)} active) "
    f"in {seconds:.1f} s",
    f"kept as step 0 of {workdir}, on {built.mesh.size} device(s); peak host memory "
    f"{size_of(_peak_memory())}",
  ]
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


def _peak_memory() -> int:
  """Most bytes of resident memory that this process has had, mapped files included."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


# -- out ------------------------------------------------------------------------------------------


def export_model(
  workdir: Path, folder: Path, *, step: int | None = None, dtype: str = "", mesh: str = ""
) -> str:
  """Writes a run's model so that transformers can load it; returns a line for the user.

  Raises:
    ConfigError: no released family has the run's architecture, or `dtype` is none.
    CheckpointError: there is no such step.
    StorageError: the folder is there already, or cannot be written.
  """
  if dtype and dtype not in _WORDS:
    raise ConfigError(f"--dtype={dtype!r} is unknown; one of: {', '.join(_WORDS)}")
  stored = open_run(str(workdir), step)
  run = build.on_mesh(stored.run, mesh)
  source = _source(workdir)
  config = write_config(run.model, run.router, source.get("family", ""))
  family, built = config["model_type"], build.build(run)
  listed = list(tensors(family, run.model))
  leaves = restore_stored(workdir, leaves_of(built), stored.step)
  if missing := sorted({t.leaf for t in listed} - set(leaves)):  # a model without a bias of its own
    raise ConfigError(f"{workdir} has no {missing[0]}, which a {family} has; set router.bias")
  types, usual = source.get("other_dtypes", {}), source.get("dtype", "F32")
  kind_of = lambda name: _WORDS[dtype] if dtype else types.get(name, usual)
  planned = [Planned(t.name, t.shape, kind_of(t.name)) for t in listed]
  values = unload(leaves, listed)
  typed = (value.astype(TYPES[p.dtype], copy=False) for p, value in zip(planned, values))
  word = next(name for name, kind in _WORDS.items() if kind == kind_of(listed[0].name))
  with appearing(folder) as partial:
    files = write_weights(partial, planned, typed)
    read = source.get("config", {})
    # If our config.json means the same as the one that was read, the folder keeps its own words.
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
    workdir: of the run.
    folder: new; see `scmoe.pretrained.inference`.
    step: of the checkpoint; None: the newest.
    dtype: see `--dtype`.
    mesh: see `--mesh`.

  Raises:
    ConfigError: `dtype` is none, or the tokenizer was not stored with the run.
    CheckpointError: there is no such step.
    StorageError: the folder is there already, or cannot be written.
  """
  started = time.monotonic()
  stored = open_run(str(workdir), step)
  dtype = check_dtype(dtype, stored.run)
  tokenizer = load_tokenizer(stored.run, str(workdir))
  files = tokenizer.files() if isinstance(tokenizer, JsonTokenizer) else {}
  run = build.on_mesh(inference_run(stored.run, dtype), mesh)
  leaves = restore_stored(workdir, leaves_of(build.build(run)), stored.step)
  planned = parts(run, dtype)
  if missing := sorted({part.leaf for part in planned} - set(leaves)):
    raise ConfigError(f"{workdir} has no {missing[0]}; its checkpoint is of another configuration")
  options = {"dtype": dtype, "step": stored.step, "tokenizer": files}
  write_folder(folder, run, values_of(leaves, planned), **options)
  size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
  return (
    f"{workdir}, step {stored.step}: {len(planned)} tensors, {size_of(size)} ({dtype}), in "
    f"{folder} after {time.monotonic() - started:.1f} s; peak host memory "
    f"{size_of(_peak_memory())}\n"
    f'next: python -m scmoe.generate --model {folder} --prompt "def main("'
  )


def _source(workdir: Path) -> dict[str, Any]:
  """The content of `SOURCE`; {} for a run that was trained from random weights.

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
  if unknown := [kind for kind in kinds_named if kind not in _WORDS.values()]:
    raise DataError(f"{path}: {str(unknown[0])[:40]!r} is none of: {', '.join(_WORDS.values())}")
  if source["family"] not in FAMILIES:
    raise DataError(f"{path}: {source['family'][:40]!r} is none of: {', '.join(FAMILIES)}")
  check_kept(source.setdefault("files", {}), path)  # version 0.2 kept none
  return source


def _text_fields(run: RunConfig, workdir: Path) -> dict[str, Any]:
  """The fields of config.json about the beginning and end of texts, of a run's own tokenizer."""
  tokenizer = load_tokenizer(run, str(workdir))
  others = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
  return config_fields(tokenizer.bos_id, (tokenizer.eos_id, *others))


if __name__ == "__main__":
  run_main(main)
