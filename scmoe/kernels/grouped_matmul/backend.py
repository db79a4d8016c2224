"""Decides whether kernels, XLA or the reference compute; logs each decision of "auto" once."""

import functools
import importlib
import logging
from types import ModuleType

import jax
import jax.numpy as jnp

from scmoe.kernels.launch import has_kernels

# The implementations of the experts' products: the user's word -> the module. Each module has the
# functions `forward`, `backward`, `grouped_rows` and `grouped_weights`, with arguments as in `xla`,
# and `ROW_TILE`: the rows of the tiles that it takes, or None if it takes tiles of any size.
MODULES = {
  "mosaic_gpu": "scmoe.kernels.grouped_matmul.mosaic_gpu",
  "xla": "scmoe.kernels.grouped_matmul.xla",
}
EXPERT_BACKENDS = ("auto", *MODULES)
BACKENDS = (*EXPERT_BACKENDS, "reference")  # for a single product, such as `grouped_matmul`

_log = logging.getLogger(__name__)


def widths_have_kernels(dtype, *widths: int) -> bool:
  """Whether the kernels take this type and these widths: positive multiples of 64.

  Args:
    dtype: type of the operands; the kernels take bfloat16 and float16.
    *widths: every width that is tiled, such as K and N.
  """
  return jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)) and all(
    width % 64 == 0 and width >= 64 for width in widths
  )


@functools.cache
def _say_once(message: str) -> None:
  _log.info(message)


def resolve_backend(backend: str, dtype, *widths: int) -> str:
  """The backend that runs: one of `BACKENDS`, but not "auto".

  Only "auto" asks whether the first device runs the kernels.

  Args:
    backend: one of `BACKENDS`; "auto" takes the kernels if the first device `has_kernels` (not
      inside `without_kernels`) and they take the operands, else XLA.
    dtype: type of the operands.
    *widths: every width that is tiled.

  Raises:
    ValueError: the name is unknown, or "mosaic_gpu" was asked for and cannot take the operands.
  """
  if backend not in BACKENDS:
    raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
  fits = widths_have_kernels(dtype, *widths)
  if backend == "mosaic_gpu" and not fits:
    raise ValueError(
      f"the mosaic_gpu kernels take bfloat16 or float16 and widths that are multiples of 64, got"
      f' {jnp.dtype(dtype).name} and widths {widths}: use backend="auto" or "xla"'
    )
  if backend != "auto":
    return backend
  device = jax.devices()[0]
  if not has_kernels(device):
    _say_once(
      f"grouped products run on XLA: {device.device_kind} has no Mosaic GPU kernels here"
      " (they need compute capability 9.0)"
    )
    return "xla"
  if not fits:
    _say_once(
      f"grouped products of {jnp.dtype(dtype).name} with widths {widths} run on XLA: the kernels"
      " take bfloat16 or float16 and multiples of 64"
    )
    return "xla"
  _say_once(f"grouped products run on Mosaic GPU kernels ({device.device_kind})")
  return "mosaic_gpu"


def implementation(backend: str) -> ModuleType:
  """Imports the module of a backend, which has the functions that `MODULES` lists.

  Args:
    backend: a word of `MODULES`.
  """
  return importlib.import_module(MODULES[backend])
