"""Compiled functions of the commands beside training: evaluation, prefill, decode.

They are compiled as the step is: with latency hiding, and where GPUs exchange rows a second time
with the times of their first calls (`scmoe.training.guided`). They print nothing of that: their
output is text or a table.
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
from scmoe.training.guided import GuidedStep
from scmoe.training.search import PROFILES

MOST_BYTES = 4 * 2**30  # of the programs in the user's cache; the oldest go first


class Programs:
  """Makes a `GuidedStep` for each jitted function and each set of argument shapes.

  The `prepare` options of evaluation and generation take one.

  Args:
    overlap: of the run, on this machine (`scmoe.run.build.derived_overlap`).
    folder: where profiles are kept.
  """

  def __init__(self, overlap: OverlapConfig, folder: Path):
    self.overlap, self.folder = overlap, Path(folder) / PROFILES
    self._programs: dict[Any, GuidedStep] = {}

  def __call__(self, function: Any) -> Any:
    """A function that is called like this jitted one."""

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
    """True if no called program will be compiled again."""
    return all(program.settled for program in self._programs.values())

  @property
  def compiled(self) -> list[Any]:
    """XLA's result for each, as `jax.stages.Compiled`."""
    found = (program.program for program in self._programs.values())
    return [program.compiled for program in found if program is not None]


@contextlib.contextmanager
def user_programs() -> Iterator[None]:
  """Keeps what a command compiles in the user's cache folder, where its next call loads it.

  Training keeps its programs in the run's folder. A command that opens a run loads none from there,
  since programs are machine code and the folder may come from a stranger (SECURITY.md).
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
