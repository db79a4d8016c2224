"""What a run says: its header, its result, and how a stored run is opened again."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from scmoe import build
from scmoe.config import RunConfig, from_dict, imports_of
from scmoe.data import Data, Tokenizer, bigram_bits_per_byte
from scmoe.data.tokenizers import ByteTokenizer, JsonTokenizer
from scmoe.dry_run import dry_run, model_lines, size_of
from scmoe.errors import ConfigError, StorageError
from scmoe.extensions import check_allowed
from scmoe.inference.offload import Offload, offloaded
from scmoe.models.flops import count_parameters, forward_flops
from scmoe.models.gpt import GPT
from scmoe.models.objective import cast_params
from scmoe.plan import Load, Wish, chosen
from scmoe.pretrained.inference import InferenceFolder
from scmoe.programs import Programs
from scmoe.training.checkpoint import FOLDER, list_steps, read_meta, restore_on_host, restore_part
from scmoe.training.metrics import read_metrics
from scmoe.training.workdir import prepare_workdir

TOKENIZER = "tokenizer.json"
MANY_PASSES = 20  # over the same text, from which a small model learns it by heart


def header(built: build.Built, data: Data, workdir: Path) -> str:
  """Model, parameters, FLOPs per token, mesh, memory, data and where things are written."""
  run, mesh = built.run, built.run.mesh
  parameters = count_parameters(run.model, built.shapes)
  held = state_bytes(built)
  lines = [
    f"run          {run.name} -> {workdir}",
    *model_lines(run, parameters, forward_flops(run.model, run.data.seq_len)),
    f"mesh         data {mesh.data} x expert {mesh.expert} x tensor {mesh.tensor}: {mesh.size} of "
    f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    f"memory       {size_of(held)} of parameters and optimizer on each device; --dry_run has more",
    data.summary(),
    *passes(built, data),
  ]
  if not data.validation_domains:
    lines.append(
      "WARNING      no validation text: nothing will be evaluated; set data.validation_fraction, "
      "or give more than one document"
    )
  if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
    lines.append(
      "WARNING      jax uses the CPU although this machine has nvidia-smi: install the CUDA build "
      "of jax, or unset JAX_PLATFORMS"
    )
  return "\n".join(lines)


def passes(built: build.Built, data: Data) -> list[str]:
  """How often the run reads each domain's training text, with a warning where that is often."""
  run = built.run
  rows = run.train.steps * run.train.microbatches(run.data.seq_len) * run.train.batch_size
  found = data.passes(rows)
  if not found:
    return []
  shown = ", ".join(f"{name} {count:.2g}" for name, count in found.items())
  lines = [f"passes       {shown} times over the training text in {run.train.steps:,} steps"]
  name, most = max(found.items(), key=lambda item: item[1])
  if most > MANY_PASSES:
    fewer = max(1, int(run.train.steps * MANY_PASSES / most))
    lines.append(
      f"WARNING      {name} is read {most:.0f} times, which is learned by heart: give more text "
      f"(data.path), or at most train.steps={fewer:,}"
    )
  return lines


def state_bytes(built: build.Built) -> int:
  """Bytes of parameters and optimizer on each device."""
  state = jax.tree.leaves(built.abstract_state())
  return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in state)


def device_memory() -> int | None:
  """Bytes that each device here can hold; of the host's free memory its share, on a CPU.

  None where neither the device nor the system tells.
  """
  device = jax.local_devices()[0]
  if limit := (device.memory_stats() or {}).get("bytes_limit"):
    return limit
  free = host_memory()
  return free if free is None else free // jax.local_device_count()


def host_memory() -> int | None:
  """Bytes of the host that are free or can be freed; None where the system does not tell."""
  try:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
  except (OSError, ValueError):
    return None
  return 1024 * int(free)


def check_memory(built: build.Built) -> None:
  """Says before anything is allocated that the state will not fit.

  Raises:
    ConfigError: parameters, their gradients and the optimizer need more than a device has.
  """
  held, limit = state_bytes(built), device_memory()
  if limit is not None and held > limit:
    raise ConfigError(
      f"parameters and optimizer need {size_of(held)} on each device, which has {size_of(limit)}; "
      f"{levers(built.run)}"
    )


def out_of_memory(built: build.Built, error: Exception) -> ConfigError | None:
  """The line for a step that did not fit; None where `error` is another."""
  if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
    return None
  memory, limit = dry_run(built.run).memory, device_memory()
  parts = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
  shown = ", ".join(f"{name} {size_of(size)}" for name, size in parts.items())
  return ConfigError(
    f"out of memory: a step needs about {size_of(memory.total)} on each device ({shown})"
    + (f", which has {size_of(limit)}" if limit else "")
    + f"; {levers(built.run)}"
  )


