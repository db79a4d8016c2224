"""`--dry_run`: what a configuration needs, for any mesh, without owning a device.

Parameters, traffic and saved activations are read off the real training step, traced on abstract
arrays and an abstract mesh; nothing is compiled or allocated. FLOPs are analytic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.blocks.wiring import WIRINGS
from scmoe.layers.dot_product import fusable
from scmoe.models.adapted import Adapted
from scmoe.models.flops import Flops, Parameters, count_parameters, forward_flops
from scmoe.models.low_rank import Adapters
from scmoe.parallel.mesh import BATCH_AXES, manual
from scmoe.run import build, placement, traffic
from scmoe.run.config import RunConfig
from scmoe.run.estimates import StepNeeds
from scmoe.run.expert_copies import Passes
from scmoe.run.host_memory import Away, planned_away
from scmoe.run.modality import modality_of
from scmoe.run.model import build_model
from scmoe.run.on_host import on_host
from scmoe.run.prediction import StepWork
from scmoe.run.sharing import Sharing, bytes_per_device
from scmoe.training.optimizer import make_optimizer
from scmoe.training.step import TrainState, abstract_state

LARGER = (2, 4)  # memory is printed for microbatches of 2 and 4 times the size, too


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on each device, by kind.

  Attributes:
    parameters, gradients, optimizer: exact. Where ranks share the state (`mesh.shard_state`)
      gradients are this rank's shares; with `moments` and several microbatches they are whole until
      the last microbatch is added, and a scan over pairs makes the shares beside them.
    activations: what one microbatch keeps for the backward pass, and what the backward pass
      recomputes of one layer at a time; an estimate, since XLA fuses.
    exchange: send and receive buffers of one dispatch and one combine.
    gathered: with `mesh.shard_state=parameters`, whole parameters in the compute type: those
      outside the pairs; those of the pair that computes, and their gradients; and those of the next
      pair. With `mesh.gather_again=False` those of all pairs instead of two. An estimate: XLA
      decides when it gathers. Tables of a partitioned embedding, if they travel, count here, too.
    copies: with `optimizer.ablation.masters=cast`, the copy of the parameters in the compute type
      that a step makes.
    frozen: with `lora.rank`, the model that is adapted, in the compute type; parameters, gradients
      and optimizer are then those of the adapters.
    experts: with `mesh.experts_in=host`, the most bytes of experts and their gradients that the
      device holds at a time during the passes (`Passes.on_device`); parameters and gradients are
      then those of all else.
    arriving: with `mesh.moments_in=host`, the same of layers under way during the update
      (`Away.on_device`).
  """

  parameters: int
  gradients: int
  optimizer: int
  activations: int
  exchange: int
  gathered: int = 0
  copies: int = 0
  frozen: int = 0
  experts: int = 0
  arriving: int = 0

  @property
  def total(self) -> int:
    """All kinds together, of `arriving` and `experts` the larger: they are not there at once."""
    return sum(dataclasses.astuple(self)) - min(self.arriving, self.experts)


