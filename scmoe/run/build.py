"""Builds the objects of a run from its resolved RunConfig: mesh, model, objective, optimizer.

Parameters are a plain nested dict of arrays (`nnx.to_pure_dict`), which the optimizer, the
checkpoint and `nnx.merge` all accept. Only shapes exist until `init_state` makes each array on its
own devices, so a sharded model never has to fit on one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.timeline import chunk_slots
from scmoe.data.config import DataConfig
from scmoe.data.tokenizers import ByteTokenizer, load_json
from scmoe.kernels.launch import has_kernels, sms_beside_exchanges
from scmoe.models.distillation import Distillation
from scmoe.models.fetched import to_fetch
from scmoe.models.flops import forward_flops, peak_flops
from scmoe.models.objective import RoutedObjective
from scmoe.models.preference import Preference
from scmoe.models.stacked import leading_dimensions
from scmoe.parallel.mesh import make_abstract_mesh, make_mesh, shardings_of
from scmoe.parallel.shares import Gathering, StateShares, divisions
from scmoe.run.config import RunConfig, to_dict
from scmoe.run.modality import modality_of
from scmoe.run.model import Params, build_model, derived_overlap, make_model, router_shapes
from scmoe.run.modelled import may_overflow, modelled_times, sent_per_rank
from scmoe.run.on_host import on_host
from scmoe.training.host_arrays import to_device
from scmoe.training.host_state import joined
from scmoe.training.optimizer import Optimizer, make_optimizer
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig
from scmoe.training.step import TrainState, abstract_state
from scmoe.training.variants import Change, Variant

# `overlap.schedule=auto` tries a row for each rank where it sends at most this share of the rows of
# `dropless`, and the experts' buffers have at most so many times the room.
MOST_ROWS, MOST_ROOM = 0.75, 2.0
# A cut of a run (`Built.cut`) has at most so many groups of microbatches. Only the last group sums
# gradients over devices. With one group those sums would fill the link for half of the cut's time,
# with eight groups for about a tenth of it: `gpt2_moe_medium` of width 1,280 over a slow link,
# by the bytes and 26.6 GB/s (experiments/LOG.md, 2026-11-30).
MOST_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class Built:
  """The objects of a run: the `Trainable` of the commands.

  Attributes:
    run: the resolved configuration.
    mesh: devices by axis.
    graph: the model without parameters; `nnx.merge(graph, params)` is a `GPT` or `VisionModel`.
    shapes: parameters as `jax.ShapeDtypeStruct`, each with its sharding.
    objective: loss and metrics.
    optimizer: what updates the parameters.
    teacher: the model from which the objective distils (`build_teacher`), or None.
  """

  run: RunConfig
  mesh: Mesh
  graph: nnx.GraphDef
  shapes: Params
  objective: RoutedObjective
  optimizer: Optimizer
  teacher: Built | None = None

  @property
  def train(self) -> TrainConfig:
    """Options of the loop."""
    return self.run.train

  @property
  def checkpoint(self) -> CheckpointConfig:
    """When checkpoints are written, and how many stay."""
    return self.run.checkpoint

  @property
  def overlap(self) -> OverlapConfig:
    """Schedule and compilation, with defaults that depend on the machine filled in."""
    return derived_overlap(self.run)

  @property
  def candidates(self) -> tuple[Variant | Change, ...]:
    """Variants that `overlap.schedule=auto` tries; a function makes one from the best so far.

    The first is the run as configured; the others are the likeliest to gain. Without a search only
    the first is there.
    """
    run, dispatch = self.run, self.run.dispatch
    found: list[Variant | Change] = [Variant()]
    if not self.overlap.search_seconds:
      return tuple(found)
    buffers = run.model.ffn.impl == "batched"  # which the packed transport does not make
    if dispatch.transport == "capacity" and dispatch.capacity_factor > 0 and not buffers:
      found.append(Variant(transport="packed"))
    if self._may_send_per_rank():
      found.append(Variant(transport="per_rank"))
    if run.overlap.order == "xla":
      found.append(self._in_slots)
    return tuple(found)

  def _may_send_per_rank(self) -> bool:
    """Whether `auto` tries a row for each rank: it saves rows, and the experts' buffers fit.

    In a run with a teacher or adapters the search times a model of two pairs alone, which does not
    show whether the buffers of all layers fit; so such a run does not try it. With the ablation
    `first_round` the two transports would leave out different rows.
    """
    run, dispatch = self.run, self.run.dispatch
    free = not (run.train.teacher or run.lora.base or dispatch.ablation.first_round)
    if dispatch.transport != "dropless" or not free:
      return False
    choices = run.model.wiring_rule.routed_per_gating(run.model.top_k)
    rows, dropless = sent_per_rank(run), dispatch.slack * choices  # for each token
    # At the experts a row of `per_rank` has room for all choices that it may have there, one of
    # `dropless` for one.
    room = rows * min(choices, run.model.num_experts // self.mesh.shape["expert"])
    return rows <= MOST_ROWS * dropless and room <= MOST_ROOM * dropless

  def _in_slots(self, best: Variant) -> Variant:
    """`best` with at least two chunks, whose experts barriers hold in the slots that hide most.

    The slots are those of a modelled slow link. Where communication is short, the run as configured
    hides it already. In slots the experts' kernels run beside transfers, so they leave
    multiprocessors to NCCL, unless the user or `train.tune` has set the number of CTAs.
    """
    times = modelled_times(self.varied(best), "h200-slow")
    chunks = max(2, best.chunks or self.run.dispatch.chunks)
    assert times is not None
    slots = ", ".join(chunk_slots(times, chunks))
    num_sms = best.num_sms
    if num_sms is None and self._kernels_beside_nccl(best):
      num_sms = sms_beside_exchanges()
    return dataclasses.replace(
      best, chunks=chunks, schedule=slots, order="barriers", num_sms=num_sms
    )

  def _kernels_beside_nccl(self, variant: Variant) -> bool:
    """Whether kernels compute the experts, with as many CTAs as they like, beside NCCL's.

    Not with `capacity`, whose padded experts take XLA's products or eight CTAs a multiprocessor,
    nor with `put`, whose rows no kernel of NCCL moves.
    """
    kind, ffn = self.varied(variant).dispatch.kind, self.run.model.ffn
    sorted_rows = kind is not None and kind.in_rounds and kind.exchanges
    free = ffn.num_sms == 0 and ffn.may_have_kernels
    return sorted_rows and free and has_kernels(self.mesh.devices.flat[0])

  @property
  def config(self) -> dict[str, Any]:
    """The whole configuration, JSON-able."""
    return to_dict(self.run)

  @property
  def sequence_length(self) -> int:
    """Tokens of a sequence."""
    return self.run.data.seq_len

  def flops_per_token(self, figures: Mapping[str, Any]) -> float:
    """FLOPs of one token in training.

    Args:
      figures: metrics of a step. `real_experts`, if there, is how many of a token's chosen experts
        compute; the others return their input.
    """
    run, share = self.run, real_share(self.run)
    if "real_experts" in figures:
      share = figures["real_experts"] / run.model.wiring_rule.routed_per_gating(run.model.top_k)
    flops = forward_flops(run.model, run.data.seq_len, share).training
    if self.teacher is not None:
      flops += forward_flops(self.teacher.run.model, run.data.seq_len).forward
    return flops

  @property
  def peak_flops(self) -> float:
    """FLOP/s of one device in the compute type; 0 where it is not known."""
    device = self.mesh.devices.flat[0]
    return peak_flops(device.device_kind, self.run.model.dtype) or 0.0

  @property
  def aimed_share(self) -> float | None:
    """The share of the choices that the balancing bias aims to give to computing experts.

    None without such a bias, or without zero experts.
    """
    held = self.run.router.bias != "none" and self.run.model.zero_experts > 0
    return real_share(self.run) if held else None

  def init(self, key: Array) -> tuple[Params, dict[str, Any]]:
    """Initial parameters and router state; call it under jit."""
    model: Any = make_model(self.run, key)
    return nnx.to_pure_dict(nnx.state(model)), model.init_router()

  @property
  def shardings(self) -> tuple[Params, dict[str, Any]]:
    """Shardings of the trained parameters and of the router state."""
    return shardings_of((self.trained_shapes, self.router_shapes))

  @property
  def trained_shapes(self) -> Params:
    """Parameters that the optimizer updates, as `jax.ShapeDtypeStruct`s with shardings."""
    return self.shapes

  @property
  def specs(self) -> Params:
    """PartitionSpecs of the parameters."""
    return jax.tree.map(lambda s: s.sharding.spec, self.shapes)

  @functools.cached_property
  def router_shapes(self) -> dict[str, Any]:
    """Router state as `jax.ShapeDtypeStruct`, replicated on every device."""
    router = router_shapes(self.graph, self.shapes)
    everywhere = NamedSharding(self.mesh, jax.sharding.PartitionSpec())
    place = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=everywhere)
    return jax.tree.map(place, router)

  def abstract_state(self) -> TrainState:
    """Shapes, types and shardings of the whole training state."""
    return self._abstract_state  # traced once: that takes half a second

  @functools.cached_property
  def _abstract_state(self) -> TrainState:
    choice = self.run.optimizer.ablation.masters
    halves = jax.default_backend() == "gpu" if choice == "auto" else choice == "halves"
    cast = self.objective.cast if halves else None
    shapes = self.trained_shapes, self.router_shapes
    return abstract_state(shapes, self.optimizer, self.mesh, cast, self.shapes_given)

  @property
  def shapes_given(self) -> Any:
    """Shapes of `TrainState.teacher`; None where the objective reads no such arrays."""
    return None if self.teacher is None else self.teacher.given_shapes

  @property
  def given_shapes(self) -> dict[str, Any]:
    """Shapes of this model as a run's teacher: parameters in the compute type, router state."""
    typed = jax.eval_shape(self.objective.cast, self.shapes)
    place = lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at.sharding)
    return {"params": jax.tree.map(place, typed, self.shapes), "router": self.router_shapes}

  def variant(self, variant: Variant) -> RoutedObjective:
    """The objective with another way to route or to move rows; the parameters stay the same.

    Raises:
      ConfigError: the variant does not fit the run, e.g. an r that does not divide the devices.
    """
    changed = self.varied(variant)
    return make_objective(changed, build_model(changed, self.mesh)[0], self.teacher)

  def without_loops(self, variant: Variant) -> RoutedObjective | None:
    """The objective of a variant whose layers send the first round of rows only.

    None unless devices exchange rows and `dispatch.overflow=repeat` says that the training step is
    run again if rows are left over. None, too, if the variant's layers have no loops in any case
    (`may_overflow`): then no step waits for the figures of the one before.
    """
    run = self.run
    exchange = self.mesh.shape["expert"] > 1 and bool(run.model.wiring_rule.taps)
    varied = self.varied(variant)
    if not (exchange and varied.dispatch.repeats and may_overflow(varied)):
      return None
    ablation = dataclasses.replace(run.dispatch.ablation, first_round=True)
    dispatch = dataclasses.replace(run.dispatch, ablation=ablation)
    return dataclasses.replace(self, run=dataclasses.replace(run, dispatch=dispatch)).variant(
      variant
    )

  def varied(self, variant: Variant) -> RunConfig:
    """The run's configuration with the options of a variant; raises as `variant`."""
    run = self.run
    given = variant.given
    moved = {name: given.pop(name) for name in ("schedule", "order") if name in given}
    top_k = given.pop("top_k", run.model.top_k)
    num_sms = given.pop("num_sms", run.model.ffn.num_sms)
    if given.get("capacity_factor") == 0:  # nothing may be dropped
      given["capacity_factor"] = run.dispatch.capacity_factor
      if run.dispatch.kind is None or run.dispatch.kind.drops:
        given["transport"] = "dropless"
    dispatch = dataclasses.replace(run.dispatch, **given)
    overlap = dataclasses.replace(run.overlap, **moved)
    dispatch.check_shards(self.mesh.shape["shard"])
    ffn = dataclasses.replace(run.model.ffn, num_sms=num_sms)
    model = dataclasses.replace(run.model, top_k=top_k, ffn=ffn).resolve()
    return dataclasses.replace(run, model=model, dispatch=dispatch, overlap=overlap)

  def cut(self, groups: int = MOST_GROUPS) -> Built:
    """This run cut to two block pairs and at most so many groups of microbatches.

    The devices are the same. `overlap.flight` microbatches make a group: the step computes them
    side by side. The cut has no teacher, and it trains all parameters even if the run trains
    adapters: their base is not loaded.
    """
    run = self.run
    model = run.model.shortened(2)
    group = self.overlap.flight * run.train.batch_size * run.data.seq_len
    tokens = min(groups * group, run.train.tokens_per_step)
    train = dataclasses.replace(run.train, tokens_per_step=tokens)
    cut = dataclasses.replace(run, model=model, train=train)
    return build(cut, list(self.mesh.devices.flat))

  @property
  def batch_shapes(self) -> Any:
    """One step's batch, of all processes, as `jax.ShapeDtypeStruct`s [A, B, ...]."""
    rows = self.train.microbatches(self.sequence_length), self.train.batch_size
    return modality_of(self.run).batch_shapes(self.run, rows)

  def random_batch(self) -> Any:
    """One step's random batch of this process: numpy arrays [A, B / processes, ...]."""
    microbatches = self.train.microbatches(self.sequence_length)
    rows = microbatches, self.train.batch_size // jax.process_count()
    return modality_of(self.run).random_batch(self.run, rows, jax.process_index())

  def model(self, params: Params) -> Any:
    """The model with these parameters."""
    return nnx.merge(self.graph, params)

  def whole(self, params: Params, given: Any) -> Params:
    """The whole model's parameters, from the trained ones; here they are the same.

    A run that trains adapters merges them into its base (`scmoe.run.adapters.BuiltAdapters`).

    Args:
      params: the trained parameters.
      given: `TrainState.teacher`.
    """
    del given
    return params

  def generating_model(self, params: Params, given: Any) -> Any:
    """The whole model for generation during training; each data rank reads all of it.

    Args:
      params, given: as for `whole`.
    """
    params = to_device(joined(self.whole(params, given)))
    if self.run.mesh.embedding_ranks == 1:
      return self.model(params)
    place = dataclasses.replace(self.run.mesh, embedding="whole")
    graph, _ = build_model(dataclasses.replace(self.run, mesh=place), None)
    return nnx.merge(graph, params)

  def training_model(self, params: Params) -> Any:
    """The model with the training state's parameters, for evaluation during training.

    If ranks share the parameters (`mesh.shard_state=parameters`), each of them is a `Share`,
    which a pair gathers as it begins. An expert in the host's memory is an `InHostMemory`, and
    fetched.
    """
    shares, on_host = self.optimizer.shares, self.optimizer.on_host
    if on_host is not None and on_host.experts:
      params = to_fetch(params, on_host.experts)
    return self.model(params if shares is None else shares.to_read(params))


