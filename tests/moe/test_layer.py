"""The layer as a whole: every activation on both transports, and batches without tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scmoe.kernels.grouped_matmul import activation_names
from scmoe.layers.mlp import is_gated
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.experts import ExpertWeights, expert_ffn
from scmoe.moe.layer import MoE
from scmoe.moe.route import RouterConfig

D, F, E = 4, 6, 4


@pytest.mark.parametrize("activation", activation_names())
def test_both_transports_compute_the_same_with_every_activation(activation):
  """The rows as `capacity` brings them, equal room for each expert, and as `dropless` does."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  gate = normal(2, D, F) if is_gated(activation) else None
  weights = ExpertWeights(normal(2, D, F), gate, normal(2, F, D), normal(2, F), normal(2, D))
  rows, c, sizes = normal(2, 3, D), normal(2, 3, D), jnp.asarray([3, 3])
  flat = lambda a: a.reshape(-1, D)

  @jax.jit
  def both(rows, weights):
    capacity = lambda *a: flat(expert_ffn(*a, activation))
    dropless = lambda x, w: expert_ffn(flat(x), w, activation, sizes)
    pulled = [jax.vjp(f, rows, weights) for f in (capacity, dropless)]
    return [(y, pull(flat(c))) for y, pull in pulled]

  got, want = both(rows, weights)
  assert min(np.abs(a).max() for a in jax.tree.leaves(want)) > 0.1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


TRANSPORTS = {
  "capacity": DispatchConfig(capacity_factor=1.0, groups=8),
  "dropless": DispatchConfig("dropless"),
}


@functools.cache
def gradients_of(transport, mesh=None):
  """x, live -> y, routing sums, and gradients of Σ cos · y for the parameters and x."""
  options = {"bias": True, "init_std": 1.0, "out_std": 1.0, "router": RouterConfig()}
  options |= {"transport": TRANSPORTS[transport], "mesh": mesh, "rngs": nnx.Rngs(0)}
  graph, params = nnx.split(MoE(D, F, E, activation="gelu", **options))

  def value(params, x, live_BS):
    y, sums = nnx.merge(graph, params)(x, k=2, live_BS=live_BS)
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), (y, sums)

  step = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))

  def run(x, live_BS=None):
    (_, (y, sums)), bars = step(params, jnp.asarray(x, jnp.float32), live_BS)
    return jax.tree.map(np.asarray, (y, sums, bars))

  return run


def assert_nothing(y, sums, bars):
  """Zeros everywhere, and finite: an empty batch teaches nothing."""
  for leaf in jax.tree.leaves((y, bars)):
    np.testing.assert_array_equal(leaf, 0)
  for leaf in (sums.tokens, sums.choices, sums.dropped, sums.load_E, sums.probs_E, sums.z_square):
    np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("shape", [(0, 3), (8, 0)], ids=["no sequences", "no positions"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_batch_without_tokens(transport, devices, shape, mesh8):
  y, sums, bars = gradients_of(transport, mesh8 if devices == 8 else None)(np.zeros((*shape, D)))
  assert y.shape == bars[1].shape == (*shape, D)
  assert_nothing(y, sums, bars)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_devices_without_live_tokens(transport, mesh8):
  """Eight sequences on eight devices; only some of them have tokens that take part."""
  for live in ([], [5], [0, 1, 6]):
    mask = np.isin(np.arange(8), live)
    x = np.random.default_rng(1).normal(size=(8, 4, D))
    live_BS = jnp.asarray(np.repeat(mask[:, None], 4, 1))
    y, sums, bars = gradients_of(transport, mesh8)(x, live_BS)
    if not live:
      assert_nothing(y, sums, bars)
    alone, counted, alone_bars = gradients_of(transport)(x, live_BS)
    np.testing.assert_array_equal(y[~mask], 0)
    np.testing.assert_array_equal(bars[1][~mask], 0)
    assert all(a.any() == bool(live) for a in (y, *jax.tree.leaves(bars)))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (y, bars), (alone, alone_bars))
    for name in ("tokens", "choices", "dropped", "load_E"):
      got, want = (getattr(s, name).sum(0) for s in (sums, counted))
      np.testing.assert_array_equal(got, want, err_msg=name)
