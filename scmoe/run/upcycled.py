"""Makes a run of this project step 0 of a run with another wiring: `scmoe.convert --from RUN`.

`scmoe.pretrained.upcycle` says which parameter becomes which; `scmoe.pretrained.imported` does the
same with a released model's folder.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import number
from scmoe.base.stored import write_json
from scmoe.data import Tokenizer
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer
from scmoe.models.flops import count_parameters
from scmoe.pretrained.imported import check_new, new_run, said_of, save_start, upcycled
from scmoe.pretrained.inference_files import MANIFEST
from scmoe.pretrained.upcycle import Upcycling, plan
from scmoe.run import build, placement
from scmoe.run.config import RunConfig
from scmoe.run.modality import needs_text
from scmoe.run.opened import Stored, open_run, weights_of
from scmoe.run.text import load_tokenizer, store_tokenizer
from scmoe.training.options import TrainConfig
from scmoe.training.restore import FOLDER, list_steps, with_newest


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


def upcycle_run(
  path: Path,
  workdir: Path,
  *,
  upcycle: str,
  step: int | None = None,
  mesh: str = "",
  ema: bool = False,
) -> str:
  """Makes a run's model step 0 of a run of another architecture; returns lines for the user.

  The new run has the source's configuration, but for its architecture, adapters (they are merged),
  teacher and `train.init_from`.

  Args:
    path: folder of the source.
    workdir: folder of the new run.
    upcycle: which architecture; see `scmoe.pretrained.upcycle`.
    step: step of the source's checkpoint; None: the newest.
    mesh: see `--mesh`.
    ema: the moving average of the source's weights instead of its weights.

  Raises:
    ConfigError: the request is empty or does not fit the source, the source reads images or keeps
      no average, or the workdir has a run already.
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
    needs_text(stored.run, "scmoe.convert --upcycle")
    tokenizer = load_tokenizer(stored.run, str(path))
    source = build.build(placement.on_mesh(stored.run, mesh))
    planned = plan(upcycle, source.run.model, source.run.router)
    leaves = weights_of(path, stored.run, source, stored.step, ema)
    return stored, tokenizer, source, planned, leaves

  stored, tokenizer, source, planned, leaves = with_newest(opened_step, step)
  run = _begun(source.run, planned, tokenizer, workdir)
  built = build.build(run, list(source.mesh.devices.flat))
  with new_run(workdir) as keeper:
    found, begun = upcycled(leaves, built, planned)
    store_tokenizer(tokenizer, workdir)
    write_json(workdir / "config.json", built.config)
    save_start(keeper, built, found)
  counts = count_parameters(run.model, built.shapes)
  return "\n".join([
    f"{stored.run.model.wiring} of {path}, step {stored.step}: {number(counts.total)} parameters "
    f"({number(counts.active)} active) in {time.monotonic() - started:.1f} s",
    said_of(run.model, begun),
    f"next: python -m scmoe.evaluate --workdir {workdir}",
    f"      python -m scmoe.train --config_json {workdir}/config.json --workdir {workdir} "
    f"--config.train.teacher={path}",
  ])  # fmt: skip


def _begun(source: RunConfig, planned: Upcycling, tokenizer: Tokenizer, workdir: Path) -> RunConfig:
  """The resolved configuration of the new run."""
  data, overlap = source.data, source.overlap
  if isinstance(tokenizer, JsonTokenizer):
    eos = tokenizer.token(tokenizer.eos_id)
    data = dataclasses.replace(data, tokenizer=str(workdir / TOKENIZER), eos_token=eos)
  if planned.model.wiring != source.model.wiring:
    # A schedule names steps, of which another wiring has others.
    overlap = dataclasses.replace(overlap, schedule=type(overlap)().schedule)
  usual = TrainConfig()
  names = ("init_from", "stop_after", "teacher", "teacher_share", "teacher_temperature")
  train = dataclasses.replace(source.train, **{name: getattr(usual, name) for name in names})
  run = dataclasses.replace(
    source,
    model=planned.model,
    router=planned.router,
    data=data,
    overlap=overlap,
    train=train,
    lora=type(source.lora)(),
  )
  return run.resolve(num_devices=jax.device_count(), vocab_size=0)
