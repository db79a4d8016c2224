"""Slots, barriers, unrolling and rematerialisation change no value and no gradient."""

import dataclasses
import functools

import harness
import jax
import numpy as np
import pytest
from covering import night, pairs_by_day_and_night

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapAblation, OverlapConfig
from scmoe.blocks.schedule import dense_steps, slot_names, tap_step
from scmoe.blocks.wiring import WIRINGS, tap_index
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig, make_mesh

DROPS = DispatchConfig(capacity_factor=1.0, groups=2)
PLAIN = OverlapConfig()


@functools.cache
def executed(wiring, overlap=PLAIN, remat="none", dispatch=DROPS, every=2):
  config = harness.tiny(wiring=wiring, moe_every=every)
  graph, params = harness.parts(config, dispatch=dispatch, overlap=overlap)
  return harness.run(graph, params, remat=remat)


def assert_same_run(got, expected):
  harness.assert_same(got, expected, rtol=1e-6)
  np.testing.assert_array_equal(got.aux["sums"].dropped, expected.aux["sums"].dropped)


def each_slot():
  for wiring in ("scmoe_pos1", "scmoe_pos2", "scmoe_pos3", "dgmoe"):
    rule = WIRINGS[wiring]
    window = dense_steps(rule, 2)[tap_step(tap_index(rule.taps[0], 2)) :]
    slots = slot_names([step.name for step in window])
    for slot in slots if wiring == "scmoe_pos2" else (slots[0], slots[-1]):
      by_day = wiring in ("scmoe_pos2", "dgmoe") and slot == slots[-1]  # one tap, and two
      yield (wiring, slot) if by_day else night(wiring, slot)


@pytest.mark.parametrize(("wiring", "slot"), each_slot(), ids=str)
def test_overlapped_equals_sequential(wiring, slot):
  """Values, every gradient and drops, with the order tied forward and backward."""
  overlap = OverlapConfig(schedule=slot, order="barriers")
  sequential = executed(wiring, OverlapConfig(schedule="off"))
  assert_same_run(executed(wiring, overlap), sequential)
  assert sequential.aux["sums"].dropped.sum() > 0


@pytest.mark.parametrize(
  "wiring", [night("scmoe_pos1"), night("scmoe_pos2"), "farskip", "farskip_routed"]
)
def test_units_of_one_block_overlapped_equal_sequential(wiring):
  run = functools.partial(executed, wiring, every=1)
  overlap = OverlapConfig(schedule="attention 0", order="barriers", unroll=0)
  assert_same_run(run(overlap), run(OverlapConfig(schedule="off")))


@pytest.mark.parametrize(
  ("wiring", "slots", "backward"),
  [
    *pairs_by_day_and_night(
      ["topk", "scmoe_pos2"],
      ["mlp 0, attention 1", "attention 1"],
      ["mirror", "attention 1: projections, shared expert"],
    ),
    night("dgmoe", "attention 1", "mirror"),  # by day in one chunk, above
  ],
)
def test_chunks_in_slots_of_their_own_equal_sequential(wiring, slots, backward):
  overlap = OverlapConfig(slots, order="barriers", ablation=OverlapAblation(backward))
  chunks = dataclasses.replace(DROPS, chunks=2)
  assert_same_run(executed(wiring, overlap, dispatch=chunks), executed(wiring))


def test_chunks_that_wait_for_steps_equal_sequential():
  """On two devices, each chunk sent behind another step: values and gradients, forward and back."""
  mesh = make_mesh(MeshConfig(expert=2), jax.devices()[:2])
  dispatch = DispatchConfig(transport="dropless")

  def run(overlap, chunks):
    config = harness.tiny(wiring="scmoe_pos2")
    own = dataclasses.replace(dispatch, chunks=chunks)
    graph, params = harness.parts(config, dispatch=own, overlap=overlap)
    step = jax.jit(harness.on_mesh(mesh, graph, params))
    given = harness.sharded(params, mesh), harness.tokens(), harness.cotangent()
    (value, aux), grads = step(*given)
    return harness.Run(float(value), jax.tree.map(np.asarray, aux), harness.named(grads))

  slots = "mlp 0, attention 1: projections, attention 1"
  waiting = run(OverlapConfig(slots, order="barriers"), 3)
  assert_same_run(waiting, run(OverlapConfig(schedule="off"), 1))


