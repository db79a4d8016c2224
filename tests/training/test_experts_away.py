"""Experts in the host's memory in training: the same steps, which copy waits for what, the plan."""

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest
from covering import night
from drawn import drawn_init
from reloading import reloaded

from scmoe.base.errors import ConfigError
from scmoe.inference.evaluation import evaluate
from scmoe.models.config import ModelConfig
from scmoe.models.stacked import is_apart
from scmoe.parallel.mesh import MeshConfig, batch_sharding
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.run.dry_run import dry_run
from scmoe.run.expert_copies import Passes
from scmoe.run.host_memory import Away
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.options import (
  OptimizerAblation,
  OptimizerConfig,
  TrainConfig,
)
from scmoe.training.step import init_state, make_train_step

MODEL = ModelConfig(
  wiring="top2", moe_every=1, num_layers=3, width=8, num_heads=2, mlp_hidden=8, num_experts=4,
  vocab_size=32, context=8, dtype="float32",
)  # fmt: skip
LENGTH, ROWS, STEPS = 8, 8, 3
PLACES = {"device": {}, "host": {"moments_in": "host", "experts_in": "host"}}


def built(place, wiring="top2", rows=ROWS, data=1, expert=1, remat="none", **given):
  """A run of `ROWS` rows a step, `rows` in a microbatch; `given` are fields of mesh or model."""
  of_mesh = {k: v for k, v in given.items() if hasattr(MeshConfig, k) and place == "host"}
  of_model = {k: v for k, v in given.items() if not hasattr(MeshConfig, k)}
  mesh = MeshConfig(data, expert, 1, **(PLACES[place] | of_mesh))
  train = TrainConfig(batch_size=rows, tokens_per_step=ROWS * LENGTH, steps=8, remat=remat)
  model = dataclasses.replace(MODEL, wiring=wiring, **of_model)
  masters = OptimizerAblation(masters="halves" if model.dtype == "bfloat16" else "cast")
  optimizer = OptimizerConfig(warmup_steps=1, clip_norm=0.5, ablation=masters)
  run = RunConfig(model=model, optimizer=optimizer, mesh=mesh, train=train)
  run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=LENGTH))
  run = run.resolve(num_devices=mesh.size, vocab_size=32)
  return build(run, jax.devices()[: mesh.size])


@functools.cache
def step_of(place, flight=1, **options):
  """(the run, its step, one batch)."""
  own = built(place, **options)
  step = make_train_step(own.objective, own.optimizer, own.abstract_state(), flight=flight)
  return own, step, jax.device_put(own.random_batch(), batch_sharding(own.mesh, leading=1))


@functools.cache
def stepped(place, **options):
  """(the run, its state after `STEPS` steps, loss and norm of each)."""
  own, step, batch = step_of(place, **options)
  state, figures = begun(own), []
  for _ in range(STEPS):
    state, scalars, _ = step(state, batch)
    figures.append([float(scalars[name]) for name in ("loss", "grad_norm")])
  return own, state, figures


def begun(own):
  return init_state(drawn_init(own), own.optimizer, 0, own.abstract_state())


