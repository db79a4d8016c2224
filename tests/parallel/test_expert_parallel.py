"""On eight devices the model is the function that it is on one: values, drops, every gradient."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh

BATCH = 8
DROPS = DispatchConfig(capacity_factor=1.0, groups=8)  # the same groups on every mesh
NOISY = RouterConfig(noise=2.0)

MODELS = {
  "scmoe_pos2": {"wiring": "scmoe_pos2", "style": "llama", "num_kv_heads": 2},
  "top2": {"wiring": "top2"},
  "dgmoe": {"wiring": "dgmoe", "style": "gpt2"},
  "farskip_routed": {"wiring": "farskip_routed", "moe_every": 1, "num_layers": 2},
  "scmoe_pos2-every1": {"wiring": "scmoe_pos2", "moe_every": 1, "num_layers": 2},
  "longcat": {
    "wiring": "scmoe_pos2",
    "style": "llama",
    "mix": "direct",
    "top_k": 3,
    "zero_experts": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
  },
  "olmoe-dense-among": {
    "wiring": "topk",
    "style": "llama",
    "top_k": 2,
    "moe_every": 1,
    "num_layers": 3,
    "dense_layers": "1",
    "num_kv_heads": 2,
    "qk_norm": "all",
    "attention_bias": True,
  },
  "qwen3": {
    "wiring": "topk",
    "style": "llama",
    "top_k": 2,
    "moe_every": 1,
    "num_layers": 1,
    "num_kv_heads": 2,
    "qk_norm": "head",
    "sliding_window": 3,
    "clip_qkv": 0.5,
  },
  "gpt-oss": {
    "wiring": "topk",
    "style": "llama",
    "top_k": 2,
    "moe_every": 1,
    "num_layers": 2,
    "num_kv_heads": 2,
    "sliding_window": 3,
    "full_attention_layers": "1",
    "attention_bias": True,
    "attention_sinks": True,
    "expert_bias": True,
    "ffn": FFNOptions(activation="clamped_swiglu"),
  },
}
MESHES = {"1x8x1": (1, 8, 1), "4x2x1": (4, 2, 1), "2x4x1": (2, 4, 1), "2x2x2": (2, 2, 2)}
# By day `scmoe_pos2` is on meshes in training/test_state_shares.py and test_profile.py.
BY_DAY = [
  ("dgmoe", "2x4x1"),
  ("longcat", "2x2x2"),
  ("gpt-oss", "2x2x2"),
]
BY_NIGHT = [("scmoe_pos2", "4x2x1"), ("scmoe_pos2", "2x2x2"), ("top2", "2x2x2")]
BY_NIGHT += [("olmoe-dense-among", "2x2x2"), ("qwen3", "2x2x2")]
BY_NIGHT += [case for case in ((model, "1x8x1") for model in MODELS) if case not in BY_DAY]
CASES = BY_DAY + [night(*case) for case in BY_NIGHT]


def run_on(name, mesh):
  config = harness.tiny(num_experts=8, vocab_size=12, **MODELS[name])
  graph, params = harness.parts(config, dispatch=DROPS, router=NOISY)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 12, (BATCH, harness.LENGTH), np.int32)
  coefficients = rng.normal(size=(BATCH, harness.LENGTH, 12)).astype(np.float32)
  key = jax.random.key(3)
  if mesh is None:
    step = lambda p, i, c: jax.value_and_grad(harness.scalar(graph, i, c, key=key), has_aux=True)(p)
  else:
    params = harness.sharded(params, mesh)
    place = lambda a: jax.device_put(a, NamedSharding(mesh, P(BATCH_AXES)))
    ids, coefficients = place(ids), place(coefficients)
    step = harness.on_mesh(mesh, graph, params, key=key)
  (value, aux), gradients = jax.jit(step)(params, ids, coefficients)
  return harness.Run(float(value), jax.tree.map(np.asarray, aux), harness.named(gradients))


@functools.cache
def one_device(name):
  return run_on(name, None)


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=lambda x: x)
def test_a_mesh_changes_nothing(name, mesh):
  data, expert, tensor = MESHES[mesh]
  expected = one_device(name)
  got = run_on(name, make_mesh(MeshConfig(data, expert, tensor), num_experts=8))
  harness.assert_same(got, expected)  # a gradient counted once per device would be 2 to 8 times it
  for field in ("tokens", "choices", "dropped", "load_E", "first_E"):
    np.testing.assert_array_equal(
      getattr(got.aux["sums"], field), getattr(expected.aux["sums"], field), err_msg=field
    )
  assert expected.aux["sums"].dropped.min() > 0


def test_the_noise_is_there():
  config = harness.tiny(num_experts=8, vocab_size=12, **MODELS["top2"])
  graph, params = harness.parts(config, dispatch=DROPS)
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(0, 12, (BATCH, harness.LENGTH)), jnp.int32)
  quiet = jax.jit(harness.scalar(graph, ids, 0.0, key=jax.random.key(3)))(params)[1]
  noisy = one_device("top2").aux
  assert not np.array_equal(quiet["sums"].load_E, noisy["sums"].load_E)


@pytest.mark.parametrize(
  ("batch", "dispatch", "message"),
  [
    (
      8,
      {"groups": 4},
      r"dispatch\.groups=4 is not a multiple of mesh\.data x mesh\.expert.* = 8",
    ),
    (8, {"groups": 32}, r"dispatch\.groups=4 does not divide the 6 tokens of a device"),
    (8, {"capacity_factor": 0.1}, r"dispatch\.capacity_factor=0\.1 gives .* a capacity of 0"),
  ],
  ids=["groups", "tokens", "capacity"],
)
def test_what_does_not_divide_says_so(batch, dispatch, message):
  config = harness.tiny(wiring="top1", num_experts=8)
  graph, params = harness.parts(config, dispatch=DispatchConfig(**dispatch))
  step = harness.on_mesh(make_mesh(MeshConfig(2, 4, 1)), graph, params)
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(step, params, harness.tokens(batch=batch), harness.cotangent(batch=batch))
