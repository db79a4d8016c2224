"""Runs with random adapters, as training would store them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np

from scmoe.models.low_rank import Adapters, LoraConfig
from scmoe.pretrained.imported import import_model
from scmoe.run.adapters import BASE, digest_of_base
from scmoe.run.build import build
from scmoe.run.config import to_dict
from scmoe.run.opened import open_run
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import FOLDER, restore_part

GOLDEN = Path(__file__).resolve().parent / "golden" / "released"
RANK, ALPHA = 2, 3.0


def adapted_run(case: str, workdir: Path, targets: str = "attention,experts") -> Path:
  """Writes a run that adapts a recorded model; see `adapt`."""
  import_model(str(GOLDEN / case), workdir / "imported", mesh="data=1")
  shutil.move(workdir / "imported" / FOLDER, workdir / BASE / FOLDER)
  shutil.rmtree(workdir / "imported")  # as a run that has copied its base, without source.json
  return adapt(workdir, targets)


def adapt(
  workdir: Path, targets: str = "attention,experts", *, step: int = 4, bias: float = 0.0
) -> Path:
  """Writes a step of a run with random A and B of the model in WORKDIR/base.

  The average holds twice of each. Balancing biases are those of the base plus `bias`.
  """
  lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, base=digest_of_base(workdir))
  run = open_run(str(workdir / BASE), None).run
  optimizer = dataclasses.replace(run.optimizer, ema=0.5)
  begun = dataclasses.replace(run.train, init_from="the model that was copied to base")
  run = dataclasses.replace(run, lora=lora, optimizer=optimizer, train=begun)
  built = build(run, jax.devices()[:1])
  random = np.random.default_rng(3)
  draw = lambda x: jax.device_put(random.normal(0, 0.2, x.shape).astype(np.float32), x.sharding)
  params = jax.tree.map(draw, Adapters(lora, built.shapes).shapes)
  average = jax.tree.map(lambda x: 2 * x, params)
  state = {"params": params, "average": average}
  if built.router_shapes:
    state |= restore_part(workdir / BASE, {"router": built.router_shapes})
    state["router"] |= {"bias": state["router"]["bias"] + bias}
  keeper = Checkpointer(workdir, CheckpointConfig(async_save=False))
  keeper.save_now(step, state, {}, {"config": to_dict(run), "processes": 1, WEIGHTS_ONLY: True})
  keeper.close()
  return workdir
