"""Rows gathered by the product that reads them, or before it: each product of a layer, both ways.

python experiments/kernels/gathers.py GPT-OSS-20B Phi-3.5-MoE      one Hopper GPU
python experiments/kernels/gathers.py 256,128,128,2,2              T,D,F,E,K; without one it says so

Groups are equal and whole tiles, so that the dense product beside them has the same rows.
`scmoe.kernels.grouped_matmul.mosaic_gpu.GATHERED_BEFORE` is what was made of the results.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from scmoe.kernels import bench
from scmoe.kernels.grouped_matmul import get_activation, tiles
from scmoe.kernels.grouped_matmul.backend import device_has_kernels
from scmoe.kernels.grouped_matmul.down_backward import down_backward_product
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.grouped_matmul.weights_product import weights_product
from scmoe.kernels.permute import take_words


def arms_of(shape):
  """Name -> (jitted function, arguments): `product inside`, `product before`, `product dense`."""
  experts, width, hidden = shape.experts, shape.width, shape.hidden
  per_expert = max(1, round(shape.tokens * shape.top_k / experts / tiles.ROW_TILE)) * tiles.ROW_TILE
  sizes = jnp.full((experts,), per_expert, jnp.int32)
  make = jax.jit(make_layout, static_argnums=(1, 2))
  layout = make(sizes, per_expert * experts, tiles.ROW_TILE)
  rows = layout.num_rows  # a bound; tiles past those of the groups are not read
  normal, bf16 = bench.normal_arrays(0), {"out_dtype": jnp.bfloat16}
  x, x_R = normal(shape.tokens, width), normal(rows, width)
  a, h = normal(rows, hidden), (normal(rows, hidden), normal(rows, hidden))
  gate, up = (normal(experts, width, hidden, scale=width**-0.5) for _ in range(2))
  down = normal(experts, hidden, width, scale=hidden**-0.5)
  index = jax.random.randint(jax.random.key(1), (rows,), 0, shape.tokens)
  ones, act = jnp.ones((rows,), jnp.float32), get_activation("swiglu")

  def first(tiling, x, gate, up, layout, index=None):
    given = ((x,), ((gate, up),), layout, tiling)
    return rows_product(*given, transpose_rhs=False, activation=act, index_R=index, **bf16)

  def down_backward(tiling, dy, down, h, ones, layout, index=None):
    return down_backward_product(dy, down, h, ones, layout, act, tiling, index_R=index)

  def to_up(tiling, x, h, layout, index=None):
    return weights_product(x, h, layout, tiling, lhs_index_R=index, **bf16)

  def to_down(tiling, dy, a, layout, index=None):
    return weights_product(a, (dy,), layout, tiling, rhs_index_R=index, **bf16)

  def by_expert(rows_RN):
    return rows_RN[: experts * per_expert].reshape(experts, per_expert, -1)

  both, of_both = jnp.concatenate((gate, up), 2), jnp.concatenate(h, 1)
  products = {
    "up": (first, "up", width, hidden, (gate, up), "erd,edf->erf", (x_R, both)),
    "down_backward": (
      down_backward, "down_backward", width, hidden, (down, h, ones), "erd,efd->erf", (x_R, down)
    ),
    "weights_up": (
      to_up, "weights_pair", width, hidden, (h,), "erd,erf->edf", (x_R, of_both)
    ),
    "weights_down": (to_down, "weights", hidden, width, (a,), "erd,erf->edf", (x_R, a)),
  }  # fmt: skip
  arms: dict[str, Any] = {"gather": (jax.jit(take_words), (x, index))}
  for name, (function, kind, k, n, others, expression, operands) in products.items():
    tiling = functools.partial(tiles.choose, kind, k, n)
    inside = jax.jit(functools.partial(function, tiling(gathered=True)))
    before = jax.jit(functools.partial(function, tiling()))
    dense = jax.jit(functools.partial(jnp.einsum, expression))
    arms[f"{name} inside"] = inside, (x, *others, layout, index)
    arms[f"{name} before"] = before, (x_R, *others, layout)
    blocks = [by_expert(o) if o.ndim == 2 else o for o in operands]
    arms[f"{name} dense"] = dense, blocks
  return arms


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("shapes", nargs="+", help=f"T,D,F,E,K or one of {', '.join(bench.KNOWN)}")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--json", help="where results are written")
  options = parser.parse_args()
  device = jax.devices()[0]
  if not device_has_kernels(device.platform, getattr(device, "compute_capability", None)):
    return print(f"{device.device_kind} does not run the kernels: nothing to measure")
  report = {"date": time.strftime("%Y-%m-%d"), "device": device.device_kind, "jax": jax.__version__}
  report |= {"command": " ".join(["python", *sys.argv]), "us": {}}
  for name in options.shapes:
    times = bench.interleaved(arms_of(bench.parse_shape(name)), options.rounds)
    report["us"][name] = {arm: round(1e3 * ms, 1) for arm, ms in times.items()}
    print(f"{name}: " + ", ".join(f"{arm} {1e3 * ms:.0f}" for arm, ms in times.items()) + " us")
    if options.json:
      Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
  main()
