"""One training step in several variants, and the choice of the fastest while training runs.

The state is the same for all of them, so that changing the variant from one step to the next moves
no parameter: Tutel's runtime switching, and the tuner that its paper describes. Each variant is
compiled when it is first used and kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from scmoe.batch import Batch
from scmoe.errors import ConfigError
from scmoe.training.guided import GuidedStep
from scmoe.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Variant:
  """What a step may do differently; None keeps what the run is configured with.

  `adaptive_r` and `chunks` change how rows travel and never the result, so the tuner may choose
  them. `top_k` and `capacity_factor` change the function that is computed.

  Attributes:
    adaptive_r: `dispatch.adaptive_r` (Tutel adaptive_r).
    chunks: `dispatch.chunks` (Tutel a2a_ffn_overlap_degree).
    top_k: `model.top_k` (Tutel top_k).
    capacity_factor: `dispatch.capacity_factor` (Tutel capacity_factor); 0 drops nothing.
  """

  adaptive_r: int | None = None
  chunks: int | None = None
  top_k: int | None = None
  capacity_factor: float | None = None

  def __str__(self) -> str:
    given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
    return " ".join(f"{name}={value}" for name, value in given.items()) or "as configured"


TUNABLE = ("adaptive_r", "chunks")


def parse_candidates(text: str) -> tuple[Variant, ...]:
  """All combinations of a specification such as "adaptive_r=0,1 chunks=1,2,4".

  Raises:
    ConfigError: a word is no tunable field, or a value no whole number.
  """
  choices: dict[str, list[int]] = {}
  for part in text.split():
    name, _, values = part.partition("=")
    if name not in TUNABLE or not all(v.isdigit() for v in values.split(",")):
      raise ConfigError(
        f"train.tune={text!r}: {part!r} is not of the form NAME=N,N with a NAME of: "
        f"{', '.join(TUNABLE)}; e.g. 'adaptive_r=0,1 chunks=1,2'"
      )
    choices[name] = [int(v) for v in values.split(",")]
  return tuple(
    Variant(**dict(zip(choices, values))) for values in itertools.product(*choices.values())
  )


class StepVariants:
  """Training steps by variant, each made once and compiled by its first call.

  Args:
    make: builds the jitted step of a variant. Steps share the state and its shardings.
  """

  def __init__(self, make: Callable[[Variant], GuidedStep]):
    self._make = make
    self._steps: dict[Variant, GuidedStep] = {}

  def __call__(
    self, state: TrainState, batch: Batch, variant: Variant | None = None
  ) -> tuple[TrainState, dict, dict]:
    """One step of the given variant, by default of the run as configured."""
    return self.step(variant or Variant())(state, batch)

  def step(self, variant: Variant) -> GuidedStep:
    """The step of a variant, built if it is new."""
    if variant not in self._steps:
      self._steps[variant] = self._make(variant)
    return self._steps[variant]

  @property
  def variants(self) -> tuple[Variant, ...]:
    """What has been built so far."""
    return tuple(self._steps)


class Tuner:
  """Trains with every candidate in turn, measures, and stays with the fastest.

  Every step that it measures is an ordinary training step. The first step of a candidate compiles
  and is not counted. Processes follow process 0, so that all run the same program.

  Args:
    steps: the variants.
    candidates: among them.
    rounds: measured steps per candidate; the median decides.
    say: called with a line when the choice is made.
    clock: seconds.
  """

  def __init__(
    self,
    steps: StepVariants,
    candidates: Sequence[Variant],
    *,
    rounds: int = 3,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.steps, self.candidates, self.rounds = steps, tuple(candidates), rounds
    self.seconds: dict[Variant, list[float]] = {c: [] for c in self.candidates}
    self.chosen: Variant | None = None
    self._say, self._clock = say, clock
    # Compile each, then measure in turns, so that drift of the machine meets all alike.
    self._plan = [(c, False) for c in self.candidates]
    self._plan += [(c, True) for _ in range(rounds) for c in self.candidates]

  @property
  def compiles_next(self) -> bool:
    """Whether the next call compiles, which takes long."""
    if not self._plan:
      return False
    variant, counts = self._plan[0]
    return not counts or self.steps.step(variant).compiles_next

  def compile(self, *args: Any) -> None:
    """Compiles every candidate for arguments of these shapes."""
    for candidate in self.candidates:
      self.steps.step(candidate).compile(*args)

  def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict, dict]:
    """One training step."""
    if not self._plan:
      return self.steps(state, batch, self.chosen)
    variant, counts = self._plan.pop(0)
    jax.block_until_ready(state)
    start = self._clock()
    result = jax.block_until_ready(self.steps(state, batch, variant))
    if counts:
      self.seconds[variant].append(self._clock() - start)
    if not self._plan:
      self._choose()
    return result

  def medians(self) -> dict[Variant, float]:
    """Seconds per step of what was measured."""
    return {c: statistics.median(s) for c, s in self.seconds.items() if s}

  def _choose(self) -> None:
    medians = self.medians()
    best = min(range(len(self.candidates)), key=lambda i: medians[self.candidates[i]])
    if jax.process_count() > 1:
      best = int(multihost_utils.broadcast_one_to_all(best))
    self.chosen = self.candidates[best]
    figures = ", ".join(f"{c}: {1e3 * s:.1f} ms" for c, s in medians.items())
    self._say(f"tuner: {self.chosen} is the fastest of {figures}")


def tuned_step(
  make: Callable[[Variant], GuidedStep], candidates: str, rounds: int, **options: Any
) -> GuidedStep | Tuner:
  """The step that the trainer calls: as configured, or tuned where there are candidates."""
  steps = StepVariants(make)
  variants = parse_candidates(candidates)
  if len(variants) < 2:
    return steps.step(variants[0] if variants else Variant())
  return Tuner(steps, variants, rounds=rounds, **options)
