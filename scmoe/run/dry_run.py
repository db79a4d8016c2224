"""`--dry_run`: what a configuration needs, for any mesh, without owning a device.

Parameters, traffic and saved activations are read off the real training step, traced on abstract
arrays and an abstract mesh; nothing is compiled or allocated. FLOPs are analytic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import number, size_of
from scmoe.blocks.wiring import WIRINGS
from scmoe.layers.dot_product import fusable
from scmoe.models.adapted import Adapted
from scmoe.models.flops import Flops, Parameters, count_parameters, forward_flops
from scmoe.models.low_rank import Adapters
from scmoe.parallel.mesh import BATCH_AXES, manual, shardings_of
from scmoe.run import build, placement, traffic
from scmoe.run.config import RunConfig
from scmoe.run.estimates import DEVICES, USABLE, StepNeeds, device_table
from scmoe.run.host_memory import Away, away
from scmoe.run.modality import modality_of
from scmoe.run.sharing import Sharing, bytes_per_device
from scmoe.training.optimizer import make_optimizer
from scmoe.training.step import abstract_state

LARGER = (2, 4)  # memory is printed for microbatches of 2 and 4 times the size, too


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on each device, by kind.

  Attributes:
    parameters, gradients, optimizer: exact. Where data ranks share the state (`mesh.shard_state`)
      gradients are this rank's shares; with `moments` and several microbatches they are whole until
      the last microbatch is added.
    activations: what one microbatch keeps for the backward pass, and what the backward pass
      recomputes of one layer at a time; an estimate, since XLA fuses.
    exchange: send and receive buffers of one dispatch and one combine.
    gathered: with `mesh.shard_state=parameters`, whole parameters in the compute type: those
      outside the pairs; those of the pair that computes, and their gradients; and those of the next
      pair. With `mesh.gather_again=False` those of all pairs instead of two. An estimate: XLA
      decides when it gathers.
    frozen: with `lora.rank`, the model that is adapted, in the compute type; parameters, gradients
      and optimizer are then those of the adapters.
    arriving: with `mesh.moments_in=host`, the most bytes of moments and lower halves that the
      device holds at a time during the update.
  """

  parameters: int
  gradients: int
  optimizer: int
  activations: int
  exchange: int
  gathered: int = 0
  frozen: int = 0
  arriving: int = 0

  @property
  def total(self) -> int:
    """All kinds together."""
    return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class DryRun:
  """Everything that `--dry_run` prints; see `dry_run`.

  Attributes:
    larger: factor -> memory with microbatches so many times larger; a factor that does not divide
      the number of microbatches is left out.
    away: what a device keeps in the host's memory; None: nothing.
  """

  run: RunConfig
  parameters: Parameters
  flops: Flops
  memory: Memory
  traffic: traffic.Traffic
  larger: dict[int, Memory]
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
    )


