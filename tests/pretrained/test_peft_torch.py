"""Adapters in PEFT's layout under transformers: the logits of the sum are those of the run.

torch and transformers are no requirement of this project. The adapters are added to transformers'
own parameters, by the names in the file and by the class that holds each of them.
"""

import json

import jax
import numpy as np
import pytest
import released
from adapting import GOLDEN, adapted_run
from peers import torch_and_transformers

from scmoe.pretrained.adapter_folder import CONFIG
from scmoe.run.exported import export_adapters, export_model

torch, transformers = torch_and_transformers(5, "transformers 4 holds experts as modules")
TOLERANCE = 1e-4  # absolute, of float32 logits
# Not LongCat-Flash: transformers 5.24 refuses its own models that have zero experts.
CASES = {
  "deepseek_v3_a": "attention,mlp,experts",
  "glm4_moe_a": "attention,mlp,experts",
  "gpt_oss_a": "attention,experts",
  "granitemoe_a": "attention,experts",
  "llama4_text_a": "attention,mlp",
  "mixtral_a": "attention,experts",
  "olmoe_a": "attention,experts,head",
  "qwen3_moe_a": "attention,mlp",
}


def add(model, folder):
  """Adds a folder's adapters to a model's parameters, as PEFT would find and merge them."""
  from safetensors.torch import load_file

  config, tensors = json.loads((folder / CONFIG).read_text()), load_file(
    folder / "adapter_model.safetensors")  # fmt: skip
  adapted = {name.rpartition(".lora_")[0] for name in tensors}
  for stem in adapted:
    a, b = (tensors[f"{stem}.lora_{x}.weight"] for x in "AB")
    module = stem.removeprefix("base_model.model.")
    fused = module.endswith(".base_layer")
    holder = model.get_submodule(module.removesuffix(".base_layer"))
    if isinstance(holder, torch.nn.Linear):
      assert module.rpartition(".")[2] in config["target_modules"]
      holder.weight += config["lora_alpha"] / config["r"] * b @ a
      continue
    name = "gate_up_proj" if fused else "down_proj"
    assert f"{'.'.join(module.split('.')[3:5])}.{name}" in config["target_parameters"]
    rank = config["rank_pattern"].get(name, config["r"])
    alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
    parameter = getattr(holder, name)
    experts, first, second = parameter.shape
    wide = (first, second) if holder.is_transposed else (second, first)
    assert a.shape == (experts * rank, wide[0])
    assert b.shape == (wide[1], rank * experts)
    form = "ore,eri->eio" if holder.is_transposed else "ore,eri->eoi"
    change = torch.einsum(form, b.reshape(-1, rank, experts), a.reshape(experts, rank, -1))
    parameter += alpha / rank * change
  # What PEFT would wrap by `target_modules` is what the file has.
  wrapped = {f"base_model.model.{name}" for name, module in model.named_modules()
             if isinstance(module, torch.nn.Linear)
             and name.rpartition(".")[2] in config["target_modules"]}  # fmt: skip
  assert wrapped == {stem for stem in adapted if ".experts" not in stem}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_sum_are_those_of_the_run(case, tmp_path):
  run = adapted_run(case, tmp_path / "run", CASES[case])
  export_adapters(run, tmp_path / "adapter", mesh="data=1")
  export_model(run, tmp_path / "merged", mesh="data=1")
  tokens = np.random.default_rng(1).integers(0, 100, (2, 10)).astype(np.int32)
  with jax.default_matmul_precision("highest"):
    ours = released.run(tmp_path / "merged", "data=1", tokens)["logits"]
    before = released.run(GOLDEN / case, "data=1", tokens)["logits"]
  model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / case).eval()
  add(model, tmp_path / "adapter")
  theirs = model(torch.tensor(tokens), use_cache=False).logits.numpy()
  np.testing.assert_allclose(theirs, ours, atol=TOLERANCE, rtol=0)
  assert np.abs(before - ours).max() > 0.1
  # The merged folder of a released family needs neither trust_remote_code nor this project.
  plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
  merged = plain(torch.tensor(tokens), use_cache=False).logits.numpy()
  np.testing.assert_allclose(merged, ours, atol=TOLERANCE, rtol=0)
