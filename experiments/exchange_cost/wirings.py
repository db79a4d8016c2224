"""Times a training step of every wiring, in turns, on the link that the GPUs have.

  python experiments/exchange_cost/wirings.py --name wirings-nvlink
  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/wirings.py --name wirings-slow --chunks
  python experiments/exchange_cost/wirings.py model.width=1280 model.num_heads=20 --wirings top2 \
      --arm "top2, 4 chunks" model.wiring=top2 dispatch.chunks=4
  python experiments/exchange_cost/wirings.py --tiny        two simulated devices, to see it run

The model is that of run.py, with four layers, eight experts and a small vocabulary, or that of
--config; words FIELD=VALUE, before all options, change it. Two devices share the experts. Every
wiring has an arm in XLA's order. With --chunks it has a second arm, whose rows travel in two
chunks. A wiring of `SLOTS` then computes each chunk's experts in a slot, after the step of the main
path that stands there, and barriers hold that order; of the others, dgmoe among them, XLA orders
the chunks. Each --arm adds one, of a name and fields. No schedule is searched for. Speed-ups are
over the fastest arm of top2. Writes FOLDER/NAME.json and FOLDER/NAME.txt (--out,
runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from shared_state import (  # noqa: E402
  MODEL,
  SPLIT,
  StepArm,
  configured,
  fields_of,
  machine,
  out_file,
  prepare,
  step_arm,
)

from scmoe.base.errors import ConfigError, run_main  # noqa: E402
from scmoe.profiling.timer import interleave  # noqa: E402
from scmoe.run.command_line import simulate  # noqa: E402
from scmoe.run.effects import check_typed  # noqa: E402
from scmoe.training.card import environment, origin  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402

VOCABULARY = 8192  # small: the head is not what is compared
CONFIG = "gpt2_moe_medium"
SIZES = {
  "model.num_layers": "4",
  "model.num_experts": "8",
  "model.vocab_size": str(VOCABULARY),
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


def arms_of(wirings: list[str], own: list[list[str]], *, chunks: bool) -> dict[str, dict[str, str]]:
  """Fields of each arm by its name: a wiring, `WIRING in chunks`, or a name of `own`.

  Args:
    wirings: names of `WIRINGS`.
    own: of each further arm its name and words FIELD=VALUE.
    chunks: adds the arms in chunks.

  Raises:
    ConfigError: no arm, two of one name, or a word of `own` without "=".
  """
  arms = {name: WIRINGS[name] for name in wirings}
  for name in wirings if chunks else ():
    arms[f"{name} in chunks"] = WIRINGS[name] | {"dispatch.chunks": "2"}
    if name in SLOTS:
      slots = {"overlap.schedule": SLOTS[name], "overlap.order": "barriers"}
      arms[f"{name} in chunks"] |= slots
  for name, *words in own:
    if name in arms:
      raise ConfigError(f"--arm {name!r} names an arm that there is already; give it another name")
    arms[name] = fields_of(words)
  if not arms:
    raise ConfigError("there is no arm to time; name wirings with --wirings, or arms with --arm")
  return arms


def sizes_of(config: str) -> dict[str, str]:
  """Fields of every arm: for `CONFIG` a small model's, for another only how devices share it."""
  return MODEL | SIZES if config == CONFIG else SPLIT


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of every arm, FIELD=VALUE")
  parser.add_argument("--config", default=CONFIG, help="another keeps the sizes that it has")
  parser.add_argument("--name", default="wirings-nvlink", help="of the results")
  parser.add_argument(
    "--wirings", nargs="*", default=[*WIRINGS], choices=[*WIRINGS], help="which to time"
  )
  parser.add_argument("--chunks", action="store_true", help="also arms whose rows go in two chunks")
  parser.add_argument(
    "--arm",
    nargs="+",
    action="append",
    default=[],
    metavar=("NAME", "FIELD=VALUE"),
    help="one more arm: its name, and its fields",
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=2, help="steps that are timed together")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  simulate(2 if args.tiny else 0)
  given, file = environment(), out_file(args.out, args.name)
  fields = sizes_of(args.config) | (TINY if args.tiny else {}) | fields_of(args.words)
  arms = arms_of(args.wirings, args.arm, chunks=args.chunks)

  steps: dict[str, StepArm] = {}
  states: dict[str, MeasuredState] = {}
  with kept_programs(args.out / "programs"):
    for name, own in arms.items():
      run = configured(args.config, fields | own, tiny=args.tiny)
      check_typed(run, [*fields_of(args.words), *own])
      run = run.resolve(num_devices=2, vocab_size=VOCABULARY)
      steps[name] = step_arm(run, states, args.out / "profiles")
    failed = prepare(steps, [name for name in ALONE if name in steps] or [next(iter(steps))])
    timings = interleave(
      {name: arm for name, arm in steps.items() if name not in failed},
      rounds=args.rounds,
      calls=args.calls,
    )
  rounds = {name: steps[name].rounds() for name in timings}
  result = {
    "label": "quickstart" if args.tiny else args.config,
    "machine": machine(""),
    **origin("wirings", sys.argv[1:], given),
    "command": shlex.join(["python", *sys.argv]),
    "fields": fields,
    "options": arms,
    "arms": {name: timing.as_json() for name, timing in timings.items()},
    "rounds": rounds,
    "failed": failed,
  }
  file.write_text(json.dumps([result], indent=1) + "\n")
  tops = {name for name, own in arms.items() if (fields | own).get("model.wiring") == BASE}
  base = min((t.median for name, t in timings.items() if name in tops), default=None)
  lines = [f"{result['label']}, {', '.join(result['machine'].values())}"]
  for name, time in timings.items():
    ratio = f"{base / time.median:.3f}x" if base else ""
    lines.append(f"{name:30} {1e3 * time.median:8.2f} ms  {ratio}  {rounds[name]:.2f} rounds")
  text = "\n".join(lines)
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  run_main(lambda argv: main())
