"""Every wiring and option leaves as a folder of the family `scmoe`, and comes in bit for bit."""

import dataclasses
import json
import os
import re

import jax
import leaving
import numpy as np
import pytest
import released
from covering import night
from flax import nnx
from leaving import _LATENT, CASES, VOCAB, run_of, write_run
from safetensors.numpy import load_file, save_file

from scmoe.base.errors import ConfigError, DataError, StorageError
from scmoe.blocks.wiring import WIRINGS
from scmoe.data.conventions import Conventions
from scmoe.data.tokenizers import ByteTokenizer, JsonTokenizer, byte_tokenizer_json
from scmoe.kernels.grouped_matmul.activations import activation_names, get_activation
from scmoe.kernels.grouped_matmul.options import FFNOptions
from scmoe.models.config import ModelConfig
from scmoe.moe.gates import arrays_of_experts, make_gates
from scmoe.moe.options import GATES, CompatConfig, RouterConfig
from scmoe.pretrained import own
from scmoe.pretrained.families import FAMILIES, read_config, write_config
from scmoe.pretrained.folder import CONFIG, WEIGHTS
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.names import tensors
from scmoe.pretrained.own_files import text_files
from scmoe.pretrained.requests import check_experts
from scmoe.pretrained.stream import flat
from scmoe.run.config import RunConfig
from scmoe.run.exported import export_model
from scmoe.run.model import build_model
from scmoe.training.card import write_card
from scmoe.training.restore import restore_stored


@pytest.mark.parametrize("name", CASES)
def test_names_shapes_and_configuration(name):
  """The configuration reads back as the run's; names and shapes of tensors are the model's."""
  run = run_of(name)
  config = json.loads(json.dumps(own.write(run.model, run.router)))
  assert read_config(config)[1:] == (run.model, run.router)
  listed = list(tensors(own.FAMILY, run.model, run.router))
  assert len({tensor.name for tensor in listed}) == len(listed)
  shapes = flat({"params": build_model(run, None)[1]})
  held = dict.fromkeys(shapes, 0)
  for tensor in listed:
    if tensor.leaf == "router.bias":
      assert run.router.bias != "none"
      assert tensor.shape == (run.model.num_experts + run.model.zero_experts,)
      continue
    assert shapes[tensor.leaf].shape[len(tensor.index) :] == tensor.shape == tensor.split
    held[tensor.leaf] += 1
  # Each parameter is there once, or once for each layer of its stack.
  stacks = {"stages": run.model.num_pairs, "dense": len(run.model.dense_indices)}
  assert held == {leaf: stacks.get(leaf.split(".")[1], 1) for leaf in held}


# Options that no reader of the folder needs, since they change how a model is computed or trained.
NO_PART = {
  "model.ffn.fp8", "model.ffn.impl", "model.ffn.backend", "model.ffn.num_sms", "model.dtype",
  "model.document_mask",
  "router.noise", "router.balance", "router.balance_loss", "router.balance_over", "router.z_loss",
  "router.bias_rate", "router.bias_proportional", "router.bias_derivative", "router.real_experts",
  "router.compat.order", "router.compat.jitter", "router.compat.round_to",
}  # fmt: skip
REFUSED = {"model.experts", "model.architecture", "router.compat.uniform", "router.tasks",
           "model.nope_layers", "model.attention_chunk", "model.attention_temperature",
           "model.attention_temperature_floor"}  # fmt: skip
DERIVED = {"model.wiring", "model.top_k", "model.dense_layers", "model.rope_theta",
           "model.attention_multiplier", "model.full_attention_layers"}  # fmt: skip


def test_gates_of_several_tasks_are_refused():
  model = ModelConfig(vocab_size=VOCAB).resolve()
  with pytest.raises(ConfigError, match=r"^router\.tasks=2: a folder holds one task's gates"):
    own.write(model, RouterConfig(tasks=2))


def test_the_code_has_every_activation():
  """A new activation needs a line there too, or models with it cannot leave."""
  assert own.activations() == {name: get_activation(name).gated for name in activation_names()}


