"""Which norm should feed the shortcut: the shared one, one of its own, or Megatron's two?

python experiments/quality/norms/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

POS2 = {"model.wiring": "scmoe_pos2"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Which norm should feed the shortcut?",
  variants={
    "scmoe_pos2": POS2,
    "pos2_own": {**POS2, "model.shortcut_norm": "own"},
    "pos2_megatron": {**POS2, "model.shortcut_norm": "megatron"},
    "top2": {"model.wiring": "top2"},
  },
  contrasts=(
    *study.against(
      "scmoe_pos2", "pos2_own", "pos2_megatron", margins={"pos2_own": 0.01, "pos2_megatron": 0.01}
    ),
    *study.against("top2", "pos2_own", "pos2_megatron"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
