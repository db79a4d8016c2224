"""Adapters alone in PEFT's layout: out, in again, added by an oracle, and every way to fail."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from adapting import ALPHA, GOLDEN, RANK, adapt, adapted_run
from covering import night
from safetensors.numpy import load_file, save_file

from scmoe import convert
from scmoe.base.errors import ConfigError, DataError, StorageError
from scmoe.models.low_rank import LoraConfig
from scmoe.pretrained.adapter_folder import CONFIG, WEIGHTS, AdapterFolder
from scmoe.pretrained.adapter_names import check_family
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.stream import flat
from scmoe.run.adapters import restore_weights
from scmoe.run.build import build
from scmoe.run.exported import export_adapters
from scmoe.run.opened import open_run
from scmoe.run.placement import on_mesh

pytestmark = pytest.mark.usefixtures("quickly")


CASES = {  # case -> targets; together every family whose experts have a layout
  "olmoe_a": "attention,experts,head",
  "gpt_oss_a": "attention,experts",  # gate and up projections that take turns
  "deepseek_v3_a": "attention,mlp,experts",  # latent, dense and shared MLPs, biases
  "longcat_flash_a": "attention",
  "mixtral_a": "experts",
  "granitemoe_a": "attention,experts",
  "qwen3_moe_a": "attention,mlp",
  "glm4_moe_a": "attention,mlp,experts",
  "llama4_text_a": "attention",
}
BY_DAY = ("olmoe_a", "gpt_oss_a")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory):
  """A run of OLMoE with adapters, and the folder of these alone."""
  root = tmp_path_factory.mktemp("olmoe")
  run = adapted_run("olmoe_a", root / "run", CASES["olmoe_a"])
  convert.main([f"--workdir={run}", f"--peft={root / 'adapter'}", "--mesh=data=1"])
  return root


def parameters(workdir):
  """The whole weights of a run, adapters merged, by dotted name."""
  run = open_run(str(workdir), None).run
  built = build(on_mesh(run, "data=1"), jax.devices()[:1])
  return flat(jax.device_get(restore_weights(workdir, run, {"params": built.shapes})["params"]))


def change_of(tensors, config, module, experts, transposed):
  """The sum that a pair of tensors adds to the weight of transformers' module, in its layout.

  By PEFT's description of its layers: a matrix [out, in], or the matrices [E, out, in] or, of
  classes that say `is_transposed`, [E, in, out].
  """
  a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"].astype(np.float64) for x in "AB")
  fused = module.endswith(".base_layer")
  rank = config["rank_pattern"]["gate_up_proj"] if fused else config["r"]
  alpha = config["alpha_pattern"]["gate_up_proj"] if fused else config["lora_alpha"]
  if not experts:
    assert len(a) == rank
    return alpha / rank * b @ a
  assert len(a) == rank * experts
  form = "ore,eri->eio" if transposed else "ore,eri->eoi"
  a, b = a.reshape(experts, rank, -1), b.reshape(len(b), rank, experts)
  return alpha / rank * np.einsum(form, b, a)


def added(case, folder, out):
  """Writes the released model with the adapters of a folder added, by the names in its file."""
  shutil.copytree(GOLDEN / case, out)
  config = json.loads((folder / CONFIG).read_text())
  tensors, released = load_file(folder / WEIGHTS), load_file(out / "model.safetensors")
  modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
  experts = json.loads((out / "config.json").read_text())
  names = ("num_local_experts", "num_experts", "n_routed_experts")
  experts = next((experts[name] for name in names if name in experts), 0)
  family = case.removesuffix("_a")
  for module in modules:
    if ".experts" not in module:
      released[f"{module}.weight"] += change_of(tensors, config, module, 0, False).astype("f4")
      continue
    change = change_of(tensors, config, module, experts, family == "gpt_oss").astype("f4")
    place, fused = module.removesuffix(".base_layer"), module.endswith(".base_layer")
    if family == "gpt_oss":
      released[f"{place}.{'gate_up_proj' if fused else 'down_proj'}"] += change
    elif family == "granitemoe":
      name = "input_linear" if fused else "output_linear"
      released[f"{place.removesuffix('.experts')}.{name}.weight"] += change
    else:
      mixtral = family == "mixtral"
      place = place.replace(".mlp.", ".block_sparse_moe.") if mixtral else place
      names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
      for expert, own in enumerate(change):
        parts = zip(names[:2], np.split(own, 2)) if fused else [(names[2], own)]
        for name, part in parts:
          released[f"{place}.{expert}.{name}.weight"] += part
  save_file(released, out / "model.safetensors")


@pytest.mark.parametrize("case", [c if c in BY_DAY else night(c) for c in CASES])
def test_the_files_say_what_the_run_computes_and_come_in_again(case, tmp_path):
  """Merged here, merged by an oracle that knows PEFT's names, and read in: three times the same."""
  run = adapted_run(case, tmp_path / "run", CASES[case])
  export_adapters(run, tmp_path / "adapter", mesh="data=1")
  ours = parameters(run)
  added(case, tmp_path / "adapter", tmp_path / "added")
  import_model(str(tmp_path / "added"), tmp_path / "oracle", mesh="data=1")
  adapter = str(tmp_path / "adapter")
  import_model(str(GOLDEN / case), tmp_path / "again", mesh="data=1", adapter=adapter)
  oracle, again = parameters(tmp_path / "oracle"), parameters(tmp_path / "again")
  assert ours.keys() == oracle.keys() == again.keys()
  for name, value in ours.items():
    np.testing.assert_allclose(oracle[name], value, atol=2e-6, rtol=0, err_msg=name)
    np.testing.assert_allclose(again[name], value, atol=2e-6, rtol=0, err_msg=name)
  plain = parameters(run / "base")
  moved = {name for name in plain if np.abs(plain[name] - ours[name]).max() > 1e-2}
  words = {"head" if "head" in name else name.split(".")[-2] for name in moved}
  assert words == set(CASES[case].split(","))