def test_an_activation_that_the_code_lacks_is_refused(monkeypatch):
  model = ModelConfig(vocab_size=VOCAB, ffn=FFNOptions(activation="relu2")).resolve()
  assert own.write(model, RouterConfig())
  known = {name: gated for name, gated in own.activations().items() if name != "relu2"}
  monkeypatch.setattr(own, "activations", lambda: known)
  with pytest.raises(ConfigError, match=r"^model\.ffn\.activation='relu2' is none .*silu"):
    own.write(model, RouterConfig())


def test_the_code_has_every_gate_and_each_names_its_arrays_of_experts(monkeypatch):
  assert set(own.gates()) == set(GATES)
  model = ModelConfig(vocab_size=VOCAB).resolve()
  monkeypatch.setattr(own, "gates", lambda: ("linear", "affine"))
  with pytest.raises(ConfigError, match=r"^router\.gate='cosine' is none .*linear, affine; add"):
    own.write(model, RouterConfig(gate="cosine"))
  for word in GATES:
    [gate] = make_gates(16, 7, RouterConfig(gate=word), init_std=0.1, rngs=nnx.Rngs(0))
    arrays = {name: x.shape[-1] for name, x in vars(gate).items() if isinstance(x, nnx.Param)}
    assert {name for name, last in arrays.items() if last == 7} == set(arrays_of_experts(word))


def test_a_gate_that_names_no_arrays_of_experts_cannot_move_them(monkeypatch):
  monkeypatch.setitem(GATES, "silent", type("Silent", (nnx.Module,), {}))
  run = RunConfig(model=ModelConfig(wiring="top2"), router=RouterConfig(gate="silent"))
  with pytest.raises(ConfigError, match="name them in its tuple OF_EXPERTS"):
    check_experts("place", run)


def test_the_code_reads_every_option_that_changes_the_function():
  """A new option has to be read there, or to be named here as one without a part in it."""
  written = own.write(ModelConfig(vocab_size=VOCAB).resolve(), RouterConfig())[own.FAMILY]
  paths = [".".join(path) for path, _ in leaves({k: written[k] for k in ("model", "router")})]
  read = {path for path in paths if re.search(rf"\.{path.split('.')[-1]}\b", own.code())}
  rope = {path for path in paths if path.startswith("model.rope.")}
  assert set(paths) - read == (NO_PART | REFUSED | DERIVED | rope) - read
  assert {"model.mix", "router.gate", "router.compat.weights", "model.rope.interleaved"} <= read


def leaves(group, path=()):
  """Every value of nested groups, with the names that lead to it."""
  for name, value in group.items():
    if isinstance(value, dict):
      yield from leaves(value, (*path, name))
    else:
      yield (*path, name), value


# Two stacks, two gatings, a bias with a controller, several gates, a plain one; and every wiring.
THERE_AND_BACK = ("scmoe_pos2 gpt2", "dgmoe, dense layers", "dgmoe_share llama", "three gates",
                  "a controller's bias", "cosine gate",
                  *(f"{wiring} gpt2" for wiring in WIRINGS if wiring != "scmoe_pos2"))  # fmt: skip


