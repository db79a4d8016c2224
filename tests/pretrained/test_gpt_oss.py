"""The window of a GPT-OSS: left out, null, or of no layer."""

import json
from pathlib import Path

import pytest

from scmoe.pretrained.families import read_config, write_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released" / "gpt_oss_a"


@pytest.mark.parametrize(("given", "window", "full"), [
  ({}, 128, "1"),  # the default of transformers' GptOssConfig
  ({"sliding_window": None}, 0, ""),
  ({"sliding_window": 4}, 4, "1"),
], ids=str)  # fmt: skip
def test_a_window_that_the_file_leaves_out_is_the_default(given, window, full):
  config = json.loads((GOLDEN / "config.json").read_text())
  del config["sliding_window"]
  _, model, _ = read_config(config | given)
  assert (model.sliding_window, model.full_attention_layers) == (window, full)


def test_a_model_without_a_window_leaves_with_a_size_that_no_layer_reads():
  """transformers makes both masks of a GPT-OSS, and refuses a window of null."""
  config = json.loads((GOLDEN / "config.json").read_text())
  family, model, router = read_config(config | {"layer_types": ["full_attention"] * 2})
  written = write_config(model, router, family)
  assert (written["sliding_window"], set(written["layer_types"])) == (128, {"full_attention"})
  assert read_config(written)[1:] == (model, router)
