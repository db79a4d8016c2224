"""Where a layer's time goes, kernel by kernel.

python experiments/kernels/profile_layer.py NAME ...
"""

import collections
import glob
import os
import sys
import tempfile

sys.path.insert(0, os.getcwd())

import jax

from scmoe.kernels import bench


def kernel_times(function, arguments, calls=3):
  """Milliseconds of each GPU kernel per call, from a profiler trace."""
  jax.block_until_ready(function(*arguments))
  folder = tempfile.mkdtemp()
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with jax.profiler.trace(folder, profiler_options=options):
    for _ in range(calls):
      jax.block_until_ready(function(*arguments))
  (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
  total = collections.Counter()
  for plane in jax.profiler.ProfileData.from_file(path).planes:
    if not plane.name.startswith("/device:GPU"):
      continue
    for line in plane.lines:
      if line.name.startswith("Stream"):
        for event in line.events:
          total[event.name] += event.duration_ns / 1e6 / calls
  return total


def main():
  for name in sys.argv[1:]:
    shape = bench.parse_shape(name)
    arguments = bench.layer_inputs(shape, 0)
    dy = bench.normal_arrays(1)(*arguments[0].shape)
    forward, both = bench.training_functions(shape, "auto")
    for label, function, a in (("forward", forward, arguments), ("both", both, (dy, *arguments))):
      times = kernel_times(function, a)
      wall = bench.interleaved({"x": (function, a)}, 3)["x"]
      print(f"{name} {label}: wall {wall:.3f} ms, kernels {sum(times.values()):.3f} ms")
      for kernel, ms in times.most_common(int(os.environ.get("TOP", 18))):
        print(f"   {ms:7.3f}  {kernel[:70]}")


if __name__ == "__main__":
  main()
