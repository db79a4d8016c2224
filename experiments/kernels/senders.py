"""Experts on rows in the order of their senders: the kernels against XLA, which transposes them.

python experiments/kernels/senders.py [--rows 4,16,896] [--width 2048] [--hidden 1024] [--json OUT]

One GPU, no exchange. Arms, in turns, forward without a gradient and forward + backward:

  kernels   every product on the kernels, rows where they lie
  xla       XLA's batched products, with a transpose on the way in and out
  in order  the same products on rows that lie by expert already: what transposing costs XLA
"""

import argparse
import datetime
import json
import os
import sys

sys.path.insert(0, os.getcwd())

import jax
import jax.numpy as jnp

from scmoe.kernels.bench import TOLERANCE, interleaved, normal_arrays, relative_error
from scmoe.kernels.grouped_matmul import equal_ffn


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rows", default="4,16,896", help="senders, experts, rows of each")
  parser.add_argument("--width", type=int, default=2048, help="D")
  parser.add_argument("--hidden", type=int, default=1024, help="F")
  parser.add_argument("--activation", default="gelu")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json")
  options = parser.parse_args()
  senders, experts, rows = map(int, options.rows.split(","))
  d, f = options.width, options.hidden
  normal = normal_arrays(0)
  x = normal(senders, experts, rows, d)
  weights = (None, normal(experts, d, f, scale=d**-0.5), normal(experts, f, d, scale=f**-0.5))
  biases = {"up_bias_GF": normal(experts, f) / 4, "down_bias_GD": normal(experts, d) / 4}
  dy = normal(*x.shape)
  in_order = lambda a: jnp.swapaxes(a, 0, 1).reshape(experts, senders * rows, d)

  def forward(backend):
    ffn = lambda x, weights, biases: equal_ffn(
      x, *weights, activation=options.activation, **biases, backend=backend
    )
    return jax.jit(ffn)

  def both(backend):
    def run(x, weights, biases, dy):
      y, vjp = jax.vjp(forward(backend), x, weights, biases)
      return y, vjp(dy)

    return jax.jit(run)

  contenders = {}
  for name, backend, place in (
    ("kernels", "mosaic_gpu", lambda a: a),
    ("xla", "xla", lambda a: a),
    ("in order", "xla", in_order),
  ):
    contenders[f"{name}, forward"] = (forward(backend), (place(x), weights, biases))
    contenders[f"{name}, both"] = (both(backend), (place(x), weights, biases, place(dy)))
  function, arguments = contenders["kernels, both"]
  want = both("xla")(*jax.tree.map(lambda a: a.astype(jnp.float32), arguments))
  pairs = zip(jax.tree.leaves(function(*arguments)), jax.tree.leaves(want), strict=True)
  worst = max(relative_error(got, exact) for got, exact in pairs)
  assert worst < TOLERANCE, worst
  del want
  times = interleaved(contenders, options.rounds)
  for name, ms in times.items():
    print(f"{name:20s} {ms:.3f} ms")
  print(f"worst error {worst:.1e}")
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
