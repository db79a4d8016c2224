"""The training step under XLA's latency-hiding scheduler, with latencies measured in the run.

XLA starts a collective as late as its cost model allows, and the model assumes fast links. With
measured times (profile-guided latency estimation) it leaves the all-to-all the window it needs:
on 4 x H200 over a slow link 94 % of it hidden, against 33 % without (experiments/LOG.md). So the
first steps of a run are profiled, the step is compiled a second time, and the profile stays with
the run: a later start reads it and compiles once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scmoe.blocks.options import OverlapConfig
from scmoe.profiling.program import Program, latencies

Collect = Callable[[str, Program], bytes]
WARM_UP = 1  # steps before the profile: the first call of a program loads its kernels


class GuidedStep:
  """A jitted step that profiles itself once, then runs with what it learnt.

  Call it like the step. Not for several processes, whose programs must be compiled alike: there it
  uses a profile that all of them find, and collects none.

  Args:
    step: a `jax.jit`-ed function; compiled here with the options of `overlap`.
    overlap: see `OverlapConfig`.
    directory: where profiles are kept, one per program and device kind.
    gpu: whether it runs on NVIDIA GPUs, by default whether jax does.
    collect: reads the profile of a program from a folder of `jax.profiler`.
    say: prints a line.
  """

  def __init__(
    self,
    step: Any,
    overlap: OverlapConfig,
    directory: Path,
    *,
    gpu: bool | None = None,
    collect: Collect = latencies,
    say: Callable[[str], None] = print,
  ):
    self.step, self.overlap, self.directory = step, overlap, Path(directory)
    self.gpu = jax.default_backend() == "gpu" if gpu is None else gpu
    self.collect, self.say = collect, say
    self.program: Program | None = None
    self.file = self.directory
    self.calls_to_profile = 0  # steps still to be profiled, warm-up included
    self.trace: tempfile.TemporaryDirectory[str] | None = None

  @property
  def compiles_next(self) -> bool:
    """Whether the next call compiles, which takes long."""
    return self.program is None or self.calls_to_profile == 1

  def compile(self, *args: Any) -> None:
    """Compiles for arguments of these shapes, with the kept profile, or for collecting one.

    Args:
      *args: arrays, or `jax.ShapeDtypeStruct`s with their shardings.
    """
    self.program = Program(self.step.lower(*args))
    self.file = self.directory / f"{self._fingerprint()}.pb"
    guided = self.gpu and self.overlap.profile_guided
    profile = self.file.read_bytes() if guided and self.file.exists() else b""
    collecting = guided and jax.process_count() == 1 and not profile
    if collecting:
      self.calls_to_profile = WARM_UP + self.overlap.profile_runs
    self.program.compile(self._options(profiling=collecting), profile)

  def __call__(self, *args: Any) -> Any:
    """One step; the first ones may compile and profile."""
    if self.program is None:
      self.compile(*args)
    assert self.program is not None
    if self.calls_to_profile == self.overlap.profile_runs:
      self._begin_trace()
    out = self.program(*args)
    if self.calls_to_profile:
      self.calls_to_profile -= 1
      if not self.calls_to_profile:
        jax.block_until_ready(out)
        self._finish_trace()
    return out

  def _options(self, *, profiling: bool) -> dict[str, Any]:
    return self.overlap.compiler_options(gpu=self.gpu, profiling=profiling)

  def _begin_trace(self) -> None:
    self.trace = tempfile.TemporaryDirectory()
    try:
      jax.profiler.start_trace(self.trace.name)
    except RuntimeError:  # a trace that the user asked for is running: later steps will do
      self.trace.cleanup()
      self.trace = None
      self.calls_to_profile += 1

  def _finish_trace(self) -> None:
    assert self.program is not None
    if self.trace is None:
      return
    with self.trace as directory:
      jax.profiler.stop_trace()
      profile = self.collect(directory, self.program)
    self.trace = None
    if not profile:
      self.say("profile-guided scheduling: the profile is empty; going on without it")
      return
    self.directory.mkdir(parents=True, exist_ok=True)
    part = self.file.with_suffix(".part")
    part.write_bytes(profile)
    os.replace(part, self.file)
    self.say(f"profile-guided scheduling: compiling with measured latencies, kept in {self.file}")
    self.program.compile(self._options(profiling=False), profile)

  def _fingerprint(self) -> str:
    """Of the program, the devices and the versions: another of them needs another profile."""
    assert self.program is not None
    device = jax.devices()[0].device_kind
    text = self.program.lowered.as_text()
    parts = (text, jax.__version__, device, str(jax.device_count()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
