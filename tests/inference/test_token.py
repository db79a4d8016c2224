"""Decoding one token: the fused steps equal the plain ones, and run the kernels for them."""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx

from scmoe.inference import token
from scmoe.inference.decode import decode_step, prefill
from scmoe.inference.token import TokenAttention, TokenMoE, for_one_token
from scmoe.kernels import launch
from scmoe.kernels.grouped_matmul import backend
from scmoe.kernels.one_row.attention import PartialProjections
from scmoe.kernels.one_row.norm import Normalised
from scmoe.kernels.top_k import GateOutput, PartialLogits
from scmoe.layers.attention import Attention, AttentionConfig, KeyValues
from scmoe.layers.norm import Norm
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass
from scmoe.moe.gates import LinearGate
from scmoe.moe.layer import MoE, MoECall, MoEConfig

VOCAB = 64
LLAMA = {"style": "llama", "num_kv_heads": 2}
LATENT = {
  "style": "llama", "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
CASES = {
  "topk": {"wiring": "topk", "moe_every": 1, **LLAMA},
  "pos2": {"wiring": "scmoe_pos2", "qk_norm": "head", **LLAMA},
  "pos2 gpt2": {"wiring": "scmoe_pos2", "moe_every": 1},
  "pos3 own norm": {"wiring": "scmoe_pos3", "shortcut_norm": "megatron"},
  "dgmoe_share": {"wiring": "dgmoe_share", "num_layers": 4},
  "latent": {"wiring": "shared_expert", **LATENT},
  "dense layers": {"wiring": "topk", "moe_every": 1, "num_layers": 3, "dense_layers": "1"},
  "sinks": {"wiring": "topk", "moe_every": 1, "attention_sinks": True, **LLAMA},
  "window of some layers": {
    "wiring": "topk",
    "moe_every": 1,
    "sliding_window": 3,
    "full_attention_layers": "1",
    **LLAMA,
  },
  "chunks": {"wiring": "topk", "moe_every": 1, "attention_chunk": 3, "qk_norm": "l2", **LLAMA},
  "no rotation in some layers": {
    "wiring": "topk",
    "moe_every": 1,
    "nope_layers": "1",
    "attention_temperature": 0.5,
    "attention_temperature_floor": 3,
    **LLAMA,
  },
}


def config_of(name, **fields):
  sizes = {"width": 32, "num_heads": 4, "num_layers": 2, "num_experts": 4, "top_k": 2}
  config = ModelConfig(**{**sizes, "context": 16, "dtype": "float32", **CASES[name], **fields})
  return config.resolve(vocab_size=VOCAB)


@functools.cache
def make_model(name):
  return harness.filled(config_of(name))


BY_NIGHT = ("pos2 gpt2", "pos3 own norm", "dense layers", "window of some layers")
# By day a model like Llama-4 has both of them, decoded in pretrained/test_released.py.
BY_NIGHT += ("chunks", "no rotation in some layers")


@pytest.mark.parametrize("name", [night(n) if n in BY_NIGHT else n for n in CASES])
def test_one_token_is_the_plain_pairs_bit_by_bit(name):
  model, lengths = make_model(name), jnp.asarray([5], jnp.int32)
  prompt = np.random.default_rng(0).integers(0, VOCAB, (1, 5)).astype(np.int32)
  _, caches = jax.jit(lambda t: prefill(model, t, lengths, model.init_caches(1, 8)))(prompt)
  token_B = jnp.asarray([7], jnp.int32)

  def plain():
    given = Pass(lengths[:, None], caches=caches, no_drop=True)
    out = model(token_B[:, None], given)
    return model.logits(out.h_BSD)[:, 0], out.caches

  with jax.disable_jit():  # operation by operation: XLA fuses nothing differently
    got, want = decode_step(model, token_B, lengths, caches), plain()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_model_that_is_given_stays_as_it_is():
  model = make_model("pos2")
  before = jax.tree.leaves(nnx.split(model)[1])
  copy = for_one_token(model)
  kinds = lambda of: {type(module).__name__ for _, module in nnx.iter_modules(of)}
  assert not {kind for kind in kinds(model) if kind.startswith("Token")}
  assert {"TokenAttention", "TokenBlock", "TokenMoE", "TokenNorm", "TokenUnit"} <= kinds(copy)
  after = jax.tree.leaves(nnx.split(copy)[1])
  assert all(a is b for a, b in zip(before, after, strict=True))


def test_only_a_single_row_takes_the_fused_steps(monkeypatch):
  asked = []
  real = token.for_one_token
  monkeypatch.setattr(
    "scmoe.inference.decode.for_one_token", lambda model: asked.append(1) or real(model)
  )
  model = make_model("topk")
  for rows in (1, 2):
    place = jnp.zeros((rows,), jnp.int32)
    run = lambda place=place, rows=rows: decode_step(
      model, place, place, model.init_caches(rows, 8)
    )
    jax.eval_shape(run)
    assert len(asked) == 1


# -- with kernels ---------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
  """Traces the programs of a Hopper GPU; they cannot run here."""
  for module in (launch, backend):
    monkeypatch.setattr(module, "has_kernels", lambda device: True)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def kernels_of(jaxpr, found=None):
  """Names of the jitted functions around kernels, in order, and barriers."""
  found = [] if found is None else found
  for equation in jaxpr.eqns:
    name = equation.params.get("name", "")
    if name in ("_read", "attend", "_normalised", "_sums", "_top_k") or (
      name == "forward" and "jaxpr" in equation.params
    ):
      found.append(name)
      continue
    if equation.primitive.name == "optimization_barrier":
      found.append("barrier")
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        kernels_of(inner, found)
  return found


def traced(name, rows):
  """The kernels of one step of decoding, in order."""
  sizes = {"width": 512, "num_experts": 8, "context": 256, "num_kv_heads": 0}
  config = config_of(name, dtype="bfloat16", **sizes)
  graph, params = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(params=0))))

  def run(params, token_B, position_B):
    model = nnx.merge(graph, params)
    return decode_step(model, token_B, position_B, model.init_caches(rows, 256))

  jaxpr = jax.make_jaxpr(run)(params, jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.int32))
  return kernels_of(jaxpr.jaxpr)


