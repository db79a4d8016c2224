"""RunConfig: the whole configuration of a run, composed of the sections that components define.

A user gives it as a Python file (`configs/*.py`), as JSON, or as fields on the command line. All
three become the same frozen dataclass, which `resolve` checks as a whole before anything is
compiled or written. Checkpoints store it as JSON, so reading it back runs no code.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import is_import_path
from scmoe.base.options import Options, option, section
from scmoe.base.output import note
from scmoe.base.renamed import RENAMED, note_name, old_names, with_present_names
from scmoe.base.stored import StoredError, parse_json
from scmoe.blocks.options import OverlapConfig
from scmoe.data.config import DataConfig
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.data.multitask.plan import Plan, make_plan
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.models.vision.augment import AugmentConfig
from scmoe.models.vision.options import VisionConfig
from scmoe.models.vision.stages import check_stages, routed_lengths
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.dispatch.options import check_one_host
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import MeshConfig, expert_shards
from scmoe.run.bounds import check_bound
from scmoe.run.fields import field_types, fields, unknown_field
from scmoe.run.names import check_run_name
from scmoe.training.options import (
  CheckpointConfig,
  DistributedConfig,
  OptimizerConfig,
  TrainConfig,
  tuned_values,
)
from scmoe.training.schema import upgraded_config

# The defaults train as GPT-2 was trained: attention crosses the documents of a row
# (model.document_mask=False), so positions do not start again at each document either.
_WHOLE_ROWS = DataConfig(document_mask=False)


@dataclasses.dataclass(frozen=True)
class RunConfig(Options):
  """Everything that decides a run. Each section belongs to the component that reads it."""

  name: str = option("run", "name of the run; without --workdir it is written to runs/NAME")
  model: ModelConfig = section(ModelConfig, "architecture: sizes, wiring, number of experts")
  router: RouterConfig = section(RouterConfig, "how experts are chosen and kept in balance")
  dispatch: DispatchConfig = section(DispatchConfig, "how tokens travel to the experts")
  overlap: OverlapConfig = section(OverlapConfig, "where the expert stage sits in the schedule")
  mesh: MeshConfig = section(MeshConfig, "devices: data x expert x tensor x sequence")
  data: DataConfig = section(DataConfig, "text, tokenizer, sequences; images", default=_WHOLE_ROWS)
  multitask: MultitaskConfig = section(MultitaskConfig, "tasks that train one model side by side")
  augment: AugmentConfig = section(AugmentConfig, "how training changes images and labels")
  train: TrainConfig = section(TrainConfig, "length, batch and cadence of the run")
  optimizer: OptimizerConfig = section(
    OptimizerConfig, "AdamW or Muon, and the learning-rate schedule"
  )
  lora: LoraConfig = section(LoraConfig, "adapters that are trained instead of the model")
  checkpoint: CheckpointConfig = section(CheckpointConfig, "when state is saved and what stays")
  distributed: DistributedConfig = section(DistributedConfig, "several processes of one run")

  def resolve(
    self,
    *,
    num_devices: int,
    vocab_size: int,
    num_processes: int = 1,
  ) -> RunConfig:
    """Fills in fields that follow from others, and checks all fields against each other.

    Args:
      num_devices: devices of all processes.
      vocab_size: vocabulary of the tokenizer; used where `model.vocab_size` is 0.
      num_processes: processes of the run.

    Returns:
      The same configuration with the sizes of the model and of the mesh filled in.

    Raises:
      ConfigError: a field is wrong; the message names it, its value and a remedy.
    """
    check_run_name(self.name, "name")
    for field in fields(self):
      check_bound(field.path, field.default)
    self.data.check()
    mesh = self.mesh.resolve(num_devices)
    model = self.model.resolve(vocab_size=vocab_size)
    length = model.context if model.reads_images else self.data.seq_len
    data = dataclasses.replace(self.data, source=self.data.kind, seq_len=length)
    router = self._router_of_tasks()
    run = dataclasses.replace(self, mesh=mesh, model=model, data=data, router=router)
    run._check_reading()
    run._check_tasks()
    model.check_mesh(expert=mesh.expert, tensor=mesh.tensor, embedding=mesh.embedding_ranks)
    self.train.check_mesh(mesh.batch_shards, num_processes)
    run.check_divided_rows()
    self.train.check_trackers()
    self.train.microbatches(length)
    if not model.reads_images:
      run._check_sequence(vocab_size)
    run._check_reference()
    run._check_lora()
    run._check_dispatch()
    run._check_types()
    _check_schedule(self.optimizer, self.train.steps)
    return run

  def _check_reading(self) -> None:
    """Checks that the model can read the data, and options that only one kind of model has."""
    model, source = self.model, self.data.source
    if model.reads_images != self.data.reads_images:
      wanted = "shapes, digits, or images with data.path" if model.reads_images else "e.g. stdlib"
      raise ConfigError(
        f"model.architecture={model.architecture!r} reads "
        f"{'images' if model.reads_images else 'text'}, got data.source={source!r}; set "
        f"data.source={wanted}"
        + ("" if model.reads_images else ", or model.architecture=vit or swin")
      )
    if not model.reads_images:
      return
    check_stages(model)
    if self.train.teacher:
      raise ConfigError(
        f"train.teacher={self.train.teacher!r} teaches language models, got model.architecture="
        f"{model.architecture!r}; leave train.teacher out"
      )
    if self.augment.erase_least > self.augment.erase_most:
      raise ConfigError(
        f"augment.erase_least={self.augment.erase_least:g} is larger than augment.erase_most="
        f"{self.augment.erase_most:g}; use at most that"
      )

  def _router_of_tasks(self) -> RouterConfig:
    """The router's options with a gate for each task."""
    names = self.multitask.task_names
    if self.router.tasks not in (0, len(names)):
      raise ConfigError(
        f"router.tasks={self.router.tasks} does not fit multitask.names={self.multitask.names!r}, "
        f"from which a run takes it; leave router.tasks at 0"
      )
    return dataclasses.replace(self.router, tasks=len(names))

  def _check_tasks(self) -> None:
    """Checks the tasks, and that nothing is asked for that only a run of one task can do."""
    names, data, train = self.multitask.names, self.data, self.train
    if not names:
      return
    tasks = self.multitask.tasks(data)
    why = f"multitask.names={names!r}"
    if not self.model.wiring_rule.taps:
      raise ConfigError(
        f"{why} gives each task a gate, but model.wiring={self.model.wiring!r} has no routed "
        "experts; choose another wiring"
      )
    if min(task.length for task in tasks) < data.seq_len and not self.model.document_mask:
      raise ConfigError(
        f"multitask.lengths={self.multitask.lengths!r} puts several sequences into a row; set "
        "model.document_mask=True, so that they do not attend to each other"
      )
    if train.teacher:
      raise ConfigError(f"{why} does not go with train.teacher={train.teacher!r}; leave one out")
    if self.lora.rank:
      raise ConfigError(f"{why} does not go with lora.rank={self.lora.rank}; leave one out")
    if self.router.compat.gates > 1:
      raise ConfigError(
        f"{why} does not go with router.compat.gates={self.router.compat.gates}; leave one out"
      )
    self.plan()

  def plan(self) -> Plan:
    """Which rows of a step belong to which task, and which device computes them.

    Needs a resolved run of several tasks.

    Raises:
      ConfigError: a task would get no row, or equal shares do not divide the devices.
    """
    tasks, shards, train = self.multitask.tasks(self.data), self.mesh.batch_shards, self.train
    places = train.microbatches(self.data.seq_len) * train.batch_size // shards
    names, loads = [task.name for task in tasks], [task.load for task in tasks]
    return make_plan(self.multitask.plan, names, loads, devices=shards, places=places)

  def _check_sequence(self, vocab_size: int) -> None:
    if self.data.seq_len > self.model.context:
      raise ConfigError(
        f"data.seq_len={self.data.seq_len} is longer than model.context={self.model.context}; use "
        f"sequences of at most {self.model.context} tokens, or a larger model.context"
      )
    if vocab_size > self.model.vocab_size:
      raise ConfigError(
        f"model.vocab_size={self.model.vocab_size} is smaller than the {vocab_size} tokens of "
        f"data.tokenizer={self.data.tokenizer!r}; use at least {vocab_size}, or 0 to follow it"
      )
    if self.model.document_mask and not self.data.document_mask:
      raise ConfigError(
        "model.document_mask=True needs documents that are numbered; set data.document_mask=True "
        "as well, or both to False"
      )
    together = self.data.reads_preferences or self.data.packing == "pack"
    if self.data.reads_chats and together and not self.model.document_mask:
      raise ConfigError(
        "model.document_mask=False lets the conversations of a row attend to each other; set "
        "model.document_mask=True" + (", or data.packing=pad" * (not self.data.reads_preferences))
      )

  def check_divided_rows(self) -> None:
    """Checks that devices can divide the tokens of each row (`mesh.sequence`).

    `resolve` calls it. A stored run that moves to another mesh needs it again, unless it reads
    whole rows there, as generation does.

    Raises:
      ConfigError: they cannot divide this run's rows, or its heads.
    """
    from scmoe.layers.divided_rows import check_heads

    mesh, model, length = self.mesh, self.model, self.data.seq_len
    if mesh.sequence == 1:
      return
    name = f"mesh.sequence={mesh.sequence}"
    if model.reads_images:
      raise ConfigError(
        f"{name} divides rows of text, got model.architecture={model.architecture!r}; use "
        "mesh.sequence=1"
      )
    if self.data.reads_preferences:
      raise ConfigError(
        f"{name} does not go with data.source='preference', whose loss needs whole answers; use "
        "mesh.sequence=1"
      )
    if length % mesh.sequence_multiple:
      near = -(-length // mesh.sequence_multiple) * mesh.sequence_multiple
      raise ConfigError(
        f"data.seq_len={length} is no multiple of {mesh.sequence_multiple}, into which {name} with "
        f"mesh.sequence_attention={mesh.sequence_attention} cuts a row; use {near}"
      )
    if mesh.sequence_attention == "ring" and model.attention_chunk:
      raise ConfigError(
        f"model.attention_chunk={model.attention_chunk} with rows that a ring of devices divides "
        f"({name}); use mesh.sequence_attention=heads, or mesh.sequence=1"
      )
    if mesh.sequence_attention == "heads":
      kv_heads = model.num_heads if model.kv_lora_rank else model.num_kv_heads
      check_heads(model.num_heads // mesh.tensor, kv_heads // mesh.tensor, mesh.sequence)

  def _check_reference(self) -> None:
    train = self.train
    if not self.data.reads_preferences:
      return
    if not train.teacher and not train.reference_free and not self.lora.rank:
      raise ConfigError(
        "data.source='preference' needs a reference: set train.teacher to the folder of the model "
        "with which this run begins (train.init_from), or train.reference_free=True"
      )
    if train.teacher and train.reference_free:
      raise ConfigError(
        f"train.reference_free=True leaves out the reference train.teacher={train.teacher!r}; set "
        "one of them"
      )

  def _check_lora(self) -> None:
    """Checks what adapters need, and what they do not go with."""
    lora, why = self.lora, f"lora.rank={self.lora.rank}"
    if not lora.rank:
      return
    lora.wanted  # noqa: B018  (it raises for an unknown word)
    if not self.train.init_from:
      raise ConfigError(f"{why} adapts a model that exists; set train.init_from to a run's folder")
    if self.model.reads_images:
      raise ConfigError(
        f"{why} adapts language models, got model.architecture={self.model.architecture!r}; set "
        "lora.rank=0"
      )
    for field, only in (("shard_state", "none"), ("embedding", "whole"), ("moments_in", "device")):
      value = getattr(self.mesh, field)
      if value != only:
        raise ConfigError(
          f"{why} trains few parameters, got mesh.{field}={value!r}, which adapters do not "
          f"support; set mesh.{field}={only}"
        )
    if self.optimizer.name == "muon":
      raise ConfigError(
        f"{why} trains thin factors of matrices, got optimizer.name='muon', which updates whole "
        "matrices; set optimizer.name=adamw"
      )

  def _check_dispatch(self) -> None:
    """Checks the transport against the mesh, and that every expert has room for a token."""
    from scmoe.moe.dispatch import capacity

    rule, dispatch, mesh = self.model.wiring_rule, self.dispatch, self.mesh
    if not rule.taps:
      return
    sharers = expert_shards(mesh.expert, self.model.num_experts)
    dispatch.check_shards(sharers)
    dispatch.check_fp8()
    tuned = tuned_values(self.train.tune)
    gathers = 0 in (dispatch.adaptive_r, *tuned.get("adaptive_r", ()))
    if gathers and mesh.expert > sharers:
      dispatch.check_gathers(repr(self.model.experts), own=is_import_path(self.model.experts))
    for transport in tuned.get("transport", ()):
      dispatch.check_candidate(transport)
    if "num_sms" in tuned and not self.model.ffn.may_have_kernels:
      raise ConfigError(
        f"train.tune={self.train.tune!r} tries num_sms, which only kernels read, and XLA's or "
        "MegaBlocks' products compute the experts; leave it out, or set model.ffn.backend=auto and "
        "model.ffn.impl=auto"
      )
    if dispatch.transport == "put":
      check_one_host(dispatch.nodes)
    if mesh.expert // sharers % dispatch.nodes:
      raise ConfigError(
        f"dispatch.nodes={dispatch.nodes} does not divide the {mesh.expert // sharers} devices "
        "that exchange tokens; use the number of hosts under mesh.expert"
      )
    if dispatch.kind is None or not dispatch.kind.drops:
      return
    for length in routed_lengths(self.model, self.data.seq_len):
      shards, tokens = mesh.token_shards, self.train.batch_size * length
      groups = dispatch.groups or shards
      if groups % shards or tokens % groups:
        raise ConfigError(
          f"dispatch.groups={groups} must be a multiple of mesh.data x mesh.expert"
          f"{' x mesh.sequence' * (mesh.sequence > 1)} = {shards} and divide the {tokens} tokens "
          "of a microbatch; use 0 for one per device"
        )
      if dispatch.capacity_factor > 0:
        capacity(
          dispatch.capacity_factor,
          tokens=tokens // groups,
          num_experts=self.model.num_experts,
          k=rule.routed_per_gating(self.model.top_k),
        )

  def _check_types(self) -> None:
    import jax

    if self.model.dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore
      raise ConfigError(
        "model.dtype='float64' is off in jax; set the environment variable JAX_ENABLE_X64=1"
      )


def _check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
  from scmoe.training.optimizer import make_schedule

  make_schedule(optimizer, steps)


def smoke_run(run: RunConfig) -> RunConfig:
  """`run` made so small that a CPU trains it in seconds; tests use it.

  Sizes, data and length shrink, and so do lists of layers (`ModelConfig.with_layers`). Style,
  wiring, types, routing, transport, overlap, mesh and rematerialisation stay. The optimizer and
  other options of training get their defaults, and adapters and teachers are left out.
  """
  model = dataclasses.replace(
    run.model.with_layers(4),
    num_experts=4,
    top_k=min(run.model.top_k, 2),
    width=16,
    num_heads=2,
    num_kv_heads=min(run.model.num_kv_heads, 1),  # grouped queries stay grouped
    mlp_hidden=32,
    expert_hidden=0,
    shared_hidden=0,
    vocab_size=0,
    context=16,
    vision=_smoke_vision(run),
  )
  data = DataConfig(source="procedural", seq_len=16, document_mask=False)
  if run.model.reads_images:
    data = DataConfig(source="shapes", document_mask=False)
  elif run.data.reads_chats:  # the generated exercises, of which the longest fits
    model = dataclasses.replace(model, context=128)
    data = DataConfig(source=run.data.kind, seq_len=128, packing=run.data.packing)
  train = TrainConfig(
    steps=3,
    batch_size=8,
    log_every=1,
    eval_batches=2,
    sample_tokens=8,
    remat=run.train.remat,
    reference_free=run.data.reads_preferences,  # a reference would have to be trained first
  )
  return dataclasses.replace(
    run,
    model=model,
    data=data,
    train=train,
    optimizer=OptimizerConfig(warmup_steps=1),
    multitask=MultitaskConfig(),  # the data are no mixture, of which each task reads a part
    lora=LoraConfig(),  # a model to adapt would have to be trained first
    checkpoint=CheckpointConfig(every=0, keep=2),
  )


def _smoke_vision(run: RunConfig) -> VisionConfig:
  """Images of 16 x 16 pixels; a Swin of three stages with 8 x 8, 4 x 4 and 2 x 2 tokens.

  A language model keeps its options of images, so that smoke runs of earlier versions, which had no
  such options, can go on.
  """
  if not run.model.reads_images:
    return run.model.vision
  swin = run.model.architecture == "swin"
  sizes: dict[str, Any] = {"size": 16, "classes": 10, "patch": 2 if swin else 4}
  return dataclasses.replace(run.model.vision, depths="2,4,2", window=2, **sizes)


def imports_of(run: RunConfig) -> dict[str, str]:
  """Import paths (`scmoe.base.extensions`) among the values, by field."""
  return {
    field.path: field.default
    for field in fields(run)
    if field.metadata.get("importable") and is_import_path(field.default)
  }


# --- plain data: ConfigDict and JSON --------------------------------------------------------------


def to_dict(run: RunConfig) -> dict[str, Any]:
  """Nested dictionaries of plain values."""
  return dataclasses.asdict(run)


def from_dict(values: Mapping[str, Any], where: str = "config") -> RunConfig:
  """The inverse of `to_dict`. A field that is missing keeps its default.

  Args:
    values: nested mappings.
    where: name of the source, for errors.

  Raises:
    ConfigError: a field is unknown or has a value of the wrong type.
  """
  if isinstance(values, Mapping):
    values, old = with_present_names(values)
    for name in old:
      note_name(name)
  return _from_dict(RunConfig(), values, "", where)


def _from_dict(config: Any, values: Any, prefix: str, where: str) -> Any:
  if not isinstance(values, Mapping):
    name = prefix.rstrip(".") or "the configuration"
    raise ConfigError(f"{where}: {name} is {type(values).__name__}, not a group of fields")
  kinds, replaced = field_types(type(config)), {}
  for name, value in values.items():
    path = f"{prefix}{name}"
    if name not in kinds:
      raise ConfigError(f"{where}: {unknown_field(path, [f.path for f in fields(RunConfig())])}")
    if dataclasses.is_dataclass(kinds[name]):
      replaced[name] = _from_dict(getattr(config, name), value, f"{path}.", where)
    else:
      replaced[name] = _typed(value, kinds[name], path, where)
  try:
    return dataclasses.replace(config, **replaced)
  except ConfigError as error:  # a value that its field refuses
    raise ConfigError(f"{where}: {error}") from None


def _typed(value: Any, kind: type, path: str, where: str) -> Any:
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if kind is float and type(value) is float and not math.isfinite(value):
    raise ConfigError(f"{where}: {path}={value!r} is not a finite number")
  if type(value) is not kind:
    raise ConfigError(
      f"{where}: {path}={value!r} is of type {type(value).__name__}, not {kind.__name__}"
    )
  return value


def to_json(run: RunConfig) -> str:
  """JSON text; `from_json` reads it back to an equal configuration."""
  return json.dumps(to_dict(run), indent=2, allow_nan=False) + "\n"


def from_json(text: str, where: str = "config JSON") -> RunConfig:
  """Reads JSON that this or an earlier version's `to_json` wrote. Runs no code.

  Raises:
    ConfigError: the text is not JSON, or has a key twice, an unknown field, or a value of the wrong
      type.
  """
  try:
    values = parse_json(text, where)
  except StoredError as error:
    raise ConfigError(str(error)) from None
  if {"config", "starts"} <= set(values):
    values = values["config"]  # a run's card (`scmoe.training.card`)
  if isinstance(values, dict):
    old = with_present_names(values)[1]
    values = upgraded_config(values)
    if old:  # most are files that an earlier version wrote: one line for all of their names
      more = f", and {len(old) - 1} more" if len(old) > 1 else ""
      note(f"{where} has names of an earlier version: {old[0]} is now {RENAMED[old[0]]}{more}")
  return from_dict(values, where)


def as_config_dict(run: RunConfig) -> Any:
  """A locked `ml_collections.ConfigDict` of all fields; `get_config` of a config file returns one.

  It refuses unknown fields and values of a wrong type.

  Raises:
    ConfigError: ml_collections is not installed.
  """
  try:
    from ml_collections import ConfigDict
  except ImportError:
    raise ConfigError(
      "config files need ml_collections; install requirements.txt, or use --config_json"
    ) from None

  class Values(ConfigDict):
    """A section's values, which also go by the names that earlier versions gave them."""

    def __setitem__(self, key: Any, value: Any) -> None:
      group, name = self._place(key)
      ConfigDict.__setitem__(group, name, value)

    def __getitem__(self, key: Any) -> Any:
      group, name = self._place(key)
      return ConfigDict.__getitem__(group, name)

    def _place(self, key: Any) -> tuple[Any, Any]:
      """The group that holds a value today, and its name there."""
      places = object.__getattribute__(self, "__dict__").get("_places", {})
      if key not in places:
        return self, key
      note_name(f"{places['']}.{key}")
      section, _, name = places[key].partition(".")
      return self[section], name

  def values_of(config: Any, path: str) -> Any:
    made = Values()
    object.__setattr__(made, "_places", {**old_names(path), "": path} if path else {})
    for field in dataclasses.fields(config):
      value, inside = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
      made[field.name] = values_of(value, inside) if dataclasses.is_dataclass(value) else value
    return made.lock()

  return values_of(run, "")
