"""Layers without a rotary embedding: queries, keys and values against the equations in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.data.config import DataConfig
from scmoe.layers.attention import Attention, AttentionConfig, LayerKind
from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.config import RunConfig

S, D, H, K, N, THETA, EPS, FLOOR = 7, 6, 4, 2, 8, 100.0, 1e-3, 3
POSITIONS = np.array([0, 1, 2, 3, 7, 8, 9])


def turned(x, position):
  """Pairs (2i, 2i + 1) of one head as complex numbers, each times exp(i · angle)."""
  pairs = x[0::2] + 1j * x[1::2]
  pairs = pairs * np.exp(1j * position * THETA ** (-np.arange(N // 2) * 2 / N))
  return np.stack([pairs.real, pairs.imag], 1).reshape(-1)


def unit(x):
  return x / np.sqrt((x**2).mean() + EPS)


@pytest.mark.parametrize("norm", ["none", "l2"])
@pytest.mark.parametrize("straight", [None, False, True])
def test_queries_and_keys_of_each_kind_of_layer(norm, straight):
  config = AttentionConfig(
    width=D, num_heads=H, num_kv_heads=K, head_dim=N, rope_theta=THETA, qk_norm=norm, norm_eps=EPS,
    rope=RopeConfig(interleaved=True), temperature=0.5, temperature_floor=FLOOR, init_std=1.0,
  )  # fmt: skip
  module = Attention(config, rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(1, S, D))
  kind = None if straight is None else LayerKind(straight=jnp.asarray(straight))
  q, k, v = module.project(jnp.asarray(x, jnp.float32), jnp.asarray(POSITIONS)[None], kind)
  for s, position in enumerate(POSITIONS):
    for got, weight, is_query in ((q, module.query, True), (k, module.key, False)):
      for h in range(weight.shape[1]):
        want = x[0, s] @ np.asarray(weight[...], np.float64)[:, h]
        if straight:
          want = want * (1 + 0.5 * np.log(1 + (position + 1) // FLOOR) * is_query)
        else:
          want = turned(want, position)
          want = unit(want) if norm == "l2" else want
        np.testing.assert_allclose(got[0, s, h], want, rtol=2e-4, atol=2e-5)
  np.testing.assert_allclose(v, jnp.einsum("bsd,dhn->bshn", x, module.value[...]), rtol=1e-4)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"full_attention_layers": "1"}, "lifts the window of some of model.num_layers=4, got model.s"),
    ({"sliding_window": 2, "full_attention_layers": "4"}, "'4' lifts the window of some of model."),
    ({"nope_layers": "5"}, "model.nope_layers='5' of model.num_layers=4 needs ordinary attention"),
    ({"nope_layers": "1", "style": "gpt2"}, "got model.style='gpt2' and model.kv_lora_rank=0"),
    ({"attention_temperature": 0.1}, "attention_temperature=0.1 is of model.nope_layers, got ''"),
    ({"nope_layers": "x"}, "model.nope_layers='x' has 'x'; use numbers and ranges of layers"),
    ({"qk_norm": "l2", "style": "gpt2"}, "model.qk_norm='l2' goes with model.style='llama'"),
    ({"expert_bias": True, "style": "gpt2"}, "model.expert_bias=True goes with model.style='lla"),
  ],
)
def test_options_that_do_not_fit_are_one_line(options, message):
  with pytest.raises(ConfigError) as caught:
    ModelConfig(**{"vocab_size": 8, "style": "llama", **options}).resolve()
  assert message in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_ring_of_devices_has_no_chunks_and_devices_with_heads_have():
  model = ModelConfig(
    vocab_size=8, style="llama", width=16, num_heads=4, num_layers=2, num_experts=4, context=16,
    attention_chunk=4,
  )  # fmt: skip
  mesh = MeshConfig(data=1, expert=1, sequence=2)
  run = RunConfig(model=model, mesh=mesh, data=DataConfig(seq_len=16))
  with pytest.raises(ConfigError, match=r"model.attention_chunk=4 with rows that a ring of device"):
    run.resolve(num_devices=2, vocab_size=8)
  heads = dataclasses.replace(mesh, sequence_attention="heads")
  dataclasses.replace(run, mesh=heads).resolve(num_devices=2, vocab_size=8)


def test_fewer_layers_keep_what_is_left_of_their_lists():
  model = ModelConfig(
    vocab_size=8, style="llama", num_layers=8, sliding_window=4, full_attention_layers="1,6",
    nope_layers="7", attention_temperature=0.1,
  )  # fmt: skip
  short = model.shortened(2).resolve()
  assert (short.num_layers, short.full_layers, short.straight_layers) == (4, (1,), ())
