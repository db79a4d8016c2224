"""One word changes the wiring and nothing else; what cannot be says what would do."""

import dataclasses
import functools
import math

import harness
import jax
import numpy as np
import pytest
from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_options
from scmoe.blocks.block import ModelAblation
from scmoe.blocks.wiring import WIRINGS
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig

D, F, E, V, S, L = 16, 24, 4, harness.VOCAB, harness.LENGTH, 4


def parameters(wiring, **fields):
  config = harness.tiny(wiring=wiring, num_layers=L, **fields)
  state = nnx.eval_shape(lambda: nnx.split(GPT(config, rngs=nnx.Rngs(0)))[1])
  return {
    ".".join(str(k.key) for k in path): leaf.shape
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
  }


def count(shapes):
  return sum(math.prod(shape) for shape in shapes.values())


# How many of each part a GPT-2 model of two pairs has: MLPs, shared experts, MoEs, mixes.
PARTS = {
  "dense": (4, 0, 0, 0),
  "top1": (2, 0, 2, 0),
  "top2": (2, 0, 2, 0),
  "topk": (2, 0, 2, 0),
  "shared_expert": (2, 2, 2, 2),
  "scmoe_pos1": (2, 2, 2, 2),
  "scmoe_pos2": (2, 2, 2, 2),
  "scmoe_pos3": (2, 2, 2, 2),
  "scmoe_pos2_l0": (2, 2, 2, 2),
  "scmoe2": (2, 2, 2, 2),
  "farskip": (2, 2, 2, 2),
  "farskip_routed": (2, 0, 2, 0),
  "dgmoe": (2, 0, 2, 0),
  "dgmoe_repeat": (2, 0, 2, 0),
  "dgmoe_share": (2, 0, 1, 0),
}


def test_every_wiring_is_in_the_table():
  assert PARTS.keys() == WIRINGS.keys()


@pytest.mark.parametrize("wiring", PARTS)
def test_parameters_side_by_side(wiring):
  mlps, shared, moes, mixes = PARTS[wiring]
  mlp = D * F + F + F * D + D
  attention = 4 * D * D + 3 * D  # no bias on keys
  skeleton = V * D + S * D + L * (attention + 4 * D) + 2 * D
  expected = skeleton + (mlps + shared) * mlp + moes * (E * mlp + D * E) + mixes * D
  assert count(parameters(wiring)) == expected


@pytest.mark.parametrize("wiring", [w for w in WIRINGS if w not in ("dense", "dgmoe_share")])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_the_word_changes_no_shape(wiring, style):
  base, other = parameters("scmoe_pos2", style=style), parameters(wiring, style=style)
  shared = base.keys() & other.keys()
  assert {name: base[name] for name in shared} == {name: other[name] for name in shared}
  only = (base.keys() - other.keys()) | (other.keys() - base.keys())
  # All that may be missing: the shared expert and its mix.
  assert all(".blocks.1.mlp." in name or ".mix." in name for name in only), only
  if WIRINGS[wiring].shared_expert:
    assert not only


@pytest.mark.parametrize(
  ("norm", "extra"), [("shared", 0), ("own", 2 * 2 * D), ("megatron", 2 * 4 * D)]
)
def test_shortcut_norms_are_the_only_difference(norm, extra):
  base = count(parameters("scmoe_pos2", shortcut_norm="shared"))
  assert count(parameters("scmoe_pos2", shortcut_norm=norm)) - base == extra
  # A wiring without a shortcut has no use for them.
  assert parameters("top2", shortcut_norm=norm) == parameters("top2")


def test_any_wiring_can_have_the_norm_on_shared_and_routed():
  after = ModelAblation(norm_after=True)
  both = parameters("scmoe_pos2", shortcut_norm="own", ablation=after)
  assert both == parameters("scmoe_pos2", shortcut_norm="megatron")
  more = count(parameters("top2", ablation=after)) - count(parameters("top2"))
  assert more == 2 * 2 * D  # gain and bias in each of two pairs
  assert parameters("dense", ablation=after) == parameters("dense")


def test_equal_seeds_give_equal_models_to_the_shortcut_wirings():
  def state(wiring):
    config = harness.tiny(wiring=wiring, num_layers=2)
    return jax.jit(lambda: nnx.split(GPT(config, rngs=nnx.Rngs(7)))[1])()

  states = [harness.named(state(wiring)) for wiring in ("shared_expert", "scmoe_pos2")]
  assert states[0].keys() == states[1].keys()
  for name, value in states[0].items():
    np.testing.assert_array_equal(value, states[1][name], err_msg=name)


