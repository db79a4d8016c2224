"""Runs on images: stopped and resumed, read by the other commands, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from scmoe import compare, evaluate, inspect, profile
from scmoe.base.errors import ConfigError, Preempted
from scmoe.models.vision.augment import AugmentConfig
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.effects import check_typed
from scmoe.run.fields import with_field
from scmoe.train import train


def run_of(**fields) -> RunConfig:
  run = load_config(find_config("shapes_vit"), "smoke")
  mixed = AugmentConfig(flip=0.5, crop=2, mixup=0.8, cutmix=1.0, erase=0.5, label_smoothing=0.1)
  options = dataclasses.replace(run.train, steps=3, tensorboard=False, eval_batches=1, **fields)
  mesh = dataclasses.replace(run.mesh, data=1)
  return dataclasses.replace(run, augment=mixed, train=options, mesh=mesh)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """(workdir, final state) of a run that was not cut."""
  workdir = tmp_path_factory.mktemp("images") / "whole"
  return workdir, train(run_of(), workdir)


@pytest.mark.nightly  # by day test_average.py and test_loop.py
def test_a_resumed_run_is_bitwise_the_whole_one(whole, tmp_path):
  with pytest.raises(Preempted, match="stopped at step 1"):
    train(run_of(stop_after=1), tmp_path / "cut")
  resumed = train(run_of(), tmp_path / "cut")
  for a, b in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(a, b)


def test_commands_read_a_run_on_images(whole, tmp_path, capsys):
  workdir = str(whole[0])
  evaluate.main(["--workdir", workdir, "--json", str(tmp_path / "figures.json")])
  figures = json.loads((tmp_path / "figures.json").read_text())
  assert figures["images"] == 1000
  inspect.main(["--workdir", workdir])
  compare.main([workdir, "--out", str(tmp_path / "compare")])
  said = capsys.readouterr().out
  assert "top-5 accuracy" in said
  with np.load(whole[0] / "inspect/inspect.npz") as arrays:
    assert "saltire" in arrays["classes"]
    assert arrays["class_load_GCE"].shape[1] == 10
  assert f"{figures['accuracy']:.4f}" in said
  assert (tmp_path / "compare/compare.html").is_file()


@pytest.mark.nightly  # by day test_profile.py
def test_the_profile_of_a_step_on_images(tmp_path, capsys):
  sizes = ("model.num_layers=2", "mesh.data=1", "overlap.search_seconds=0")
  fields = [f"--config.{text}" for text in sizes]
  argv = ["--config=shapes_vit", "--smoke", "--rounds=1", "--calls=1", f"--workdir={tmp_path}"]
  profile.main([*argv, *fields])
  said = capsys.readouterr().out
  assert "training step of shapes_vit" in said
  for stage in ("embedding", "attention", "experts", "optimizer"):
    assert f"\n{stage} " in said
  assert (tmp_path / "overlap.html").is_file()


@pytest.mark.parametrize(
  ("config", "field", "said"),
  [
    ("quickstart", "augment.flip=0.5", "augment.flip=0.5 has no effect: model.architecture='gpt'"),
    ("quickstart", "model.vision.size=16", "set model.architecture=vit or swin"),
    ("cifar10_vit", "model.vision.window=2", "has no stages; set model.architecture=swin"),
    ("cifar10_swin", "model.num_layers=4", "model.vision.depths='2,6,2'; set model.vision.depths"),
    ("shapes_vit", "augment.mix_share=0.5", "augment.mixup=0 and augment.cutmix=0 mix nothing"),
    ("shapes_vit", "augment.erase_most=0.5", "augment.erase=0 erases nothing"),
    ("shapes_vit", "data.path=x", "data.source='shapes' reads no path; set data.source=images"),
    ("shapes_vit", "data.label_field=y", "data.source='shapes' reads no columns"),
    ("shapes_vit", "data.seq_len=32", "images of 16 pixels in patches of 4 have 4 x 4 tokens"),
    ("shapes_vit", "data.tokenizer=bpe", "model.architecture='vit' reads images, not text"),
  ],
)
def test_options_that_change_nothing_are_refused(config, field, said):
  name, _, text = field.partition("=")
  run = with_field(load_config(find_config(config)), name, text)
  with pytest.raises(ConfigError) as caught:
    check_typed(run, [name])
  assert said in str(caught.value)


def test_options_that_change_something_are_taken():
  swin = load_config(find_config("cifar10_swin"))
  names = ("model.vision.depths", "model.vision.last_wiring", "augment.mix_share", "data.path")
  check_typed(swin, names)
