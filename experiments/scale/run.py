"""A training step of OLMoE on two GPUs in each `mesh.shard_state`, in turns: time and memory.

  python experiments/scale/run.py --json experiments/scale/results/olmoe.json

The model has as many layers as fit with a whole state on every rank, as the dry run says. An arm's
state does not fit beside another's, so each turn makes its state anew, runs one step, and times the
next ones. Arms:

  none        every rank holds parameters and moments
  moments     ranks share the moments
  parameters  ranks share parameters too, and gather each pair twice
  kept        the same, but the backward pass reads the parameters that the forward pass gathered
  ahead       as parameters, but each pair is gathered beside the pair before it, in both passes
  partitioned          as parameters, but ranks partition embedding and head (mesh.embedding)
  partitioned_moments  as moments, with the same

Memory is that of the compiled step on one device, and that of its parameters and moments. --smoke
runs a tiny model on two simulated devices, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.program import Program
from scmoe.profiling.timer import NO_GPU
from scmoe.run.build import Built, build, vocab_size
from scmoe.run.command_line import simulate
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.fields import with_field
from scmoe.run.summary import device_memory
from scmoe.training.host_update import host_step_of
from scmoe.training.kept import is_kept
from scmoe.training.step import init_state, make_train_step

ARMS = {
  "none": {"mesh.shard_state": "none"},
  "moments": {"mesh.shard_state": "moments"},
  "parameters": {"mesh.shard_state": "parameters"},
  "kept": {"mesh.shard_state": "parameters", "mesh.gather_again": "false"},
  "ahead": {"mesh.shard_state": "parameters", "mesh.gather_ahead": "true"},
  "partitioned": {"mesh.shard_state": "parameters", "mesh.embedding": "partitioned"},
  "partitioned_moments": {"mesh.shard_state": "moments", "mesh.embedding": "partitioned"},
}


def _bytes(leaf: Any) -> int:
  """Bytes of one device's shard, which the host may keep."""
  return leaf.shards[0].nbytes if is_kept(leaf) else leaf.addressable_shards[0].data.nbytes


class Arm:
  """One way to hold the state: a compiled step, and how long it takes."""

  def __init__(self, run: Any):
    self.built: Built = build(run, jax.devices()[: run.mesh.size])
    self.abstract = self.built.abstract_state()
    options = self.built.overlap.compiler_options(gpu=jax.default_backend() == "gpu")
    step = make_train_step(
      self.built.objective,
      self.built.optimizer,
      self.abstract,
      gradient_dtype=run.overlap.gradient_dtype,
      flight=run.overlap.flight,
      embedding_rows=run.overlap.embedding_rows,
    )
    place = batch_sharding(self.built.mesh, leading=1)
    self.batch = jax.device_put(self.built.random_batch(), place)
    self.program = Program(step.lower(self.abstract, self.batch))
    self.compile = functools.partial(self.program.compile, options)
    self.step = host_step_of(step, self.program)
    self.seconds: list[float] = []
    self.state_bytes = 0

  def turn(self, calls: int) -> None:
    """Makes the state, takes one step, and times `calls` steps."""
    state = init_state(self.built.init, self.built.optimizer, 0, self.abstract)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    held = sum(_bytes(leaf) for leaf in leaves)
    self.state_bytes = held
    del leaves
    state, scalars, _ = self.step(state, self.batch)
    jax.block_until_ready((state, scalars))
    begin = time.perf_counter()
    for _ in range(calls):
      state, scalars, _ = self.step(state, self.batch)
    jax.block_until_ready((state, scalars))
    self.seconds.append((time.perf_counter() - begin) / calls)
    self.loss = float(scalars["loss"])

  def figures(self) -> dict[str, Any]:
    """Its entry in the results file."""
    run, middle = self.built.run, statistics.median(self.seconds)
    tokens = run.train.microbatches(run.data.seq_len) * run.train.batch_size * run.data.seq_len
    peak = self.built.peak_flops * run.mesh.size
    flops = self.built.flops_per_token({}) * tokens
    return {
      "ms": round(1e3 * middle, 3),
      "rounds_ms": [round(1e3 * s, 3) for s in self.seconds],
      "tokens_per_second": round(tokens / middle),
      "mfu": round(flops / middle / peak, 4) if peak else None,
      "program_gibibytes": round(self.program.gibibytes, 3),
      "state_bytes": self.state_bytes,
      "compile_s": [round(s, 1) for s in self.program.compile_seconds],
      "loss": round(self.loss, 5),
    }


