"""A layer's forward under other tilings and gathers.

python experiments/kernels/variants.py NAME ...
"""

import os
import sys

sys.path.insert(0, os.getcwd())

import jax

from scmoe.kernels import bench
from scmoe.kernels.grouped_matmul import mosaic_gpu, tiles
from scmoe.kernels.grouped_matmul.pipeline import Tiling

COOPERATIVE = Tiling(cols=256, stages=4, band=8)
PINGPONG_192 = Tiling(cols=192, stages=4, pingpong=True, band=8)
PINGPONG_128 = Tiling(cols=128, stages=5, pingpong=True, band=8)
FUSED = mosaic_gpu.FUSED_GATHERS
measured = tiles.TABLE


def main():
  for name in sys.argv[1:]:
    shape = bench.parse_shape(name)
    up = ("up", shape.width, shape.hidden, True)
    down = ("rows", shape.hidden, shape.width, False)
    variants = {
      "rule": ({}, FUSED),
      "up gathered before": ({}, FUSED - {"up"}),
      "up ping-pong 128": ({up: PINGPONG_128}, FUSED),
      "down cooperative 256": ({down: COOPERATIVE}, FUSED),
      "down ping-pong 128": ({down: PINGPONG_128}, FUSED),
      "down cooperative 256, band 2": ({down: Tiling(cols=256, stages=4, band=2)}, FUSED),
    }
    if shape.width % 192 == 0:
      variants["down ping-pong 192, band 2"] = (
        {down: Tiling(cols=192, stages=4, pingpong=True, band=2)},
        FUSED,
      )
    arguments = bench.layer_inputs(shape, 0)
    contenders = {}
    for label, (table, fused) in variants.items():
      tiles.TABLE = {jax.devices()[0].device_kind: table}
      mosaic_gpu.FUSED_GATHERS = fused
      forward, _ = bench.training_functions(shape, "auto")
      contenders[label] = (forward.lower(*arguments).compile(), arguments)
    for label, ms in bench.interleaved(contenders, 3).items():
      print(f"{name} forward, {label}: {ms:.3f} ms", flush=True)
    tiles.TABLE = measured
    mosaic_gpu.FUSED_GATHERS = FUSED


if __name__ == "__main__":
  main()