def build(
  run: RunConfig, devices: Sequence[Any] | None = None, teacher: RunConfig | None = None
) -> Built:
  """Builds everything for a resolved configuration; allocates nothing.

  Args:
    run: see `RunConfig.resolve`.
    devices: devices of the mesh; None: all that jax has.
    teacher: the resolved run that `run.train.teacher` names. Only training needs it; without it the
      objective learns from text alone.

  Raises:
    ConfigError: the mesh needs more devices than there are, the teacher does not fit the run, or
      options do not fit each other.
  """
  mesh = build_mesh(run, devices)
  graph, shapes = build_model(run, mesh)
  shares = shares_of(run, shapes)
  taught_by = None if teacher is None else build_teacher(teacher, run, mesh)
  objective = make_objective(run, graph, taught_by)
  optimizer = make_optimizer(
    run.optimizer,
    run.train.steps,
    half=run.model.dtype == "float16",
    spike_sigma=run.train.spike_sigma,
    specs=jax.tree.map(lambda s: s.sharding.spec, shapes),
    shares=shares,
    on_host=on_host(run),
  )
  return Built(run, mesh, graph, shapes, objective, optimizer, taught_by)


def shares_of(run: RunConfig, shapes: Params) -> StateShares | None:
  """Which rank holds which share of the state; None if each holds all of it.

  Args:
    run: resolved; its `mesh.shard_state` decides.
    shapes: of the parameters, from `build_model`.
  """
  mesh = run.mesh
  if not mesh.shares_state:
    return None
  return StateShares(
    parameters=mesh.shard_state == "parameters",
    specs=jax.tree.map(lambda s: s.sharding.spec, shapes),
    divisions=divisions(shapes, leading_dimensions),
    how=Gathering(mesh.bucket_bytes, mesh.gather_again, mesh.gather_ahead),
  )


