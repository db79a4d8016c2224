"""Table 4 of the paper: ScMoE-2, with two early experts beside the shared one, against top-3.

python experiments/quality/table4/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does ScMoE-2 learn as well as top-3, and better than ScMoE?",
  variants={
    "top3": {"model.wiring": "topk", "model.top_k": "3"},
    "scmoe2": {"model.wiring": "scmoe2"},
    "top2": {"model.wiring": "top2"},
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
  },
  contrasts=(
    *study.against("top3", "scmoe2", margins={"scmoe2": 0.01}),
    *study.against("scmoe_pos2", "scmoe2"),
    *study.against("top2", "top3"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
