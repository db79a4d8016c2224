"""Whether the devices of a process can write into each other's memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import MutableMapping

import jax

from scmoe.base.compat import jax_version
from scmoe.kernels.launch import has_kernels
from scmoe.kernels.put.kernel import MOST_RANKS

# By default CUDA loads a kernel when it first runs, and loading can wait for kernels that run
# already, also on another GPU. If one of those waits for the kernel that is being loaded, neither
# ever ends. With this setting CUDA loads all kernels of a program before any of them runs.
LOADING = ("CUDA_MODULE_LOADING", "EAGER")


def request_puts(environment: MutableMapping[str, str] = os.environ) -> None:
  """Asks CUDA to load kernels before any runs; call it before the first use of a device.

  Args:
    environment: the environment variables, changed in place; a setting of the user's own stays.
  """
  environment.setdefault(*LOADING)


def why_not() -> str | None:
  """Why `put_rows` cannot serve this process's devices; None if it can.

  The text continues a sentence about its caller: "needs jax 0.11 or later, got 0.10.2". On a CPU
  collectives stand for the kernel, and nothing is refused.
  """
  devices = jax.devices()
  if devices[0].platform == "cpu":
    return None
  if not has_kernels(devices[0]):
    return f"needs Hopper GPUs, got {devices[0].device_kind}"
  if jax_version() < (0, 11):
    return f"needs jax 0.11 or later, got {jax.__version__}"
  if jax.process_count() > 1:
    return f"needs one process for all GPUs, got {jax.process_count()}"
  if len(devices) > MOST_RANKS:
    return f"serves up to {MOST_RANKS} GPUs, got {len(devices)}"
  if os.environ.get(LOADING[0]) != LOADING[1]:
    return f"needs the environment variable {'='.join(LOADING)} before a GPU is first used"
  ids = tuple(device.local_hardware_id for device in devices)
  if pair := _strangers(ids):
    return f"needs GPUs that reach each other's memory, and GPUs {pair[0]} and {pair[1]} do not"
  return None


@functools.cache
def _strangers(ids: tuple[int, ...]) -> tuple[int, int] | None:
  """Two GPUs of which one cannot reach the other's memory, by CUDA's numbers; None: there are none.

  Without a CUDA driver to ask, all are taken to reach each other.
  """
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return None
  if cuda.cuInit(0):
    return None
  reaches = ctypes.c_int(1)
  for one in ids:
    for other in ids:
      asked = one != other and not cuda.cuDeviceCanAccessPeer(ctypes.byref(reaches), one, other)
      if asked and not reaches.value:
        return one, other
  return None
