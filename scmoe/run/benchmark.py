"""Prefill and decode in turns, of several wirings or of several ways to hold experts in the host's
memory: `python -m scmoe.generate --benchmark`.

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
from scmoe.inference.offload.model import HOST, Usage, is_routed, to_memory
from scmoe.inference.offload.plan import OffloadRequest, Workload
from scmoe.inference.sampling import Sampling
from scmoe.models.gpt import GPT
from scmoe.models.objective import cast_params
from scmoe.models.stacked import Apart
from scmoe.profiling.timer import NO_GPU, Timing, calls_in, interleave, speed_up
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.programs import Programs

_SAMPLE_SECONDS = 0.2  # calls of decoding that are timed together


def offload_request(name: str, base: OffloadRequest = OffloadRequest()) -> OffloadRequest:
  """Reads how an arm holds its experts.

  Args:
    name: none, blocking, early, ring, or two of them for prefill,decode; +N for a cache of N
      experts of every layer: `ring,early+4`.
    base: all other fields.

  Raises:
    ConfigError: no number follows the +.
  """
  way, plus, size = name.strip().partition("+")
  if plus and not size.isdecimal():
    raise ConfigError(f"--ways={name!r}: a number of experts follows the +, as in early+4")
  return dataclasses.replace(base, way=way.strip(), cache_size=int(size or 0))


def name_of(request: OffloadRequest) -> str:
  """The name of an offload request; `offload_request` reads it back."""
  return request.way + (f"+{request.cache_size}" if request.cache_size > 0 else "")


RESIDENT = OffloadRequest(way="none", cache_size=0)


class _Arm:
  """One wiring and one way: its prefill and its decode, compiled, on random weights."""

  def __init__(self, run: RunConfig, load: Workload, folder: Path, way: OffloadRequest):
    built = build.build(run)
    self.model, self.offload = random_model(built, way), way.offload
    self.router = self.model.init_router()
    graph, self.params = nnx.split(self.model)
    self.programs = Programs(built.overlap, folder)
    # Greedy tokens of random weights soon repeat, and with them their experts.
    sampling = Sampling(temperature=0.0 if way.way == "none" else 1.0)
    static = Static(graph, built.mesh, sampling, self.offload.checked(self.model))
    self.apart = taken_apart(static, self.params)  # once for all tokens
    self.prefill = self.programs(make_prefill(static, load.prompt + load.new + 1))
    in_order = one_by_one(self.model, static.offload, load.rows)
    self.decode = self.programs(make_decode(static, load.new, in_order))
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (load.rows, load.prompt))
    self.tokens_BS = jnp.asarray(tokens, jnp.int32)
    self.lengths_B = jnp.full((load.rows,), load.prompt, jnp.int32)
    self.state: Any = None
    # Generation makes its key once, too.
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
      # Every call writes the same positions again, with tokens of its own.
      given = self.apart, self.router, self.lengths_B, next(self.keys)
      self.state = first_B, self.decode(*given, np.int32(1), first_B, caches)[2]
    jax.block_until_ready(self.state)

  def count(self) -> None:
    """Decodes once more and counts the lookups in the expert caches."""
    if not self.offload.cache_size:
      return
    first_B, caches = self.state
    self.usage.begin(caches["experts"])
    given = self.apart, self.router, self.lengths_B, jax.random.key(0)
    _, _, caches, asked = self.decode(*given, np.int32(1), first_B, caches)
    self.usage.add(asked, caches["experts"])
    self.state = first_B, caches

  def warm_up(self) -> None:
    """Runs both programs until compilation and profiling are over."""
    for run in (self.run_prefill, self.run_decode):
      run(1)
      while not self.programs.settled:
        run(1)

  def memory(self) -> dict[str, int]:
    """Bytes of each device that the two programs take, arguments included, and of the host."""
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
  """A model with random weights in the types in which they are computed, as a way holds them.

  The experts of one layer at a time are made on the device: all of them need not fit it. The
  weights are the same for every way.

  Args:
    built: of the run.
    way: how its experts are held.
    seed: of the weights.
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
  away = way.offload.decode is not None
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
    leaves[at] = Apart(tuple(to_memory(part, own, HOST, int8=way.int8) for part in parts))
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
  """The table that is printed, and the figures behind it.

  Args:
    run: not resolved; its mesh is used.
    names: wirings; the first is the base of the comparison.
    load: what each is given.
    workdir: where profiles are kept.
    rounds: turns of every arm.
    ways: of every wiring; an arm each.

  Raises:
    ConfigError: the load does not fit the model or the mesh.
  """
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
  # Calls follow each other as in a generation, which begins one before it reads the last; not where
  # it counts what a call asked of the experts' caches.
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
      found["experts"] = _of_cache(arm)
    lines.append(line(name, *cells))
    figures["arms"][name] = found
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  figures["peak_memory"] = max(found.get("peak_bytes_in_use", 0) for found in stats)
  if len(ways) > 1 or ways[0].way != "none":
    lines += _of_ways(figures["arms"])
  return "\n".join(lines), figures


def _of_cache(arm: _Arm) -> dict[str, float]:
  usage = arm.usage
  found = {"requests": usage.requests, "misses": usage.misses, "hit_rate": usage.hit_rate}
  if len(usage.held[0][0]) == arm.offload.cache_size:  # one device
    found |= {policy: usage.hit_rate_of(policy) for policy in expert_trace.POLICIES}
  return found


def _of_ways(arms: dict[str, dict[str, Any]]) -> list[str]:
  """Memory of every arm, hits of its cache, and how much of what blocking adds an early copy takes
  away, of prefill and decode."""
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
      text += f"; {100 * experts['hit_rate']:.0f} % of the experts found ({rates})"
    lines.append(text)
  for early in (name for name in arms if name.endswith(" early")):
    none, blocking = (early.removesuffix("early") + way for way in ("none", "blocking"))
    if none in arms and blocking in arms:
      for part in ("prefill", "decode"):
        added = median(blocking, part) - median(none, part)
        share = (median(blocking, part) - median(early, part)) / added if added > 0 else 0.0
        arms[early][part]["share_of_added_removed"] = share
        lines.append(f"{early}: {100 * share:.0f} % of what blocking adds to {part} is gone")
  return lines


def _check(run: RunConfig, load: Workload) -> None:
  shards = run.mesh.batch_shards
  if load.rows % shards:
    raise ConfigError(
      f"--batch={load.rows} does not divide over the {shards} parts of the mesh; use a multiple "
      f"of {shards}"
    )
  if load.prompt + load.new + 1 > run.model.context:
    raise ConfigError(
      f"--prompt_tokens={load.prompt} and --max_new_tokens={load.new} need "
      f"{load.prompt + load.new + 1} positions, model.context={run.model.context}; shorten one"
    )
