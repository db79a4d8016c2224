"""Ends traces of jax's profiler; one that cannot be written is a storage failure."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from scmoe.base.errors import StorageError


@contextlib.contextmanager
def recording(folder: str) -> Iterator[None]:
  """Traces what runs in the block, and writes the trace to `folder`.

  Raises:
    RuntimeError: another trace is running.
    StorageError: as `end_recording`.
  """
  jax.profiler.start_trace(folder)
  try:
    yield
  finally:
    end_recording(folder)


def end_recording(folder: str) -> None:
  """Ends the running trace and writes it to `folder`, where it was to go when it began.

  jax reports a full disk with the word that it has for a device without memory,
  RESOURCE_EXHAUSTED. So the failure gets its own class here, where its cause is known. What was
  written of the trace is removed.

  Raises:
    RuntimeError: no trace is running.
    StorageError: the trace cannot be written.
  """
  try:
    jax.profiler.stop_trace()
  except (jax.errors.JaxRuntimeError, OSError) as error:
    for place in Path(folder).glob("plugins/profile/*"):
      if f"{place}/" in str(error):  # half a trace is of no use, and takes room from checkpoints
        shutil.rmtree(place, ignore_errors=True)
    why = " ".join(str(error).split())[:300]
    raise StorageError(f"the trace in {folder} cannot be written: {why}") from None
