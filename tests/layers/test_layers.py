"""Norms, attention, embeddings and MLPs against their equations, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tape
from flax import nnx
from harness import named
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.layers.attention import Attention, AttentionConfig, KeyValues
from scmoe.layers.dot_product import attend, attend_stored
from scmoe.layers.embed import Embedding, EmbeddingConfig
from scmoe.layers.mlp import MLP, MLPConfig, activate
from scmoe.layers.norm import Norm
from scmoe.layers.rope import RopeConfig, rotate
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import manual, parameter_specs

B, S, D = 2, 5, 12


def randomised(make, seed=0):
  """The module with no parameter 0 or 1, and the same parameters for the oracle."""
  graph, state = nnx.split(nnx.eval_shape(make))  # what it would draw itself is never compiled
  rng = np.random.default_rng(seed)
  draw = lambda a: jnp.asarray(0.5 * rng.normal(size=a.shape), jnp.float32)
  state = jax.tree.map(draw, state)
  return nnx.merge(graph, state), {k: tape.Var(v) for k, v in named(state).items()}


def inputs(*shape, seed=1):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(got, expected):
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(kind):
  norm, p = randomised(lambda: Norm(D, kind, 0.1))
  x = inputs(S, D) + 3.0
  assert_close(
    norm(jnp.asarray(x)), oracles.values([oracles.norm(v, p, kind, 0.1) for v in tape.lift(x)])
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_gradients_of_norms(kind, dtype):
  """Those of the formula in float32, rounded once at the end."""
  norm, _ = randomised(lambda: Norm(D, kind, 0.1))
  graph, state = nnx.split(norm)
  x, c = (jnp.asarray(inputs(3, 4, D, seed=seed), dtype) for seed in (1, 2))

  def plain(state, x):
    own, wide = nnx.merge(graph, state), x.astype(jnp.float32)
    if kind == "layernorm":
      wide = wide - wide.mean(-1, keepdims=True)
    unit = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 0.1)
    return unit * own.scale[...] + (0 if own.bias is None else own.bias[...])

  loss = lambda run: lambda state, x: (run(state, x).astype(jnp.float32) * c).sum()
  ours = jax.grad(loss(lambda state, x: nnx.merge(graph, state)(x)), (0, 1))(state, x)
  expected = jax.grad(loss(plain), (0, 1))(state, x)
  assert ours[1].dtype == dtype
  close = 1e-5 if dtype == jnp.float32 else 2**-7
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=close, atol=close
    )


def test_norms_of_large_bfloat16_values_are_computed_in_float32():
  norm = Norm(4, "rmsnorm", 0.0)
  y = norm(jnp.asarray([3e30, -3e30, 3e30, 3e30], jnp.bfloat16) / 1e20)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(y.astype(jnp.float32), [1, -1, 1, 1], rtol=1e-2)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_mlps(activation, bias):
  mlp, p = randomised(
    lambda: MLP(MLPConfig(D, 7, activation=activation, bias=bias), rngs=nnx.Rngs(0))
  )
  x = inputs(S, D)
  expected = [oracles.feed_forward(tape.lift(v), p, activation) for v in x]
  assert_close(mlp(jnp.asarray(x)), oracles.values(expected))


def test_clipped_projections_have_slope_one_at_their_bounds():
  """torch.clamp has slope 1 there, and jax.numpy.clip 1/2."""
  config = AttentionConfig(width=2, num_heads=1, num_kv_heads=1, head_dim=2, clip_qkv=0.5)
  attention = Attention(config, rngs=nnx.Rngs(0))
  slope = jax.grad(lambda y: attention._finished(y, None).sum())
  np.testing.assert_array_equal(slope(jnp.array([-0.6, -0.5, 0.0, 0.5, 0.6])), [0, 1, 1, 1, 0])


def test_a_gated_activation_needs_its_gate():
  with pytest.raises(ValueError, match="activation 'swiglu' is gated and needs a gate projection"):
    activate("swiglu", jnp.ones(3))


def attention(kv_heads, theta, bias):
  config = AttentionConfig(
    D, num_heads=4, num_kv_heads=kv_heads, head_dim=6, rope_theta=theta, bias=bias
  )
  return randomised(lambda: Attention(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("kv_heads", "theta", "bias"),
  [(4, 0.0, True), (2, 100.0, False), (1, 100.0, True)],
  ids=["gpt2", "grouped-rope", "one-kv-head-bias"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["row", "documents"])
def test_attention(kv_heads, theta, bias, packed):
  module, p = attention(kv_heads, theta, bias)
  x = inputs(B, S, D)
  documents = np.asarray([[1, 1, 2, 2, 2], [1, 2, 2, 3, 3]]) if packed else None
  positions = (
    np.asarray([[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]) if packed else np.arange(S)[None].repeat(B, 0)
  )
  segments = None if documents is None else jnp.asarray(documents)
  got = module(jnp.asarray(x), jnp.asarray(positions), segments)
  for b in range(B):
    of_row = None if documents is None else documents[b]
    expected = oracles.attention(list(map(tape.lift, x[b])), p, theta, positions[b], of_row)
    assert_close(got[b], oracles.values(expected))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("theta", [0.0, 100.0], ids=["learned", "rope"])
def test_attention_with_a_cache_equals_attention_without(theta, begins):
  module, _ = attention(2, theta, True)
  x = jnp.asarray(inputs(B, S, D))
  positions = jnp.broadcast_to(jnp.arange(S), (B, S))
  whole = module(x, positions)
  part = lambda at, cache, **options: module.mix(
    module.project(x[:, at], positions[:, at]), positions[:, at], cache=cache, **options
  )
  empty = jnp.full((B, S + 3, 2, 6), 1e4)  # what lies beyond a row's position is never read
  cache = KeyValues(empty, empty)
  first, cache = part(slice(0, 2), cache, begins=begins)
  parts = [first]
  for t in range(2, S):
    y, cache = part(slice(t, t + 1), cache)
    parts.append(y)
  assert_close(jnp.concatenate(parts, 1), np.asarray(whole))


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    ({"num_kv_heads": 3}, r"num_heads=4 is not a multiple of num_kv_heads=3; use a divisor of 4"),
    ({"head_dim": 0}, r"head_dim=0 is too small; the least is 1"),
    ({"head_dim": 5, "rope_theta": 100.0}, r"head_dim=5 with rotary positions; use an even number"),
    ({"qk_norm": "heads"}, r"qk_norm='heads' is unknown; .*one of: none, head, all"),
  ],
)
def test_options_of_attention_are_checked_when_they_are_made(fields, text):
  with pytest.raises(ConfigError, match=text):
    AttentionConfig(**{"width": D, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6} | fields)


@pytest.mark.parametrize("size", [3, 6, 11])
def test_values_may_be_narrower_or_wider_than_keys(size):
  """Released latent attention has both; jax's attention wants one width."""
  q, k = inputs(B, S, 4, 6), inputs(B, S, 2, 6, seed=2)
  v = inputs(B, S, 2, size, seed=3)
  keys, values = (np.repeat(x, 2, 2) for x in (k, v))
  scores = np.einsum("bshn,bthn->bhst", q, keys) / np.sqrt(6)
  scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  expected = np.einsum("bhst,bthm->bshm", weights / weights.sum(-1, keepdims=True), values)
  assert_close(attend(q, k, v), expected)
  positions = jnp.broadcast_to(jnp.arange(S), (B, S))
  assert_close(attend_stored(q, k, v, positions), expected)


