"""A wrong argument of a public call is one line that names it, not an error of Python or jax."""

# Tests call with wrong types on purpose.

import functools

import jax.numpy as jnp
import pytest
from flax import nnx

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.inference.decode import generate
from scmoe.training.search import Search
from scmoe.training.variants import StepVariants, Variant

LAYER = scmoe.MoEConfig(width=8, hidden=16, num_experts=4, top_k=2)
BLOCK = scmoe.BlockConfig(width=8, num_heads=2, num_experts=4, mlp_hidden=8)
SMALL = scmoe.ModelConfig(width=8, num_heads=2, num_layers=2, vocab_size=8)
TOKENS, GATE, ROWS = jnp.ones((6, 8)), jnp.ones((8, 4)), jnp.ones((1, 4, 8))
IDS = jnp.zeros((1, 4), jnp.int32)
TIMES = scmoe.Times((("mlp", 1.0),), 1.0, 1.0, 1.0, 1.0)


@functools.cache
def layer():
  return scmoe.MoE(LAYER, rngs=nnx.Rngs(0))


@functools.cache
def pair():
  return scmoe.BlockPair(BLOCK, rngs=nnx.Rngs(0))


@functools.cache
def gpt():
  return scmoe.GPT(SMALL, rngs=nnx.Rngs(0))


