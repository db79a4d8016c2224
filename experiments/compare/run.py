"""Two commits of this project side by side on one machine, in turns.

  git worktree add ../before 6ec4f97
  python experiments/compare/run.py --before ../before --tasks layer,olmoe --json OUT      # 1 GPU
  python experiments/compare/run.py --before ../before --tasks exchange,medium --json OUT  # 2 GPUs

A task is a set of arms that both commits have:

  layer      forward, and forward + backward, of `scmoe.bench.layer --layer`'s seven shapes, the
             gate in bfloat16 as 3495333 had it; `gate32`: as the model's, float32 (after only)
  olmoe      a training step of 3 of OLMoE's layers, batch 4 x 4096, on one GPU (both commits'
             states and temporaries are there at once)
  exchange   dispatch + combine of experiments/dispatch/run.py: 8 layers, balanced and Zipf
  medium     a training step of 8 layers of gpt2_moe_medium, 2-way experts, batch 8 x 2048
  medium8    the same on one GPU
  medium24   a training step of gpt2_moe_medium as its file has it, on one GPU
  decode     64 tokens after a prompt of 128, 1, 8 and 64 rows: 4 of OLMoE's layers, one GPU

The oldest commit that it knows is 3495333, whose functions had other arguments and whose modules
had other addresses: a worker asks its checkout which it has. Each commit runs in a process of its
own, which compiles its arms and then waits for its turns. Both hold their memory all the time and
take turns on the GPUs: in a round every arm of both runs once, in random order, and a median is
over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arms import Silent, Worker, say

SHAPES = "7B-256 7B-1024 30B-512 120B-1024 OLMoE Qwen3-30B Mixtral"
TRANSPORTS = "all_to_all,capacity,dropless"
BEFORE, AFTER = "before", "after"
Arms = dict[str, Callable[[int], object]]


# -- the worker: the arms of one commit -----------------------------------------------------------


def module(*addresses: str) -> Any:
  """The first of a module's addresses, newest first, that this checkout has."""
  import importlib

  for address in addresses[:-1]:
    with contextlib.suppress(ModuleNotFoundError):
      return importlib.import_module(address)
  return importlib.import_module(addresses[-1])


def layer_arms(before: bool, args: argparse.Namespace) -> Arms:
  bench = module("scmoe.bench.layer", "scmoe.kernels.bench")
  arms: Arms = {}
  old = hasattr(bench, "layer_inputs")  # up to 3495333
  for name in args.shapes.split():
    shape, seed = bench.parse_shape(name), 0
    for gate in ("gate16",) if before else args.gates.split():
      if old:
        forward, both = bench.training_functions(shape, "auto")
        given = bench.layer_inputs(shape, seed)
      else:
        layer = bench.Layer(shape, fp32_gate=gate == "gate32")
        forward, both = bench.training_functions(layer)
        given = inputs_of_before(bench, layer, seed)
      dy = bench.normal_arrays(1)(*given[0].shape)
      arms[f"{name} forward {gate}"] = calls_of(forward.lower(*given).compile(), given)
      arms[f"{name} both {gate}"] = calls_of(both.lower(dy, *given).compile(), (dy, *given))
  return arms


def inputs_of_before(bench, layer, seed: int) -> tuple:
  """(x, parameters) of a layer with the arrays of 3495333's `bench.layer_inputs`.

  Another router gives experts other numbers of tokens, hence other numbers of row tiles: 8,192
  tokens over Mixtral's 8 experts are 130 or 131 tiles of 128 rows, as much as is measured here.
  """
  import jax

  s, normal = layer.shape, bench.normal_arrays(seed)
  arrays = {
    "x": normal(s.tokens, s.width),
    "weight": normal(s.width, s.experts, scale=s.width**-0.5),  # the router's
    "gate": normal(s.experts, s.width, s.hidden, scale=s.width**-0.5),
    "up": normal(s.experts, s.width, s.hidden, scale=s.width**-0.5),
    "down": normal(s.experts, s.hidden, s.width, scale=s.hidden**-0.5),
  }

  def leaf(path, like):
    [name] = {key.key for key in path if hasattr(key, "key")} & set(arrays)
    assert arrays[name].shape == like.shape, (name, like.shape)
    return arrays[name].astype(like.dtype)

  params = jax.eval_shape(layer.params, seed)
  return arrays["x"], jax.tree_util.tree_map_with_path(leaf, params)


