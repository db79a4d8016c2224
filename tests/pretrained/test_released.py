"""Released models in and out: recorded logits, bits after a round trip, and every way to fail."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from covering import night
from released import PREFILL, check_case, there_and_back
from safetensors.numpy import load_file, save_file

from scmoe.base.errors import ConfigError, DataError, ScmoeError, StorageError
from scmoe.models.config import ModelConfig
from scmoe.moe.losses import balance_loss
from scmoe.moe.types import RouterSums
from scmoe.pretrained import folder as files
from scmoe.pretrained import imported
from scmoe.pretrained.families import read_config, write_config
from scmoe.pretrained.folder import INDEX, WEIGHTS, Folder
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.names import tensors
from scmoe.pretrained.released import open_released
from scmoe.run.config import RunConfig
from scmoe.run.exported import export_model
from scmoe.training.workdir import identity

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released"
CASES = sorted(path.name for path in GOLDEN.iterdir())


# Those that have least in common. By day OLMoE's files also come in in test_peft.py and
# test_upcycle.py; LongCat has DeepSeek's attention, and its zero experts leave in test_own.py.
BY_DAY = ("deepseek_v3_a", "gpt_oss_a", "llama4_text_a")


@pytest.mark.parametrize("name", [name if name in BY_DAY else night(name) for name in CASES])
def test_recorded_logits_and_hidden_states(name):
  """On eight devices; all meshes: python -m tests.conformance ../shared/conformance."""
  outcome = check_case(GOLDEN / name, ["data=2,expert=4"], round_trip=False)
  assert not outcome.failures, str(outcome)
  assert {"data=2,expert=4 logits", "data=2,expert=4 decode"} <= set(outcome.errors)
  assert PREFILL < 12


BITWISE = ("deepseek_v3_a", "glm4_moe_a", "gpt_oss_a", "granitemoe_a", "llama4_text_a",
           "longcat_flash_a")  # fmt: skip


@pytest.mark.parametrize("name", [BITWISE[0], *map(night, BITWISE[1:])])
def test_out_and_in_again_is_bitwise(name):
  assert there_and_back(GOLDEN / name) == []


def copy_of(tmp_path, name="olmoe_a"):
  return Path(shutil.copytree(GOLDEN / name, tmp_path / "model", copy_function=shutil.copyfile))


def change(folder, **fields):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_bfloat16_in_several_files_stays_as_it_is(tmp_path, monkeypatch):
  folder = copy_of(tmp_path, "deepseek_v3_a")
  weights = load_file(folder / WEIGHTS)
  narrow = {n: a if "bias" in n else a.astype(ml_dtypes.bfloat16) for n, a in weights.items()}
  (folder / WEIGHTS).unlink()
  names = sorted(narrow)
  index = {}
  for i, part in enumerate((names[:60], names[60:])):
    file = f"model-{i + 1:05d}-of-00002.safetensors"
    save_file({n: narrow[n] for n in part}, folder / file)
    index |= dict.fromkeys(part, file)
  (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
  change(folder, dtype="bfloat16")
  monkeypatch.setattr(files, "SHARD_BYTES", 100_000)
  assert there_and_back(folder) == []


def test_the_index_decides_which_tensors_count(tmp_path):
  """Tensors that the index does not name, or names in another file, are not read."""
  folder = copy_of(tmp_path)
  weights = load_file(folder / WEIGHTS)
  (folder / WEIGHTS).unlink()
  names = sorted(weights)
  first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
  elsewhere = {names[-1]: np.zeros_like(weights[names[-1]])}  # the index names the second file
  unnamed = {"model.leftover": np.ones(3, np.float32)}
  save_file({n: weights[n] for n in names[:9]} | elsewhere | unnamed, folder / first)
  save_file({n: weights[n] for n in names[9:]}, folder / second)
  index = dict.fromkeys(names[:9], first) | dict.fromkeys(names[9:], second)
  (folder / INDEX).write_text(json.dumps({"weight_map": index}))
  found = Folder(folder)
  assert set(found.entries) == set(weights)
  assert found.size == sum(a.nbytes for a in weights.values())
  for name, want in weights.items():
    np.testing.assert_array_equal(found.read(name), want, name)
  import_model(str(folder), tmp_path / "run")


def balance_of_transformers(logits_LTE, k):
  """Its load_balancing_loss_func in numpy: all layers' tokens in one."""
  layers, tokens, experts = logits_LTE.shape
  pooled = logits_LTE.reshape(layers * tokens, experts)
  probs = np.exp(pooled - pooled.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  chosen = np.eye(experts)[np.argsort(-probs, -1)[:, :k]]
  return experts * (chosen.mean(0) * probs.mean(0)[None]).sum()


def balance_of_ours(logits_LTE, k):
  """K times MegaBlocks' loss, of these router logits."""
  layers, tokens, experts = logits_LTE.shape
  probs = np.exp(logits_LTE - logits_LTE.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  load = np.eye(experts)[np.argsort(-probs, -1)[..., :k]].sum((1, 2))
  zero = jnp.zeros(layers)
  fields = [f.name for f in dataclasses.fields(RouterSums) if f.name != "zero_experts"]
  values = {n: jnp.zeros((layers, experts)) if n.endswith("_E") else zero for n in fields}
  values |= {"tokens": zero + tokens, "choices": zero + tokens * k}
  values |= {"load_E": jnp.asarray(load), "probs_E": jnp.asarray(probs.sum(1))}
  return k * float(balance_loss(RouterSums(**values), "megablocks"))


def test_the_balancing_loss_is_that_of_transformers_for_one_layer_only():
  """Pooled over layers, opposite imbalances cancel (`Fields.balance`)."""
  draw = np.random.default_rng(0)
  one = draw.normal(size=(1, 64, 8)) + 2 * draw.normal(size=(1, 1, 8))
  assert balance_of_ours(one, 2) == pytest.approx(balance_of_transformers(one, 2), rel=1e-5)
  opposite = np.zeros((2, 4, 2))
  opposite[0, :, 0] = opposite[1, :, 1] = 50
  assert balance_of_transformers(opposite, 1) == pytest.approx(1)
  assert balance_of_ours(opposite, 1) == pytest.approx(2)


def test_a_mesh_holds_its_shares_in_the_files_types(tmp_path):
  folder = copy_of(tmp_path)
  weights = load_file(folder / WEIGHTS)
  save_file({n: a.astype(ml_dtypes.bfloat16) for n, a in weights.items()}, folder / WEIGHTS)
  released = open_released(str(folder), mesh="data=2,expert=2,tensor=2")
  up = dict(released.leaves())["params.stages.moe.experts.up"]
  assert up.dtype == jnp.bfloat16
  assert up.sharding.shard_shape(up.shape) == (2, 4, 64, 16)
  want = weights["model.layers.1.mlp.experts.5.up_proj.weight"].T.astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(up[1, 5]), want)


# -- errors: one line with the name, and nothing written ------------------------------------------


def truncate(folder):
  path = folder / WEIGHTS
  path.write_bytes(path.read_bytes()[:-100])


def with_tensors(edit):
  def apply(folder):
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS)

  return apply


