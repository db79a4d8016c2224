"""Each device adds up its own gradients; they are reduced once per step, and are those of one."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.blocks.options import OverlapConfig
from scmoe.models import gradient_totals
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT
from scmoe.models.gradient_sums import accumulate, for_last_group
from scmoe.models.gradient_totals import GradientTotal, added
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.collectives import NAMES
from scmoe.parallel.gradients import global_norm, reduce_gradients
from scmoe.parallel.mesh import (
  BATCH_AXES,
  MeshConfig,
  batch_sharding,
  make_mesh,
  manual,
  parameter_specs,
)
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.step import make_train_step

CONFIG = ModelConfig(
  wiring="shared_expert",
  num_layers=1,
  moe_every=1,
  width=8,
  num_heads=2,
  num_experts=4,
  top_k=2,
  vocab_size=64,
  context=8,
  dtype="float32",
).resolve()
ROOM = DispatchConfig(capacity_factor=0.0)  # for all: what is dropped would follow the mesh
DROPLESS = DispatchConfig(transport="dropless", slack=1.0)
NOISY = RouterConfig(noise=1.0, z_loss=0.01)  # noise is drawn for the global batch
MESHES = {
  "one": MeshConfig(1, 1, 1),
  "data and expert": MeshConfig(2, 2, 1),
  "all three": MeshConfig(2, 2, 2),
  "two devices share an expert": MeshConfig(1, 8, 1),
}


def parts(router=NOISY, dispatch=ROOM, dtype="float32", layers=1, unroll=1):
  """(objective, parameters, their PartitionSpecs)."""
  config = dataclasses.replace(CONFIG, dtype=dtype, num_layers=layers)
  options = {"router": router, "dispatch": dispatch, "overlap": OverlapConfig(unroll=unroll)}
  make = lambda: GPT(config, **options, rngs=nnx.Rngs(params=0))
  graph, state = nnx.split(nnx.eval_shape(make))
  # Drawn here: the model's own initialisation would have to be compiled.
  numbers = np.random.default_rng(0)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  params = jax.tree.map(draw, nnx.to_pure_dict(state))
  specs = nnx.to_pure_dict(parameter_specs(state))
  return LanguageModelObjective(graph, router), params, specs


def batch_of(microbatches, rows, length=8, uneven=True):
  """Unequal weights, so that a mean of the devices' means would be wrong."""
  tokens = np.random.default_rng(1).integers(0, 64, (microbatches, rows, length))
  weights = np.random.default_rng(2).random(tokens.shape) < 0.6
  batch = Batch.of_tokens(tokens)
  return dataclasses.replace(batch, weights=weights.astype(np.float32)) if uneven else batch


@functools.cache
def run(
  mesh, router=NOISY, dispatch=ROOM, dtype="float32", microbatches=2, uneven=True, flight=1, **model
):
  """(loss, gradients, their norm, sums) of eight rows on a mesh of this name, as a step's."""
  objective, params, specs = parts(router, dispatch, **model)

  def local(params, batch):
    loss, grads, aux = accumulate(
      objective, params, {}, batch, jax.random.key(3), specs, dtype, flight
    )
    return loss, grads, global_norm(grads, specs), aux

  devices = jax.devices()[: MESHES[mesh].size]
  on = make_mesh(MESHES[mesh], devices, num_experts=CONFIG.num_experts)
  whole = manual(local, on, (specs, P(None, BATCH_AXES)), (P(), specs, P(), P()))
  batch = batch_of(microbatches, 16 // microbatches, uneven=uneven)
  return jax.device_get(jax.jit(whole)(params, batch))


def assert_same(got, want):
  """Loss, every gradient, and their norm."""
  for a, b in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(want[:3]), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
  "mesh",
  [night("data and expert"), night("all three"), "two devices share an expert"],
)
def test_a_mesh_gives_the_gradients_of_one_device(mesh):
  assert_same(run(mesh), run("one"))


def test_the_norm_is_that_of_all_gradients():
  _, grads, norm, _ = run("one")
  want = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(grads)))
  assert norm == pytest.approx(want, rel=1e-6)


@pytest.mark.nightly  # by day test_ahead.py has the gradients of overflow rounds
@pytest.mark.parametrize("mesh", ["data and expert", "two devices share an expert"])
def test_skewed_routing_drops_nothing_in_a_step(mesh):
  """Without a row to spare in the buffers: overflow rounds take what is left."""
  got = run(mesh, dispatch=DROPLESS)
  assert_same(got, run("one", dispatch=DROPLESS))
  sums = got[3].router
  assert sums.dropped.sum() == 0
  assert (sums.rounds > sums.shards).all(), "some exchange needs more than one round"


