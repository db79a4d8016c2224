"""Does a cut of a run rank schedules as the whole step does? Kendall's tau for two models.

  python experiments/exchange_cost/ranking.py --model medium --name nvlink
  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/ranking.py --model fine --name slow
  python experiments/exchange_cost/ranking.py --tiny    two simulated devices, to see that it runs

On two GPUs of one host a command should take six to eight minutes (expected). Eight candidates of
Pos-2 are measured on whole steps and on the cut that `overlap.schedule=auto` uses (two pairs, up to
eight groups of microbatches), all in turns; `--without NAME ...` leaves some out. `--groups 1` adds
a cut of one group: it sums gradients once, as any step does, and spends a larger share of its time
on that. Tau is (pairs ranked alike - pairs ranked otherwise) / all pairs: 1 if both rank alike, 0
if the cut says nothing. `decided` counts only the pairs whose whole steps differ by more than their
spread. `regret` is how much slower the cut's choice is than the whole step's.
Writes FOLDER/ranking-MODEL-NAME.json and .txt (--out, runs/exchange_cost by default).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from shared_state import (  # noqa: E402
  SPLIT,
  StepArm,
  configured,
  fields_of,
  machine,
  out_file,
  prepare,
)

from scmoe.base.errors import ConfigError, run_main  # noqa: E402
from scmoe.profiling.timer import Timing, interleave  # noqa: E402
from scmoe.run import build  # noqa: E402
from scmoe.run.command_line import simulate  # noqa: E402
from scmoe.training.compiled import kept_programs  # noqa: E402
from scmoe.training.fastest import MARGIN, Steps  # noqa: E402
from scmoe.training.measured import MeasuredState  # noqa: E402
from scmoe.training.search import against  # noqa: E402
from scmoe.training.variants import Variant  # noqa: E402

SHARED = SPLIT | {"model.wiring": "scmoe_pos2", "model.num_layers": "8"}
MODELS = {
  "medium": {"train.batch_size": "16", "train.tokens_per_step": "131072"},
  "fine": {
    "model.width": "2048",
    "model.num_experts": "64",
    "model.expert_hidden": "1024",
    "model.shared_hidden": "1024",
    "model.top_k": "7",
    "train.batch_size": "8",
    "train.tokens_per_step": "32768",
  },
}
TINY = {"model.num_layers": "6", "train.batch_size": "8", "train.tokens_per_step": "0"}
EARLY, SEAM = "mlp 0", "attention 1: projections"
SLOTS, BARRIERS = f"{EARLY}, {SEAM}", "barriers"
CANDIDATES = {
  "capacity": Variant(),
  "packed": Variant("packed"),
  "packed, 2 chunks": Variant("packed", chunks=2),
  f"packed after {EARLY}": Variant("packed", EARLY, BARRIERS),
  f"packed, 2 chunks after {SEAM}": Variant("packed", SEAM, BARRIERS, chunks=2),
  "packed, 2 chunks in slots": Variant("packed", SLOTS, BARRIERS, chunks=2),
  "packed, 2 chunks in slots, 124 CTAs": Variant("packed", SLOTS, BARRIERS, chunks=2, num_sms=124),
  "capacity, 2 chunks in slots": Variant(None, SLOTS, BARRIERS, chunks=2),
}


def tau(a: Mapping[str, float], b: Mapping[str, float], pairs: list[tuple[str, str]]) -> float:
  """Kendall's tau of two rankings over these pairs of names; nan without pairs."""
  sign = lambda x: (x > 0) - (x < 0)
  alike = [sign(a[i] - a[j]) * sign(b[i] - b[j]) for i, j in pairs]
  return sum(alike) / len(alike) if alike else float("nan")


def apart(timings: Mapping[str, Timing], pair: tuple[str, str]) -> bool:
  """True if the two of a pair differ by more than their spread."""
  slow, fast = sorted((timings[name] for name in pair), key=lambda t: -t.median)
  return against(fast, slow, 0.0)[0]


def choice(timings: Mapping[str, Timing]) -> str:
  """The candidate that a search would choose, in the order of `CANDIDATES`."""
  names = list(timings)
  return functools.reduce(
    lambda kept, name: name if against(timings[name], timings[kept], MARGIN)[0] else kept, names
  )