def olmoe_arms(before: bool, args: argparse.Namespace) -> Arms:
  return {"step": step_arm("olmoe", layers=3, batch=4, expert=1, args=args)}


def medium_arms(before: bool, args: argparse.Namespace) -> Arms:
  return {"step": step_arm("gpt2_moe_medium", layers=8, batch=8, expert=2, args=args)}


def medium8_arms(before: bool, args: argparse.Namespace) -> Arms:
  return {"step": step_arm("gpt2_moe_medium", layers=8, batch=8, expert=1, args=args)}


def medium24_arms(before: bool, args: argparse.Namespace) -> Arms:
  return {"step": step_arm("gpt2_moe_medium", expert=1, args=args)}


def step_arm(config: str, *, expert, args, layers=0, batch=0) -> Callable[[int], object]:
  """The training step of a config file, at its defaults; given layers, cut to one microbatch."""
  import jax

  from scmoe.parallel.mesh import batch_sharding

  build, config_of = (
    module("scmoe.run.build", "scmoe.build"),
    module("scmoe.run.config_files", "scmoe.run.config", "scmoe.config"),
  )
  steps = module("scmoe.training.step")
  path = config_of.find_config(config)
  run = config_of.load_config(path, "smoke" if args.tiny else "get_config")
  replace = dataclasses.replace
  if not args.tiny:
    run = replace(
      run,
      model=replace(run.model, num_layers=layers or run.model.num_layers),
      data=replace(run.data, tokenizer="bytes", seq_len=run.model.context),
    )
  if layers and not args.tiny:
    train = replace(run.train, batch_size=batch, tokens_per_step=0, remat="none")
    run = replace(run, train=train)
  if layers and expert == 1:
    run = replace(run, dispatch=replace(run.dispatch, transport="dropless"))
  run = replace(run, mesh=replace(run.mesh, data=1, expert=expert, tensor=1))
  run = run.resolve(num_devices=expert, vocab_size=build.vocab_size(run.data))
  devices = jax.devices()[:expert]
  built = build.build(run, devices)
  shape = (run.train.microbatches(run.data.seq_len), run.train.batch_size, run.data.seq_len)
  tokens = jax.random.randint(jax.random.key(7), shape, 0, run.model.vocab_size)
  abstract = built.abstract_state()
  options = run.overlap.compiler_options(gpu=jax.default_backend() == "gpu")
  if "mesh" in inspect.signature(steps.make_train_step).parameters:  # up to 3495333
    import jax.numpy as jnp

    ones = jnp.ones(shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
    given = {"inputs": tokens, "targets": jnp.roll(tokens, -1, -1), "segment_ids": ones}
    given |= {"weights": ones.astype(jnp.float32), "positions": positions}
    made = steps.make_train_step(
      built.objective, built.optimizer, built.mesh, steps.shardings_of(abstract)
    )
  else:
    given = module("scmoe.base.batch", "scmoe.batch").Batch.of_tokens(tokens)
    made = steps.make_train_step(built.objective, built.optimizer, abstract)
  given = jax.device_put(given, batch_sharding(built.mesh, leading=1))
  program = made.lower(abstract, given).compile(compiler_options=options)
  state = [steps.init_state(built.init, built.optimizer, 0, abstract)]

  def arm(calls: int) -> object:
    scalars = {}
    for _ in range(calls):
      state[0], scalars, _ = program(state[0], given)
    return {name: float(scalars[name]) for name in ("objective", "grad_norm")}

  return arm


def exchange_arms(before: bool, args: argparse.Namespace) -> Arms:
  import importlib.util

  import jax

  path = Path("experiments/dispatch/run.py")
  spec = importlib.util.spec_from_file_location("dispatch_run", path)
  assert spec is not None
  assert spec.loader is not None
  run: Any = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(run)
  old = not hasattr(run, "programs")  # up to 3495333
  mesh = run.make_mesh(run.MeshConfig(data=1, expert=jax.device_count()))
  names = args.transports + (",retry" if old and args.transports == TRANSPORTS else "")
  given = argparse.Namespace(width=2048, experts=64, k=2, arms=names, layers=8, rounds=1, calls=1)
  if args.tiny:
    given.width, given.experts = 64, 8
  arms: Arms = {}
  for size in (1,) if args.tiny else map(int, args.mebibytes.split()):
    for kind in ("balanced", "zipf"):
      if old:  # its arms are local to the function that times them
        caught: dict = {}
        run.interleave = lambda found, caught=caught, **_: caught.update(found) or {}
        run.measure(given, size, kind, mesh)
        found = caught
      else:
        made = run.programs(given, size, kind, mesh)
        found = {name: calls_of(stage, inputs) for name, (stage, inputs, _) in made.items()}
      arms |= {f"{size} MiB {kind} {name}": arm for name, arm in found.items()}
  return arms


def decode_arms(before: bool, args: argparse.Namespace) -> Arms:
  build, config_of = (
    module("scmoe.run.build", "scmoe.build"),
    module("scmoe.run.config_files", "scmoe.run.config", "scmoe.config"),
  )
  benchmark = module("scmoe.run.benchmark", "scmoe.benchmark")
  run = config_of.load_config(
    config_of.find_config("olmoe"), "smoke" if args.tiny else "get_config"
  )
  replace = dataclasses.replace
  if not args.tiny:
    run = replace(run, model=replace(run.model, num_layers=4))
  run = replace(run, data=replace(run.data, tokenizer="bytes", seq_len=run.model.context))
  run = run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))
  prompt, new = (8, 4) if args.tiny else (128, 64)
  arms: Arms = {}
  for rows in (1, 8) if args.tiny else (1, 8, 64):
    arms[f"decode {rows}"] = decode_arm(benchmark, run, (rows, prompt, new))
  return arms


