"""Skips at every layer: FarSkip-Collective's, and those of ScMoE's positions, against none.

python experiments/quality/farskip/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

EVERY = {"model.moe_every": "1"}
DIRECT = {"model.mix": "direct", **EVERY}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="What does a skip at every layer cost?",
  variants={
    "every_top2": {"model.wiring": "top2", **EVERY},
    "every_shared": {"model.wiring": "shared_expert", **EVERY},
    "every_pos1": {"model.wiring": "scmoe_pos1", **EVERY},
    "every_pos1_direct": {"model.wiring": "scmoe_pos1", **DIRECT},
    "every_pos3": {"model.wiring": "scmoe_pos3", **EVERY},
    "every_shared_direct": {"model.wiring": "shared_expert", **DIRECT},
    "every_farskip": {"model.wiring": "farskip", **DIRECT},
  },
  contrasts=(
    *study.against("every_shared", "every_pos1", "every_pos3", margins={"every_pos1": 0.01}),
    *study.against("every_top2", "every_pos1_direct"),
    *study.against("every_shared_direct", "every_farskip", margins={"every_farskip": 0.01}),
    *study.against("every_pos1_direct", "every_farskip"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 2, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
