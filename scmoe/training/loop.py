"""The training loop: restore or initialise, step, log, save, evaluate, sample, stop.

Begin with `Trainer.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax

from scmoe.base import output
from scmoe.base.batch import Batch
from scmoe.base.errors import CheckpointError, ConfigError, DataError, Preempted, StorageError
from scmoe.base.output import warn
from scmoe.base.stored import write_json
from scmoe.parallel.mesh import batch_sharding, batch_shards
from scmoe.profiling.recording import end_recording
from scmoe.training.card import write_card
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.description import WEIGHTS_ONLY, held_part, misfit
from scmoe.training.distributed import OnFirst, first_decides, is_first, lost_peer
from scmoe.training.failure import REPLAY, not_finite, write_replay
from scmoe.training.fastest import fastest_step
from scmoe.training.guided import GuidedStep
from scmoe.training.interfaces import Data, Trainable, abstract_batch
from scmoe.training.journal import Journal
from scmoe.training.results import Reported, Results
from scmoe.training.resume import architecture, check_config, check_data
from scmoe.training.search import Search
from scmoe.training.signals import StopRequest, Watchdog
from scmoe.training.step import TrainState, init_state
from scmoe.training.workdir import RunLock, prepare_workdir

CONFIG = "config.json"


class Poll(Protocol):
  """Asks, before a batch of an evaluation, whether the evaluation is to stop.

  `compiles` True: the batch may compile a program, so the watchdog allows it a compilation's time.
  """

  def __call__(self, *, compiles: bool = False) -> bool: ...


class Trainer:
  """One training run. `run` trains; `run` of a new `Trainer` of the same arguments resumes.

  Args:
    built: the model and its options.
    data: the training data.
    workdir: of the run.
    evaluate: `(state, stopping)` -> scalars, with the state as `TrainState.readable` gives it. It
      calls `stopping` (a `Poll`) before every batch and returns None once that is true. A step that
      is both saved and evaluated is saved first, so that a failing evaluation loses no step.
      `evaluate` None: no evaluation.
    sample: such a state -> text; called after the evaluation, if a step has both. None: no samples.
    header: text printed once, before the line that says where the run begins; "": none.
    card: this start's arguments for `scmoe.training.card.write_card`; None: no card.
    warm_start: gives a fresh state, in a checkpoint's form, other parameters or another router
      state; called before the first step of a run that finds no checkpoint in the workdir. None:
      such a run keeps its fresh state.
    teacher: makes `TrainState.teacher` at every start, since checkpoints omit it; None: it stays
      None.
  """

  def __init__(
    self,
    built: Trainable,
    data: Data,
    workdir: str | os.PathLike[str],
    *,
    evaluate: Callable[[TrainState, Poll], dict[str, float] | None] | None = None,
    sample: Callable[[TrainState], str] | None = None,
    header: str = "",
    card: dict[str, Any] | None = None,
    warm_start: Callable[[TrainState], TrainState] | None = None,
    teacher: Callable[[], Any] | None = None,
  ):
    self.built, self.data, self.workdir = built, data, workdir
    self.evaluate, self.sample = evaluate, sample
    self.header, self.card, self.warm_start = header, card, warm_start
    self.teacher = teacher

  def run(self) -> TrainState:
    """Trains to the last step, from the newest valid checkpoint in the workdir if there is one.

    Returns:
      the final state, as a checkpoint holds it.

    Raises:
      ConfigError: a setting is unusable, or differs from the checkpoint's and must not, or another
        process uses the workdir.
      DataError: the data ended, are not those of the checkpoint, or refuse the position that it
        stores; or metrics.jsonl is unreadable.
      CheckpointError: there are checkpoints but all are damaged, a later version of scmoe wrote
        the one that is tried, or the data fail at the position that it stores.
      StorageError: the workdir cannot be written, too many saves in a row failed, or the file of
        moments (mesh.moments_in=files) cannot be made, read or written.
      NonFiniteError: as `Run.flush`; or a state that was to be saved is not finite.
      Preempted: asked to stop (signal or train.stop_after), and saved.
      PeerLost: a collective failed since another process of the run has ended.
      Exception: those of `evaluate`, `warm_start` and `teacher`; or, for example, of too little
        memory.
    """
    train, accumulation = self.built.train, self.check()
    workdir = prepare_workdir(self.workdir)
    with (
      output.optional(),
      OnFirst(RunLock(workdir)),
      StopRequest() as stop,
      Watchdog() as watchdog,
      kept_programs(workdir / PROGRAMS),
    ):
      run = Run(self, workdir, accumulation, stop, watchdog)
      together = True  # whether the other processes still run, as far as this one knows
      try:
        run.start()
        if run.step < train.steps and not run.interrupted() and not run.prepared:
          with run.preparing():
            run.step_fn.compile(run.abstract, abstract_batch(run.built))
        while run.step < train.steps and not run.interrupted():
          run.one_step()
          if run.due(self.built.checkpoint.every):
            run.save()
          if run.due(train.eval_every):
            run.evaluate()
          if run.due(train.sample_every):
            run.sample()
        return run.finish()
      except jax.errors.JaxRuntimeError as error:
        if lost := lost_peer(error):
          together = False
          raise lost from None
        raise
      finally:
        run.close(finish_saving=together)

  def check(self) -> int:
    """Checks that batches divide over mesh and processes; returns a step's number of microbatches.

    Raises:
      ConfigError: a microbatch does not divide evenly over the mesh's batch axes or over the
        processes, the batch axes do not divide evenly over the processes, or
        `train.tokens_per_step` is no whole number of microbatches.
    """
    train, shards = self.built.train, batch_shards(self.built.mesh)
    train.check_mesh(shards, jax.process_count())
    if shards % jax.process_count():
      raise ConfigError(
        f"mesh.data x mesh.expert = {shards} does not give each of {jax.process_count()} processes "
        f"its own part of the batch; make it a multiple of {jax.process_count()}: mesh.tensor and "
        "mesh.sequence divide the work of devices of one process"
      )
    return train.microbatches(self.built.sequence_length)


class Run:
  """A training run in progress: model, data, outputs, and the step that it has reached.

  Args:
    trainer: of the run.
    workdir: of the run; exists.
    accumulation: microbatches of a step.
    stop, watchdog: contexts that the caller has entered.
    label: see `Journal`.
  """

  def __init__(
    self,
    trainer: Trainer,
    workdir: Path,
    accumulation: int,
    stop: StopRequest,
    watchdog: Watchdog,
    label: str = "",
  ):
    built = trainer.built
    self.trainer, self.built, self.train = trainer, built, built.train
    self.workdir, self.accumulation = workdir, accumulation
    self.stop, self.watchdog = stop, watchdog
    self.first = is_first()
    self.abstract = built.abstract_state()
    self.batch_sharding = batch_sharding(built.mesh, leading=1)
    self.checkpointer = Checkpointer(workdir, built.checkpoint)
    self.batches = trainer.data.train()
    # A step's number and its results, which the host has not read yet; and its batch on the
    # devices, while the step may have to be run again (`settle`).
    self.pending: tuple[int, Results, Any] | None = None
    self.batch: Batch | None = None
    # Kinds of work, e.g. "evaluation", to which `arm` has given a limit; it assumes that later work
    # of such a kind compiles nothing, unless it is told of an allowance.
    self.compiled: set[str] = set()
    # Whether the lines that describe the run were printed.
    self.introduced = False
    # Whether `preparing` has compiled the training step.
    self.prepared = False
    self.evaluated_step = -1
    self.began_at = 0  # the step that this start began with
    self.tracing = False
    # Whether `skipped_in_row` was above 0 in the last results that the host has read. Until it has
    # read any: in the state with which this start began.
    self.skipping = False
    self.tokens_per_step = accumulation * built.train.batch_size * built.sequence_length
    self.journal = Journal(built, workdir, self.tokens_per_step, label)
    self.step_fn = fastest_step(built, self.abstract, workdir, say=self.journal.say)

  # -- beginning and end of the run -------------------------------------------------------------

  def start(self) -> None:
    """Restores or initialises the state, writes config and card, and opens outputs.

    The newest valid checkpoint is restored, and the run goes on at its step. A run without any
    checkpoint begins at step 0 with a fresh state, or with that of `Trainer.warm_start`. If the
    checkpoint holds weights alone, the run begins at step 0, too, with these weights, the stored
    part of the router's state, and all else fresh. If the restored step was due for an evaluation
    that metrics.jsonl lacks, it is evaluated now.

    Raises:
      CheckpointError, ConfigError, DataError, StorageError, Exception: as `Trainer.run`.
    """
    built, trainer = self.built, self.trainer
    stored = self.abstract.for_checkpoint()
    restored = self.checkpointer.restore_latest_valid(stored, self._compare, self._while_read)
    make = functools.partial(init_state, built.init, built.optimizer, self.train.seed)
    if restored is None:
      warm, self.step = trainer.warm_start, 0
      if warm is None:
        self.state = make(self.abstract)
      else:
        self.state = warm(make(stored)).like(self.abstract).placed(self.abstract)
    elif restored.meta.get(WEIGHTS_ONLY):
      self.state = make(self.abstract, params=restored.state["params"])
      router = self.state.router | restored.state["router"]
      self.state, self.step = dataclasses.replace(self.state, router=router), 0
      # The stored step 0 lacks the optimizer's state, so this run may have to save step 0 itself.
      self.checkpointer.last_saved = None
    else:
      self.state = restored.state.like(self.abstract).placed(self.abstract)
      self.step = restored.step
      self._go_to(restored.data_state)
      self.step_fn.go_on(restored.meta)
    if trainer.teacher is not None:
      self.state = dataclasses.replace(self.state, teacher=trainer.teacher())
    self.skipping = bool(self.state.skipped_in_row)
    if self.first:
      self._write_config()
      if trainer.card is not None:
        write_card(self.workdir, **trainer.card)
    if not self.introduced:
      self._introduce("new run in" if restored is None else _origin(restored.meta))
    self.began_at = self.step
    self.journal.open(self.step)
    if restored is not None and self.due(self.train.eval_every) and not self._evaluated():
      self.evaluate()

  @contextlib.contextmanager
  def preparing(self) -> Iterator[None]:
    """A context for compiling the training step: prints how long it took; see `arm` for a limit."""
    self.arm("compilation", allowance=True)
    with self.journal.said("compiling the training step"):
      yield
    self.prepared = True
    self.watchdog.disarm()

  def _while_read(self, meta: dict[str, Any]) -> None:
    """Describes the run and calls `compile_early`, while another thread reads a checkpoint.

    Reading and compiling may take seconds, so they run side by side. A run that has no step left to
    do, or is to stop (`interrupted`), compiles nothing.

    Args:
      meta: of that checkpoint. Should its arrays prove damaged, the one before it is read instead,
        and this method is called again.
    """
    self._introduce(_origin(meta))
    self.step = 0 if meta.get(WEIGHTS_ONLY) else meta["step"]
    if self.step < self.train.steps and not self.interrupted():
      self.compile_early()

  def compile_early(self) -> None:
    """Compiles the training step while the checkpoint's arrays are read."""
    with self.preparing():
      self.step_fn.compile(self.abstract, abstract_batch(self.built))

  def _introduce(self, origin: str) -> None:
    """Prints the run's header, once only, and a line that says where the run begins."""
    if self.trainer.header and not self.introduced:
      self.journal.say(self.trainer.header)
    self.introduced = True
    self.journal.say(f"{origin} {self.workdir}")

  def _go_to(self, position: dict[str, Any]) -> None:
    try:
      self.batches.restore(position)
    except (KeyError, TypeError, ValueError) as error:
      raise CheckpointError(
        f"the position in the data that step {self.step} stores cannot be used: {error!r}; start "
        "anew in another workdir"
      ) from None

  def _write_config(self) -> None:
    path = self.workdir / CONFIG
    try:
      write_json(path, self.built.config)
    except OSError as error:
      raise StorageError(f"{path} cannot be written: {error.strerror}") from None

  def finish(self) -> TrainState:
    """Saves; raises `Preempted` if the run stopped early, or else evaluates, samples and sums up.

    A start that finds the last step done and evaluated repeats neither evaluation nor sample.

    Returns:
      the final state, as a checkpoint holds it.

    Raises:
      Preempted: the run was stopped before its last step, or before that step was evaluated.
      NonFiniteError, StorageError: as `save`.
      Exception: those of `evaluate`.
    """
    train = self.train
    self.flush()
    if self.step_fn.undecided and self.step > self.began_at:
      self.journal.say(
        f"train.tune={train.tune!r}: this start ended before all candidates were measured, so none "
        "was chosen; give the run more train.steps, or a smaller train.tune_rounds"
      )
    self.save(final=True)
    if self.step < train.steps:
      raise Preempted(
        f"stopped at step {self.step} of {train.steps} and saved; run the same command again to "
        "go on"
      )
    evaluated = self._evaluated()
    if not evaluated:
      self.evaluate()
      if self.stop.poll() and not self._evaluated():
        raise Preempted(f"stopped at step {self.step} before its evaluation; run the command again")
    if not evaluated or self.step > self.began_at:
      self.sample()
    self.journal.sum_up(self.step)
    return self.state.for_checkpoint()

  def close(self, *, finish_saving: bool = True) -> None:
    """Ends trace and outputs, and waits for a checkpoint under way, however the run ends.

    A trace or a checkpoint that fails here gives a warning and no error: the run's own error, if
    there is one, matters more.

    Args:
      finish_saving: wait for the checkpoint. All processes of the run write it together, and would
        wait for one that has ended.
    """
    self.watchdog.disarm()
    self.step_fn.give_up_trace()
    self._stop_trace()
    self.journal.close()
    if not finish_saving:
      return
    try:
      self.checkpointer.close()
    except StorageError as error:
      warn(str(error))

  def _compare(self, meta: dict[str, Any]) -> None:
    """Refuses a checkpoint of another configuration or other data; prints permitted changes.

    A checkpoint of weights alone is no step of this run: only its architecture is compared, and
    nothing is printed.

    Raises:
      ConfigError, DataError: as `check_config` and `check_data`.
    """
    allow = self.built.checkpoint.allow_config_change
    current, stored = json.loads(json.dumps(self.built.config)), meta.get("config", {})
    alone = bool(meta.get(WEIGHTS_ONLY))
    abstract = held_part(self.abstract.for_checkpoint(), meta)
    fits = not misfit(abstract, meta["leaves"], partial=alone)
    if alone:
      check_config(architecture(stored), architecture(current), allow_change=allow, fits=fits)
      return
    lines = check_config(stored, current, allow_change=allow, fits=fits)
    data = json.loads(json.dumps(self.trainer.data.fingerprint()))
    lines += check_data(meta.get("data_fingerprint", {}), data, allow_change=allow)
    if lines and self.first:
      print("changed since the checkpoint was written:", *lines, sep="\n  ", flush=True)

  # -- one training step ------------------------------------------------------------------------

  def interrupted(self) -> bool:
    """True if the run should stop before the next step."""
    return self.stop.poll() or 0 < self.train.stop_after <= self.step

  def due(self, every: int) -> bool:
    """True if this step, neither 0 nor the last, is a multiple of `every`; `every` 0: never."""
    return bool(every) and self.step % every == 0 and 0 < self.step < self.train.steps

  def one_step(self) -> None:
    """Dispatches a step, then reads the previous step's results.

    The device works meanwhile, unless the dispatch itself waits for it, as with
    `mesh.moments_update=host`, as long as `train.tune` measures, and when a profile is complete
    (`GuidedStep`).

    If the step is a `RepeatingStep` (`dispatch.overflow=repeat`), this waits for the previous step
    before the dispatch, and runs it again if rows were left over (`settle`). Results are logged
    where that is due (`flush`). If the run may end with the dispatched step, without a signal, its
    results are read at once, too.

    Raises:
      ConfigError: as `Search.compile`, as long as `train.tune` measures.
      DataError: the data ended.
      NonFiniteError: as `flush`.
      StorageError: the file of moments (mesh.moments_in=files) cannot be read or written.
    """
    self.profile(self.step_fn)
    self.arm("step", allowance=self.step_fn.compiles_next)
    began = time.perf_counter()
    put = lambda x: jax.make_array_from_process_local_data(self.batch_sharding, x)
    batch = jax.tree.map(put, self.next_batch())
    self.journal.host_worked(time.perf_counter() - began)
    self.settle()
    # Asked before the step: during it a search (`search.Search`) may choose a program that repeats
    # steps, and this step was not one of that program's.
    final = not self.step_fn.repeats
    self.state, scalars, arrays = self.step_fn.begin(self.state, batch)
    self.stepped(Reported(scalars, arrays), None if final else batch)

  def stepped(self, results: Results, batch: Any = None) -> None:
    """Notes that a step was dispatched, and reads the results of the step before it (`flush`).

    Args:
      results: of the dispatched step. If the run may end with it, without a signal, this call reads
        them, else the next `flush` does.
      batch: of the dispatched step, on the devices; None if its result is final.

    Raises:
      NonFiniteError: as `flush`.
    """
    self.journal.step_dispatched()
    self.step += 1
    self.flush()
    self.pending = (self.step, results, batch)
    train = self.train
    # If this step may end the run, its results are read before the next step starts: the files for
    # `scmoe.replay` hold the state that this step left, and a next step would change that state.
    critical = self.skipping or not train.max_skipped_in_row
    critical |= bool(train.spike_sigma) and train.spike_action == "stop"
    if critical or self.step in (train.stop_after, train.steps):
      self.flush()

  def next_batch(self) -> Batch:
    """This process's part of one optimizer step's batch, [A, B / processes, ...].

    A is the number of microbatches, B the sequences or images of each. The batch stays in `batch`
    until the next one.

    Raises:
      DataError: the data ended.
    """
    try:
      parts = [next(self.batches) for _ in range(self.accumulation)]
    except StopIteration:
      raise DataError(
        f"the training data ended at step {self.step}; use more data, more epochs or fewer "
        "train.steps"
      ) from None
    self.batch = Batch.stack(parts)
    return self.batch

  def settle(self) -> None:
    """Runs the pending step again if rows were left over in it (`dispatch.overflow=repeat`).

    It waits for the pending step if that may have left rows over; otherwise it does nothing.
    """
    if self.pending is None or not self.step_fn.repeats:
      return
    step, results, batch = self.pending
    if batch is not None and self.step_fn.left_over(results.arrays):
      self.arm("repeated step")
      self.state, scalars, arrays = self.step_fn.again(self.state, batch)
      results = Reported(scalars, arrays)
      self.arm("step", allowance=self.step_fn.compiles_next)
    self.pending = (step, results, None)

  def flush(self) -> None:
    """Waits for the pending step, if there is one; logs it where due; raises if it ends the run.

    If the step was skipped, it says so on the console, with the loss and the gradient norm, or the
    loss scale of an overflow.

    Raises:
      NonFiniteError: the step's `TrainState.skipped_in_row` exceeds train.max_skipped_in_row, or it
        was a spike with train.spike_action=stop.
    """
    self.settle()
    if self.pending is None:
      return
    (step, results, _), self.pending, train = self.pending, None, self.train
    values = results.values()
    self.skipping = bool(values["skipped_in_row"])
    self.journal.step_done(step, values)
    if values.get("spike"):
      self.journal.say(
        f"step {step}: loss {values['objective']:.4f}, gradient norm {values['grad_norm']:.3g} are "
        f"over {train.spike_sigma:g} standard deviations from the last steps'; skipped"
      )
    elif not values["finite"] and not self.skipping:
      self.journal.say(
        f"step {step}: an overflow in float16 at loss scale {values['loss_scale']:g}; skipped"
      )
    elif self.skipping and self.first:
      warn(f"step {step}: loss {values['objective']}, gradient norm {values['grad_norm']}; skipped")
    if step % train.log_every == 0 or step == train.steps:
      self.journal.log(step, values, results.arrays)
    stop = values.get("spike") and train.spike_action == "stop"
    if stop or values["skipped_in_row"] > train.max_skipped_in_row:
      self._give_up(step, values)

  def _give_up(self, step: int, values: dict[str, Any]) -> None:
    """Writes the files with which `scmoe.replay` repeats the step; raises `NonFiniteError`."""
    state = self.state.for_checkpoint()
    ran, seed = self.step_fn, self.train.seed
    how = {"step": step, "seed": seed, "variant": ran.variant.given, "looped": ran.ran_looped}
    left = write_replay(
      self.workdir / REPLAY,
      lambda keeper: keeper.save_now(self.step, state, self.batches.state(), self._meta()),
      self.batch,
      how,
      values,
    )
    raise not_finite(step, values, self.built, left)

  # -- between steps: save, evaluate, sample ----------------------------------------------------

  def save(self, *, final: bool = False) -> None:
    """Starts a checkpoint of this step unless it has one; `final` waits until it is written.

    Also compares the hosts' times (`Journal.compare_hosts`).

    Raises:
      NonFiniteError, StorageError: as `Checkpointer.save`; or as `flush`.
    """
    # The step's line, if one is due, must be in metrics.jsonl before the step's checkpoint exists.
    self.flush()
    self.journal.saving()
    self.arm("save", allowance=True)
    arguments = lambda: (self.step, self.state.for_checkpoint(), self.batches.state(), self._meta())
    if final:
      # If `wait` finds that the save under way failed, this step does not count as saved.
      if not (self.checkpointer.wait() and self.checkpointer.last_saved == self.step):
        self.checkpointer.save_now(*arguments())
    elif self.checkpointer.last_saved != self.step:
      self.checkpointer.save(*arguments())
    self.journal.compare_hosts(self.step)
    self._pause()

  def evaluate(self) -> None:
    """Evaluates this step after `flush`, if the trainer can; a stop may end it early."""
    if self.trainer.evaluate is None:
      return
    self.flush()
    self.arm("evaluation", allowance=True)
    values = self.trainer.evaluate(self.state.readable(), self._poll_in_evaluation)
    if values is not None:
      self.journal.evaluated(self.step, values)
    self.evaluated_step = self.step if values is not None else -1
    self._pause()

  def sample(self) -> None:
    """Prints a sample of text, if the trainer makes samples and `train.sample_tokens` is not 0.

    A sample that fails does not stop the run; `flush`, which is called first, may.
    """
    if self.trainer.sample is None or not self.train.sample_tokens:
      return
    self.flush()
    self.arm("sample", allowance=True)
    try:
      text = self.trainer.sample(self.state.readable())
      self.journal.say(f"sample at step {self.step}:\n{text}")
    except Exception as error:  # whatever fails in the model or the tokenizer, training goes on
      warn(f"no sample at step {self.step}: {type(error).__name__}: {error}")
    self._pause()

  def _evaluated(self) -> bool:
    """True if this step needs no evaluation: it was evaluated, or the trainer never evaluates.

    All processes get the same answer.
    """
    if self.trainer.evaluate is None or self.evaluated_step == self.step:
      return True
    return first_decides(self.journal.has_evaluation(self.step))

  def _poll_in_evaluation(self, *, compiles: bool = False) -> bool:
    self.arm("evaluation batch", allowance=compiles)
    return self.stop.poll()

  def arm(self, what: str, *, allowance: bool = False) -> None:
    """Gives the work that begins now a limit of time, if `train.watchdog_seconds` is not 0.

    Args:
      what: kind of the work. The first work of a kind may compile, so its limit is the longer of
        `train.first_step_seconds` and `train.watchdog_seconds`. Later ones get `watchdog_seconds`.
      allowance: True: this work gets the longer limit, whether it is the first of its kind or not.
    """
    train = self.train
    if not train.watchdog_seconds:
      return
    known, seconds = what in self.compiled, train.watchdog_seconds
    if allowance or not known:
      seconds = max(seconds, train.first_step_seconds)
    self.compiled.add(what)
    place = f"step {self.step + 1}" if what == "step" else f"{what} after step {self.step}"
    self.watchdog.arm(seconds, place)

  def _pause(self) -> None:
    self.journal.pause()
    self.watchdog.disarm()

  def profile(self, step_fn: GuidedStep | Search) -> None:
    """Starts jax's profiler before step `train.profile_step`; stops it `profile_steps` steps later.

    Before both it calls `flush`. A run that ends before it does a step without the profiler stops
    it in `close`. The trace is taken in this process, so no port is opened for a profiler's client.

    Args:
      step_fn: runs the steps; a profile that it is making for XLA waits until this trace has ended.
    """
    train = self.train
    if train.profile_step and self.step + 1 == train.profile_step:
      self.flush()
      step_fn.hold_profiling(True)
      jax.profiler.start_trace(str(self.workdir / "profile"))
      self.tracing = True
    elif self.tracing and self.step + 1 >= train.profile_step + train.profile_steps:
      self.flush()
      self._stop_trace()
      step_fn.hold_profiling(False)

  def _stop_trace(self) -> None:
    """Writes the trace that was started, if one is being taken; a failure causes a warning."""
    if self.tracing:
      self.tracing = False
      first, place = self.train.profile_step, self.workdir / "profile"
      try:
        end_recording(str(place))
      except (StorageError, RuntimeError) as error:  # the disk, or the profiler
        return warn(f"no trace of steps {first} to {self.step}: {error}")
      self.journal.say(f"trace of steps {first} to {self.step}: {place}")

  def _meta(self) -> dict[str, Any]:
    """The description of run and step in a checkpoint, JSON-able."""
    return {
      "config": self.built.config,
      "data_fingerprint": self.trainer.data.fingerprint(),
      "mesh": dict(self.built.mesh.shape),
      "processes": jax.process_count(),
      "tokens": self.step * self.tokens_per_step,
      "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
      **self.step_fn.history,
    }


def _origin(meta: dict[str, Any]) -> str:
  """The beginning of the console's line on a checkpoint; the run's folder follows.

  It is "starting from the weights in" for a checkpoint of weights alone, else for example "resuming
  from step 100 of".
  """
  if meta.get(WEIGHTS_ONLY):
    return "starting from the weights in"
  return f"resuming from step {meta['step']} of"
