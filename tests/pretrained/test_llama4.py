"""Llama-4 beside a model of images, and what of it no other family has."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.pretrained.families import read_config, write_config
from scmoe.pretrained.folder import WEIGHTS
from scmoe.pretrained.imported import import_model
from scmoe.run.config import RunConfig
from scmoe.run.exported import export_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released"


def test_the_text_part_of_a_model_of_images_comes_in_and_leaves_alone(tmp_path):
  """Its tensors have a prefix there, and those of images are left out."""
  text = GOLDEN / "llama4_text_a"
  weights, config = load_file(text / WEIGHTS), json.loads((text / "config.json").read_text())
  folder = tmp_path / "whole"
  folder.mkdir()
  beside = {"vision_model.patch.weight": np.ones(3, np.float32)}
  save_file({f"language_model.{n}": a for n, a in weights.items()} | beside, folder / WEIGHTS)
  whole = {"model_type": "llama4", "text_config": config, "vision_config": {}}
  (folder / "config.json").write_text(json.dumps(whole))
  assert read_config(whole)[1:] == read_config(config)[1:]
  said = import_model(str(folder), tmp_path / "run")
  assert "not read: 1 tensors that the model does not use: vision_model.patch.weight" in said
  export_model(tmp_path / "run", tmp_path / "out")
  written = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (written["model_type"], "vision_config" in written) == ("llama4_text", False)
  again = load_file(tmp_path / "out" / WEIGHTS)
  assert set(again) == set(weights)
  for name, want in weights.items():
    np.testing.assert_array_equal(again[name], want, name)


@pytest.mark.parametrize("option", [
  {"nope_layers": "1"}, {"attention_chunk": 4}, {"qk_norm": "l2"}], ids=str)  # fmt: skip
def test_what_the_code_that_leaves_lacks_is_one_line(option):
  ((name, _),) = option.items()
  model = ModelConfig(vocab_size=128, style="llama", **option).resolve()
  with pytest.raises(ConfigError, match=rf"model.{name}=.* leaves as a Llama-4 only"):
    write_config(model, RunConfig().router)
