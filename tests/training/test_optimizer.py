"""Schedules against their closed forms, the decay mask, AdamW against optax's own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scmoe.base.errors import ConfigError
from scmoe.training.optimizer import decay_mask, make_optimizer, make_schedule
from scmoe.training.options import OptimizerConfig

PEAK, STEPS, WARMUP, LOW = 2e-3, 100, 9, 0.1


def config(**fields):
  return OptimizerConfig(learning_rate=PEAK, warmup_steps=WARMUP, min_lr_ratio=LOW, **fields)


def rates(cfg):
  return np.asarray(jax.vmap(make_schedule(cfg, STEPS))(jnp.arange(STEPS + 1)))


def warmup(n):
  return PEAK * (n + 1) / (WARMUP + 1)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, WARMUP])
def test_before_the_first_step_nothing_is_learnt(schedule, warmup_steps):
  cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=warmup_steps, schedule=schedule)
  rate = make_schedule(cfg, STEPS)
  assert float(rate(jnp.int32(-1))) == 0
  assert float(rate(jnp.int32(0))) > 0


def test_cosine():
  def expected(n):
    if n < WARMUP:
      return warmup(n)
    cosine = (1 + math.cos(math.pi * (n - WARMUP) / (STEPS - WARMUP))) / 2
    return PEAK * (LOW + (1 - LOW) * cosine)

  expect = [expected(n) for n in range(STEPS + 1)]
  np.testing.assert_allclose(rates(config()), expect, rtol=1e-5)


def test_wsd():
  def expected(n):
    if n < WARMUP:
      return warmup(n)
    return PEAK * (1 - (1 - LOW) * max(0, n - 75) / 25)

  expect = [expected(n) for n in range(STEPS + 1)]
  np.testing.assert_allclose(rates(config(schedule="wsd", decay_fraction=0.25)), expect, rtol=1e-5)


def test_constant():
  expect = [warmup(min(n, WARMUP)) for n in range(STEPS + 1)]
  np.testing.assert_allclose(rates(config(schedule="constant")), expect, rtol=1e-5)


def test_no_warmup_starts_at_the_peak():
  cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=0)
  assert float(make_schedule(cfg, 10)(0)) == pytest.approx(PEAK)


def test_a_short_run_warms_up_for_half_of_it():
  short = make_schedule(config(), 10)  # warm-up of 9 steps becomes 5
  assert [float(short(n)) for n in (0, 5)] == pytest.approx([PEAK / 6, PEAK])
  assert float(short(10)) == pytest.approx(PEAK * LOW)
  wsd = make_schedule(config(schedule="wsd", decay_fraction=0.9), 10)
  assert [float(wsd(n)) for n in (5, 10)] == pytest.approx([PEAK, PEAK * LOW])
  assert float(make_schedule(config(), 1)(0)) == pytest.approx(PEAK)


def test_errors():
  with pytest.raises(ConfigError, match=r"schedule='cosin' is unknown; did you mean 'cosine'"):
    make_schedule(config(schedule="cosin"), STEPS)
  with pytest.raises(ConfigError, match=r"optimizer\.learning_rate=-1\.0 is too small"):
    make_schedule(OptimizerConfig(learning_rate=-1), STEPS)


def test_no_decay_of_vectors_biases_and_norms_even_when_stacked():
  leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = {
    "kernel": leaf(3, 4),
    "gain": leaf(4),
    "layers": {
      "norm1": {"weight": leaf(2, 4)},
      "up": {"kernel": leaf(2, 4, 4), "bias": leaf(2, 4)},
    },
  }
  assert decay_mask(params) == {
    "kernel": True,
    "gain": False,
    "layers": {"norm1": {"weight": False}, "up": {"kernel": True, "bias": False}},
  }


def test_equals_adamw_of_optax():
  cfg = config(clip_norm=0.5)
  ours = make_optimizer(cfg, STEPS)
  theirs = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(ours.schedule, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decay_mask),
  )
  params = mine = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
  state, mine_state = theirs.init(params), ours.tx.init(params)
  for step in range(5):
    grads = jax.tree.map(lambda p, s=step: jnp.cos(p * (s + 1)), params)
    updates, state = jax.jit(theirs.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
    norm = optax.global_norm(grads)
    updates, mine_state = jax.jit(ours.tx.update)(grads, mine_state, mine, step=step, norm=norm)
    mine = optax.apply_updates(mine, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, mine)
