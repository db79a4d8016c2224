"""Does what the shortcut costs depend on the number of experts?

python experiments/quality/experts/run.py --scale gpu --limit_seconds 570
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study


def variant(wiring: str, experts: int) -> dict[str, str]:
  """Eight experts are the common configuration, whose runs other studies share."""
  number = {} if experts == 8 else {"model.num_experts": str(experts)}
  return {"model.wiring": wiring, **number}


DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does what the shortcut costs depend on the number of experts?",
  variants={
    f"{short}_{experts}": variant(wiring, experts)
    for experts in (4, 8, 16, 32)
    for short, wiring in (("top2", "top2"), ("pos2", "scmoe_pos2"))
  },
  contrasts=(
    *(c for n in (4, 8, 16, 32) for c in study.against(f"top2_{n}", f"pos2_{n}")),
    *study.against("top2_8", "top2_32"),
    *study.against("pos2_8", "pos2_32"),
  ),
  configs={"gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 2, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
