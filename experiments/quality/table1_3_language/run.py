"""Tables 1 and 3 of the paper on text: wirings, positions of the shortcut, and mixing.

  python experiments/quality/table1_3_language/run.py --scale cpu
  python experiments/quality/table1_3_language/run.py --scale gpu --limit_seconds 570

What is compared and how: README.md. Flags: --help, or experiments/quality/study.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

MAIN = ("top2", "shared_expert", "scmoe_pos1", "scmoe_pos2", "scmoe_pos3")

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does a model whose experts read an earlier value learn as well as top-2?",
  variants={
    "top2": {"model.wiring": "top2"},
    "top1": {"model.wiring": "top1"},
    "shared_expert": {"model.wiring": "shared_expert", "model.mix": "cg2"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
    "scmoe_pos3": {"model.wiring": "scmoe_pos3"},
    "pos2_direct": {"model.wiring": "scmoe_pos2", "model.mix": "direct"},
    "pos2_cg2": {"model.wiring": "scmoe_pos2", "model.mix": "cg2"},
  },
  contrasts=(
    *study.against(
      "top2",
      "scmoe_pos2",
      "scmoe_pos1",
      "scmoe_pos3",
      "shared_expert",
      "top1",
      margins={"scmoe_pos2": 0.01},
    ),
    *study.against("scmoe_pos2", "scmoe_pos1", "scmoe_pos3", "pos2_direct", "pos2_cg2"),
  ),
  seeds={
    "smoke": 2,
    "cpu": 3,
    "gpu": {**dict.fromkeys(MAIN, 5), "top1": 3, "pos2_direct": 3, "pos2_cg2": 3},
  },
)

if __name__ == "__main__":
  study.main(DESIGN)
