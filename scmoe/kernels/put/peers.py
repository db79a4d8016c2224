"""Asks the driver of CUDA which GPUs of this process reach each other's memory."""

from __future__ import annotations

import ctypes
import itertools


def apart(numbers: tuple[int, ...]) -> tuple[int, int] | None:
  """The first pair of GPUs of which one does not reach the other's memory; None: all do.

  Args:
    numbers: of the GPUs, as CUDA counts those that are visible (jax's `local_hardware_id`).
  """
  pairs = itertools.permutations(numbers, 2)
  return next((pair for pair in pairs if not reaches(*pair)), None)


def reaches(number: int, other: int) -> bool:
  """Whether a kernel on one GPU reaches the other's memory; true if there is no driver to ask.

  Source: CUDA's driver API, `cuDeviceCanAccessPeer`.
  """
  try:
    driver = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return True
  answer = ctypes.c_int(1)  # stays 1 if the driver cannot say
  driver.cuInit(0)
  driver.cuDeviceCanAccessPeer(ctypes.byref(answer), number, other)
  return answer.value != 0
