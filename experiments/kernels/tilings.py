"""Every product of a layer in many tilings, rows in order and gathered; one Hopper GPU.

python experiments/kernels/tilings.py GPT-OSS-20B --json OUT      all products
python experiments/kernels/tilings.py JetMoE --kinds up,dx        some of them
python experiments/kernels/tilings.py 256,128,128,2,2             T,D,F,E,K; without one it says so

Every choice falls on an expert at random, so that groups are as uneven as an untrained router's and
their last tiles half empty on average. The dense product beside them has equal groups and no
padding. The rule of `scmoe.kernels.grouped_matmul.tiles` and `mosaic_gpu.GATHERED_BEFORE` are what
was made of the results.
"""

import argparse
import concurrent.futures
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.bench import layer as bench
from scmoe.bench import tune
from scmoe.bench.sizes import KNOWN
from scmoe.kernels.grouped_matmul import tiles
from scmoe.kernels.grouped_matmul.tuned import Key
from scmoe.kernels.launch import has_kernels
from scmoe.kernels.permute import take_words

_BANDS = (8, 16)  # beside the rule's own; `scmoe.bench.tune` measures the others


def keys_of(shape, kinds):
  """(label, key) of a layer's products, with rows gathered and with rows in order."""
  wide, narrow = (shape.width, shape.hidden), (shape.hidden, shape.width)
  found: list[tuple[str, Key]] = [
    ("up", ("up", *wide, True)),
    ("up", ("up", *wide, False)),
    ("down", ("rows", *narrow, False)),
    ("down_backward", ("down_backward", *wide, True)),
    ("down_backward", ("down_backward", *wide, False)),
    ("dx", ("dx", *narrow, False)),
    ("weights_up", ("weights_pair", *wide, True)),
    ("weights_up", ("weights_pair", *wide, False)),
    ("weights_up", ("weights", *wide, False)),  # one result of two
    ("weights_down", ("weights", *narrow, True)),
    ("weights_down", ("weights", *narrow, False)),
  ]
  return [(label, key) for label, key in found if not kinds or label in kinds]


def dense_arms(shape, kinds):
  """Label -> XLA's batched product of the same FLOPs."""
  normal = bench.normal_arrays(3)
  rows, e, d, f = (
    shape.tokens * shape.top_k // shape.experts,
    shape.experts,
    shape.width,
    shape.hidden,
  )
  of = {
    "up": ("erd,edf->erf", (e, rows, d), (e, d, 2 * f)),
    "down": ("erf,efd->erd", (e, rows, f), (e, f, d)),
    "down_backward": ("erd,efd->erf", (e, rows, d), (e, f, d)),
    "dx": ("erf,edf->erd", (e, rows, 2 * f), (e, d, 2 * f)),
    "weights_up": ("erd,erf->edf", (e, rows, d), (e, rows, 2 * f)),
    "weights_down": ("erf,erd->efd", (e, rows, f), (e, rows, d)),
  }
  return {
    f"{label} dense": (jax.jit(functools.partial(jnp.einsum, expression)), (normal(*a), normal(*b)))
    for label, (expression, a, b) in of.items()
    if not kinds or label in kinds
  }


def name_of(tiling):
  """A tiling in a word: 128x256, p for ping-pong, the pair, band, stages / buffers of stores."""
  form = f"{tiling.rows}x{tiling.cols}{'p' * tiling.pingpong}{tiling.pair and ' ' + tiling.pair}"
  return f"{form} b{tiling.band} s{tiling.stages}/{tiling.store_buffers}"


def forms_of(key):
  """Tilings to measure: the rule's or the table's choice first, and all wider than 64."""
  kind, width, n, gathered = key
  chosen = tiles.shipped(kind, width, n, gathered=gathered)
  offered = tiles.variants(kind, width, n, gathered=gathered)
  return dict.fromkeys([chosen, *(t for t in offered if t.band in _BANDS and t.cols > 64)])


def measured(shape, kinds, rounds):
  """label -> arm -> microseconds."""
  choices = np.random.default_rng(0).integers(0, shape.experts, shape.tokens * shape.top_k)
  sizes_G = jnp.asarray(np.bincount(choices, minlength=shape.experts), jnp.int32)
  arms: dict[str, dict[str, Any]] = {}
  for label, arm in dense_arms(shape, kinds).items():
    arms.setdefault(label.split()[0], {})["dense"] = arm
  for label, key in keys_of(shape, kinds):
    function, arguments = tune.product(key, shape, 0, sizes_G)
    once = label == "weights_up" and key[0] == "weights"
    how = "gathered" if key[3] else "one result, in order" if once else "in order"
    for at, tiling in enumerate(forms_of(key)):
      arm = f"{how}: {name_of(tiling)}{' (chosen)' if not at else ''}"
      arms[label][arm] = jax.jit(functools.partial(_with, function, tiling)), arguments
  x = bench.normal_arrays(4)(shape.tokens, shape.width)
  index = jax.random.randint(jax.random.key(5), (len(choices),), 0, shape.tokens)
  arms["gather"] = {"by words": (jax.jit(take_words), (x, index))}
  results = {}
  for label, given in arms.items():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # kernels tune nothing: side by side
      programs = dict(zip(given, pool.map(_compiled, given.values())))
    times = bench.interleaved(programs, rounds)
    twice = lambda arm: 2 if arm.startswith("one result") else 1
    results[label] = {arm: round(1e3 * twice(arm) * ms, 1) for arm, ms in times.items()}
  return results


def _with(function, tiling, *arguments):
  return function(*arguments, tiling)


def _compiled(arm):
  function, arguments = arm
  return function.lower(*arguments).compile(), arguments


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("shapes", nargs="+", help=f"T,D,F,E,K or one of {', '.join(KNOWN)}")
  parser.add_argument("--kinds", help="up, down, down_backward, dx, weights_up, weights_down")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--json", help="where results are written")
  options = parser.parse_args()
  device = jax.devices()[0]
  if not has_kernels(device):
    return print(f"{device.device_kind} does not run the kernels: nothing to measure")
  report = {"date": time.strftime("%Y-%m-%d"), "device": device.device_kind, "jax": jax.__version__}
  report |= {"command": " ".join(["python", *sys.argv]), "us": {}}
  kinds = set(filter(None, (options.kinds or "").split(",")))
  for name in options.shapes:
    found = measured(bench.parse_shape(name), kinds, options.rounds)
    report["us"][name] = found
    for label, times in found.items():
      best = sorted(times.items(), key=lambda item: item[1])
      print(f"{name} {label}: " + "; ".join(f"{arm} {us:.0f}" for arm, us in best[:8]), flush=True)
    if options.json:
      Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
  main()
