"""Gradients of tables: sums over all tokens that look up one row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scmoe.layers.embed import Embedding, EmbeddingConfig


@pytest.mark.parametrize("tied", [True, False])
def test_sums_over_tokens_are_added_in_float32(tied):
  """A model that computes in bfloat16 adds up gradients of float32 tables as float64 does.

  Half of 2,048 tokens are the same one, and each position has 64. The gradients that arrive are
  bfloat16 numbers, so that nothing is rounded but the sums.
  """
  rows, length, width = 64, 32, 8
  config = EmbeddingConfig(16, width, context=length, tied=tied)
  graph, state = nnx.split(Embedding(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(0)
  tokens = np.where(rng.random((rows, length)) < 0.5, 3, rng.integers(0, 16, (rows, length)))
  positions = np.broadcast_to(np.arange(length), tokens.shape)
  bar = jnp.asarray(1 + 0.1 * rng.normal(size=(rows, length, width)), jnp.bfloat16)

  def looked(state):
    return nnx.merge(graph, state)(jnp.asarray(tokens), jnp.asarray(positions), jnp.bfloat16)

  values, pull = jax.vjp(looked, state)
  assert values.dtype == jnp.bfloat16
  (got,) = pull(bar)
  exact = np.asarray(bar, np.float64)
  for name, index, size in (("tokens", tokens, 16), ("positions", positions, length)):
    want = np.zeros((size, width))
    np.add.at(want, index, exact)
    assert got[name][...].dtype == jnp.float32
    np.testing.assert_allclose(got[name][...], want, rtol=1e-6, err_msg=name)
