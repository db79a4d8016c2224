"""Unbalanced tasks in one run: devices by load against equally many for each task.

  python experiments/scale/tasks.py --json experiments/scale/results/tasks.json
  python experiments/scale/tasks.py --devices 2 --loads 3,1 --config gpt2_moe_medium --simulate 0

Every arm trains the same rows in a step, so loss and gradient norm of the first step agree. They
differ in the plan (docs/multitask.md), and so in the places for rows that devices compute:

  elastic  devices by load (multitask.plan=elastic): a row in every place
  equal    equally many devices for each task; the batch is larger, partly padding

Printed are the time of a step, rows per second, and the memory of the compiled step on a device.
SE-MoE (arXiv 2205.10034) has four tasks with batches of 512, 256, 128 and 128, the default here.
Simulated devices share the host's cores, so there the time of a step is that of all devices' work
together, padding included; on GPUs it is that of one device, and all have equally much work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from scmoe.base.batch import Batch
from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.program import Program
from scmoe.profiling.timer import NO_GPU
from scmoe.run.build import Built, build, vocab_size
from scmoe.run.command_line import simulate
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.modality import modality_of
from scmoe.training.step import init_state, make_train_step

SOURCES = ("procedural:markov", "procedural:arithmetic", "procedural:recall", "stdlib")
ELASTIC, EQUAL = "elastic", "equal"


class Arm:
  """A plan's compiled step, its batches, and how long it takes."""

  def __init__(self, run: Any):
    self.built: Built = build(run, jax.devices()[: run.mesh.size])
    self.abstract = self.built.abstract_state()
    self.data = modality_of(run).open_data(run)
    self.batches = self.data.train()
    step = make_train_step(self.built.objective, self.built.optimizer, self.abstract)
    self.program = Program(step.lower(self.abstract, self.batch()))
    self.batches = self.data.train()
    self.state: Any = None
    self.first: dict[str, float] = {}
    self.seconds: list[float] = []

  def batch(self) -> Any:
    """The next step's batch, on the devices."""
    run = self.built.run
    count = run.train.microbatches(run.data.seq_len)
    step = Batch.stack(list(itertools.islice(self.batches, count)))
    return jax.device_put(step, batch_sharding(self.built.mesh, leading=1))

  def compile(self) -> None:
    """Compiles the step, makes the state, and takes the first step, whose figures are kept."""
    self.program.compile(self.built.overlap.compiler_options(gpu=jax.default_backend() == "gpu"))
    self.state = init_state(self.built.init, self.built.optimizer, 0, self.abstract)
    scalars = self.step(self.batch())
    names = ["loss", "grad_norm", *(f"cross_entropy/{name}" for name in self.data.domains)]
    self.first = {name: float(scalars[name]) for name in names}

  def step(self, batch: Any) -> Any:
    """Takes a step; returns its scalars when all is done."""
    self.state, scalars, _ = self.program(self.state, batch)
    jax.block_until_ready((self.state, scalars))
    return scalars

  def turn(self, calls: int) -> None:
    """Times `calls` steps; the batches are on the devices before the clock starts."""
    for _ in range(calls):
      batch = self.batch()
      jax.block_until_ready(batch)
      begin = time.perf_counter()
      self.step(batch)
      self.seconds.append(time.perf_counter() - begin)

  def figures(self) -> dict[str, Any]:
    """Its entry in the results file, after at least one timed step."""
    plan, middle = self.data.plan, statistics.median(self.seconds)
    return {
      "rows": dict(zip(plan.names, plan.rows_T)),
      "devices": {name: len(plan.devices_of(i)) for i, name in enumerate(plan.names)},
      "places": plan.places * len(plan.rows_DT),
      "filled": round(plan.filled, 4),
      "microbatches": len(self.data.layout_AB),
      "ms": round(1e3 * middle, 1),
      "steps_ms": [round(1e3 * s, 1) for s in self.seconds],
      "rows_per_second": round(sum(plan.rows_T) / middle, 2),
      "program_mebibytes": round(self.program.gibibytes * 2**10, 1),
      "first_step": self.first,
    }


