"""Latent attention: absorbed equals expanded, its cache, and what turns how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn_model
from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.layers.latent_attention import LatentAttention, LatentAttentionConfig
from scmoe.layers.rope import RopeConfig, rotate

CONFIG = LatentAttentionConfig(
  width=20,
  num_heads=3,
  q_lora_rank=10,
  kv_lora_rank=8,
  qk_nope_head_dim=6,
  qk_rope_head_dim=4,
  v_head_dim=5,
  scale_q=True,
  scale_kv=True,
  init_std=0.3,
  out_std=0.3,
)


def test_absorbed_equals_expanded():
  layer = drawn_model(lambda: LatentAttention(CONFIG, rngs=nnx.Rngs(params=0)))
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 7, 20)), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
  q, c, k = jax.jit(layer.project)(x, positions)
  last = {"positions_BS": positions[:, -1:]}
  with jax.default_matmul_precision("highest"):
    expanded = jax.jit(layer.expanded)(q[:, -1:], c, k, **last)
    absorbed = jax.jit(layer.absorbed)(q[:, -1:], c, k, **last)
    plain = jax.jit(layer.expanded)(q, c, k)[:, -1:]
  np.testing.assert_allclose(absorbed, expanded, rtol=2e-5, atol=2e-6)
  np.testing.assert_allclose(plain, expanded, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("begins", [False, True])
def test_a_cache_holds_latents_only_and_decodes_the_same(begins):
  layer = drawn_model(lambda: LatentAttention(CONFIG, rngs=nnx.Rngs(params=1)))

  @jax.jit
  def step(x, positions, cache):
    begun = begins if x.shape[1] > 1 else False
    return layer.mix(layer.project(x, positions), positions, cache=cache, begins=begun)

  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 20)), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
  whole = jax.jit(layer)(x, positions)
  cache = layer.empty_cache(2, 8, jnp.float32)
  assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == 2 * 8 * (8 + 4)
  first = positions[:, :4]
  y, cache = step(x[:, :4], first, cache)
  np.testing.assert_allclose(y, whole[:, :4], rtol=1e-4, atol=1e-5)
  for i in (4, 5):
    here = positions[:, i : i + 1]
    y, cache = step(x[:, i : i + 1], here, cache)
    np.testing.assert_allclose(y, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)


def test_yarn_stretches_low_frequencies_only():
  """DeepSeek-V3's own numbers: dimensions up to 10 turn as before, from 23 on 40 times slower."""
  rope = RopeConfig(
    scaling="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0
  )
  plain = RopeConfig().frequencies(64, 10000.0)
  ratio = plain / rope.frequencies(64, 10000.0)
  np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[23:], 40, rtol=1e-5)
  # On the ramp, dimension 16 is 6/13 of the way.
  np.testing.assert_allclose(1 / ratio[16], 1 - (6 / 13) * (1 - 1 / 40), rtol=1e-5)
  assert rope.amplitude == 1.0
  assert rope.score_factor == pytest.approx((0.1 * np.log(40) + 1) ** 2)
  alone = RopeConfig(scaling="yarn", factor=4.0, original_context=64)
  assert alone.amplitude == pytest.approx(0.1 * np.log(4) + 1)


def test_llama3_and_linear_frequencies():
  plain = RopeConfig().frequencies(8, 100.0)
  linear = RopeConfig(scaling="linear", factor=2.0).frequencies(8, 100.0)
  np.testing.assert_allclose(linear, plain / 2)
  rope = RopeConfig(scaling="llama3", factor=8.0, original_context=64)
  turns = 64 * plain / (2 * np.pi)  # 10.2, 3.2, 1.02, 0.32
  smooth = np.clip((turns - 1) / 3, 0, 1)
  want = plain / 8 * (1 - smooth) + plain * smooth
  np.testing.assert_allclose(rope.frequencies(8, 100.0), want, rtol=1e-6)


def test_neighbours_turn_together_where_pairs_are_interleaved():
  x = np.random.default_rng(2).normal(size=(1, 1, 1, 6)).astype(np.float32)
  order = [0, 2, 4, 1, 3, 5]  # neighbours to halves
  halves = rotate(jnp.asarray(x[..., order]), jnp.asarray([[3]]), 100.0)
  interleaved = rotate(jnp.asarray(x), jnp.asarray([[3]]), 100.0, RopeConfig(interleaved=True))
  np.testing.assert_allclose(np.asarray(interleaved)[..., order], halves, rtol=1e-6)


def test_scalings_that_lack_their_context():
  with pytest.raises(ConfigError, match=r"model.rope.original_context=0 does not go with"):
    RopeConfig(scaling="yarn", factor=2.0).check()
  with pytest.raises(ConfigError, match=r"model.rope.factor=0.5 must be at least 1"):
    RopeConfig(scaling="linear", factor=0.5).check()
