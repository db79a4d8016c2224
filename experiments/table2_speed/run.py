"""Training steps with accumulated gradients: speed of every wiring (paper Tables 1, 2 and 4).

  python experiments/table2_speed/run.py                    both links, about 8 minutes on 4 H200s
  python experiments/table2_speed/run.py --links slow --jobs gpt3_xl --seconds 120
  python experiments/table2_speed/run.py --tiny         simulated devices, to see that it runs

The step is that of `python -m scmoe.train`: microbatches, one reduction of the gradients, AdamW.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import speed  # noqa: E402

PAIR = ("pos2.s1.once16", "pos2.once16", "pos2.s1.once16.compute")
JOBS = {
  "gpt3_xl": speed.Job(
    "slow",
    "gpt3_xl",
    "train",
    ("top.once16", *PAIR, "pos3.s2.once16", "pos3.s2.once16.compute"),
    accumulation=8,
  ),
  "narrow": speed.Job(
    "slow",
    "narrow",
    "train",
    ("top.once16", "pos2.s1.once16", "pos3.s2.once16", "pos3.s2.once16.compute"),
    accumulation=8,
  ),
  "fine": speed.Job("nvlink", "fine", "train", ("top.once16", *PAIR), accumulation=4),
  "fine_ce": speed.Job(
    "copy_engines",
    "fine",
    "train",
    ("top.kernels.once16", "top.once16", *PAIR),
    accumulation=4,
  ),
}

if __name__ == "__main__":
  speed.main(JOBS, Path(__file__).parent, __doc__)
