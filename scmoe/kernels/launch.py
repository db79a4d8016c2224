"""Launches Pallas kernels: on which devices, with which semantics, and how tests simulate them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)
_default_sms: contextvars.ContextVar[int] = contextvars.ContextVar("default_sms", default=132)


@contextlib.contextmanager
def interpreted(params: Any, num_sms: int = 2) -> Iterator[None]:
  """Inside this context Pallas' GPU interpret mode simulates kernels on a CPU; for tests.

  Args:
    params: see `compat.gpu_interpret_params`.
    num_sms: multiprocessors of the simulated GPU.
  """
  tokens = _interpret.set(params), _default_sms.set(num_sms)
  try:
    yield
  finally:
    _interpret.reset(tokens[0])
    _default_sms.reset(tokens[1])


def simulated() -> bool:
  """Whether kernels are simulated."""
  return _interpret.get() is not None


def interpretation() -> Any:
  """The simulation in use, or None.

  Every jitted program with a kernel takes it as a static argument, so that jax does not reuse a
  compiled program of the simulation for the device, or the reverse.
  """
  return (_interpret.get(), _default_sms.get()) if simulated() else None


def device_has_kernels(platform: str, compute_capability: str | None) -> bool:
  """Whether the Mosaic GPU kernels run on a device.

  They are written for Hopper's matrix instructions (wgmma), which compute capability 9.0 has; 10.0
  and later replaced them, and 8.x never had them.
  """
  return platform == "gpu" and compute_capability == "9.0"


def has_kernels(device: Any) -> bool:
  """Whether the Mosaic GPU kernels run on a `jax.Device`."""
  return device_has_kernels(device.platform, getattr(device, "compute_capability", None))


def runs_ptx() -> bool:
  """Whether kernels with inline PTX run: on Hopper, but not in the simulation."""
  return has_kernels(jax.devices()[0]) and not simulated()


def resolve_num_sms(num_sms: int | None) -> int:
  """The number of CTAs to launch: the caller's, or one for every multiprocessor of the GPU."""
  if num_sms is not None:
    return num_sms
  if _interpret.get() is not None:
    return _default_sms.get()
  device = jax.devices()[0]
  return getattr(device, "core_count", None) or 132 if device.platform == "gpu" else 132


def compiled(body, **options: Any):
  """`plgpu.kernel` with warpgroup semantics, for which all kernels here are written.

  Inside `interpreted` the kernel is simulated. A program that calls it takes `interpretation()` as
  a static argument.
  """
  if (interpret := _interpret.get()) is not None:
    options["interpret"] = interpret
  return plgpu.kernel(
    body,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # the default differs by version
      approx_math=True,
    ),
    **options,
  )


def varying_as(x: jax.Array, made: Any) -> Any:
  """A kernel's results `made`, marked as varying over the same mesh axes as its input x.

  `jax.shard_map` checks these marks (`check_vma`), and the results of a kernel lack them.
  """
  axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
  return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), made) if axes else made