def test_rope_turns_pairs_of_halves_and_keeps_lengths():
  x = np.asarray([1.0, 0.0, 0.0, 0.0], np.float32)
  turned = rotate(jnp.asarray(x)[None, None, None], jnp.asarray([[3]]), 100.0)[0, 0, 0]
  np.testing.assert_allclose(turned, [np.cos(3), 0, np.sin(3), 0], atol=1e-6)
  y = inputs(6)
  turned = rotate(jnp.asarray(y)[None, None, None], jnp.asarray([[5]]), 100.0)[0, 0, 0]
  assert_close(turned, oracles.rotate(tape.lift(y), 5, 100.0).value)
  np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(y), rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_share_of_a_head_turns_like_a_head_of_that_width(interleaved):
  x, positions = inputs(B, S, 3, 10), 1 + jnp.arange(B * S).reshape(B, S)
  turned = rotate(x, positions, 100.0, RopeConfig(share=0.65, interleaved=interleaved))
  narrow = rotate(x[..., :6], positions, 100.0, RopeConfig(interleaved=interleaved))
  np.testing.assert_array_equal(turned[..., :6], narrow)
  np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
  assert (np.asarray(narrow) != x[..., :6]).all()


def test_a_multiplier_replaces_the_usual_scale_of_scores():
  """Scores times √N more are those of queries that are √N times as large."""
  sizes = {"width": D, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
  plain, scaled = (
    randomised(lambda m=m: Attention(AttentionConfig(**sizes, multiplier=m), rngs=nnx.Rngs(0)))[0]
    for m in (0.0, 1.0)
  )
  x, positions = jnp.asarray(inputs(B, S, D)), jnp.broadcast_to(jnp.arange(S), (B, S))
  q, k, v = plain.project(x, positions)
  wide = q * q.shape[-1] ** 0.5
  want = plain.mix((wide, k, v), positions)[0]
  assert_close(scaled.mix((q, k, v), positions)[0], want)
  for model, queries in ((plain, wide), (scaled, q)):  # the same over a cache
    cache = model.empty_cache(B, S, jnp.float32)
    assert_close(model.mix((queries, k, v), positions, None, cache)[0], want)


def test_rope_scores_depend_on_distance_only():
  q, k = (jnp.asarray(inputs(1, 1, 1, 6, seed=s)) for s in (1, 2))
  at = lambda i, j: (
    rotate(q, jnp.asarray([[i]]), 50.0) * rotate(k, jnp.asarray([[j]]), 50.0)
  ).sum()
  np.testing.assert_allclose(at(7, 4), at(3, 0), rtol=1e-5)
  assert abs(float(at(7, 4) - at(7, 5))) > 1e-3


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embedding_and_logits(tied):
  module, p = randomised(
    lambda: Embedding(EmbeddingConfig(7, D, context=S, tied=tied), rngs=nnx.Rngs(0))
  )
  ids = np.asarray([[1, 6, 0]])
  h = module(jnp.asarray(ids), jnp.asarray([[0, 1, 4]]), jnp.float32)
  expected = [p["tokens"].value[i] + p["positions"].value[s] for i, s in zip([1, 6, 0], [0, 1, 4])]
  assert_close(h[0], np.stack(expected))
  table = p["tokens"].value.T if tied else p["head"].value
  assert_close(module.logits(h)[0], np.stack(expected) @ table)
  assert module.logits(h.astype(jnp.bfloat16)).dtype == jnp.float32


def test_both_uses_of_tied_embeddings_get_a_gradient():
  module = Embedding(EmbeddingConfig(3, D, init_std=1), rngs=nnx.Rngs(0))
  graph, state = nnx.split(module)

  def loss(state):
    model = nnx.merge(graph, state)
    return model.logits(model(jnp.asarray([[1]]), jnp.asarray([[0]]), jnp.float32))[0, 0, 2]

  (gradient,) = jax.tree.leaves(jax.jit(jax.grad(loss))(state))
  table = np.asarray(module.tokens[...])
  np.testing.assert_allclose(gradient, np.stack([0 * table[0], table[2], table[1]]), rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_vocabulary_in_parts_has_the_losses_and_gradients_of_a_whole_one(mesh_of, tied):
  """Embedding, logits and losses on two devices, each with half of the tokens' rows."""
  module, _ = randomised(
    lambda: Embedding(EmbeddingConfig(6, D, context=S, tied=tied), rngs=nnx.Rngs(0))
  )
  graph, params = nnx.split(module)
  rng = np.random.default_rng(3)
  ids, targets = (jnp.asarray(rng.integers(0, 6, (B, S))) for _ in range(2))
  positions = jnp.broadcast_to(jnp.arange(S), (B, S))
  c = jnp.asarray(rng.normal(size=(B, S)), jnp.float32)

  def both(params):
    def value(params):
      model = nnx.merge(graph, params)
      h_BSD = model(ids, positions, jnp.float32)
      losses = model.token_losses(jnp.sin(h_BSD), targets)
      nats, correct = model.summed_losses(jnp.sin(h_BSD), targets, c)
      return nats, (*losses, model.logits(h_BSD), nats, correct)

    (_, aux), grads = jax.value_and_grad(value, has_aux=True)(params)
    return aux, grads

  specs, mesh = parameter_specs(params), mesh_of(tensor=2)

  def local(params):
    aux, grads = both(params)
    return aux, reduce_gradients(grads, specs)

  got = jax.jit(manual(local, mesh, (specs,), (P(), specs)))(params)
  jax.tree.map(assert_close, got, jax.jit(both)(params))
  logits = jax.nn.log_softmax(got[0][2])
  assert set(np.unique(got[0][1])) <= {0.0, 1.0}
  assert logits.shape == (B, S, 6)


def test_mlp_on_kernels_lowers_for_cuda(mesh_of):
  """Alone, forward passes are a kernel; under a gradient, cut too small, or beside others, XLA."""
  config = MLPConfig(64, 128, bias=True, backend="mosaic_gpu")
  graph, state = nnx.split(MLP(config, rngs=nnx.Rngs(0)))

  def text(function, seq):
    x = jax.ShapeDtypeStruct((4, seq, 64), jnp.bfloat16)
    return jax.jit(function).trace(state, x).lower(lowering_platforms=("cuda",)).as_text()

  forward = lambda state, x: nnx.merge(graph, state)(x)
  loss = lambda state, x: forward(state, x).astype(jnp.float32).sum()
  beside = manual(forward, mesh_of(expert=4), (P(), P("expert")), P("expert"))
  assert "mosaic_gpu" in text(forward, 128)
  assert "mosaic_gpu" not in text(forward, 90)
  assert "mosaic_gpu" not in text(jax.grad(loss), 128)
  assert "mosaic_gpu" not in text(beside, 128)
