"""Losses, statistics and bias rules against float64 loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.base.errors import ConfigError
from scmoe.moe.losses import (
  balance_loss,
  balance_part,
  gshard_loss,
  init_bias,
  layer_balance,
  load_importance_loss,
  megablocks_loss,
  router_sums,
  statistics,
  update_bias,
  z_loss,
)
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import route
from scmoe.moe.scores import Draws

T, D, E, K, NOISE = 7, 4, 5, 2, 1.5
SOFT = RouterConfig(balance="load_importance", noise=NOISE)


def problem(tokens=T, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(tokens, D)), rng.normal(size=(D, E)), rng.normal(size=(tokens, E))


def plain_sums(x, gate, noise, mask, k, config):
  training = None if noise is None else Draws(noise_TE=jnp.asarray(noise))
  routing = route(x, gate, config, k=k, mask_T=mask, training=training)
  return router_sums(routing, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


compiled_sums = jax.jit(plain_sums, static_argnames=("k", "config"))


def sums_of(x, gate, noise=None, mask=None, k=K, config=SOFT):
  arrays = [None if a is None else jnp.asarray(a) for a in (x, gate, noise, mask)]
  return compiled_sums(*arrays, k, config)


def softmax(row):
  return np.exp(row - row.max()) / np.exp(row - row.max()).sum()


def loop(x, gate, noise, mask=None, k=K):
  """Every loss, token by token and expert by expert."""
  importance, load, probs, first, counts, z, tokens = (
    np.zeros(E), np.zeros(E), np.zeros(E), np.zeros(E), np.zeros(E), 0.0, 0,
  )  # fmt: skip
  for t in range(len(x)):
    if mask is not None and not mask[t]:
      continue
    clean = x[t] @ gate
    noisy = clean if noise is None else clean + NOISE / E * noise[t]
    p, q, chosen = softmax(clean), softmax(noisy), np.argsort(-noisy)[:k]
    threshold = noisy[chosen[-1]]
    for e in range(E):
      importance[e] += p[e]
      load[e] += 0.5 * (1 + math.erf((p[e] - threshold) / (NOISE / E) / math.sqrt(2)))
    probs, tokens, z = probs + q, tokens + 1, z + np.log(np.exp(noisy).sum()) ** 2
    first[chosen[0]] += 1
    counts[chosen] += 1
  square = lambda v: v.var(ddof=1) / (v.mean() ** 2 + 1e-10)
  n = max(tokens, 1)
  return {
    "gshard": E * (probs / n * first / n).sum(),
    "load_importance": (square(importance) + square(load)) / 2,
    "megablocks": E / (n * k) * (counts * probs / n).sum(),
    "z": z / n,
  }


@pytest.mark.parametrize("noisy", [False, True])
def test_losses_equal_the_loops_and_their_finite_differences(noisy):
  x, gate, noise = problem()
  noise = noise if noisy else None
  kinds = ("gshard", "load_importance", "megablocks")

  def all_losses(gate):
    sums = plain_sums(jnp.asarray(x), gate, noise, None, K, SOFT)
    return jnp.stack([balance_loss(sums, kind) for kind in kinds] + [z_loss(sums)])

  with jax.enable_x64(True):
    got = np.asarray(jax.jit(all_losses)(jnp.asarray(gate)))
    jacobian = np.asarray(jax.jit(jax.jacrev(all_losses))(jnp.asarray(gate)))
  want = loop(x, gate, noise)
  # Counts and φ's argument are exact; what is left is the float32 of the token counts.
  np.testing.assert_allclose(got, [*(want[kind] for kind in kinds), want["z"]], rtol=1e-6)
  for where in [(0, 0), (1, 3), (3, 4)]:
    step = np.zeros_like(gate)
    step[where] = 1e-6
    up, down = loop(x, gate + step, noise), loop(x, gate - step, noise)
    slopes = [(up[kind] - down[kind]) / 2e-6 for kind in (*kinds, "z")]
    np.testing.assert_allclose(jacobian[:, where[0], where[1]], slopes, rtol=1e-5, atol=1e-7)


def test_megablocks_is_gshard_for_one_layer_and_one_choice():
  x, gate, _ = problem()
  sums = sums_of(x, gate, k=1)
  np.testing.assert_allclose(megablocks_loss(sums), gshard_loss(sums), rtol=1e-6)
  several = sums_of(x, gate, k=2)
  assert abs(megablocks_loss(several) - gshard_loss(several)) > 1e-3


def test_uniform_probabilities_give_one():
  sums = sums_of(np.zeros((2 * E, D)), np.zeros((D, E)))
  np.testing.assert_allclose(gshard_loss(sums), 1, rtol=1e-6)
  np.testing.assert_allclose(megablocks_loss(sums), 1, rtol=1e-6)
  np.testing.assert_allclose(z_loss(sums), math.log(E) ** 2, rtol=1e-6)


def add(*sums):
  return jax.tree.map(lambda *a: sum(a), *sums)


def test_losses_of_added_sums_are_those_of_the_whole_batch():
  x, gate, noise = problem(tokens=12)
  whole = sums_of(x, gate, noise)
  parts = [sums_of(x[i : i + 4], gate, noise[i : i + 4]) for i in (0, 4, 8)]
  for kind in ("gshard", "load_importance", "megablocks"):
    np.testing.assert_allclose(
      layer_balance(add(*parts), kind), layer_balance(whole, kind), rtol=1e-5
    )
    assert abs(np.mean([layer_balance(p, kind) for p in parts]) - layer_balance(whole, kind)) > 1e-6


@pytest.mark.parametrize("kind", ["gshard", "load_importance", "megablocks"])
def test_parts_of_a_steps_balancing_loss_add_up_to_it(kind):
  """Values and gradients, of microbatches with unequal numbers of tokens."""
  x, gate, noise = problem(tokens=12)
  parts = [slice(0, 1), slice(1, 4), slice(4, 12)]
  sums = lambda gate, part: plain_sums(jnp.asarray(x[part]), gate, noise[part], None, K, SOFT)

  def at_once(gate):
    return balance_loss(sums(gate, slice(None)), kind)

  def in_parts(gate):
    step = sums(jnp.asarray(fixed), slice(None))
    return sum(balance_part(sums(gate, part), step, kind) for part in parts)

  fixed = gate
  want, got = (jax.jit(jax.value_and_grad(f))(jnp.asarray(gate)) for f in (at_once, in_parts))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ("changed", "microbatches", "want"),
  [({}, 2, True), ({}, 1, False), ({"balance_over": "microbatch"}, 2, False),
   ({"balance_loss": 0.0}, 2, False), ({"balance": "none"}, 2, False)],
)  # fmt: skip
def test_only_a_balancing_loss_of_several_microbatches_needs_a_pass_ahead(
  changed, microbatches, want
):
  router = dataclasses.replace(RouterConfig(balance_over="step"), **changed)
  assert router.looks_ahead(microbatches) is want


def test_layers_add_up_and_megablocks_takes_their_mean():
  x, gate, _ = problem()
  layers = [sums_of(x, gate), sums_of(x, -gate)]
  stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
  for kind in ("gshard", "load_importance"):
    one_by_one = sum(float(layer_balance(s, kind)) for s in layers)
    np.testing.assert_allclose(balance_loss(stacked, kind), one_by_one, rtol=1e-6)
  mean = np.mean([float(megablocks_loss(s)) for s in layers])
  np.testing.assert_allclose(balance_loss(stacked, "megablocks"), mean, rtol=1e-6)
  assert balance_loss(stacked, "none") == 0


def test_masked_tokens_count_nowhere_whatever_they_hold():
  x, gate, _ = problem()
  mask = np.array([True, True, False, True, True, False, True])
  x[~mask] = np.nan
  masked, plain = sums_of(x, gate, mask=mask), sums_of(x[mask], gate)
  for field in dataclasses.fields(plain):
    got, want = getattr(masked, field.name), getattr(plain, field.name)
    np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=field.name)


@pytest.mark.parametrize("kind", ["gshard", "load_importance"])
def test_masked_tokens_have_no_gradient_whatever_they_hold(kind):
  x, gate, _ = problem()
  mask = np.array([True, True, False, True, True, False, True])
  x[~mask] = np.nan
  loss = lambda gate, x, mask: balance_loss(sums_of(x, gate, mask=mask), kind)
  got = jax.grad(loss)(jnp.asarray(gate), x, mask)
  np.testing.assert_allclose(got, jax.grad(loss)(jnp.asarray(gate), x[mask], None), rtol=1e-5)
  assert np.any(np.asarray(got))


def test_no_tokens_give_no_loss():
  for x, mask in ((np.zeros((0, D)), None), (np.ones((3, D)), np.zeros(3, bool))):
    sums = sums_of(x, np.ones((D, E)), mask=mask)
    for kind in ("gshard", "load_importance", "megablocks", "none"):
      assert balance_loss(sums, kind) == 0
    assert z_loss(sums) == 0
    assert all(np.isfinite(v).all() for v in statistics(sums).values())


def test_one_expert_has_nothing_to_balance():
  sums = sums_of(np.ones((3, D)), np.ones((D, 1)), k=1)
  assert load_importance_loss(sums) == 0
  np.testing.assert_allclose(gshard_loss(sums), 1)


def test_load_importance_needs_noise():
  with pytest.raises(ConfigError, match=r"router\.noise=0"):
    RouterConfig(balance="load_importance").check()


def test_tokens_without_finite_logits_are_counted():
  x, gate, _ = problem()
  x[2], x[5] = np.nan, np.inf
  routing = route(jnp.asarray(x), jnp.asarray(gate), RouterConfig(), k=K)
  again = route(jnp.asarray(x), jnp.asarray(gate), RouterConfig(), k=K)
  expert = np.asarray(routing.expert_TK)
  assert ((expert >= 0) & (expert < E)).all()
  np.testing.assert_array_equal(expert, again.expert_TK)
  assert routing.count_E.sum() == T * K
  assert np.isnan(routing.weight_TK[2]).all()  # and with it the loss: the step is skipped
  sums = sums_of(x, gate)
  assert sums.nonfinite == 2
  np.testing.assert_allclose(statistics(sums)["nonfinite"], 2 / T)


# -- balancing biases -----------------------------------------------------------------------------


def loads(*rows):
  load = jnp.asarray(rows, jnp.float32)
  base = sums_of(np.ones((1, D)), np.ones((D, E)))
  layers = jax.tree.map(lambda a: jnp.stack([a] * len(rows)), base)
  return dataclasses.replace(layers, load_E=load, choices=load.sum(-1))


def test_bias_rules_on_paper():
  sums = loads([4, 0, 2, 2], [0, 0, 0, 0])
  bias = jnp.asarray([[0.5, 0, 0, 0], [0.25, 0, 0, 0]], jnp.float32)
  state = {"bias": bias}
  sign = update_bias(state, sums, RouterConfig(bias="sign", bias_rate=0.125))
  np.testing.assert_array_equal(sign["bias"], [[0.375, 0.125, 0, 0], [0.25, 0, 0, 0]])
  pid = update_bias(state, sums, RouterConfig(bias="pid", bias_rate=1.0))
  np.testing.assert_array_equal(pid["bias"], [[0.25, 0.25, 0, 0], [0.25, 0, 0, 0]])
  assert init_bias(2, 4, RouterConfig()) == {}


def test_zero_experts_share_is_held_by_the_others_biases():
  """Two experts that compute and two that do not; K = 2 and K_e = 1.5 of four tokens."""
  sums = dataclasses.replace(loads([4, 0, 2, 2]), tokens=jnp.asarray([4.0]), zero_experts=2)
  config = RouterConfig(bias="pid", bias_rate=1.0, real_experts=1.5)
  moved = update_bias({"bias": jnp.zeros((1, 4))}, sums, config)["bias"]
  # The report's μ (K_e/K · 1/N − T_i / (K·T)) of those that compute; the others stay.
  np.testing.assert_allclose(moved, [[0.75 / 2 - 4 / 8, 0.75 / 2 - 0 / 8, 0, 0]])
  stats = statistics(sums)
  np.testing.assert_allclose(stats["zero_share"], [0.5])
  np.testing.assert_allclose(stats["real_experts"], [1.0])
  np.testing.assert_allclose(stats["max_violation"], [1.0])  # of 2 experts one has all
  np.testing.assert_allclose(stats["dead"], [0.5])


def test_the_controllers_gains_act_on_the_errors_differences():
  config = RouterConfig(
    bias="pid", bias_rate=0.5, bias_proportional=2.0, bias_derivative=4.0, real_experts=0.0
  )
  state, errors = init_bias(1, 2, config), []
  for load in ([4, 0], [3, 1], [1, 3], [2, 2]):
    errors.append(0.5 - load[0] / 4)
    state = update_bias(state, loads(load), config)
  e = [0.0, 0.0, *errors]
  differences = [e[i] - e[i - 1] for i in range(1, 6)]
  expected = 0.5 * sum(errors) + 2 * errors[-1] + 4 * differences[-1]
  np.testing.assert_allclose(state["bias"], [[expected, -expected]], atol=1e-6)


def test_losses_of_the_experts_that_compute():
  """Zero experts change no loss: what is left is a router of the others."""
  sums = sums_of(np.ones((1, D)), np.random.default_rng(1).normal(size=(D, E)))
  more = lambda a: jnp.concatenate([a, jnp.full((2,), 0.25)])
  names = ("load_E", "first_E", "probs_E", "importance_E", "soft_load_E")
  wide = {name: more(getattr(sums, name)) for name in names}
  wide["probs_E"] = wide["probs_E"].at[:E].multiply(0.5)  # a share that the zero experts take
  padded = dataclasses.replace(sums, choices=sums.choices + 0.5, zero_experts=2, **wide)
  for kind in ("gshard", "megablocks"):
    np.testing.assert_allclose(balance_loss(padded, kind), balance_loss(sums, kind), rtol=1e-6)


def test_bias_balances_a_skewed_router():
  x, gate, _ = problem(tokens=200, seed=3)
  x, gate = jnp.asarray(x), jnp.asarray(gate).at[:, 0].add(jnp.asarray(x).mean(0) * 20)

  @jax.jit
  def step(bias):
    routing = route(x, gate, RouterConfig(), k=1, bias_E=bias)
    sums = router_sums(routing, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))
    new = update_bias({"bias": bias}, sums, RouterConfig(bias="sign", bias_rate=0.01))
    return new["bias"], statistics(sums)["max_violation"]

  bias, first = step(jnp.zeros(E))
  for _ in range(100):
    bias, last = step(bias)
  assert last < first / 4


def test_bias_range_is_reported():
  sums = sums_of(np.ones((1, D)), np.ones((D, E)))
  assert "bias_range" not in statistics(sums)
  assert statistics(sums, jnp.asarray(0.5))["bias_range"] == 0.5
