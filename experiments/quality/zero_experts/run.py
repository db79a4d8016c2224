"""Do zero experts help: a choice of how much to compute for a token, at equal mean cost?

python experiments/quality/zero_experts/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

POS2 = {"model.wiring": "scmoe_pos2"}
BIAS = {"router.bias": "pid"}  # with its default gain, too small beside zero experts; README.md
HELD = {**BIAS, "router.bias_rate": "0.2", "router.bias_proportional": "0.2"}
ZERO = {"model.zero_experts": "8", "model.top_k": "2"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Do zero experts help at equal mean cost?",
  variants={
    "scmoe_pos2": POS2,
    "pos2_bias": {**POS2, **BIAS},
    "pos2_zero": {**POS2, **BIAS, **ZERO},
    "scmoe2": {"model.wiring": "scmoe2"},
    "held_bias": {**POS2, **HELD},
    "held_zero": {**POS2, **HELD, **ZERO},
  },
  contrasts=(
    *study.against("pos2_bias", "pos2_zero"),
    *study.against("scmoe_pos2", "pos2_zero", "pos2_bias"),
    *study.against("scmoe2", "pos2_zero"),
    *study.against("held_bias", "held_zero"),
    *study.against("scmoe_pos2", "held_zero", "held_bias"),
    *study.against("scmoe2", "held_zero"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
