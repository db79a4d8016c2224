"""Jitted steps that XLA schedules, if asked for, by measured latencies.

XLA starts a collective as late as its cost model allows, and the model assumes fast links. With
measured times (profile-guided latency estimation) XLA starts the all-to-all early enough: on
4 x H200 over a slow link computation then hid 94 % of it in a forward pass (experiments/LOG.md,
2026-11-21). So with `overlap.ablation.profile_guided` a run that exchanges rows between NVIDIA GPUs
profiles its first steps, compiles the step a second time, and keeps the profile: a later start of
the same program reads it and compiles once.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import StorageError
from scmoe.base.output import warn
from scmoe.base.stored import StoredError, read_bytes, write_whole
from scmoe.blocks.options import OverlapConfig
from scmoe.profiling.program import Program, latencies
from scmoe.profiling.recording import end_recording
from scmoe.training.distributed import all_agree, bytes_of_first, is_first
from scmoe.training.host_update import host_step_of
from scmoe.training.lowered import lower

Collect = Callable[[str, Program], bytes]
# Most traces that a step gives up, or cannot start because another one is running.
PATIENCE = 20
# Steps before the profile: the first call of a program loads its kernels, which takes time.
WARM_UP = 1


class GuidedStep:
  """A jitted step that, if asked for, is compiled with a profile of itself, kept or new.

  `overlap.ablation.profile_guided` asks for it, on NVIDIA GPUs. If no profile is kept, the step
  profiles its first calls and, if that gives a profile, is compiled a second time. Call it like the
  step. Several processes must compile the same program: each runs the profiler, and all use the
  profile of process 0, new or kept.

  Args:
    step: a `jax.jit`-ed function, or a `HostStep`; compiled here with the options of `overlap`.
    overlap: see `OverlapConfig`.
    directory: where profiles are kept, one per program, jax version, device kind and device count.
    gpu: whether the step runs on NVIDIA GPUs; None: True if jax's default backend is a GPU.
    variant: the `scmoe.training.variants.Variant` that a training step is; only stored.
    collect: reads a program's profile from a folder that `jax.profiler` wrote.
    say: prints a line.
  """

  # Whether a step's result is final only once `left_over` was asked, and the number of steps that
  # were run again so far (`RepeatingStep`).
  repeats, repeated = False, 0
  # Whether a `RepeatingStep` ran its last step with overflow rounds from the start; here False.
  ran_looped = False
  # Whether a search (`scmoe.training.search.Search`) has not chosen yet; here False.
  undecided = False

  def __init__(
    self,
    step: Any,
    overlap: OverlapConfig,
    directory: Path,
    *,
    gpu: bool | None = None,
    variant: Any = None,
    collect: Collect = latencies,
    say: Callable[[str], None] = print,
  ):
    self.step, self.overlap, self.directory = step, overlap, Path(directory)
    self.gpu = jax.default_backend() == "gpu" if gpu is None else gpu
    self.collect, self.say, self.variant = collect, say, variant
    self.program: Program | None = None
    # The file for the program's profile; None unless the step is to be guided by one.
    self.file: Path | None = None
    # Number of calls until the profile is complete, warm-up included; 0: none is being made.
    self.calls_to_profile = 0
    # Whether the program was called after its last compilation.
    self.called = False
    # Compiles the program when `finish` calls it; None: no compilation is waiting.
    self.waiting: Callable[[], None] | None = None
    # Number of traces that could not be started, or were given up.
    self.refused = 0
    # Whether no call may profile for now (`hold_profiling`).
    self.held = False
    self.trace: tempfile.TemporaryDirectory[str] | None = None

  @property
  def compiles_next(self) -> bool:
    """True if the next call compiles, which may take long."""
    return self.program is None or self.waiting is not None

  @property
  def settled(self) -> bool:
    """True once the program was called and will not be compiled again: its time can be measured."""
    prepared = self.program is not None and self.waiting is None and not self.calls_to_profile
    return prepared and self.called

  def compile(self, *args: Any, later: bool = False) -> None:
    """Compiles for arguments of these shapes.

    A profile-guided step is compiled with the program's kept profile. If there is none, its next
    calls collect one.

    Args:
      *args: arrays, or `jax.ShapeDtypeStruct`s with their shardings.
      later: trace and lower only; `finish`, or the next call, has XLA compile.
    """
    traced = self.step.trace(*args)
    self.program = Program(lower(self.step, traced, args, gpu=self.gpu))
    guided = self.gpu and self.overlap.ablation.profile_guided
    self.file = self.directory / f"{self._fingerprint()}.pb" if guided else None
    profile = b"" if self.file is None else bytes_of_first(_kept(self.file))
    collecting = guided and not profile
    if collecting:
      self.calls_to_profile = WARM_UP + self.overlap.ablation.profile_runs
    self.waiting = lambda: self._compile(profile, profiling=collecting)
    if not later:
      self.finish()

  def finish(self) -> None:
    """Has XLA compile, if a compilation is waiting. Threads may finish several steps at once."""
    if self.waiting is not None:
      self.waiting()
      self.waiting = None

  @property
  def history(self) -> dict[str, Any]:
    """The figures that decide which program runs the next step, for a checkpoint; here none.

    The two programs of a `RepeatingStep` round differently. A resumed run needs these figures to
    choose as an uninterrupted one would, and so to get the same bits.
    """
    return {}

  def go_on(self, history: Mapping[str, Any]) -> None:
    """Goes on from what `history` left in a mapping, such as a checkpoint's meta.

    Here it left nothing, so this does nothing.
    """
    del history

  def forget(self) -> None:
    """Forgets the steps so far, which were no steps of a run; here it does nothing."""

  def begin(self, *args: Any) -> Any:
    """Dispatches one step; here the same as a call, whose result is final."""
    return self(*args)

  def left_over(self, arrays: Mapping[str, Any]) -> bool:
    """Whether the step that was begun last has to be run again (`again`); here never."""
    del arrays
    return False

  def again(self, *args: Any) -> Any:
    """Runs the step again that left rows over; here nobody calls it."""
    return self(*args)

  def give_up_trace(self) -> None:
    """Ends the trace of a profile under way, if there is one, unread; later calls begin a new one.

    jax takes one trace at a time, and a profile needs a trace of this program's calls alone. After
    `PATIENCE` traces the step goes on without a profile.
    """
    if self.trace is None:
      return
    trace, self.trace = self.trace, None
    self.calls_to_profile = self.overlap.ablation.profile_runs
    _drop(trace)
    self._refused("other programs ran while it was profiled")

  def hold_profiling(self, held: bool) -> None:
    """Whether calls may profile for now; `held` gives up the trace of a profile under way."""
    if held:
      self.give_up_trace()
    self.held = held

  def __call__(self, *args: Any) -> Any:
    """Runs one step; the first calls may compile and profile."""
    if self.program is None:
      self.compile(*args)
    self.finish()
    assert self.program is not None
    runs = self.overlap.ablation.profile_runs
    held = self.held and self.calls_to_profile <= runs
    if self.calls_to_profile == runs and not held:
      self._begin_trace()
    out = host_step_of(self.step, self.program)(*args)
    self.called = True
    if self.calls_to_profile and not held:
      self.calls_to_profile -= 1
      if not self.calls_to_profile:
        jax.block_until_ready(out)
        self._finish_trace()
    return out

  def named_program(self) -> Program:
    """The program, recompiled if its CUDA graphs hide its operations from a profile.

    The recompiled one has neither CUDA graphs nor measured latencies.
    """
    assert self.program is not None, "not compiled yet"
    plain = self.overlap.compiler_options(gpu=self.gpu, profiling=True)
    if plain == self.overlap.compiler_options(gpu=self.gpu):
      return self.program
    return Program(self.program.lowered).compile(plain)

  def _compile(self, profile: bytes, *, profiling: bool) -> None:
    assert self.program is not None
    options = self.overlap.compiler_options(gpu=self.gpu, profiling=profiling)
    self.program.compile(options, profile)
    self.called = False

  def _begin_trace(self) -> None:
    trace, started = tempfile.TemporaryDirectory(), True
    try:
      jax.profiler.start_trace(trace.name)
    except RuntimeError:  # another trace, e.g. the user's, is running: a later step tries again
      started = False
    if all_agree(started):
      self.trace = trace
      return
    if started:
      _drop(trace)
    else:
      trace.cleanup()
    self.calls_to_profile += 1
    self._refused("another trace is running")

  def _refused(self, why: str) -> None:
    """Counts a trace without a profile; the last one that `PATIENCE` allows ends the attempts."""
    self.refused += 1
    if self.refused >= PATIENCE:
      self.calls_to_profile = 0
      self.say(f"profile-guided scheduling: {why}; going on without a profile")

  def _finish_trace(self) -> None:
    assert self.program is not None
    assert self.file is not None, "only a guided step is traced"
    if self.trace is None:
      return
    profile = b""
    try:
      with self.trace as directory:
        end_recording(directory)
        profile = self.collect(directory, self.program)
    except StorageError as error:
      warn(f"a trace for profile-guided scheduling was lost: {error}")
    self.trace = None
    profile = bytes_of_first(profile)
    if not profile:
      self.say("profile-guided scheduling: the profile is empty; going on without it")
      return
    if is_first():
      _keep(self.file, profile)
    self.say(f"profile-guided scheduling: compiling with measured latencies, kept in {self.file}")
    self.waiting = lambda: self._compile(profile, profiling=False)

  def _fingerprint(self) -> str:
    """The name of the profile's file before `.pb`: 16 hexadecimal digits.

    They are a digest of the lowered program, jax's version, and the kind and number of devices.
    """
    assert self.program is not None
    device = jax.devices()[0].device_kind
    text = self.program.lowered.as_text()
    parts = (text, jax.__version__, device, str(jax.device_count()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _drop(trace: tempfile.TemporaryDirectory[str]) -> None:
  """Ends the running trace and removes it unread; a failure causes a warning."""
  try:
    end_recording(trace.name)
    trace.cleanup()
  except Exception as error:  # the profiler, or the disk on which it writes
    warn(f"a trace for profile-guided scheduling was lost: {type(error).__name__}: {error}")


def _kept(file: Path) -> bytes:
  """The profile that an earlier start kept in a file; b"" if there is no readable one."""
  try:
    return read_bytes(file)
  except (FileNotFoundError, StoredError):
    return b""


def _keep(file: Path, profile: bytes) -> None:
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, profile)
  except OSError as error:
    warn(f"{file} cannot be written ({error.strerror}): the next start measures again")
