"""Prefill and decode of several wirings, in turns: `python -m scmoe.generate --benchmark`.

Weights are random: they change no time but that of the router's balance, which fresh weights make
worse than a trained router's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scmoe import build
from scmoe.config import RunConfig
from scmoe.errors import ConfigError
from scmoe.inference.decode import Static, make_decode, make_prefill
from scmoe.inference.sampling import Sampling
from scmoe.models.objective import cast_params
from scmoe.profiling.timer import NO_GPU, Timing, interleave, speed_up
from scmoe.programs import Programs


@dataclasses.dataclass(frozen=True)
class Load:
  """What every wiring is given.

  Attributes:
    rows: prompts.
    prompt: tokens of each.
    new: tokens to add to each.
  """

  rows: int
  prompt: int
  new: int


class _Arm:
  """One wiring: its prefill and its decode, compiled, on random weights."""

  def __init__(self, run: RunConfig, load: Load, folder: Path):
    built = build.build(run)
    shards = build.shardings_of(built.shapes)
    init = jax.jit(lambda: cast_params(built.init(jax.random.key(0))[0], run.model.dtype),
                   out_shardings=shards)  # fmt: skip
    model = built.model(init())
    self.router = model.init_router()
    graph, self.params = nnx.split(model)
    self.programs = Programs(built.overlap, folder)
    static = Static(graph, built.mesh, Sampling(temperature=0.0))
    self.prefill = self.programs(make_prefill(static, load.prompt + load.new + 1))
    self.decode = self.programs(make_decode(static, load.new))
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (load.rows, load.prompt))
    self.tokens_BS = jnp.asarray(tokens, jnp.int32)
    self.lengths_B = jnp.full((load.rows,), load.prompt, jnp.int32)
    self.state: Any = None

  def run_prefill(self, calls: int) -> None:
    given = self.params, self.router, self.lengths_B, jax.random.key(0)
    for _ in range(calls):
      self.state = None  # the caches of one prefill at a time
      self.state = self.prefill(*given, self.tokens_BS)
    jax.block_until_ready(self.state)

  def run_decode(self, calls: int) -> None:
    given = self.params, self.router, self.lengths_B, jax.random.key(0)
    if self.state is None:
      self.run_prefill(1)
    for _ in range(calls):
      assert self.state is not None
      first_B, caches = self.state
      # Every call writes the same positions again.
      self.state = first_B, self.decode(*given, np.int32(1), first_B, caches)[2]
    jax.block_until_ready(self.state)

  def warm_up(self) -> None:
    """Past compilation and profile."""
    for run in (self.run_prefill, self.run_decode):
      run(1)
      while not self.programs.settled:
        run(1)


def benchmark(
  run: RunConfig, names: Sequence[str], load: Load, workdir: Path, *, rounds: int = 5
) -> tuple[str, dict[str, Any]]:
  """The table that is printed, and the figures behind it.

  Args:
    run: not resolved; its mesh is used.
    names: wirings; the first is the base of the comparison.
    load: what each is given.
    workdir: where profiles are kept.
    rounds: turns of every wiring.

  Raises:
    ConfigError: the load does not fit the model or the mesh.
  """
  arms = {}
  for name in names:
    own = build.with_wiring(run, name).resolve(
      num_devices=jax.device_count(), vocab_size=build.vocab_size(run.data)
    )
    _check(own, load)
    arms[name] = _Arm(own, load, workdir / name)
    arms[name].warm_up()
  prefill = interleave({n: a.run_prefill for n, a in arms.items()}, rounds=rounds, calls=1)
  decode = interleave({n: a.run_decode for n, a in arms.items()}, rounds=rounds, calls=1)
  gpu = jax.default_backend() == "gpu"
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
  what = f"{load.rows} prompts of {load.prompt} tokens, {load.new} new tokens each"
  lines = [f"generation of {run.name}, {what}, {device}, {time.strftime('%Y-%m-%d')}"]
  if not gpu:
    lines.append(NO_GPU)
  line = "{:16s}{:>14s}{:>16s}{:>10s}{:>14s}{:>16s}{:>10s}".format
  lines.append(line("wiring", "prefill ms", "tokens/s", "", "decode ms", "tokens/s", ""))
  figures: dict[str, Any] = {"device": device, "gpu": gpu, "load": dataclasses.asdict(load)}
  figures["arms"] = {}
  tokens = load.rows * load.prompt, load.rows * load.new
  for name in names:
    cells, found = [], {}
    for part, timings, count in zip(("prefill", "decode"), (prefill, decode), tokens):
      timing: Timing = timings[name]
      rate, gain = count / timing.median, speed_up(timings[names[0]], timing)
      cells += [f"{1e3 * timing.median:.3f}", f"{rate:,.0f}", f"{gain:.2f}x"]
      found[part] = {"wall": timing.as_json(), "tokens_per_s": round(rate), "speed_up": gain}
    lines.append(line(name, *cells))
    figures["arms"][name] = found
  return "\n".join(lines), figures


def _check(run: RunConfig, load: Load) -> None:
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
