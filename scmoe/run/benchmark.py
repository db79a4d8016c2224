"""`python -m scmoe.generate --benchmark`: times prefill and decode of several wirings, or of
several ways to hold experts in the host's memory.

Each combination of wiring and way is an arm; `scmoe.profiling.timer` times the arms in turns.
Weights are random. A fresh router balances worse than a trained one, which changes the times of
routed experts and the hits of an expert cache; other times do not depend on weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.inference.decode import Static, make_decode, make_prefill, one_by_one, taken_apart
from scmoe.inference.offload import trace as expert_trace
from scmoe.inference.offload.model import Usage, is_routed, to_memory
from scmoe.inference.offload.needs import Workload
from scmoe.inference.offload.plan import OffloadRequest
from scmoe.inference.sampling import Sampling
from scmoe.models.gpt import GPT
from scmoe.models.objective import cast_params
from scmoe.models.stacked import Apart
from scmoe.offload.memory import HOST
from scmoe.profiling.timer import NO_GPU, Timing, calls_in, interleave, speed_up
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.modality import needs_text
from scmoe.run.programs import Programs

_SAMPLE_SECONDS = 0.2  # decoding is called for so long between two readings of the clock


def offload_request(name: str, base: OffloadRequest = OffloadRequest()) -> OffloadRequest:
  """Reads one of the ways of `--ways` to hold the experts.

  Args:
    name: none, blocking, early or ring, or two of them as PREFILL,DECODE. +N adds a cache of N
      experts of every layer: `ring,early+4`.
    base: gives all other fields.

  Raises:
    ConfigError: no number follows the +.
  """
  way, plus, size = name.strip().partition("+")
  if plus and not size.isdecimal():
    raise ConfigError(f"ways={name!r}: a number of experts follows the +, as in early+4")
  return dataclasses.replace(base, offload=way.strip(), expert_cache=int(size or 0))


def name_of(request: OffloadRequest) -> str:
  """The name of an offload request; `offload_request` reads it back."""
  return request.offload + (f"+{request.expert_cache}" if request.expert_cache > 0 else "")


RESIDENT = OffloadRequest(offload="none", expert_cache=0)


class _Arm:
  """One wiring with one way to hold its experts: prefill and decode on random weights."""

  def __init__(self, run: RunConfig, load: Workload, folder: Path, way: OffloadRequest):
    built = build.build(run)
    self.model, self.offload = random_model(built, way), way.named
    self.router = self.model.init_router()
    graph, self.params = nnx.split(self.model)
    self.programs = Programs(built.overlap, folder)
    # With random weights, greedy decoding soon repeats a token, and so chooses the same experts.
    sampling = Sampling(temperature=0.0 if way.offload == "none" else 1.0)
    offload, deterministic = self.offload.checked(self.model), run.train.deterministic
    static = Static(graph, built.mesh, sampling, offload, deterministic)
    self.apart = taken_apart(static, self.params)  # once for all tokens
    self.prefill = self.programs(make_prefill(static, load.prompt + load.new + 1))
    in_order = one_by_one(self.model, static.offload, load.rows)
    self.decode = self.programs(make_decode(static, load.new, in_order))
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (load.rows, load.prompt))
    self.tokens_BS = jnp.asarray(tokens, jnp.int32)
    self.lengths_B = jnp.full((load.rows,), load.prompt, jnp.int32)
    self.state: Any = None
    # Made outside the timed calls, as generation makes its key once.
    self.keys = itertools.cycle(list(jax.random.split(jax.random.key(0), 8)))
    self.usage = Usage()

  def run_prefill(self, calls: int) -> None:
    given = self.params, self.router, self.lengths_B, jax.random.key(0)
    for _ in range(calls):
      self.state = None  # the caches of one prefill at a time
      self.state = self.prefill(*given, self.tokens_BS)
    jax.block_until_ready(self.state)

  def run_decode(self, calls: int) -> None:
    if self.state is None:
      self.run_prefill(1)
    for _ in range(calls):
      assert self.state is not None
      first_B, caches = self.state
      # Every call writes the same positions of the caches again.
      given = self.apart, self.router, self.lengths_B, next(self.keys)
      self.state = first_B, self.decode(*given, np.int32(1), first_B, caches)[2]
    jax.block_until_ready(self.state)

  def count(self) -> None:
    """Decodes once more and counts the lookups in the expert caches."""
    if not self.offload.cache_size:
      return
    first_B, caches = self.state
    self.usage.begin(caches["experts"], self.offload.policy)
    given = self.apart, self.router, self.lengths_B, jax.random.key(0)
    _, _, caches, asked = self.decode(*given, np.int32(1), first_B, caches)
    self.usage.add(asked, caches["experts"])
    self.state = first_B, caches

  def warm_up(self) -> None:
    """Runs both programs until XLA has compiled them for the last time."""
    for run in (self.run_prefill, self.run_decode):
      run(1)
      while not self.programs.settled:
        run(1)

  def memory(self) -> dict[str, int]:
    """Bytes of each device's memory ("device") and of the host's ("host") for the larger program.

    Of the device's memory all counts: arguments, results and temporary values. Of the host's
    memory the arguments count.
    """
    analyses = [program.memory_analysis() for program in self.programs.compiled]
    found = [a for a in analyses if a is not None]
    device = lambda a: (
      a.argument_size_in_bytes + a.temp_size_in_bytes + a.output_size_in_bytes
      - a.alias_size_in_bytes
    )  # fmt: skip
    return {
      "device": max(map(device, found), default=0),
      "host": max((a.host_argument_size_in_bytes for a in found), default=0),
    }


def random_model(built: build.Built, way: OffloadRequest = RESIDENT, seed: int = 0) -> GPT:
  """A model with random weights in the compute type, its experts held as `way` says.

  The device makes the experts of one layer at a time, since those of all layers may not fit. The
  weights are the same for every way.

  Args:
    built: objects of the run.
    way: where its experts are held.
    seed: seed of the weights.
  """
  dtype, key = built.run.model.dtype, jax.random.key(seed)
  pairs, is_param = built.run.model.num_pairs, lambda x: isinstance(x, nnx.Variable)
  flat, tree = jax.tree_util.tree_flatten_with_path(built.shapes)
  routed = [is_routed(path, leaf) for path, leaf in flat]

  def others() -> list[Any]:
    leaves = jax.tree.leaves(cast_params(built.init(key)[0], dtype))
    return [None if own else leaf for leaf, own in zip(leaves, routed)]

  places = [None if own else leaf.sharding for (_, leaf), own in zip(flat, routed)]
  leaves = jax.jit(others, out_shardings=places)()
  away = way.named.decode is not None
  for at, (_, leaf) in enumerate(flat):
    if not routed[at]:
      continue
    own = NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
    of_key = jax.random.fold_in(key, at)
    draw = lambda key, shape=leaf.shape[1:]: (
      built.run.model.init_std * jax.random.normal(key, shape, jnp.float32)
    ).astype(dtype)
    if not away:
      every = lambda of_key=of_key, draw=draw: jnp.stack(
        [draw(jax.random.fold_in(of_key, i)) for i in range(pairs)]
      )
      leaves[at] = jax.jit(every, out_shardings=leaf.sharding)()
      continue
    one = jax.jit(draw, out_shardings=own)
    parts = (one(jax.random.fold_in(of_key, i)) for i in range(pairs))
    leaves[at] = Apart(tuple(to_memory(part, own, HOST, int8=way.int8_experts) for part in parts))
  if not away:
    return built.model(jax.tree.unflatten(tree, leaves))
  model = built.model(jax.tree.unflatten(tree, [jnp.zeros((0,)) for _ in leaves]))
  graph, params = nnx.split(model)
  paths, params_tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)
  laid = []
  for (path, param), leaf in zip(paths, leaves):
    inside = jax.tree_util.keystr(path).startswith("['stages']")
    if inside and not isinstance(leaf, Apart):
      leaf = Apart(tuple(leaf[i] for i in range(pairs)))
    laid.append(param.replace(leaf))
  model = nnx.merge(graph, jax.tree.unflatten(params_tree, laid))
  model.overlap = dataclasses.replace(model.overlap, unroll=0)
  return model


def benchmark(
  run: RunConfig,
  names: Sequence[str],
  load: Workload,
  workdir: Path,
  *,
  rounds: int = 5,
  ways: Sequence[OffloadRequest] = (RESIDENT,),
) -> tuple[str, dict[str, Any]]:
  """Times prefill and decode of every wiring with every way to hold its experts.

  Args:
    run: configuration, not resolved; its mesh is used.
    names: wirings; speed-ups are over the first.
    load: number and length of the prompts, and of the new tokens.
    workdir: where profiles are kept.
    rounds: how often each arm is timed.
    ways: how experts are held.

  Returns:
    The table to print, and its figures as JSON.

  Raises:
    ConfigError: the load does not fit the model or the mesh.
  """
  needs_text(run, "scmoe.generate --config")
  arms = {}
  for name in names:
    own = build.with_wiring(run, name).resolve(
      num_devices=jax.device_count(), vocab_size=build.vocab_size(run.data)
    )
    _check(own, load)
    for way in ways:
      arm = name if len(ways) == 1 else f"{name} {name_of(way)}"
      arms[arm] = _Arm(own, load, workdir / name, way)
      arms[arm].warm_up()
  prefill = interleave({n: a.run_prefill for n, a in arms.items()}, rounds=rounds, calls=1)
  # Several calls are timed together, because generation starts a call before it reads the result of
  # the last. With an expert cache it does not: it reads each call's lookups first.
  waits = [name for name, arm in arms.items() if arm.offload.cache_size]
  calls = {
    name: 1 if name in waits else calls_in(arm.run_decode, _SAMPLE_SECONDS, least=1)
    for name, arm in arms.items()
  }
  decode = interleave({n: a.run_decode for n, a in arms.items()}, rounds=rounds, calls=calls)
  gpu = jax.default_backend() == "gpu"
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
  what = f"{load.rows} prompts of {load.prompt} tokens, {load.new} new tokens each"
  lines = [f"generation of {run.name}, {what}, {device}, {time.strftime('%Y-%m-%d')}"]
  if not gpu:
    lines.append(NO_GPU)
  wide = max(16, *(len(name) + 2 for name in arms))
  line = f"{{:{wide}s}}{{:>14s}}{{:>16s}}{{:>10s}}{{:>14s}}{{:>16s}}{{:>10s}}".format
  lines.append(line("wiring", "prefill ms", "tokens/s", "", "decode ms", "tokens/s", ""))
  figures: dict[str, Any] = {"device": device, "gpu": gpu, "load": dataclasses.asdict(load)}
  figures["arms"] = {}
  tokens = load.rows * load.prompt, load.rows * load.new
  base = next(iter(arms))
  for name, arm in arms.items():
    cells, found = [], {}
    for part, timings, count in zip(("prefill", "decode"), (prefill, decode), tokens):
      timing: Timing = timings[name]
      rate, gain = count / timing.median, speed_up(timings[base], timing)
      cells += [f"{1e3 * timing.median:.3f}", f"{rate:,.0f}", f"{gain:.2f}x"]
      found[part] = {"wall": timing.as_json(), "tokens_per_s": round(rate), "speed_up": gain}
    arm.count()
    found["memory"] = arm.memory()
    if arm.usage.requests:
      found["experts"] = _cache_figures(arm)
    lines.append(line(name, *cells))
    figures["arms"][name] = found
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  figures["peak_memory"] = max(found.get("peak_bytes_in_use", 0) for found in stats)
  if len(ways) > 1 or ways[0].offload != "none":
    lines += _way_lines(figures["arms"])
  return "\n".join(lines), figures


def _cache_figures(arm: _Arm) -> dict[str, float]:
  """Lookups and hit rate of an arm's expert cache, and the hit rates that other policies give."""
  usage = arm.usage
  found = {"requests": usage.requests, "misses": usage.misses, "hit_rate": usage.hit_rate}
  if len(usage.held[0][0]) == arm.offload.cache_size:  # one device
    found |= {policy: usage.hit_rate_of(policy) for policy in expert_trace.POLICIES}
  return found


