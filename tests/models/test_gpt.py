"""Inputs that a model refuses."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import parts, tiny

from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import Pass


@pytest.fixture(scope="module")
def model():
  """Context 6, vocabulary 11."""
  graph, params = parts(tiny(wiring="topk"))
  return nnx.merge(graph, params)


@pytest.mark.parametrize(
  ("ids", "text"),
  [
    (jnp.zeros((1, 7), jnp.int32), r"model.context=6, got rows of 7 tokens; use at most 6"),
    (jnp.zeros((6,), jnp.int32), r"reads token ids \[batch, sequence\], got \[6\]"),
    (jnp.asarray([[1, 11]]), r"model.vocab_size=11, got token id 11; use ids from 0 to 10"),
    (jnp.asarray([[-1, 3]]), r"model.vocab_size=11, got token id -1"),
  ],
)
def test_tokens_that_no_position_or_row_is_for(model, ids, text):
  with pytest.raises(ConfigError, match=text):
    model(ids)


def test_a_length_is_checked_inside_of_jit_as_well(model):
  run = lambda ids: model(ids).h_BSD
  jax.eval_shape(run, jnp.zeros((1, 6), jnp.int32))
  with pytest.raises(ConfigError, match=r"model\.context=6"):
    jax.eval_shape(run, jnp.zeros((1, 7), jnp.int32))


def test_known_ids_inside_of_jit_are_checked_too(model):
  # A traced function may close over ids that are known: they are not tracers.
  ids, wrong = jnp.asarray([[1, 2]]), jnp.asarray([[1, 11]])
  assert jax.eval_shape(lambda: model(ids).h_BSD).shape == (1, 2, 16)
  with pytest.raises(ConfigError, match=r"got token id 11"):
    jax.eval_shape(lambda: model(wrong).h_BSD)


def test_the_padding_of_a_prompt_may_be_longer_than_the_context(model):
  run = lambda ids: model(ids, Pass(caches=model.init_caches(1, 16), begins=True)).h_BSD
  assert jax.eval_shape(run, jnp.zeros((1, 16), jnp.int32)).shape == (1, 16, 16)


def test_a_width_that_heads_do_not_divide():
  with pytest.raises(ConfigError, match=r"model.width=32 is not divisible by model.num_heads=3"):
    ModelConfig(width=32, num_heads=3).resolve(vocab_size=64)
  assert ModelConfig(width=32, num_heads=3, head_dim=8).resolve(vocab_size=64).head_dim == 8
