"""Keeps compiled programs in a folder for later starts, unless the user set jax's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from scmoe.base.output import warn
from scmoe.training.distributed import is_first

PROGRAMS = "programs"  # folder of jax's compilation cache in the run's or the user's folder
CACHE, _LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
# Programs that compile in fewer seconds are not kept, unless jax's own limit (`_LEAST`) is lower.
_WORTH = 0.1
_ZSTD, _ZLIB = b"\x28", b"\x78"  # the first byte of a compressed file
_CHECKED = ".checked"  # its time is that of the folder's last check
_YOUNG = 300.0  # seconds for which another process may still be writing an entry


@contextlib.contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
  """While the context lasts, jax keeps compiled programs in `folder`, unless the user set a cache.

  A later start reads them there instead of compiling; programs that compile fast (`_WORTH`) are not
  kept. A user sets a cache with JAX_COMPILATION_CACHE_DIR or jax's option of that name; then
  nothing is changed. Programs for CPUs use the instructions of this processor, so each kind of
  processor has a folder of its own in `folder`. Programs there that are cut short are removed
  first (`remove_cut`), by process 0.
  """
  if getattr(jax.config, CACHE) is not None:
    yield
    return
  least = getattr(jax.config, _LEAST)
  cache = folder.resolve() / _processor()
  # `is_first` starts jax's backend, for which a process that is alone need not wait here.
  if not jax.distributed.is_initialized() or is_first():
    remove_cut(cache)
  jax.config.update(CACHE, str(cache))
  jax.config.update(_LEAST, min(least, _WORTH))
  # jax decides at its first compilation which cache it uses. After a reset it decides again.
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update(CACHE, None)
    jax.config.update(_LEAST, least)
    compilation_cache.reset_cache()


def remove_cut(cache: Path) -> None:
  """Removes the programs in `cache` that are not whole, and says how many in a warning.

  A process that is killed as it writes a program, or whose disk is full, leaves the first part. jax
  cannot read that, compiles anew at every start, and never overwrites a file. Only programs that
  the last check left unread are read, and none of the last `_YOUNG` seconds, which may be
  unfinished; what `_whole` cannot judge stays. A folder that is not there, or cannot be read or
  written, is left as it is.
  """
  now, stamp, cut = time.time(), cache / _CHECKED, 0
  with contextlib.suppress(OSError):
    since = stamp.stat().st_mtime - _YOUNG if stamp.exists() else 0.0
    for file in cache.glob("*-cache"):
      with contextlib.suppress(OSError):  # another process may remove the same file
        if file.is_file() and since <= file.stat().st_mtime <= now - _YOUNG and not _whole(file):
          file.unlink()
          cut += 1
    if cache.exists():
      stamp.touch()
      os.utime(stamp, (now, now))
  if cut:
    warn(f"{cache}: removed compiled programs that were cut short, to compile them again: {cut}")


def _whole(file: Path) -> bool:
  """False if the file ends before its compressed data do, or decompression finds these damaged.

  jax compresses a program by zstd or by zlib. True for a file that begins like neither of them,
  unless its first MiB has no byte but zeros, which a loss of power leaves. True also for one of
  zstd where the package zstandard is missing.
  """
  with file.open("rb") as source:
    piece = source.read(1 << 20)
    if not piece.strip(b"\0"):
      return False
    errors: tuple[type[Exception], ...] = (zlib.error,)
    if piece[:1] == _ZSTD:
      try:
        import zstandard  # optional: a run can start without this package
      except ModuleNotFoundError:
        return True
      stream, errors = zstandard.ZstdDecompressor().decompressobj(), (zstandard.ZstdError,)
    elif piece[:1] == _ZLIB:
      stream = zlib.decompressobj()
    else:
      return True
    try:
      while piece and not stream.eof:
        stream.decompress(piece)
        piece = source.read(1 << 20)
    except errors:
      return False
    return stream.eof


def _processor() -> str:
  """12 hexadecimal digits that name this kind of CPU: a digest of what Python's `platform` tells.

  The CPU's features are part of the digest where /proc/cpuinfo tells them.
  """
  kind = f"{platform.machine()} {platform.processor()}"
  with contextlib.suppress(OSError):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
  return hashlib.blake2b(kind.encode(), digest_size=6).hexdigest()
