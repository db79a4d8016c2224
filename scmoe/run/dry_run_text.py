"""The text that `--dry_run` prints."""

from __future__ import annotations

import dataclasses

from scmoe.base.sizes import number, size_of
from scmoe.blocks.wiring import WIRINGS
from scmoe.models.flops import Flops, Parameters
from scmoe.run import traffic
from scmoe.run.cluster import HOSTS_OF_8, Cluster, prediction_table
from scmoe.run.config import RunConfig
from scmoe.run.dry_run import DryRun, matched_baselines
from scmoe.run.estimates import DEVICES, USABLE, device_table
from scmoe.run.modality import modality_of
from scmoe.run.nearest import all_shared, changed_fields, on_as_many_devices, smallest_data


def report(result: DryRun, cluster: Cluster = HOSTS_OF_8) -> str:
  """The text that `--dry_run` prints.

  Args:
    result: of `dry_run`.
    cluster: how the GPUs of the predicted step are joined.
  """
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
    *prediction_table(result.work, tokens, cluster),
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
  names["copies"] = "parameters in the compute type"
  names["frozen"] = "frozen parameters"
  computes = mesh.moments_update == "host"
  names["arriving"] = f"{'gradients' if computes else 'moments'} of layers under way"
  if memory.experts:
    names["arriving"] = "or in the update, layers under way"
    names["experts"] = "experts under way, in the passes"
  for kind, size in dataclasses.asdict(memory).items():
    if kind in ("gathered", "copies", "frozen", "arriving", "experts") and not size:
      continue
    lines.append(f"  {names.get(kind, kind):36} {size_of(size):>12}")
  lines.append(f"  {'total':36} {size_of(memory.total):>12}")
  for times, larger in result.larger.items():  # with fewer microbatches fewer gradients are added
    name = f"total with train.batch_size={times * result.run.train.batch_size}"
    lines.append(f"  {name:36} {size_of(larger.total):>12}")
  if (away := result.away) is not None:
    name = "in the host's memory, per device"
    if away.filed:
      lines.append(f"  {'in files, per device':36} {size_of(away.total):>12}")
    lines.append(f"  {name:36} {size_of(away.in_memory):>12}")
    if computes:
      lines.append(f"  {'gradients on their way there':36} {size_of(away.staging):>12}")
    name = "more there when it resumes" if away.filed else "more there during a save"
    lines.append(f"  {name:36} {size_of(away.saving):>12}")
  return lines


def _sharing_lines(result: DryRun) -> list[str]:
  """Names meshes with which the step fits on GPUs where it now does not.

  First those of as many devices, then the smallest `mesh.data` whose ranks share all state. No line
  if the step fits everywhere, or trains adapters.
  """
  if result.run.lora.rank:
    return []  # adapters have no shares
  limits = {device.name: USABLE * device.memory for device in DEVICES}
  over = {name: limit for name, limit in limits.items() if result.memory.total > limit}
  if not over:
    return []
  run, limits = result.run, list(over.values())
  near = zip(over, on_as_many_devices(run, result.memory, limits))
  same: dict[str, list[str]] = {}
  for name, mesh in near:
    if mesh:
      same.setdefault(f"{changed_fields(run.mesh, mesh[0])} ({size_of(mesh[1])})", []).append(name)
  lines = [
    f"  on as many devices it fits on {', '.join(names)} with {words}"
    for words, names in same.items()
  ]
  found = zip(over, smallest_data(run, limits))
  fits = [f"{name} from mesh.data={need[0]} ({size_of(need[1])})" for name, need in found if need]
  if not fits:
    return [
      *lines,
      f"  more ranks with {all_shared(run.mesh)} make it fit on none of the others",
    ]
  return [*lines, f"  with {all_shared(run.mesh)} it fits on {', '.join(fits)}"]


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