@pytest.mark.parametrize(
  "backward", [night("attention 1: projections"), "shared expert", night("free")]
)
def test_a_backward_slot_of_its_own_and_unrolled_pairs_change_nothing(backward):
  overlap = OverlapConfig(
    "attention 1", order="barriers", unroll=0, ablation=OverlapAblation(backward)
  )
  assert_same_run(executed("scmoe_pos2", overlap), executed("scmoe_pos2"))


@pytest.mark.parametrize("remat", [night("dots"), "moe", night("full")])
def test_what_is_recomputed_changes_no_gradient(remat):
  assert_same_run(executed("scmoe_pos2", remat=remat), executed("scmoe_pos2"))


@pytest.mark.parametrize(
  "dispatch",
  [
    DispatchConfig(transport="dropless", slack=1.0),
    night(DispatchConfig(transport="packed", slack=1.0)),
    night(DispatchConfig(transport="dropless", slack=1.0, overflow="repeat")),
    night(DispatchConfig(transport="per_rank", slack=1.0)),
  ],
  ids=["dropless", "packed", "repeat", "per_rank"],
)
def test_experts_are_recomputed_in_overflow_rounds_too(dispatch):
  """On two devices: the loop of overflow rounds finds the parameters of recomputed experts."""
  mesh = make_mesh(MeshConfig(expert=2), jax.devices()[:2])
  graph, params = harness.parts(harness.tiny(wiring="topk", top_k=2), dispatch=dispatch)

  def run(remat):
    step = jax.jit(harness.on_mesh(mesh, graph, params, remat=remat))
    given = harness.sharded(params, mesh), harness.tokens(), harness.cotangent()
    (value, aux), grads = step(*given)
    return harness.Run(float(value), jax.tree.map(np.asarray, aux), harness.named(grads))

  assert_same_run(run("moe"), run("none"))


@pytest.mark.parametrize("transport", ["capacity", "dropless"])
def test_experts_are_recomputed_where_that_is_asked_for(transport):
  """`train.remat=moe` keeps nothing of the experts' hidden width but their weights."""
  config = harness.tiny(wiring="topk", top_k=2, mlp_hidden=20, expert_hidden=28)
  graph, params = harness.parts(config, dispatch=DispatchConfig(transport=transport))
  weights = {leaf.shape for leaf in jax.tree.leaves(params)}

  def kept(remat):
    function = harness.scalar(graph, harness.tokens(), harness.cotangent(), remat=remat)
    pull = jax.eval_shape(lambda p: jax.vjp(function, p, has_aux=True)[1], params)
    hidden = [a.shape for a in jax.tree.leaves(pull) if a.shape[-1:] == (28,)]
    return [shape for shape in hidden if shape not in weights]

  assert kept("none")
  assert not kept("moe")


def test_recomputing_the_experts_gathers_nothing_again():
  """Two devices share each expert: rows are repeated, or weights gathered, once."""
  mesh = make_mesh(MeshConfig(expert=4), jax.devices()[:4], num_experts=2)
  config = harness.tiny(wiring="topk", top_k=1, num_experts=2)

  def gathers(replicas, remat):
    graph, params = harness.parts(config, dispatch=DispatchConfig(adaptive_r=replicas))
    step = harness.on_mesh(mesh, graph, params, remat=remat)
    arguments = params, harness.tokens(batch=4), harness.cotangent(batch=4)
    return str(jax.make_jaxpr(step)(*arguments)).count("all_gather[")

  for replicas in (1, 2):
    assert gathers(replicas, "moe") == gathers(replicas, "none") > 0


def test_unknown_remat():
  with pytest.raises(ConfigError, match=r"train.remat='some' is unknown; one of: none, dots"):
    executed("scmoe_pos2", remat="some")


def test_a_slot_that_is_no_step_is_refused():
  message = r"overlap.schedule='attention' names no step; did you mean 'attention 1'\? the experts"
  with pytest.raises(ConfigError, match=message):
    executed("scmoe_pos2", OverlapConfig(schedule="attention"))
