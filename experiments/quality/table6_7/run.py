"""Tables 6 and 7 of the paper on text: DGMoE, and CG-1 against direct addition.

python experiments/quality/table6_7/run.py --scale gpu --limit_seconds 570
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

from scmoe.run.config import RunConfig


def short() -> RunConfig:
  """The CPU's language model, half as long: thirteen variants have to end within 15 minutes."""
  run = study.language("cpu")
  train = dataclasses.replace(run.train, steps=40, eval_every=40, eval_batches=16)
  return dataclasses.replace(run, train=train)


DIRECT = {"model.mix": "direct"}

DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does DGMoE learn as well as top-2, and does CG-1 beat direct addition?",
  variants={
    "top2": {"model.wiring": "top2"},
    "dgmoe": {"model.wiring": "dgmoe"},
    "dgmoe_share": {"model.wiring": "dgmoe_share"},
    "dgmoe_repeat": {"model.wiring": "dgmoe_repeat"},
    "top1": {"model.wiring": "top1"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
    "pos1_direct": {"model.wiring": "scmoe_pos1", **DIRECT},
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
    "pos2_direct": {"model.wiring": "scmoe_pos2", **DIRECT},
    "scmoe_pos3": {"model.wiring": "scmoe_pos3"},
    "pos3_direct": {"model.wiring": "scmoe_pos3", **DIRECT},
    "shared_cg1": {"model.wiring": "shared_expert"},
    "shared_direct": {"model.wiring": "shared_expert", **DIRECT},
  },
  contrasts=(
    *study.against("top2", "dgmoe", margins={"dgmoe": 0.01}),
    *study.against("top1", "dgmoe", "dgmoe_share"),
    *study.against("dgmoe", "dgmoe_repeat"),
    *study.against("top1", "dgmoe_repeat", margins={"dgmoe_repeat": 0.01}),
    *study.against("scmoe_pos2", "dgmoe", "pos2_direct"),
    *study.against("scmoe_pos1", "pos1_direct"),
    *study.against("scmoe_pos3", "pos3_direct"),
    *study.against("shared_cg1", "shared_direct"),
  ),
  configs={"cpu": short, "gpu": study.small_language},
  seeds={"smoke": 2, "cpu": 2, "gpu": 5},
)

if __name__ == "__main__":
  study.main(DESIGN)
