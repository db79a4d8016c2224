"""Finds the fastest way to run a step: `overlap.schedule=auto` and `train.tune`.

Which schedule hides most depends on the link, the sizes and the router's balance, and no model of
them was right everywhere (experiments/LOG.md). So candidates are measured, by a `Search`:

  auto   measures before the first step, on GPUs that exchange rows. A cut of the run
         (`Searchable.cut`) may propose a change; whole steps of the run, as configured and with
         the change, then decide, except in runs with a teacher or adapters
  tune   measures candidates that the user names: where auto measures, in its search; elsewhere in
         the first steps, each of which trains

WORKDIR/schedule.json keeps the decision and its measurements (`scmoe.training.decisions`); a later
start with the same program and machine reads it and, as a rule, measures nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax import Array
from jax.sharding import Mesh

from scmoe.base.errors import ConfigError
from scmoe.base.output import warn
from scmoe.blocks.options import OverlapConfig
from scmoe.profiling.program import latencies
from scmoe.training.decisions import SCHEDULE, Decisions
from scmoe.training.guided import Collect, GuidedStep
from scmoe.training.measured import MeasuredState
from scmoe.training.optimizer import Optimizer
from scmoe.training.options import TrainConfig
from scmoe.training.repeating import RepeatingStep
from scmoe.training.search import Search
from scmoe.training.step import Objective, TrainState, make_train_step
from scmoe.training.variants import Change, StepVariants, Variant, parse_candidates

# The folder, within the run's folder, of the latencies that `GuidedStep` measures.
PROFILES = "profile_guided"
# Arguments of `Search` for `overlap.schedule=auto`: `most_steps` (on the cut), `rounds`, `margin`.
MOST_STEPS, ROUNDS, MARGIN = 100, 7, 0.01
# On the cut of a run of one process, XLA compiles one candidate for each four CPU cores at the same
# time.
CORES = 4


class Searchable(Protocol):
  """The model and options that a step and a search need; `Trainable` adds those of a run.

  Attributes:
    train, overlap: options.
    config: the whole resolved configuration, JSON-able; checkpoints store it, and a resumed run
      compares it.
    mesh: the devices that the step runs on.
    sequence_length: tokens per sequence, or per image.
    objective, optimizer: see `scmoe.training.step`.
    candidates: tried by `overlap.schedule=auto`: variants, and functions that make one from another
      (`Change`). The first is `Variant()`, the step as configured.
  """

  @property
  def train(self) -> TrainConfig: ...
  @property
  def overlap(self) -> OverlapConfig: ...
  @property
  def config(self) -> dict[str, Any]: ...
  @property
  def mesh(self) -> Mesh: ...
  @property
  def sequence_length(self) -> int: ...
  @property
  def objective(self) -> Objective: ...
  @property
  def optimizer(self) -> Optimizer: ...
  @property
  def candidates(self) -> Sequence[Variant | Change]: ...

  def init(self, key: Array) -> tuple[Any, Any]:
    """Parameters and router state before the first step; jittable."""
    ...

  def abstract_state(self) -> TrainState:
    """The training state, abstract (`scmoe.training.step.abstract_state`)."""
    ...

  def variant(self, variant: Variant) -> Objective:
    """The objective of a variant. `Variant` says which of its fields change the result.

    Raises:
      ConfigError: the variant does not fit the run.
    """
    ...

  def without_loops(self, variant: Variant) -> Objective | None:
    """The objective of a variant without overflow rounds; None if no step is to be run again."""
    ...

  def cut(self) -> Searchable:
    """The model with two block pairs and a few groups of microbatches at most, to measure on.

    In a Swin the limit of pairs holds for each stage. The cut has the same devices, but no teacher
    and no `model.dense_layers`, and trains all its parameters.
    """
    ...

  def random_batch(self) -> Any:
    """This process's part of one step's random batch: numpy arrays [A, B / processes, ...].

    The step has A microbatches of B sequences or images.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Steps:
  """Makes the training step of a model, as configured or of a variant.

  Attributes:
    built: the model and its options.
    abstract: the training state, abstract (`scmoe.training.step.abstract_state`).
    folder: measured profiles are kept in its subfolder `profile_guided`.
    gpu, collect, say: see `GuidedStep`.
  """

  built: Searchable
  abstract: TrainState
  folder: Path
  gpu: bool | None = None
  collect: Collect = latencies
  say: Callable[[str], None] = print

  def __call__(self, variant: Variant) -> GuidedStep:
    """Makes the step of a variant; that of `Variant()` is the step as configured.

    If `without_loops` gives an objective, it is a `RepeatingStep`. Its program with loops is
    compiled without measured latencies.
    """
    overlap, once = self.built.overlap, self.built.without_loops(variant)
    if once is None:
      return self._guided(variant, overlap)
    ablation = dataclasses.replace(overlap.ablation, profile_guided=False)
    plain = dataclasses.replace(overlap, ablation=ablation)
    looped = lambda: self._guided(variant, plain)
    step = self._jitted(once, repeats=True)
    folder = self.folder / PROFILES
    return RepeatingStep(step, overlap, folder, looped=looped, **self._options(variant))

  def _guided(self, variant: Variant, overlap: OverlapConfig) -> GuidedStep:
    """The step of a variant, compiled with the options `overlap`; each of its results is final."""
    built = self.built
    objective = built.objective if variant == Variant() else built.variant(variant)
    step = self._jitted(objective)
    return GuidedStep(step, overlap, self.folder / PROFILES, **self._options(variant))

  def _jitted(self, objective: Objective, *, repeats: bool = False) -> Any:
    overlap = self.built.overlap
    how: Any = {"gradient_dtype": overlap.gradient_dtype, "flight": overlap.flight}
    how |= {"embedding_rows": overlap.embedding_rows, "repeats": repeats}
    return make_train_step(objective, self.built.optimizer, self.abstract, **how)

  def _options(self, variant: Variant) -> dict[str, Any]:
    """Arguments by keyword of a `GuidedStep`."""
    return {"variant": variant, "gpu": self.gpu, "collect": self.collect, "say": self.say}


