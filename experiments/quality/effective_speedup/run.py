"""A wiring's worth in time: the baseline's loss after several amounts of text.

  python experiments/quality/effective_speedup/run.py --scale gpu --limit_seconds 570

The runs give the baseline's curve. With the losses of the variants that other studies train at the
same size (baseline.json), and the speeds that ../speeds.json names, the table of effective
speed-ups follows; README.md has the formulas.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

SHARES = {"eighth": 0.125, "quarter": 0.25, "half": 0.5, "whole": 1, "double": 2}


def variants(scale: str) -> dict[str, dict[str, str]]:
  """The baseline with a share of the steps, a tenth of them warm-up, each with its own decay."""
  run = study.of_small_studies(scale)
  shares = {name: study.with_share(run, share) for name, share in SHARES.items()}
  shares["whole"] = {}
  return {f"top2_{name}": {"model.wiring": "top2", **fields} for name, fields in shares.items()}


DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="How much text would top-2 need for the loss of another wiring?",
  variants=variants,
  contrasts=study.against("top2_whole", "top2_half", "top2_double"),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": {**{f"top2_{name}": 3 for name in SHARES}, "top2_whole": 5}},
)

if __name__ == "__main__":
  study.main(DESIGN)