def levers(run: RunConfig) -> str:
  """What makes a step smaller, each with what the dry run says it would then need."""
  train, mesh, length = run.train, run.mesh, run.data.seq_len
  found = []
  tokens = train.microbatches(length) * train.batch_size * length
  if train.batch_size % (2 * mesh.batch_shards) == 0:
    half = dataclasses.replace(train, batch_size=train.batch_size // 2, tokens_per_step=tokens)
    words = f"train.batch_size={half.batch_size} train.tokens_per_step={tokens}"
    found.append((words, dataclasses.replace(run, train=half)))
  if train.remat != "full":
    full = dataclasses.replace(train, remat="full")
    found.append(("train.remat=full", dataclasses.replace(run, train=full)))
  if run.model.wiring_rule.taps and run.model.num_experts % (2 * mesh.expert) == 0:
    wide = dataclasses.replace(mesh, expert=2 * mesh.expert)
    if train.batch_size % wide.batch_shards == 0:
      words = f"mesh.expert={wide.expert} on {wide.size} devices"
      found.append((words, dataclasses.replace(run, mesh=wide)))
  if run.model.num_layers > 2 * run.model.moe_every:
    words = f"fewer than model.num_layers={run.model.num_layers}"
    return "try " + ", ".join([*(_with_need(*lever) for lever in found), words])
  return (
    "try " + ", ".join(_with_need(*lever) for lever in found) if found else "use a smaller model"
  )


def _with_need(words: str, run: RunConfig) -> str:
  try:
    return f"{words} ({size_of(dry_run(run).memory.total)})"
  except ConfigError:  # the lever does not fit the rest of the configuration
    return words


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


def open_run(workdir: str, step: int | None, allow_import: Sequence[str] = ()) -> Stored:
  """Reads the configuration that a checkpoint stores; runs no config file.

  Args:
    workdir: of the run.
    step: of the checkpoint; None: the newest.
    allow_import: see `scmoe.extensions.check_allowed`.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: the stored configuration is not one of this version, or names code that nobody here
      has asked for.
  """
  meta: dict[str, Any] = read_meta(workdir, step)
  run = from_dict(meta["config"], f"{workdir} (stored)")
  check_allowed(imports_of(run), allow_import, f"{workdir} (stored)", Path(workdir))
  return Stored(run, meta["step"])


@dataclasses.dataclass(frozen=True)
class OpenRun:
  """A stored run with its model where it can be asked.

  Attributes:
    run: on the mesh that it has here.
    workdir, step: where from.
    model, router, mesh: parameters of the checkpoint, router state, and where they lie.
    tokenizer: the one that it was trained with.
    prepare: makes programs of jitted functions (`scmoe.programs`).
    offload: how its experts come to the devices; the default if they are there.
    plan: lines about that; none if they are there.
  """

  run: RunConfig
  workdir: str
  step: int
  model: GPT
  router: Any
  mesh: Mesh
  tokenizer: Tokenizer
  prepare: Programs
  offload: Offload = Offload()
  plan: Sequence[str] = ()


def open_model(
  run: RunConfig,
  workdir: str,
  step: int,
  *,
  wish: Wish = Wish(way="none"),
  load: Load | None = None,
) -> OpenRun:
  """Reads a run's parameters.

  Args:
    run: of `open_run`, on the mesh where they are to lie (`scmoe.build.on_mesh`).
    workdir, step: of the checkpoint.
    wish: where its experts may lie (`scmoe.plan`).
    load: what is generated, if they may lie elsewhere than on the devices.

  Raises:
    CheckpointError: it is damaged.
    ConfigError: the tokenizer was not stored with the run, or the model does not fit.
  """
  tokenizer = load_tokenizer(run, workdir)
  built = build.build(run)
  prepare = Programs(built.overlap, Path(workdir))
  offload, lines = Offload(), []
  if load is not None:
    found, lines = chosen(run.model, built.shapes, load, wish, run.mesh.expert)
    offload = found.offload
  parts = {"router": built.router_shapes} if built.router_shapes else {}
  if offload.decode is None:
    state = restore_part(workdir, {"params": built.shapes, **parts}, step)
    model = built.model(state["params"])
  else:
    held = cast_params(restore_on_host(workdir, built.shapes, step), jnp.dtype(run.model.dtype))
    model = offloaded(built.model(held), built.mesh, int8=wish.int8)
    state = restore_part(workdir, parts, step) if parts else {}
  rest = built.mesh, tokenizer, prepare, offload, lines
  return OpenRun(run, workdir, step, model, state.get("router", {}), *rest)


def open_folder(
  folder: InferenceFolder,
  run: RunConfig,
  *,
  wish: Wish = Wish(way="none"),
  load: Load | None = None,
) -> OpenRun:
  """Reads an inference checkpoint, after all of it has been compared with its checksums.

  Args:
    folder: of `scmoe.convert --inference`.
    run: the folder's, on the mesh where parameters are to lie (`scmoe.build.on_mesh`).
    wish, load: as of `open_model`.

  Raises:
    DataError: a file is damaged.
    ConfigError: the model does not fit.
  """
  built, tokenizer = build.build(run), folder.tokenizer
  offload, lines, pinned = Offload(), [], None
  if load is not None:
    wish = dataclasses.replace(wish, int8=wish.int8 or folder.dtype == "int8")
    found, lines = chosen(run.model, built.shapes, load, wish, run.mesh.expert, files=True)
    offload, pinned = found.offload, found.pinned
    if pinned is not None and wish.int8 and folder.dtype != "int8":
      raise ConfigError(
        "--int8_experts: experts that stay on disk are as the folder has them; write it with "
        "scmoe.convert --inference --dtype int8"
      )
  folder.verify()
  if offload.decode is None:
    params, router = folder.load(built)
    model = built.model(params)
  else:
    params, router = folder.mapped(built)
    model = offloaded(built.model(params), built.mesh, int8=wish.int8, pinned=pinned)
  rest = built.mesh, tokenizer, Programs(built.overlap, folder.path), offload, lines
  return OpenRun(run, str(folder.path), folder.step, model, router, *rest)


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