@dataclasses.dataclass(frozen=True)
class DryRun:
  """Everything that `--dry_run` prints; see `dry_run`.

  Attributes:
    larger: factor -> memory with microbatches so many times larger; a factor that does not divide
      the number of microbatches is left out.
    work: the step as the prediction of its time reads it.
    away: what a device keeps in the host's memory or in files; None: nothing.
  """

  run: RunConfig
  parameters: Parameters
  flops: Flops
  memory: Memory
  traffic: traffic.Traffic
  larger: dict[int, Memory]
  work: StepWork
  away: Away | None = None

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one optimizer step."""
    train, length = self.run.train, self.run.data.seq_len
    return train.microbatches(length) * train.batch_size * length

  @property
  def step_needs(self) -> StepNeeds:
    """Memory, FLOPs, exchanged bytes and copies of a step on each device, and its tokens in all."""
    mesh = self.run.mesh
    return StepNeeds(
      memory=self.memory.total,
      flops=self.flops.training * self.tokens_per_step / mesh.size,
      exchange=self.traffic.all_to_all,
      tokens=self.tokens_per_step,
      exchanging=mesh.expert,
      copies=None if self.away is None else self.away.seconds,
      passes=None if (passes := _passes(self.away)) is None else passes.seconds,
      computes=mesh.moments_update == "host",
      filed=mesh.moments_in == "files",
    )


class _Planned(NamedTuple):
  """A run's shapes on its mesh.

  Attributes:
    mesh: without devices.
    graph: of the model.
    shapes: whole parameters of the model.
    adapters: of them, if the run trains adapters.
    sharing: of what is trained.
    state: the training state.
    away: what a device keeps in the host's memory or in files; None: nothing.
  """

  mesh: AbstractMesh
  graph: nnx.GraphDef
  shapes: Any
  adapters: Adapters | None
  sharing: Sharing
  state: TrainState
  away: Away | None

  def traced_traffic(self) -> traffic.Sent:
    """Traffic of one microbatch, read off the step, which is traced for it.

    A put is no collective that a jaxpr would show, so rows that are put count as those of
    `dropless`: with the empty places of its buffers, up to `dispatch.slack` times what travels.
    """
    run, graph = self.sharing.run, self.graph
    if run.mesh.size == 1:
      return traffic.Sent()
    if not run.dispatch.in_all_to_alls:
      dispatch = dataclasses.replace(run.dispatch, transport="dropless")
      run = dataclasses.replace(run, dispatch=dispatch)
      graph = build_model(run, self.mesh)[0]
    return traffic.sent_in(_traced_step(run, self.mesh, graph, self.shapes), self.mesh.shape)

  @property
  def memory(self) -> Memory:
    """Bytes of the state and its gradients, without activations and buffers."""
    run, sharing = self.sharing.run, self.sharing
    return Memory(
      parameters=bytes_per_device(self.state.params),
      gradients=self.gradients,
      optimizer=bytes_per_device((self.state.opt_state, self.state.average)),
      activations=0,
      exchange=0,
      gathered=sharing.gathered_bytes,
      copies=0 if _in_halves(run) else sharing.copied_bytes,
      frozen=sharing.bytes_read(self.shapes) if self.adapters else 0,
      experts=0 if (passes := _passes(self.away)) is None else passes.on_device,
      arriving=0 if self.away is None else self.away.on_device,
    )

  @property
  def gradients(self) -> int:
    """Bytes of float32 gradients that stay on the device until the update."""
    gone = 0 if (passes := _passes(self.away)) is None else sum(passes.gradients)
    return self.sharing.gradient_bytes + self.sharing.scattered_bytes - gone


def _planned(run: RunConfig) -> _Planned:
  mesh = build.abstract_mesh(run)
  graph, shapes = build_model(run, mesh)
  adapters = Adapters(run.lora, shapes) if run.lora.rank else None
  trained = adapters.shapes if adapters else shapes
  sharing = Sharing(run, trained)
  optimizer = make_optimizer(
    run.optimizer, run.train.steps, shares=sharing.shares, on_host=on_host(run)
  )
  halves = sharing.cast if _in_halves(run) else None
  state = abstract_state((trained, {}), optimizer, mesh, halves)  # pyright: ignore
  outside = planned_away(run, state)
  return _Planned(mesh, graph, shapes, adapters, sharing, state, outside)


def _in_halves(run: RunConfig) -> bool:
  """Whether GPUs store float32 parameters as two halves; see `OptimizerAblation.masters`."""
  return run.optimizer.ablation.masters != "cast"


def dry_run(run: RunConfig) -> DryRun:
  """Sizes, memory, traffic and FLOPs of a resolved configuration, on any mesh."""
  plan = _planned(run)
  sent = plan.traced_traffic()
  memory = dataclasses.replace(
    plan.memory, activations=_activation_bytes(run), exchange=4 * sent.largest
  )
  return DryRun(
    run,
    count_parameters(run.model, plan.shapes, build.real_share(run)),
    forward_flops(run.model, run.data.seq_len, build.real_share(run)),
    memory,
    traffic.of_step(run, sent, plan.sharing),
    _larger(run, memory),
    _work(plan, sent),
    plan.away,
  )


def step_work(run: RunConfig) -> StepWork:
  """The computation, traffic and memory of a resolved run's step, for its predicted time."""
  plan = _planned(run)
  return _work(plan, plan.traced_traffic())


def state_memory(run: RunConfig) -> Memory:
  """Memory of a resolved run without activations and buffers; nothing is traced but shapes."""
  return _planned(run).memory


def _passes(away: Away | None) -> Passes | None:
  """Copies of experts in the host's memory; None: they lie on the device."""
  return None if away is None else away.passes


def _work(plan: _Planned, sent: traffic.Sent) -> StepWork:
  return StepWork(
    run=plan.sharing.run,
    mesh=plan.mesh.shape,
    traffic=traffic.of_step(plan.sharing.run, sent, plan.sharing),
    gradients=plan.sharing.gradient_parts,
    gathered=plan.sharing.parameter_parts,
    state=bytes_per_device((plan.state.params, plan.state.opt_state)),
    totals=plan.sharing.gradient_bytes,
    copies=None if plan.away is None else plan.away.seconds,
    passes=None if (passes := _passes(plan.away)) is None else passes.seconds,
  )


def _larger(run: RunConfig, memory: Memory) -> dict[int, Memory]:
  count, rows = run.train.microbatches(run.data.seq_len), run.train.batch_size
  found = {}
  for times in LARGER:
    if count % times == 0:
      train = dataclasses.replace(run.train, batch_size=times * rows)
      activations = _activation_bytes(dataclasses.replace(run, train=train))
      exchange = times * memory.exchange
      found[times] = dataclasses.replace(memory, activations=activations, exchange=exchange)
  return found


def _batch(run: RunConfig) -> Any:
  return modality_of(run).batch_shapes(run, (run.train.batch_size,))


