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
from collections.abc import Iterable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from shared_state import (  # noqa: E402
  MODEL,
  StepArm,
  configured,
  fields_of,
  machine,
  out_file,
  prepare,
  step_arm,
)
from where import Where  # noqa: E402

from scmoe.base.errors import ConfigError, run_main  # noqa: E402
from scmoe.profiling.clock import Paid  # noqa: E402
from scmoe.profiling.timer import Arm, interleave, speed_up  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.run.command_line import simulate  # noqa: E402
from scmoe.run.controls import exchanges_alone, without_exchanges  # noqa: E402
from scmoe.run.effects import check_typed  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402

ARMS = {"top-2": {"model.wiring": "top2"}, "Pos-2": {"model.wiring": "scmoe_pos2"}}
TINY = {"model.num_layers": "4", "train.batch_size": "8", "train.tokens_per_step": "0"}


def own_arm(text: str) -> tuple[str, dict[str, str]]:
  """The name and the fields of an arm, from "NAME: FIELD=VALUE FIELD=VALUE".

  Raises:
    ConfigError: the text has another form.
  """
  name, colon, words = text.partition(":")
  try:
    if not colon or not name.strip():
      raise ValueError("no NAME: at its beginning")
    return name, fields_of(shlex.split(words))
  except ValueError as error:
    raise ConfigError(f"--arm={text!r} is not of the form NAME: FIELD=VALUE: {error}") from None


def named(flag: str, text: str, arms: Iterable[str]) -> list[str]:
  """The names in `text`, separated by commas.

  Raises:
    ConfigError: one of them is no arm.
  """
  names, known = [name for name in text.split(",") if name], list(arms)
  for name in names:
    if name not in known:
      raise ConfigError(f"--{flag}={text!r}: {name!r} is no arm; one of: {', '.join(known)}")
  return names


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--config", help="gpt2_moe_medium by default")
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
  config = args.config or "gpt2_moe_medium"
  if args.tiny and args.config:
    raise ConfigError(f"--tiny runs quickstart's smoke run, got --config={config}; leave out one")
  for flag in ("rounds", "calls"):
    if getattr(args, flag) < 1:
      raise ConfigError(f"--{flag}={getattr(args, flag)} must be at least 1")
  fields = MODEL | (TINY if args.tiny else {}) | fields_of(args.words)
  arms = ARMS | dict(own_arm(text) for text in args.arm)
  only = named("only", args.only, arms) or list(arms)
  arms = {name: own for name, own in arms.items() if name in only}
  controls = list(arms) if args.controls is None else named("controls", args.controls, arms)
  if args.kernels and not controls:
    raise ConfigError("--kernels traces arms with controls; name some in --controls")
  folder = args.out / "programs"
  file = out_file(args.out, args.name)

  steps: dict[str, StepArm] = {}
  states: dict[str, MeasuredState] = {}
  # By wiring its first arm, whose dense layers have the other arms' products.
  first: dict[str, str] = {}
  with kept_programs(folder):
    for name, own_fields in arms.items():
      run = configured(config, fields | own_fields, tiny=args.tiny)
      check_typed(run, [*fields_of(args.words), *own_fields])
      own = run.resolve(num_devices=2, vocab_size=build.vocab_size(run.data))
      first.setdefault(own.model.wiring, name)
      kinds = {name: own}
      if name in controls:
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
  where = ", ".join([*result["machine"].values(), time.strftime("%H:%M")])
  head = f"{'quickstart, smoke' if args.tiny else config}, {where}"
  text = "\n".join([head, *lines])
  file.write_text(json.dumps(result, indent=1) + "\n")
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  run_main(lambda argv: main())
