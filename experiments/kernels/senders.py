"""Padded experts on rows in the order of their source ranks: the kernels against XLA, which
transposes them.

  python experiments/kernels/senders.py --json OUT
  python experiments/kernels/senders.py --rows 2,2,64 --width 64 --hidden 64     any device

One device, no exchange. Arms, in turns, forward without a gradient and forward + backward:

  kernels   every product on the kernels, rows where they lie; needs a Hopper GPU
  xla       XLA's batched products, with a transpose on the way in and out
  in order  the same products on rows that lie by expert already: what transposing costs XLA
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from scmoe.bench.layer import TOLERANCE, interleaved, normal_arrays, relative_error
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  expert_ffn,
  padded_layout,
  resolve_backend,
)


def functions(layout, config: FFNConfig) -> dict:
  """The experts as jitted functions: name -> f(rows, weights[, gradient of the output])."""
  forward = lambda rows, weights: expert_ffn(rows, weights, layout, config)

  def both(rows, weights, dy):
    y, vjp = jax.vjp(forward, rows, weights)
    return y, vjp(dy)

  return {"forward": jax.jit(forward), "both": jax.jit(both)}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rows", default="4,16,896", help="source ranks, experts, rows of each")
  parser.add_argument("--width", type=int, default=2048, help="D")
  parser.add_argument("--hidden", type=int, default=1024, help="F")
  parser.add_argument("--activation", default="gelu")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json")
  options = parser.parse_args()
  ranks, experts, rows = map(int, options.rows.split(","))
  d, f = options.width, options.hidden
  normal = normal_arrays(0)
  x, dy = (normal(ranks, experts, rows, d) for _ in range(2))
  weights = FFNWeights(
    up_GDF=normal(experts, d, f, scale=d**-0.5),
    down_GFD=normal(experts, f, d, scale=f**-0.5),
    up_bias_GF=normal(experts, f) / 4,
    down_bias_GD=normal(experts, d) / 4,
  )
  by_rank, by_expert = padded_layout(ranks, experts, rows), padded_layout(1, experts, ranks * rows)
  in_order = lambda a: jnp.swapaxes(a, 0, 1).reshape(experts, ranks * rows, d)
  kernels = FFNConfig(options.activation, impl="grouped", backend="mosaic_gpu")
  batched = FFNConfig(options.activation, impl="batched", backend="xla")
  arms = {
    "kernels": (functions(by_rank, kernels), x, dy),
    "xla": (functions(by_rank, batched), x, dy),
    "in order": (functions(by_expert, batched), in_order(x), in_order(dy)),
  }
  if resolve_backend("auto", x.dtype, d, f) != "mosaic_gpu":
    print(f"without the kernels: {jax.devices()[0].device_kind} or these widths have none")
    del arms["kernels"]
  contenders = {}
  for name, (run, rows_in, dy_in) in arms.items():
    contenders[f"{name}, forward"] = run["forward"], (rows_in, weights)
    contenders[f"{name}, both"] = run["both"], (rows_in, weights, dy_in)
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights, dy))
  want = arms["xla"][0]["both"](*wide)
  first = next(iter(arms))
  function, arguments = contenders[f"{first}, both"]
  pairs = zip(jax.tree.leaves(function(*arguments)), jax.tree.leaves(want), strict=True)
  worst = max(relative_error(got, exact) for got, exact in pairs)
  assert worst < TOLERANCE, worst
  del want, wide
  times = interleaved(contenders, options.rounds)
  for name, ms in times.items():
    print(f"{name:20s} {ms:.3f} ms")
  print(f"worst error of {first} {worst:.1e}")
  if options.json:
    report = {
      "date": datetime.date.today().isoformat(),
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      "command": " ".join(["python", *sys.argv]),
      "worst_error": worst,
      "ms": times,
    }
    with open(options.json, "w") as file:
      json.dump(report, file, indent=2)


if __name__ == "__main__":
  main()