def _traced_step(run: RunConfig, mesh: AbstractMesh, graph: nnx.GraphDef, shapes: Any) -> Any:
  """Loss and gradients of one microbatch as a jaxpr."""
  objective = modality_of(run).make_objective(run, graph)
  gradient = jax.value_and_grad(objective.loss, has_aux=True)
  specs = jax.tree.map(lambda s: s.sharding.spec, shapes)
  out_specs = ((P(), P()), specs)
  local = manual(lambda p, b: gradient(p, {}, b, None), mesh, (specs, P(BATCH_AXES)), out_specs)
  bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes)
  return jax.make_jaxpr(local)(bare, _batch(run)).jaxpr


def _activation_bytes(run: RunConfig) -> int:
  """Bytes that one device keeps for the backward pass of one microbatch.

  With rematerialisation the values that the backward pass recomputes of one layer come on top.
  """
  kept = _saved_bytes(run) - _of_other_ranks(run)
  if run.train.remat != "none":  # the backward pass recomputes one step of the scan at a time
    plain = dataclasses.replace(run, train=dataclasses.replace(run.train, remat="none"))
    kept += _saved_bytes(plain) // (run.model.num_pairs + len(run.model.dense_indices))
  return kept // (run.mesh.tensor * run.mesh.sequence)


def _of_other_ranks(run: RunConfig) -> int:
  """Bytes of a whole head's float32 gradient, for the parts that are other data ranks'."""
  travels, model = Sharing(run, None).travels, run.model
  if travels is None or not travels.head:
    return 0
  ranks = run.mesh.embedding_ranks
  return 4 * model.vocab_size * model.width * (ranks - 1) // ranks


def _saved_bytes(run: RunConfig) -> int:
  """Bytes of the residuals that jax keeps for one device's rows of a microbatch.

  Hidden widths are not divided over the tensor axis here, nor tokens over the sequence axis.
  """
  # A single device with these rows computes E·C expert rows, as many as a device of the mesh.
  shards = run.mesh.batch_shards
  alone = placement.single_device(run)
  train = dataclasses.replace(run.train, batch_size=run.train.batch_size // shards)
  # A scan over pairs keeps no slices of stacked parameters. Where experts lie makes no difference.
  mesh = dataclasses.replace(alone.mesh, experts_in="device")
  kept = _residuals(dataclasses.replace(alone, train=train, mesh=mesh))
  # The portable attention that is traced keeps the scores. A GPU's fused attention, which a
  # deterministic run does not use, keeps none, nor does a ring.
  model, length, masked = run.model, run.data.seq_len, run.model.document_mask
  fused = fusable(
    jnp.dtype(model.dtype), model.head_dim, length, masked=masked, window=model.sliding_window
  )
  fused = fused and not (run.train.deterministic or model.attention_sinks)
  fused = fused and not (model.full_attention_layers or model.attention_chunk)
  fused = fused or (run.mesh.sequence > 1 and run.mesh.sequence_attention == "ring")
  is_score = lambda a: len(a.shape) >= 5 and a.shape[-2:] == (length, length)
  return sum(a.size * a.dtype.itemsize for a in kept if not (fused and is_score(a)))


@functools.lru_cache(maxsize=64)  # meshes of equal batches a device ask for the same run
def _residuals(run: RunConfig) -> tuple[Any, ...]:
  """Abstract arrays that jax keeps for the backward pass of a run on one device."""
  graph, shapes = build_model(run, None)
  objective = modality_of(run).make_objective(run, graph)
  base = None
  if run.lora.rank:
    adapters = Adapters(run.lora, shapes)
    objective = Adapted(objective, adapters, run.model.dtype)
    shapes, base = jax.eval_shape(objective.cast, (adapters.shapes, shapes))
  else:  # parameters in the types in which the model reads them are no activations
    shapes = jax.eval_shape(objective.cast, shapes)

  def backward(params: Any, base: Any, batch: Any) -> Any:
    own = objective if base is None else objective.taught({"base": {"params": base}})
    loss = lambda p: own.loss(p, {}, batch, None)[0]
    return jax.vjp(loss, params)[1]

  jaxpr = jax.make_jaxpr(backward)(shapes, base, _batch(run)).jaxpr
  arguments = {id(v) for v in jaxpr.invars}
  kept = {id(v): v.aval for v in jaxpr.outvars if hasattr(v, "aval") and id(v) not in arguments}
  return tuple(kept.values())


def matched_baselines(run: RunConfig) -> dict[str, tuple[Parameters, Flops] | str]:
  """Parameters and FLOPs of every wiring, other fields unchanged, or why it cannot be built."""
  found: dict[str, tuple[Parameters, Flops] | str] = {}
  for word in WIRINGS:
    try:
      model = dataclasses.replace(run.model, wiring=word).resolve()
      _, shapes = build_model(dataclasses.replace(run, model=model), None)
      changed = dataclasses.replace(run, model=model)
      share = build.real_share(changed)
      found[word] = (
        count_parameters(model, shapes, share),
        forward_flops(model, run.data.seq_len, share),
      )
    except ConfigError as error:
      found[word] = str(error)
  return found
