"""Gradients added up on each device and reduced once equal those reduced in every microbatch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scmoe.blocks.schedule import OverlapConfig
from scmoe.errors import ConfigError
from scmoe.models.gpt import GPT, ModelConfig
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.route import RouterConfig
from scmoe.parallel.mesh import MeshConfig, make_mesh, partition_spec
from scmoe.training.step import accumulate, accumulate_locally

CONFIG = ModelConfig(
  wiring="scmoe_pos2",
  num_layers=2,
  width=8,
  num_heads=2,
  num_experts=4,
  top_k=2,
  vocab_size=64,
  context=8,
  dtype="float32",
).resolve()


def parts(mesh, router, seed=0, dtype="float32"):
  config = dataclasses.replace(CONFIG, dtype=dtype)
  make = lambda: GPT(
    config, router=router, overlap=OverlapConfig(), mesh=mesh, rngs=nnx.Rngs(params=seed)
  )
  graph, state = nnx.split(nnx.eval_shape(make))
  specs = jax.tree.map(
    lambda v: partition_spec(v.axes, v.get_value().ndim),
    state,
    is_leaf=lambda v: isinstance(v, nnx.Variable),
  )
  # Drawn here: the model's own initialisation would have to be compiled.
  numbers = np.random.default_rng(seed)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  params = jax.tree.map(draw, nnx.to_pure_dict(state))
  return graph, params, nnx.to_pure_dict(specs)


def batch_of(microbatches, rows, length=8):
  inputs = jax.random.randint(jax.random.key(1), (microbatches, rows, length), 0, 64)
  ones = jnp.ones_like(inputs)
  positions = jnp.broadcast_to(jnp.arange(length), inputs.shape)
  # Unequal weights, so that a mean of the devices' means would be wrong.
  weights = (jax.random.uniform(jax.random.key(2), inputs.shape) < 0.6).astype(jnp.float32)
  batch = {"inputs": inputs, "targets": jnp.roll(inputs, -1, -1), "weights": weights}
  return batch | {"positions": positions, "segment_ids": ones}


def test_one_reduction_gives_the_gradients_of_many():
  mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
  router = RouterConfig(noise=1.0, z_loss=0.01)  # noise is drawn for the global batch
  graph, params, specs = parts(mesh, router)
  objective = LanguageModelObjective(graph, router)
  args = (params, {}, batch_of(2, 4), jax.random.key(3))
  many = jax.jit(lambda *a: accumulate(objective, *a))(*args)
  local = lambda *a: accumulate_locally(objective, *a, mesh=mesh, specs=specs, dtype="float32")
  once = jax.jit(local)(*args)
  for want, got in zip(jax.tree.leaves(many), jax.tree.leaves(once), strict=True):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_weights_are_cast_once_to_the_compute_type():
  graph, params, _ = parts(None, RouterConfig(), dtype="bfloat16")
  objective = LanguageModelObjective(graph, RouterConfig())
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


def test_dense_gradients_travel_once_per_step():
  mesh = make_mesh(MeshConfig(expert=4), jax.devices()[:4])
  graph, params, specs = parts(mesh, RouterConfig())
  objective = LanguageModelObjective(graph, RouterConfig())
  local = lambda *a: accumulate_locally(objective, *a, mesh=mesh, specs=specs, dtype="float32")
  jaxpr = jax.make_jaxpr(local)(params, {}, batch_of(2, 4), jax.random.key(3)).jaxpr

  def large_sums(jaxpr, in_loop=False):
    """psums of a matrix's size inside a loop."""
    for eqn in jaxpr.eqns:
      if in_loop and eqn.primitive.name.startswith("psum"):
        yield from (v.aval.shape for v in eqn.outvars if v.aval.size >= 8 * 8 * 2)
      for inner in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
      ):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from large_sums(inner, in_loop or eqn.primitive.name == "scan")

  assert list(large_sums(jaxpr)) == []


def test_a_tensor_axis_is_refused():
  mesh = make_mesh(MeshConfig(expert=2, tensor=2), jax.devices()[:4])
  with pytest.raises(ConfigError, match=r"needs mesh.tensor=1"):
    accumulate_locally(None, {}, {}, {}, None, mesh=mesh, specs={}, dtype="float32")
