"""Attention with sinks, in chunks, and with a window in some layers, against loops in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn_model
from flax import nnx

from scmoe.blocks.options import OverlapConfig
from scmoe.layers.attention import Attention, AttentionConfig
from scmoe.layers.dot_product import attend, attend_stored
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass

B, S, H, K, N, M = 2, 7, 4, 2, 6, 5


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape)


QKV = draw(0, B, S, H, N), draw(1, B, S, K, N), draw(2, B, S, K, M)
SINKS = draw(3, H) * 2


def loop(q, k, v, sinks, *, window=0, chunk=0, segments=None, scale=N**-0.5):
  """One head of one token after the other, in float64."""
  y = np.zeros((*q.shape[:3], v.shape[-1]))
  for b, s, h in np.ndindex(q.shape[:3]):
    seen = range(max(0, s - window + 1) if window else 0, s + 1)
    seen = [t for t in seen if segments is None or segments[b, t] == segments[b, s]]
    first = 0 if segments is None else list(segments[b]).index(segments[b, s])
    if chunk:
      seen = [t for t in seen if (t - first) // chunk == (s - first) // chunk]
    group = h // (q.shape[2] // k.shape[2])
    score = np.array([q[b, s, h] @ k[b, t, group] * scale for t in seen])
    share = np.exp(score) / (np.exp(score).sum() + (0 if sinks is None else np.exp(sinks[h])))
    y[b, s, h] = sum(p * v[b, t, group] for p, t in zip(share, seen))
  return y


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]])
CASES = {
  "sinks": {"sinks": SINKS},
  "sinks and a window": {"sinks": SINKS, "window": 3},
  "sinks and documents": {"sinks": SINKS, "segments": SEGMENTS},
  "a window that holds": {"sinks": None, "window": 3, "full": False},
  "a window that does not hold": {"sinks": None, "window": 3, "full": True},
  "chunks": {"sinks": None, "chunk": 3},
  "chunks and documents": {"sinks": None, "chunk": 2, "segments": SEGMENTS},
  "chunks that do not hold": {"sinks": None, "chunk": 3, "full": True},
  "chunks and a window": {"sinks": SINKS, "chunk": 4, "window": 2, "full": False},
  "documents without their window": {
    "sinks": SINKS, "window": 2, "segments": SEGMENTS, "full": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_whole_rows_and_a_cache_equal_the_loop(name):
  given = dict(CASES[name])
  full, sinks, segments = (given.pop(n, None) for n in ("full", "sinks", "segments"))
  limits = {"window": given.pop("window", 0), "chunk": given.pop("chunk", 0)}
  options = {**limits, "sinks_H": None if sinks is None else jnp.asarray(sinks)}
  options |= {"full": None if full is None else jnp.asarray(full)}
  want = loop(*QKV, sinks, segments=segments, **({} if full else limits))
  close = lambda got: np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in QKV)
  places = None if segments is None else jnp.asarray(segments)
  close(jax.jit(lambda q, k, v: attend(q, k, v, places, **options))(q, k, v))
  if segments is not None:  # rows with a cache are one document
    return
  longer = [jnp.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0)), constant_values=9.0) for x in (k, v)]
  positions = jnp.broadcast_to(jnp.arange(S), (B, S))
  stored = jax.jit(lambda q, positions: attend_stored(q, *longer, positions, **options))
  close(stored(q, positions))
  for s in (0, 4):
    got = stored(q[:, s : s + 1], positions[:, s : s + 1])
    np.testing.assert_allclose(got[:, 0], want[:, s], rtol=2e-5, atol=2e-6)


def test_gradients_are_finite_differences():
  cotangent = draw(5, B, S, H, M)
  arguments = *QKV, SINKS
  with jax.enable_x64(True):
    value = lambda q, k, v, sinks: (
      attend(q, k, v, sinks_H=sinks, window=3) * cotangent).sum()  # fmt: skip
    gradients = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, arguments))
  wanted = lambda *a: (loop(*a, window=3) * cotangent).sum()
  for place, gradient in enumerate(gradients):
    step = draw(6 + place, *arguments[place].shape) * 1e-5
    at = lambda move, place=place: wanted(*arguments[:place], arguments[place] + move,
                                          *arguments[place + 1 :])  # fmt: skip
    sides = at(step), at(-step)
    assert (np.asarray(gradient) * step).sum() * 2 == pytest.approx(sides[0] - sides[1], rel=1e-6)


def test_a_sink_that_wins_leaves_nothing_and_none_changes_nothing():
  config = AttentionConfig(width=8, num_heads=4, num_kv_heads=2, head_dim=4, sinks=True)
  with_sinks = Attention(config, rngs=nnx.Rngs(0))
  without = Attention(dataclasses.replace(config, sinks=False), rngs=nnx.Rngs(0))
  x, positions = jnp.asarray(draw(0, 1, 5, 8), jnp.float32), jnp.arange(5)[None]
  with_sinks.sinks[...] = jnp.full((4,), 1e4)
  np.testing.assert_array_equal(with_sinks(x, positions), jnp.zeros((1, 5, 8)))
  with_sinks.sinks[...] = jnp.full((4,), -1e4)
  np.testing.assert_allclose(with_sinks(x, positions), without(x, positions), atol=1e-6)


def model_of(overlap=OverlapConfig(), **fields):
  sizes = {"width": 16, "num_heads": 2, "num_layers": 4, "num_experts": 4, "top_k": 2}
  sizes |= {"mlp_hidden": 16, "context": 16, "dtype": "float32", "init_std": 0.3, "style": "llama"}
  config = ModelConfig(**{**sizes, "wiring": "topk", "vocab_size": 32, **fields})
  return drawn_model(lambda: GPT(config, overlap=overlap, rngs=nnx.Rngs(0)))


WINDOWS = {
  "scan": (1, {"moe_every": 1}),
  "written out": (0, {"moe_every": 1, "num_layers": 2}),
  "dense layers": (1, {"moe_every": 1, "dense_layers": "0,2"}),
  "pairs": (1, {"moe_every": 2, "wiring": "scmoe_pos2"}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_of_each_layer_is_its_own(name):
  """How far back a change of the first token reaches says which layers have a window.

  With windows of 2 in n layers, token n is the last one that sees token 0.
  """
  unroll, fields = WINDOWS[name]
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 10)))
  other = tokens.at[0, 0].set((tokens[0, 0] + 1) % 32)
  window = {"sliding_window": 2, "full_attention_layers": "1"}
  model = model_of(OverlapConfig(unroll=unroll), **fields, **window)
  run = nnx.jit(lambda model, tokens: model(tokens, Pass(no_drop=True, hidden=True)).hidden_LBSD)
  moved = jnp.abs(run(model, tokens) - run(model, other)).max((1, 3)) > 0
  reach = [int(jnp.nonzero(layer)[0].max()) for layer in moved]
  assert reach == [1, *[9] * (model.config.num_layers - 1)]


def test_without_such_layers_every_window_holds():
  model = model_of(moe_every=1, sliding_window=2)
  tokens = jnp.arange(10)[None]
  read = jax.jit(lambda tokens: model(tokens, Pass(no_drop=True)).h_BSD)
  moved = jnp.abs(read(tokens) - read(tokens.at[0, 0].set(31))).max((0, 2)) > 0
  assert moved.tolist() == [True] * 5 + [False] * 5