@pytest.mark.nightly  # by day test_any_split.py, without drops
def test_microbatches_add_up_to_one_batch():
  quiet = RouterConfig(balance_loss=0.0)  # a balancing loss is none of the single tokens
  options = {"router": quiet, "uneven": False}
  whole = run("one", microbatches=1, **options)
  assert_same(run("data and expert", microbatches=4, **options), whole)


@pytest.mark.parametrize(
  ("mesh", "microbatches", "flight"),
  [night("data and expert", 4, 2), ("one", 2, 2), night("one", 4, 4), night("one", 4, 2)],
)
def test_microbatches_side_by_side_are_those_of_one_after_the_other(mesh, microbatches, flight):
  """With drops, noise and what every microbatch reports."""
  options = {"dispatch": DispatchConfig(capacity_factor=1.0), "microbatches": microbatches}
  want, got = run(mesh, **options), run(mesh, flight=flight, **options)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  ("mesh", "microbatches", "flight"),
  # All pairs of values, but for a flight on the mesh: exchanges that wait for nothing meet in any
  # order on simulated devices.
  [
    night("one", 1, 1),  # also in models/test_stacked.py
    ("one", 2, 1),
    night("one", 4, 2),  # by day those side by side are in the scan over layers, above
    night("data and expert", 1, 1),  # on a mesh by day: test_state_shares.py
    night("data and expert", 4, 1),
  ],
)
def test_layers_written_out_have_the_gradients_of_the_scan(mesh, microbatches, flight, monkeypatch):
  monkeypatch.setattr(
    gradient_totals, "LARGE_LAYER", 20
  )  # norms' sums stay together, matrices' lie apart
  options = {"microbatches": microbatches, "flight": flight, "layers": 2}
  assert_same(run(mesh, unroll=0, **options), run(mesh, unroll=1, **options))


def test_a_flight_that_divides_no_step_is_none():
  options = {"microbatches": 2}
  assert_same(run("one", flight=3, **options), run("one", **options))


def test_gradients_travel_in_the_type_asked_for():
  rows = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
  specs = {"everywhere": P(), "split": P("data")}
  mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
  rounded = rows.astype(jnp.bfloat16)

  def reduced(dtype):
    local = lambda x: reduce_gradients({"everywhere": x[0], "split": x}, specs, dtype)
    return jax.jit(manual(local, mesh, P("data"), specs))(rows)

  for dtype, want in (("float32", rows[0] + rows[1]), ("bfloat16", rounded[0] + rounded[1])):
    got = reduced(dtype)
    np.testing.assert_array_equal(got["everywhere"], np.asarray(want, np.float32))
    np.testing.assert_array_equal(got["split"], rows)  # nobody else has a part of it
    assert {leaf.dtype for leaf in got.values()} == {np.dtype("float32")}


