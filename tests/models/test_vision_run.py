"""A run on images that is stopped and resumed is bitwise the one that was not."""

import dataclasses

import jax
import numpy as np
import pytest

from scmoe.base.errors import Preempted
from scmoe.models.vision.augment import AugmentConfig
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.train import train


def run_of(**fields) -> RunConfig:
  run = load_config(find_config("shapes_vit"), "smoke")
  mixed = AugmentConfig(flip=0.5, crop=2, mixup=0.8, cutmix=1.0, erase=0.5, label_smoothing=0.1)
  options = dataclasses.replace(run.train, steps=3, tensorboard=False, eval_batches=1, **fields)
  mesh = dataclasses.replace(run.mesh, data=1)
  return dataclasses.replace(run, augment=mixed, train=options, mesh=mesh)


def test_a_resumed_run_is_bitwise_the_whole_one(tmp_path):
  whole = train(run_of(), tmp_path / "whole")
  with pytest.raises(Preempted, match="stopped at step 1"):
    train(run_of(stop_after=1), tmp_path / "cut")
  resumed = train(run_of(), tmp_path / "cut")
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(a, b)
