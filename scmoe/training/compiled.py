"""Keeps compiled programs in a folder for later starts, unless the user set jax's cache."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

PROGRAMS = "programs"  # folder of jax's compilation cache in the run's or the user's folder
CACHE, _LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
# Programs that compile in fewer seconds are not kept, unless jax's own limit (`_LEAST`) is lower.
_WORTH = 0.1


@contextlib.contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
  """While the context lasts, jax keeps compiled programs in `folder`, unless the user set a cache.

  A later start reads them there instead of compiling; programs that compile fast (`_WORTH`) are not
  kept. A user sets a cache with
  JAX_COMPILATION_CACHE_DIR or jax's option of that name; then nothing is changed. Programs for CPUs
  use the instructions of this processor, so each kind of processor has a folder of its own in
  `folder`.
  """
  if getattr(jax.config, CACHE) is not None:
    yield
    return
  least = getattr(jax.config, _LEAST)
  jax.config.update(CACHE, str(folder.resolve() / _processor()))
  jax.config.update(_LEAST, min(least, _WORTH))
  # jax decides at its first compilation which cache it uses. After a reset it decides again.
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update(CACHE, None)
    jax.config.update(_LEAST, least)
    compilation_cache.reset_cache()


def _processor() -> str:
  """12 hexadecimal digits that name this kind of CPU: a digest of what Python's `platform` tells.

  The CPU's features are part of the digest where /proc/cpuinfo tells them.
  """
  kind = f"{platform.machine()} {platform.processor()}"
  with contextlib.suppress(OSError):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
  return hashlib.blake2b(kind.encode(), digest_size=6).hexdigest()
