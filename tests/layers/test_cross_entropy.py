"""Losses by chunks of tokens: those of float64 whatever the chunks; never all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.layers import cross_entropy
from scmoe.layers.cross_entropy import Teaching, summed_losses, taught_losses, token_losses

D, V = 8, 11


def example(tokens: int, by_token: bool, seed: int = 0):
  rng = np.random.default_rng(seed)
  h_TD = rng.normal(size=(tokens, D))
  weight = rng.normal(size=(V, D) if by_token else (D, V))
  targets_T = rng.integers(0, V, tokens)
  weights_T = rng.integers(0, 2, tokens) * rng.uniform(0.5, 2, tokens)
  return h_TD, weight, targets_T, weights_T


def oracle(h_TD, weight, targets_T, weights_T, by_token):
  """Losses of each token, their weighted sums, and the gradients of the first: float64."""
  logits_TV = h_TD @ (weight.T if by_token else weight)
  shifted_TV = logits_TV - logits_TV.max(1, keepdims=True)
  probs_TV = np.exp(shifted_TV) / np.exp(shifted_TV).sum(1, keepdims=True)
  rows_T = np.arange(len(targets_T))
  nats_T = -np.log(probs_TV[rows_T, targets_T])
  correct_T = (logits_TV.argmax(1) == targets_T).astype(float)
  bar_TV = probs_TV.copy()
  bar_TV[rows_T, targets_T] -= 1
  bar_TV *= weights_T[:, None]
  h_bar_TD = bar_TV @ (weight if by_token else weight.T)
  weight_bar = bar_TV.T @ h_TD if by_token else h_TD.T @ bar_TV
  sums = (nats_T * weights_T).sum(), (correct_T * weights_T).sum()
  return (nats_T, correct_T), sums, (h_bar_TD, weight_bar)


def in_float32(h_TD, weight, targets_T, weights_T):
  wide = lambda a: jnp.asarray(a, jnp.float32)
  return wide(h_TD), wide(weight), jnp.asarray(targets_T, jnp.int32), wide(weights_T)


@pytest.fixture(params=[0, 3, 5], ids=["one_chunk", "chunks_of_3", "chunks_of_5"])
def chunks(request, monkeypatch):
  """Scores of a chunk, cut down to those of a few tokens."""
  if request.param:
    monkeypatch.setattr(cross_entropy, "CHUNK_SCORES", request.param * V)
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 1)


def test_no_tokens_have_no_loss_and_a_gradient_of_zero():
  h_TD, weight, targets_T, weights_T = in_float32(*example(0, True))
  with jax.disable_jit():
    (loss, correct), bar = jax.value_and_grad(
      lambda w: summed_losses(h_TD, w, targets_T, weights_T, True), has_aux=True
    )(weight)
  assert (loss, correct) == (0, 0)
  np.testing.assert_array_equal(bar, np.zeros((V, D)))


@pytest.mark.parametrize("by_token", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("tokens", [1, 9, 10])
def test_losses_and_gradients_of_the_float64_oracle(chunks, tokens, by_token):
  given = example(tokens, by_token)
  each, sums, bars = oracle(*given, by_token)
  h_TD, weight, targets_T, weights_T = in_float32(*given)
  run = jax.value_and_grad(
    lambda h, w: summed_losses(h, w, targets_T, weights_T, by_token), (0, 1), has_aux=True
  )
  ((nats, correct), got) = jax.jit(run)(h_TD, weight)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
  close((nats, correct), sums)
  jax.tree.map(close, got, bars)
  jax.tree.map(close, token_losses(h_TD, weight, targets_T, by_token), each)


@pytest.mark.parametrize("by_token", [True, False], ids=["tied", "head"])
def test_losses_of_each_token_have_gradients_too(chunks, by_token):
  h_TD, weight, targets_T, weights_T = in_float32(*example(10, by_token))
  summed = lambda h, w: summed_losses(h, w, targets_T, weights_T, by_token)[0]
  each = lambda h, w: (token_losses(h, w, targets_T, by_token)[0] * weights_T).sum()
  got, expected = (jax.grad(f, (0, 1))(h_TD, weight) for f in (each, summed))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)


def test_a_later_factor_scales_the_gradients(chunks):
  given = in_float32(*example(10, True))
  loss = lambda factor: lambda h, w: factor * summed_losses(h, w, *given[2:], True)[0] / 7
  once, twice = (jax.grad(loss(factor), (0, 1))(*given[:2]) for factor in (1, 2))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-6), once, twice)


def test_equal_and_extreme_scores():
  """A tie goes to the first score; scores may differ by more than exp can represent."""
  logits = lambda rows: token_losses(
    jnp.asarray(rows, jnp.float32), jnp.eye(4), jnp.asarray([1] * len(rows)), by_token=True
  )
  nats_T, correct_T = logits([[0, 0, 0, 0], [1, 2, 2, 0], [2, 2, 1, 0], [500, -500, 0, 0]])
  np.testing.assert_allclose(nats_T[:1], np.log(4), rtol=1e-6)
  np.testing.assert_allclose(nats_T[3], 1000, rtol=1e-6)
  assert correct_T.tolist() == [0, 1, 0, 0]


def test_a_score_that_is_not_a_number_is_seen():
  h_TD = jnp.asarray([[jnp.nan, 0], [1, 0]], jnp.float32)
  nats_T, _ = token_losses(h_TD, jnp.eye(2), jnp.asarray([0, 0]), True)
  assert jnp.isnan(nats_T[0])
  assert jnp.isfinite(nats_T[1])


def test_one_pass_finds_what_two_find():
  """GPUs read the scores once and CPUs twice."""
  equal = jnp.asarray(
    [[0, 0, 0], [1, 2, 2], [500, -500, 500], [-jnp.inf, 3, -jnp.inf]], jnp.float32
  )
  for scores in (equal, jax.random.normal(jax.random.key(0), (5, 1000)) * 30):
    top, power, index = jax.jit(cross_entropy._in_one_pass)(scores)
    expected = cross_entropy._in_two_passes(scores)
    assert (top == expected[0]).all()
    assert (index == expected[2]).all()
    np.testing.assert_allclose(power, expected[1], rtol=2e-6)
  nothing = cross_entropy._in_one_pass(jnp.asarray([[0, jnp.nan], [jnp.nan, 0]], jnp.float32))
  assert jnp.isnan(jnp.asarray(nothing[:2])).all()


@pytest.mark.parametrize("by_token", [True, False], ids=["tied", "head"])
def test_types_of_the_products(by_token):
  """bf16 in, bf16 gradients, sums and scores in float32; near the oracle of the rounded inputs."""
  h_TD, weight, targets_T, weights_T = in_float32(*example(64, by_token, seed=4))
  h_TD, weight = h_TD.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
  run = lambda h, w: summed_losses(h, w, targets_T, weights_T, by_token)[0]
  nats, got = jax.value_and_grad(run, (0, 1))(h_TD, weight)
  wide = [np.asarray(a, np.float64) for a in (h_TD, weight)]
  _, sums, bars = oracle(*wide, np.asarray(targets_T), np.asarray(weights_T, np.float64), by_token)
  assert nats.dtype == jnp.float32
  np.testing.assert_allclose(nats, sums[0], rtol=2e-6)
  for bar, expected in zip(got, bars):
    assert bar.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      np.asarray(bar, np.float64), expected, atol=2**-7 * np.abs(expected).max()
    )


def test_no_array_of_all_tokens_and_scores(monkeypatch):
  """The program holds a chunk of [tokens, vocabulary] only, in the gradient's pass too."""
  tokens, vocabulary = 1024, 512
  monkeypatch.setattr(cross_entropy, "CHUNK_SCORES", 128 * vocabulary)
  shape = jax.ShapeDtypeStruct
  given = shape((tokens, D), jnp.bfloat16), shape((vocabulary, D), jnp.bfloat16)
  rest = shape((tokens,), jnp.int32), shape((tokens,), jnp.float32)
  loss = lambda h, w, targets, weights: summed_losses(h, w, targets, weights, True)[0]
  text = jax.jit(jax.grad(loss, (0, 1))).lower(*given, *rest).as_text()
  assert f"tensor<128x{vocabulary}xf32>" in text
  assert f"tensor<{tokens}x{vocabulary}x" not in text


