"""Filters keep what they promise; draws follow the filtered distribution."""

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.inference.sampling import Sampling, keep_top_k, keep_top_p, sample

LOGITS = jnp.log(jnp.array([[0.5, 0.1, 0.25, 0.15]]))


def kept(logits_BV):
  return np.isfinite(np.asarray(logits_BV[0])).tolist()


def test_top_k_keeps_the_largest():
  assert kept(keep_top_k(LOGITS, 2)) == [True, False, True, False]
  assert kept(keep_top_k(LOGITS, 99)) == [True] * 4


def test_top_p_keeps_the_smallest_set_that_reaches_p():
  assert kept(keep_top_p(LOGITS, 0.5)) == [True, False, False, False]
  assert kept(keep_top_p(LOGITS, 0.7)) == [True, False, True, False]  # 0.5 + 0.25 reaches 0.7
  assert kept(keep_top_p(LOGITS, 0.8)) == [True, False, True, True]
  assert kept(keep_top_p(LOGITS, 1e-9)) == [True, False, False, False]  # never empty


def test_temperature_zero_is_greedy():
  assert int(sample(LOGITS, Sampling(temperature=0), jax.random.key(0))[0]) == 0


def test_draws_follow_the_distribution():
  keys = jax.random.split(jax.random.key(0), 4000)
  draw = jax.vmap(lambda key: sample(LOGITS, Sampling(temperature=0.5, top_k=3), key)[0])
  share = np.bincount(np.asarray(draw(keys)), minlength=4) / 4000
  want = np.array([0.5, 0, 0.25, 0.15]) ** 2  # temperature 1/2 squares probabilities
  np.testing.assert_allclose(share, want / want.sum(), atol=0.02)
