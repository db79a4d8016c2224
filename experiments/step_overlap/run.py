"""Whole training steps of several configurations in turns, with what each hides.

  NCCL_P2P_DISABLE=1 python experiments/step_overlap/run.py --json OUT \\
    "top2: model.wiring=top2" "pos2: model.wiring=scmoe_pos2" \\
    "packed: model.wiring=scmoe_pos2 dispatch.transport=packed"

An arm is a name and fields of the configuration; without `overlap.` fields it is what a user gets,
search included. Each is timed by itself as soon as it is compiled, which is kept if the time ends
before the turns, and then in turns with the others. Compiled programs and profiles are kept under
--folder, so that a second run compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

COMMAND = (
  "--config gpt2_moe_medium --config.mesh.expert=2 --config.model.num_layers=8 "
  "--config.train.batch_size=16 --config.train.tokens_per_step=131072"
)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("arms", nargs="+", help="'name: section.field=value ...', the first the base")
  parser.add_argument("--command", default=COMMAND, help="flags that all arms have")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=2)
  parser.add_argument("--seconds", type=float, default=1e9, help="no new arm or turn after these")
  parser.add_argument("--folder", default="runs/step_overlap")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  begin = time.perf_counter()

  import jax

  from scmoe.profile import TRACED, Arm
  from scmoe.profiling.overlap import measure_overlap, stage_table, stage_times
  from scmoe.profiling.timer import interleave
  from scmoe.training.compiled import PROGRAMS, kept_programs

  kept = contextlib.ExitStack()  # until the end: what was compiled once is loaded
  kept.enter_context(kept_programs(Path(args.folder) / PROGRAMS))
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
  report: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "device": device,
    "jax": jax.__version__,
    "command": " ".join(["python", *map(shlex.quote, sys.argv)]),
    "arms": {},
  }

  def keep() -> None:
    if args.json:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      args.json.write_text(json.dumps(report, indent=1) + "\n")

  arms: dict[str, Arm] = {}
  for text in args.arms:
    if time.perf_counter() - begin > args.seconds:
      print(f"no time for {text!r}", flush=True)
      continue
    name, _, fields = text.partition(":")
    arm = Arm(configured(args.command, shlex.split(fields)), Path(args.folder) / name)
    start = time.perf_counter()
    arm.warm_up()
    arms[name], seconds = arm, time.perf_counter() - start
    alone = interleave({name: arm}, rounds=3, calls=args.calls)[name]
    found: dict[str, Any] = {"fields": fields.strip(), "variant": arm.variant.given}
    found |= {"ready_s": round(seconds, 1), "compile_s": arm.compiled.compile_seconds}
    found |= {"alone": alone.as_json(), "gibibytes": round(arm.compiled.gibibytes, 2)}
    found |= {"tokens": tokens(arm), "mfu": round(mfu(arm, alone.median), 4)}
    print(f"{name}: ready in {seconds:.0f} s, {1e3 * alone.median:.2f} ms alone, MFU "
          f"{100 * found['mfu']:.1f} %, {found['gibibytes']} GiB, {arm.variant}",
          flush=True)  # fmt: skip
    trace = arm.trace()
    overlap = measure_overlap(trace.events, TRACED)
    if overlap is not None:
      stages = stage_times(trace.events, trace.program.names, TRACED)
      found |= {"overlap": overlap.as_json(), "stages": [vars(s) for s in stages]}
      shown = [s for s in stages if s.communication or not overlap.communication]
      print(stage_table(shown), flush=True)
    report["arms"][name] = found
    keep()
  timings = interleave(arms, rounds=args.rounds, calls=args.calls, deadline=begin + args.seconds)
  base = next(iter(timings.values())).median
  for name, timing in timings.items():
    report["arms"][name]["wall"] = timing.as_json()
    print(f"{name:16s}{1e3 * timing.median:10.2f} ms ± {100 * timing.spread:.1f} % of "
          f"{len(timing.seconds)} turns{base / timing.median:8.3f}x", flush=True)  # fmt: skip
  keep()


def tokens(arm: Any) -> int:
  """Of one step, on all devices."""
  train, length = arm.built.train, arm.built.sequence_length
  return train.microbatches(length) * train.batch_size * length


def mfu(arm: Any, seconds: float) -> float:
  """The model's FLOPs, no recomputation and no padding, over the devices' peak."""
  peak = arm.built.peak_flops * arm.built.mesh.size
  return arm.built.flops_per_token({}) * tokens(arm) / seconds / peak if peak else 0.0


def configured(command: str, fields: list[str]) -> Any:
  """The run of a command's flags and an arm's fields."""
  from scmoe.command_line import TRAIN_FLAGS, parse, run_config

  flags = [*shlex.split(command), *(f"--config.{field}" for field in fields)]
  return run_config(*parse(flags, TRAIN_FLAGS, with_fields=True))


if __name__ == "__main__":
  main()
