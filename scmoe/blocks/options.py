"""Options of the schedule: where the experts stand, and how a GPU is made to keep the order."""

from __future__ import annotations

import dataclasses
from typing import Any

from scmoe.options import option


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
  """How communication is laid beside the dense path."""

  schedule: str = option(
    "auto",
    "where the experts stand: after which step of the main path (dispatch, mlp 0, attention 1: "
    "projections, ...; scmoe.profile lists them); auto: in the last place before its result is "
    "needed; off: nothing beside the MoE's stages, the control of a measurement",
  )
  backward: str = option(
    "mirror",
    "advanced: the same for the backward pass, named in forward order; mirror: the mirror image of "
    "the forward pass; free: left to XLA",
  )
  order: str = option(
    "xla",
    "advanced: what keeps the order on a GPU: xla (its scheduler), or barriers (optimization "
    "barriers, which it cannot move)",
    choices=("xla", "barriers"),
  )
  unroll: int = option(
    1,
    "advanced: stages per step of the scan over layers; 0: all. XLA moves no collective across a "
    "step",
    minimum=0,
  )
  latency_hiding: bool = option(
    True, "advanced: GPU: XLA's latency-hiding scheduler, for the training step only"
  )
  profile_guided: bool = option(
    False,
    "GPU: profile the first steps and compile again with measured latencies; the profile is kept "
    "in WORKDIR/profile_guided and used by every later start of the run",
  )
  profile_runs: int = option(3, "advanced: steps that are profiled for it", minimum=1)
  command_buffers: bool = option(
    False,
    "advanced: GPU: record kernels into CUDA graphs. Off: graphs hide operations from the profile "
    "and were slower beside collectives",
  )
  copy_engines: bool = option(
    False,
    "advanced: GPUs of one host, jax >= 0.11: all-to-alls by the GPUs' copy engines, which take no "
    "multiprocessor from the computation; slower below about 64 MiB per exchange",
  )
  gradient_dtype: str = option(
    "float32",
    "advanced: in which gradients travel between devices; they are added up in float32",
    choices=("float32", "bfloat16"),
  )

  def compiler_options(self, *, gpu: bool, profiling: bool = False) -> dict[str, Any]:
    """XLA options of one jitted step, for `jax.jit(..., compiler_options=)`; none but on a GPU.

    Args:
      gpu: whether the program runs on NVIDIA GPUs.
      profiling: the program is run to collect a profile; a CUDA graph would name no operation.
    """
    if not gpu:
      return {}
    options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": self.latency_hiding}
    if profiling or not self.command_buffers:
      options["xla_gpu_enable_command_buffer"] = ""
    return options
