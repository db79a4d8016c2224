"""Every wiring equals the paper's equations, written as loops: values, drops and all gradients."""

import dataclasses

import harness
import numpy as np
import pytest
from covering import night

from scmoe.blocks.block import ModelAblation
from scmoe.blocks.wiring import WIRINGS
from scmoe.moe.dispatch import DispatchConfig

DROPS = DispatchConfig(capacity_factor=1.0, groups=2)

CASES = {
  f"{wiring}-every{every}": {"wiring": wiring, "moe_every": every}
  for wiring in WIRINGS
  for every in (1, 2)
}
CASES |= {
  "scmoe_pos3-every3": {"wiring": "scmoe_pos3", "moe_every": 3},
  "dgmoe-every3": {"wiring": "dgmoe", "moe_every": 3},
  "dense-llama": {"wiring": "dense", "style": "llama"},
  "topk3-llama": {"wiring": "topk", "top_k": 3, "style": "llama"},
  "farskip-every3-llama-own": {
    "wiring": "farskip",
    "moe_every": 3,
    "style": "llama",
    "shortcut_norm": "own",
    "mix": "cg2",
    "top_k": 2,
  },
  "farskip-every1-shortcut": {
    "wiring": "farskip",
    "moe_every": 1,
    "shortcut_norm": "own",
    "ablation": ModelAblation("shortcut"),
  },
  "top2-norm-after": {"wiring": "top2", "ablation": ModelAblation(norm_after=True)},
  "scmoe_pos2-own-norm-after": {
    "wiring": "scmoe_pos2",
    "shortcut_norm": "own",
    "ablation": ModelAblation(norm_after=True),
  },
  "scmoe_pos1-every1-llama": {"wiring": "scmoe_pos1", "moe_every": 1, "style": "llama"},
  "scmoe_pos2-llama": {"wiring": "scmoe_pos2", "style": "llama", "mix": "cg2"},
  "dgmoe-llama-megatron": {"wiring": "dgmoe", "style": "llama", "shortcut_norm": "megatron"},
  "scmoe_pos2-own": {"wiring": "scmoe_pos2", "shortcut_norm": "own", "mix": "direct"},
  "scmoe_pos2-every1-own": {"wiring": "scmoe_pos2", "moe_every": 1, "shortcut_norm": "own"},
  "scmoe_pos3-every1-megatron": {
    "wiring": "scmoe_pos3",
    "moe_every": 1,
    "shortcut_norm": "megatron",
    "mix": "cg2",
    "ablation": ModelAblation("shortcut"),
  },
  "scmoe_pos1-k2-megatron": {
    "wiring": "scmoe_pos1",
    "top_k": 2,
    "shortcut_norm": "megatron",
    "ablation": ModelAblation("shortcut"),
  },
}


# By day each wiring once, each option of a model once, and what differs with a MoE in every block;
# Llama's style is farskip's.
BY_DAY = {name for name in CASES if name.endswith("-every2")} | {
  "scmoe_pos2-every1", "farskip-every3-llama-own", "scmoe_pos3-every1-megatron",
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n in BY_DAY else night(n) for n in CASES])
def test_the_model_equals_its_equations(name):
  config = harness.tiny(**({"top_k": 1} | CASES[name]))
  # Room for top_k times the balanced share holds 3 choices of 4 experts however they fall.
  transport = dataclasses.replace(DROPS, capacity_factor=0.5) if config.top_k == 3 else DROPS
  graph, params = harness.parts(config, dispatch=transport)
  expected = harness.oracle_run(config, params, transport)
  got = harness.run(graph, params)
  harness.assert_same(got, expected)
  if config.wiring != "dense":
    harness.assert_counts(got, expected.aux["sums"])
    assert sum(sums.dropped for sums in expected.aux["sums"]) > 0, "the case must drop something"


@pytest.mark.parametrize("wiring", ["top2", night("scmoe_pos2"), night("dgmoe")])
def test_without_drops_and_with_padding(wiring):
  config = harness.tiny(wiring=wiring)
  graph, params = harness.parts(config, dispatch=DROPS)
  live = np.ones((harness.BATCH, harness.LENGTH), bool)
  live[0, 4:] = False
  expected = harness.oracle_run(config, params, None, live=live)
  got = harness.run(graph, params, no_drop=True, mask_BS=live)
  harness.assert_same(got, expected)
  harness.assert_counts(got, expected.aux["sums"])
  assert got.aux["sums"].dropped.sum() == 0
