"""The step: accumulation, skipping of non-finite steps, sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from training_fakes import OPTIMIZER, Objective, Poisoned, Setup, Source, bits, init

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.models.gradient_sums import accumulate
from scmoe.training.options import TrainConfig


class Quiet(Objective):
  noise = 0.0


def split(batch, parts):
  return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def run(setup, batches):
  state, losses = setup.state(), []
  for batch in batches:
    state, scalars, _ = setup.step(state, batch)
    losses.append(float(scalars["loss"]))
  return state, losses


def test_accumulation_over_eight_equals_one_batch(mesh1):
  setup = Setup(mesh1, Quiet())
  batch = Source(8).batch(0)
  one, (loss_one,) = run(setup, [split(batch, 1)])
  many, (loss_many,) = run(setup, [split(batch, 8)])
  assert loss_one == pytest.approx(loss_many, rel=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), one.params, many.params
  )
  # One update of the router's bias per optimizer step, from the loads of all microbatches.
  assert bits(one.router) == bits(many.router)


def test_microbatches_have_their_own_noise(mesh1):
  del mesh1
  params, router = init(jax.random.key(0))
  batch = jax.tree.map(jnp.asarray, Source(4).batch(0))
  key, specs = jax.random.key(1), jax.tree.map(lambda _: P(), params)
  one = jax.jit(lambda i: Objective().loss(params, router, batch, jax.random.fold_in(key, i))[0])
  twice = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
  loss, _, aux = jax.jit(lambda b: accumulate(Objective(), params, router, b, key, specs))(twice)
  assert one(0) != one(1)
  assert float(loss) == pytest.approx(float((one(0) + one(1)) / 2), rel=1e-6)
  assert float(aux["count"]) == 2 * float(batch.weights.sum())


def test_meshes_agree(mesh_of):
  batches = [Batch.stack([Source(8).batch(i)]) for i in range(6)]
  _, reference = run(Setup(mesh_of(1)), batches)
  assert reference[-1] < reference[0]
  for shape in ((2, 4), (2, 2, 2)):
    np.testing.assert_allclose(run(Setup(mesh_of(*shape)), batches)[1], reference, rtol=1e-5)


def test_optimizer_state_is_sharded_like_its_parameters(mesh8):
  state = Setup(mesh8).state()
  adam = next(s for s in state.opt_state if isinstance(s, optax.ScaleByAdamState))
  assert adam.mu["experts"].sharding.spec == state.params["experts"].sharding.spec
  assert state.params["experts"].addressable_shards[0].data.shape[0] == 1


def test_non_finite_step_changes_counters_only(mesh8):
  source = Source(8, bad=(1,))
  setup = Setup(mesh8, Poisoned())
  state, first, _ = setup.step(setup.state(), Batch.stack([source.batch(0)]))
  before = bits((state.params, state.opt_state, state.router, state.rng))
  state, bad, _ = setup.step(state, Batch.stack([source.batch(1)]))
  assert not np.isfinite(bad["loss"] * bad["grad_norm"])
  assert bits((state.params, state.opt_state, state.router, state.rng)) == before
  assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (2, 1, 1)
  state, good, _ = setup.step(state, Batch.stack([source.batch(2)]))
  assert bits(state.params) != before
  assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (3, 1, 0)
  # The schedule goes on over a skipped step.
  assert float(good["lr"]) == pytest.approx(float(setup.optimizer.schedule(2)))
  assert float(first["lr"]) < float(good["lr"])


class OneInf(Objective):
  """Infinite gradient of one leaf, finite loss."""

  def loss(self, params, router, batch, rng):
    loss, aux = super().loss(params, router, batch, rng)
    bias = params["head"]["bias"]
    return loss + (jnp.sqrt(jnp.abs(bias)) - jnp.sqrt(jnp.abs(bias))).sum(), aux


def test_one_infinite_leaf_skips_the_step_instead_of_zeroing_the_others(mesh1):
  setup = Setup(mesh1, OneInf())
  state = setup.state()
  before = bits(state.params)
  state, scalars, _ = setup.step(state, Batch.stack([Source(4).batch(0)]))
  assert np.isfinite(scalars["loss"])
  assert not scalars["finite"]
  assert bits(state.params) == before


def test_clipping_bounds_the_update(mesh1):
  cfg = dataclasses.replace(OPTIMIZER, clip_norm=1e-12, weight_decay=0.0, eps=1e-8)
  setup = Setup(mesh1, optimizer=cfg)
  state = setup.state()
  before = np.asarray(state.params["embed"])
  state, scalars, _ = setup.step(state, Batch.stack([Source(4).batch(0)]))
  assert scalars["grad_norm"] > 1e-3
  assert np.abs(np.asarray(state.params["embed"]) - before).max() < 1e-5


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (64, 1), (512, 8)])
def test_microbatches(tokens, expected):
  assert TrainConfig(batch_size=8, tokens_per_step=tokens).microbatches(8) == expected


def test_batch_errors_name_the_field_and_the_remedy():
  with pytest.raises(ConfigError, match=r"tokens_per_step=100 is not a multiple .* = 64; use 128"):
    TrainConfig(batch_size=8, tokens_per_step=100).microbatches(8)
  with pytest.raises(ConfigError, match=r"batch_size=6 is not divisible by .* = 4; use 8"):
    TrainConfig(batch_size=6).check_mesh(4)
  with pytest.raises(ConfigError, match=r"train.steps=0 is too small"):
    TrainConfig(steps=0).microbatches(8)
