"""Muon in AdamW's place: do the wirings keep their order?

python experiments/quality/muon/run.py --scale gpu --limit_seconds 570
"""

import dataclasses
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

from scmoe.run.config import RunConfig

RATE = 2e-3  # of two pilots, 2e-3 and 5e-3, which ended within 0.01 nats; README.md
CURVE = {"top2_half": 0.5, "top2_double": 2}
POS2 = {"model.wiring": "scmoe_pos2"}


def with_muon(scale: str) -> RunConfig:
  """The configuration that the other studies have at this scale, with Muon at `RATE`."""
  run = study.of_small_studies(scale)
  return dataclasses.replace(
    run, optimizer=dataclasses.replace(run.optimizer, name="muon", learning_rate=RATE)
  )


def variants(scale: str) -> dict[str, dict[str, str]]:
  """The wirings, and top-2 with half and twice the text, a tenth of the steps warm-up."""
  found = {
    "top2": {"model.wiring": "top2"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
    "scmoe_pos2": POS2,
    "scmoe_pos3": {"model.wiring": "scmoe_pos3"},
    "shared_cg1": {"model.wiring": "shared_expert"},
    "pos2_megatron": {**POS2, "model.shortcut_norm": "megatron"},
  }
  for name, share in CURVE.items():
    found[name] = {"model.wiring": "top2", **study.with_share(with_muon(scale), share)}
  return found


DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Do the wirings keep their order under Muon?",
  variants=variants,
  contrasts=(
    *study.against(
      "top2", "scmoe_pos2", "scmoe_pos1", "scmoe_pos3", "shared_cg1", "pos2_megatron",
      margins={"scmoe_pos2": 0.01},
    ),
    *study.against("scmoe_pos2", "pos2_megatron"),
    *study.against("top2", *CURVE),
  ),
  configs={scale: functools.partial(with_muon, scale) for scale in study.SCALES},
  seeds={"smoke": 2, "cpu": 2,
         "gpu": {name: 3 if name in CURVE else 5 for name in variants("gpu")}},
)  # fmt: skip

if __name__ == "__main__":
  study.main(DESIGN)