def decode_arm(benchmark: Any, run: Any, load: tuple[int, int, int]) -> Callable[[int], object]:
  """Decoding as `scmoe.generate --benchmark` times it; the first call also says its tokens."""
  import tempfile

  import numpy as np

  # Earlier commits have their own types for the workload and for where the experts are.
  workload = getattr(benchmark, "Workload", None) or benchmark.Load
  way = getattr(benchmark, "RESIDENT", None) or benchmark.Way()
  arm = benchmark._Arm(run, workload(*load), Path(tempfile.mkdtemp()), way)
  arm.warm_up()
  arm.run_prefill(1)
  first_B, caches = arm.state
  made = arm.decode(
    arm.apart, arm.router, arm.lengths_B, next(arm.keys), np.int32(1), first_B, caches
  )
  tokens = {"tokens": int(np.asarray(made[0], np.int64).ravel() @ np.arange(1, made[0].size + 1))}
  arm.run_prefill(1)  # the caches above were given away
  seen = [tokens]

  def calls(count: int) -> object:
    arm.run_decode(count)
    return seen.pop() if seen else None

  return calls


def calls_of(function, given) -> Callable[[int], object]:
  import jax

  def arm(calls: int) -> None:
    out = None
    for _ in range(calls):
      out = function(*given)
    jax.block_until_ready(out)

  return arm


TASKS = {
  "layer": layer_arms,
  "olmoe": olmoe_arms,
  "exchange": exchange_arms,
  "medium": medium_arms,
  "medium8": medium8_arms,
  "medium24": medium24_arms,
  "decode": decode_arms,
}


def work(args: argparse.Namespace) -> None:
  """Compiles one task's arms, says their names, then answers each `name calls` with seconds."""
  sys.path.insert(0, os.getcwd())
  if args.tiny:
    os.environ["NPROC"] = "16"
  arms = TASKS[args.task](args.worker == BEFORE, args)
  seen = {name: arm(2) for name, arm in arms.items()}
  say({"names": list(arms), "seen": {n: s for n, s in seen.items() if isinstance(s, dict)}})
  for line in sys.stdin:
    name, calls = json.loads(line)
    start = time.perf_counter()
    arms[name](calls)
    say((time.perf_counter() - start) / calls)


# -- the driver -----------------------------------------------------------------------------------