def test_balancing_biases_that_have_moved_stay_behind_and_are_named(tmp_path):
  run = adapted_run("deepseek_v3_a", tmp_path / "run", "head")
  assert "stay behind" not in export_adapters(run, tmp_path / "first", mesh="data=1")
  adapt(run, "head", bias=0.5, step=6)
  said = export_adapters(run, tmp_path / "second", mesh="data=1")
  assert "its balancing biases have moved since the base, and stay behind" in said


def test_adapters_of_experts_in_another_order_say_to_what_they_are_added(
  olmoe, tmp_path, monkeypatch
):
  """Added to the released model they would change other experts, and no shape would tell."""
  base = Path(open_run(str(olmoe / "run"), None).run.train.init_from)
  monkeypatch.chdir(tmp_path)  # the fixture names a folder that is not there
  base.mkdir()
  (base / "placement.json").write_text("{}")
  said = export_adapters(olmoe / "run", tmp_path / "placed", mesh="data=1")
  assert f"they are for the experts of {base}, which placement.json gives another order" in said
  assert f"add them to the folder that --workdir {base} --to writes" in said


def test_the_folder_is_what_peft_reads(olmoe):
  config = json.loads((olmoe / "adapter" / CONFIG).read_text())
  assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
  assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
  assert config["rank_pattern"] == {"gate_up_proj": 2 * RANK}
  assert config["alpha_pattern"] == {"gate_up_proj": 2 * ALPHA}
  assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
  assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
  shapes = {name: x.shape for name, x in load_file(olmoe / "adapter" / WEIGHTS).items()}
  layer = "base_model.model.model.layers.1"
  assert shapes[f"{layer}.self_attn.k_proj.lora_B.weight"] == (32, RANK)
  assert shapes[f"{layer}.mlp.experts.base_layer.lora_A.weight"] == (8 * 2 * RANK, 64)
  assert shapes[f"{layer}.mlp.experts.base_layer.lora_B.weight"] == (2 * 32, 8 * 2 * RANK)
  assert shapes[f"{layer}.mlp.experts.lora_A.weight"] == (8 * RANK, 32)
  assert shapes[f"{layer}.mlp.experts.lora_B.weight"] == (64, 8 * RANK)


def test_the_average_leaves_and_eight_devices_read_it(olmoe, tmp_path, capsys):
  run, out = olmoe / "run", tmp_path / "adapter"
  export_adapters(run, out, ema=True, dtype="bfloat16")
  plain, average = load_file(olmoe / "adapter" / WEIGHTS), load_file(out / WEIGHTS)
  assert {str(x.dtype) for x in average.values()} == {"bfloat16"}
  for name, value in plain.items():
    np.testing.assert_allclose(average[name].astype("f4"), 2 * value, rtol=2**-8, err_msg=name)
  shutil.rmtree(out)
  export_adapters(run, out)
  argv = [f"--from={GOLDEN / 'olmoe_a'}", f"--adapter={out}", f"--workdir={tmp_path / 'wide'}"]
  convert.main([*argv, "--mesh=data=2,expert=4"])
  said = capsys.readouterr().out
  assert re.search("with 13 adapters of .* on attention, experts, head", said)
  ours, wide = parameters(run), parameters(tmp_path / "wide")
  for name, value in ours.items():
    np.testing.assert_allclose(wide[name], value, atol=2e-6, rtol=0, err_msg=name)


