"""experiments/exchange_cost/replay.py: a program's kernels and transfers in its order."""

import pytest
from scripts import script

# A product of 8 x 4 x 2, a sum that two kernels need in turn, and an exchange that XLA has merged.
PROGRAM = """HloModule step, is_scheduled=true

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %negate.1 = f32[8]{0} negate(%p)
}

ENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,2]{1,0} parameter(1)
  %gemm_fusion.1 = f32[8,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%body, metadata={op_name="jit(f)/mlp/dot"}
  %all-reduce-start.1 = f32[8,2]{1,0} all-reduce-start(%gemm_fusion.1), channel_id=1, to_apply=%add
  %fusion.2 = f32[100]{0} fusion(%a), kind=kLoop, calls=%body, metadata={op_name="jit(f)/attention/add"}
  %all-reduce-done.1 = f32[8,2]{1,0} all-reduce-done(%all-reduce-start.1), metadata={op_name="x"}
  %all-to-all.1 = f32[8,2]{1,0} all-to-all(%all-reduce-done.1), channel_id=2
  ROOT %copy.1 = f32[8,2]{1,0} copy(%all-to-all.1)
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def replay():
  """The script as a module."""
  return script("exchange_cost/replay.py")


def test_the_entry_is_read_in_order(replay):
  found = replay.entry(PROGRAM)
  assert [one.kind for one in found] == [
    "parameter", "parameter", "fusion", "all-reduce-start", "fusion", "all-reduce-done",
    "all-to-all", "copy",
  ]  # fmt: skip
  assert [one.name for one in found if one.is_product] == ["gemm_fusion.1"]
  assert found[2].operands == ["a", "b"]
  assert found[2].shapes == ["f32[8,2]"]


def test_times_are_those_of_flops_and_bytes(replay, monkeypatch):
  for name, value in {"FLOPS": 1.0, "MEMORY": 1.0, "LAUNCH": 0.0, "LATENCY": 0.0}.items():
    monkeypatch.setattr(replay, name, value)
  found = replay.seconds_of(replay.entry(PROGRAM), 4, 1.0)
  assert found["fusion.2"] == 4 * (100 + 32)
  monkeypatch.setattr(replay, "MEMORY", 1e9)
  assert replay.seconds_of(replay.entry(PROGRAM), 4, 1.0)["gemm_fusion.1"] == 2 * 8 * 4 * 2
  # Of 64 bytes each of four devices sends three quarters, and a ring for a sum twice as much.
  assert found["all-to-all.1"] == 48
  assert found["all-reduce-start.1"] == 96


def test_what_waits_for_the_link_is_bare(replay):
  """The sum takes 5 s, of which a kernel of 2 s hides 2; the exchange behind it has nothing."""
  seconds = {"gemm_fusion.1": 1.0, "all-reduce-start.1": 5.0, "fusion.2": 2.0, "copy.1": 1.0}
  found = replay.replayed(replay.entry(PROGRAM), seconds | {"all-to-all.1": 4.0})
  assert found == pytest.approx((11e3, 4e3, 9e3, 4e3, 3e3))