def test_weights_are_cast_once_to_the_compute_type():
  objective, params, _ = parts(RouterConfig(), DispatchConfig(), dtype="bfloat16")
  cast = objective.cast(params)
  types = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf.dtype
    for path, leaf in jax.tree_util.tree_leaves_with_path(cast)
  }
  wide = {name.split(".")[-2] for name, dtype in types.items() if dtype == jnp.float32}
  assert all(dtype in (jnp.float32, jnp.bfloat16) for dtype in types.values())
  assert {name for name in types if name.endswith((".up", ".down", ".query", ".out"))} <= {
    name for name, dtype in types.items() if dtype == jnp.bfloat16
  }
  assert any("norm" in name for name in wide)
  # The same products: loss and gradients are those of the float32 parameters.
  batch = jax.tree.map(lambda x: x[0], batch_of(1, 2))
  loss = lambda p: objective.loss(p, {}, batch, None)[0]
  (want, wants), (got, gots) = (jax.jit(jax.value_and_grad(loss))(p) for p in (params, cast))
  assert want == got
  for a, b in zip(jax.tree.leaves(wants), jax.tree.leaves(gots), strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(b, a, atol=2e-2 * max(np.abs(a).max(), 1e-3))


class Program:
  """The step of a run on 1 x 4 x 2 devices, compiled; nothing is allocated."""

  def __init__(self):
    run = RunConfig(model=CONFIG, router=NOISY, dispatch=ROOM, mesh=MeshConfig(1, 4, 2))
    self.built = build(run)
    self.abstract = self.built.abstract_state()
    place = batch_sharding(self.built.mesh, leading=1)
    self.batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), batch_of(2, 8)
    )
    split = lambda s: "expert" in jax.tree.leaves(tuple(s.sharding.spec))
    # What several devices hold, each pair's by itself.
    self.shared = []
    for path, s in jax.tree_util.tree_leaves_with_path(self.built.shapes):
      pairs, *shape = s.sharding.shard_shape(s.shape)
      own = [tuple(shape)] * pairs if path[0].key == "stages" else [(pairs, *shape)]
      self.shared += [] if split(s) else own

  def lower(self, **options):
    step = make_train_step(self.built.objective, self.built.optimizer, self.abstract, **options)
    return step.lower(self.abstract, self.batch)

  @property
  def sums(self):
    """(scope, number of elements) of every sum over devices, as often as a step makes it."""
    step = make_train_step(self.built.objective, self.built.optimizer, self.abstract)
    found = []

    def walk(jaxpr, scope, times):
      for eqn in jaxpr.eqns:
        name = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name.startswith("psum"):
          found.extend([(name, v.aval.size) for v in eqn.invars] * times)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
          if is_jaxpr(inner):
            walk(getattr(inner, "jaxpr", inner), name, times * eqn.params.get("length", 1))

    is_jaxpr = lambda value: hasattr(getattr(value, "jaxpr", value), "eqns")
    walk(step.trace(self.abstract, self.batch).jaxpr.jaxpr, "", 1)
    return found

  @functools.cached_property
  def collectives(self):
    """(computation, shapes of the result, name of the operation) of every one."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    form = re.compile(rf" = (.*?) (?:{kinds})(?:-start)?\(.*op_name=\"([^\"]*)\"")
    computation, found = "", []
    for line in self.lower().compile().as_text().splitlines():
      if line.endswith("{") and not line.startswith(" "):
        computation = line.split()[0]
      if match := form.search(line):
        shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
        found.append(
          (computation, [tuple(map(int, re.findall(r"\d+", s))) for s in shapes], match[2])
        )
    return found


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reduction_gives_what_reducing_at_the_end_gives(microbatches, dtype):
  """Also a call for a part of the parameters, and sums of earlier microbatches."""
  specs = {"shared": P(), "split": P("expert"), "other": {"a": P()}}
  values = jnp.arange(1.0, 5.0)
  params = {"shared": values, "split": values, "other": {"a": values.astype(jnp.bfloat16)}}
  mesh = make_mesh(MeshConfig(2, 2, 1), jax.devices()[:4])

  def loss(params, x):
    return (jnp.sin(params["shared"] * x) * params["other"]["a"]).sum() + params["split"].sum()

  def local(params, x):
    earlier = jax.tree.map(lambda p: (microbatches - 1) * x.mean() * jnp.ones(p.shape), params)
    _, pull = jax.vjp(lambda p: loss(p, x), params)
    total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), earlier, pull(jnp.ones(()))[0])
    totals = jax.tree.map(GradientTotal, earlier)
    totals = for_last_group(totals, specs, dtype, empty=microbatches == 1) | {"split": None}

    def through(params, totals):
      pick = lambda tree, *names: {name: tree[name] for name in names}
      parts = [("shared", "split"), ("other",)]
      read = [added([pick(params, *names)], pick(totals, *names))[0] for names in parts]
      return loss(read[0] | read[1], x)

    own, got = jax.grad(through, (0, 1))(params, totals)
    got = {name: got[name] for name in ("shared", "other")}
    got = jax.tree.map(lambda t: t.value, got, is_leaf=lambda t: isinstance(t, GradientTotal))
    return reduce_gradients(total, specs, dtype), got | {"split": own["split"]}

  split = {**jax.tree.map(lambda _: P(), specs), "split": P("expert")}
  function = manual(local, mesh, (split, P(BATCH_AXES)), (split, split))
  want, got = jax.jit(function)(params, jnp.linspace(0.1, 0.9, 4))
  want["split"] = np.ones(4)  # this device's own, of one microbatch
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-2)


@pytest.fixture(scope="module")
def program():
  return Program()


def test_every_gradient_travels_once_per_step(program):
  """In the last microbatch, by pairs; those of experts not at all; and beside them their norm."""
  sizes = [size for name, size in program.sums if re.search(r"gradients\)*$", name)]
  assert sorted(sizes) == sorted([1, *map(math.prod, program.shared)])


def test_every_collective_of_the_step_has_a_name(program):
  """Nothing travels that is not written down: the partitioner adds nothing of its own."""
  names = [set(name.split("/")) & set(NAMES) for _, _, name in program.collectives]
  assert all(names)
  assert {"gradients", "statistics", "tensor", "dispatch", "combine"} <= set().union(*names)


def test_the_step_sends_gradients_in_the_type_asked_for(program):
  text = program.lower(gradient_dtype="bfloat16").as_text()
  sums = re.findall(r"stablehlo\.all_reduce.*?\}\) : \(tensor<([^>]*)>", text, re.DOTALL)
  assert sum("bf16" in kind for kind in sums) == len(program.shared) < len(sums)
