"""Measures the cost of a training step's exchanges by the clock, for top-2 and ScMoE Pos-2.

  python experiments/exchange_cost/run.py --name nvlink
  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/run.py --name slow
  python experiments/exchange_cost/run.py --tiny        two simulated devices, to see that it runs

On two GPUs of one host each command takes three to four minutes. For each wiring three programs
take turns: the step, the same without exchanges, and exchanges alone (scmoe/profiling/clock.py).
All send packed rows, in XLA's order, unless words follow: fields of the configuration, e.g.
`dispatch.transport=capacity` or `"overlap.schedule=mlp 0" overlap.order=barriers`. No schedule is
searched for. `--arm "NAME: WORDS"` adds an arm of its own fields, e.g.
`--arm "chunks: model.wiring=scmoe_pos2 dispatch.chunks=2"`. `--only` leaves arms out, and
`--controls` names the arms that get the other two programs. No turn begins `--seconds` after the
first one began. `--kernels` then traces each arm that has controls, and its step without exchanges,
and says where the paid time is: in bare transfers, or in slower kernels (where.py). Writes
FOLDER/NAME.json and FOLDER/NAME.txt (--out, runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from shared_state import (  # noqa: E402
  MODEL,
  StepArm,
  configured,
  machine,
  out_file,
  prepare,
  step_arm,
)
from where import Where  # noqa: E402

from scmoe.profiling.clock import Paid  # noqa: E402
from scmoe.profiling.timer import Arm, interleave, speed_up  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.run.command_line import simulate  # noqa: E402
from scmoe.run.controls import exchanges_alone, without_exchanges  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402

ARMS = {"top-2": {"model.wiring": "top2"}, "Pos-2": {"model.wiring": "scmoe_pos2"}}
TINY = {"model.num_layers": "4", "train.batch_size": "8", "train.tokens_per_step": "0"}


def fields_of(words: list[str]) -> dict[str, str]:
  """The values by field, from words FIELD=VALUE."""
  return {field: value for field, _, value in (word.partition("=") for word in words)}


def own_arm(text: str) -> tuple[str, dict[str, str]]:
  """The name and the fields of an arm, from "NAME: FIELD=VALUE FIELD=VALUE"."""
  name, _, words = text.partition(":")
  return name, fields_of(shlex.split(words))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--config", default="gpt2_moe_medium")
  parser.add_argument("--name", default="nvlink", help="of the results")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--seconds", type=float, default=float("inf"), help="of turns, at most")
  parser.add_argument("--calls", type=int, default=2, help="steps that are timed together")
  parser.add_argument("--arm", action="append", default=[], help="NAME: FIELD=VALUE ...")
  parser.add_argument("--only", default="", help="names of arms, with commas")
  parser.add_argument("--controls", help="names of arms with controls, with commas; all if absent")
  parser.add_argument("--kernels", action="store_true", help="where the paid time is, by a trace")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  simulate(2 if args.tiny else 0)
  fields = MODEL | (TINY if args.tiny else {}) | fields_of(args.words)
  arms = ARMS | dict(own_arm(text) for text in args.arm)
  arms = {name: own for name, own in arms.items() if name in (args.only or name).split(",")}
  folder = args.out / "programs"
  file = out_file(args.out, args.name)

  steps: dict[str, StepArm] = {}
  states: dict[str, MeasuredState] = {}
  # By wiring its first arm, whose dense layers have the other arms' products.
  first: dict[str, str] = {}
  with kept_programs(folder):
    for name, own_fields in arms.items():
      run = configured(args.config, fields | own_fields, tiny=args.tiny)
      own = run.resolve(num_devices=2, vocab_size=build.vocab_size(run.data))
      first.setdefault(own.model.wiring, name)
      kinds = {name: own}
      if args.controls is None or name in args.controls.split(","):
        kinds[f"{name} without"] = without_exchanges(own)
      for kind, of in kinds.items():
        steps[kind] = step_arm(of, states, args.out / "profiles")
    failed = prepare(steps, first.values())
    timed: dict[str, Arm] = {k: arm for k, arm in steps.items() if k not in failed}
    controlled = [name for name in arms if {name, f"{name} without"} <= set(timed)]
  for name in controlled:
    arm = exchanges_alone(steps[name].jaxpr, steps[name].shared.built.mesh)
    assert arm is not None, "two devices exchange rows"
    arm(2)
    timed[f"{name} alone"] = arm
  deadline = time.perf_counter() + args.seconds
  timings = interleave(timed, rounds=args.rounds, calls=args.calls, deadline=deadline)
  rounds = {name: steps[name].rounds() for name in arms if name not in failed}

  paid = {
    name: Paid(*(timings[name + kind] for kind in ("", " without", " alone")))
    for name in controlled
  }
  lines = []
  for name in rounds:
    own = f"{name}: {1e3 * timings[name].median:.1f} ms; {rounds[name]:.2f} rounds"
    own += f"; {steps[name].step.repeated} steps ran twice" if steps[name].step.repeats else ""
    if name in paid:
      own += f"; {paid[name]}"
    lines.append(own)
  result = {
    "machine": machine(""),
    "command": shlex.join(["python", *sys.argv]),
    "fields": fields,
    "arms": {name: timing.as_json() for name, timing in timings.items()},
    "paid": {name: cost.as_json() for name, cost in paid.items()},
    "where": {},
    "rounds": rounds,
    "repeated": {name: steps[name].step.repeated for name in rounds},
    "failed": failed,
  }
  if "top-2" in timings:
    over = {name: speed_up(timings["top-2"], time) for name, time in timings.items()}
    result["over_top2"] = over
    lines.append("over top-2: " + ", ".join(f"{name} {x:.3f}x" for name, x in over.items()))
  if args.kernels:
    for name in controlled:
      where = Where.of(steps[name], steps[f"{name} without"])
      result["where"][name] = where.as_json()
      lines.append(f"{name}: {where}")
  head = f"{args.config}, {', '.join(result['machine'].values())}, {time.strftime('%H:%M')}"
  text = "\n".join([head, *lines])
  file.write_text(json.dumps(result, indent=1) + "\n")
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  main()
