"""Builds Pallas GPU kernels, says which devices run them, and lets tests simulate them on a CPU."""

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
_chosen: contextvars.ContextVar[bool] = contextvars.ContextVar("chosen", default=True)

# Multiprocessors that `sms_beside_exchanges` leaves to NCCL. Between two H200s without peer access
# NCCL 2.28 has four channels to send rows and four to add up gradients, each with a thread block;
# 124 of 132 is what was measured (experiments/exchange_cost).
LEFT_TO_COLLECTIVES = 8


@contextlib.contextmanager
def interpreted(params: Any, num_sms: int = 2) -> Iterator[None]:
  """Inside this context Pallas simulates on a CPU the kernels that `compiled` builds; for tests.

  Args:
    params: the interpret mode's parameters, from `compat.gpu_interpret_params`.
    num_sms: multiprocessors of the simulated GPU, and so the default number of CTAs.
  """
  tokens = _interpret.set(params), _default_sms.set(num_sms)
  try:
    yield
  finally:
    _interpret.reset(tokens[0])
    _default_sms.reset(tokens[1])


def simulated() -> bool:
  """Whether kernels are simulated on a CPU: the caller is inside `interpreted`."""
  return _interpret.get() is not None


def interpretation() -> Any:
  """The simulation's parameters and its number of multiprocessors; None outside `interpreted`.

  A jitted function whose kernels can be simulated must take this value as a static argument, or as
  a field of one. Otherwise jax might reuse a program compiled for the simulation on the device, or
  the reverse.
  """
  return (_interpret.get(), _default_sms.get()) if simulated() else None


def device_has_kernels(platform: str, compute_capability: str | None) -> bool:
  """Whether a device runs the Mosaic GPU kernels: a GPU of compute capability 9.0 (Hopper).

  The kernels are written for Hopper's matrix instructions (wgmma). Only compute capability 9.0 has
  these instructions: 8.x never had them, and 10.0 and later have others.
  """
  return platform == "gpu" and compute_capability == "9.0"


def kernels_may_run() -> bool:
  """Whether an automatic choice may take a kernel; False inside `without_kernels`."""
  return _chosen.get()


def has_kernels(device: Any) -> bool:
  """Whether the Mosaic GPU kernels run on a `jax.Device`: on Hopper, outside `without_kernels`."""
  return kernels_may_run() and device_has_kernels(
    device.platform, getattr(device, "compute_capability", None)
  )


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
  """Inside this context every automatic choice between a kernel and XLA is for XLA.

  It is for programs under `jax.vmap`, where jax's rule for cuDNN's attention fails with a mask of
  one head for all (`layers.dot_product`). The kernels here were not tried so on a GPU.
  """
  token = _chosen.set(False)
  try:
    yield
  finally:
    _chosen.reset(token)


def runs_ptx() -> bool:
  """Whether kernels written wholly in PTX run: the first device `has_kernels`, and no simulation.

  False inside `without_kernels`.
  """
  return has_kernels(jax.devices()[0]) and not simulated()


def resolve_num_sms(num_sms: int | None) -> int:
  """The number of CTAs to launch: `num_sms`, or by default one for every multiprocessor.

  Inside `interpreted` these are the simulated GPU's multiprocessors, otherwise those of the first
  device (taken to be 132 if it is no GPU or does not report their number).
  """
  if num_sms is not None:
    return num_sms
  if _interpret.get() is not None:
    return _default_sms.get()
  device = jax.devices()[0]
  return getattr(device, "core_count", None) or 132 if device.platform == "gpu" else 132


def sms_beside_exchanges() -> int:
  """The number of CTAs to launch beside collectives: eight multiprocessors get none.

  A collective holds its multiprocessors until it has ended. With a CTA for each multiprocessor, the
  CTAs meant for those would begin when the first ones have ended, and the kernel could take twice
  as long.
  """
  return resolve_num_sms(None) - LEFT_TO_COLLECTIVES


def compiled(body, **options: Any):
  """Builds a kernel with Pallas' warpgroup semantics and approximate math functions.

  Inside `interpreted` the kernel is simulated. So a jitted function with a kernel must take
  `interpretation()` as a static argument or in one, unless its kernel is never simulated, because
  it needs PTX.

  Args:
    body: the kernel's function.
    **options: further arguments of `plgpu.kernel`.
  """
  if (interpret := _interpret.get()) is not None:
    options["interpret"] = interpret
  return plgpu.kernel(
    body,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # jax's versions differ in the default
      approx_math=True,
    ),
    **options,
  )


def varying_as(x: jax.Array, made: Any) -> Any:
  """The arrays `made`, such as a kernel's results, marked as varying over the mesh axes of x.

  `jax.shard_map` checks these marks unless `check_vma` is False. The results of a kernel lack them,
  and so do new constants.
  """
  axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
  return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), made) if axes else made