def build_teacher(teacher: RunConfig, run: RunConfig, mesh: Mesh) -> Built:
  """Builds a teacher on its student's mesh, with the student's transport and schedule.

  Raises:
    ConfigError: the teacher does not fit the mesh, has fewer positions than the student's
      sequences, another vocabulary, or, with `train.teacher_hidden`, layers of other sizes.
  """
  name, theirs, own = f"train.teacher={run.train.teacher!r}", teacher.model, run.model
  if theirs.vocab_size != own.vocab_size:
    raise ConfigError(
      f"{name} has a vocabulary of {theirs.vocab_size}, model.vocab_size={own.vocab_size}; their "
      "scores cannot be compared: give a teacher with the same tokenizer"
    )
  if theirs.context < run.data.seq_len:
    raise ConfigError(
      f"{name} has model.context={theirs.context}, data.seq_len={run.data.seq_len} is longer; use "
      f"at most {theirs.context}"
    )
  sizes = [f"model.width={m.width} and model.num_layers={m.num_layers}" for m in (theirs, own)]
  if run.train.teacher_hidden and sizes[0] != sizes[1]:
    raise ConfigError(
      f"{name} has {sizes[0]}, this run {sizes[1]}; their hidden states cannot be compared: use "
      "train.teacher_hidden=0"
    )
  experts = theirs.num_experts if theirs.wiring_rule.taps else 0
  if experts % mesh.shape["expert"]:
    raise ConfigError(
      f"{name} has {experts} experts, which {mesh.shape['expert']} devices of mesh.expert do not "
      "divide; use fewer of them"
    )
  try:
    theirs.check_mesh(expert=run.mesh.expert, tensor=run.mesh.tensor)
  except ConfigError as error:
    raise ConfigError(f"{name}: {error}") from None
  # A teacher's parameters are read in every microbatch and never updated: each data rank has them.
  place = dataclasses.replace(run.mesh, embedding="whole")
  teacher = dataclasses.replace(teacher, mesh=place, dispatch=run.dispatch, overlap=run.overlap)
  graph, shapes = build_model(teacher, mesh)
  optimizer = make_optimizer(OptimizerConfig(), 1)  # never used: a teacher does not learn
  return Built(teacher, mesh, graph, shapes, make_objective(teacher, graph), optimizer)