def of_experts_one_by_one(folder):
  """The folder as PEFT writes it with transformers 4, where each expert is a module."""
  config = json.loads((folder / CONFIG).read_text())
  tensors = load_file(folder / WEIGHTS)
  for name in [name for name in tensors if ".experts." in name]:
    value, fused = tensors.pop(name), ".base_layer." in name
    stem, _, half = name.replace(".base_layer", "").rpartition(".lora_")
    rank = RANK * (1 + fused)
    for expert in range(8):
      if half.startswith("A"):
        own = value.reshape(8, rank, -1)[expert]
        cuts = np.split(own, 2) if fused else [own]
      else:
        own = value.reshape(len(value), rank, 8)[..., expert]
        halves = np.split(own, 2)
        cuts = [halves[0][:, :RANK], halves[1][:, RANK:]] if fused else [own]
      for kind, cut in zip(("gate_proj", "up_proj") if fused else ("down_proj",), cuts):
        tensors[f"{stem}.{expert}.{kind}.lora_{half}"] = np.ascontiguousarray(cut)
  words = [*config["target_modules"], "gate_proj", "up_proj", "down_proj"]
  config |= {"target_modules": words, "target_parameters": None}
  config |= {"rank_pattern": {}, "alpha_pattern": {}}
  return config, tensors


def written(folder, config, tensors):
  folder.mkdir()
  (folder / CONFIG).write_text(json.dumps(config))
  save_file(tensors, folder / WEIGHTS)
  return str(folder)


def both(olmoe):
  folder = olmoe / "adapter"
  return json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)


def test_other_spellings_of_the_same_adapter(olmoe, tmp_path):
  """Single experts, patterns as PEFT spells them, a scale by the root of the rank."""
  ours = parameters(olmoe / "run")
  config, tensors = of_experts_one_by_one(olmoe / "adapter")
  config |= {"use_rslora": True, "lora_alpha": ALPHA / RANK**0.5}
  config |= {"alpha_pattern": {r".*\.self_attn\.q_proj": ALPHA / RANK**0.5}}
  adapter = written(tmp_path / "single", config, tensors)
  import_model(str(GOLDEN / "olmoe_a"), tmp_path / "one", mesh="data=1", adapter=adapter)
  found = parameters(tmp_path / "one")
  for name, value in ours.items():
    np.testing.assert_allclose(found[name], value, atol=2e-6, rtol=0, err_msg=name)


def test_an_adapter_of_some_layers_and_one_of_the_experts_parameters(olmoe, tmp_path):
  config, tensors = both(olmoe)
  kept = {n: x for n, x in tensors.items() if ".layers.1." in n and "experts.lora" in n}
  config |= {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}
  adapter = written(tmp_path / "some", config, kept)
  import_model(str(GOLDEN / "olmoe_a"), tmp_path / "one", mesh="data=1", adapter=adapter)
  found, ours = parameters(tmp_path / "one"), parameters(olmoe / "run")
  base = parameters(olmoe / "run" / "base")
  down = "stages.moe.experts.down"
  np.testing.assert_allclose(found[down][1], ours[down][1], atol=2e-6, rtol=0)
  for name, value in base.items():
    rest = (found[name][0], value[0]) if name == down else (found[name], value)
    np.testing.assert_array_equal(*rest, err_msg=name)


def _with(**fields):
  return lambda config, tensors: config.update(fields)


def _drop(ending):
  def edit(config, tensors):
    del tensors[next(name for name in tensors if name.endswith(ending))]

  return edit


def _rename(old, new):
  def edit(config, tensors):
    name = next(name for name in tensors if old in name)
    tensors[name.replace(old, new)] = tensors.pop(name)

  return edit


def _value(ending, change):
  def edit(config, tensors):
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name] = change(tensors[name])

  return edit


