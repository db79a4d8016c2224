"""Keeps one GPU's lowered programs beside compiled ones, so that later starts need not lower them.

jax's compilation cache spares XLA's compilation only. Its key is a digest of the lowered program,
so every start lowers first. For a Pallas kernel that means Mosaic's layout inference in Python:
`gpt2_moe_small` lowers seventeen kernels in 6 s before XLA loads the result in 0.4 s
(experiments/LOG.md, 2026-11-26). Tracing is cheap, so here the traced program is the key:

    trace -> digest of jaxpr, package, jax, ... (`_key`) -> kept StableHLO, or lower it and keep it

The first start compiles the exported program (`jax.export`), too, so at a later start jax's cache
may have it compiled.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax import export

import scmoe
from scmoe.base.compat import compiler_options
from scmoe.base.stored import StoredError, read_bytes, write_whole
from scmoe.training.compiled import CACHE

# A kept file of more bytes is not read.
_MOST = 2**30
# The first bytes of a kept file: a SHA-256, which shows if the program after it was cut or changed.
_DIGEST = 32
# Addresses of functions, which a jaxpr's text may hold, are no part of the program.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Names of environment variables that may change what jax, Mosaic or XLA make of a jaxpr begin so.
_RELEVANT = ("XLA_", "JAX_", "MOSAIC_", "LIBTPU_", "NVIDIA_TF32_OVERRIDE")
# Variables whose names begin so are for jax's client, most of them for the memory that it takes;
# they change no program.
_OF_CLIENT = ("XLA_PYTHON_CLIENT_", "XLA_CLIENT_")


def lower(step: Any, traced: Any, args: tuple[Any, ...], *, gpu: bool) -> Any:
  """`traced.lower()`, read from jax's cache folder if an earlier start kept it there.

  Only programs of one GPU, without arrays in pinned memory of the host, are kept. All others are
  lowered as usual, as is a program that cannot be exported, for example since it calls back to
  Python. Without jax's cache folder every program is lowered as usual.

  Args:
    step: a `jax.jit`-ed function or a `HostStep`, whose program is lowered as usual.
    traced: `step.trace(*args)`.
    args: arrays, or `jax.ShapeDtypeStruct`s with their shardings.
    gpu: whether the program is for a GPU.

  Returns:
    A `jax.stages.Lowered` that is compiled and called like that of `step`.
  """
  folder = getattr(jax.config, CACHE)
  if not gpu or folder is None or not _on_one_device(args):
    return traced.lower()
  file = Path(folder) / f"lowered-{_key(traced)}"
  program = _read(file)
  if program is None:
    try:
      program = _exported(step, args)
    except (ValueError, NotImplementedError):  # the step cannot be exported; see `_exported`
      return traced.lower()
    _keep(file, program)
  return _as_step(program, traced).lower(*args)


def _on_one_device(args: tuple[Any, ...]) -> bool:
  """Whether all arguments with a sharding lie on one device and, if it is a GPU, in its own memory.

  A `jax.ShapeDtypeStruct` or an array of numpy may have no sharding.
  """
  devices = set()
  for x in jax.tree.leaves(args):
    sharding = getattr(x, "sharding", None)
    if sharding is None:
      continue
    devices |= set(sharding.device_set)
    if sharding.memory_kind not in (None, "device") and _is_gpu(sharding):
      return False
  return len(devices) <= 1


def _is_gpu(sharding: Any) -> bool:
  return all(device.platform == "gpu" for device in sharding.device_set)


def _key(traced: Any) -> str:
  """The part of a kept file's name that tells traced programs apart: 32 hexadecimal digits.

  They are a digest of the jaxpr and its constants, argument types and compiler options, this
  package's code, the versions of jax and jaxlib, the kind of device, and environment variables
  (`_RELEVANT`) and options of jax that may change the program.
  """
  digest = hashlib.sha256()
  for part in (
    _ADDRESS.sub("", str(traced.jaxpr)),
    f"{traced.args_info} {compiler_options(traced)}",
    _sources(),
    f"{jax.__version__} {jaxlib.__version__} {jax.devices()[0].device_kind}",
    repr(sorted(item for item in os.environ.items() if _changes(item[0]))),
    repr(sorted((name, str(value)) for name, value in jax.config.values.items() if _shapes(name))),
  ):
    digest.update(part.encode() + b"\0")
  for value in traced.jaxpr.consts:
    digest.update(np.asarray(value).tobytes() if hasattr(value, "dtype") else repr(value).encode())
  return digest.hexdigest()[:32]


def _changes(variable: str) -> bool:
  """Whether an environment variable with this name may change a program."""
  return variable.startswith(_RELEVANT) and not variable.startswith(_OF_CLIENT)


def _shapes(name: str) -> bool:
  """Whether the option of jax with this name may change a program.

  Those of caches, logs, dumps, tracebacks and debugging are taken not to change one.
  """
  return not any(word in name for word in ("cache", "log", "dump", "traceback", "debug"))


@functools.cache
def _sources() -> str:
  """A digest of this package's Python files: kernels may change while jaxprs read the same."""
  digest = hashlib.sha256()
  root = Path(scmoe.__file__).parent
  for file in sorted(root.rglob("*.py")):
    digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
  return digest.hexdigest()


def _exported(step: Any, args: tuple[Any, ...]) -> bytes:
  """The serialised StableHLO of `step`, as a function of its arguments' leaves.

  Raises:
    ValueError: it needs several devices or calls back to Python, or jax cannot export it.
    NotImplementedError: jax cannot export it.
  """
  leaves, tree = jax.tree.flatten(args)

  def flat(*leaves):
    return tuple(jax.tree.leaves(step.__wrapped__(*tree.unflatten(leaves))))

  # jax exports only custom calls that stay the same in later versions, unless told otherwise. Here
  # any call will do, since another version of jax has another `_key`.
  any_call = export.DisabledSafetyCheck.custom_call("ALL")
  exported = export.export(jax.jit(flat), disabled_checks=[any_call])(*leaves)
  if exported.nr_devices != 1:
    raise ValueError("a program of several devices, whose arguments have no shardings")
  if "callback" in exported.mlir_module():
    raise ValueError("a callback's address is valid in this process only")
  return bytes(exported.serialize())


def _as_step(program: bytes, traced: Any) -> Any:
  """A jitted function that runs a kept program like the traced function.

  It has the traced function's name, arguments, results, donated arguments and compiler options.
  """
  exported = export.deserialize(bytearray(program))
  out_tree = jax.tree.structure(traced.out_info)
  infos = [jax.tree.leaves(info) for info in traced.args_info[0]]

  def run(*args):
    return out_tree.unflatten(exported.call(*jax.tree.leaves(args)))

  run.__name__ = run.__qualname__ = traced.fun_name
  return jax.jit(
    run,
    donate_argnums=[i for i, leaves in enumerate(infos) if any(leaf.donated for leaf in leaves)],
    compiler_options=compiler_options(traced),
  )


def _read(file: Path) -> bytes | None:
  """The program that a file keeps; None if it cannot be read, or its digest does not fit."""
  try:
    content = read_bytes(file, _MOST)
  except (OSError, StoredError):
    return None
  program = content[_DIGEST:]
  return program if hashlib.sha256(program).digest() == content[:_DIGEST] else None


def _keep(file: Path, program: bytes) -> None:
  """Writes a program and its digest; if that fails, the next start lowers again."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, hashlib.sha256(program).digest() + program)
  except OSError:
    pass