NORM = "model.layers.1.input_layernorm.weight"


def with_index(change_map):
  def apply(folder):
    index = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    change_map(index)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))

  return apply


def with_tokenizer(folder):
  pieces = {f"t{i}": i for i in range(200)}
  tokenizer = {"version": "1.0", "added_tokens": [], "model": {
    "type": "WordLevel", "vocab": pieces, "unk_token": "t0"}}  # fmt: skip
  (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


LLAMA4 = {"model_type": "llama4_text", "attention_chunk_size": None}
GLM = {"n_routed_experts": 8, "moe_intermediate_size": 16, "head_dim": 16}
FAILURES = {
  "truncated": (truncate, rf"{WEIGHTS} is damaged or incomplete"),
  "no header": (lambda f: (f / WEIGHTS).write_bytes(b"\0" * 4), rf"{WEIGHTS} is damaged"),
  "missing file": (lambda f: (f / WEIGHTS).unlink(), rf"has no {WEIGHTS}"),
  "missing config": (lambda f: (f / "config.json").unlink(), r"config.json is missing"),
  "broken config": (lambda f: (f / "config.json").write_text("{"), r"config.json cannot be used"),
  "unknown family": (lambda f: change(f, model_type="gpt_neo"), r"model_type='gpt_neo'.*olmoe"),
  "mixture of attention": (
    lambda f: change(f, model_type="jetmoe"), r"model_type='jetmoe' cannot be read, since its at"),
  "missing tensor": (with_tensors(lambda w: w.pop(NORM)), rf"tensor {NORM} is missing"),
  "unknown tensor": (
    with_tensors(lambda w: w.update({"model.extra": w[NORM]})), r"tensor model.extra is not part"),
  "misshapen": (
    with_tensors(lambda w: w.update({NORM: w[NORM][:-1]})), rf"{NORM} has shape \[63\]"),
  "wrong type": (
    with_tensors(lambda w: w.update({NORM: w[NORM].astype(np.int8)})), rf"{NORM} is of type I8"),
  "file of the index": (
    with_index(lambda m: m.update({NORM: "model-00002.safetensors"})),
    r"names model-00002.safetensors for .*no such file"),
  "file outside": (with_index(lambda m: m.update({NORM: "../x"})), r"'../x', which is not the n"),
  "not in its file": (
    with_index(lambda m: m.update({"model.extra": WEIGHTS})),
    r"model.extra is in .* does not have"),
  "vocabulary": (with_tokenizer, r"tokenizer.json has 200 tokens and config.json vocab_size=128"),
  "rope": (
    lambda f: change(f, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
    r"rope_type='longrope', which is not supported"),
  "activation": (lambda f: change(f, hidden_act="gelu"), r"hidden_act='gelu' is not supported"),
  "quantised": (
    lambda f: change(f, quantization_config={"quant_method": "awq"}),
    r"quantization_config has quant_method='awq', which is not supported; known: mxfp4, "),
  "dynamic": (
    lambda f: change(f, rope_scaling={
      "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}),
    r"rope_type='dynamic' with original_max_position_embeddings other than max_position_embeddin"),
  "rope of layer types": (
    lambda f: change(f, rope_parameters={"full_attention": {"rope_type": "default"}}),
    r"rope_scaling has 'full_attention', which is not supported"),
  "no scores": (
    lambda f: change(f, model_type="granitemoe", attention_multiplier=0),
    r"attention_multiplier=0 leaves nothing to compute; give a number other than 0"),
  "nothing of a head turns": (
    lambda f: change(f, model_type="glm4_moe", **GLM, rope_parameters={
      "rope_type": "default", "partial_rotary_factor": 0.05}),
    r"model.rope.share=0.05 of model.head_dim=16 turns no pair; use at least 0.125"),
  "only dense layers": (
    lambda f: change(f, model_type="glm4_moe", **GLM, first_k_dense_replace=2),
    r"first_k_dense_replace=2 leaves no experts in num_hidden_layers=2"),
  "part of a head turns": (
    lambda f: change(f, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
    r"partial_rotary_factor=0.5 is not supported"),
  "layers of other kinds": (
    lambda f: change(f, layer_types=["full_attention", "sliding_attention"]),
    r"layer_types has 'sliding_attention', which is not supported"),
  "no chunk": (
    lambda f: change(f, **LLAMA4, layer_types=["chunked_attention"] * 2),
    r"layer_types has 'chunked_attention' with attention_chunk_size=null; give a size"),
  "too few turning layers": (
    lambda f: change(f, **LLAMA4, no_rope_layers=[1]),
    r"no_rope_layers has 1 entries; num_hidden_layers=2"),
  "layers that half turn": (
    lambda f: change(f, **LLAMA4, no_rope_layers=[1, 2]),
    r"no_rope_layers=\[1, 2\] is not a list of 0 and 1"),
  "no experts": (
    lambda f: change(f, **LLAMA4, moe_layers=[]),
    r"interleave_moe_layer_step=1 and moe_layers=\[\] leave no experts"),
  "experts of no layer": (
    lambda f: change(f, **LLAMA4, moe_layers=[0, 7]),
    r"layers \[0, 7\] with experts do not fit num_hidden_layers=2"),
  "no text": (lambda f: change(f, model_type="llama4"), r"text_config='None' is not a group of f"),
  "bounds of yarn that change places": (
    lambda f: change(f, rope_scaling={"rope_type": "yarn", "factor": 2, "beta_fast": 1,
                                      "beta_slow": 32, "original_max_position_embeddings": 64}),
    r"model.rope.beta_slow=32.0 must be larger than 0, and smaller than model.rope.beta_fast=1.0"),
  "a bound of yarn that is 0": (
    lambda f: change(f, rope_scaling={"rope_type": "yarn", "factor": 2, "beta_slow": 0,
                                      "original_max_position_embeddings": 64}),
    r"model.rope.beta_slow=0.0 must be larger than 0"),
  "yarn without turns": (
    lambda f: change(f, rope_theta=1, rope_scaling={
      "rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64}),
    r"model.rope_theta=1.0 does not go with model.rope.scaling='yarn'"),
  "an end that is a text": (
    lambda f: change(f, eos_token_id="2"), r"eos_token_id=2 is neither a token id nor a list"),
  "NaN": (
    with_tensors(lambda w: w["lm_head.weight"].fill(np.nan)),
    r"model.safetensors: tensor lm_head.weight holds NaN or infinity; give a folder whose weights"),
  "a limit": (
    lambda f: change(f, model_type="gpt_oss", swiglu_limit=3.0), r"swiglu_limit=3.0 is not suppor"),
  "too few kinds": (
    lambda f: change(f, model_type="gpt_oss", layer_types=["full_attention"]),
    r"layer_types has 1 words; num_hidden_layers=2"),
  "a window": (lambda f: change(f, sliding_window=4), r"sliding_window=4 is not supported"),
  "config without end": (
    lambda f: (f / "config.json").write_text('{"a":' + "[" * 10**6), r"config.json cannot be used"),
  "no size": (lambda f: change(f, hidden_size=None), r"hidden_size=None is not a size"),
  "heads": (lambda f: change(f, num_key_value_heads=3), r"model.num_heads=4 is not a multiple"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_what_does_not_fit_is_one_line_and_writes_nothing(name, tmp_path):
  folder, workdir = copy_of(tmp_path), tmp_path / "run"
  damage, message = FAILURES[name]
  damage(folder)
  with pytest.raises(ScmoeError, match=message) as caught:
    import_model(str(folder), workdir)
  assert "\n" not in str(caught.value)
  assert not workdir.exists()


def test_a_run_is_not_overwritten_and_a_folder_neither(tmp_path):
  workdir = tmp_path / "run"
  assert "next: python -m scmoe.evaluate" in import_model(str(GOLDEN / "olmoe_a"), workdir)
  with pytest.raises(ConfigError, match="has a run already"):
    import_model(str(GOLDEN / "olmoe_a"), workdir)
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "mine").touch()
  with pytest.raises(StorageError, match="is there already"):
    export_model(workdir, tmp_path / "out")
  with pytest.raises(ConfigError, match="--dtype='int8' is unknown"):
    export_model(workdir, tmp_path / "new", dtype="int8")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
  export_model(workdir, tmp_path / "new", dtype="bfloat16")
  narrow, wide = Folder(tmp_path / "new"), load_file(GOLDEN / "olmoe_a" / WEIGHTS)
  want = wide["lm_head.weight"].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(narrow.read("lm_head.weight"), want)
  assert narrow.config["dtype"] == "bfloat16"


# -- configurations -------------------------------------------------------------------------------


def config_of(name, **fields):
  return json.loads((GOLDEN / name / "config.json").read_text()) | fields


def test_layers_without_a_moe():
  model = lambda **fields: read_config(config_of("qwen3_moe_a", **fields))[1]
  layered = {"num_hidden_layers": 4, "mlp_only_layers": []}
  assert model().dense_layers == "1"
  every2 = model(**layered, decoder_sparse_step=2)
  assert (every2.moe_every, every2.dense_layers) == (2, "")
  mixed = model(num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
  assert (mixed.moe_every, mixed.dense_indices) == (1, (0, 2, 3, 4))
  assert [tuple(run) for run in mixed.runs] == [
    (True, 0, 1), (False, 0, 1), (True, 1, 4), (False, 1, 2)]  # fmt: skip
  assert read_config(config_of("deepseek_v3_a", first_k_dense_replace=0))[1].dense_layers == ""


def test_every_second_layer_has_its_names():
  fields = {"num_hidden_layers": 4, "mlp_only_layers": [], "decoder_sparse_step": 2}
  family, model, router = read_config(config_of("qwen3_moe_a", **fields))
  listed = {t.name: t for t in tensors(family, model, router)}
  assert listed["model.layers.2.mlp.up_proj.weight"].leaf.endswith("units.0.blocks.0.mlp.up")
  assert listed["model.layers.3.mlp.experts.1.up_proj.weight"].index == (1, 1)
  assert listed["model.layers.3.self_attn.q_proj.weight"].leaf.endswith("blocks.1.attention.query")


VARIANTS = {
  "tied": ("olmoe_a", {"tie_word_embeddings": True}),
  "biases": ("qwen3_moe_a", {"attention_bias": True}),
  "clipped": ("olmoe_a", {"clip_qkv": 3.0}),
  "window": ("mixtral_a", {"sliding_window": 5}),
  "window of qwen": ("qwen3_moe_a", {"use_sliding_window": True, "sliding_window": 4}),
  "not normalised": ("qwen3_moe_a", {"norm_topk_prob": False}),
  "normalised": ("olmoe_a", {"norm_topk_prob": True}),
  "top-1": ("mixtral_a", {"num_experts_per_tok": 1}),
  "no latent of queries": ("deepseek_v3_a", {"q_lora_rank": None}),
  "latent biases": ("deepseek_v3_a", {"attention_bias": True}),
  "one group": ("deepseek_v3_a", {"n_group": 1, "topk_group": 1}),
  "halves": ("deepseek_v3_a", {"rope_interleave": False}),
  "yarn": ("deepseek_v3_a", {"rope_scaling": {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
  "no multipliers": ("granitemoe_a", {
    "residual_multiplier": 1.0, "embedding_multiplier": None, "logits_scaling": 1.0}),
  "glm without biases": ("glm4_moe_a", {"attention_bias": False, "use_qk_norm": False}),
  "glm without shared experts": ("glm4_moe_a", {"n_shared_experts": 0}),
  "a quarter of a head turns": ("glm4_moe_a", {"rope_parameters": {
    "rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.25}}),
  "no zero experts": ("longcat_flash_a", {"zero_expert_num": 0}),
  "llama-4 with experts in every layer": ("llama4_text_a", {
    "interleave_moe_layer_step": 1, "moe_layers": None}),
  "llama-4 with experts in some layers": ("llama4_text_a", {"moe_layers": [0, 3]}),
  "no chunks": ("llama4_text_a", {"attention_chunk_size": None, "layer_types": None}),
  "chunks everywhere": ("llama4_text_a", {"layer_types": ["chunked_attention"] * 4}),
  "other layers turn": ("llama4_text_a", {"no_rope_layers": [1, 0, 0, 1]}),
  "all layers turn": ("llama4_text_a", {"no_rope_layers": [1] * 4}),
  "no temperature": ("llama4_text_a", {"attn_temperature_tuning": False}),
  "llama-4 without norms": ("llama4_text_a", {"use_qk_norm": False}),
  "gpt-oss without biases": ("gpt_oss_a", {"attention_bias": False}),
  "every window": ("gpt_oss_a", {"layer_types": ["sliding_attention"] * 2}),
  "no window": ("gpt_oss_a", {"layer_types": ["full_attention"] * 2}),
  "a window of null": ("gpt_oss_a", {"sliding_window": None}),
  "gpt-oss, top-1": ("gpt_oss_a", {"num_experts_per_tok": 1}),
  "its own rope": ("gpt_oss_a", {"rope_parameters": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_configurations_out_and_in_again(name):
  case, fields = VARIANTS[name]
  family, model, router = read_config(config_of(case, **fields))
  again = read_config(write_config(model, router, family))
  assert again[1:] == (model, router)
  assert (model, router) != read_config(config_of(case))[1:]


def test_a_dynamic_rotary_embedding_is_plain_up_to_the_context(tmp_path):
  """It stretches longer rows only, and no row is longer here; its config.json leaves as it came."""
  config = config_of("olmoe_a", rope_scaling={"rope_type": "dynamic", "factor": 4.0})
  assert read_config(config) == read_config(config_of("olmoe_a"))
  folder = copy_of(tmp_path)
  (folder / "config.json").write_text(json.dumps(config))
  import_model(str(folder), tmp_path / "run")
  export_model(tmp_path / "run", tmp_path / "out")
  assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_transformers_5_spells_rotary_embeddings_otherwise():
  values = config_of("olmoe_a")
  theta = values.pop("rope_theta")
  values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
  assert read_config(values)[1].rope_theta == 50000.0


@pytest.mark.parametrize(
  "fields",
  [
    {"hidden_act": "gelu_pytorch_tanh"},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1}},
    {"clip_qkv": None, "sliding_window": None, "note": "of whoever made it"},
  ],
  ids=lambda fields: next(iter(fields)),
)
def test_a_config_that_says_it_in_its_own_words_keeps_them(fields, tmp_path):
  folder = copy_of(tmp_path)
  config = json.loads((folder / "config.json").read_text()) | fields
  (folder / "config.json").write_text(json.dumps(config))
  import_model(str(folder), tmp_path / "run")
  export_model(tmp_path / "run", tmp_path / "out")
  assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.parametrize("case", ["olmoe_a", "mixtral_a", "qwen3_moe_a"])
def test_transformers_5_spells_the_number_of_experts_otherwise(case):
  values = config_of(case)
  count = values.pop("num_experts", None) or values.pop("num_local_experts")
  spelled = [read_config(values | {name: count}) for name in ("num_experts", "num_local_experts")]
  assert spelled[0] == spelled[1] == read_config(config_of(case))
  with pytest.raises(DataError, match=r"num_experts=None is not a size"):
    read_config(values)


def test_what_no_family_has_is_written_with_its_own_code():
  llama = {"style": "llama", "wiring": "top2", "mix": "direct", "moe_every": 1}
  for options in ({}, llama):
    model = ModelConfig(vocab_size=128, **options).resolve()
    values = write_config(model, RunConfig().router)
    assert values["model_type"] == "scmoe"
    assert read_config(values)[1] == model


def test_a_model_that_has_left_its_family_is_written_with_its_own_code():
  model, router = read_config(config_of("olmoe_a"))[1:]
  assert write_config(model, router, "olmoe")["model_type"] == "olmoe"
  sigmoid = dataclasses.replace(router, scoring_func="sigmoid")
  assert write_config(model, sigmoid, "olmoe")["model_type"] == "scmoe"


def test_names_that_errors_need_are_regular():
  with pytest.raises(DataError, match=re.escape("mlp_only_layers='x' is not a list of layers")):
    read_config(config_of("qwen3_moe_a", mlp_only_layers="x"))


@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_ends_while_it_is_read_leaves_no_run(there, tmp_path, monkeypatch):
  folder, run, read = copy_of(tmp_path), tmp_path / "run", Folder.read

  def reads(self, name):
    if name == NORM:
      os.truncate(folder / WEIGHTS, 0)
    return read(self, name)

  monkeypatch.setattr(Folder, "read", reads)
  if there:
    run.mkdir()
  with pytest.raises(DataError, match=f"{WEIGHTS}: .* cannot be read: it is truncated"):
    import_model(str(folder), run)
  assert run.exists() == there
  assert [p for p in run.rglob("*") if p != run / "checkpoints"] == []


def test_a_folder_that_another_process_writes_to_is_left_alone(tmp_path, monkeypatch):
  folder, run = copy_of(tmp_path), tmp_path / "run"

  def prepared(workdir):  # the other one is a moment faster
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "run.lock").write_text(json.dumps(identity(os.getppid())))
    return workdir

  monkeypatch.setattr(imported, "prepare_workdir", prepared)
  with pytest.raises(ConfigError, match="in use by process"):
    import_model(str(folder), run)
  assert (run / "run.lock").exists()
