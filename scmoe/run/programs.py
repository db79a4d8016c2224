"""Compiled functions of the commands beside training: evaluation, prefill, decode.

They are compiled as the step is: with latency hiding, and where GPUs exchange rows a second time
with the times of their first calls (`scmoe.training.guided`). They print nothing of that: their
output is text or a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from scmoe.blocks.options import OverlapConfig
from scmoe.training.guided import GuidedStep
from scmoe.training.search import PROFILES


class Programs:
  """A `GuidedStep` for each jitted function and shapes of arguments: what `prepare` options take.

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
    """Whether all that were called are compiled as they stay."""
    return all(program.settled for program in self._programs.values())

  @property
  def compiled(self) -> list[Any]:
    """What XLA has made of each, as `jax.stages.Compiled`."""
    found = (program.program for program in self._programs.values())
    return [program.compiled for program in found if program is not None]
