"""Predicts the time of a training step on any mesh, from the schedule's model and the links' rates.

Three parts, added up for every microbatch and then for the step:

- Computation of block pairs, dense layers and head: their arithmetic and memory traffic over a
  device's rates (`scmoe.profiling.roofline`). A backward pass counts twice its forward pass, and
  `train.remat` what it recomputes.
- Exchanges of rows: bytes from the step's jaxpr over the links' rates (`scmoe.run.links`). The list
  scheduler (`scmoe.blocks.timeline`) says how much of them has computation beside it.
- Everything else that travels, the update, and copies from the host's memory.

What is hidden beside what is a rule for each kind of traffic; see the attributes of `Prediction`.
Rates do not depend on sizes, no kernel has a launch time, and computation is as fast with an
exchange beside it as without. docs/scale.md compares predictions with measured steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from scmoe.blocks.timeline import (
  Times,
  best_slots,
  makespan,
  sequential_makespan,
  unit_times,
)
from scmoe.profiling.roofline import Machine, StageSeconds, model_times
from scmoe.run.config import RunConfig
from scmoe.run.links import Links
from scmoe.run.modelled import pair_sizes
from scmoe.run.traffic import Traffic

BACKWARD = 2.0  # products of the backward pass for each of the forward pass
EXPERT_AXES = ("expert", "shard")
SEQUENCE = ("sequence_ring", "sequence_heads")
# Bytes that adding a microbatch's float32 gradient reads and writes, over the gradient's own.
ADDED = 3
LOGITS = 4  # times that the loss and its gradient read or write the logits, in float32


@dataclasses.dataclass(frozen=True)
class StepWork:
  """The computation, traffic and memory of one optimizer step on each device.

  Attributes:
    run: resolved.
    mesh: axis of `scmoe.parallel.mesh.AXES` -> its size, in that order.
    traffic: bytes that leave a device.
    gradients: mesh axes over which gradients are added -> bytes that leave a device.
    gathered: mesh axes over which parameters are gathered -> bytes that leave a device.
    state: bytes of parameters and moments on the device.
    totals: bytes of the float32 gradients.
    copies: bytes/s of the link to the host's memory, each way -> seconds of the step's copies; None
      if nothing is copied.
    passes: the same of copies beside the passes: those of experts in the host's memory.
  """

  run: RunConfig
  mesh: Mapping[str, int]
  traffic: Traffic
  gradients: Mapping[tuple[str, ...], float]
  gathered: Mapping[tuple[str, ...], float]
  state: int
  totals: int
  copies: Callable[[float], float] | None = None
  passes: Callable[[float], float] | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Seconds of one optimizer step. All but `exchanges` add up to it.

  Attributes:
    computation: products and memory traffic of all passes, with what is recomputed.
    exchanges: all exchanges of rows, if each were waited for.
    exposed: the part of them beside which the schedule computes nothing.
    gradients: the part of their sums that outlasts the backward pass of the pairs that are left.
      The first pair's sum has nothing beside it. A device sends one thing at a time, so sums wait
      while the exchanges of that pass are hidden.
    parameters: gathers of shares; all of them are waited for.
    attention: what devices that divide rows send; of a ring the part that outlasts the attention's
      own computation, of all-to-alls all.
    tensor: sums over the tensor axis; all of them are waited for.
    embedding: what data ranks that partition the embedding send; all of it is waited for.
    update: the optimizer's memory traffic, the norm of the gradients, and sums over microbatches.
    copies: moments from and to the host's memory; or gradients to the host, and its update. And the
      part of experts' copies that outlasts the passes.
  """

  computation: float
  exchanges: float
  exposed: float
  gradients: float
  parameters: float
  attention: float
  tensor: float
  embedding: float
  update: float
  copies: float

  @property
  def parts(self) -> dict[str, float]:
    """The parts of the step, by name."""
    return {k: v for k, v in dataclasses.asdict(self).items() if k != "exchanges"}

  @property
  def step(self) -> float:
    """Seconds of the whole step."""
    return sum(self.parts.values())

  @property
  def bound(self) -> str:
    """The part that takes the most time."""
    return max(self.parts, key=lambda name: self.parts[name])


