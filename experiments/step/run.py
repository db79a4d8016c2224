"""Whole training steps of several configurations in turns, with what each hides.

  NCCL_P2P_DISABLE=1 python experiments/step/run.py --json OUT \\
    "top2: model.wiring=top2" "pos2: model.wiring=scmoe_pos2" \\
    "packed: model.wiring=scmoe_pos2 dispatch.transport=packed"

An arm is a name and words: fields of the configuration (`model.wiring=top2`), flags of its own
(`--config=olmoe`), and variables of its environment (`NCCL_P2P_DISABLE=1`, `XLA_FLAGS=...`).
Without `overlap.` fields it is what a user gets, search included.

Each arm is a process of its own, so that all compile at the same time; they share the GPUs' memory.
What is measured has the GPUs to itself: steps that are profiled, a search, traces, and the turns,
in each of which every arm runs once. An arm that fails or is silent for --patience seconds is left
out, and the last line of its log in --folder printed. Compiled programs and profiles are kept
there, so that a second run compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arms import Silent, Worker, say

COMMAND = (
  "--config gpt2_moe_medium --config.mesh.expert=2 --config.model.num_layers=8 "
  "--config.train.batch_size=16 --config.train.tokens_per_step=131072"
)


# -- the worker: one arm --------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
  """Says what the arm is, then answers each line: `trace`, or a number of steps with seconds."""
  import jax

  from scmoe.profile import TRACED, Arm
  from scmoe.profiling.overlap import measure_overlap, stage_times
  from scmoe.training.compiled import PROGRAMS, kept_programs
  from scmoe.training.guided import GuidedStep

  name, _, words = args.arms[0].partition(":")
  folder, run = Path(args.folder), configured(args.command, words)
  alone = lambda: exclusive(folder / "lock")
  with kept_programs(folder / PROGRAMS):
    start = time.perf_counter()
    searches = jax.device_count() > 1 and run.overlap.schedule == "auto"
    with alone() if searches and run.overlap.search_seconds else contextlib.nullcontext():
      arm = Arm(run, folder / name)
    step = arm.step
    if isinstance(step, GuidedStep):
      while not step.settled:
        if step.program is None:
          step.compile(arm.measured.state, arm.measured.batch)
        step.finish()
        with alone():
          while not (step.settled or step.compiles_next):
            arm(1)
    with alone():
      arm.warm_up()
    say(
      {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "variant": arm.variant.given,
        "ready_s": round(time.perf_counter() - start, 1),
        "compile_s": [round(s, 1) for s in arm.compiled.compile_seconds],
        "gibibytes": round(arm.compiled.gibibytes, 2),
        "tokens": tokens(arm),
        "flops": arm.built.flops_per_token({}) * tokens(arm),
        "peak": arm.built.peak_flops * arm.built.mesh.size,
      }
    )
    for line in sys.stdin:
      if line.strip() == "trace":
        trace = arm.trace()
        overlap = measure_overlap(trace.events, TRACED)
        stages = stage_times(trace.events, trace.program.names, TRACED) if overlap else []
        told = [vars(stage) for stage in stages]
        say({"overlap": overlap and overlap.as_json(), "stages": told})
        continue
      arm(1)  # another's step was the last
      start = time.perf_counter()
      arm(int(line))
      say({"seconds": (time.perf_counter() - start) / int(line)})


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
  """Holds a lock among the arms' processes."""
  with file.open("w") as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    yield


def tokens(arm: Any) -> int:
  """Number of tokens of one step, on all devices together."""
  train, length = arm.built.train, arm.built.sequence_length
  return train.microbatches(length) * train.batch_size * length


def configured(command: str, words: str) -> Any:
  """The run of a command's flags and an arm's words."""
  from scmoe.run.command_line import TRAIN_FLAGS, parse, run_config

  own = [word for word in shlex.split(words) if not _is_variable(word)]
  flags = [word if word.startswith("--") else f"--config.{word}" for word in own]
  return run_config(*parse([*shlex.split(command), *flags], TRAIN_FLAGS, with_fields=True))


def _is_variable(word: str) -> bool:
  return re.match(r"[A-Z][A-Z0-9_]*=", word) is not None


# -- the driver -----------------------------------------------------------------------------------


