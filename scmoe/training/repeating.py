"""A training step without overflow rounds, and its repetition where rows were left over.

The loop of overflow rounds in every layer (`scmoe.moe.dispatch.dropless`) costs time even where it
never runs: XLA's GPU runtime copies the loop's condition to the host, which reads it before it
launches anything else, and XLA runs no exchange beside the loop. Where devices exchange
rows, some may be left over, and a step may be run again (`DispatchConfig.repeats`), it is one of
two programs with the same state:

  once     sends the first round of rows only (but a second model, such as a teacher, has its
           loops). Where no row is left over, it adds up the same numbers as the program with
           loops. Otherwise the step changes no bit of the state
  looped   has the loops. It runs those steps again in which rows were left over

The host reads one array of a step, the rounds that each layer needs, before it dispatches the next
step. Where rows are left over often, the program with loops runs the steps from the start (`Pace`).
It is compiled when it is first needed, so a run whose loads always fit never compiles it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from scmoe.profiling.program import Program
from scmoe.training.guided import GuidedStep

# A run changes to the program with loops when rows were left over in TWICE of the last RECENT steps
# since it changed last. It changes back after `Pace.calm` steps in a row without rows left over:
# CALM at first, and never more than MOST.
TWICE, RECENT, CALM, MOST = 2, 8, 8, 512


class Pace:
  """Decides from the steps so far whether the next one runs with loops from the start.

  To repeat a step costs a whole program more; loops in a step whose rows fit cost a part of one. So
  single steps are repeated, and bursts run with loops. `CALM` steps in a row without rows left over
  end a burst. If it begins within `calm` steps after the last one, twice as many as ended that one
  are needed, but at most `MOST`.

  Attributes:
    looped: whether the next step runs with loops.
    calm: number of steps in a row without rows left over that end the present burst or, after a
      burst, ended it; 0 before the first.
  """

  def __init__(self) -> None:
    self.looped, self.calm = False, 0
    self._recent: collections.deque[bool] = collections.deque(maxlen=RECENT)
    self._quiet = self._since = 0

  def state(self) -> dict[str, Any]:
    """The figures from which `restore` goes on to the same decisions, JSON-able."""
    names = {"looped": self.looped, "calm": self.calm, "recent": list(self._recent)}
    return names | {"quiet": self._quiet, "since": self._since}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `state` returned; what is missing begins anew."""
    self.looped = bool(state.get("looped"))
    self.calm, self._quiet, self._since = (int(state.get(n, 0)) for n in ("calm", "quiet", "since"))
    self._recent = collections.deque(map(bool, state.get("recent", ())), maxlen=RECENT)

  def note(self, over: bool) -> bool:
    """Takes in a step, in order; True if the next step runs in the other way.

    Args:
      over: whether the step had more rows than the first round has room for.
    """
    self._recent.append(over)
    self._since += 1
    self._quiet = 0 if over else self._quiet + 1
    if self.looped and self._quiet < self.calm:
      return False
    if not self.looped:
      if sum(self._recent) < TWICE:
        return False
      self.calm = CALM if self._since > self.calm else min(2 * self.calm, MOST)
    self.looped = not self.looped
    self._recent.clear()
    self._since = 0
    return True


class RepeatingStep(GuidedStep):
  """The step without loops, and the step that has them: to repeat steps, and for bursts (`Pace`).

  Called, it waits for the devices and returns a step's final results. A caller with other work to
  do meanwhile uses `begin`, `left_over` and `again` instead, as the training loop does. All
  processes read the same figures, so they take the same decisions.

  Args:
    step: the step without loops (`make_train_step` with `repeats`).
    looped: makes the step with loops; called when it is first needed, if ever.
    *args, **options: see `GuidedStep`.

  Attributes:
    repeated: number of steps that were run again so far, in this start or since `forget`.
    pace: which program runs the next step.
  """

  repeats = True

  def __init__(self, step: Any, *args: Any, looped: Callable[[], GuidedStep], **options: Any):
    super().__init__(step, *args, **options)
    self.forget()
    self._make, self._looped = looped, None

  @property
  def looped(self) -> GuidedStep:
    """The step with loops."""
    if self._looped is None:
      self._looped = self._make()
    return self._looped

  @property
  def compiles_next(self) -> bool:
    """True if the program that begins the next step has to be compiled, which takes long."""
    return self.looped.compiles_next if self.pace.looped else super().compiles_next

  @property
  def settled(self) -> bool:
    """True once the program that runs the next step can be timed; see `GuidedStep.settled`."""
    return self.looped.settled if self.pace.looped else super().settled

  def named_program(self) -> Program:
    """The program that runs the next step; see `GuidedStep.named_program`."""
    return self.looped.named_program() if self.pace.looped else super().named_program()

  @property
  def history(self) -> dict[str, Any]:
    """See `GuidedStep.history`: the state of `pace`."""
    return {"pace": self.pace.state()}

  def go_on(self, history: Mapping[str, Any]) -> None:
    """Goes on with the pace that `history` left, e.g. in a checkpoint's meta."""
    self.pace.restore(history.get("pace", {}))

  def forget(self) -> None:
    """See `GuidedStep.forget`: `repeated` and `pace` begin anew."""
    self.repeated, self.pace = 0, Pace()

  def begin(self, *args: Any) -> Any:
    """Dispatches a step; its result is final if `left_over` is then False.

    Its scalars include `repeated`.

    Args:
      *args: the state, which is donated, and the batch.
    """
    self.ran_looped = self.pace.looped
    if self.ran_looped:
      return self._counted(self.looped(*args))
    return self._counted(super().__call__(*args))

  def left_over(self, arrays: Mapping[str, Any]) -> bool:
    """Whether the step that was begun last has to be run again; waits for it, and tells `pace`.

    Args:
      arrays: the step's per-layer arrays, which `begin` returned.
    """
    over = bool((np.asarray(jax.device_get(arrays["rounds"])) > 1).any())
    if over:  # the program with loops runs next, perhaps for long
      self.give_up_trace()
    if self.pace.note(over):
      if self.pace.looped:
        self.say(
          f"rows were left over in {TWICE} of {RECENT} steps: overflow rounds run in every step "
          f"until {self.pace.calm} steps in a row need none; a larger dispatch.slack has more room"
        )
      else:
        self.say(f"no rows were left over in {self.pace.calm} steps: on without overflow rounds")
    return over and not self.ran_looped

  def again(self, *args: Any) -> Any:
    """Runs the last step again, with loops, after `left_over` was True; its result is final.

    Args:
      *args: the state that `begin` returned, which equals the state before the step and is donated,
        and the step's batch.
    """
    if self.looped.compiles_next:
      self.say("rows were left over: compiling the step with overflow rounds, to repeat it ...")
    self.repeated += 1
    return self._counted(self.looped(*args))

  def __call__(self, *args: Any) -> Any:
    """Runs one step, and again if `left_over` says so; returns what `begin` or `again` returned."""
    state, batch = args
    state, scalars, arrays = self.begin(state, batch)
    if self.left_over(arrays):
      return self.again(state, batch)
    return state, scalars, arrays

  def _counted(self, result: Any) -> Any:
    state, scalars, arrays = result
    return state, {**scalars, "repeated": self.repeated}, arrays
