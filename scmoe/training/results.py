"""The results of a training step, which the host reads later."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np


class Results(Protocol):
  """A step's report, to be read when the host needs it."""

  @property
  def arrays(self) -> dict[str, Any]:
    """The step's figures of each layer with experts, by name: arrays [layers, ...]."""
    ...

  def values(self) -> dict[str, Any]:
    """The step's scalar figures by name, as numbers of Python; waits until the step is done."""
    ...


@dataclasses.dataclass(frozen=True)
class Reported:
  """The `Results` of a step of one run: scalars and per-layer arrays as the step returned them."""

  scalars: dict[str, Any]
  arrays: dict[str, Any]

  def values(self) -> dict[str, Any]:
    """The scalars as numbers of Python, by name; waits until the step is done."""
    return {name: np.asarray(x).item() for name, x in jax.device_get(self.scalars).items()}
