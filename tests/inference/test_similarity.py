"""Cosine and centred kernel alignment against plain numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.inference.similarity import SAMPLE, cosine, counted, gram, hsic


def alignment(a, b, mask=None):
  """Linear CKA of one batch by the functions under test."""
  mask = jnp.ones(len(a)) if mask is None else jnp.asarray(mask, jnp.float32)
  grams, n = [gram(jnp.asarray(x, jnp.float32), mask) for x in (a, b)], counted(mask)
  cross, own = hsic(*grams, n), [hsic(x, x, n) for x in grams]
  return float(cross / np.sqrt(float(own[0]) * float(own[1]))), float(cross)


def u_centred(x):
  """The definition (Székely and Rizzo 2014): double centring that leaves the diagonal out."""
  n = len(x)
  a = x @ x.T
  np.fill_diagonal(a, 0)
  rows = a.sum(1, keepdims=True) / (n - 2)
  a = a - rows - rows.T + a.sum() / ((n - 1) * (n - 2))
  np.fill_diagonal(a, 0)
  return a


def by_definition(a, b):
  """The mean product of U-centred matrices, which is the unbiased HSIC: in loops of n (n - 3)."""
  first, second, n = u_centred(a), u_centred(b), len(a)
  return (first * second).sum() / (n * (n - 3))


def values(tokens=40, width=7, seed=0):
  rng = np.random.default_rng(seed)
  a = rng.normal(size=(tokens, width)) + 30  # a mean far above the differences, as in a stream
  return a, a @ rng.normal(size=(width, width)) + 0.5 * rng.normal(size=(tokens, width))


def test_hsic_is_its_definition():
  a, b = values()
  ratio, cross = alignment(a, b)
  expected = by_definition(a, b)
  assert cross == pytest.approx(expected, rel=1e-4)
  assert ratio == pytest.approx(
    expected / np.sqrt(by_definition(a, a) * by_definition(b, b)), rel=1e-4
  )
  assert 0.3 < ratio < 1


def test_tokens_that_do_not_count_change_nothing():
  a, b = values()
  mask = np.arange(40) % 3 > 0
  noisy = np.where(mask[:, None], a, 1e3)
  assert alignment(noisy, b, mask)[1] == pytest.approx(by_definition(a[mask], b[mask]), rel=1e-4)


def test_turned_scaled_and_moved_is_the_same_and_noise_is_not():
  a, _ = values()
  turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(7, 7)))
  assert alignment(a, 3 * (a @ turn) - 5)[0] == pytest.approx(1, abs=1e-4)
  assert abs(alignment(a, values(seed=5)[0])[0]) < 0.3
  spread = np.random.default_rng(2).normal(size=(3 * SAMPLE, 4))
  assert alignment(spread, -spread)[0] == pytest.approx(1, abs=1e-4)
  assert float(counted(jnp.ones(3 * SAMPLE))) == SAMPLE


def test_cosine_is_numpys():
  a, b = values()
  expected = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
  np.testing.assert_allclose(cosine(jnp.asarray(a), jnp.asarray(b)), expected, rtol=1e-5)
  assert float(cosine(jnp.zeros(3), jnp.ones(3))) == 0


def test_three_tokens_have_no_estimate():
  """The unbiased estimate divides by n - 3: with fewer than four tokens it counts as 0."""
  a, b = values()
  for tokens in (2, 3):
    mask = jnp.asarray(np.arange(40) < tokens, jnp.float32)
    grams = [gram(jnp.asarray(x, jnp.float32), mask) for x in (a, b)]
    assert float(hsic(*grams, counted(mask))) == 0.0