@pytest.mark.parametrize("name", [THERE_AND_BACK[0], *map(night, THERE_AND_BACK[1:])])
def test_out_and_in_again_is_bitwise_on_one_device_and_on_eight(name, tmp_path):
  state = flat(write_run(run_of(name), tmp_path / "run"))
  wanted = {n: x for n, x in state.items() if n.startswith("params") or n == "router.bias"}
  for mesh in ("data=1", "data=2,expert=4"):
    folder, again = tmp_path / f"out {mesh}", tmp_path / f"again {mesh}"
    assert export_model(tmp_path / "run", folder, mesh=mesh).startswith("scmoe of ")
    import_model(str(folder), again, mesh=mesh)
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
              for n, x in wanted.items()}  # fmt: skip
    found = restore_stored(again, shapes, 0)
    for leaf, value in wanted.items():
      np.testing.assert_array_equal(np.asarray(found[leaf]), np.asarray(value), leaf)
    export_model(again, tmp_path / f"third {mesh}", mesh=mesh)
    for file in (WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json", own.CODE):
      assert (tmp_path / f"third {mesh}" / file).read_bytes() == (folder / file).read_bytes(), file
  one, eight = (
    load_file(tmp_path / f"out {mesh}" / WEIGHTS) for mesh in ("data=1", "data=2,expert=4")
  )
  assert all(np.array_equal(one[tensor], eight[tensor]) for tensor in one)


@pytest.mark.parametrize("name", ["scmoe_pos2 gpt2", night("dgmoe, dense layers")])
def test_meshes_and_the_cache_compute_the_same(name, tmp_path):
  """The folder's logits, whole and decoded token by token, on one device and on eight."""
  write_run(run_of(name), tmp_path / "run")
  export_model(tmp_path / "run", tmp_path / "out")
  tokens = np.random.default_rng(1).integers(0, leaving.VOCAB, (2, 9)).astype(np.int32)
  with jax.default_matmul_precision("highest"):
    one, eight = (released.run(tmp_path / "out", m, tokens) for m in ("data=1", "data=2,expert=4"))
  for found in (eight["logits"], eight["decoded"], one["decoded"]):
    np.testing.assert_allclose(found, one["logits"], atol=2e-5)


def test_a_released_family_comes_first():
  run = run_of("topk in every block")
  fits = dataclasses.replace(run.model, mlp_hidden=run.model.expert_hidden)
  assert write_config(fits, run.router)["model_type"] == "mixtral"
  assert write_config(run.model, run.router)["model_type"] == own.FAMILY
  assert list(FAMILIES)[-1] == own.FAMILY


def test_without_the_tensors_of_its_family_a_run_leaves_with_its_own_code(tmp_path):
  """DeepSeek-V3's config.json fits this run, but its router has a balancing bias."""
  model = {"wiring": "topk", "moe_every": 1, "top_k": 2, "tie_embeddings": False, "mix": "direct",
           "latent_norm_eps": 1e-6, **_LATENT}  # fmt: skip
  router = {"scoring_func": "sigmoid", "group_score": "top2"}
  CASES["of deepseek"] = model, router
  try:
    run = run_of("of deepseek")
  finally:
    del CASES["of deepseek"]
  assert write_config(run.model, run.router)["model_type"] == "deepseek_v3"
  write_run(run, tmp_path / "run")
  assert export_model(tmp_path / "run", tmp_path / "out").startswith("scmoe of ")


# -- the other files -----------------------------------------------------------------------------


def test_the_folder_has_code_card_and_tokenizer(tmp_path):
  run = run_of("scmoe_pos2 gpt2")
  write_run(run, tmp_path / "run")
  write_card(tmp_path / "run", command="scmoe.train --config mine")
  said = export_model(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
  assert f"transformers runs its {own.CODE} with trust_remote_code=True" in said
  assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
    "README.md", "config.json", "generation_config.json", "model.safetensors", own.CODE,
    "tokenizer.json", "tokenizer_config.json",
  ]  # fmt: skip
  card = (tmp_path / "out" / "README.md").read_text()
  assert card.startswith("---\nlibrary_name: transformers\n")
  assert "scmoe.train --config mine" in card
  assert '"wiring": "scmoe_pos2"' in card
  assert os.uname().nodename not in card
  config = json.loads((tmp_path / "out" / CONFIG).read_text())
  assert (config["eos_token_id"], config["dtype"]) == (256, "bfloat16")
  assert (tmp_path / "out" / own.CODE).read_text() == own.code()


def test_a_tokenizer_of_bytes_has_the_same_ids():
  content = byte_tokenizer_json()
  bytes_, parsed = ByteTokenizer(), JsonTokenizer(content)
  text = "a\n\x00 żółć 東京 🙂\ttwo  spaces"
  assert parsed.encode(text) == bytes_.encode(text)
  assert parsed.decode(parsed.encode(text)) == text
  assert (parsed.eos_id, parsed.vocab_size) == (bytes_.eos_id, bytes_.vocab_size)
  assert parsed.token_bytes().tolist() == bytes_.token_bytes().tolist()


def test_the_conventions_of_a_run_become_files_of_transformers():
  run = run_of("scmoe_pos2 gpt2")
  tokenizer = JsonTokenizer(byte_tokenizer_json())
  tokenizer.adopt(Conventions(begin_ids=(65, 66), bos_id=66, stop_ids=(67,), chat_template="hi"))
  files = text_files(run, tokenizer)
  assert files["chat_template.jinja"] == "hi"
  assert json.loads(files["generation_config.json"]) == {
    "bos_token_id": 66, "eos_token_id": [256, 67]}  # fmt: skip
  assert json.loads(files["tokenizer_config.json"])["bos_token"] == "B"
  import tokenizers

  made = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
  assert made.encode("x").ids == [65, 66, ord("x")]


def test_a_model_released_with_its_own_tokenizer_keeps_every_file(tmp_path):
  write_run(run_of("scmoe_pos2 gpt2"), tmp_path / "run")
  export_model(tmp_path / "run", tmp_path / "out")
  config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
  config |= {"chat_template": "hello", "note": "of whoever made it"}
  (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(config))
  import_model(str(tmp_path / "out"), tmp_path / "again")
  export_model(tmp_path / "again", tmp_path / "third")
  for name in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
    assert (tmp_path / "third" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


# -- errors: one line, and nothing written --------------------------------------------------------


def test_what_cannot_leave_says_so():
  run = run_of("scmoe_pos2 gpt2")
  uniform = RouterConfig(compat=CompatConfig(uniform=True))
  with pytest.raises(ConfigError, match=r"router.compat.uniform=True gives experts their tokens"):
    own.write(run.model, uniform)
  with pytest.raises(ConfigError, match=r"router.gate='mine:Gate' is code of your own"):
    own.write(run.model, RouterConfig(gate="mine:Gate"))
  mine = own.write(run.model, RouterConfig(balance="mine:loss"))  # no part of the function
  assert read_config(mine)[2].balance == "none"


def _scmoe(change):
  def apply(folder):
    config = json.loads((folder / CONFIG).read_text())
    change(config["scmoe"])
    (folder / CONFIG).write_text(json.dumps(config))

  return apply


def _lost(folder):
  weights = load_file(folder / WEIGHTS)
  weights.pop("stages.1.moe.experts.up")
  save_file(weights, folder / WEIGHTS)


BROKEN = {
  "no group": (_scmoe(lambda g: g.pop("derived")), "does not have the groups model, router and"),
  "no fields": (_scmoe(lambda g: g.update(router=[])), r"scmoe.router='\[\]' is not a group"),
  "unknown field": (_scmoe(lambda g: g["model"].update(depth=3)), "scmoe: .*model.depth"),
  "wrong type": (_scmoe(lambda g: g["model"].update(width="x")), "model.width='x' is of type str"),
  "unknown wiring": (_scmoe(lambda g: g["model"].update(wiring="pos9")), "model.wiring='pos9'"),
  "code": (_scmoe(lambda g: g["router"].update(gate="os:system")), "names code, which a model's"),
  "code of experts": (_scmoe(lambda g: g["model"].update(experts="a:B")), "model.experts='a:B' n"),
  "too many layers": (_scmoe(lambda g: g["model"].update(num_layers=10**6)), "limit of 16384"),
  "too many gates": (
    _scmoe(lambda g: g["router"]["compat"].update(gates=10**6)), "router.compat.gates=1000000 is"),
  "images": (_scmoe(lambda g: g["model"].update(architecture="vit")), "architecture='vit'; known"),
  "other taps": (
    _scmoe(lambda g: g["derived"].update(taps=["current"])),
    r"scmoe.derived.taps=\['current'\] is not what the options imply, \['attention'\]"),
  "nothing derived": (_scmoe(lambda g: g.update(derived=3)), "scmoe.derived.taps=None is not"),
  "lost tensor": (_lost, "tensor stages.1.moe.experts.up is missing"),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  scratch = tmp_path_factory.mktemp("exported")
  write_run(run_of("scmoe_pos2 gpt2"), scratch / "run")
  export_model(scratch / "run", scratch / "out")
  return scratch / "out"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line_and_writes_nothing(name, exported, tmp_path):
  folder, (damage, message) = tmp_path / "folder", BROKEN[name]
  folder.mkdir()
  for path in exported.iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  damage(folder)
  with pytest.raises(DataError, match=message) as caught:
    import_model(str(folder), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_finished_is_not_there(exported, tmp_path, monkeypatch):
  write_run(run_of("scmoe_pos2 gpt2"), tmp_path / "run")

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr("scmoe.run.exported.write_json", full)
  with pytest.raises(StorageError, match="cannot be written: No space left on device"):
    export_model(tmp_path / "run", tmp_path / "out")
  assert [path.name for path in tmp_path.iterdir()] == ["run"]
