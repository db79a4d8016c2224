"""A wrong argument of a public call is one line that names it, not an error of Python or jax."""

# Tests call with wrong types on purpose.

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.inference.decode import generate
from scmoe.moe.dispatch import queue_positions
from scmoe.offload.experts import Migration
from scmoe.training.options import TrainConfig
from scmoe.training.search import Search
from scmoe.training.variants import StepVariants, Variant

LAYER = scmoe.MoEConfig(width=8, hidden=16, num_experts=4, top_k=2)
BLOCK = scmoe.BlockConfig(width=8, num_heads=2, num_experts=4, mlp_hidden=8)
SMALL = scmoe.ModelConfig(width=8, num_heads=2, num_layers=2, vocab_size=8)
TOKENS, GATE, ROWS = jnp.ones((6, 8)), jnp.ones((8, 4)), jnp.ones((1, 4, 8))
IDS = jnp.zeros((1, 4), jnp.int32)
SIZES = scmoe.Sizes(tokens=8, seq=8, width=8, mlp=8, expert=8, shared=8, head_width=8, kv_width=8,
                    experts=4, k=1)  # fmt: skip
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


def away(**given):
  return scmoe.offloaded(gpt(), scmoe.make_mesh(devices=jax.devices()[:1]), **given)


@functools.cache
def vision():
  sizes = scmoe.VisionConfig(size=8, patch=4, classes=2)
  config = scmoe.ModelConfig(architecture="vit", vision=sizes, width=8, num_heads=2, num_layers=2)
  return scmoe.VisionModel(config, rngs=nnx.Rngs(0))


def called(**given):
  """A layer's call with these arguments."""
  return layer()(TOKENS, scmoe.MoECall(**given))