def planned(args: argparse.Namespace, plan: str, batch: int) -> Any:
  """A resolved run with steps of one microbatch of so many places."""
  run = load_config(find_config(args.config), "get_config")
  loads = args.loads.split(",")
  sources = list(itertools.islice(itertools.cycle(SOURCES), len(loads)))
  given = {
    "data.source": "mixture",
    "data.mixture": ",".join(f"{source}:1" for source in sources),
    "data.tokenizer": "bytes",
    "data.limit_bytes": "200000",
    "multitask.names": ",".join(f"task-{i}" for i in range(len(loads))),
    "multitask.loads": args.loads,
    "multitask.plan": plan,
    "dispatch.transport": "dropless",
    "router.balance_over": "step",
    "mesh.data": str(args.devices // args.expert),
    "mesh.expert": str(args.expert),
    "train.batch_size": str(batch),
    "train.tokens_per_step": "0",
  }
  for field, value in given.items():
    run = with_field(run, field, value)
  return run.resolve(num_devices=args.devices, vocab_size=vocab_size(run.data))


def runs(args: argparse.Namespace) -> dict[str, Any]:
  """The resolved run of each arm; the rows of a step are the same in all of them."""
  batch = args.batch_size
  wanted = planned(args, ELASTIC, batch).plan().rows_T
  sizes = range(batch, 8 * batch + 1, args.devices)
  more = next((n for n in sizes if planned(args, EQUAL, n).plan().rows_T == wanted), None)
  if more is None:
    raise SystemExit(
      f"equal shares of {batch} to {8 * batch} rows never train {wanted} rows: choose --loads and "
      "--batch_size so that loads divide the places"
    )
  return {
    ELASTIC: planned(args, ELASTIC, batch),
    EQUAL: planned(args, EQUAL, more),
  }


def main() -> None:
  """Runs the arms in turns; prints a table and writes the results file."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--config", default="quickstart", help="model and lengths")
  parser.add_argument("--devices", type=int, default=8, help="devices of the mesh")
  parser.add_argument("--expert", type=int, default=1, help="devices of its expert axis")
  parser.add_argument("--loads", default="512,256,128,128", help="of the tasks")
  parser.add_argument("--batch_size", type=int, default=32, help="rows of a step")
  parser.add_argument("--rounds", type=int, default=5, help="turns of each arm")
  parser.add_argument("--calls", type=int, default=2, help="timed steps of a turn")
  parser.add_argument(
    "--simulate", type=int, default=-1, help="CPU devices; -1: --devices; 0: none"
  )
  parser.add_argument("--json", type=Path, help="file of the results")
  args = parser.parse_args()
  simulate(args.devices if args.simulate < 0 else args.simulate)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  arms = {name: Arm(run) for name, run in runs(args).items()}
  for name, arm in arms.items():
    arm.compile()
    say(f"{name}: compiled; first step {arm.first}")
  for _ in range(args.rounds):
    for name, arm in arms.items():
      arm.turn(args.calls)
      say(f"{name}: {arm.seconds[-1]:.2f} s")
  report = {
    "device": f"{args.devices} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "config": args.config,
    "arms": {name: arm.figures() for name, arm in arms.items()},
  }
  report["spread"] = _spread([arm.first for arm in arms.values()])
  print(table(report))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def _spread(firsts: list[dict[str, float]]) -> dict[str, float]:
  """How far the arms' first steps are apart, relative to the first arm's, for each figure."""
  found = {}
  for name, value in firsts[0].items():
    others = np.array([first[name] for first in firsts])
    found[name] = float(np.abs(others / value - 1).max())
  return found


def table(report: dict[str, Any]) -> str:
  """The arms as text, and what elastic gains over equal shares."""
  lines = [] if "cpu" not in report["device"].lower() else [NO_GPU]
  lines.append(f"{'plan':22}{'places':>8}{'filled':>8}{'ms':>10}{'rows/s':>9}{'MiB':>9}  devices")
  for name, own in report["arms"].items():
    devices = ", ".join(map(str, own["devices"].values()))
    lines.append(
      f"{name:22}{own['places']:8}{own['filled']:8.0%}{own['ms']:10.1f}"
      f"{own['rows_per_second']:9.2f}{own['program_mebibytes']:9.1f}  {devices}"
    )
  base, best = next(iter(report["arms"].items()))
  for name, own in list(report["arms"].items())[1:]:
    rate = best["rows_per_second"] / own["rows_per_second"] - 1
    memory = best["program_mebibytes"] / own["program_mebibytes"] - 1
    lines.append(f"{base} over {name}: {rate:+.0%} rows per second, {memory:+.0%} memory")
  worst = max(report["spread"].values())
  lines.append(f"first steps differ by {worst:.1e} at most, relative")
  return "\n".join(lines)


if __name__ == "__main__":
  main()
