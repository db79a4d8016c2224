"""A pair that begins the next pair's dispatch computes what one that does not computes."""

import functools
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.schedule import COMBINE, DISPATCH
from scmoe.blocks.walk import Context
from scmoe.models import ahead
from scmoe.models.gpt import Pass
from scmoe.models.gradient_sums import accumulate
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import (
  Capacity,
  DispatchConfig,
  Dropless,
  Local,
  Packed,
  PerRank,
  sends_ahead,
)
from scmoe.moe.dispatch.transport import Computed
from scmoe.moe.options import RouterConfig
from scmoe.offload.experts import Migration
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs
from scmoe.profiling.overlap import direction_of
from scmoe.profiling.windows import graph_windows

DROPS = DispatchConfig(capacity_factor=1.0)
NOISY = RouterConfig(noise=1.0, z_loss=0.01)
OVERFLOWS = DispatchConfig(transport="dropless", slack=1.0)
PER_RANK = DispatchConfig(transport="per_rank", slack=1.0)
# Two devices hold each expert, so that a step sums its gradient over devices.
MESH = MeshConfig(data=2, expert=4)


def made(on, wiring="scmoe_pos2", layers=4, dispatch=DROPS, overlap=(), **model):
  """Graph and parameters of a tiny model with a MoE in every block."""
  config = harness.tiny(wiring=wiring, moe_every=1, num_layers=layers, **model)
  options = OverlapConfig(ahead=on, **dict(overlap))
  return harness.parts(config, dispatch=dispatch, router=NOISY, overlap=options)


