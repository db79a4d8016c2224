"""One training step in several variants.

All variants have the same state, so that a run can change the variant from one step to the next
without moving a parameter (Tutel's runtime switching). A variant's step is built at its first use
and kept; `scmoe.training.fastest` finds the fastest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type, check_whole
from scmoe.training.guided import GuidedStep
from scmoe.training.options import tuned_values
from scmoe.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Variant:
  """The options in which steps of a run may differ; None: as the run is configured.

  `top_k` and `capacity_factor` may change the result, as may a change between a `transport` that
  drops choices and one that does not. Where choices are dropped, `chunks` may change it, too: an
  expert's capacity is rounded up to a multiple of them. The others say when and by how many thread
  blocks rows are computed, and how and when rows and expert parameters travel between devices;
  unless `dispatch.ablation` is on, they change the result by rounding at most.

  Attributes:
    transport: `dispatch.transport`; `train.tune` takes capacity, packed, dropless, per_rank.
    schedule, order: `overlap.schedule` and `overlap.order`.
    adaptive_r: `dispatch.adaptive_r` (Tutel adaptive_r).
    chunks: `dispatch.chunks` (Tutel a2a_ffn_overlap_degree).
    num_sms: `model.ffn.num_sms`.
    top_k: `model.top_k` (Tutel top_k).
    capacity_factor: `dispatch.capacity_factor` (Tutel capacity_factor); 0 drops nothing.

  Raises:
    ConfigError: a value is of another type, or is a whole number below 0 where one is asked for.
  """

  transport: str | None = None
  schedule: str | None = None
  order: str | None = None
  adaptive_r: int | None = None
  chunks: int | None = None
  num_sms: int | None = None
  top_k: int | None = None
  capacity_factor: float | None = None

  def __str__(self) -> str:
    return " ".join(f"{k}={v!r}" for k, v in self.given.items()) or "as configured"

  def __post_init__(self) -> None:
    for name in ("transport", "schedule", "order"):
      if (value := getattr(self, name)) is not None:
        check_type(name, value, str)
    for name in ("adaptive_r", "chunks", "num_sms", "top_k"):
      if (value := getattr(self, name)) is not None:
        check_whole(name, value, 0)
    factor = self.capacity_factor
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
      raise ConfigError(f"capacity_factor={factor!r} must be a number, e.g. 1.25; 0 drops nothing")

  @property
  def given(self) -> dict[str, Any]:
    """The fields that are not None, by name."""
    return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


# A function from one variant, for example the fastest so far, to another that may be faster.
Change = Callable[[Variant], Variant]


def parse_candidates(text: str) -> tuple[Variant, ...]:
  """All combinations of the values in `text`: "adaptive_r=0,1 chunks=1,2" gives four variants.

  The empty text gives one, `Variant()`: as configured.

  Raises:
    ConfigError: see `tuned_values`.
  """
  choices = tuned_values(text)
  return tuple(
    Variant(**dict(zip(choices, values))) for values in itertools.product(*choices.values())
  )


class StepVariants:
  """Training steps by variant; each is built at its first use and compiled at its first call.

  A caller may compile it earlier (`GuidedStep.compile`).

  Args:
    make: variant -> its step. All steps have the same state and shardings.
  """

  def __init__(self, make: Callable[[Variant], GuidedStep]):
    self._make = make
    self._steps: dict[Variant, GuidedStep] = {}

  def __call__(
    self, state: TrainState, batch: Batch, variant: Variant | None = None
  ) -> tuple[TrainState, dict, dict]:
    """Runs one step of a variant, by default of the run as configured."""
    return self.step(variant or Variant())(state, batch)

  def step(self, variant: Variant) -> GuidedStep:
    """The step of a variant, built if it is new."""
    if variant not in self._steps:
      self._steps[variant] = self._make(variant)
    return self._steps[variant]

  @property
  def variants(self) -> tuple[Variant, ...]:
    """The variants whose steps have been built so far."""
    return tuple(self._steps)