def predictable(run: RunConfig) -> str:
  """The reason for which no step of this run can be predicted; "" if one can."""
  rule = run.model.wiring_rule
  if run.model.reads_images:
    return "models of images have no modelled schedule"
  if len(rule.taps) > 1 or rule.units_per_moe > 1:
    return f"model.wiring={run.model.wiring} has two gatings, the model of a schedule knows one"
  if run.model.dtype not in ("bfloat16", "float16"):
    return (
      f"model.dtype={run.model.dtype} has no measured rates, those of 16-bit types are known; set "
      "model.dtype=bfloat16"
    )
  return ""


def not_counted(run: RunConfig) -> list[str]:
  """The options of a run that change its step and are no part of the prediction, as `field=value`.

  Args:
    run: resolved.
  """
  optimizer, microbatches = run.optimizer, run.train.microbatches(run.data.seq_len)
  looks_ahead = bool(run.model.wiring_rule.taps) and run.router.looks_ahead(microbatches)
  found = {
    "router.balance_over=step": looks_ahead,
    f"train.teacher={run.train.teacher}": bool(run.train.teacher),
    f"lora.rank={run.lora.rank}": bool(run.lora.rank),
    f"optimizer.name={optimizer.name}": optimizer.name == "muon",
    f"optimizer.ema={optimizer.ema:g}": bool(optimizer.ema),
    f"overlap.flight={run.overlap.flight}": run.overlap.flight > 1 and microbatches > 1,
    "multitask.plan=equal": bool(run.multitask.names) and run.multitask.plan == "equal",
  }
  return [field for field, counts in found.items() if counts]


def predicted(work: StepWork, machine: Machine, links: Links, bus: float = 0.0) -> Prediction:
  """The prediction for one kind of GPU.

  Args:
    work: of a run that is `predictable`.
    machine: rates of computation; its link is not read.
    links: rates between devices.
    bus: bytes/s between a device and the host's memory, each way; read if there are copies.
  """
  run, traffic = work.run, work.traffic
  count = run.train.microbatches(run.data.seq_len)
  pairs = run.model.num_pairs if run.model.wiring_rule.taps else 0
  stages = _stages(run, machine)
  dense = _dense_layer(stages) * _dense_layers(run)
  forward, exposed_forward, sent = 0.0, 0.0, 0.0
  backward = exposed_backward = again = 0.0
  if run.model.wiring_rule.taps:
    times = pair_times(work, machine, links)
    forward = times.computation
    backward = times.backward(BACKWARD).computation + BACKWARD * times.before
    exposed_forward, exposed_backward = _exposed(times, run)
    sent = 2 * times.communication
    again = {"full": forward, "moe": times.experts}.get(run.train.remat, 0.0)
  dense_again = dense if run.train.remat == "full" else 0.0
  back = pairs * (backward + again) + BACKWARD * dense + dense_again
  passes = pairs * forward + dense + back + _head(run, machine)
  free = back - pairs * (sent / 2 - exposed_backward)  # of exchanges, for sums of gradients
  layers = pairs + _dense_layers(run)
  # With `mesh.shard_state=parameters` each microbatch scatters its gradients, else only the last.
  each = run.mesh.shares_state and run.mesh.shard_state == "parameters"
  scatters = count if each else 1
  seconds = lambda parts: sum(
    links.ring(leaving, links.group(work.mesh, axes)) for axes, leaving in parts.items()
  )
  return Prediction(
    computation=count * passes,
    exchanges=count * pairs * sent,
    exposed=count * pairs * (exposed_forward + exposed_backward),
    gradients=_outlasting(seconds(work.gradients), scatters * free, layers),
    parameters=seconds(work.gathered),
    attention=_attention(work, links, stages),
    tensor=links.ring(traffic.tensor, links.group(work.mesh, ("tensor",))),
    embedding=links.ring(traffic.embedding, links.group(work.mesh, ("data",))),
    update=_update(work, machine, count),
    copies=_copies(work, bus, count * passes),
  )


def _copies(work: StepWork, bus: float, passes: float) -> float:
  """Seconds of copies beside which nothing is computed; `passes` are seconds of computation."""
  beside = work.passes(bus) if work.passes else 0.0
  return max(beside - passes, 0.0) + (work.copies(bus) if work.copies else 0.0)


def _dense_layers(run: RunConfig) -> int:
  """Layers outside of block pairs: those of `model.dense_layers`, or all without experts."""
  model = run.model
  return len(model.dense_indices) if model.wiring_rule.taps else model.num_layers