A_END, B_END = "q_proj.lora_A.weight", "experts.lora_B.weight"
BROKEN = {
  "another kind": (_with(peft_type="LOHA"), "peft_type='LOHA' is not read"),
  "dora": (_with(use_dora=True), "use_dora=True asks for"),
  "biases": (_with(bias="all"), "bias=all asks for"),
  "whole modules": (_with(modules_to_save=["embed_tokens"]), "modules_to_save=.* asks for"),
  "another beginning": (_with(init_lora_weights="pissa"), "init_lora_weights=pissa asks for"),
  "no rank": (_with(r=0), "r=0 of .* is no rank"),
  "another rank": (_with(r=3), r"has shape \[2, 64\]; rank 3 of this model has \[3, 64\]"),
  "a rank that is text": (_with(r="8"), "r=8 of .* is no rank"),
  "no alpha": (_with(lora_alpha=None), "lora_alpha=None of .* is no float32 above 0"),
  "an alpha beyond floats": (_with(lora_alpha=10**400), "lora_alpha=10+ of .* is no float32"),
  "an alpha of 0": (_with(lora_alpha=0), "lora_alpha=0 of"),
  "a scale that is text": (_with(use_rslora="yes"), "use_rslora=yes is neither"),
  "an expression": (_with(rank_pattern={"q_proj|k_proj": 4}), "a regular expression"),
  "patterns in a list": (_with(rank_pattern=[4]), "rank_pattern is no object"),
  "half of a pair": (_drop(A_END), "is incomplete: it has .*lora_B.weight and no .*lora_A"),
  "another layer": (_rename("layers.1.self_attn.q", "layers.7.self_attn.q"), "incomplete"),
  "embeddings": (_rename("q_proj.lora_A.weight", "lora_embedding_A"), "neither A nor B"),
  "another width": (_value(A_END, lambda x: x[:, :32].copy()), "adapter of another model: .*shape"),
  "experts the other way": (_value(B_END, lambda x: x.T.copy()), "PEFT before 0.19.1"),
  "integers": (_value(A_END, lambda x: x.astype(np.int32)), "of type I32; known: F32"),
  "not finite": (_value(B_END, lambda x: x + np.nan), "holds NaN or infinity"),
  "a sum beyond float32": (
    _value("q_proj.lora_B.weight", lambda x: x * 0 + 3e38),
    "weights are finite, but not their sum .*; lower lora_alpha, or give other adapters",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line_and_writes_nothing(name, olmoe, tmp_path):
  edit, message = BROKEN[name]
  config, tensors = both(olmoe)
  edit(config, tensors)
  adapter = written(tmp_path / "broken", config, tensors)
  with pytest.raises(DataError, match=message) as caught:
    import_model(str(GOLDEN / "olmoe_a"), tmp_path / "run", mesh="data=1", adapter=adapter)
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


def test_an_adapter_of_another_model_is_one_line(olmoe, tmp_path):
  argv = [f"--adapter={olmoe / 'adapter'}", f"--workdir={tmp_path / 'run'}", "--mesh=data=1"]
  with pytest.raises(DataError, match=r"an adapter of another model: .* does not have"):
    convert.main([f"--from={GOLDEN / 'qwen3_moe_a'}", *argv])
  with pytest.raises(DataError, match="no settled layout for the experts of llama4_text"):
    convert.main([f"--from={GOLDEN / 'llama4_text_a'}", *argv])
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("lost", "message"),
  [(CONFIG, "is missing; a folder of adapters"), (WEIGHTS, "only safetensors are read")],
)
def test_a_folder_without_a_file_is_one_line(lost, message, olmoe, tmp_path):
  shutil.copytree(olmoe / "adapter", tmp_path / "part")
  (tmp_path / "part" / lost).unlink()
  with pytest.raises(DataError, match=message):
    AdapterFolder(str(tmp_path / "part"), "olmoe", None, [])
  with pytest.raises(DataError, match="is not a folder"):
    AdapterFolder(str(tmp_path / "none"), "olmoe", None, [])


def test_a_truncated_file_is_one_line(olmoe, tmp_path):
  shutil.copytree(olmoe / "adapter", tmp_path / "part")
  file = tmp_path / "part" / WEIGHTS
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(DataError, match="is damaged or incomplete"):
    AdapterFolder(str(tmp_path / "part"), "olmoe", None, [])


def test_what_has_no_adapters_or_no_names_is_one_line(olmoe, tmp_path):
  out = tmp_path / "out"
  with pytest.raises(ConfigError, match=r"has no adapters \(lora.rank=0\); --to"):
    export_adapters(olmoe / "run" / "base", out)
  with pytest.raises(StorageError, match=r"--peft=.* is there already"):
    export_adapters(olmoe / "run", olmoe / "adapter")
  lora = LoraConfig(rank=2, targets="attention,experts")
  with pytest.raises(ConfigError, match="no settled layout for the experts of llama4_text"):
    check_family("llama4_text", lora)
  check_family("llama4_text", LoraConfig(rank=2, targets="attention"))
  with pytest.raises(ConfigError, match="no released family has this model"):
    check_family("scmoe", lora)
  assert not out.exists()


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--to=a", "--peft=b"], "give one of: --from"),
    (["--peft=a", "--adapter=b"], "--adapter goes with --from FOLDER"),
    (["--from={run}", "--adapter=b", "--upcycle=wiring=farskip"], "and .* is a run"),
    (["--from={run}", "--adapter=b", "--place=devices=2"], "--adapter has no effect with --place"),
  ],
)
def test_flags_that_do_not_go_together_are_one_line(argv, message, olmoe, tmp_path):
  typed = [text.replace("{run}", str(olmoe / "run")) for text in argv]
  with pytest.raises(ConfigError, match=message):
    convert.main([*typed, f"--workdir={tmp_path / 'run'}"])