def _way_lines(arms: dict[str, dict[str, Any]]) -> list[str]:
  """Lines on memory and cache hits of every arm, and on the time that an early copy saves.

  The saving is the share of the time that `blocking` adds to `none`. It is put into `arms` too.
  """
  lines = []
  median = lambda name, part: arms[name][part]["wall"]["ms"]
  for name, found in arms.items():
    memory = found["memory"]
    text = (
      f"{name}: {size_of(memory['device'])} of the device, {size_of(memory['host'])} of the host"
    )
    if experts := found.get("experts"):
      rates = ", ".join(
        f"{n} {100 * experts[n]:.0f} %" for n in expert_trace.POLICIES if n in experts
      )
      text += f"; {100 * experts['hit_rate']:.0f} % of the lookups hit the cache ({rates})"
    lines.append(text)
  for early in (name for name in arms if name.endswith(" early")):
    none, blocking = (early.removesuffix("early") + way for way in ("none", "blocking"))
    if none in arms and blocking in arms:
      for part in ("prefill", "decode"):
        added = median(blocking, part) - median(none, part)
        share = (median(blocking, part) - median(early, part)) / added if added > 0 else 0.0
        arms[early][part]["share_of_added_removed"] = share
        lines.append(f"{early}: saves {100 * share:.0f} % of the time that blocking adds to {part}")
  return lines


def _check(run: RunConfig, load: Workload) -> None:
  shards = run.mesh.token_shards
  if load.rows % shards:
    raise ConfigError(
      f"--batch={load.rows} does not divide over the {shards} batch shards of the mesh; use a "
      f"multiple of {shards}"
    )
  if load.prompt + load.new + 1 > run.model.context:
    raise ConfigError(
      f"--prompt_tokens={load.prompt} and --max_new_tokens={load.new} need "
      f"{load.prompt + load.new + 1} positions, model.context={run.model.context}; shorten one"
    )
