"""Compiles programs of a run's start, and runs none: `scmoe.train --compile_only`."""

from __future__ import annotations

import os

from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.description import flatten
from scmoe.training.fastest import fastest_step
from scmoe.training.filed import is_in_file
from scmoe.training.fingerprint import compile_survey
from scmoe.training.interfaces import Trainable, abstract_batch
from scmoe.training.workdir import prepare_workdir


def compile_only(built: Trainable, workdir: str | os.PathLike[str]) -> None:
  """Compiles the training step and the check of a checkpoint's arrays into jax's compilation cache.

  That is the run's own cache, unless the user set another (`kept_programs`). A later start on as
  many processes and devices finds there whichever of the two took long enough to compile to be
  kept. No state is made and the run's lock is not taken, so the run may train meanwhile. Where a
  start would measure variants of the step (`overlap.schedule=auto`, `train.tune`), the variant that
  an earlier start kept is compiled, or else the step as configured; with `dispatch.overflow=repeat`
  its program without overflow rounds alone. All processes of the run must call it.

  Args:
    built: the model and its options.
    workdir: of the run.

  Raises:
    ConfigError: `train.tune` is malformed; the step that is to be compiled does not fit the run; or
      the folder cannot be a run's.
    StorageError: the folder cannot be written.
  """
  folder = prepare_workdir(workdir)
  with kept_programs(folder / PROGRAMS):
    abstract = built.abstract_state()
    step = fastest_step(built, abstract, folder, measures=False)
    step.compile(abstract, abstract_batch(built))
    stored = flatten(abstract.for_checkpoint()).values()
    # Arrays for files lie in the host's memory when they are checked. The host checks them itself,
    # so no program of the device is compiled for them.
    compile_survey([x for x in stored if not is_in_file(x)])
