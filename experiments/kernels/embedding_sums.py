"""Times the sum of a table's gradients in bfloat16 and in float32, and compares it with float64's.

  python experiments/kernels/embedding_sums.py --json OUT
  python experiments/kernels/embedding_sums.py --tokens 512 --width 16      small, for a CPU

Each of `--tokens` tokens adds a gradient of D bfloat16 numbers to its row of a table of V rows.
Tokens are the bytes of this Python's own sources, of which a few are frequent, or drawn evenly from
the V rows. Gradients are numbers around 0, as a trained model's, or around 1, all in one direction.
`bfloat16` is the addition that XLA makes of a lookup in a bfloat16 table; `float32` that of
`scmoe.kernels.wide_sums.looked_up` in a float32 table. The error is that of the most frequent
token's row, relative to its norm in float64.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from scmoe.kernels.wide_sums import looked_up
from scmoe.profiling.timer import interleave, repeated

ARMS = {
  "bfloat16": lambda table, index: table.astype(jnp.bfloat16)[index],
  "float32": lambda table, index: looked_up(table, index).astype(jnp.bfloat16),
}


def source_bytes(count: int) -> np.ndarray:
  """The first bytes of the modules of Python's own json package, repeated: int32 [count]."""
  text = b"".join(f.read_bytes() for f in sorted(pathlib.Path(json.__file__).parent.glob("*.py")))
  return np.resize(np.frombuffer(text, np.uint8), count).astype(np.int32)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tokens", type=int, default=16384)
  parser.add_argument("--rows", type=int, default=50304, help="V")
  parser.add_argument("--width", type=int, default=1024, help="D")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  tokens = {
    "bytes": source_bytes(args.tokens),
    "even": rng.integers(0, args.rows, args.tokens).astype(np.int32),
  }
  noise = rng.normal(size=(args.tokens, args.width))
  bars = {"around 0": noise, "around 1": 1 + 0.1 * noise}
  table = jnp.zeros((args.rows, args.width))
  results = []
  print("| tokens | gradients | sum | us | error of the fullest row |\n|---|---|---|---|---|")
  for whose, index in tokens.items():
    row, count = np.argmax(np.bincount(index)), np.bincount(index).max()
    for kind, numbers in bars.items():
      bar = jnp.asarray(numbers, jnp.bfloat16)
      want = np.asarray(bar, np.float64)[index == row].sum(0)
      gradients = {
        name: jax.jit(lambda t, i, b, arm=arm: jax.vjp(lambda t: arm(t, i), t)[1](b)[0])
        for name, arm in ARMS.items()
      }
      given = table, jnp.asarray(index), bar
      got = {name: np.asarray(f(*given)[row], np.float64) for name, f in gradients.items()}
      timed = {name: repeated(f, *given) for name, f in gradients.items()}
      times = interleave(timed, rounds=args.rounds, calls=5)
      for name in ARMS:
        error = np.linalg.norm(got[name] - want) / np.linalg.norm(want)
        us = 1e6 * times[name].median
        print(
          f"| {whose} ({count} to a row) | {kind} | {name} | {us:.0f} | {error:.1e} |", flush=True
        )
        results.append({"tokens": whose, "fullest": int(count), "gradients": kind, "sum": name,
                        "us": us, "error": float(error)})  # fmt: skip
  if args.json:
    head = {"date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind}
    head |= {"jax": jax.__version__, "command": " ".join(sys.argv)}
    args.json.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
  main()