@functools.cache
def vision():
  sizes = scmoe.VisionConfig(size=8, patch=4, classes=2)
  config = scmoe.ModelConfig(architecture="vit", vision=sizes, width=8, num_heads=2, num_layers=2)
  return scmoe.VisionModel(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: layer()(TOKENS, 3), "call=3 is of type int, not MoECall"),
    (lambda: layer()(TOKENS, scmoe.MoECall(mask="a")),
     "mask is of type str, not an array; use jnp.asarray"),
    (lambda: layer()(TOKENS, scmoe.MoECall(k="2")),
     "model.top_k='2' is of type str, not int; use a whole number"),
    (lambda: layer()(TOKENS, scmoe.MoECall(capacity_factor="2")),
     "capacity_factor='2' is no number; use one such as 2.0"),
    (lambda: layer()(TOKENS, scmoe.MoECall(gate="a")),
     "gate='a' is of type str, not int; use a whole number"),
    (lambda: scmoe.MoE(LAYER, gates=3, rngs=nnx.Rngs(0)), "gates=3 is of type int, not list"),
    (lambda: scmoe.MoE(LAYER, experts=3, rngs=nnx.Rngs(0)), "experts=3 is of type int, which can"),
    (lambda: scmoe.route([[1.0]], GATE, k=1), "the array of tokens is of type list, not an array"),
    (lambda: scmoe.route(TOKENS, [[1.0]], k=1), "the gate is of type list, not an array"),
    (lambda: scmoe.route(TOKENS, GATE, k=1.5), "model.top_k=1.5 is of type float, not int"),
    (lambda: scmoe.route(TOKENS, GATE, k=1, mask_T=3), "the mask is of type int, not an array"),
    (lambda: scmoe.make_transport(scmoe.DispatchConfig(), tokens="6", num_experts=4, k=2),
     "tokens='6' is of type str, not int"),
    (lambda: scmoe.Local().dispatch(TOKENS, 3), "routing=3 is of type int, not Routing"),
    (lambda: scmoe.Local().combine(3), "sent=3 is of type int, not Dispatched"),
    (lambda: scmoe.expert_ffn(TOKENS, (1, 2), None), "weights=(1, 2) is of type tuple, not FFNWei"),
    (lambda: scmoe.expert_ffn(TOKENS, scmoe.FFNWeights("a", "b"), None),
     "layout=None is of type N"),
    (lambda: pair()([[1.0]]), "h_BSD is of type list, not an arr"),
    (lambda: pair()(ROWS, 3), "context=3 is of type int, not Con"),
    (lambda: pair()(ROWS, scmoe.Context("a")),
     "positions_BS is of type str, not an array"),
    (lambda: scmoe.make_schedule(scmoe.WIRINGS["top2"], 2, "auto"),
     "overlap='auto' is of type str"),
    (lambda: scmoe.make_schedule(scmoe.WIRINGS["top2"], 2, chunks=0), "chunks=0 is too small; the"),
    (lambda: scmoe.unit_times(scmoe.WIRINGS["top2"], 2, {"route": 1}),
     "durations has no 'dispatch'"),
    (lambda: scmoe.describe("a"), "times='a' is of type str, not Times"),
    (lambda: scmoe.timeline(TIMES, "mpl"), "slot='mpl' is unknown"),
    (lambda: scmoe.draw("a"), "spans='a' is of type str, not Span"),
    (lambda: scmoe.ModelConfig().resolve(vocab_size="a"), "vocab_size='a' is of type str, not int"),
    (lambda: gpt()(IDS, scmoe.Pass("a")), "positions_BS is of type str, not an array"),
    (lambda: gpt()(IDS, scmoe.Pass(IDS[0])),
     "positions_BS has shape [4]; token ids [1, 4] need the"),
    (lambda: gpt()(IDS, scmoe.Pass(jnp.zeros((3, 4), jnp.int32))),
     "positions_BS has shape [3, 4]; token ids [1, 4] need the"),
    (lambda: gpt()(IDS[0, 0], scmoe.Pass(IDS)), "the model reads token ids [batch, sequence]"),
    (lambda: gpt().logits(3), "h_BSD is of type int, not an array"),
    (lambda: vision()(3), "images_BSSC is of type int, not an array"),
    (lambda: vision()(jnp.zeros((1, 8, 8, 3)), 3), "given=3 is of type int, not Pass"),
    (lambda: vision().logits(3), "h_BSD is of type int, not an array"),
    (lambda: generate(gpt(), [[1]], max_new_tokens=1, seed="a"),
     "seed='a' is of type str, not int"),
    (lambda: generate(gpt(), [[1]], max_new_tokens=1, mesh="a"),
     "mesh='a' is of type str, not Mesh"),
    (lambda: generate(gpt(), [[1]], max_new_tokens=1, eos_id="a"),
     "eos_id='a' is of type str, not"),
    (lambda: scmoe.Server(gpt(), eos_id=[1.5]), "eos_id=1.5 is of type float, not int"),
    (lambda: scmoe.Server(gpt(), mesh=3), "mesh=3 is of type int, not Mesh"),
    (lambda: scmoe.Server(gpt(), pages=-3), "pages=-3 is too small; the least is 0"),
    (lambda: scmoe.Server(gpt(), cache_bytes="1GiB"), "cache_bytes='1GiB' is of type str, not int"),
    (lambda: scmoe.Server(gpt(), decode=3), "decode=3 is of type int, which cannot be called"),
    (lambda: scmoe.offloaded(gpt(), 3), "mesh=3 is of type int, not Mesh"),
    (lambda: scmoe.make_mesh(devices=3), "devices=3 is of type int, not list; use [...]"),
    (lambda: scmoe.make_mesh(devices=["a"]), "devices='a' is of type str, not Device"),
    (lambda: scmoe.make_mesh(devices=[]), "devices=[] is empty; give at least one"),
    (lambda: scmoe.make_mesh(num_experts="8"), "num_experts='8' is of type str, not int"),
    (lambda: scmoe.manual(3, None, None, None),
     "function=3 is of type int, which cannot be called"),
    (lambda: scmoe.manual(len, "a", None, None), "mesh='a' is of type str, not Mesh"),
    (lambda: scmoe.parameter_specs({"a": 3}), "state=3 is of type int, not Variable"),
    (lambda: Search("a", (Variant(),)), "steps='a' is of type str, not StepVariants"),
    (lambda: Search(StepVariants(len), ()), "candidates is empty; give at least Variant()"),
    (lambda: Search(StepVariants(len), ["chunks=2"]),
     "candidates='chunks=2' is of type str, not V"),
    (lambda: Search(StepVariants(len), (Variant(),), rounds=0), "rounds=0 is too small; the least"),
    (lambda: Variant(chunks="2"), "chunks='2' is of type str, not int"),
  ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(make, words):
  with pytest.raises(ConfigError) as caught:
    make()
  assert words in str(caught.value)
  assert "\n" not in str(caught.value)
