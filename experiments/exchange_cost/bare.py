"""Prints the work beside each exchange of two chunks: sent at once, or the second behind a step.

  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/bare.py     two GPUs of one host, two minutes

Two pairs and one microbatch of `gpt2_moe_medium` Pos-2, packed rows in two chunks whose experts
barriers hold behind `mlp 0` and `attention 1: projections`: what `overlap.schedule=auto` tries.
Prints the computation between start and end of every exchange in the compiled program, and both
steps' times in turns.
Writes FOLDER/bare-NAME.txt (--out, runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from ranking import MODELS, SHARED  # noqa: E402
from shared_state import StepArm, machine, prepare  # noqa: E402

from scmoe.base.errors import run_main  # noqa: E402
from scmoe.blocks import schedule  # noqa: E402
from scmoe.profiling.timer import interleave  # noqa: E402
from scmoe.profiling.windows import program_windows, summary  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.run.config_files import find_config, load_config  # noqa: E402
from scmoe.run.fields import with_field  # noqa: E402
from scmoe.training.fastest import Steps  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402
from scmoe.training.variants import Variant  # noqa: E402

SLOTS = Variant("packed", "mlp 0, attention 1: projections", "barriers", chunks=2)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--name", default="slow", help="of the link, in the result's name")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  fields = SHARED | MODELS["medium"]
  run = functools.reduce(
    lambda r, f: with_field(r, *f), fields.items(), load_config(find_config("gpt2_moe_medium"))
  )
  run = run.resolve(num_devices=2, vocab_size=build.vocab_size(run.data))
  built = build.build(run).cut(groups=1)
  shared = MeasuredState(built)
  make = Steps(built, shared.abstract, args.out / "profiles")
  arms = {"second chunk behind a step": StepArm(make(SLOTS), shared)}
  with mock.patch.object(schedule, "_sent_behind", return_value=()):
    arms["all at once"] = StepArm(make(SLOTS), shared)
  prepare(arms, arms)
  timings = interleave(arms, rounds=args.rounds, calls=8)
  lines = [", ".join(machine("").values())]
  for name, arm in arms.items():
    t = timings[name]
    lines += [f"{name}: {1e3 * t.median:.2f} ± {1e3 * t.spread * t.median:.2f} ms"]
    assert arm.step.program is not None
    lines += [summary(program_windows(arm.step.program.text)), ""]
  args.out.mkdir(parents=True, exist_ok=True)
  (args.out / f"bare-{args.name}.txt").write_text("\n".join(lines))
  print("\n".join(lines))


if __name__ == "__main__":
  run_main(lambda argv: main())