# -- with a teacher -------------------------------------------------------------------------------


def taught_oracle(student, teacher, targets_T, weights_T, how):
  """Every sum of `taught_losses` and the first one's gradients, from all scores: float64."""
  (h_TD, weight), (g_Td, given) = student, teacher
  of = lambda x, w, by_token: x @ (w.T if by_token else w)
  logits_TV, wanted_TV = of(h_TD, weight, how.by_token), of(g_Td, given, how.teacher_by_token)

  def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))

  heat = how.temperature
  p_TV, q_TV, t_TV = (log_softmax(x) for x in (logits_TV, logits_TV / heat, wanted_TV / heat))
  rows_T = np.arange(len(targets_T))
  nats_T, apart_T = -p_TV[rows_T, targets_T], (np.exp(t_TV) * (t_TV - q_TV)).sum(1)
  loss_T = (1 - how.share) * nats_T + how.share * heat**2 * apart_T
  correct_T = (logits_TV.argmax(1) == targets_T).astype(float)
  bar_TV = np.exp(p_TV)
  bar_TV[rows_T, targets_T] -= 1
  bar_TV = (1 - how.share) * bar_TV + how.share * heat * (np.exp(q_TV) - np.exp(t_TV))
  bar_TV *= weights_T[:, None]
  h_bar_TD = bar_TV @ (weight if how.by_token else weight.T)
  weight_bar = bar_TV.T @ h_TD if how.by_token else h_TD.T @ bar_TV
  sums = tuple((x * weights_T).sum() for x in (loss_T, nats_T, correct_T, apart_T))
  return sums, (h_bar_TD, weight_bar)


