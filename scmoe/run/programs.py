"""Compiles the functions of commands other than training: evaluation, prefill, decode.

They are compiled like the training step: with XLA's latency-hiding scheduler, and, where GPUs
exchange rows, a second time with the instruction times measured in their first calls
(`scmoe.training.guided`). Nothing is printed about it, since these commands print text or a table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from scmoe.blocks.options import OverlapConfig
from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.fastest import PROFILES
from scmoe.training.guided import GuidedStep

MOST_BYTES = 4 * 2**30  # size of the user's cache of programs; the least recently used go first


class Programs:
  """Makes a `GuidedStep` for each jitted function and each set of argument shapes.

  Evaluation and generation take a `Programs` as their option `prepare`.

  Args:
    overlap: the run's overlap options on this machine (`scmoe.run.model.derived_overlap`).
    folder: where profiles are kept.
  """

  def __init__(self, overlap: OverlapConfig, folder: Path):
    self.overlap, self.folder = overlap, Path(folder) / PROFILES
    self._programs: dict[Any, GuidedStep] = {}

  def __call__(self, function: Any) -> Any:
    """A function with the arguments of this jitted one, which compiles at its first call."""

    def call(*args: Any) -> Any:
      shapes = tuple((x.shape, x.dtype) for x in map(jax.typeof, jax.tree.leaves(args)))
      program = self._programs.get((function, shapes))
      if program is None:
        program = GuidedStep(function, self.overlap, self.folder, say=lambda line: None)
        self._programs[function, shapes] = program
      return program(*args)

    return call

  @property
  def settled(self) -> bool:
    """True if none of the programs called so far will be compiled again."""
    return all(program.settled for program in self._programs.values())

  @property
  def compiled(self) -> list[Any]:
    """The compiled programs, each a `jax.stages.Compiled`."""
    found = (program.program for program in self._programs.values())
    return [program.compiled for program in found if program is not None]


@contextlib.contextmanager
def user_programs() -> Iterator[None]:
  """Stores the programs that a command compiles in the user's cache folder, for its next call.

  Training stores its programs in the run's folder. Other commands do not load those, since programs
  are machine code and a run's folder may come from a stranger (SECURITY.md).
  """
  root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
  folder = root / "scmoe" / PROGRAMS
  with contextlib.suppress(OSError):  # another process may delete the same files
    _make_room(folder, MOST_BYTES)
  with kept_programs(folder):
    yield


def _make_room(folder: Path, most: int) -> None:
  """Deletes the files that were used longest ago until at most `most` bytes remain."""
  files = [(file, file.stat()) for file in folder.rglob("*") if file.is_file()]
  files.sort(key=lambda item: max(item[1].st_atime, item[1].st_mtime))
  size = sum(stat.st_size for _, stat in files)
  for file, stat in files:
    if size <= most:
      return
    file.unlink()
    size -= stat.st_size
