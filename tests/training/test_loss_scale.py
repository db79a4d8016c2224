"""float16: gradients beside float32's, and a loss scale that follows the overflows."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from training_fakes import OPTIMIZER, Objective, Source, bits, trainer

from scmoe.base.errors import NonFiniteError, Preempted
from scmoe.models.gradient_sums import accumulate
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.training.loss_scale import START, LossScaling
from scmoe.training.metrics import read_metrics
from scmoe.training.optimizer import make_optimizer


def gradients(dtype):
  """factor -> float32 gradients of the smallest configuration, 2,048 tokens."""
  run = load_config(find_config("quickstart"), "smoke")
  for path, text in {"model.dtype": dtype, "train.batch_size": "128"}.items():
    run = with_field(run, path, text)
  built = build.build(run.resolve(num_devices=1, vocab_size=257), jax.devices()[:1])
  params, router = built.init(jax.random.key(0))
  moved = lambda p: p + 0.05 * jax.random.normal(jax.random.key(p.size), p.shape)
  params, scaling = jax.tree.map(moved, params), LossScaling()

  @jax.jit
  def of(factor, params, batch):
    given = built.objective.cast(params), router, batch, jax.random.key(1), built.specs
    _, grads, _ = accumulate(built.objective, *given, factor=factor)
    return scaling.unscaled(grads, {"factor": factor})

  return lambda factor: of(jnp.float32(factor), params, built.random_batch())


def test_scaled_gradients_are_those_of_float32():
  want, half = gradients("float32")(1.0), gradients("float16")

  def errors(factor):
    relative = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    return jax.tree.leaves(jax.tree.map(relative, half(factor), want))

  assert max(errors(START)) < 0.03
  assert max(errors(4096.0)) < 0.03
  assert max(errors(1.0)) > 0.1, "without a scale they are not: this is what it is for"


def test_the_factor_halves_doubles_and_stays_in_its_range():
  scaling = LossScaling(window=2)
  state, factors = scaling.init(), []
  for finite in (False, True, True, True, False, True, True):
    state = scaling.after(state, jnp.asarray(finite))
    factors.append(float(state["factor"]) / START)
  assert factors == [0.5, 0.5, 1, 1, 0.5, 0.5, 1]
  low = {"factor": jnp.float32(1), "good": jnp.int32(0)}
  assert float(scaling.after(low, jnp.asarray(False))["factor"]) == 1
  assert not scaling.may_fall(low)
  fixed = LossScaling(fixed=8.0)
  assert float(fixed.after(fixed.init(), jnp.asarray(False))["factor"]) == 8
  assert not fixed.may_fall(fixed.init())


@jax.custom_vjp
def in_half(x):
  """The identity, whose gradient passes through float16."""
  return x


in_half.defvjp(lambda x: (x, None), lambda _, bar: (bar.astype(jnp.float16).astype(bar.dtype),))


class Half(Objective):
  """Its gradient overflows where the loss scale is above 65,504."""

  def loss(self, params, router, batch, rng):
    loss, aux = super().loss(params, router, batch, rng)
    return in_half(loss), aux


class Infinite(Half):
  """Its loss is no number from the first step on."""

  def loss(self, params, router, batch, rng):
    loss, aux = super().loss(params, router, batch, rng)
    return loss * jnp.nan, aux


def scaled(mesh, workdir, objective, **fields):
  run = trainer(mesh, workdir, objective=objective, steps=8, **fields)
  cfg = dataclasses.replace(OPTIMIZER, loss_scale_window=2)
  run.built = dataclasses.replace(run.built, optimizer=make_optimizer(cfg, 8, half=True))
  return run


def test_overflows_are_skipped_counted_and_resumed(mesh8, tmp_path, capsys):
  whole = scaled(mesh8, tmp_path / "whole", Half(), max_skipped_in_row=0).run()
  lines = read_metrics(tmp_path / "whole")
  assert [line["loss_scale"] / START for line in lines] == [1, 0.5, 0.5, 1, 0.5, 0.5, 1, 0.5]
  assert [line["skipped"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3]
  assert all(line["skipped_in_row"] == 0 for line in lines), "an overflow is no failure"
  assert "an overflow in float16 at loss scale 65536; skipped" in capsys.readouterr().out
  with pytest.raises(Preempted):
    scaled(mesh8, tmp_path / "part", Half(), max_skipped_in_row=0, stop_after=3).run()
  resumed = scaled(mesh8, tmp_path / "part", Half(), max_skipped_in_row=0).run()
  assert bits(resumed) == bits(whole)


def test_a_loss_that_is_no_number_is_a_failure_at_any_scale(mesh8, tmp_path):
  run = scaled(mesh8, tmp_path, Infinite(), data=Source(8), max_skipped_in_row=2)
  with pytest.raises(NonFiniteError, match="3 steps in a row up to step 3"):
    run.run()


def test_other_types_have_no_scale(mesh8, tmp_path):
  assert trainer(mesh8, tmp_path, steps=1).run().scale is None