def make_objective(
  run: RunConfig, graph: nnx.GraphDef, teacher: Built | None = None
) -> RoutedObjective:
  """The objective that a resolved run minimises."""
  if run.data.reads_preferences:
    reference = None if teacher is None else teacher.graph
    options = {"beta": run.train.preference_beta, "remat": run.train.remat}
    return Preference(graph, run.router, reference, **options)
  if teacher is not None:
    return Distillation(
      graph,
      run.router,
      teacher.graph,
      share=run.train.teacher_share,
      temperature=run.train.teacher_temperature,
      hidden_share=run.train.teacher_hidden,
      remat=run.train.remat,
    )
  return modality_of(run).make_objective(run, graph)


def build_mesh(run: RunConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """The device mesh of a resolved configuration."""
  return make_mesh(run.mesh, devices, num_experts=_experts(run))


def abstract_mesh(run: RunConfig) -> AbstractMesh:
  """The mesh of a resolved configuration without devices."""
  return make_abstract_mesh(run.mesh, num_experts=_experts(run))


def _experts(run: RunConfig) -> int:
  return run.model.num_experts if run.model.wiring_rule.taps else 0


def with_wiring(run: RunConfig, name: str) -> RunConfig:
  """A run, not resolved, with another wiring; see `BlockConfig.with_wiring`."""
  return dataclasses.replace(run, model=run.model.with_wiring(name))


def real_share(run: RunConfig) -> float:
  """Intended share of a token's choices that go to experts that compute, not to zero experts."""
  k = run.model.wiring_rule.routed_per_gating(run.model.top_k)
  return run.router.real_share(k, run.model.num_experts, run.model.zero_experts)


def vocab_size(data: DataConfig) -> int:
  """Size of the tokenizer's vocabulary, without reading the data.

  Raises:
    DataError: `data.tokenizer` is not a tokenizer.
  """
  if data.tokenizer == "bytes":
    return ByteTokenizer.vocab_size
  if data.tokenizer == "bpe":
    return data.vocab_size
  return load_json(data.tokenizer, data.eos_token).vocab_size
