"""Environment variables that a run sets for jax, which reads them as it finds its devices."""

from __future__ import annotations

from scmoe.base import determinism
from scmoe.offload.memory import allow_pinned_memory
from scmoe.parallel.collectives import request_copy_engines
from scmoe.run.config import RunConfig


def set_up_jax(run: RunConfig) -> None:
  """Sets what training, a profile and a replay need of XLA; call it before any use of a device.

  It asks for deterministic operations (`train.deterministic`), for exchanges by copy engines
  (`overlap.copy_engines`), and for as much pinned memory as the host has (`mesh.moments_in=host`,
  and `files`, through which gradients pass).

  Raises:
    ConfigError: this jax has no exchanges by copy engines.
  """
  if run.train.deterministic:
    determinism.request()
  if run.overlap.copy_engines:
    request_copy_engines()
  if run.mesh.moments_in != "device":
    allow_pinned_memory()