def planned(args: argparse.Namespace) -> Any:
  """The resolved run of the first arm."""
  name, form = ("quickstart", "smoke") if args.smoke else ("olmoe", "get_config")
  run = load_config(find_config(name), form)
  fields = {"mesh.data": "2", "train.tokens_per_step": "0"}
  if not args.smoke:
    # The data are random: no tokenizer is trained.
    fields |= {"data.tokenizer": "bytes", "train.batch_size": str(args.batch_size)}
  for field, value in (fields | dict(word.split("=", 1) for word in args.fields)).items():
    run = with_field(run, field, value)
  resolve = lambda run: run.resolve(num_devices=2, vocab_size=vocab_size(run.data))
  if args.smoke or args.layers:
    return resolve(with_field(run, "model.num_layers", str(args.layers)) if args.layers else run)
  limit = device_memory()
  for layers in range(run.model.num_layers, 0, -1):
    found = resolve(with_field(run, "model.num_layers", str(layers)))
    if limit is None or dry_run(found).memory.total <= limit:
      return found
  raise SystemExit("no layer of OLMoE fits this device")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("fields", nargs="*", help="SECTION.FIELD=VALUE, for all arms")
  parser.add_argument("--arms", default="none,moments,parameters,kept")
  parser.add_argument("--layers", type=int, default=0, help="0: as many as fit")
  parser.add_argument("--batch_size", type=int, default=8, help="rows of 4,096 tokens, in all")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=4, help="steps that a turn times")
  parser.add_argument("--seconds", type=float, default=200, help="no new round after these")
  parser.add_argument("--smoke", action="store_true")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  begin = time.perf_counter()
  if args.smoke:
    simulate(2)
    args.rounds, args.calls = min(args.rounds, 2), 1
  first, arms = planned(args), {}
  for name in args.arms.split(","):
    run = first
    for field, value in ARMS[name].items():
      run = with_field(run, field, value)
    arms[name] = Arm(run)
  say = lambda text: print(f"[{time.perf_counter() - begin:5.0f} s] {text}", flush=True)
  say(f"{first.model.num_layers} layers, {first.train.batch_size} rows, arms {', '.join(arms)}")
  with concurrent.futures.ThreadPoolExecutor(1 if args.smoke else len(arms)) as pool:
    list(pool.map(lambda arm: arm.compile(), arms.values()))
  say("compiled")
  for number in range(args.rounds):
    if number > 1 and time.perf_counter() - begin > args.seconds:
      break
    for name, arm in arms.items():
      arm.turn(args.calls)
      say(f"{name}: {1e3 * arm.seconds[-1]:.2f} ms")
  device = f"{first.mesh.size} x {jax.devices()[0].device_kind}"
  report = {
    "date": time.strftime("%Y-%m-%d"),
    "device": device,
    "jax": jax.__version__,
    "command": " ".join(["python", *map(shlex.quote, sys.argv)]),
    "layers": first.model.num_layers,
    "rows": first.train.batch_size,
    "arms": {name: arm.figures() for name, arm in arms.items()},
  }
  print(table(report["arms"], device))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def table(arms: dict[str, dict[str, Any]], device: str) -> str:
  """Times and memory of each arm, beside the first's."""
  base = next(iter(arms.values()))
  lines = [] if "cpu" not in device.lower() else [NO_GPU]
  lines.append(f"{'':20}{'ms':>10}{'':8}{'MFU':>8}{'step GiB':>10}{'state GiB':>11}{'':8}  loss")
  for name, own in arms.items():
    mfu = "" if own["mfu"] is None else f"{100 * own['mfu']:.1f} %"
    lines.append(
      f"{name:20}{own['ms']:10.2f}{own['ms'] / base['ms']:7.3f}x{mfu:>8}"
      f"{own['program_gibibytes']:10.2f}{own['state_bytes'] / 2**30:11.3f}"
      f"{own['state_bytes'] / base['state_bytes']:7.2f}x  {own['loss']}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  main()
