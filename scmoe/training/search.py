"""Measures variants of a training step in turns, and stays with the fastest.

Candidates are compared by their time alone, not by what they compute. A candidate replaces the one
kept so far only if it is faster by more than the spread of both (`against`): a difference that the
next measurement may turn round is no reason to leave what is configured. A caller may ask for a
margin, too.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type, check_whole
from scmoe.profiling.timer import Timing
from scmoe.training.distributed import all_agree, first_decides, from_all_processes
from scmoe.training.guided import GuidedStep
from scmoe.training.step import TrainState
from scmoe.training.variants import Change, StepVariants, Variant

# With `on_best`, timed steps of a candidate, by which the next candidate's base is chosen.
GLANCES = 3
# Most times that a timed step is run anew because it ran twice, with rows left over: its time would
# be that of two steps, and perhaps of a compilation. After a few such steps `Pace` has all run with
# loops from the start, and times count.
AGAIN = 8


def against(candidate: Timing, kept: Timing, margin: float) -> tuple[bool, str]:
  """Decides if a candidate replaces the kept one, and says why or why not.

  It does if it is faster by at least `margin`, and if the ranges median ± spread do not meet:
  57.3 ± 0.4 and 50.8 ± 0.5 ms do not, 50.5 ± 1.2 and 52.4 ± 0.9 do.

  Args:
    candidate, kept: their times, measured in turns.
    margin: as a fraction.

  Returns:
    whether the candidate replaces the kept one, and the comparison, to which the caller adds "than"
    and the kept one's name: "5.2 % faster", "3.0 % slower", "within the spread, 0.4 % faster",
    "only 0.4 % faster".
  """
  gain = 1 - candidate.median / kept.median if kept.median else 0.0
  if gain <= 0:
    return False, f"{abs(100 * gain):.1f} % slower"
  faster = f"{100 * gain:.1f} % faster"
  width = lambda timing: timing.spread * timing.median
  if candidate.median + width(candidate) >= kept.median - width(kept):
    return False, f"within the spread, {faster}"
  if gain < margin:
    return False, f"only {faster}"
  return True, faster


class Search:
  """A training step that tries its variants, measures them in turns, and stays with the fastest.

  Call it like the step. A candidate that the model refuses (ConfigError) is left out. The first of
  the others is always tried. Another one, unless it is compiled `together` with the first, is tried
  only if it would fit into what is left of `seconds`, were it as slow to prepare as the slowest so
  far, and into what is left of `most_steps`. Process 0's times decide for all processes.

  Args:
    steps: the variants.
    candidates: the variants to compare, or functions that make them (`Change`).
    on_best: each candidate is applied to the variant that the measurements so far would choose: a
      `Variant` replaces the fields that it gives, a `Change` is called with that variant. False:
      each candidate is applied to the configured variant.
    rounds: measured steps of each candidate, if several were prepared; their medians and spreads
      decide.
    seconds: limit of the whole search, compilation included. It decides which candidates are tried;
      those that are tried are always measured to the end.
    most_steps: limit of steps before the choice, in the same sense.
    margin: fraction by which a candidate must be faster than the one kept so far to replace it.
    together: number of candidates to compile at once before the first is tried; only with
      `on_best`. Nothing is measured yet, so each is applied to the last one before it that the
      model has taken. 0 or 1: one by one. If their compilation takes longer than `seconds`, only
      the first of them is tried.
    where: what is measured, for the line that tells the choice.
    keep: called with the result of `decision` when the choice is made.
    say: prints a line.
    clock: returns the time in seconds.

  Raises:
    ConfigError: `steps`, `candidates`, a candidate or `rounds` is of another type, there is no
      candidate, or `rounds` is below 1.
  """

  def __init__(
    self,
    steps: StepVariants,
    candidates: Sequence[Variant | Change],
    *,
    on_best: bool = False,
    rounds: int = 3,
    seconds: float = math.inf,
    most_steps: float = math.inf,
    margin: float = 0.0,
    together: int = 1,
    where: str = "this run's steps",
    keep: Callable[[dict[str, Any]], None] = lambda decision: None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
  ):
    check_type("steps", steps, StepVariants)
    check_type("candidates", candidates, Sequence)
    if not candidates:
      raise ConfigError("candidates is empty; give at least Variant(), the run as configured")
    for one in candidates:
      if not callable(one):
        check_type("candidates", one, Variant)
    check_whole("rounds", rounds, 1)
    self.steps, self.candidates, self.rounds = steps, tuple(candidates), rounds
    self.on_best, self.together = on_best, together if on_best else 1
    self.seconds, self.most_steps, self.margin = seconds, most_steps, margin
    self.where = where
    self.measured: dict[Variant, list[float]] = {}
    # Seconds from the start of a variant's compilation until its steps can be timed. For a variant
    # that is compiled side by side with others they begin with the first compilation of all, and
    # hold warm-up steps of the others and the first timed steps of the variants before it.
    self.prepared: dict[Variant, float] = {}
    # Why a variant is left out: no time or no steps were left for it, the model refuses it, or XLA
    # could not compile it.
    self.untried: dict[Variant, str] = {}
    self._refusal: ConfigError | None = None  # of the first variant that the model refused
    self.chosen: Variant | None = None
    self._keep, self._say, self._clock = keep, say, clock
    self._given: tuple[Any, ...] = ()
    self._began, self._calls = 0.0, 0
    # How often the present timed step was run anew (`AGAIN`).
    self._again = 0
    self._visits = self._plan()
    self._visit: tuple[Variant, bool] | None = None
    # Whether the next call is a candidate's last glance: at its end another may be compiled.
    self._last_glance = False

  @property
  def settled(self) -> bool:
    """True if a variant is chosen and its step is settled (`GuidedStep.settled`)."""
    return self.chosen is not None and self.best.settled

  @property
  def undecided(self) -> bool:
    """Whether no variant has been chosen yet."""
    return self.chosen is None

  @property
  def variant(self) -> Variant:
    """The chosen variant; before the choice, the configured one."""
    return self.chosen or Variant()

  @property
  def best(self) -> GuidedStep:
    """The step of the chosen variant; only after the choice."""
    assert self.chosen is not None, "not chosen yet"
    return self.steps.step(self.chosen)

  @property
  def compiles_next(self) -> bool:
    """True if the next call may compile, and so take long.

    During the search a call that is not timed always may: at its end the next candidate may be
    compiled. So may the last of a candidate's timed calls with `on_best` (`GLANCES`), and every
    call of a step that may be run twice (`repeats`).
    """
    if self.chosen is not None:
      return self.best.compiles_next
    if self._visit is None:
      return True
    variant, counts = self._visit
    step = self.steps.step(variant)
    return not counts or self._last_glance or step.repeats or step.compiles_next

  @property
  def repeats(self) -> bool:
    """Whether a result of `begin` is final only once `left_over` was asked (`RepeatingStep`).

    False before the choice.
    """
    return self.chosen is not None and self.best.repeats

  @property
  def repeated(self) -> int:
    """Number of steps that were run again so far, of all variants; see `RepeatingStep`."""
    return sum(self.steps.step(variant).repeated for variant in self.steps.variants)

  @property
  def ran_looped(self) -> bool:
    """See `GuidedStep.ran_looped`; False before the choice."""
    return self.chosen is not None and self.best.ran_looped

  @property
  def history(self) -> dict[str, Any]:
    """See `GuidedStep.history`; {} before the choice."""
    return {} if self.chosen is None else self.best.history

  def go_on(self, history: Mapping[str, Any]) -> None:
    """Does nothing: a search begins anew, without a history."""
    del history

  def begin(self, *args: Any) -> Any:
    """Dispatches one step: of the chosen variant as its `begin`, else as a call."""
    return self(*args) if self.chosen is None else self._counted(self.best.begin(*args))

  def left_over(self, arrays: Mapping[str, Any]) -> bool:
    """See `RepeatingStep.left_over`."""
    return self.best.left_over(arrays)

  def again(self, *args: Any) -> Any:
    """See `RepeatingStep.again`."""
    return self._counted(self.best.again(*args))

  def give_up_trace(self) -> None:
    """See `GuidedStep.give_up_trace`; of all variants."""
    for variant in self.steps.variants:
      self.steps.step(variant).give_up_trace()

  def hold_profiling(self, held: bool) -> None:
    """See `GuidedStep.hold_profiling`; of all variants so far."""
    for variant in self.steps.variants:
      self.steps.step(variant).hold_profiling(held)

  def compile(self, *args: Any) -> None:
    """Compiles the first candidate that the model takes, for arguments of these shapes.

    With `together` it compiles those among the first `together` candidates that the model takes.

    Raises:
      ConfigError: the model refuses the run as configured, or every candidate.
      jax.errors.JaxRuntimeError: XLA cannot compile the first one that the model takes.
    """
    self._given = args
    self._visit = next(self._visits)

  def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict, dict]:
    """Runs one training step, by the variant that is being tried, or by the chosen one."""
    if self.chosen is not None:
      return self._counted(self.steps(state, batch, self.chosen))
    if self._visit is None:
      self.compile(state, batch)
    assert self._visit is not None
    variant, counts = self._visit
    jax.block_until_ready(state)
    start, repeated = self._clock(), self.steps.step(variant).repeated
    result = jax.block_until_ready(self.steps(state, batch, variant))
    self._calls += 1
    if counts:
      if self.steps.step(variant).repeated > repeated and self._again < AGAIN:
        self._again += 1
        return self._counted(result)
      self._again = 0
      self.measured.setdefault(variant, []).append(self._clock() - start)
    self._visit = next(self._visits, None)
    if self._visit is None:
      self._choose()
    return self._counted(result)

  def _counted(self, result: tuple[TrainState, dict, dict]) -> tuple[TrainState, dict, dict]:
    """A step's result, whose `repeated` counts the steps of all variants instead of its own."""
    state, scalars, arrays = result
    if "repeated" in scalars:
      scalars = {**scalars, "repeated": self.repeated}
    return state, scalars, arrays

  def timings(self) -> dict[Variant, Timing]:
    """Seconds per step of each measured candidate, in the order of the candidates."""
    return {c: Timing(tuple(seconds), 1) for c, seconds in self.measured.items()}

  def decision(self) -> dict[str, Any]:
    """The choice, the candidates' times, and why some were left out; JSON-able."""
    timings, why = self.timings(), self._best()[1] if self.measured else {}
    tried = []
    for c, seconds in self.prepared.items():
      found: dict[str, Any] = {"variant": c.given, "step_ms": None, "steps_ms": []}
      if c in timings:
        found |= {
          "step_ms": round(1e3 * timings[c].median, 3),
          "spread_ms": round(1e3 * timings[c].spread * timings[c].median, 3),
          "steps_ms": [round(1e3 * s, 3) for s in timings[c].seconds],
          "why": why[c],
        }
      tried.append({**found, "prepared_s": round(seconds, 1)})
    untried = [{"variant": c.given, "why": why} for c, why in self.untried.items()]
    assert self.chosen is not None
    chosen = {"chosen": self.chosen.given, "measured on": self.where}
    return {**chosen, "tried": tried, "not_tried": untried}

  def _best(self) -> tuple[Variant, dict[Variant, str]]:
    """The measured candidate to choose, and how each one compares with the one kept before it.

    The first is kept until another one replaces it (`against`), that one until a third does, and so
    on. Each comparison is a text: "the first" for the first, else for example "5.2 % faster than
    as configured".
    """
    (best, kept), *others = self.timings().items()
    why = {best: "the first"}
    for candidate, timing in others:
      replaces, words = against(timing, kept, self.margin)
      why[candidate] = f"{words} than {best}"
      if replaces:
        best, kept = candidate, timing
    return best, why

  def _plan(self) -> Iterator[tuple[Variant, bool]]:
    """Yields (variant, whether its time counts) for each call, decided after the call before it.

    Prepares the first candidate, or the first `together`, and each other for which time and steps
    are left. Then measures them in turns if there are several, so that drift of the machine's speed
    affects all alike.
    """
    self._began = self._clock()
    if self.together > 1:
      yield from self._side_by_side()
    for change in self.candidates:
      candidate = self._candidate(change)
      if candidate in self.prepared or candidate in self.untried:
        continue
      if self.prepared and not self._affordable():
        self.untried[candidate] = "no time left"
        continue
      self._say(f"schedule: trying {candidate}")
      start, compile = self._clock(), functools.partial(self._compile, candidate)
      if self._compiled(candidate, compile, required=not self.prepared):
        yield from self._prepared(candidate, start)
    if not self.prepared:
      assert self._refusal is not None
      raise self._refusal
    if len(self.prepared) > 1:
      self.measured.clear()
      for _ in range(self.rounds):
        yield from ((candidate, True) for candidate in self.prepared)

  def _side_by_side(self) -> Iterator[tuple[Variant, bool]]:
    """Prepares the first `together` candidates, which are compiled at the same time, for `_plan`.

    XLA spends most of a compilation on one core, and a host with GPUs has many.
    """
    start, likely, last = self._clock(), list[Variant](), Variant()
    for change in self.candidates[: self.together]:
      candidate = self._changed(last, change)
      if self._compiled(candidate, functools.partial(self.steps.step, candidate)):
        last = candidate
        likely += [last] if last not in likely else []
    if not likely:
      return
    self._say(f"schedule: trying {'; '.join(map(str, likely))}")
    with concurrent.futures.ThreadPoolExecutor(len(likely)) as pool:
      # No step runs meanwhile: XLA times matrix products on the GPU as it compiles, and a step's
      # profile would measure those too.
      jobs = {}
      # jax traces each candidate while XLA compiles the ones before it.
      for c in likely:
        if self._compiled(c, functools.partial(self._compile, c, later=True), not jobs):
          jobs[c] = pool.submit(self.steps.step(c).finish)
      first = next(iter(jobs), None)
      likely = [c for c, job in jobs.items() if self._compiled(c, job.result, c == first)]
      if first_decides(self._clock() - start > self.seconds):
        self.untried |= dict.fromkeys(likely[1:], "no time left")
        likely = likely[:1]
      for c in likely:
        yield c, False
        while not self.steps.step(c).settled and self.steps.step(c).waiting is None:
          yield c, False
      jobs = [pool.submit(self.steps.step(c).finish) for c in likely]
      likely = [c for c, job in zip(likely, jobs) if self._compiled(c, job.result, c == likely[0])]
    for c in likely:
      yield from self._prepared(c, start)

  def _prepared(self, candidate: Variant, start: float) -> Iterator[tuple[Variant, bool]]:
    """Yields a compiled candidate's calls before its measurement: warm-up and profile.

    With `on_best` also `GLANCES` timed calls, from which the next candidate's base is chosen.
    """
    while not self.steps.step(candidate).settled:
      yield candidate, False
    self.prepared[candidate] = self._clock() - start
    if self.on_best:
      for glance in range(GLANCES):
        self._last_glance = glance == GLANCES - 1
        yield candidate, True
      self._last_glance = False

  def _candidate(self, change: Variant | Change) -> Variant:
    best: dict[str, Any] = {}
    if self.on_best and self.measured:
      best = from_all_processes(self._best()[0].given)[0]
    return self._changed(Variant(**best), change)

  def _changed(self, best: Variant, change: Variant | Change) -> Variant:
    if isinstance(change, Variant):
      return Variant(**{**best.given, **change.given})
    return change(best)

  def _compile(self, candidate: Variant, later: bool = False) -> None:
    """Makes a candidate's step and compiles it; see `GuidedStep.compile`."""
    self.steps.step(candidate).compile(*self._given, later=later)

  def _compiled(
    self, candidate: Variant, compile: Callable[[], Any], required: bool = False
  ) -> bool:
    """Compiles a candidate; False, and it is left out, if it cannot be compiled.

    That is if the model refuses it, as it does on all processes alike, or if XLA fails on any.

    Args:
      candidate: which one.
      compile: makes or compiles its step.
      required: where XLA fails, every process raises an error instead: XLA's (e.g. too little
        memory) or, where XLA did not fail, one that says so.

    Raises:
      ConfigError: the candidate is the run as configured, and the model refuses it.
    """
    failed: Exception | None = None
    try:
      compile()
    except ConfigError as error:
      if not candidate.given:
        raise
      self._refusal = self._refusal or error
      return self._left_out(candidate, f"does not fit the run: {error}")
    except jax.errors.JaxRuntimeError as error:
      failed = error
    if all_agree(failed is None):
      return True
    if required:
      # A process that alone went on would wait for the others in the first step.
      raise failed or jax.errors.JaxRuntimeError(f"{candidate} does not compile on another process")
    problem = " ".join(str(failed).split())[:200] if failed else "on another process"
    return self._left_out(candidate, f"does not compile: {problem}")

  def _left_out(self, candidate: Variant, why: str) -> bool:
    """Notes and says why a candidate is left out; returns False."""
    self.untried[candidate] = why
    self._say(f"schedule: {candidate} {why}")
    return False

  def _affordable(self) -> bool:
    """True if enough time and steps are left to try one more candidate.

    Time: `seconds` leave as much as the slowest preparation so far took. Steps: `most_steps` leave
    the mean number of calls of a preparation so far, and all measurements, the new one's included.
    """
    longest = max(self.prepared.values())
    left = self.seconds - (self._clock() - self._began)
    calls = -(-self._calls // len(self.prepared))
    steps = self._calls + calls + self.rounds * (len(self.prepared) + 1)
    return first_decides(longest <= left and steps <= self.most_steps)

  def _choose(self) -> None:
    tried = list(self.prepared)
    best = tried.index(self._best()[0]) if self.measured else 0
    best = from_all_processes({"best": best})[0]["best"]
    self.chosen = tried[best]
    self.give_up_trace()  # of a variant that was not chosen nothing else would end it
    if len(tried) > 1:
      _, why = self._best()
      told = (f"{c}: {_told(timing)}, {why[c]}" for c, timing in self.timings().items())
      taken = f"{self._clock() - self._began:.0f} s"
      self._say(
        f"schedule: {self.chosen} is chosen. {'; '.join(told)} (on {self.where}, in {taken})"
      )
    self._keep(self.decision())


def _told(timing: Timing) -> str:
  """Median and spread of a step in milliseconds, as in `50.8 ± 0.5 ms`; see `Timing.spread`."""
  return f"{1e3 * timing.median:.1f} ± {1e3 * timing.spread * timing.median:.1f} ms"
