"""Does the shortcut cost more where every block has a MoE?

python experiments/quality/moe_every/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

EVERY = {"model.moe_every": "1"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does the shortcut cost more where every block has a MoE?",
  variants={
    "top2": {"model.wiring": "top2"},
    "shared_expert": {"model.wiring": "shared_expert", "model.mix": "cg2"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
    "every_top2": {"model.wiring": "top2", **EVERY},
    "every_shared": {"model.wiring": "shared_expert", "model.mix": "cg2", **EVERY},
    "every_pos1": {"model.wiring": "scmoe_pos1", **EVERY},
    "every_pos2": {"model.wiring": "scmoe_pos2", **EVERY},
  },
  contrasts=(
    *study.against("top2", "scmoe_pos1", "scmoe_pos2"),
    *study.against(
      "every_top2", "every_pos1", "every_pos2", "every_shared", margins={"every_pos1": 0.01}
    ),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 2, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
