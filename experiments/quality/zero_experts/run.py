"""Do zero experts help: a choice of how much to compute for a token, at equal mean cost?

python experiments/quality/zero_experts/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

POS2 = {"model.wiring": "scmoe_pos2"}
BIAS = {"router.bias": "pid"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Do zero experts help at equal mean cost?",
  variants={
    "scmoe_pos2": POS2,
    "pos2_bias": {**POS2, **BIAS},
    "pos2_zero": {**POS2, **BIAS, "model.zero_experts": "8", "model.top_k": "2"},
    "scmoe2": {"model.wiring": "scmoe2"},
  },
  contrasts=(
    *study.against("pos2_bias", "pos2_zero"),
    *study.against("scmoe_pos2", "pos2_zero", "pos2_bias"),
    *study.against("scmoe2", "pos2_zero"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