def taught_example(tokens, by_token, teacher_by_token, seed=7):
  h_TD, weight, targets_T, weights_T = example(tokens, by_token, seed)
  rng = np.random.default_rng(seed + 1)
  teacher = rng.normal(size=(tokens, 5)), rng.normal(size=(V, 5) if teacher_by_token else (5, V))
  return (h_TD, weight), teacher, targets_T, weights_T


def wide(tree):
  return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32 if a.dtype.kind == "f" else None), tree)


@pytest.mark.parametrize(("share", "temperature"), [(0.0, 1.0), (0.3, 2.0), (1.0, 0.5)])
@pytest.mark.parametrize("lies", [(True, False), (False, True)], ids=["tied", "head"])
def test_taught_by_the_float64_oracle(chunks, lies, share, temperature):
  how = Teaching(share, temperature, *lies)
  given = taught_example(10, *lies)
  sums, bars = taught_oracle(*given, how)
  student, teacher, targets_T, weights_T = wide(given)

  def run(student, teacher):
    found = taught_losses(student, teacher, targets_T, weights_T, how)
    return found[0], found[1:]

  (loss, rest), (got, of_teacher) = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(
    student, teacher
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-6, atol=5e-6)
  close((loss, *rest), sums)
  jax.tree.map(close, got, bars)
  assert not any(x.any() for x in of_teacher)


def test_the_same_scores_teach_nothing():
  student, _, targets_T, weights_T = wide(taught_example(10, True, True))
  how = Teaching(1.0, 3.0, True, True)
  run = lambda s: taught_losses(s, student, targets_T, weights_T, how)[0]
  loss, bars = jax.value_and_grad(run)(student)
  np.testing.assert_allclose(loss, 0, atol=1e-5)
  jax.tree.map(lambda x: np.testing.assert_allclose(x, 0, atol=1e-5), bars)


def test_no_array_of_all_tokens_and_either_models_scores(monkeypatch):
  """Two arrays of scores are there at a time: chunks are half as long."""
  tokens, vocabulary = 1024, 512
  monkeypatch.setattr(cross_entropy, "CHUNK_SCORES", 256 * vocabulary)
  shape = jax.ShapeDtypeStruct
  of = lambda width: (
    shape((tokens, width), jnp.bfloat16),
    shape((vocabulary, width), jnp.bfloat16),
  )
  rest = shape((tokens,), jnp.int32), shape((tokens,), jnp.float32)
  how = Teaching(0.5, 2.0, True, True)
  loss = lambda *given: taught_losses(*given, how)[0]
  text = jax.jit(jax.grad(loss)).lower(of(D), of(2 * D), *rest).as_text()
  assert f"tensor<128x{vocabulary}xf32>" in text
  assert f"tensor<{tokens}x{vocabulary}x" not in text