def worker_of(text: str, args: argparse.Namespace) -> Worker:
  """One arm's process."""
  name, _, words = text.partition(":")
  command = [str(Path(__file__).resolve()), "--worker", text]
  command += ["--command", args.command, "--folder", args.folder]
  own = dict(word.split("=", 1) for word in shlex.split(words) if _is_variable(word))
  log = Path(args.folder) / f"{name}.log"
  return Worker(name, command, variables=own, log=log, patience=args.patience)


def drive(args: argparse.Namespace) -> int:
  """Runs the arms and prints their table; 1 if one of them was left out."""
  begin = time.perf_counter()
  Path(args.folder).mkdir(parents=True, exist_ok=True)
  report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
  report |= {"command": " ".join(["python", *map(shlex.quote, sys.argv)]), "arms": {}}
  workers = [worker_of(text, args) for text in args.arms]
  words = {worker.name: text.partition(":")[2] for worker, text in zip(workers, args.arms)}
  found: dict[str, dict[str, Any]] = report["arms"]

  def each(what: str | None) -> Iterator[tuple[Worker, dict[str, Any]]]:
    for worker in list(workers):
      try:
        yield worker, worker.answer() if what is None else worker.ask(what)
      except Silent as silent:
        print(silent, flush=True)
        workers.remove(worker)

  def keep() -> None:
    if args.json:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      args.json.write_text(json.dumps(report, indent=1) + "\n")

  for worker, told in each(None):
    report |= {"device": told.pop("device"), "jax": told.pop("jax")}
    found[worker.name] = {"fields": words[worker.name].strip()} | told
    print(f"{worker.name}: ready in {told['ready_s']:.0f} s, {told['gibibytes']} GiB, "
          f"{told['variant'] or 'as configured'}", flush=True)  # fmt: skip
  seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
  for _ in range(args.rounds):
    if time.perf_counter() - begin > args.seconds:
      break
    for worker, told in each(str(args.calls)):
      seconds[worker.name].append(told["seconds"])
  first: float | None = None
  for worker in workers:
    own, taken = found[worker.name], seconds[worker.name]
    middle = statistics.median(taken)
    own["wall"] = {
      "ms": round(1e3 * middle, 4),
      "spread": round((max(taken) - min(taken)) / middle, 4),
      "calls": args.calls,
      "rounds_ms": [round(1e3 * s, 4) for s in taken],
    }
    own["mfu"] = round(own["flops"] / middle / own["peak"], 4) if own["peak"] else 0.0
    first = first or middle
    spread, mfu = own["wall"]["spread"], own["mfu"]
    print(f"{worker.name:16s}{1e3 * middle:10.2f} ms, spread {100 * spread:.1f} % of {len(taken)} "
          f"turns{first / middle:8.3f}x   MFU {100 * mfu:.1f} %", flush=True)  # fmt: skip
  keep()
  for worker, told in each("trace") if args.trace else ():
    found[worker.name] |= told
    if told["overlap"] and told["overlap"]["communication"]:
      print(hidden(worker.name, told), flush=True)
    keep()
  for worker in workers:
    worker.end()
  keep()
  return int(len(workers) < len(args.arms))


def hidden(name: str, told: dict[str, Any]) -> str:
  """The share of each exchange that had computation beside it."""
  whole = told["overlap"]
  share = 100 * whole["share_hidden"]
  lines = [f"{name}: {whole['communication']:.1f} ms of communication, {share:.0f} % hidden; "
           f"{whole['computation']:.1f} of computation"]  # fmt: skip
  for stage in sorted(told["stages"], key=lambda stage: -stage["communication"]):
    if sent := stage["communication"]:
      lines.append(f"  {stage['stage']:12s}{stage['direction']:10s}{sent:9.2f} ms"
                   f"{100 * stage['hidden'] / sent:6.0f} % hidden"
                   f"{sent - stage['hidden']:9.2f} bare")  # fmt: skip
  return "\n".join(lines)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("arms", nargs="+", help="'name: word ...', the first the base")
  parser.add_argument("--command", default=COMMAND, help="flags that all arms have")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=2, help="steps in a turn")
  parser.add_argument("--seconds", type=float, default=1e9, help="no new turn after these")
  parser.add_argument("--patience", type=float, default=400, help="seconds for one answer")
  parser.add_argument("--no-trace", dest="trace", action="store_false", help="times alone")
  parser.add_argument("--folder", default="runs/step_overlap")
  parser.add_argument("--json", type=Path)
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work(args)
    return 0
  return drive(args)


if __name__ == "__main__":
  sys.exit(main())
