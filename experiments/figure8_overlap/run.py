"""Block pairs, forward: how much of the all-to-all every wiring hides (paper Fig. 8, Table 1).

  python experiments/figure8_overlap/run.py               all links, about 12 minutes on 4 H200s
  python experiments/figure8_overlap/run.py --links slow --jobs gpt3_xl --seconds 120
  python experiments/figure8_overlap/run.py --tiny        simulated devices, to see that it runs

Writes results.json, table.txt and plot.png to runs/figure8_overlap (--out for another folder); what
is in results/ was put there by hand. Every link has a process of its own; `slow` has
NCCL_P2P_DISABLE=1: about 30 GB/s, like PCIe. Words of arms: experiments/speed.py.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import speed  # noqa: E402

COMPUTE, EXCHANGES = "pos2.compute", ("top.comm", "pos2.comm")
EARLY, SEAM, LATE = (
  f"pos2.after {step}" for step in ("mlp 0", "attention 1: projections", "attention 1")
)
JOBS = {
  "gpt3_xl": speed.Job(
    "slow",
    "gpt3_xl",
    "forward",
    (
      *("top", "top.ch2", "shared", "pos1", "pos2", EARLY, SEAM, LATE, f"{SEAM}.kernels"),
      *("pos2.seq", COMPUTE, "pos2.kernels.compute", *EXCHANGES),
    ),
  ),
  "narrow": speed.Job(
    "slow",
    "narrow",
    "forward",
    ("top", "pos2", EARLY, "pos3", "pos3.after mlp 0", "pos3.seq", "pos3.compute", *EXCHANGES),
  ),
  "fine": speed.Job(
    "nvlink",
    "fine",
    "forward",
    ("top", "shared", "pos2", EARLY, SEAM, "pos2.seq", COMPUTE, *EXCHANGES),
  ),
  "fine_ce": speed.Job(
    "copy_engines",
    "fine",
    "forward",
    ("top", "top.batched", "shared", "pos2", EARLY, "pos2.seq", COMPUTE, *EXCHANGES),
  ),
}

if __name__ == "__main__":
  speed.main(JOBS, Path("runs/figure8_overlap"), __doc__ or "")
