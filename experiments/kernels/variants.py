"""The experts' forward under other tilings and gathers; one Hopper GPU.

  python experiments/kernels/variants.py 7B-256

The two products of `expert_ffn` as training runs them (pre-activations are kept), between the same
gather and the same weighted sum, with tilings that are given here instead of chosen. No router.
Every variant is compared with the rule's before it is timed.
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from scmoe.bench import layer as bench
from scmoe.kernels.grouped_matmul import FFNWeights, choices_layout, get_activation, tiles
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.permute import sum_copies, take_rows

COOPERATIVE = Tiling(cols=256, stages=4, band=8)
PINGPONG_192 = Tiling(cols=192, stages=4, pingpong=True, band=8)
PINGPONG_128 = Tiling(cols=128, stages=5, pingpong=True, band=8)


@dataclasses.dataclass(frozen=True)
class Variant:
  """Tilings of the two products, and whether the first gathers its rows by itself."""

  up: Tiling
  down: Tiling
  fused_gather: bool = True


def variants(shape: bench.Shape) -> dict[str, Variant]:
  """Variants to compare; the rule's choice comes first."""
  choose_up = functools.partial(tiles.choose, "up", shape.width, shape.hidden)
  rule = Variant(choose_up(gathered=True), tiles.choose("rows", shape.hidden, shape.width))
  down = lambda tiling: dataclasses.replace(rule, down=tiling)
  found = {
    "rule": rule,
    "up gathered before": Variant(choose_up(gathered=False), rule.down, fused_gather=False),
    "up ping-pong 128": dataclasses.replace(rule, up=PINGPONG_128),
    "down cooperative 256": down(COOPERATIVE),
    "down ping-pong 128": down(PINGPONG_128),
    "down cooperative 256, band 2": down(dataclasses.replace(COOPERATIVE, band=2)),
  }
  if shape.width % 192 == 0:
    found["down ping-pong 192, band 2"] = down(dataclasses.replace(PINGPONG_192, band=2))
  return found


def forward(variant: Variant, x_TD, expert_TK, weight_TK, weights: FFNWeights):
  """y_TD of tokens that stay in place, and what training keeps of the products."""
  layout = choices_layout(expert_TK, weight_TK, weights.up_GDF.shape[0]).sorted(tiles.ROW_TILE)
  assert layout.permutation is not None
  rows, index_R = x_TD, layout.permutation.token_R
  if not variant.fused_gather:
    rows, index_R = take_rows(x_TD, index_R), None
  product = functools.partial(
    rows_product, layout=layout.groups, transpose_rhs=False, out_dtype=x_TD.dtype
  )
  *pre, a_RF = product(
    (rows,),
    (weights.up_weights,),
    tiling=variant.up,
    activation=get_activation("swiglu"),
    index_R=index_R,
  )
  (y_RD,) = product((a_RF,), ((weights.down_GFD,),), tiling=variant.down)
  return sum_copies(y_RD, layout.permutation.row_TK, weight_TK), pre


def inputs(shape: bench.Shape):
  """Random tokens, choices of different experts, combine weights, and the experts' weights."""
  normal = bench.normal_arrays(0)
  tokens, experts, k = shape.tokens, shape.experts, shape.top_k
  scores = jax.random.uniform(jax.random.key(1), (tokens, experts))
  expert_TK = jax.lax.top_k(scores, k)[1]
  into, out = (experts, shape.width, shape.hidden), (experts, shape.hidden, shape.width)
  gate, up = (normal(*into, scale=shape.width**-0.5) for _ in range(2))
  weights = FFNWeights(up, normal(*out, scale=shape.hidden**-0.5), gate)
  weight_TK = jnp.full((tokens, k), 1 / k, jnp.float32)
  return normal(tokens, shape.width), expert_TK, weight_TK, weights


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("shapes", nargs="+", help=f"T,D,F,E,K or one of {', '.join(bench.SHAPES)}")
  parser.add_argument("--rounds", type=int, default=3)
  options = parser.parse_args()
  for name in options.shapes:
    shape = bench.parse_shape(name)
    if resolve_backend("auto", jnp.bfloat16, shape.width, shape.hidden) != "mosaic_gpu":
      sys.exit(f"{name}: the kernels need a Hopper GPU and widths that are multiples of 64")
    given = inputs(shape)
    contenders, first = {}, None
    for label, variant in variants(shape).items():
      function = jax.jit(functools.partial(forward, variant)).lower(*given).compile()
      got = function(*given)[0]
      first = got if first is None else first
      error = bench.relative_error(got, first)
      assert error <= bench.TOLERANCE, (label, error)
      contenders[label] = (function, given)
    for label, ms in bench.interleaved(contenders, options.rounds).items():
      print(f"{name} forward, {label}: {ms:.3f} ms", flush=True)


if __name__ == "__main__":
  main()
