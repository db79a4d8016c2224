"""Measures the cost of a training step's exchanges by the clock, for top-2 and ScMoE Pos-2.

  python experiments/exchange_cost/run.py --name nvlink
  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/run.py --name slow
  python experiments/exchange_cost/run.py --tiny        two simulated devices, to see that it runs

On two GPUs of one host each command takes three to four minutes. For each wiring three programs
take turns: the step, the same without exchanges, and exchanges alone (scmoe/profiling/clock.py).
All send packed rows, in XLA's order, unless words follow: fields of the configuration, e.g.
`dispatch.transport=capacity` or `"overlap.schedule=mlp 0" overlap.order=barriers`. No schedule is
searched for. Writes FOLDER/NAME.json and FOLDER/NAME.txt (--out, runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

if "--tiny" in sys.argv:
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
  os.environ["JAX_PLATFORMS"] = "cpu"

from shared_state import Shared, StepArm, configured, machine, out_file, prepare  # noqa: E402

from scmoe.profiling.clock import Paid  # noqa: E402
from scmoe.profiling.timer import Arm, interleave, speed_up  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.run.controls import exchanges_alone, without_exchanges  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.search import Steps  # noqa: E402
from scmoe.training.variants import Variant  # noqa: E402

WIRINGS = {"top-2": "top2", "Pos-2": "scmoe_pos2"}
MODEL = {
  "mesh.expert": "2",
  "mesh.data": "1",
  "model.num_layers": "8",
  "train.batch_size": "16",
  "train.tokens_per_step": "131072",
  "dispatch.transport": "packed",
  "overlap.search_seconds": "0",
}
TINY = {"model.num_layers": "4", "train.batch_size": "8", "train.tokens_per_step": "0"}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--config", default="gpt2_moe_medium")
  parser.add_argument("--name", default="nvlink", help="of the results")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=2, help="steps that are timed together")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  fields = MODEL | (TINY if args.tiny else {}) | dict(w.partition("=")[::2] for w in args.words)
  run = configured(args.config, fields, tiny=args.tiny)
  folder = args.out / "programs"
  file = out_file(args.out, args.name)

  steps: dict[str, StepArm] = {}
  with kept_programs(folder):
    for name, wiring in WIRINGS.items():
      own = build.with_wiring(run, wiring).resolve(
        num_devices=2, vocab_size=build.vocab_size(run.data)
      )
      shared = Shared(build.build(own))
      for kind, of in ((name, own), (f"{name} without", without_exchanges(own))):
        built = build.build(of)
        step = Steps(built, built.abstract_state(), args.out / "profiles")(Variant())
        steps[kind] = StepArm(step, shared)
    failed = prepare(steps, WIRINGS)
    timed: dict[str, Arm] = {k: arm for k, arm in steps.items() if k not in failed}
    for name in [name for name in WIRINGS if name not in failed]:
      arm = exchanges_alone(steps[name].jaxpr, steps[name].shared.built.mesh)
      assert arm is not None
      arm(2)
      timed[f"{name} alone"] = arm
  timings = interleave(timed, rounds=args.rounds, calls=args.calls)

  paid = {
    name: Paid(*(timings[name + kind] for kind in ("", " without", " alone")))
    for name in WIRINGS
    if {name, f"{name} without"} <= set(timings)
  }
  lines = [f"{name}: {1e3 * paid[name].program.median:.1f} ms; {paid[name]}" for name in paid]
  result = {
    "machine": machine(""),
    "command": " ".join(["python", *sys.argv]),
    "fields": fields,
    "arms": {name: timing.as_json() for name, timing in timings.items()},
    "paid": {name: cost.as_json() for name, cost in paid.items()},
    "failed": failed,
  }
  if len(paid) == 2:
    gain = speed_up(timings["top-2"], timings["Pos-2"])
    bound = speed_up(timings["top-2"], timings["Pos-2 without"])
    result |= {"speed_up": gain, "ceiling": bound}
    lines.append(f"Pos-2 over top-2: {gain:.2f}x; with nothing paid {bound:.2f}x")
  head = f"{args.config}, {', '.join(result['machine'].values())}, {time.strftime('%H:%M')}"
  text = "\n".join([head, *lines])
  file.write_text(json.dumps(result, indent=1) + "\n")
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  main()
