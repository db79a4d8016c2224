"""Makes a run of this project step 0 of a run with another wiring: `scmoe.convert --from RUN`.

`scmoe.pretrained.upcycle` says which parameter becomes which; `scmoe.pretrained.imported` does the
same with a released model's folder. With text, the norm of a new shortcut can be fitted
(`scmoe.inference.norm_fit`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import jax
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import number
from scmoe.data import Tokenizer
from scmoe.inference.norm_fit import FittedNorm, fit_norms, norm_to_fit
from scmoe.models.flops import count_parameters
from scmoe.pretrained.imported import check_new, new_run, said_of, upcycled
from scmoe.pretrained.inference_files import MANIFEST
from scmoe.pretrained.stream import nested
from scmoe.pretrained.upcycle import Upcycling, plan
from scmoe.run import build, placement
from scmoe.run.config import RunConfig
from scmoe.run.modality import modality_of, with_other_data
from scmoe.run.opened import Stored, open_run, weights_of
from scmoe.run.successor import check_source, successor, write_successor
from scmoe.run.text import load_tokenizer, with_tokenizer
from scmoe.training.restore import FOLDER, list_steps, with_newest

_UNIT = "params.stages.units.0."


def is_run(path: Path) -> bool:
  """Whether a folder holds a run with a checkpoint.

  Raises:
    ConfigError: it holds an inference checkpoint, from which no run can begin.
  """
  if (path / MANIFEST).is_file():
    raise ConfigError(
      f"--from={str(path)!r} is an inference checkpoint; give the folder of the run that it was "
      "written from"
    )
  return bool(list_steps(path / FOLDER))


class Fit(NamedTuple):
  """Text to which the norm of a new shortcut is fitted.

  Attributes:
    sequences: number of training sequences.
    text: file or folder; "": the data of the source.
  """

  sequences: int
  text: str = ""


def upcycle_run(
  path: Path,
  workdir: Path,
  *,
  upcycle: str,
  step: int | None = None,
  mesh: str = "",
  ema: bool = False,
  fit: Fit | None = None,
) -> str:
  """Makes a run's model step 0 of a run of another architecture; returns lines for the user.

  The new run has the source's configuration, but for its architecture, adapters (they are merged),
  `train.init_from`, and the teacher, which only a run of preferences keeps.

  Args:
    path: folder of the source.
    workdir: folder of the new run.
    upcycle: which architecture; see `scmoe.pretrained.upcycle`.
    step: step of the source's checkpoint; None: the newest.
    mesh: see `--mesh`.
    ema: the moving average of the source's weights instead of its weights.
    fit: the text to which the norm of the new shortcut is fitted; None: it stays a copy.

  Raises:
    ConfigError: the request is empty or does not fit the source, the source reads images or keeps
      no average, the workdir has a run already, or there is no norm to fit.
    DataError: the text to fit to cannot be read.
    CheckpointError: there is no such step, or it is damaged.
    StorageError: the new run cannot be written.
  """
  started = time.monotonic()
  check_new(workdir)
  if not upcycle:
    raise ConfigError(
      f"--from={str(path)!r} is a run of this project, not a released model; add --upcycle with "
      "another wiring, or name it in train.init_from"
    )

  def opened_step() -> tuple[Stored, Tokenizer, build.Built, Upcycling, dict[str, Array]]:
    stored = open_run(str(path), step)
    check_source(stored.run, "upcycle")
    tokenizer = load_tokenizer(stored.run, str(path))
    source = build.build(placement.on_mesh(stored.run, mesh))
    planned = plan(upcycle, source.run.model, source.run.router)
    leaves = weights_of(path, stored.run, source, stored.step, ema)
    return stored, tokenizer, source, planned, leaves

  stored, tokenizer, source, planned, leaves = with_newest(opened_step, step)
  run = _begun(source.run, planned, tokenizer, workdir)
  built = build.build(run, list(source.mesh.devices.flat))
  if fit:
    check_fit(source.run, planned, source.mesh.size)
  fitted: list[str] = []
  with new_run(workdir) as keeper:
    found, begun = upcycled(leaves, built, planned)
    if fit:
      norm = _fitted(fit, path, (source, leaves), (built, found))
      for part, value in (("scale", norm.scale_LD), ("bias", norm.bias_LD)):
        if value is not None:
          name = f"{_UNIT}{norm_to_fit(run.model)}.{part}"
          found[name] = jax.device_put(value, found[name].sharding)
          begun[name] = "fitted to what the experts read in the source"
      fitted = _said(norm)
    write_successor(keeper, workdir, built, found, source=stored.run, tokenizer=tokenizer)
  counts = count_parameters(run.model, built.shapes)
  return "\n".join([
    f"{stored.run.model.wiring} of {path}, step {stored.step}: {number(counts.total)} parameters "
    f"({number(counts.active)} active) in {time.monotonic() - started:.1f} s",
    said_of(run.model, begun),
    *fitted,
    f"next: python -m scmoe.evaluate --workdir {workdir}",
    f"      python -m scmoe.train --config_json {workdir}/config.json --workdir {workdir} "
    f"--config.train.teacher={path}",
  ])  # fmt: skip


def _begun(source: RunConfig, planned: Upcycling, tokenizer: Tokenizer, workdir: Path) -> RunConfig:
  """The resolved configuration of the new run."""
  overlap = source.overlap
  if planned.model.wiring != source.model.wiring:
    # A schedule names steps, of which another wiring has others.
    overlap = dataclasses.replace(overlap, schedule=type(overlap)().schedule)
  changed = dataclasses.replace(source, model=planned.model, router=planned.router, overlap=overlap)
  return successor(changed, tokenizer, workdir, keep_teacher=False)


def check_fit(source: RunConfig, planned: Upcycling, devices: int) -> None:
  """Checks that the new model has a norm that can be fitted.

  Raises:
    ConfigError: it has none, or its experts read what they read in the source.
  """
  model = planned.model
  if not norm_to_fit(model):
    raise ConfigError(
      f"--fit is of the norm of a shortcut, which wiring={model.wiring!r} lacks; leave --fit out"
    )
  if planned.moves:
    raise ConfigError(
      f"--fit has nothing to fit: under wiring={model.wiring!r} with model.moe_every=1 the experts "
      "move to the next layer and read what they read before; leave --fit out"
    )
  if not planned.norm or not source.model.wiring_rule.taps or source.model.dense_indices:
    raise ConfigError(
      "--fit needs a source of another wiring, with experts and without model.dense_layers; leave "
      "--fit out"
    )
  if devices > 1:
    raise ConfigError(f"--fit runs on one device, got a mesh of {devices}; give --mesh=data=1")


def _fitted(
  fit: Fit,
  path: Path,
  source: tuple[build.Built, dict[str, Array]],
  new: tuple[build.Built, dict[str, Array]],
) -> FittedNorm:
  """The new model's norm, fitted to the first training sequences of the text.

  Args:
    fit: the text.
    path: folder of the source, which holds its tokenizer.
    source, new: the two models, and their parameters and router state by dotted name.
  """
  run = source[0].run
  run = with_other_data(run, fit.text) if fit.text else run
  data = with_tokenizer(run.data, path)
  rows = min(run.train.batch_size, fit.sequences)
  train = dataclasses.replace(run.train, batch_size=rows)
  batches = modality_of(run).open_data(dataclasses.replace(run, data=data, train=train)).train()
  some = itertools.islice(batches, -(-fit.sequences // rows))
  models = []
  for built, leaves in (source, new):
    params = nested(leaves, {"params": built.shapes})["params"]
    models.append(built.model(jax.jit(built.objective.cast)(params)))
  router = {n.removeprefix("router."): x for n, x in source[1].items() if n.startswith("router.")}
  return fit_norms(models[0], models[1], some, router)


def _said(norm: FittedNorm) -> list[str]:
  """A line for the user: how near the experts of each pair are to what they read before."""
  shown = lambda values: ", ".join(f"{value:.3f}" for value in values)
  return [
    f"norm of the shortcut, fitted to {norm.tokens:,} tokens; squared distance from what the "
    f"experts read before, of each pair: copied {shown(norm.copied_L)}; fitted "
    f"{shown(norm.fitted_L)}"
  ]
