"""Configurations leave at their smoke size: all of a released family, and one that has none."""

import dataclasses

import jax
import numpy as np
import pytest
from covering import night

from scmoe.pretrained import own
from scmoe.pretrained.families import write_config
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.stream import flat
from scmoe.run.build import build, vocab_size
from scmoe.run.config_files import config_names, find_config, load_config
from scmoe.run.exported import export_model
from scmoe.run.placement import single_device
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import restore_stored


def family_of(run):
  resolved = run.resolve(num_devices=1, vocab_size=vocab_size(run.data))
  return write_config(resolved.model, resolved.router)["model_type"]


def has_family(name):
  run = load_config(find_config(name))
  one = dataclasses.replace(run.mesh, data=1, expert=1, tensor=1)
  return not run.model.reads_images and family_of(dataclasses.replace(run, mesh=one)) != own.FAMILY


WITH_FAMILY = [name for name in config_names() if has_family(name)]


def test_some_have_one():
  assert {"upcycle_small", "longcat_flash_small"} <= set(WITH_FAMILY)
  assert "quickstart" not in WITH_FAMILY


@pytest.mark.parametrize("name", [*map(night, WITH_FAMILY), "quickstart"])
def test_a_smoke_run_is_exported_and_comes_in_again(name, tmp_path):
  run = load_config(find_config(name), "smoke")
  one = dataclasses.replace(run.mesh, data=1, expert=1, tensor=1)
  run = dataclasses.replace(run, mesh=one)
  built = build(single_device(run.resolve(num_devices=1, vocab_size=vocab_size(run.data))))
  params, state = jax.jit(built.init, out_shardings=built.shardings)(jax.random.key(0))
  meta = {"config": built.config, "data_fingerprint": {}, "mesh": dict(built.mesh.shape),
          "processes": 1, "tokens": 0, WEIGHTS_ONLY: True}  # fmt: skip
  keeper = Checkpointer(tmp_path / "run", CheckpointConfig(async_save=False))
  keeper.save_now(3, {"params": params, "router": state}, {}, meta)
  keeper.close()
  assert family_of(load_config(find_config(name))) in export_model(tmp_path / "run", tmp_path / "m")
  import_model(str(tmp_path / "m"), tmp_path / "again", mesh="data=1")
  wanted = flat({"params": params, "router": state})
  wanted = {n: x for n, x in wanted.items() if not n.startswith("router.error")}  # a controller's
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted
  )
  found = restore_stored(tmp_path / "again", shapes, 0)
  assert ("router.bias" in found) == (run.router.bias != "none")
  for leaf, value in wanted.items():
    np.testing.assert_array_equal(np.asarray(found[leaf]), np.asarray(value), leaf)
