"""Balancing loss, z-loss and statistics, on paper and against the loops."""

import dataclasses
import functools
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tape

from scmoe.moe.losses import gshard_loss, router_sums, statistics, z_loss
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import route

T, D, E = 7, 5, 4


@functools.partial(jax.jit, static_argnums=2)
def sums_of(x, gate, k, mask=None):
  routing = route(x, gate, RouterConfig(), k=k, mask_T=mask)
  zero = jnp.zeros((), jnp.int32)
  return router_sums(routing, zero, zero)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_losses_and_their_gradients_equal_the_loops(k, masked):
  rng = np.random.default_rng(k)
  x, gate = rng.normal(size=(T, D)).astype(np.float32), rng.normal(size=(D, E)).astype(np.float32)
  mask = np.asarray([1, 1, 0, 1, 0, 1, 1], bool) if masked else np.ones(T, bool)

  def losses(x, gate):
    sums = sums_of(x, gate, k, jnp.asarray(mask))
    return gshard_loss(sums) + 0.3 * z_loss(sums)

  value, got = jax.jit(jax.value_and_grad(losses, (0, 1)))(x, gate)

  leaves = tape.Var(x), tape.Var(gate)
  gates = {"0": {"weight": leaves[1]}}
  nothing = {"router_gate": gates, "up": np.zeros((E, D, 1)), "down": np.zeros((E, 1, D))}
  sums = oracles.Sums()
  oracles.routed([leaves[0][t] for t in range(T)], nothing, oracles.Router(k), sums, live=mask)
  loss = sums.gshard() + 0.3 * sums.z_loss()
  np.testing.assert_allclose(value, loss.value, rtol=1e-6)
  for a, b in zip(got, tape.gradients(loss, list(leaves)), strict=True):
    harness.assert_close(a, b, 1e-5)


def test_balance_on_paper():
  # Two tokens, two experts. Token a: p = (0.8, 0.2), b: (0.6, 0.4). Both choose expert 0 first:
  # 2 · (0.7 · 1 + 0.3 · 0) = 1.4. If b preferred 1, at (0.4, 0.6): 2 · (0.6 · ½ + 0.4 · ½) = 1.
  one = lambda probs: gshard_loss(sums_of(jnp.log(jnp.asarray(probs)), jnp.eye(2), 1))
  np.testing.assert_allclose(one([[0.8, 0.2], [0.6, 0.4]]), 1.4, rtol=1e-6)
  np.testing.assert_allclose(one([[0.8, 0.2], [0.4, 0.6]]), 1.0, rtol=1e-6)


def test_z_loss_on_paper():
  # logsumexp(0, 0) = ln 2; logsumexp(ln 3, 0) = ln 4.
  sums = sums_of(jnp.asarray([[0.0, 0.0], [math.log(3), 0.0]]), jnp.eye(2), 1)
  np.testing.assert_allclose(z_loss(sums), (math.log(2) ** 2 + math.log(4) ** 2) / 2, rtol=1e-6)


def test_sums_add_up_over_parts_of_the_batch():
  rng = np.random.default_rng(0)
  x, gate = jnp.asarray(rng.normal(size=(6, D)), jnp.float32), jnp.asarray(rng.normal(size=(D, E)))
  whole = sums_of(x, gate, 2)
  parts = jax.tree.map(jnp.add, sums_of(x[:2], gate, 2), sums_of(x[2:], gate, 2))
  parts = dataclasses.replace(parts, shards=whole.shards)  # the number of devices
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), parts, whole)


def test_statistics_on_paper_inside_jit():
  # Four tokens with p = (½, ¼, ¼, 0): all choose expert 0.
  logits = jnp.log(jnp.tile(jnp.asarray([[0.5, 0.25, 0.25, 1e-12]]), (4, 1)))
  stats = jax.jit(lambda x: statistics(sums_of(x, jnp.eye(4), 1)))(logits)
  np.testing.assert_array_equal(stats["load"], [1, 0, 0, 0])
  assert stats["max_violation"] == 3
  assert stats["dead"] == 0.75
  assert stats["diversity"] == 0.25
  np.testing.assert_allclose(stats["entropy"], 1.5 * math.log(2) / math.log(4), rtol=1e-5)
  np.testing.assert_allclose(stats["mutual_information"], 0, atol=1e-6)
  np.testing.assert_allclose(stats["confidence"], 0.5, rtol=1e-6)
  assert stats["drop"] == 0


def test_no_tokens_no_loss():
  sums = sums_of(jnp.ones((3, D)), jnp.ones((D, E)), 1, jnp.zeros(3, bool))
  assert gshard_loss(sums) == z_loss(sums) == 0
  assert all(np.isfinite(np.asarray(v)).all() for v in statistics(sums).values())