def bits(tree):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# By day each of the options in one of two programs, by night one by one.
BESIDE = {"wiring": "scmoe_pos2", "rows": ROWS // 2, "remat": "full"}
OPTIONS = [
  {},
  BESIDE | {"data": 2, "expert": 2, "num_layers": 2},
  *map(
    night,
    (
      {"wiring": "scmoe_pos2"},
      {"rows": ROWS // 2},
      {"remat": "full"},
      {"wiring": "scmoe_pos2", "moe_every": 2, "num_layers": 6},
      BESIDE | {"rows": ROWS, "data": 2, "expert": 4},
      {"num_layers": 1},
      {"wiring": "dgmoe", "rows": ROWS // 2, "remat": "dots"},
      {"wiring": "scmoe_pos3", "rows": ROWS // 2, "flight": 2, "expert": 2},
      {"dense_layers": "0", "num_layers": 3, "moments_kept": 1},
    ),
  ),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_steps_are_those_of_experts_on_the_device(options):
  """With clipping, on one device and on several. XLA may add a gradient's squares otherwise."""
  _, state, figures = stepped("host", **options)
  _, want, right = stepped("device", **options)
  np.testing.assert_allclose(figures, right, rtol=1e-6)
  pairs = zip(*(jax.tree.leaves(x.for_checkpoint()) for x in (state, want)), strict=True)
  for x, exact in pairs:
    x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
    np.testing.assert_allclose(x, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_a_step_that_is_not_finite_leaves_experts_and_moments_as_they_were():
  """With an infinite scale of the last norm, neither loss nor gradients are finite."""
  own, step, batch = step_of("host")
  state, _, _ = step(begun(own), batch)  # now the moments are other than 0
  norm, kept = state.params["norm"], lambda: bits((state.params, state.opt_state, state.router))
  scale, place = np.asarray(norm["scale"]), norm["scale"].sharding
  norm["scale"] = jax.device_put(np.full_like(scale, np.inf), place)
  before = kept()
  state, scalars, _ = step(state, batch)
  assert not scalars["finite"]
  assert (int(state.skipped), int(state.step)) == (1, 2)
  assert kept() == before
  state.params["norm"]["scale"] = jax.device_put(scale, place)
  state, scalars, _ = step(state, batch)
  assert scalars["finite"]
  assert not int(state.skipped_in_row)
  assert kept() != before


@pytest.mark.nightly
def test_parameters_in_halves_step_as_on_the_device():
  """In bfloat16, whose products are rounded otherwise where XLA fuses otherwise."""
  _, state, figures = stepped("host", dtype="bfloat16")
  _, _, right = stepped("device", dtype="bfloat16")
  assert {x.dtype.name for x in map(first, matrices(state.params))} == {"bfloat16", "int16"}
  np.testing.assert_allclose(figures, right, rtol=2**-6)


def matrices(params):
  """The experts' matrices, stacks whole or `Apart`."""
  return jax.tree.leaves(params["stages"]["moe"]["experts"], is_leaf=is_apart)


def first(x):
  return x.parts[0] if is_apart(x) else x


def test_every_layer_s_matrices_lie_in_the_host_s_memory_before_and_after():
  own, state, _ = stepped("host")
  for params in (own.abstract_state().params, state.params):
    found = [x for x in matrices(params) if len(first(x).shape) > 3]
    assert len(found) == 2
    assert all(len(x.parts) == MODEL.num_layers and all(map(lies_on_host, x.parts)) for x in found)
    gone = {id(part) for x in found for part in x.parts}
    assert not any(lies_on_host(x) for x in jax.tree.leaves(params) if id(x) not in gone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("place", "other"), [("host", "device"), ("device", "host")])
def test_a_checkpoint_loads_in_the_other_place(place, other, dtype, tmp_path):
  state = stepped(place)[1] if dtype == "float32" else begun(built(place, dtype=dtype))
  abstract = built(other, dtype=dtype).abstract_state()
  got = reloaded(tmp_path, state, built(place, dtype=dtype).config, abstract)
  assert bits(got.for_checkpoint()) == bits(state.for_checkpoint())


def test_a_run_begins_from_given_weights_and_in_a_checkpoint_s_form():
  """A checkpoint may hold weights alone; a warm start replaces parameters of the second form."""
  own, state, _ = stepped("host")
  abstract, given = own.abstract_state(), state.for_checkpoint().params
  got = init_state(own.init, own.optimizer, 0, abstract, params=given)
  assert bits(got.for_checkpoint().params) == bits(given)
  assert bits(got.opt_state) == bits(jax.tree.map(np.zeros_like, got.opt_state))
  places = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
  assert places(got) == places(abstract)
  stored = abstract.for_checkpoint()
  fresh = init_state(drawn_init(own), own.optimizer, 0, stored)
  assert places(fresh) == places(stored)
  assert bits(fresh.like(abstract).placed(abstract)) == bits(begun(own))


def test_evaluation_and_samples_read_the_same_weights():
  (host, state, _), (device, _, _) = stepped("host"), stepped("device")
  batch = jax.tree.map(lambda x: x[0], host.random_batch())
  batch = dataclasses.replace(batch, domain=np.zeros(ROWS, np.int32))

  class Validation:
    domains = ("text",)
    tokenizer = type("", (), {"token_bytes": staticmethod(lambda: np.ones(32))})

    @staticmethod
    def validation(max_batches=None):
      del max_batches
      return [batch]

  abstract = device.abstract_state()
  there = state.for_checkpoint().like(abstract).placed(abstract).params
  models = host.training_model(state.params), device.training_model(there)
  got, want = (evaluate(model, Validation, mesh=host.mesh) for model in models)
  assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
  drawn = host.generating_model(state.params, None)
  assert bits(drawn) == bits(device.generating_model(there, None))
  assert not any(map(lies_on_host, jax.tree.leaves(drawn)))


def copies_of(own):
  """For each copy of experts' matrices, or of their gradients, in order: (which, waits for)."""
  abstract, batch = own.abstract_state(), jax.eval_shape(own.random_batch)
  jaxpr = make_train_step(own.objective, own.optimizer, abstract).trace(abstract, batch).jaxpr
  (inner,) = [e.params["jaxpr"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "shard_map"]
  host, matrix = jax.memory.Space.Host, {first(x).shape for x in matrices(abstract.params)}
  waits, found = {}, []
  for number, equation in enumerate(getattr(inner, "jaxpr", inner).eqns):
    own = frozenset().union(*(waits.get(id(v), ()) for v in equation.invars))
    if equation.primitive.name == "device_put":
      (x,), (y,) = equation.invars, equation.outvars
      kind = "store" if y.aval.memory_space == host else "fetch"
      if x.aval.shape in matrix and len(x.aval.shape) > 3:
        found.append((kind, Counter(name for name, _ in own)))
        own |= {(kind, number)}
    waits |= {id(v): own for v in equation.outvars}
  return found


def test_a_fetch_waits_for_the_pair_before_the_last_and_a_pass_for_the_store():
  """Four pairs of two matrices; a pair's work is known by its fetches, on which it depends.

  Pair i begins with the result of pair i - 1. So what waits for the beginning of pair i waits for
  the fetches of pairs 0 to i - 1.
  """
  copies = copies_of(built("host", num_layers=4))
  fetches = [(waits["fetch"], waits["store"]) for kind, waits in copies if kind == "fetch"]
  forward, backward = fetches[:8], fetches[8:14]
  assert [f for f, _ in forward] == [0, 0, 0, 0, 2, 2, 4, 4]
  # Pair 2 is fetched beside the backward pass of pair 3, pair 1 beside that of pair 2, which waits
  # for nothing else. Pair 0 is fetched beside that of pair 1, which waits for the fetch of pair 2
  # and until the gradients of pair 3 have left.
  assert backward == [(8, 0), (8, 0), (8, 0), (8, 0), (10, 2), (10, 2)]
  assert [kind for kind, _ in copies[:22]].count("store") == 8


def test_the_plan_is_what_the_arrays_are():
  own, state, _ = stepped("host")
  plan, other = dry_run(own.run), dry_run(stepped("device")[0].run)
  held = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if lies_on_host(x))
  experts = held(state.params)
  assert plan.away.passes == Passes((experts // 3,) * 3, (experts // 3,) * 3, 1)
  assert plan.away.total == held((state.params, state.opt_state))
  assert plan.away.in_memory == plan.away.total + experts
  assert plan.memory.parameters == other.memory.parameters - experts
  assert plan.memory.gradients == other.memory.gradients - experts
  assert plan.memory.activations == other.memory.activations
  assert plan.memory.experts == 4 * experts // 3
  rest = dataclasses.replace(plan.memory, experts=0, arriving=0)
  assert plan.memory.total == rest.total + max(plan.memory.experts, plan.memory.arriving)
  assert plan.work.passes(1.0) == plan.away.passes.seconds(1.0)


def test_the_model_of_the_copies_by_hand():
  """Pairs of 2 bytes with gradients of 4, a link of 1 byte/s each way."""
  one, two = Passes((2, 2), (4, 4), 1), Passes((2, 2), (4, 4), 2)
  # forward 4; backward the longer of fetching 2 and storing 8
  assert one.seconds(1.0) == 12
  # backward fetches 2 and the totals, 8, and stores 8
  assert two.seconds(1.0) == 28
  assert (one.on_device, two.on_device) == (12, 16)
  assert dataclasses.replace(two, looks=2).seconds(1.0) == 28 + 2 * 4
  # the update fetches 3 and 2, stores 1 beside the second fetch, and stores 1
  assert Away((1, 1), 1, drawn=(2, 1)).seconds(1.0) == 6
  assert (Away((1, 1), 1, drawn=(2, 1)).on_device, Away((1, 1), 0, drawn=(2, 1)).in_memory) == (
    5,
    5,
  )


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ({"moments_in": "device"}, r"needs mesh.moments_in=host \(.*got 'device'; set mesh.moments_in"),
    ({"moments_update": "host"}, r"needs mesh.moments_update=device"),
    ({"shard_state": "moments", "data": 2}, r"needs mesh.shard_state=none"),
    ({"dtype": "float16"}, r"loss of model.dtype='float16'; set model.dtype=bfloat16$"),
  ],
)
def test_what_does_not_go_with_it_is_refused(given, words):
  with pytest.raises(ConfigError, match=r"^mesh.experts_in='host' .*" + words):
    built("host", **given)
