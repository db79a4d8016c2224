"""Prints the computation beside each exchange of a step, compiled for GPUs without a GPU.

  python experiments/exchange_cost/windows.py --model medium
  python experiments/exchange_cost/windows.py --model fine dispatch.transport=dropless
  python experiments/exchange_cost/windows.py --sums mesh.shard_state=moments
  python experiments/exchange_cost/windows.py dispatch.transport=put dispatch.put_blocks=16 \\
      overlap.order=barriers "overlap.schedule=attention 1: projections"
  python experiments/exchange_cost/windows.py dispatch.chunks=2 overlap.order=barriers \\
      "overlap.schedule=mlp 0, attention 1: projections"

It needs jax's CUDA plugin (pip install "jax[cuda13]") on Linux, and takes half a minute. XLA
compiles Pos-2 with experts on two H200s (--devices), which `H200` describes to it, and schedules by
its own estimates of time: no latency is measured, and no matrix product tuned. So the program says
which work may stand beside an exchange, not how long either takes. --text FILE keeps the program.

With --sums it prints instead, for every sum or gather of 16 MiB or more, in order, how many of the
program's products stand before its start and before its end.

For each exchange, in order, it prints the matrix products between its start and its end, and those
of the same pass, forward or backward, that neither need it nor are needed by it. A put has such a
start and end only if its kernel has a stream of its own (`dispatch.put_blocks`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
os.environ["JAX_PLATFORMS"] = "cpu"  # the process itself computes nothing on a GPU

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from ranking import MODELS, SHARED  # noqa: E402
from shared_state import configured, fields_of  # noqa: E402

from scmoe.base.errors import run_main  # noqa: E402
from scmoe.parallel.mesh import batch_sharding  # noqa: E402
from scmoe.profiling.windows import (  # noqa: E402
  Window,
  free_products,
  program_sums,
  program_windows,
)
from scmoe.run import build  # noqa: E402
from scmoe.training.fastest import Steps  # noqa: E402
from scmoe.training.variants import Variant  # noqa: E402

LARGE = 16 << 20  # bytes
# Asks cuDNN for its version, which is not there; its attention stays a call in the program.
CUDNN = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
# What XLA asks of a GPU (GpuTargetConfigProto), for an H200: figures of NVIDIA's data sheet and of
# CUDA's device properties.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def compiled(fields: dict[str, str], devices: int, profile: bytes = b"") -> str:
  """The scheduled program of a training step, as text.

  Args:
    fields: of the configuration, changed in `gpt2_moe_medium`.
    devices: GPUs of one host.
    profile: times of the program's instructions, by which XLA schedules it
      (`scmoe.profiling.wire.as_profile`); empty: its own estimates.
  """
  try:
    topology = topologies.get_topology_desc(
      topology_name="h200", platform="cuda", target_config=H200, topology=f"1x1x{devices}"
    )
  except NotImplementedError:  # jax knows no topology of a platform without a plugin
    raise SystemExit('jax\'s CUDA plugin is missing; pip install "jax[cuda13]"') from None
  gpus = list(topology.devices)
  with (
    mock.patch.object(jax, "devices", return_value=gpus),
    mock.patch.object(jax, "local_devices", return_value=gpus),
    mock.patch.object(jax, "device_count", return_value=devices),
    mock.patch.object(jax, "default_backend", return_value="gpu"),
    mock.patch(CUDNN, return_value=91200),
  ):
    run = configured("gpt2_moe_medium", fields)
    run = run.resolve(num_devices=devices, vocab_size=build.vocab_size(run.data))
    built = build.build(run)
    abstract, place = built.abstract_state(), batch_sharding(built.mesh, leading=1)
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=place)
    batch = jax.tree.map(shape, built.random_batch())
    step = Steps(built, abstract, Path("unused"), gpu=True)(Variant()).step
    options = run.overlap.compiler_options(gpu=True) | {"xla_gpu_autotune_level": 0}
    options |= {"fdo_profile": profile} if profile else {}
    return step.lower(abstract, batch).compile(options).as_text()


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--model", default="medium", choices=sorted(MODELS))
  parser.add_argument("--devices", type=int, default=2)
  parser.add_argument("--sums", action="store_true", help="where sums and gathers stand")
  parser.add_argument("--text", type=Path, help="file for the program")
  args = parser.parse_args()
  fields = SHARED | MODELS[args.model] | {"train.tokens_per_step": "0"}
  fields |= {"mesh.expert": str(args.devices), "dispatch.overflow": "repeat"}
  text = compiled(fields | fields_of(args.words), args.devices)
  if args.text:
    args.text.write_text(text)
  print(f"{args.model}, {' '.join(args.words) or 'as configured'}, jax {jax.__version__}")
  if args.sums:
    found, products = program_sums(text)
    print(f"{products} products")
    for one in found:
      if one.bytes >= LARGE:
        print(f"{one.kind} {one.shape}: {one.begun} to {one.ended}")
    return
  print("exchange; products beside it; products that could be beside it")
  for window, free in zip(program_windows(text), free_products(text), strict=True):
    print(f"{window.direction} {window.stage}; {listed(window)}; {listed(free)}")


def listed(window: Window) -> str:
  """The stages of a window's products with their numbers."""
  return ", ".join(f"{n} {stage}" for stage, n in sorted(Counter(window.beside).items())) or "none"


if __name__ == "__main__":
  run_main(lambda argv: main())
