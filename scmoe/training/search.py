"""The fastest way to run a step, found while it trains: `overlap.schedule=auto`, `train.tune`.

Which schedule hides most depends on the link, the sizes and the router's balance, and no model of
them was right everywhere (experiments/LOG.md). So the first steps of a run are run in several ways,
all of which compute the same, and the fastest stays. Every step of the search is an ordinary
training step: nothing is lost but the time to compile. The decision and all that it rests on lie in
WORKDIR/schedule.json, where a later start finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from scmoe.batch import Batch
from scmoe.blocks.options import OverlapConfig
from scmoe.profiling.program import latencies
from scmoe.training.distributed import all_agree, first_decides, from_all_processes, is_first
from scmoe.training.guided import Collect, GuidedStep
from scmoe.training.optimizer import Optimizer
from scmoe.training.options import TrainConfig
from scmoe.training.step import Objective, TrainState, make_train_step
from scmoe.training.variants import StepVariants, Variant, parse_candidates
from scmoe.training.workdir import write_json

PROFILES = "profile_guided"  # measured latencies of steps; see `GuidedStep`
SCHEDULE = "schedule.json"  # the decision; see `Decisions`
PROGRAMS = "programs"  # compiled, for jax's compilation cache
MOST_STEPS = 40
# What a decision depends on, beside the machine; the rest of a configuration changes no time.
SECTIONS = ("model", "router", "dispatch", "mesh", "overlap")
FIELDS = ("batch_size", "tokens_per_step", "remat", "tune")


class Search:
  """A training step that tries its variants, measures them in turns, and stays with the fastest.

  Call it like the step. The first candidate is what a start without a search would run: what comes
  after it is what the search costs, and it ends where `seconds` do. A candidate that would not fit
  into what is left, judged by the first one, is not begun. Processes follow process 0.

  Args:
    steps: the variants.
    candidates: among them; the first is always tried.
    rounds: measured steps of each; the median decides.
    seconds: that the others may take together, compilation included.
    most_steps: that are not yet the fastest's.
    keep: given the decision (`decision`) when it is made.
    chosen: by an earlier start: nothing is tried.
    say: prints a line.
    clock: seconds.
  """

  def __init__(
    self,
    steps: StepVariants,
    candidates: Sequence[Variant],
    *,
    rounds: int = 3,
    seconds: float = math.inf,
    most_steps: float = math.inf,
    keep: Callable[[dict[str, Any]], None] = lambda decision: None,
    chosen: Variant | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.steps, self.candidates, self.rounds = steps, tuple(candidates), rounds
    self.seconds, self.most_steps = seconds, most_steps
    self.measured: dict[Variant, list[float]] = {}
    self.prepared: dict[Variant, float] = {}  # seconds to compile and to profile
    self.untried: dict[Variant, str] = {}  # and why
    self.chosen = chosen
    self._keep, self._say, self._clock = keep, say, clock
    self._given: tuple[Any, ...] = ()
    self._began, self._calls = 0.0, 0
    self._visits = self._plan()
    self._visit: tuple[Variant, bool] | None = None

  @property
  def settled(self) -> bool:
    """Whether it has chosen, and what it has chosen is settled."""
    return self.chosen is not None and self.best.settled

  @property
  def best(self) -> GuidedStep:
    """The step that it has chosen."""
    assert self.chosen is not None, "not chosen yet"
    return self.steps.step(self.chosen)

  @property
  def compiles_next(self) -> bool:
    """Whether the next call compiles, which takes long."""
    if self.chosen is not None:
      return self.best.compiles_next
    if self._visit is None:
      return True
    variant, counts = self._visit
    return not counts or self.steps.step(variant).compiles_next

  def compile(self, *args: Any) -> None:
    """Compiles the first candidate for arguments of these shapes; the others in their turn."""
    if self.chosen is not None:
      return self.best.compile(*args)
    self._given = args
    self._visit = next(self._visits)

  def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict, dict]:
    """One training step."""
    if self.chosen is not None:
      return self.steps(state, batch, self.chosen)
    if self._visit is None:
      self.compile(state, batch)
    assert self._visit is not None
    variant, counts = self._visit
    jax.block_until_ready(state)
    start = self._clock()
    result = jax.block_until_ready(self.steps(state, batch, variant))
    if counts:
      self.measured.setdefault(variant, []).append(self._clock() - start)
    self._calls += 1
    self._visit = next(self._visits, None)
    if self._visit is None:
      self._choose()
    return result

  def medians(self) -> dict[Variant, float]:
    """Seconds per step of what was measured."""
    return {c: statistics.median(s) for c, s in self.measured.items()}

  def decision(self) -> dict[str, Any]:
    """What was chosen, from what, and what was not tried and why; JSON-able."""
    medians = self.medians()
    tried = [
      {
        "variant": c.given,
        "step_ms": round(1e3 * medians[c], 3) if c in medians else None,
        "steps_ms": [round(1e3 * s, 3) for s in self.measured.get(c, ())],
        "prepared_s": round(seconds, 1),
      }
      for c, seconds in self.prepared.items()
    ]
    untried = [{"variant": c.given, "why": why} for c, why in self.untried.items()]
    assert self.chosen is not None
    return {"chosen": self.chosen.given, "tried": tried, "not_tried": untried}

  def _plan(self) -> Iterator[tuple[Variant, bool]]:
    """(variant, whether its time counts) of every call, each decided when the one before is over.

    Compiles and profiles each, then measures in turns: drift of the machine meets all alike.
    """
    for candidate in self.candidates:
      if self.prepared and not self._affordable():
        self.untried[candidate] = "no time left"
        continue
      if self.prepared:
        self._say(f"schedule: trying {candidate}")
      start, step = self._clock(), self.steps.step(candidate)
      if not self._compiled(candidate):
        continue
      yield candidate, False
      while not step.settled:
        yield candidate, False
      self.prepared[candidate] = self._clock() - start
      if len(self.prepared) == 1:
        self._began = self._clock()
    if len(self.prepared) > 1:
      for _ in range(self.rounds):
        yield from ((candidate, True) for candidate in self.prepared)

  def _compiled(self, candidate: Variant) -> bool:
    """Compiles; a candidate that cannot be, e.g. for want of memory, is left out."""
    problem = None
    try:
      self.steps.step(candidate).compile(*self._given)
    except jax.errors.JaxRuntimeError as error:
      if not self.prepared:
        raise
      problem = " ".join(str(error).split())[:200]
    if all_agree(problem is None):
      return True
    self.untried[candidate] = f"does not compile: {problem or 'on another process'}"
    self._say(f"schedule: {candidate} {self.untried[candidate]}")
    return False

  def _affordable(self) -> bool:
    """Whether another candidate fits into what is left, if it takes as long as the first."""
    first = next(iter(self.prepared.values()))
    left = self.seconds - (self._clock() - self._began)
    calls = self._calls // len(self.prepared)
    steps = self._calls + calls + self.rounds * (len(self.prepared) + 1)
    return first_decides(first <= left and steps <= self.most_steps)

  def _choose(self) -> None:
    medians, tried = self.medians(), list(self.prepared)
    best = min(range(len(tried)), key=lambda i: medians.get(tried[i], 0.0))
    best = from_all_processes({"best": best})[0]["best"]
    self.chosen = tried[best]
    if len(tried) > 1:
      figures = ", ".join(f"{c}: {1e3 * s:.1f} ms" for c, s in medians.items())
      self._say(f"schedule: {self.chosen} is the fastest of {figures}")
    self._keep(self.decision())


class Searchable(Protocol):
  """What is trained, by what a search asks of it; `Trainable` of `scmoe.training.loop` is one."""

  @property
  def train(self) -> TrainConfig: ...
  @property
  def overlap(self) -> OverlapConfig: ...
  @property
  def config(self) -> dict[str, Any]: ...
  @property
  def objective(self) -> Objective: ...
  @property
  def optimizer(self) -> Optimizer: ...
  @property
  def candidates(self) -> Sequence[Variant]: ...
  def variant(self, variant: Variant) -> Objective: ...


def fastest_step(
  built: Searchable,
  abstract: TrainState,
  folder: Path,
  *,
  gpu: bool | None = None,
  collect: Collect = latencies,
  say: Callable[[str], None] = print,
) -> GuidedStep | Search:
  """The step as configured or as an earlier start chose it, or one that finds the fastest.

  Args:
    built: what is trained.
    abstract: shapes of its state.
    folder: where profiles, decisions and programs are kept.
    gpu, collect, say: as of `GuidedStep`.
  """
  train, overlap = built.train, built.overlap

  def make(variant: Variant) -> GuidedStep:
    objective = built.objective if variant == Variant() else built.variant(variant)
    dtype = overlap.gradient_dtype
    step = make_train_step(objective, built.optimizer, abstract, gradient_dtype=dtype)
    return GuidedStep(step, overlap, folder / PROFILES, gpu=gpu, collect=collect, say=say)

  steps, tuned = StepVariants(make), parse_candidates(train.tune)
  searches = train.tune or not overlap.search_seconds
  candidates = tuned if searches else tuple(built.candidates)
  if len(candidates) == 1:
    return steps.step(candidates[0])
  keep_programs(folder / PROGRAMS)
  decisions = Decisions(folder / SCHEDULE, built.config)
  known = decisions.known()
  if known is not None:
    say(f"schedule: {known}, as an earlier start chose ({decisions.file})")
    return Search(steps, candidates, chosen=known)
  bounds: dict[str, Any] = {}
  if not train.tune:
    bounds = {"seconds": overlap.search_seconds, "most_steps": MOST_STEPS}
  return Search(steps, candidates, rounds=train.tune_rounds, keep=decisions.keep, say=say, **bounds)


def keep_programs(folder: Path) -> None:
  """Lets jax keep what it compiles with the run, unless its compilation cache is set already."""
  if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))


@dataclasses.dataclass(frozen=True)
class Decisions:
  """WORKDIR/schedule.json: the decision of a search, and for what it holds.

  Attributes:
    file: where it lies.
    config: the run's configuration, JSON-able.
  """

  file: Path
  config: dict[str, Any]

  def known(self) -> Variant | None:
    """The variant that an earlier start chose for the same program on the same machine."""
    found = None
    if is_first():
      try:
        stored = json.loads(self.file.read_text())
        if stored["for"] == self._identity():
          found = stored["chosen"]
      except (OSError, ValueError, KeyError, TypeError):
        found = None  # none, or half a file of another version: search again
    found = from_all_processes({"found": found})[0]["found"]
    return None if found is None else Variant(**found)

  def keep(self, decision: dict[str, Any]) -> None:
    """Writes it, on process 0."""
    if is_first():
      write_json(self.file, {**decision, "for": self._identity()})

  def _identity(self) -> dict[str, Any]:
    relevant = {name: self.config.get(name) for name in SECTIONS}
    train, data = self.config.get("train", {}), self.config.get("data", {})
    relevant |= {name: train.get(name) for name in FIELDS}
    text = json.dumps([relevant, data.get("seq_len")], sort_keys=True, default=str)
    return {
      "program": hashlib.sha256(text.encode()).hexdigest()[:16],
      "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
      "processes": jax.process_count(),
      "jax": jax.__version__,
    }
