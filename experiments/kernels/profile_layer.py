"""A layer's time, kernel by kernel: its forward, and forward + backward.

python experiments/kernels/profile_layer.py OLMoE          one GPU
python experiments/kernels/profile_layer.py 64,64,64,4,2   T,D,F,E,K; without a GPU wall times only
"""

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from scmoe.bench import layer as bench
from scmoe.profiling.program import traced


def kernel_times(function, arguments, calls=3):
  """Milliseconds of each GPU kernel per call, from a profiler trace."""

  def run():
    for _ in range(calls):
      jax.block_until_ready(function(*arguments))

  run()
  total: dict[str, float] = collections.defaultdict(float)
  for event in traced(run):
    total[event.name] += (event.end - event.start) / 1e6 / calls
  return total


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("shapes", nargs="+", help=f"T,D,F,E,K or one of {', '.join(bench.SHAPES)}")
  parser.add_argument("--top", type=int, default=18, help="kernels to list")
  options = parser.parse_args()
  for name in options.shapes:
    layer = bench.Layer(bench.parse_shape(name))
    arguments = layer.inputs(0)
    dy = bench.normal_arrays(2)(*arguments[0].shape)
    forward, both = bench.training_functions(layer)
    for label, function, given in (
      ("forward", forward, arguments),
      ("both", both, (dy, *arguments)),
    ):
      times = kernel_times(function, given)
      wall = bench.interleaved({label: (function, given)}, 3)[label]
      print(f"{name} {label}: wall {wall:.3f} ms, kernels {sum(times.values()):.3f} ms")
      for kernel, ms in sorted(times.items(), key=lambda own: -own[1])[: options.top]:
        print(f"   {ms:7.3f}  {kernel[:70]}")


if __name__ == "__main__":
  main()
