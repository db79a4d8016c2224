"""A norm behind the expert stage: does it help a shortcut, a shared expert, or any wiring?

python experiments/quality/norm_after/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

AFTER = {"model.ablation.norm_after": "true"}
WIRINGS = {"top2": "top2", "shared_cg1": "shared_expert", "scmoe_pos2": "scmoe_pos2"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Which wirings does a norm behind the expert stage help?",
  variants={
    **{name: {"model.wiring": wiring} for name, wiring in WIRINGS.items()},
    **{f"{name}_after": {"model.wiring": wiring, **AFTER} for name, wiring in WIRINGS.items()},
    "pos2_megatron": {"model.wiring": "scmoe_pos2", "model.shortcut_norm": "megatron"},
  },
  contrasts=(
    *(contrast for name in WIRINGS for contrast in study.against(name, f"{name}_after")),
    *study.against("top2_after", "scmoe_pos2_after", "shared_cg1_after"),
    *study.against("pos2_megatron", "scmoe_pos2_after", margins={"scmoe_pos2_after": 0.01}),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
