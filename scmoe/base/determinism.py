"""Asks XLA for bitwise equal results in every run on the same hardware."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# With either flag XLA chooses deterministic implementations. With the second, compilation fails
# where an operation has none.
FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
_YES = ("", "=true", "=True", "=1")  # the endings with which XLA reads a flag as set


def request(environment: MutableMapping[str, str] = os.environ) -> None:
  """Asks XLA for deterministic GPU operations. Call it before the first use of a device."""
  if not is_requested(environment):
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {FLAGS[0]}=true".strip()


def is_requested(environment: Mapping[str, str] = os.environ) -> bool:
  """True if `request` or the user's XLA_FLAGS asked XLA for deterministic operations."""
  words = environment.get("XLA_FLAGS", "").split()
  return any(flag + yes in words for flag in FLAGS for yes in _YES)