def fastest_step(
  built: Searchable,
  abstract: TrainState,
  folder: Path,
  *,
  gpu: bool | None = None,
  collect: Collect = latencies,
  say: Callable[[str], None] = print,
  same_transport: bool = False,
  measures: bool = True,
) -> GuidedStep | Search:
  """Makes the configured step or, with `overlap.schedule=auto` or `train.tune`, the fastest one.

  With auto (and `overlap.search_seconds` > 0) the fastest is measured here; else, with
  `train.tune`, the returned `Search` measures it in the first training steps. If an earlier start
  kept a decision for the same program and machine, the step of its variant is returned and nothing
  is measured, unless that variant does not fit the run, or sets the transport and `same_transport`
  is True. A single candidate is taken without a measurement.

  With auto a cut of the run may propose a change. The change is taken if whole steps show it
  faster, too, by more than the spread and by at least 1 % (`against`). Whole steps need memory for
  one state of the run, freed before the run makes its own. In a run with a teacher, or with
  adapters of a base, the cut decides alone: a whole step would need the arrays of teacher or base,
  and they are not loaded yet. The cut has no teacher, and trains all parameters.

  Args:
    built: the model and its options.
    abstract: the training state, abstract (`scmoe.training.step.abstract_state`).
    folder: keeps the decision and measured profiles.
    gpu, collect, say: see `GuidedStep`.
    same_transport: leave out candidates that set `dispatch.transport`, so that steps of several
      wirings can be compared.
    measures: False: if there are several candidates and no kept decision can be used, the step is
      that of the run as configured.

  Raises:
    ConfigError: `train.tune` is malformed; or the model refuses its only candidate, e.g. an r that
      does not divide the devices, or, in a search here, the run as configured. Of several
      candidates a search leaves out those that the model refuses.
  """
  make = Steps(built, abstract, folder, gpu, collect, say)
  steps, tuned = StepVariants(make), parse_candidates(built.train.tune)
  searches = built.overlap.search_seconds > 0
  candidates: Sequence[Variant | Change] = tuned
  # With auto and `train.tune` one search tries both: the run as configured, the user's candidates,
  # and then auto's others.
  if searches:
    first, *others = built.candidates
    candidates = (first, *(tuned if built.train.tune else ()), *others)
  if same_transport:
    moved = lambda c: isinstance(c, Variant) and c.transport is not None
    candidates = tuple(c for c in candidates if not moved(c)) or (Variant(),)
  if len(candidates) == 1:
    only = candidates[0]
    return steps.step(only if isinstance(only, Variant) else Variant())
  decisions = Decisions(folder / SCHEDULE, built.config)
  chosen = decisions.known()
  if chosen is not None and not (same_transport and chosen.transport is not None):
    try:
      known = steps.step(chosen)
    except ConfigError as error:
      warn(f"{decisions.file} is not used: {error}; searching again")
    else:
      say(f"schedule: {chosen}, as an earlier start chose ({decisions.file})")
      return known
  if not measures:
    return steps.step(Variant())
  if searches:
    found: dict[str, Any] = {}
    proposed = _on_a_cut(make, candidates, found.update)
    if proposed != Variant() and abstract.teacher is None:
      proposed = _on_whole_steps(make, steps, proposed, found)
    if found:
      decisions.keep(found)
    return steps.step(proposed)
  return Search(steps, candidates, rounds=built.train.tune_rounds, keep=decisions.keep, say=say)