def _dense_layer(stages: StageSeconds) -> float:
  return stages.projections + stages.mixing + stages.mlp


def _stages(run: RunConfig, machine: Machine) -> StageSeconds:
  """Seconds of a pair's steps, without exchanges.

  Buffers of the capacity transport are computed whole; of other transports only rows that hold a
  choice are.
  """
  sizes = dataclasses.replace(pair_sizes(run), devices=1)
  if not run.dispatch.fixed_buffers:
    sizes = dataclasses.replace(sizes, capacity_factor=1.0)
  return model_times(sizes, machine)


def pair_times(work: StepWork, machine: Machine, links: Links) -> Times:
  """Seconds of the steps of a pair's forward pass, for the models of `scmoe.blocks.timeline`.

  Of four exchanges, forward and backward, each is taken to be as long as the mean.

  Args:
    work, machine, links: see `predicted`.

  Raises:
    ConfigError: the model has no experts.
  """
  run, traffic, stages = work.run, work.traffic, _stages(work.run, machine)
  exchanges = 4 * run.train.microbatches(run.data.seq_len) * run.model.num_pairs
  seconds = links.all_to_all(traffic.all_to_all / exchanges, links.group(work.mesh, EXPERT_AXES))
  seconds += links.latency * traffic.exchanges / exchanges
  durations = dataclasses.asdict(stages) | {"dispatch": seconds, "combine": seconds}
  return unit_times(run.model.wiring_rule, run.model.moe_every, durations)


def _exposed(times: Times, run: RunConfig) -> tuple[float, float]:
  """Seconds of a pair's exchanges with nothing beside them, forward and backward.

  `overlap.schedule` says where the experts stand; with `auto` they stand where it is best. Chunks
  are not modelled.
  """
  backward = times.backward(BACKWARD)
  wait = lambda end, of: max(end - of.computation, 0.0)
  if run.overlap.schedule == "off":
    return times.communication, wait(sequential_makespan(backward), backward)
  slots = best_slots(times, BACKWARD)
  if run.overlap.schedule != "auto":
    first = run.overlap.schedule.split(",")[0].strip()
    slots = (first, first) if first in times.slots else (times.slots[-1],) * 2
  mirror = backward.slots[len(times.slots) - 1 - times.slots.index(slots[1])]
  return wait(makespan(times, slots[0]), times), wait(makespan(backward, mirror), backward)


def _head(run: RunConfig, machine: Machine) -> float:
  """Seconds of the products with the output matrix, and of the loss, in all passes."""
  sizes, vocabulary = pair_sizes(run), run.model.vocab_size / run.mesh.tensor
  products = 2 * sizes.tokens * sizes.width * vocabulary * (1 + BACKWARD) / machine.flops
  return products + LOGITS * 4 * sizes.tokens * vocabulary / machine.memory


def _outlasting(seconds: float, beside: float, layers: int) -> float:
  """Seconds of sums that go on after the computation beside them; the last layer's has none."""
  return max(seconds / layers, seconds - beside * (layers - 1) / layers)


def _attention(work: StepWork, links: Links, stages: StageSeconds) -> float:
  """Exposed seconds of what devices that divide rows send to each other, in the whole step."""
  run = work.run
  parts, group = run.mesh.sequence, links.group(work.mesh, SEQUENCE)
  if run.mesh.sequence_attention != "ring":
    return links.all_to_all(work.traffic.sequence, group)
  times = 1 + BACKWARD + (run.train.remat == "full")
  layers = run.model.num_layers * run.train.microbatches(run.data.seq_len)
  beside = times * layers * stages.mixing * (parts - 1) / parts
  return max(links.neighbour(work.traffic.sequence, group) - beside, 0.0)


def _update(work: StepWork, machine: Machine, count: int) -> float:
  """Seconds of the update.

  It reads and writes the state and reads the gradients twice, since their norm comes first. With
  several microbatches, each adds its gradients to the totals.
  """
  added = count * ADDED * work.totals if count > 1 else 0
  mesh = work.run.mesh
  if mesh.moments_in != "device" and mesh.moments_update == "host":
    return (work.totals + added) / machine.memory  # `copies` has the rest
  return (2 * work.state + 2 * work.totals + added) / machine.memory