def transported(**given):
  given = {"tokens": 6, "num_experts": 4, "k": 1, **given}
  return scmoe.make_transport(scmoe.DispatchConfig(), **given)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    # These ran before and gave something else than was asked for.
    (lambda: layer()(jnp.ones((6, 8), jnp.int32)),
     "floating point, got int32"),
    (lambda: scmoe.route(TOKENS, GATE, k=0), "top_k=0 is too small; the least is 1"),
    (lambda: called(mask=jnp.ones(6, jnp.int32)), "type int32; 6 tokens need [6] and bool"),
    (lambda: transported(order="prio"), "order='prio' is unknown"),
    (lambda: queue_positions(jnp.zeros((2, 1), jnp.int32), 2, order="prio"), "'prio' is unknown"),
    (lambda: scmoe.make_schedule(scmoe.WIRINGS["top2"], 0), "blocks=0 is too small"),
    # These ended in an error of JAX or Python that named no argument.
    (lambda: called(k=0), "top_k=0 is too small; the least is 1"),
    (lambda: called(mask=jnp.ones(5, bool)), "shape [5] and type bool; 6 tokens need [6]"),
    (lambda: called(bias_E=jnp.ones(3)), "bias has shape [3], the router chooses from 4 experts"),
    (lambda: called(capacity_factor=math.nan), "capacity_factor=nan is not finite"),
    (lambda: transported(tokens=-1), "tokens=-1 is too small; the least is 0"),
    (lambda: scmoe.route(TOKENS, GATE.T, k=1), "shape [4, 8], tokens of width 8 need [8, experts]"),
    (lambda: scmoe.route(TOKENS[None], GATE, k=1), "tokens [tokens, width], got shape [1, 6, 8]"),
    (lambda: scmoe.route(TOKENS, GATE, {"noise": 1}, k=1), "is of type dict, not RouterConfig"),
    (lambda: scmoe.MoE(LAYER, rngs=0), "rngs=0 is of type int, not Rngs"),
    (lambda: scmoe.MoE(None, rngs=nnx.Rngs(0)), "config=None is of type NoneType, not MoEConfig"),
    (lambda: scmoe.MoE(scmoe.ModelConfig(), rngs=nnx.Rngs(0)), "ModelConfig, not MoEConfig"),
    (lambda: scmoe.MoE(LAYER, gates=[], rngs=nnx.Rngs(0)), "gates=[] is empty"),
    (lambda: layer()([[1.0] * 8]), "floating point, got list"),
    (lambda: scmoe.make_mesh((2, 2)), "config=(2, 2) is of type tuple, not MeshConfig"),
    (lambda: scmoe.model_times(SIZES, "h200-slow"), "machine='h200-slow' is of type str"),
    (lambda: scmoe.make_schedule("scmoe_pos2", 2), "wiring='scmoe_pos2' is of type str"),
    (lambda: gpt()(jnp.ones((1, 4))), "token ids of an integer type, got float32"),
    (lambda: gpt()([[1, 2]]), "reads an array of token ids, got list; use jnp.asarray(tokens)"),
    (lambda: gpt()(jnp.zeros((1, 0), jnp.int32)), "at least one row of one token, got [1, 0]"),
    (lambda: gpt()(np.zeros((0, 4), np.int32)), "at least one row of one token, got [0, 4]"),
    (lambda: gpt()(jnp.ones((1, 4), jnp.int32), 3), "given=3 is of type int, not Pass"),
    (lambda: scmoe.GPT(None, rngs=nnx.Rngs(0)), "config=None is of type NoneType, not ModelConfig"),
    (lambda: scmoe.GPT(SMALL, rngs=0), "rngs=0 is of type int, not Rngs"),
    (lambda: scmoe.GPT(SMALL, router="sign", rngs=nnx.Rngs(0)), "router='sign' is of type str"),
    (lambda: scmoe.BlockPair(None, rngs=nnx.Rngs(0)), "is of type NoneType, not BlockConfig"),
    (lambda: scmoe.GPT(dataclasses.replace(SMALL, architecture="vit"), rngs=nnx.Rngs(0)),
     "model.architecture='vit' reads images, got GPT; use VisionModel"),
    (lambda: scmoe.VisionModel(SMALL, rngs=nnx.Rngs(0)),
     "model.architecture='gpt' reads text, got VisionModel; use GPT"),
    (lambda: scmoe.MoEConfig(width=8, hidden=8, num_experts=4,
                             router=scmoe.RouterConfig(n_group=2, topk_group=3)),
     "router.topk_group=3 is larger than router.n_group=2"),
    (lambda: TrainConfig(trackers="wandb,trakio"),
     "train.trackers='trakio' is unknown; did you mean 'trackio'?"),
    (lambda: TrainConfig(tune="chunsk=1,2"), "did you mean 'chunks'?"),
    (lambda: TrainConfig(tune="chunks=²"), "takes a whole number from 0 on, got '²'"),
    (lambda: scmoe.Offload("blocking"), "prefill='blocking' is of type str, not Migration"),
    (lambda: scmoe.Offload(Migration("ring")),
     "offload=ring,none: prefill and decode need the experts in the same memory"),
    (lambda: scmoe.Offload(decode=Migration()), "offload=none,early: prefill and decode need the"),
    (lambda: scmoe.Offload(cache_size=-1), "cache_size=-1 must be at least 0"),
    (lambda: scmoe.Offload(cache_size=2), "cache_size=2 has no effect with offload=none: all exp"),
    (lambda: scmoe.Offload.named("blocking", "blocking", policy="lfru"), "'lfru' is unknown"),
    (lambda: Migration("blocing"), "offload='blocing' is unknown; did you mean 'blocking'?"),
    (lambda: scmoe.Server(None), "model=None is of type NoneType, not GPT"),
    (lambda: scmoe.make_schedule(scmoe.WIRINGS["top2"], "2"), "blocks='2' is of type str, not int"),
    (lambda: scmoe.balance_loss(None, "gshard"), "sums=None is of type NoneType, not RouterSums"),
    (lambda: scmoe.statistics({}), "sums={} is of type dict, not RouterSums"),
    (lambda: generate(None, [[1]], max_new_tokens=1), "model=None is of type NoneType, not GPT"),
    (lambda: generate(gpt(), [[1]], "greedy", max_new_tokens=1), "is of type str, not Sampling"),
    (lambda: generate(gpt(), [[1]], max_new_tokens=1.5), "max_new_tokens=1.5 is of type float"),
    (lambda: scmoe.Server(gpt(), slots="4"), "slots='4' is of type str, not int"),
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
    (lambda: away(int8="no"), "int8='no' is of type str, not bool"),
    (lambda: away(pinned=1.5), "pinned=1.5 is of type float, not int"),
    (lambda: away(pinned=0), "pinned=0 leaves experts in their files"),
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
    (lambda: generate(gpt(), [[1]], max_new_tokens=1, eos_id=np.asarray(2)), "eos_id=array(2) is"),
    (lambda: Search(StepVariants(len), (Variant(),), rounds=0), "rounds=0 is too small; the least"),
    (lambda: Variant(chunks="2"), "chunks='2' is of type str, not int"),
    (lambda: Variant(capacity_factor="2"), "capacity_factor='2' must be a number"),
  ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(make, words):
  with pytest.raises(ConfigError) as caught:
    make()
  assert words in str(caught.value)
  assert "\n" not in str(caught.value)