@functools.cache
def step(on, microbatches=1, flight=1, remat="none", bias=False, mesh=MESH, **model):
  """(loss, gradients, aux) of a step of 16 rows, and the fewest scans around an all-to-all."""
  graph, state = made(on, **model)
  params, specs = nnx.to_pure_dict(state), nnx.to_pure_dict(parameter_specs(state))
  objective = LanguageModelObjective(graph, NOISY, remat=remat)
  # Another bias for each layer, so that a pair that takes another layer's is found.
  router = {"bias": jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)} if bias else {}

  def local(params, batch):
    return accumulate(objective, params, router, batch, jax.random.key(3), specs, flight=flight)

  devices = make_mesh(mesh, jax.devices()[: mesh.size], num_experts=4)
  function = manual(local, devices, (specs, P(None, BATCH_AXES)), (P(), specs, P()))
  ids = np.random.default_rng(1).integers(0, harness.VOCAB, (microbatches, 16 // microbatches, 6))
  batch = Batch.of_tokens(ids)
  program = equations(jax.make_jaxpr(function)(params, batch).jaxpr)
  loops = min(n for _, n, equation in program if equation.primitive.name == "all_to_all")
  return jax.device_get(jax.jit(function)(params, batch)), loops


def assert_same(got, want):
  """Loss, every gradient and every statistic, in float32."""
  named = lambda run: jax.tree_util.tree_leaves_with_path(run)
  for (path, a), (_, b) in zip(named(got), named(want), strict=True):
    scale = np.abs(b).max()
    np.testing.assert_allclose(
      a, b, rtol=1e-6, atol=1e-6 * scale, err_msg=jax.tree_util.keystr(path)
    )


WRITTEN_OUT = (("unroll", 0),)
CASES = {
  "pos2": {},
  "pos3, own norm, balancing bias": {
    "wiring": "scmoe_pos3", "shortcut_norm": "own", "bias": True,
  },
  "scmoe2 in chunks, several pairs a step, barriers": {
    "wiring": "scmoe2", "dispatch": DispatchConfig(capacity_factor=1.0, chunks=2), "layers": 5,
    "overlap": (("unroll", 2), ("order", "barriers"), ("schedule", "attention 0")),
  },
  "microbatches, products kept": {"microbatches": 2, "remat": "dots"},
  "microbatches, written out": {"microbatches": 2, "overlap": WRITTEN_OUT},
  "microbatches side by side": {"microbatches": 2, "flight": 2},
  "dense layers, recomputed": {
    "dense_layers": "0,3", "layers": 6, "shortcut_norm": "megatron", "remat": "full",
  },
  "recomputed": {"remat": "full"},
  "packed, experts recomputed": {
    "dispatch": DispatchConfig(transport="packed", capacity_factor=1.0, slack=1.0), "remat": "moe",
  },
  "overflow rounds, recomputed": {"dispatch": OVERFLOWS, "remat": "full"},
  "a row for each rank, recomputed": {"dispatch": PER_RANK, "remat": "dots"},
  "overflow rounds, written out": {"dispatch": OVERFLOWS, "overlap": WRITTEN_OUT},
}  # fmt: skip
# What these combine, other cases combine with something else.
BY_NIGHT = {
  "pos2", "microbatches, products kept", "microbatches, written out", "microbatches side by side",
  "dense layers, recomputed", "recomputed", "scmoe2 in chunks, several pairs a step, barriers",
  "overflow rounds, written out", "packed, experts recomputed",
}  # fmt: skip


@pytest.mark.parametrize(
  "case",
  [night(case) if case in BY_NIGHT else case for case in CASES],
)
def test_the_next_pair_begins_earlier_and_computes_the_same(case):
  (got, loops), (want, plain) = step(True, **CASES[case]), step(False, **CASES[case])
  assert loops == 0, "the first pair's dispatch stands before the scan over the pairs"
  assert plain == ("written out" not in case)
  sums = got[2].router
  if CASES[case].get("dispatch", DROPS) in (OVERFLOWS, PER_RANK):
    assert (sums.rounds > sums.shards).all(), "some exchange needs more than one round"
  else:
    assert sums.dropped.sum() > 0
  assert_same(got, want)


def exchanges(on, wiring, direction, **overlap):
  """(stage, its products) of the exchanges in the scan over the pairs, in program order."""
  graph, params = made(on, wiring, overlap=tuple(overlap.items()))
  specs, mesh = parameter_specs(params), make_mesh(MeshConfig(expert=4), jax.devices()[:4])
  run = lambda params, ids: nnx.merge(graph, params)(ids, Pass()).h_BSD
  function = manual(run, mesh, (specs, P(BATCH_AXES)), P(BATCH_AXES))
  if direction == "backward":
    loss = lambda params, ids: run(params, ids).sum()
    function = manual(jax.grad(loss), mesh, (specs, P(BATCH_AXES)), specs)
  program = jax.make_jaxpr(function)(params, harness.tokens(batch=4))
  scans = [(n, e) for n, _, e in equations(program.jaxpr) if e.primitive.name == "scan"]
  bodies = [e.params["jaxpr"] for name, e in scans if direction_of(name) == direction]
  found = [window for body in bodies for window in graph_windows(body)]
  return [(w.stage, {stage: w.beside.count(stage) for stage in w.beside}) for w in found]


def equations(jaxpr, scope="", loops=0):
  """(scope, number of scans around it, equation) of all equations of a program."""
  for equation in jaxpr.eqns:
    name, inside = f"{scope}/{equation.source_info.name_stack}", equation.primitive.name == "scan"
    yield name, loops, equation
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
      if is_jaxpr(inner):
        yield from equations(getattr(inner, "jaxpr", inner), name, loops + inside)


is_jaxpr = lambda value: hasattr(getattr(value, "jaxpr", value), "eqns")


def test_dispatch_has_the_preceding_pairs_experts_and_shared_expert_beside_it():
  """One step of the scan has the exchange and the products that it can run beside."""
  plain = dict(exchanges(False, "scmoe_pos2", "forward"))
  assert plain[DISPATCH].keys() == {"attention", "mlp"}, "as Pos-1"
  assert plain == dict(exchanges(True, "scmoe_pos1", "forward")), "which has no earlier value"
  pos2 = dict(exchanges(True, "scmoe_pos2", "forward"))
  assert pos2[DISPATCH].keys() == {"mlp", "experts"}, "the tap is behind the attention"
  assert pos2[COMBINE].keys() == {"attention", "route", "mlp"}
  pos3 = dict(exchanges(True, "scmoe_pos3", "forward"))
  assert pos3[DISPATCH].keys() == {"attention", "mlp", "experts"}
  assert pos3[COMBINE].keys() == {"attention", "route", "mlp"}


def test_the_backward_pass_has_the_mirror_image():
  plain = dict(exchanges(False, "scmoe_pos2", "backward"))
  pos2 = dict(exchanges(True, "scmoe_pos2", "backward"))
  # Without, only the products for the experts' weights, whose results no exchange waits for.
  assert pos2[DISPATCH]["experts"] == 2 * plain[DISPATCH]["experts"] > 0
  assert "attention" in pos2[COMBINE]


def test_barriers_keep_the_order_of_the_list():
  """attention 0 | next route | next dispatch | experts | combine | shared expert | add."""
  found = dict(exchanges(True, "scmoe_pos2", "forward", order="barriers", schedule="attention 0"))
  assert found[DISPATCH].keys() == {"mlp", "experts"}
  assert found[COMBINE].keys() == {"route", "mlp"}, "the next gate's product, and the shared expert"


@pytest.mark.parametrize(
  ("transport", "can"),
  [
    (Capacity(4, Exchange("expert", 4)), True),
    (Dropless(Exchange("expert", 4)), True),
    (Packed(4, Dropless(Exchange("expert", 4))), True),
    (PerRank(Exchange("expert", 4)), True),
    (Capacity(4, Exchange()), False),  # no rows travel
    (Packed(4, Local()), False),
    (Local(), False),
    (Computed(Dropless(Exchange("expert", 4))), True),
    (Computed(Local()), False),
    (object(), False),  # a user's own, whose dispatch may compute rows
    (types.SimpleNamespace(sends_ahead=True), True),  # one that says that it does not
  ],
)
def test_transports_that_dispatch_without_the_experts(transport, can):
  assert sends_ahead(transport) == can


def test_passes_that_begin_nothing_of_the_next_pair():
  """On one device, and with experts that are copied from the host's memory."""
  graph, params = made(True)
  pair, start = nnx.merge(graph, params).stages, jnp.zeros((2, 6, 16))
  assert not ahead.sends_ahead(pair, Context(), start), "one device"
  on = make_mesh(MeshConfig(expert=4), jax.devices()[:4])
  found = []

  def local(ids):
    found.append(ahead.sends_ahead(pair, Context(), start))
    found.append(ahead.sends_ahead(pair, Context(experts=Migration()), start))
    return ids

  jax.eval_shape(manual(local, on, P(BATCH_AXES), P(BATCH_AXES)), jnp.zeros((4, 6)))
  assert found == [True, False]