# A block: projections under the norm, attention and its output, the residual stream; the gate under
# the norm and its choice, the experts.
TOPK_BLOCK = ["_read", "attend", "_read", "barrier", "_sums", "_top_k", "forward", "barrier"]


def test_the_kernels_of_a_token(kernels):
  if not token.kernel.KERNELS_WRITE_IN_PLACE:
    pytest.skip("this jax has no kernel that writes the cache in place")
  # The layers are one scan here; the last norm has a kernel of its own.
  assert traced("topk", 1) == [*TOPK_BLOCK, "_normalised"]
  pos2 = traced("pos2", 1)
  # Norms of queries and keys leave the projections and the norm before them apart.
  assert pos2[:4] == ["_normalised", "_read", "attend", "_read"]
  assert "_sums" not in pos2, "the shared expert reads the normalised token as well"


@pytest.mark.parametrize("name", ["sinks", "window of some layers", "chunks"])
def test_the_kernel_of_attention_is_left_out_where_it_lacks_an_option(name, kernels):
  for rows in (1, 8):
    assert "attend" not in traced(name, rows)


def test_several_rows_run_only_the_kernel_of_attention(kernels):
  found = traced("topk", 8)
  assert found.count("attend") == 1
  assert not {"_read", "_normalised", "_sums", "_top_k"} & set(found)


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0.0, 100.0], ids=["learned", "rope"])
def test_projections_that_are_not_added_up(theta, monkeypatch):
  """Partial sums are added up and rotated where the attention's kernel does not take them."""
  width, rng = 8, np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  config = AttentionConfig(width, num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=theta)
  module, norm = Attention(config, rngs=nnx.Rngs(0)), Norm(width, "rmsnorm", 1e-5)
  x, positions = draw(1, 1, width), jnp.asarray([[3]])
  past = KeyValues(draw(1, 8, 2, 6), draw(1, 8, 2, 6))
  want, cache = module.mix(module.project(norm(x), positions), positions, None, past)

  def parts(row, matrices):
    y = jnp.concatenate([row()[0] @ w for w in matrices], 1)
    return jnp.concatenate([0.25 * y, 0.75 * y])

  monkeypatch.setattr(token, "sums", parts)
  fused: Any = module
  fused.__class__ = TokenAttention
  row = Normalised(x, token.normalisation_of(norm))
  unfinished = fused.partial_sums(row, positions)
  assert isinstance(unfinished, PartialProjections)
  got, new_cache = fused.mix(unfinished, positions, None, past)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, (got, new_cache), (want, cache))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_gate_that_reads_a_token_under_its_norm(has_kernel, monkeypatch):
  width = 4
  moe: Any = MoE(MoEConfig(width, 6, 3, 2, init_std=1.0), rngs=nnx.Rngs(0))
  moe.__class__ = TokenMoE
  norm = Norm(width, "rmsnorm", 1e-5)
  x = jnp.asarray([[[1.0, -2.0, 0.5, 3.0]]])
  row, asked = Normalised(x, token.normalisation_of(norm)), []

  def begin(row, gate_DE, *, fp32):
    asked.append(row)
    y_TD = row().reshape(1, -1)
    sums_PE = jnp.concatenate([0.25 * (y_TD @ gate_DE), 0.75 * (y_TD @ gate_DE)])
    logits_TE = sums_PE.sum(0)[None]
    choice = GateOutput(logits_TE, jax.lax.top_k(logits_TE, 2)[1].astype(jnp.int32))
    monkeypatch.setattr(PartialLogits, "top_k", lambda self, k: choice)
    return PartialLogits(y_TD, sums_PE) if has_kernel else None

  monkeypatch.setattr(token, "gate_under_norm", begin)
  want, got = moe.route(row()), moe.route(row)
  assert len(asked) == 1
  np.testing.assert_allclose(got.x_TD, want.x_TD, rtol=1e-6)
  np.testing.assert_array_equal(got.routing.expert_TK, want.routing.expert_TK)
  np.testing.assert_allclose(got.routing.weight_TK, want.routing.weight_TK, rtol=1e-5)
  # A mask or noise changes what the gate chooses from; it then reads the normalised token.
  moe.route(row, MoECall(mask=jnp.ones((1, 1), bool)))
  assert len(asked) == 1


def test_a_gate_of_ones_own_is_asked_for_its_logits(monkeypatch):
  """One that is derived from `LinearGate` may compute others than the product that is fused."""

  class Hot(LinearGate):
    """Twice the logits."""

    def __call__(self, x_TD):
      return 2 * super().__call__(x_TD)

  taken = []
  monkeypatch.setattr(token, "gate_under_norm", lambda row, weight, fp32: taken.append(weight))
  config = MoEConfig(width=8, hidden=8, num_experts=4).router
  for gate in (LinearGate, Hot):
    token._gate_under_norm(None, gate(8, 4, config, init_std=0.02, rngs=nnx.Rngs(0)))
  assert len(taken) == 1
