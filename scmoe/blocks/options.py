"""Options of the schedule: where the experts compute, and what keeps the order on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from scmoe.base.options import Options, option, section

# Up to so many pairs, a GPU program writes out all of them instead of scanning over layers. Nothing
# is then copied into and out of stacked arrays, and compilation takes about three times as long
# (experiments/LOG.md). Programs that exchange rows contain all pairs twice, the second time for the
# last microbatch, so their limit is lower.
WRITTEN_OUT, WRITTEN_OUT_EXCHANGING = 32, 8
# Pairs in a step of the scan over layers, on GPUs that exchange rows, in models of more pairs.
UNROLLED = 4


@dataclasses.dataclass(frozen=True)
class OverlapAblation(Options, path="overlap.ablation"):
  """Options that change one part of the overlap, for ablations; other runs leave the defaults."""

  backward: str = option(
    "mirror",
    "where the experts stand in the backward pass, by the step's name in the forward pass; mirror: "
    "the mirror image of the forward pass; free: XLA decides",
  )
  latency_hiding: bool = option(
    True, "GPU: XLA's latency-hiding scheduler, for the training step only"
  )
  profile_guided: bool = option(
    True,
    "GPUs that exchange rows: profile the first steps and compile again with the measured "
    "latencies; WORKDIR/profile_guided keeps the profile, and later starts use it",
  )
  profile_runs: int = option(3, "steps that are profiled for it", minimum=1)


@dataclasses.dataclass(frozen=True)
class OverlapConfig(Options, path="overlap"):
  """Options of running communication beside the dense path."""

  schedule: str = option(
    "auto",
    "where the experts stand: after which step of the main path (dispatch, mlp 0, attention 1: "
    "projections, ...; scmoe.profile lists them), or a step for each chunk, with commas; auto: "
    "where the machine is fastest, which GPUs that exchange rows measure before the first step "
    "(WORKDIR/schedule.json); off: nothing beside the MoE's stages, the control of a measurement",
  )
  search_seconds: float = option(
    90.0,
    "what the measurement of auto on a cut of the run may cost a first start; a change that it "
    "proposes is then measured on whole steps, for one more compilation; 0: as configured, nothing "
    "is measured",
    minimum=0,
  )
  order: str = option(
    "xla",
    "advanced: what keeps the order on a GPU: xla (its scheduler), or barriers (optimization "
    "barriers, which it cannot move)",
    choices=("xla", "barriers"),
  )
  unroll: int = option(
    -1,
    "advanced: pairs per step of the scan over layers; 0: all; -1: on a GPU all of up to 32, "
    "else 1; on GPUs that exchange rows all of up to 8, else 4; on other devices 1. What a step "
    "keeps for the backward pass is copied, XLA moves no collective across a step, and compiles "
    "for as long as a step is",
    minimum=-1,
  )
  command_buffers: str = option(
    "auto",
    "GPU: CUDA graphs, which launch kernels faster but name none of them in a trace: on, off, or "
    "auto (on one GPU, where no rows travel; beside collectives they were slower)",
    choices=("auto", "on", "off"),
  )
  ahead: bool = option(
    True,
    "advanced: with a MoE in every block (model.moe_every=1), Pos-2 and Pos-3 begin the next "
    "block's gate and dispatch as soon as they have the value that its experts read, so that the "
    "exchange runs beside the rest of this block; docs/overlap.md says where they do not",
  )
  copy_engines: bool = option(
    False,
    "advanced: GPUs of one host, jax >= 0.11: all-to-alls by the GPUs' copy engines, which take no "
    "multiprocessor from the computation; slower below about 64 MiB per exchange",
  )
  flight: int = option(
    1,
    "microbatches side by side, layer by layer, where it divides a step's: one's exchange has the "
    "other's computation beside it, and activations take as many times the memory",
    minimum=1,
  )
  gradient_dtype: str = option(
    "float32",
    "advanced: in which gradients travel between devices; they are added up in float32",
    choices=("float32", "bfloat16"),
  )
  embedding_rows: bool = option(
    False,
    "advanced: in a step of one microbatch whose model has a head of its own, the gradients of "
    "embeddings travel between devices as the rows of its tokens, where these take at most half "
    "the bytes of the table's sum; for a slow link",
  )
  ablation: OverlapAblation = section(
    OverlapAblation, "parts of the overlap that only ablations set apart"
  )

  def derived(self, *, gpu: bool, exchange: bool, pairs: int, devices: int = 1) -> OverlapConfig:
    """The options with the automatic `unroll` and `command_buffers` replaced by their values here.

    Where no rows travel between GPUs, `search_seconds` becomes 0 and `profile_guided` False, since
    there is nothing to measure; `search_seconds` also where `schedule` is not auto.

    Args:
      gpu: whether the program runs on NVIDIA GPUs.
      exchange: whether rows travel between devices. If not, there is nothing to overlap, and
        nothing is measured.
      pairs: number of pairs of the model.
      devices: number of devices of the mesh.
    """
    active = gpu and exchange
    few = pairs <= (WRITTEN_OUT_EXCHANGING if active else WRITTEN_OUT)
    unroll = 0 if gpu and few else UNROLLED if active else 1
    graphs = "on" if gpu and devices == 1 else "off"
    ablation = dataclasses.replace(
      self.ablation, profile_guided=self.ablation.profile_guided and active
    )
    return dataclasses.replace(
      self,
      command_buffers=graphs if self.command_buffers == "auto" else self.command_buffers,
      unroll=self.unroll if self.unroll >= 0 else unroll,
      search_seconds=self.search_seconds if active and self.schedule == "auto" else 0.0,
      ablation=ablation,
    )

  def pairs_per_step(self, pairs: int) -> int:
    """Pairs in one step of the scan over layers, for a model of `pairs` pairs.

    An `unroll` of -1, which `derived` has not replaced, counts as 1.
    """
    return min(self.unroll, pairs) if self.unroll > 0 else 1 if self.unroll else pairs

  def writes_out(self, pairs: int) -> bool:
    """Whether a model of `pairs` pairs runs them one after the other instead of in a scan.

    It does if `unroll` is 0. It also does if there are two pairs or more, and `unroll` is at least
    their number.
    """
    return pairs == self.pairs_per_step(pairs) and (pairs > 1 or self.unroll == 0)

  def compiler_options(self, *, gpu: bool, profiling: bool = False) -> dict[str, Any]:
    """XLA options of one jitted step, for `jax.jit(..., compiler_options=)`; none but on a GPU.

    Args:
      gpu: whether the program runs on NVIDIA GPUs.
      profiling: the program is run for a trace; a CUDA graph would name no operation.
    """
    if not gpu:
      return {}
    options: dict[str, Any] = {
      "xla_gpu_enable_latency_hiding_scheduler": self.ablation.latency_hiding
    }
    if profiling or self.command_buffers != "on":
      options["xla_gpu_enable_command_buffer"] = ""
    return options
