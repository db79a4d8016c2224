"""Every option of the library is checked when its object is made, with one line."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import json
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, check_options, option, section
from scmoe.blocks.block import ModelAblation
from scmoe.blocks.options import OverlapAblation
from scmoe.kernels.grouped_matmul import FFNConfig, FFNOptions
from scmoe.layers.attention import AttentionConfig
from scmoe.layers.embed import EmbeddingConfig
from scmoe.layers.latent_attention import LatentAttentionConfig
from scmoe.layers.mlp import FFNLayerOptions, MLPConfig
from scmoe.models.vision.stages import StageConfig
from scmoe.moe.dispatch.options import DispatchAblation
from scmoe.moe.experts import FFNExpertsConfig
from scmoe.moe.options import CompatConfig
from scmoe.run.config import RunConfig, from_dict, to_dict
from scmoe.run.fields import with_field
from scmoe.training.options import (
  CheckpointConfig,
  DistributedConfig,
  OptimizerAblation,
  OptimizerConfig,
  TrainConfig,
)

# One valid object of every class; required fields are given.
EXAMPLES = (
  RunConfig(),
  *(getattr(RunConfig(), name) for name in ("router", "dispatch", "overlap", "mesh", "data")),
  CompatConfig(),
  scmoe.ModelConfig(),
  scmoe.BlockConfig(),
  scmoe.ModelConfig().rope,
  scmoe.ModelConfig().vision,
  StageConfig(vocab_size=10),
  RunConfig().augment,
  RunConfig().multitask,
  RunConfig().lora,
  TrainConfig(),
  OptimizerConfig(),
  CheckpointConfig(),
  DistributedConfig(),
  ModelAblation(),
  OverlapAblation(),
  DispatchAblation(),
  OptimizerAblation(),
  scmoe.MoEConfig(width=8, hidden=8, num_experts=4),
  FFNExpertsConfig(width=8, hidden=8, num_experts=4),
  FFNConfig(),
  FFNOptions(),
  FFNLayerOptions(),
  MLPConfig(8, 8),
  AttentionConfig(width=8, num_heads=2, num_kv_heads=1, head_dim=4),
  LatentAttentionConfig(8, 2, 4, 4, 4, 4),
  EmbeddingConfig(8, 8),
  scmoe.Sampling(),
  scmoe.Machine(1e12, 1e12, 1e9, 1e-6),
  scmoe.Sizes(tokens=8, seq=8, width=8, mlp=8, expert=8, shared=8, head_width=8, kv_width=8,
              experts=4, k=1),
)  # fmt: skip


def declared(wanted):
  """(object, field) of every option for which `wanted(field)` holds."""
  for config in EXAMPLES:
    for field in dataclasses.fields(config):
      if "choices" in field.metadata and wanted(field):
        yield pytest.param(config, field, id=f"{type(config).__name__}.{field.name}")


def refusal(config, field, value):
  """The message with which the field refuses a value."""
  with pytest.raises(ConfigError) as caught:
    dataclasses.replace(config, **{field.name: value})
  message = str(caught.value)
  assert "\n" not in message
  assert f"{field.name}={value if isinstance(value, float) else repr(value)}" in message
  return message


def kind(field):
  return str(field.type).split("|")[0].strip()


def test_all_options_of_the_library_are_here():
  classes = [Options]
  for cls in classes:
    classes += cls.__subclasses__()
  ours = {cls for cls in classes[1:] if cls.__module__.startswith("scmoe.")}
  assert ours == {type(config) for config in EXAMPLES}


@pytest.mark.parametrize(("config", "field"), declared(lambda f: f.metadata["choices"]))
def test_a_misspelt_word_is_refused_with_all_words(config, field):
  words = [str(word) for word in field.metadata["choices"]]
  last = words[-1]
  message = refusal(config, field, last[:-1] + "x" + last[-1:])
  assert "is unknown" in message
  assert all(word in message for word in words)
  assert "nonsense" in refusal(config, field, "nonsense")


LIMITS = ("minimum", "maximum", "above")


@pytest.mark.parametrize(
  ("config", "field"), declared(lambda f: any(f.metadata[name] is not None for name in LIMITS))
)
def test_a_number_out_of_range_is_refused_with_its_bound(config, field):
  low, high, above = (field.metadata[name] for name in LIMITS)
  step = 1 if kind(field) == "int" else 0.5
  if low is not None:
    assert f"the least is {low}" in refusal(config, field, type(step)(low - step))
    dataclasses.replace(config, **{field.name: type(step)(low)})  # the bound itself will do
  if high is not None:
    assert f"the most is {high}" in refusal(config, field, type(step)(high + step))
  if above is not None:
    assert f"larger than {above}" in refusal(config, field, type(step)(above))


WRONG = {
  "bool": (1, 0.0, "true", None, [True]),
  "int": (True, 1.5, "8", None, [8], jnp.ones(2)),
  "float": (True, "0.1", None, [0.1], 1j),
  "str": (3, True, None, ["auto"], jnp.float32, b"auto"),
}


@pytest.mark.parametrize(("config", "field"), declared(lambda f: kind(f) in WRONG))
def test_a_value_of_another_type_is_refused_with_both_types(config, field):
  for value in WRONG[kind(field)]:
    if value is None and "None" in str(field.type):
      continue
    with pytest.raises(ConfigError) as caught:
      dataclasses.replace(config, **{field.name: value})
    expected = f"is of type {type(value).__name__}, not {kind(field)}"
    assert f".{field.name}=" in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "field"), declared(lambda f: kind(f) == "float"))
def test_numbers_that_are_not_finite_are_refused(config, field):
  for value in (math.nan, math.inf, -math.inf, 10**400):
    with pytest.raises(ConfigError, match=r"not a finite float|too small"):
      dataclasses.replace(config, **{field.name: value})


def test_a_group_of_options_must_be_one():
  match = r"model\.rope='yarn' is of type str, not RopeConfig; use RopeConfig\(\.\.\.\)"
  with pytest.raises(ConfigError, match=match):
    scmoe.ModelConfig(rope="yarn")
  with pytest.raises(ConfigError, match=r"MoEConfig\.router=.*not RouterConfig"):
    scmoe.MoEConfig(width=8, hidden=8, num_experts=4, router={"scoring_func": "sigmoid"})
  with pytest.raises(ConfigError, match=r"RunConfig\.model=.* is of type RouterConfig"):
    RunConfig(model=scmoe.RouterConfig())


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: scmoe.DispatchConfig("droples"),
     "dispatch.transport='droples' is unknown; did you mean 'dropless'? one of: capacity, packed, "
     "dropless, per_rank, put, or your own as my_package.module:Name"),
    (lambda: scmoe.RouterConfig(scoring_func="sigmod"),
     "router.scoring_func='sigmod' is unknown; did you mean 'sigmoid'? one of: softmax, sigmoid"),
    (lambda: scmoe.RouterConfig(balance="nonsense"),
     "router.balance='nonsense' is unknown; did you mean 'none'? one of: gshard, load_importance, "
     "megablocks, none, or your own as my_package.module:Name"),
    (lambda: scmoe.RouterConfig(gate="linaer"),
     "router.gate='linaer' is unknown; did you mean 'linear'? one of: linear, affine, cosine, or "
     "your own as my_package.module:Name"),
    (lambda: scmoe.MoEConfig(width=8, hidden=8, num_experts=4, top_k=8),
     "top_k=8 is larger than the number of experts, 4 (num_experts=4); use at most 4"),
    (lambda: scmoe.ModelConfig(width=32, num_heads=3).resolve(vocab_size=8),
     "model.width=32 is not divisible by model.num_heads=3; use a multiple, or set model.head_dim"),
    (lambda: scmoe.BlockPair(scmoe.BlockConfig(width=32, num_heads=3), rngs=nnx.Rngs(0)),
     "model.width=32 is not divisible by model.num_heads=3; use a multiple, or set model.head_dim"),
    (lambda: OptimizerConfig(beta2=1.0),
     "optimizer.beta2=1.0 is too large; the most is 0.9999990463256836"),
    (lambda: OptimizerConfig(beta1=1.0),
     "optimizer.beta1=1.0 is too large; the most is 0.9999990463256836"),
    (lambda: OptimizerConfig(name="muon", muon_beta=1.0),
     "optimizer.muon_beta=1.0 is too large; the most is 0.9999990463256836"),
    (lambda: OptimizerConfig(learning_rate=1e39),
     "optimizer.learning_rate=1e+39 is beyond float32, whose largest number is 3.4e38"),
    (lambda: scmoe.ModelConfig(init_std=1e308),
     "model.init_std=1e+308 is beyond float32, whose largest number is 3.4e38"),
    (lambda: scmoe.DispatchConfig(capacity_factor=1e30),
     "dispatch.capacity_factor=1e+30 is too large; the most is 1048576.0"),
    (lambda: scmoe.DispatchConfig(capacity_factor=-1e30),
     "dispatch.capacity_factor=-1e+30 is too small; the least is -1048576.0"),
    (lambda: scmoe.balance_loss(sums(), "gshrd"),
     "router.balance='gshrd' is unknown; did you mean 'gshard'? one of: gshard, load_importance, "
     "megablocks, none, or your own as my_package.module:Name"),
  ],
)  # fmt: skip
def test_the_library_refuses(make, message):
  with pytest.raises(ConfigError) as caught:
    make()
  assert str(caught.value) == message


def sums():
  """Router sums of a layer, from eight tokens."""
  config = scmoe.MoEConfig(width=8, hidden=8, num_experts=4)
  return scmoe.MoE(config, rngs=nnx.Rngs(0))(jnp.ones((8, 8)))[1]


def test_replace_in_several_steps_may_pass_what_does_not_fit_together():
  # A width that three heads do not divide, and more experts per token than experts, in between.
  model = dataclasses.replace(scmoe.ModelConfig(), wiring="topk", num_heads=3, top_k=12)
  model = dataclasses.replace(model, width=96)
  model = dataclasses.replace(model, num_experts=16)
  assert model.resolve(vocab_size=8).head_dim == 32
  run = with_field(with_field(RunConfig(), "router.topk_group", "2"), "router.n_group", "4")
  run.router.check()


def test_numbers_are_stored_as_the_types_of_python():
  config = scmoe.DispatchConfig(
    capacity_factor=2, chunks=np.int64(4), ablation=DispatchAblation(np.bool_(False))
  )
  assert [type(v) for v in (config.capacity_factor, config.chunks, config.ablation.silent)] == [
    float, int, bool]  # fmt: skip
  router = scmoe.RouterConfig(noise=np.float32(0.5))
  assert json.dumps(dataclasses.asdict(router))
  assert config == scmoe.DispatchConfig(capacity_factor=2.0, chunks=4)


def test_a_configuration_of_before_is_read():
  values = json.loads(json.dumps(to_dict(RunConfig())))
  assert from_dict(values) == RunConfig()
  # Stored by a version that had fewer fields, with a part of one's own.
  old = {"model": {"width": 64}, "router": {"gate": "my_parts:SharpGate"}}
  run = from_dict(old)
  assert (run.model.width, run.router.gate) == (64, "my_parts:SharpGate")


def test_an_import_path_is_a_choice_where_one_may_be_given():
  assert scmoe.DispatchConfig("my.parts:Lossless").transport == "my.parts:Lossless"
  with pytest.raises(ConfigError, match=r"scoring_func='my.parts:f' is unknown; one of"):
    scmoe.RouterConfig(scoring_func="my.parts:f")


def test_subclasses_of_users_are_checked_where_they_say_so():
  @dataclasses.dataclass(frozen=True)
  class Mine(scmoe.RouterConfig):
    z_loss: float = 1e-3  # a plain field takes anything
    extra: object = None
    rounds: int = option(1, "of mine", minimum=1)
    mesh: scmoe.MeshConfig = section(scmoe.MeshConfig, "of mine")

  assert dataclasses.replace(Mine(), extra=[1]).extra == [1]
  for wrong in ({"scoring_func": "sigmod"}, {"rounds": 0}, {"rounds": True}, {"mesh": None}):
    with pytest.raises(ConfigError, match=rf"router\.{next(iter(wrong))}="):
      Mine(**wrong)
  scmoe.MoEConfig(width=8, hidden=8, num_experts=4, router=Mine())

  @dataclasses.dataclass(frozen=True)
  class Own(Options):
    steps: int | None = option(None, "of mine", minimum=1)

  assert Own().steps is None
  with pytest.raises(ConfigError, match=r"Own\.steps=0 is too small; the least is 1"):
    Own(0)


def test_a_word_that_a_program_adds_is_a_choice(monkeypatch):
  from scmoe.blocks.wiring import WIRINGS

  monkeypatch.setitem(WIRINGS, "mine", WIRINGS["topk"])
  assert scmoe.ModelConfig(wiring="mine").wiring == "mine"
  check_options(scmoe.ModelConfig(wiring="mine"), "model")


@pytest.mark.parametrize(("config", "field"), declared(lambda f: f.metadata["help"]))
def test_the_docstring_of_a_class_says_what_each_field_means(config, field):
  text = " ".join(type(config).__doc__.split())
  words = " ".join(field.metadata["help"].split())
  start = text.index(f" {field.name}: {field.type} = {field.default!r}")
  # A word with a hyphen may stand on two lines.
  assert words.replace("- ", "-")[:20] in text[start:].replace("- ", "-")
  assert type(config).__doc__.count("Fields:") == 1


def test_the_declarations_cost_nothing_at_import():
  """`import scmoe.base.options` brings neither jax nor flax."""
  code = "import sys, scmoe.base.options; print([m for m in ('jax', 'flax') if m in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
  assert done.stdout.strip() == "[]", done.stderr