def dry_run(run: RunConfig) -> DryRun:
  """Sizes, memory, traffic and FLOPs of a resolved configuration, on any mesh."""
  mesh = abstract_mesh(run)
  graph, shapes = build.build_model(run, mesh)
  adapters = Adapters(run.lora, shapes) if run.lora.rank else None
  trained = adapters.shapes if adapters else shapes
  sharing = Sharing(run, trained)
  optimizer = make_optimizer(
    run.optimizer, run.train.steps, shares=sharing.shares, on_host=build.on_host(run)
  )
  of_model = lambda key: nnx.to_pure_dict(nnx.state(build.make_model(run, key)))
  init = lambda key: (adapters.init(key) if adapters else of_model(key), {})
  halves = sharing.cast if run.optimizer.ablation.masters != "cast" else None
  placed = shardings_of(trained), {}
  state = abstract_state(init, optimizer, mesh, placed, halves)  # pyright: ignore
  outside = away(state, run.mesh.moments_ahead)
  sent = traffic.sent_in(_traced_step(run, mesh, graph, shapes))
  memory = Memory(
    parameters=bytes_per_device(state.params),
    gradients=sharing.gradient_bytes,
    optimizer=bytes_per_device((state.opt_state, state.average)),
    activations=_activation_bytes(run),
    exchange=4 * sent.largest,
    gathered=sharing.gathered_bytes,
    frozen=sharing.bytes_read(shapes) if adapters else 0,
    arriving=0 if outside is None else outside.on_device,
  )
  return DryRun(
    run,
    count_parameters(run.model, shapes, real_share(run)),
    forward_flops(run.model, run.data.seq_len, real_share(run)),
    memory,
    traffic.of_step(run, sent, sharing),
    _larger(run, memory),
    outside,
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


def smallest_data(run: RunConfig, limits: Sequence[float]) -> list[tuple[int, int] | None]:
  """The fewest data ranks with which a step fits if they share all state, and bytes per device.

  Each rank has as many rows as in `run`. The first number of ranks that is tried is the run's own,
  at least 2; its bytes are those of `dry_run`. Then the number is doubled again and again, which
  halves the bytes of parameters, gradients and moments.

  Args:
    run: resolved.
    limits: bytes of a device; the result has an entry for each, None where 1,024 times as many
      ranks are too few.
  """
  first = max(run.mesh.data, 2)
  mesh = dataclasses.replace(run.mesh, data=first, shard_state="parameters")
  rows = run.train.batch_size // run.mesh.batch_shards * mesh.batch_shards
  tokens = run.train.tokens_per_step
  tokens = tokens if tokens % (rows * run.data.seq_len) == 0 else 0
  train = dataclasses.replace(run.train, batch_size=rows, tokens_per_step=tokens)
  memory = dry_run(dataclasses.replace(run, mesh=mesh, train=train)).memory
  state = memory.parameters + memory.gradients + memory.optimizer
  needs = [(first * 2**i, memory.total - state + state // 2**i) for i in range(11)]
  return [next((need for need in needs if need[1] <= limit), None) for limit in limits]


def real_share(run: RunConfig) -> float:
  """Intended share of a token's choices that go to experts that compute, not to zero experts."""
  k = run.model.wiring_rule.routed_per_gating(run.model.top_k)
  return run.router.real_share(k, run.model.num_experts, run.model.zero_experts)


def planned_devices(run: RunConfig) -> int:
  """Devices that the mesh asks for; a free `mesh.data` (-1) counts as 1."""
  mesh = run.mesh
  return max(mesh.data, 1) * max(mesh.expert, 1) * max(mesh.tensor, 1) * max(mesh.sequence, 1)


def abstract_mesh(run: RunConfig) -> AbstractMesh:
  """The run's mesh without devices."""
  devices = [_NoDevice(i) for i in range(run.mesh.size)]
  return build.build_mesh(run, devices).abstract_mesh


@dataclasses.dataclass(frozen=True)
class _NoDevice:
  # The attributes of a device that `jax.sharding.Mesh` reads when it is made.
  id: int
  platform: str = "cpu"
  device_kind: str = "none"
  process_index: int = 0


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
  kept = _saved_bytes(run)
  if run.train.remat != "none":  # the backward pass recomputes one step of the scan at a time
    plain = dataclasses.replace(run, train=dataclasses.replace(run.train, remat="none"))
    kept += _saved_bytes(plain) // (run.model.num_pairs + len(run.model.dense_indices))
  return kept // (run.mesh.tensor * run.mesh.sequence)


def _saved_bytes(run: RunConfig) -> int:
  """Bytes of the residuals that jax keeps for one device's rows of a microbatch.

  Hidden widths are not divided over the tensor axis here, nor tokens over the sequence axis.
  """
  # A single device with these rows computes E·C expert rows, as many as a device of the mesh.
  shards = run.mesh.batch_shards
  alone = placement.single_device(run)
  train = dataclasses.replace(run.train, batch_size=run.train.batch_size // shards)
  alone = dataclasses.replace(alone, train=train)
  graph, shapes = build.build_model(alone, None)
  objective = modality_of(run).make_objective(alone, graph)
  base = None
  if run.lora.rank:
    adapters = Adapters(run.lora, shapes)
    objective = Adapted(objective, adapters, run.model.dtype)
    shapes, base = jax.eval_shape(objective.cast, (adapters.shapes, shapes))

  def backward(params: Any, base: Any, batch: Any) -> Any:
    own = objective if base is None else objective.taught({"base": {"params": base}})
    loss = lambda p: own.loss(p, {}, batch, None)[0]
    return jax.vjp(loss, params)[1]

  jaxpr = jax.make_jaxpr(backward)(shapes, base, _batch(alone)).jaxpr
  arguments = {id(v) for v in jaxpr.invars}
  kept = {id(v): v.aval for v in jaxpr.outvars if hasattr(v, "aval") and id(v) not in arguments}
  # The portable attention that is traced here keeps the scores. A GPU's fused attention, which a
  # deterministic run does not use, keeps none, nor does a ring.
  model, length, masked = run.model, run.data.seq_len, run.model.document_mask
  fused = fusable(
    jnp.dtype(model.dtype), model.head_dim, length, masked=masked, window=model.sliding_window
  )
  fused = fused and not (run.train.deterministic or model.attention_sinks)
  fused = fused and not (model.full_attention_layers or model.attention_chunk)
  fused = fused or (run.mesh.sequence > 1 and run.mesh.sequence_attention == "ring")
  is_score = lambda a: len(a.shape) >= 5 and a.shape[-2:] == (length, length)
  return sum(a.size * a.dtype.itemsize for a in kept.values() if not (fused and is_score(a)))


def matched_baselines(run: RunConfig) -> dict[str, tuple[Parameters, Flops] | str]:
  """Parameters and FLOPs of every wiring, other fields unchanged, or why it cannot be built."""
  found: dict[str, tuple[Parameters, Flops] | str] = {}
  for word in WIRINGS:
    try:
      model = dataclasses.replace(run.model, wiring=word).resolve()
      _, shapes = build.build_model(dataclasses.replace(run, model=model), None)
      changed = dataclasses.replace(run, model=model)
      share = real_share(changed)
      found[word] = (
        count_parameters(model, shapes, share),
        forward_flops(model, run.data.seq_len, share),
      )
    except ConfigError as error:
      found[word] = str(error)
  return found


# --- what is printed ------------------------------------------------------------------------------


def report(result: DryRun) -> str:
  """The text that `--dry_run` prints."""
  run, p, f = result.run, result.parameters, result.flops
  tokens, steps = result.tokens_per_step, run.train.steps
  micro = run.train.microbatches(run.data.seq_len)
  lines = [
    f"dry run of {run.name}: nothing is allocated or written",
    "",
    *model_lines(run, p, f),
    f"FLOPs        {number(f.training * tokens)} per step, {number(f.training * tokens * steps)} "
    f"in all; forward by kind: "
    + ", ".join(f"{k} {v / f.forward:.0%}" for k, v in dataclasses.asdict(f).items() if v),
    f"tokens       {tokens:,} per step ({micro} x {run.train.batch_size} "
    f"{modality_of(run).noun}s of {run.data.seq_len}), {number(tokens * steps)} in {steps:,} steps",
    *([f"plan         {run.plan().words()}"] if run.multitask.names else []),
    *_memory_lines(result),
    *traffic.lines(result.traffic, run.mesh),
    "",
    *device_table(result.step_needs, steps),
    *_sharing_lines(result),
    "",
    *_baseline_lines(result),
  ]
  return "\n".join(lines)


def model_lines(run: RunConfig, p: Parameters, f: Flops) -> list[str]:
  """Model, parameters and FLOPs per token: the first lines of a run's header."""
  m, rule = run.model, run.model.wiring_rule
  kind, experts = m.architecture if m.reads_images else m.style, "no experts"
  if rule.taps:
    beside = " + shared expert" if rule.shared_expert else ""
    visited = rule.routed_per_token(m.top_k)
    zero = f" ({m.zero_experts} more return their input)" if m.zero_experts else ""
    dense = f" but {len(m.dense_indices)}" if m.dense_indices else ""
    experts = (
      f"{visited} of {m.num_experts} experts{zero}{beside} in every {_nth(m.moe_every)}block{dense}"
    )
  routed = f", routed {number(p.routed)} ({number(p.routed_active)} active)" if p.routed else ""
  shared = f", shared {number(p.shared)}" if p.shared else ""
  return [
    f"model        {kind}, {m.wiring}: {m.num_layers} blocks, width {m.width}, {experts}, "
    f"{m.dtype}",
    f"parameters   {number(p.total)} in all, {number(p.active)} active per token: embedding "
    f"{number(p.embedding)}, dense {number(p.dense)}{shared}{routed}",
    f"per token    {number(f.forward)} FLOPs forward, {number(f.training)} in training",
  ]


def _nth(n: int) -> str:
  return {1: "", 2: "2nd ", 3: "3rd "}.get(n, f"{n}th ")


def _memory_lines(result: DryRun) -> list[str]:
  mesh, memory = result.run.mesh, result.memory
  lines = [
    f"mesh         {mesh.words} = {mesh.size} device{'s' if mesh.size > 1 else ''}"
    f"{traffic.shared_words(mesh)}",
    "",
    "memory on each device",
  ]
  names = {"activations": f"activations (estimate, remat {result.run.train.remat})"}
  names["exchange"] = "all-to-all buffers"
  names["gathered"] = "gathered parameters (estimate)"
  names["frozen"] = "frozen parameters"
  names["arriving"] = "moments of layers under way"
  for kind, size in dataclasses.asdict(memory).items():
    if kind in ("gathered", "frozen", "arriving") and not size:
      continue
    lines.append(f"  {names.get(kind, kind):36} {size_of(size):>12}")
  lines.append(f"  {'total':36} {size_of(memory.total):>12}")
  for times, larger in result.larger.items():  # with fewer microbatches fewer gradients are added
    name = f"total with train.batch_size={times * result.run.train.batch_size}"
    lines.append(f"  {name:36} {size_of(larger.total):>12}")
  if result.away is not None:
    name = "in the host's memory, per device"
    lines.append(f"  {name:36} {size_of(result.away.total):>12}")
    lines.append(f"  {'more there during a save':36} {size_of(result.away.saving):>12}")
  return lines


def _sharing_lines(result: DryRun) -> list[str]:
  """Names the smallest `mesh.data` with which the step fits on GPUs where it now does not.

  There data ranks share all state. No line if the step fits everywhere, or trains adapters.
  """
  if result.run.lora.rank:
    return []  # adapters have no shares
  limits = {device.name: USABLE * device.memory for device in DEVICES}
  over = {name: limit for name, limit in limits.items() if result.memory.total > limit}
  if not over:
    return []
  found = zip(over, smallest_data(result.run, list(over.values())))
  fits = [f"{name} from mesh.data={need[0]} ({size_of(need[1])})" for name, need in found if need]
  if not fits:
    return ["  mesh.shard_state=parameters does not make it fit on any of the others"]
  return [f"  with mesh.shard_state=parameters it fits on {', '.join(fits)}"]


def _baseline_lines(result: DryRun) -> list[str]:
  lines = ["matched baselines: the same configuration with another model.wiring"]
  lines.append(
    f"    {'wiring':14} {'total':>9} {'active':>9} {'FLOPs/token':>12}  experts per token"
  )
  top_k = result.run.model.top_k
  for word, counts in matched_baselines(result.run).items():
    mark = ">" if word == result.run.model.wiring else " "
    if isinstance(counts, str):
      lines.append(f"  {mark} {word:14} cannot be built: {counts}")
      continue
    p, f = counts
    rule = WIRINGS[word]
    experts = f"{rule.routed_per_token(top_k)} routed" if rule.taps else "a dense MLP instead"
    experts += " + shared" if rule.shared_expert else ""
    experts += f", {rule.units_per_moe} MoE blocks share them" if rule.units_per_moe > 1 else ""
    lines.append(
      f"  {mark} {word:14} {number(p.total):>9} {number(p.active):>9} {number(f.training):>12}"
      f"  {experts}"
    )
  lines.append(
    "  Same routed experts everywhere. A shared expert adds an MLP (and a mixing coefficient) to "
    "each MoE block;\n  active parameters and FLOPs follow the experts that a token visits."
  )
  return lines
