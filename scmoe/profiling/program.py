"""Compiles, calls and traces programs, for training, `scmoe.profile` and the experiments."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from scmoe.profiling.costs import instruction_costs
from scmoe.profiling.recording import recording
from scmoe.profiling.trace import Event, find_trace, read_events
from scmoe.profiling.wire import as_profile, operation_names


class Program:
  """A lowered function, compiled with given options and called like the function.

  Args:
    lowered: result of `jax.jit(f).lower(...)`.
  """

  def __init__(self, lowered: Any):
    self.lowered = lowered
    self.compiled: Any = None
    self.compile_seconds: list[float] = []  # one entry per compilation so far

  def compile(self, options: dict[str, Any], profile: bytes = b"") -> Program:
    """Compiles; a second call, with other options or a profile, replaces the first program.

    Args:
      options: XLA's compiler options.
      profile: measured times (`latencies`) for XLA's scheduler; empty: none.
    """
    start = time.perf_counter()
    given = {**options, "fdo_profile": profile} if profile else options
    self.compiled = self.lowered.compile(compiler_options=given)
    self.compile_seconds.append(time.perf_counter() - start)
    return self

  def __call__(self, *args: Any) -> Any:
    """Calls the compiled program."""
    return self.compiled(*args)

  @property
  def text(self) -> str:
    """The optimised program as HLO text; for GPUs in the order in which it runs."""
    return self.compiled.as_text()

  @property
  def names(self) -> dict[str, str]:
    """Instruction -> op_name, for all instructions that a trace may name."""
    return operation_names(self.compiled)

  @property
  def gibibytes(self) -> float:
    """Memory of arguments, results and temporaries in GiB; donated arguments count once."""
    m = self.compiled.memory_analysis()
    used = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return (used - m.alias_size_in_bytes) / 2**30


def traced(run: Callable[[], object], folder: str | None = None) -> list[Event]:
  """Kernels and copies that all GPUs execute during `run`.

  Args:
    run: calls programs, and returns when the devices are done.
    folder: where the trace is kept, for XProf or Perfetto; None: it is deleted.

  Raises:
    StorageError: the trace cannot be written.
  """
  with tempfile.TemporaryDirectory() as directory:
    place = folder or directory
    with recording(place):
      run()
    return read_events(find_trace(place))


def latencies(folder: str, program: Program) -> bytes:
  """Times of every instruction of a program, from the trace of its runs; empty without a GPU.

  XLA's scheduler reads them as its profile (profile-guided latency estimation).

  Args:
    folder: written by `jax.profiler`.
    program: the compiled program that ran.
  """
  events = read_events(find_trace(folder))
  return as_profile(instruction_costs(events, program.text)) if events else b""


def profiled(run: Callable[[], object], program: Program) -> bytes:
  """Runs `run`, which calls `program`, under the profiler, and returns the `latencies`.

  Raises:
    StorageError: the trace cannot be written.
  """
  with tempfile.TemporaryDirectory() as directory:
    with recording(directory):
      run()
    return latencies(directory, program)
