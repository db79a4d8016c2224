"""Times a training step of every wiring, in turns, on the link that the GPUs have.

  python experiments/exchange_cost/wirings.py --name wirings-nvlink
  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/wirings.py --name wirings-slow --chunks
  python experiments/exchange_cost/wirings.py --tiny        two simulated devices, to see it run

The model is that of run.py, with four layers, eight experts and a small vocabulary. Every wiring
has an arm in XLA's order, and with --chunks a second one whose rows travel in two chunks. A
shortcut's chunks stand in slots that barriers hold, two steps of the main path after which its
experts compute; the others' are XLA's to place. No schedule is searched for. Writes
FOLDER/NAME.json and FOLDER/NAME.txt (--out, runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

if "--tiny" in sys.argv:
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
  os.environ["JAX_PLATFORMS"] = "cpu"

from shared_state import StepArm, configured, machine, out_file, prepare  # noqa: E402

from scmoe.profiling.timer import interleave, speed_up  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.fastest import Steps  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402
from scmoe.training.variants import Variant  # noqa: E402

VOCABULARY = 8192  # small: the head is not what is compared
MODEL = {
  "mesh.expert": "2",
  "mesh.data": "1",
  "model.num_layers": "4",
  "model.num_experts": "8",
  "model.vocab_size": str(VOCABULARY),
  "train.batch_size": "16",
  "train.tokens_per_step": "131072",
  "dispatch.transport": "packed",
  "overlap.search_seconds": "0",
}
TINY = {"train.batch_size": "8", "train.tokens_per_step": "0"}
BASE = "top2"
WIRINGS = {
  BASE: {"model.wiring": "top2"},
  "top3": {"model.wiring": "topk", "model.top_k": "3"},
  "shared_expert": {"model.wiring": "shared_expert"},
  "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
  "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
  "scmoe_pos3": {"model.wiring": "scmoe_pos3"},
  "scmoe2": {"model.wiring": "scmoe2"},
  "dgmoe": {"model.wiring": "dgmoe"},
}
SLOTS = {
  "scmoe_pos1": "attention 1: projections, attention 1",
  "scmoe_pos2": "mlp 0, attention 1: projections",
  "scmoe_pos3": "mlp 0, attention 1: projections",
  "scmoe2": "mlp 0, attention 1: projections",
}
# Wirings that have nearly all products of the others, of the same shapes.
ALONE = (BASE, "shared_expert")


def arms_of(wirings: list[str], *, chunks: bool) -> dict[str, dict[str, str]]:
  """Fields of each arm by its name: a wiring, or `WIRING in chunks`."""
  arms = {name: WIRINGS[name] for name in wirings}
  for name in wirings if chunks else ():
    arms[f"{name} in chunks"] = WIRINGS[name] | {"dispatch.chunks": "2"}
    if name in SLOTS:
      slots = {"overlap.schedule": SLOTS[name], "overlap.order": "barriers"}
      arms[f"{name} in chunks"] |= slots
  return arms


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", default="gpt2_moe_medium")
  parser.add_argument("--name", default="wirings-nvlink", help="of the results")
  parser.add_argument("--wirings", default=",".join(WIRINGS), help="names, with commas")
  parser.add_argument("--chunks", action="store_true", help="also arms whose rows go in two chunks")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=2, help="steps that are timed together")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  fields = MODEL | (TINY if args.tiny else {})
  arms = arms_of(args.wirings.split(","), chunks=args.chunks)
  file = out_file(args.out, args.name)

  steps: dict[str, StepArm] = {}
  states: dict[str, MeasuredState] = {}
  with kept_programs(args.out / "programs"):
    for name, own in arms.items():
      run = configured(args.config, fields | own, tiny=args.tiny)
      built = build.build(run.resolve(num_devices=2, vocab_size=VOCABULARY))
      wiring = name.removesuffix(" in chunks")
      if wiring not in states:
        states[wiring] = MeasuredState(built)
      step = Steps(built, built.abstract_state(), args.out / "profiles")(Variant())
      steps[name] = StepArm(step, states[wiring])
    failed = prepare(steps, [name for name in ALONE if name in steps])
    timings = interleave(
      {name: arm for name, arm in steps.items() if name not in failed},
      rounds=args.rounds,
      calls=args.calls,
    )
  rounds = {}  # of exchanges, after all turns: the router may have changed
  for name in timings:
    steps[name](1)
    rounds[name] = steps[name].shared.rounds
  result = {
    "label": args.config,
    "machine": machine(""),
    "command": " ".join(["python", *sys.argv]),
    "fields": fields,
    "options": arms,
    "arms": {name: timing.as_json() for name, timing in timings.items()},
    "rounds": rounds,
    "failed": failed,
  }
  base = timings[BASE]
  lines = [
    f"{name:24} {1e3 * time.median:8.2f} ms  {speed_up(base, time):.3f}x  {rounds[name]:.2f} rounds"
    for name, time in timings.items()
  ]
  text = "\n".join([f"{args.config}, {', '.join(result['machine'].values())}", *lines])
  file.write_text(json.dumps([result], indent=1) + "\n")
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  main()
