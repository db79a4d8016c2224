"""Prints how evenly the state on which steps are timed loads experts and devices.

  python experiments/exchange_cost/loads.py
  python experiments/exchange_cost/loads.py --spreads 100 model.width=512 model.num_heads=4

It takes five minutes on two simulated devices. Pos-2 of `gpt2_moe_medium`, three pairs of width
1,536 with eight experts of width 256, so that a CPU has memory for them; 2,048 tokens a device. One
training step for each value of `scmoe.training.measured.SPREAD`, by which fresh embeddings are
multiplied. For each block it prints the load of the fullest expert over the mean, the load of the
fuller device over the mean, and the rounds of the exchange, whose first has room for 1.25 times the
mean.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from shared_state import MODEL, configured, fields_of  # noqa: E402

from scmoe.base.errors import run_main  # noqa: E402
from scmoe.run.command_line import simulate  # noqa: E402

WIDE = {
  "model.wiring": "scmoe_pos2",
  "model.width": "1536",
  "model.num_heads": "12",
  "model.num_experts": "8",
  "model.expert_hidden": "256",
  "model.num_layers": "6",
  "train.batch_size": "2",
  "train.tokens_per_step": "4096",
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--spreads", default="1,10,30,100", help="values of SPREAD, with commas")
  args = parser.parse_args()
  simulate(2)

  import jax
  import numpy as np

  from scmoe.run import build
  from scmoe.training import measured
  from scmoe.training.fastest import Steps
  from scmoe.training.variants import Variant

  run = configured("gpt2_moe_medium", MODEL | WIDE | fields_of(args.words))
  built = build.build(run.resolve(num_devices=2, vocab_size=build.vocab_size(run.data)))
  with tempfile.TemporaryDirectory() as folder:
    step = Steps(built, built.abstract_state(), Path(folder))(Variant())
    for spread in map(float, args.spreads.split(",")):
      measured.SPREAD = spread
      state = measured.MeasuredState(built)
      state.train(step)
      state.wait()
      arrays = {name: np.asarray(jax.device_get(x)) for name, x in state.figures[1].items()}
      load_LE = arrays["load"] / arrays["load"].mean(-1, keepdims=True)
      device_L = load_LE.reshape(len(load_LE), 2, -1).mean(-1).max(-1)
      per_block = lambda values: " ".join(f"{value:.2f}" for value in values)
      print(
        f"{spread:g} times: fullest expert {per_block(load_LE.max(-1))}; "
        f"fuller device {per_block(device_L)}; rounds {per_block(arrays['rounds'])}",
        flush=True,
      )


if __name__ == "__main__":
  run_main(lambda argv: main())