def compared(whole: Mapping[str, Timing], cut: Mapping[str, Timing]) -> dict[str, Any]:
  """How a cut's ranking agrees with the whole step's, and what its choice would cost.

  Args:
    whole, cut: times of the same candidates, in the same order.
  """
  pairs = list(itertools.combinations(whole, 2))
  decided = [pair for pair in pairs if apart(whole, pair)]
  of_whole, of_cut = ({n: t.median for n, t in found.items()} for found in (whole, cut))
  chosen = {"cut": choice(cut), "whole": choice(whole)}
  return {
    "candidates": len(whole),
    "tau": tau(of_cut, of_whole, pairs),
    "tau_decided": tau(of_cut, of_whole, decided),
    "pairs": len(pairs),
    "decided": len(decided),
    "chosen": chosen,
    "regret": of_whole[chosen["cut"]] / of_whole[chosen["whole"]] - 1,
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--model", choices=tuple(MODELS), default="medium")
  parser.add_argument("--name", default="nvlink", help="of the link, in the results' names")
  parser.add_argument("--groups", type=int, default=0, help="of a second cut; 0: no second cut")
  parser.add_argument(
    "--without", nargs="*", default=[], choices=[*CANDIDATES], help="candidates to leave out"
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--out", type=Path, default=Path("runs/exchange_cost"))
  args = parser.parse_args()
  if args.groups < 0:
    raise ConfigError(f"--groups={args.groups} must be at least 1, or 0 for no second cut")
  simulate(2 if args.tiny else 0)
  fields = SHARED | (TINY if args.tiny else MODELS[args.model]) | fields_of(args.words)
  run = configured("gpt2_moe_medium", fields, tiny=args.tiny)
  run = run.resolve(num_devices=2, vocab_size=build.vocab_size(run.data))
  file = out_file(args.out, f"ranking-{args.model}-{args.name}")
  candidates = {name: v for name, v in CANDIDATES.items() if name not in args.without}

  with kept_programs(args.out / "programs"):
    whole = build.build(run)
    kinds = {"whole": whole, "cut": whole.cut()}
    if args.groups:
      kinds[f"cut, {args.groups} groups"] = whole.cut(args.groups)
    arms: dict[str, StepArm] = {}
    for kind, built in kinds.items():
      shared = MeasuredState(built)
      make = Steps(built, shared.abstract, args.out / "profiles")
      arms |= {f"{kind}: {n}": StepArm(make(v), shared) for n, v in candidates.items()}
    alone = [name for name in ("whole: capacity", "whole: packed") if name in arms]
    failed = prepare(arms, alone)
    timed = {name: arm for name, arm in arms.items() if name not in failed}
    calls = {name: 2 if name.startswith("whole") else 8 for name in timed}
    timings = interleave(timed, rounds=args.rounds, calls=calls)

  both = [n for n in candidates if all(f"{kind}: {n}" in timings for kind in kinds)]
  of = {kind: {n: timings[f"{kind}: {n}"] for n in both} for kind in kinds}
  found = {kind: compared(of["whole"], times) for kind, times in of.items() if kind != "whole"}
  result = {
    "machine": machine(""),
    "command": " ".join(["python", *sys.argv]),
    "fields": fields,
    "arms": {name: timing.as_json() for name, timing in timings.items()},
    "failed": failed,
    "rankings": found,
  }
  cell = lambda t: f"{1e3 * t.median:9.2f} ± {1e3 * t.spread * t.median:.2f} ms"
  row = lambda n: "   ".join(f"{kind} {cell(times[n])}" for kind, times in of.items())
  lines = [f"{args.model}, {', '.join(result['machine'].values())}"]
  lines += [f"{n:34s} {row(n)}" for n in both]
  for kind, ranking in found.items():
    chosen = ranking["chosen"]
    lines.append(
      f"{kind}: tau {ranking['tau']:.2f} over {ranking['pairs']} pairs, "
      f"{ranking['tau_decided']:.2f} over the {ranking['decided']} that differ by more than their "
      f"spread; chosen on the cut: {chosen['cut']}, on whole steps: {chosen['whole']}; regret "
      f"{100 * ranking['regret']:.1f} %"
    )
  text = "\n".join(lines)
  file.write_text(json.dumps(result, indent=1) + "\n")
  file.with_suffix(".txt").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  run_main(lambda argv: main())