def worker_of(side: str, folder: str, task: str, args: argparse.Namespace) -> Worker:
  """One commit's process for one task."""
  command = [str(Path(__file__).resolve()), "--worker", side, "--task", task]
  for name in ("shapes", "gates", "transports", "mebibytes"):
    command += [f"--{name}", getattr(args, name)]
  return Worker(side, [*command, *(["--tiny"] if args.tiny else [])], folder=folder)


def compare(task: str, args: argparse.Namespace) -> dict:
  begin = time.perf_counter()
  workers: dict[str, Worker] = {}
  told: dict[str, dict] = {}
  for side, folder in ((BEFORE, args.before), (AFTER, ".")):
    workers[side] = worker_of(side, folder, task, args)
    told[side] = workers[side].answer()  # one after the other: XLA times products while it compiles
    print(f"[{time.perf_counter() - begin:.0f} s] {task} {side}: {told[side]['seen']}", flush=True)
  arms = [(side, name) for side in told for name in told[side]["names"]]
  seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
  calls = {}
  for side, name in arms:
    once = min(workers[side].ask(json.dumps([name, 1])) for _ in range(2))
    calls[side, name] = max(1, round(args.sample / once))
  order, end = random.Random(0), time.perf_counter() + args.seconds
  for turn in range(args.rounds):
    if turn >= 3 and time.perf_counter() > end:
      break
    for side, name in order.sample(arms, len(arms)):
      asked = json.dumps([name, calls[side, name]])
      seconds[side, name].append(workers[side].ask(asked))
  for worker in workers.values():
    worker.end()
  quarter = lambda a: statistics.quantiles(a, n=4, method="inclusive")
  figures: dict[str, dict] = {}
  for (side, name), values in seconds.items():
    low, middle, high = quarter(values)
    figures.setdefault(name, {})[side] = {
      "ms": round(1e3 * middle, 4),
      "spread": round((high - low) / 2 / middle, 4),
      "rounds": len(values),
      "calls": calls[side, name],
    }
  for pair in figures.values():
    if len(pair) == 2:
      pair["after / before"] = round(pair[AFTER]["ms"] / pair[BEFORE]["ms"], 4)
  print(table(task, figures), flush=True)
  return {"task": task, "first_steps": {s: t["seen"] for s, t in told.items()}, "arms": figures}


def table(task: str, figures: dict) -> str:
  line = "{:38s}{:>12s}{:>12s}{:>10s}{:>9s}".format
  lines = [line(task, "before ms", "after ms", "ratio", "spread")]
  for name, pair in figures.items():
    cell = lambda side, pair=pair: f"{pair[side]['ms']:.3f}" if side in pair else "–"
    spread = max(pair[side]["spread"] for side in (BEFORE, AFTER) if side in pair)
    ratio = f"{pair['after / before']:.3f}" if "after / before" in pair else "–"
    lines.append(line(name, cell(BEFORE), cell(AFTER), ratio, f"{100 * spread:.1f} %"))
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--before", default="../before", help="checkout of the older commit")
  parser.add_argument("--tasks", default="layer,olmoe,exchange,medium")
  parser.add_argument("--shapes", default=SHAPES)
  parser.add_argument("--gates", default="gate16 gate32", help="of the layer, after")
  parser.add_argument("--transports", default=TRANSPORTS, help="of the exchange")
  parser.add_argument("--mebibytes", default="16 64 256", help="of the exchange, on each GPU")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--sample", type=float, default=0.1, help="seconds of calls in a turn")
  parser.add_argument("--seconds", type=float, default=60, help="of turns of one task, about")
  parser.add_argument("--tiny", action="store_true", help="toy sizes, on any device")
  parser.add_argument("--json", type=Path)
  parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
  parser.add_argument("--task", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return work(args)
  report = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python", *sys.argv]),
    "machine": machine(),
    "tasks": [],
  }
  for task in args.tasks.split(","):
    try:
      report["tasks"].append(compare(task, args))
    except Silent as error:  # half a comparison is none
      raise SystemExit(str(error)) from None
    if args.json:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      args.json.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict:
  """Hardware and versions, asked of a process that ends: this one holds no device."""
  code = "import jax, json; d = jax.devices(); print(json.dumps({'devices': f'{len(d)} x "
  code += "{d[0].device_kind}', 'jax': jax.__version__}))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


if __name__ == "__main__":
  main()