def _on_a_cut(
  make: Steps, candidates: Sequence[Variant | Change], keep: Callable[[dict[str, Any]], None]
) -> Variant:
  """The variant that a search on a cut of the run chooses; `Variant()` if it chooses none."""
  cut = make.built.cut()
  abstract = cut.abstract_state()
  quiet = dataclasses.replace(make, built=cut, abstract=abstract, say=lambda line: None)
  search = Search(
    StepVariants(quiet),
    candidates,
    on_best=True,
    rounds=ROUNDS,
    seconds=cut.overlap.search_seconds,
    most_steps=MOST_STEPS,
    margin=MARGIN,
    # Several processes compile each program together: in several threads they could deadlock.
    together=1 if jax.process_count() > 1 else (os.cpu_count() or 1) // CORES,
    where=f"two pairs, microbatches: {cut.train.microbatches(cut.sequence_length)}",
    keep=keep,
    say=make.say,
  )
  return _fastest(search, cut, abstract, make.say) or Variant()


def _on_whole_steps(
  make: Steps, steps: StepVariants, proposed: Variant, found: dict[str, Any]
) -> Variant:
  """Compares the run as configured and with a proposed change, by whole steps; returns the winner.

  If the search was broken off before its choice, that is the configured variant.

  The change wins if `against` lets it replace the configured variant. The two are compiled one
  after the other: XLA times matrix products on the GPU as it compiles, a second compilation would
  disturb these times, and the winner's program is the one that trains.

  Args:
    make, steps: the run's steps; the winner's stays compiled.
    proposed: the variant that the cut chose.
    found: the cut's decision; changed in place: the decision by whole steps replaces it and holds
      it under `cut`. If the search was broken off before its choice, `found` is emptied, so that a
      later start tries again.
  """
  kept: dict[str, Any] = {}
  search = Search(
    steps,
    (Variant(), proposed),
    rounds=ROUNDS,
    margin=MARGIN,
    where="whole steps",
    keep=kept.update,
    say=make.say,
  )
  chosen = _fastest(search, make.built, make.abstract, make.say)
  for variant in steps.variants:
    steps.step(variant).forget()
  cut = dict(found)
  found.clear()
  if chosen is not None:
    found.update({**kept, "cut": cut})
  return chosen or Variant()


def _fastest(
  search: Search, built: Searchable, abstract: TrainState, say: Callable[[str], None]
) -> Variant | None:
  """Runs a search on a `MeasuredState` and returns its choice; afterwards the state is dropped.

  An error of jax's runtime, such as too little free memory, breaks the search off: None, unless the
  choice is there already.
  """
  try:
    measured = MeasuredState(built, abstract, built.train.seed)
    while search.chosen is None:
      measured.train(search)
  except jax.errors.JaxRuntimeError as error:
    problem = " ".join(str(error).split())[:200]
    say(f"schedule: nothing was measured ({problem}); going on as configured")
  finally:
    search.give_up_trace()
  return search.chosen
