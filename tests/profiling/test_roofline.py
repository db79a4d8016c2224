"""The model's arithmetic, and that it lies near what was measured."""

import dataclasses

import pytest

from scmoe.base.errors import ConfigError
from scmoe.profiling.roofline import MACHINES, Machine, Sizes, machine, model_times

XL = Sizes(
  tokens=8192, seq=2048, width=2048, mlp=8192, expert=8192, shared=8192,
  head_width=2048, kv_width=2048, experts=8, k=1, devices=4,
)  # fmt: skip


def test_an_exchange_by_hand():
  simple = Machine(flops=1e30, memory=1e30, link=1e9, latency=0.5)
  found = model_times(dataclasses.replace(XL, tokens=1000, width=100, k=3), simple)
  # 1000 · 3 rows of 100 numbers of 2 bytes, a quarter stays here; half a second before the first.
  assert found.dispatch == pytest.approx(0.5 + 450_000 / 1e9)
  assert found.combine == found.dispatch
  once = dataclasses.replace(XL, tokens=1000, width=100, k=3, sent=2.0)  # two rows of each token
  assert model_times(once, simple).dispatch == pytest.approx(0.5 + 300_000 / 1e9)
  assert model_times(dataclasses.replace(XL, devices=1), simple).dispatch == 0


def test_two_gpus_of_a_slow_link():
  # 2 x H200, 2026-11-22, gpt2_moe_medium: 16,384 tokens of width 1024, factor 2: 1.46 ms measured.
  sizes = dataclasses.replace(XL, tokens=16384, width=1024, capacity_factor=2.0, devices=2)
  assert 1e3 * model_times(sizes, machine("h200-slow")).dispatch == pytest.approx(1.46, rel=0.1)


def test_arithmetic_by_hand():
  only_flops = Machine(flops=1e12, memory=1e30, link=1e9, latency=0)
  found = model_times(XL, only_flops)
  assert found.mlp == pytest.approx(2 * 2 * 8192 * 2048 * 8192 / 1e12)
  assert found.experts == pytest.approx(found.mlp)  # one expert per token, as wide as the MLP


def test_the_model_is_near_the_measurement():
  # 4 x H200, 2026-11-21, four pairs: all-to-all alone 7.21 ms (slow link), dense part 12.4 ms.
  found = model_times(XL, machine("h200-slow"))
  assert 4 * 1e3 * (found.dispatch + found.combine) == pytest.approx(7.21, rel=0.35)
  dense = 4 * 1e3 * (2 * (found.projections + found.mixing) + 2 * found.mlp)
  assert dense == pytest.approx(12.4, rel=0.25)


def test_unknown_machine():
  with pytest.raises(ConfigError, match=r"machine='a100' is unknown; one of: h200-nvlink"):
    machine("a100")
  assert set(MACHINES) == {"h200-nvlink", "h200-slow"}
