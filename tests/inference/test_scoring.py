"""Likelihoods of continuations against a full forward pass of each text by itself."""

import functools
import itertools

import harness
import jax
import numpy as np
import pytest
from covering import night
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError
from scmoe.inference.scoring import Continuation, score, windows
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import Pass

VOCAB, CONTEXT = 64, 32


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Programs run once or twice here."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def make_model(style="gpt2"):
  config = ModelConfig(
    style=style,
    wiring="scmoe_pos2",
    num_layers=2,
    width=32,
    num_heads=4,
    num_experts=4,
    context=CONTEXT,
    dtype="float32",
  )
  return harness.filled(config.resolve(vocab_size=VOCAB))


@functools.cache
def program(style):
  model = make_model(style)
  return jax.jit(lambda tokens: model.logits(model(tokens, Pass(no_drop=True)).h_BSD))


def forward(style, tokens):
  """Logits [S, V] of a row by itself; what follows it in the program's row is not seen."""
  row = np.zeros((1, CONTEXT), np.int32)
  row[0, : len(tokens)] = tokens
  return program(style)(row)[0, : len(tokens)]


def plain(style, tokens, asked):
  """Softmax of the logits of all tokens but the last, in float64."""
  logits = np.asarray(forward(style, tokens[:-1]), np.float64)
  logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  rows = range(len(tokens) - 1 - asked, len(tokens) - 1)
  own = [logs[i, tokens[i + 1]] for i in rows]
  return sum(own), all(logs[i].argmax() == tokens[i + 1] for i in rows)


@pytest.mark.parametrize(
  ("style", "axes", "batch_size"),
  [("gpt2", None, 3), night("gpt2", (2, 4), 4), ("llama", (2, 2, 2), 4)],
)
def test_scores_are_those_of_each_text_alone(style, axes, batch_size, mesh_of):
  model, rng = make_model(style), np.random.default_rng(0)
  asked = [
    Continuation(rng.integers(0, VOCAB, n).tolist(), k) for n, k in ((2, 1), (5, 2), (20, 19))
  ]
  # One that the model itself would write.
  tokens = [7]
  for _ in range(4):
    tokens.append(int(forward(style, tokens)[-1].argmax()))
  asked += [Continuation(tokens, 4), Continuation([*tokens[:-1], (tokens[-1] + 1) % VOCAB], 4)]
  mesh = mesh_of(*axes) if axes else None
  found = score(model, asked, length=CONTEXT, batch_size=batch_size, mesh=mesh)
  for (tokens, count), got in zip(asked, found):
    log, greedy = plain(style, tokens, count)
    np.testing.assert_allclose(got.log_likelihood, log, rtol=1e-5, atol=1e-4)
    assert got.greedy == greedy
  assert [s.greedy for s in found[-2:]] == [True, False]


def test_longer_than_what_is_read_at_a_time():
  """The sum over windows, each by itself; of a long context only its end counts."""
  model, rng = make_model(), np.random.default_rng(1)
  tokens = rng.integers(0, VOCAB, 40).tolist()
  rolled, cut = score(model, [Continuation(tokens, 39), Continuation(tokens, 3)], length=16)
  parts = [(tokens[:17], 16), (tokens[16:33], 16), (tokens[23:], 7)]
  want = [plain("gpt2", *part) for part in parts]
  np.testing.assert_allclose(rolled.log_likelihood, sum(log for log, _ in want), rtol=1e-5)
  np.testing.assert_allclose(cut.log_likelihood, plain("gpt2", tokens[-17:], 3)[0], rtol=1e-5)


@settings(deadline=None, max_examples=200)
@given(size=st.integers(2, 60), data=st.data(), length=st.integers(1, 20))
def test_every_token_is_asked_for_once(size, data, length):
  asked = data.draw(st.integers(1, size - 1))
  pieces = list(windows(Continuation(range(size), asked), length))
  found = list(itertools.chain(*(list(tokens)[-count:] for tokens, count in pieces)))
  assert found == list(range(size - asked, size))
  for tokens, count in pieces:
    assert count < len(tokens) <= length + 1
  assert len(pieces[-1].tokens) == min(size, length + 1)  # as much context as fits


def test_what_cannot_be_asked():
  model = make_model()
  for continuation, words in (
    (Continuation([1, 2], 2), "asked=2 of 2 tokens"),
    (Continuation([1, 2], 0), "0 of 2 tokens"),
    (Continuation([1, VOCAB], 1), f"tokens from 1 to {VOCAB}; the vocabulary has"),
  ):
    with pytest.raises(ConfigError, match=words):
      score(model, [continuation], length=8)
  with pytest.raises(ConfigError, match=r"length=33 must be between 1 and model\.context=32"):
    score(model, [Continuation([1, 2], 1)], length=33)
  with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
    score(model, [Continuation([1, 2], 1)], length=32, batch_size=0)
  assert score(model, [], length=8) == []
