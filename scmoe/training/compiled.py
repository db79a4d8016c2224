"""Compiled programs stay with a run, so that a second start loads what the first one compiled."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

PROGRAMS = "programs"  # in the run's folder: jax's compilation cache
_CACHE, _LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_WORTH = 0.1  # seconds of compilation from which a program is kept


@contextlib.contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
  """jax keeps what is compiled in here in `folder`, and finds what was kept before.

  Nothing, where its compilation cache is set already (`JAX_COMPILATION_CACHE_DIR`). Programs for
  CPUs are machine code of the instructions that this processor has: each kind has a folder.
  """
  if getattr(jax.config, _CACHE) is not None:
    yield
    return
  least = getattr(jax.config, _LEAST)
  jax.config.update(_CACHE, str(folder.resolve() / _processor()))
  jax.config.update(_LEAST, min(least, _WORTH))
  # What was compiled before has settled that there is no cache, or which one.
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update(_CACHE, None)
    jax.config.update(_LEAST, least)
    compilation_cache.reset_cache()


def _processor() -> str:
  """A name of this kind of processor."""
  kind = f"{platform.machine()} {platform.processor()}"
  with contextlib.suppress(OSError):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
  return hashlib.blake2b(kind.encode(), digest_size=6).hexdigest()
