"""The last row of the paper's Table 3: the first pair reads at Pos-1, the others at Pos-2.

python experiments/quality/first_pair/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Should the first pair read at Pos-1?",
  variants={
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
    "pos2_l0": {"model.wiring": "scmoe_pos2_l0"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
  },
  contrasts=(
    *study.against("scmoe_pos2", "pos2_l0", margins={"pos2_l0": 0.01}),
    *study.against("scmoe_pos1", "pos2_l0"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
