"""Opens a stored run: reads its configuration, and loads its model onto devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from scmoe.base.errors import CheckpointError, ConfigError
from scmoe.base.extensions import check_allowed
from scmoe.data import Tokenizer
from scmoe.inference.offload.model import Offload, offloaded
from scmoe.inference.offload.needs import Workload
from scmoe.inference.offload.plan import OffloadRequest, chosen
from scmoe.models.objective import cast_params
from scmoe.pretrained.inference import InferenceFolder
from scmoe.pretrained.stream import flat, leaves_of
from scmoe.run import build
from scmoe.run.adapters import restore_weights, restore_weights_on_host
from scmoe.run.config import RunConfig, from_dict, imports_of
from scmoe.run.modality import modality_of
from scmoe.run.multitask import loaded_as, stored_as, stored_name
from scmoe.run.programs import Programs
from scmoe.training.restore import read_meta, restore_part, restore_stored

_PARAMS = re.compile(r"^params\.")


class Stored(NamedTuple):
  """A run read back from its checkpoint.

  Attributes:
    run: the resolved configuration.
    step: of the checkpoint.
    data: fingerprint of the data that it was trained on; {} for a converted model.
  """

  run: RunConfig
  step: int
  data: Mapping[str, Any]


def open_run(workdir: str, step: int | None, allow_import: Sequence[str] = ()) -> Stored:
  """Reads the configuration that a checkpoint stores; runs no config file.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; None: the newest.
    allow_import: see `scmoe.base.extensions.check_allowed`.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: this version cannot read the stored configuration, or the configuration would
      import code that `allow_import` does not name.
  """
  meta: dict[str, Any] = read_meta(workdir, step)
  run = from_dict(meta["config"], f"{workdir} (stored)")
  check_allowed(imports_of(run), allow_import, f"{workdir} (stored)", Path(workdir))
  return Stored(run, meta["step"], meta.get("data_fingerprint", {}))


def open_named(
  field: str, folder: str, step: int | None = None, allow_import: Sequence[str] = ()
) -> Stored:
  """`open_run` of the folder that a field of the configuration names; its errors say so.

  Args:
    field: e.g. "train.init_from".
    folder: the field's value.
    step, allow_import: see `open_run`, which also says what is raised.
  """
  try:
    return open_run(folder, step, allow_import)
  except CheckpointError as error:
    raise type(error)(f"{field}={folder!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class OpenRun:
  """A stored run whose model has been loaded.

  Attributes:
    run: configuration, on the mesh where the model was loaded.
    workdir, step: the folder and the step from which it was loaded.
    model, router, mesh: model with its parameters, router state, and the devices that hold them.
    tokenizer: the tokenizer of its training; None for a model of images.
    prepare: compiles jitted functions (`scmoe.run.programs`).
    offload: how experts in the host's memory come to the devices; the default where all experts lie
      on the devices.
    plan: lines to print about `offload`.
  """

  run: RunConfig
  workdir: str
  step: int
  model: Any
  router: Any
  mesh: Mesh
  tokenizer: Tokenizer | Any
  prepare: Programs
  offload: Offload = Offload()
  plan: Sequence[str] = ()


def open_model(
  run: RunConfig,
  workdir: str,
  step: int,
  *,
  request: OffloadRequest = OffloadRequest(offload="none"),
  load: Workload | None = None,
  ema: bool = False,
  gate: int | None = None,
) -> OpenRun:
  """Loads a run's model.

  Args:
    run: what `open_run` gave, on the mesh to load it to (`scmoe.run.placement.on_mesh`).
    workdir, step: folder and step of the checkpoint.
    request: where the user wants the experts (`scmoe.inference.offload.plan`).
    load: number and length of the prompts, from which the planner decides where experts lie. None:
      all on the devices.
    ema: the moving average of the weights instead of the weights.
    gate: index of the task to whose gates `run` was cut (`scmoe.run.multitask.of_task`); None: the
      model has the gates that the checkpoint stores.

  Raises:
    CheckpointError: the checkpoint is damaged.
    ConfigError: the tokenizer was not stored with the run, the model does not fit, or the run keeps
      no average.
  """
  if ema:
    check_average(run, workdir)
  tokenizer = modality_of(run).load_tokenizer(run, workdir)
  built = build.build(run)
  prepare = Programs(built.overlap, Path(workdir))
  offload, lines = Offload(), []
  if load is not None:
    found, lines = chosen(run.model, built.shapes, load, request)
    offload = found.offload
  parts = {"router": built.router_shapes} if built.router_shapes else {}
  weights = "average" if ema else "params"
  if offload.decode is None:
    wanted = {weights: stored_as(built.shapes, gate), **parts}
    state = restore_weights(workdir, run, wanted, step)
    model = built.model(loaded_as(state[weights], gate))
  else:
    held = stored_as(built.shapes, gate)
    held = restore_weights_on_host(workdir, run, held, step, part=weights)
    held = cast_params(loaded_as(held, gate), jnp.dtype(run.model.dtype))
    model = offloaded(built.model(held), built.mesh, int8=request.int8_experts)
    state = restore_part(workdir, parts, step) if parts else {}
  rest = built.mesh, tokenizer, prepare, offload, lines
  return OpenRun(run, workdir, step, model, state.get("router", {}), *rest)


def check_average(run: RunConfig, workdir: str) -> None:
  """Checks that a stored run keeps an average of its weights.

  Raises:
    ConfigError: it keeps none.
  """
  if not run.optimizer.ema:
    raise ConfigError(
      f"--ema: {workdir} was trained with optimizer.ema=0 and has no average of its weights; leave "
      "--ema out, or train with e.g. --config.optimizer.ema=0.999"
    )


def weights_of(
  workdir: str | Path,
  run: RunConfig,
  built: build.Built,
  step: int,
  ema: bool,
  gate: int | None = None,
) -> dict[str, Array]:
  """Parameters, or their average, and router state by dotted name; adapters are merged.

  The average has the names of the parameters.

  Args:
    workdir, step: of the checkpoint.
    run: as the checkpoint stores it.
    built: the model, on the mesh to load it to.
    ema: whether the average is wanted in place of the weights.
    gate: as for `open_model`.

  Raises:
    ConfigError: the run or the step keeps no average, or the step lacks a parameter.
  """
  if ema:
    check_average(run, str(workdir))
  if run.lora.rank:
    weights = "average" if ema else "params"
    state = {weights: built.shapes, "router": built.router_shapes}
    found = restore_weights(workdir, run, {name: x for name, x in state.items() if x}, step)
    return flat({"params": found.pop(weights), **found})
  wanted = leaves_of(built)
  part = "average." if ema else "params."
  name_of = lambda name: stored_name(_PARAMS.sub(part, name), gate)
  renamed = {name_of(name): leaf for name, leaf in wanted.items()}
  found = restore_stored(workdir, renamed, step)
  names = dict(zip(wanted, renamed))
  # Router state may be missing: a released model has none.
  lost = next((name for name in wanted if _PARAMS.match(name) and names[name] not in found), None)
  if lost and ema:
    raise ConfigError(
      f"--ema: step {step} of {workdir} holds no {names[lost]}; leave --ema out, or take a later "
      "--step"
    )
  if lost:
    raise ConfigError(f"{workdir} has no {names[lost]}; its checkpoint has another configuration")
  return {name: found[other] for name, other in names.items() if other in found}


def open_folder(
  folder: InferenceFolder,
  run: RunConfig,
  *,
  request: OffloadRequest = OffloadRequest(offload="none"),
  load: Workload | None = None,
) -> OpenRun:
  """Loads the model of an inference checkpoint, after checking the checksums of all its files.

  Args:
    folder: the checkpoint, as `scmoe.convert --inference` writes it.
    run: its configuration, on the mesh to load it to (`scmoe.run.placement.on_mesh`).
    request, load: see `open_model`.

  Raises:
    DataError: a file is damaged.
    ConfigError: the model does not fit.
  """
  built, tokenizer = build.build(run), folder.tokenizer
  offload, lines, pinned = Offload(), [], None
  if load is not None:
    request = dataclasses.replace(
      request, int8_experts=request.int8_experts or folder.dtype == "int8"
    )
    found, lines = chosen(run.model, built.shapes, load, request, files=True)
    offload, pinned = found.offload, found.pinned
    if pinned is not None and request.int8_experts and folder.dtype != "int8":
      raise ConfigError(
        f"int8_experts cannot convert experts that stay on disk, which are {folder.dtype} there; "
        "write the folder with scmoe.convert --inference --dtype int8"
      )
  folder.verify()
  if offload.decode is None:
    params, router = folder.load(built)
    model = built.model(params)
  else:
    params, router = folder.mapped(built)
    model = offloaded(built.model(params), built.mesh, int8=request.int8_experts, pinned=pinned)
  rest = built.mesh, tokenizer, Programs(built.overlap, folder.path), offload, lines
  return OpenRun(run, str(folder.path), folder.step, model, router, *rest)