ERRORS = {
  "wiring": ({"wiring": "scmoe_pos4"}, r"model\.wiring='scmoe_pos4' is unknown; did you mean"),
  "style": ({"style": "gpt"}, r"model\.style='gpt' is unknown; did you mean 'gpt2'\? one of: gpt2"),
  "mix": ({"mix": "cg3"}, r"model\.mix='cg3' is unknown; did you mean"),
  "activation": ({"activation": "tanh"}, r"model\.ffn\.activation='tanh' is unknown"),
  "dtype": ({"dtype": "float8"}, r"model\.dtype='float8' is unknown"),
  "norm": ({"shortcut_norm": "none"}, r"model\.shortcut_norm='none' is unknown"),
  "experts": ({"num_experts": -3}, r"model\.num_experts=-3 is too small; the least is 1"),
  "farskip norm": (
    {"wiring": "farskip", "shortcut_norm": "megatron"},
    r"model\.shortcut_norm='megatron' normalises shared \+ routed, got model\.wiring='farskip'",
  ),
  "norm after a skip": (
    {"wiring": "farskip_routed", "ablation": ModelAblation(norm_after=True)},
    r"model\.ablation\.norm_after=True normalises shared \+ routed, got model\.wiring='farskip_r",
  ),
  "farskip_routed norm": (
    {"wiring": "farskip_routed", "shortcut_norm": "own"},
    r"model\.shortcut_norm='own' does not go with model\.wiring='farskip_routed', whose",
  ),
  "top_k": ({"top_k": 5}, r"model\.top_k=5 needs 5 experts, model\.num_experts=4; raise"),
  "top2": ({"wiring": "top2", "num_experts": 1}, r"model\.wiring='top2' needs 2 experts"),
  "dgmoe": ({"wiring": "dgmoe", "num_experts": 1}, r"model\.wiring='dgmoe' needs 2 experts"),
  "layers": ({"num_layers": 3}, r"num_layers=3 is not a multiple of model\.moe_every=2; use a"),
  "share": (
    {"wiring": "dgmoe_share", "num_layers": 2},
    r"num_layers=2 is not a multiple of model\.moe_every=2 x 2 \(dgmoe_share shares\)",
  ),
  "heads": ({"num_kv_heads": 3}, r"num_heads=2 is not a multiple of model\.num_kv_heads=3"),
  "head_dim": ({"style": "llama", "head_dim": 3}, r"model\.head_dim=3 .* even for rotary"),
  "vocab": ({"vocab_size": 0}, r"model\.vocab_size=0 needs the size of a tokenizer"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_models_that_cannot_be(name):
  fields, message = ERRORS[name]
  with pytest.raises(ConfigError, match=message):
    harness.tiny(**fields)


def test_what_does_not_divide_over_the_mesh():
  config = harness.tiny(wiring="scmoe_pos2", num_experts=6)
  with pytest.raises(ConfigError, match=r"model\.num_experts=6 is not divisible by mesh\.expert=4"):
    config.check_mesh(expert=4, tensor=1)
  with pytest.raises(ConfigError, match=r"model\.vocab_size=11 is not divisible by mesh\.tensor=2"):
    config.check_mesh(expert=1, tensor=2)
  with pytest.raises(ConfigError, match=r"model\.num_heads=2 is not divisible by mesh\.tensor=4"):
    config.check_mesh(expert=1, tensor=4)


def test_the_vocabulary_is_rounded_up():
  assert ModelConfig().resolve(vocab_size=257).vocab_size == 320
  assert ModelConfig().resolve(vocab_size=256).vocab_size == 256


def test_every_option_has_a_meaning():
  for cls in (ModelConfig, RouterConfig):
    assert all(f.metadata["help"] for f in dataclasses.fields(cls))
    check_options(cls(), "x")


@functools.cache
def run_with(impl):
  config = harness.tiny(wiring="scmoe_pos2", ffn=FFNOptions(impl=impl))
  graph, params = harness.parts(config, dispatch=DispatchConfig(capacity_factor=1.0))
  return harness.run(graph, params)


@pytest.mark.parametrize("impl", ["grouped", "block_sparse"])
def test_what_computes_the_experts_changes_nothing(impl):
  """`model.ffn.impl` (MegaBlocks mlp_impl): values and every gradient, with drops."""
  harness.assert_same(run_with(impl), run_with("auto"))
  assert run_with("auto").aux["sums"].dropped.sum() > 0


def test_unknown_implementation():
  with pytest.raises(ConfigError, match=r"model\.ffn\.impl='sparse' is unknown; did you mean"):
    harness.tiny(ffn=FFNOptions(impl="sparse"))


def test_parts_of_a_configuration_that_is_not_resolved_are_those_of_the_resolved_one():
  config = ModelConfig(style="llama", width=32)
  whole = config.resolve(vocab_size=64)
  given = RouterConfig(), DispatchConfig()
  assert config.moe(*given) == whole.moe(*given)
  assert config.moe(*given).hidden == 128
  assert config.attention == whole.attention
  assert config.mlp(8) == whole.mlp(8)


LISTS = {"dense_layers": "0-1", "full_attention_layers": "1,6", "nope_layers": "7"}


@pytest.mark.parametrize(("layers", "dense", "full", "straight"), [
  (8, "0-1", "1,6", "7"),
  (7, "0-1", "1,6", ""),
  (4, "0-1", "1", ""),
  (2, "0", "1", ""),
  (1, "", "", ""),
])  # fmt: skip
def test_fewer_layers_keep_their_own_numbers_and_one_moe(layers, dense, full, straight):
  options = {"style": "llama", "wiring": "topk", "sliding_window": 4, "attention_temperature": 0.1}
  model = ModelConfig(num_layers=8, vocab_size=8, moe_every=1, **options, **LISTS)
  found = model.with_layers(layers).resolve()
  assert found.num_layers == layers
  assert [getattr(found, name) for name in LISTS] == [dense, full, straight]
  assert found.attention_temperature == (0.1 if straight else 0.0)
