"""Skips at every layer, as FarSkip-Collective has them for its experts, against none.

python experiments/quality/farskip/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

EVERY = {"model.moe_every": "1"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="What does a skip at every layer cost?",
  variants={
    "every_top2": {"model.wiring": "top2", **EVERY},
    "every_shared": {"model.wiring": "shared_expert", **EVERY},
    "every_pos1": {"model.wiring": "scmoe_pos1", **EVERY},
    "every_pos1_direct": {"model.wiring": "scmoe_pos1", "model.mix": "direct", **EVERY},
    "every_pos3": {"model.wiring": "scmoe_pos3", **EVERY},
  },
  contrasts=(
    *study.against("every_shared", "every_pos1", "every_pos3", margins={"every_pos1": 0.01}),
    *study.against("every_top2", "every_pos1_direct"),
  ),
  seeds={"smoke": 2, "cpu": 2, "gpu": 3},
)

if __name__ == "__main__":
  study.main(DESIGN)
