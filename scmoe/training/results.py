"""The results of a training step, on the devices until the host reads them."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np


class Results(Protocol):
  """A step's report, on the devices until it is read."""

  @property
  def arrays(self) -> dict[str, Any]:
    """The step's figures of each layer with experts, by name: arrays [layers, ...]."""
    ...

  def values(self) -> dict[str, Any]:
    """The step's scalar figures by name, as numbers of Python; waits until the step is done."""
    ...


@dataclasses.dataclass(frozen=True)
class Reported:
  """The `Results` of a step of one run: scalars and per-layer arrays on the devices."""

  scalars: dict[str, Any]
  arrays: dict[str, Any]

  def values(self) -> dict[str, Any]:
    """The scalars as numbers of Python, by name; waits until the step is done."""
    return {name: np.asarray(x).item() for name, x in jax.device_get(self.scalars).items()}
