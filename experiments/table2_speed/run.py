"""Training steps with accumulated gradients: speed of every wiring (paper Tables 1, 2 and 4).

  python experiments/table2_speed/run.py                  all links, about 12 minutes on 4 H200s
  python experiments/table2_speed/run.py --links slow --jobs gpt3_xl --seconds 120
  python experiments/table2_speed/run.py --tiny           simulated devices, to see that it runs

The step is that of `python -m scmoe.train`: microbatches, one reduction of the gradients, AdamW.
Writes results.json, table.txt and plot.png to runs/table2_speed (--out for another folder); what is
in results/ was put there by hand. Words of arms: experiments/speed.py.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import speed  # noqa: E402

TOP, POS2, POS3 = "top.bf16", "pos2.after mlp 0.bf16", "pos3.after mlp 0.bf16"
PAIR = (POS2, "pos2.bf16", f"{POS2}.compute", "pos2.comm")
JOBS = {
  "gpt3_xl": speed.Job(
    "slow", "gpt3_xl", "train", (TOP, *PAIR, POS3, f"{POS3}.compute"), accumulation=8
  ),
  "narrow": speed.Job(
    "slow", "narrow", "train", (TOP, POS2, POS3, f"{POS3}.compute"), accumulation=8
  ),
  "fine": speed.Job("nvlink", "fine", "train", (TOP, *PAIR), accumulation=4),
  "fine_ce": speed.Job(
    "copy_engines", "fine", "train", (TOP, "top.batched.bf16", *PAIR), accumulation=4
  ),
}

if __name__ == "__main__":
  speed.main(JOBS, Path("runs/table2_speed"), __doc__ or "")
