"""The layer as a whole: every activation on both transports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import quick_jit

from scmoe.kernels.grouped_matmul import activation_names
from scmoe.layers.mlp import is_gated
from scmoe.moe.experts import ExpertWeights, expert_ffn

D, F = 4, 6


@pytest.mark.parametrize("activation", activation_names())
def test_both_transports_compute_the_same_with_every_activation(activation):
  """The rows as `capacity` brings them, equal room for each expert, and as `dropless` does."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  gate = normal(2, D, F) if is_gated(activation) else None
  weights = ExpertWeights(normal(2, D, F), gate, normal(2, F, D), normal(2, F), normal(2, D))
  rows, c, sizes = normal(2, 3, D), normal(2, 3, D), jnp.asarray([3, 3])
  flat = lambda a: a.reshape(-1, D)

  @quick_jit
  def both(rows, weights):
    capacity = lambda *a: flat(expert_ffn(*a, activation))
    dropless = lambda x, w: expert_ffn(flat(x), w, activation, sizes)
    pulled = [jax.vjp(f, rows, weights) for f in (capacity, dropless)]
    return [(y, pull(flat(c))) for y, pull in pulled]

  got, want = both(rows, weights)
  assert min(np.abs(a).max() for a in jax.tree.leaves(want)) > 0.1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
