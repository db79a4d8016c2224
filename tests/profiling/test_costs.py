"""Measured times of instructions: what a trace leaves out or spreads over several kernels."""

import struct

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from scmoe.parallel.mesh import MeshConfig, make_mesh, manual
from scmoe.profiling.costs import STRETCH, instruction_costs
from scmoe.profiling.trace import Event
from scmoe.profiling.wire import as_profile, operation_names

PROGRAM = """HloModule jit_f, is_scheduled=true

%slices (p: f32[4], q: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %kernel.3 = f32[4] custom-call(%p)
  ROOT %copy.1 = f32[4] copy(%kernel.3)
}

ENTRY %main (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4] parameter(0)
  %dynamic_slice_fusion = f32[4] fusion(%p.1, %p.1), kind=kCustom, calls=%slices
  %named = f32[4] fusion(%p.1), kind=kLoop, calls=%slices
  ROOT %unknown = f32[4] fusion(%p.1), kind=kLoop, calls=%nothing
}
"""


def event(name, start, us, op, device="/device:GPU:0"):
  return Event(device, "Stream #1", name, start * 1e3, (start + us) * 1e3, op)


def test_costs_by_hand():
  events = [
    event("memset", 0, 1, "gemm.1"),  # two kernels of one product, executed twice
    event("nvjet", 1, 10, "gemm.1"),
    event("memset", 20, 1, "gemm.1"),
    event("nvjet", 21, 14, "gemm.1"),
    event("mosaic", 40, 7, "kernel.3"),
    event("loop", 50, 3, "named"),
    event("ncclSend", 60, 90, "all_to_all.1"),  # waits for the other device
    event("ncclSend", 60, 50, "all_to_all.1", device="/device:GPU:1"),
    event("nvjet", 0, 16, "gemm.1", device="/device:GPU:1"),
    event("MemcpyD2D", 0, 5, ""),
  ]
  costs = instruction_costs(events, PROGRAM)
  assert costs == {
    "gemm.1": pytest.approx((13 + 16) / 2),
    "kernel.3": pytest.approx(7),
    "dynamic_slice_fusion": pytest.approx(7),  # after the kernel inside, which alone is traced
    "named": pytest.approx(3),
    "all_to_all.1": pytest.approx(50 * STRETCH),
  }


def test_the_wire_format_of_a_profile():
  long = "n" * 200  # a length of two bytes
  entry = b"\x0a\xc8\x01" + long.encode() + b"\x11" + struct.pack("<d", 2.5)
  assert as_profile({long: 2.5}) == b"\x0a\xd4\x01" + entry
  assert as_profile({"a": 1.0}) == b"\x0a\x0c\x0a\x01a\x11" + struct.pack("<d", 1.0)


def test_names_of_a_compiled_program_reach_into_what_its_text_folds():
  mesh = make_mesh(MeshConfig(data=1, expert=2), jax.devices()[:2])

  def local(x):
    with jax.named_scope("dispatch"):
      x = jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)
    with jax.named_scope("mlp"):
      return jnp.sin(x @ x.T)

  function = manual(local, mesh, P("expert"), P("expert"))
  names = operation_names(jax.jit(function).lower(jnp.ones((4, 4))).compile())
  assert any(name.endswith("dispatch/all_to_all") for name in names.values())
  assert any("/mlp/" in name for name in names.values())
