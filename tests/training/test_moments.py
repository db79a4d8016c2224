"""Moments in bfloat16: unbiased, moving where the nearest would stand still, resumed bitwise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import night
from drawn import drawn_init

from scmoe.base.errors import ConfigError, Preempted
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.train import train
from scmoe.training.moments import narrow, rounded
from scmoe.training.optimizer import make_optimizer
from scmoe.training.options import OptimizerConfig
from scmoe.training.step import init_state, make_train_step


def smoke(moments="bfloat16", mesh=MeshConfig(data=1), name="adamw", **training):
  run = load_config(find_config("quickstart"), "smoke")
  optimizer = dataclasses.replace(run.optimizer, moments=moments, name=name)
  # No evaluation and no sample: they read no moments, and each is a program of its own.
  own = dataclasses.replace(run.train, **{"sample_tokens": 0, "tensorboard": False, **training})
  data = dataclasses.replace(run.data, validation_fraction=0.0)
  return dataclasses.replace(run, optimizer=optimizer, train=own, data=data, mesh=mesh)


def step_of(n):
  return jnp.asarray(n, jnp.int32)


def test_rounded_to_a_neighbour_and_right_in_the_mean():
  rng = np.random.default_rng(0)
  x = np.exp(rng.uniform(-60, 60, 4096)).astype(np.float32) * rng.choice([-1, 1], 4096)
  x = x.astype(np.float32)
  below = (x.view(np.uint32) >> 16 << 16).view(np.float32)  # towards zero
  above = ((x.view(np.uint32) >> 16) + 1 << 16).astype(np.uint32).view(np.float32)
  draws = jax.vmap(lambda n: rounded(jnp.asarray(x), n, 7))(jnp.arange(2000))
  assert draws.dtype == jnp.bfloat16
  draws = np.asarray(draws.astype(jnp.float32))
  assert np.all((draws == below) | (draws == above))
  share = (draws == above).mean(0)
  wanted = (x.view(np.uint32) & 0xFFFF) / 65536
  assert np.abs(share - wanted).max() < 5 * 0.5 / np.sqrt(2000)
  assert abs((share - wanted).mean()) < 5 * 0.5 / np.sqrt(2000 * 4096)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5)])
def test_what_bfloat16_holds_stays(shape):
  x = jnp.full(shape, -1.5)
  np.testing.assert_array_equal(rounded(x, step_of(3), 1), jnp.full(shape, -1.5, jnp.bfloat16))
  np.testing.assert_array_equal(rounded(0 * x, step_of(3), 1), jnp.zeros(shape, jnp.bfloat16))


def test_steps_arrays_and_places_draw_apart():
  x = jnp.full((64, 64), 1 + 2**-8)  # as often up as down
  ups = lambda step, salt: np.asarray(rounded(x, step_of(step), salt) > 1)
  one = ups(0, 0)
  for other in (ups(1, 0), ups(0, 1), one.T):
    assert 0.4 < (one == other).mean() < 0.6
  np.testing.assert_array_equal(one, ups(0, 0))


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_second_moments_follow_float32s(beta2):
  """Gradients whose size falls to a tenth: the nearest of bfloat16 would not follow at 0.999."""
  rule = optax.scale_by_adam(0.9, beta2)
  grads = jax.random.normal(jax.random.key(0), (3000, 256))
  grads = {"w": grads * jnp.where(jnp.arange(3000) < 500, 1.0, 0.1)[:, None]}
  params = {"w": jnp.zeros(256)}

  def after(rule, **extra):
    def one(state, given):
      step, grad = given
      return rule.update(grad, state, params, **({"step": step} if extra else {}))[1], None

    return jax.lax.scan(one, rule.init(params), (jnp.arange(3000), grads))[0]

  wide, half = after(rule), after(narrow(rule), step=True)
  assert half.nu["w"].dtype == half.mu["w"].dtype == jnp.bfloat16
  ratio = np.asarray(half.nu["w"].astype(jnp.float32) / wide.nu["w"])
  noise = 2**-8 / np.sqrt(1 - beta2**2)
  assert np.abs(ratio.mean() - 1) < noise / np.sqrt(256) * 3
  assert np.abs(ratio - 1).max() < 5 * noise
  near = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rule.init(params))

  def nearest(state, grad):
    state = jax.tree.map(lambda x: x.astype(jnp.float32) if x.ndim else x, state)
    state = rule.update(grad, state, params)[1]
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state), None

  near = near._replace(count=jnp.zeros((), jnp.int32))
  stuck = jax.lax.scan(nearest, near, grads)[0].nu["w"].astype(jnp.float32) / wide.nu["w"]
  if beta2 == 0.999:
    assert float(stuck.mean()) > 1.5, "what the rounding is for"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_all_that_is_kept_of_a_parameter_is_narrow(name):
  params = {"attention": {"query": jnp.ones((4, 2, 2))}, "norm": jnp.ones(4)}
  optimizer = make_optimizer(OptimizerConfig(name=name, moments="bfloat16"), 10)
  state = optimizer.tx.init(params)
  kinds = {x.dtype.name for x in jax.tree.leaves(state) if x.shape in ((4, 2, 2), (4,))}
  assert kinds == {"bfloat16"}
  update, after = optimizer.tx.update(params, state, params, step=step_of(0), norm=jnp.asarray(1.0))
  assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
  wide = make_optimizer(OptimizerConfig(name=name), 10).tx
  first = wide.update(params, wide.init(params), params, step=step_of(0), norm=jnp.asarray(1.0))[0]
  for a, b in zip(jax.tree.leaves(update), jax.tree.leaves(first), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)  # moments are rounded behind the update


# With Muon, AdamW keeps the moments of what is no matrix.
@pytest.mark.parametrize("name", ["muon", night("adamw")])
def test_devices_that_hold_the_same_draw_the_same(name):
  mesh = MeshConfig(data=2, expert=2, tensor=2)
  run = smoke(mesh=mesh, name=name).resolve(num_devices=8, vocab_size=257)
  built = build.build(run, jax.devices()[:8])
  abstract = built.abstract_state()
  state = init_state(drawn_init(built), built.optimizer, 0, abstract)
  step = make_train_step(built.objective, built.optimizer, abstract)
  for _ in range(2):
    state, scalars, _ = step(state, built.random_batch())
  assert np.isfinite(scalars["loss"])
  twice = 0
  for leaf in jax.tree.leaves((state.params, state.opt_state)):
    seen = {}
    for shard in leaf.addressable_shards:
      first = seen.setdefault(str(shard.index), shard.data)
      np.testing.assert_array_equal(np.asarray(first), np.asarray(shard.data))
    twice += leaf.dtype == jnp.bfloat16 and len(seen) < 8
  assert twice, "no narrow moment is held twice"


@pytest.mark.nightly  # by day test_average.py resumes, and what is drawn follows the step's number
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_stopped_and_resumed_bitwise(tmp_path, name):
  whole = train(smoke(name=name, steps=4), tmp_path / "whole")
  with pytest.raises(Preempted):
    train(smoke(name=name, steps=4, stop_after=2), tmp_path / "parts")
  parts = train(smoke(name=name, steps=4), tmp_path / "parts")
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.nightly  # by day test_loop.py refuses other changes
@pytest.mark.parametrize("other", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_may_change_them_when_it_says_so(tmp_path, other):
  with pytest.raises(Preempted):
    train(smoke(other[0], steps=4, stop_after=2), tmp_path)
  with pytest.raises(ConfigError, match=r"optimizer.moments"):
    train(smoke(other[1], steps=4), tmp_path)
  run = smoke(other[1], steps=4)
  allowed = dataclasses.replace(run.checkpoint, allow_config_change=True)
  state = train(dataclasses.replace(run, checkpoint=allowed), tmp_path)
  assert int(state.step) == 4
  kinds = {x.dtype.name for x in jax.tree.leaves(state.opt_state) if x.ndim}
  assert kinds == {other[1]}
