"""Block pairs, forward: how much of the all-to-all every wiring hides (paper Fig. 8, Table 1).

  python experiments/figure8_overlap/run.py                 both links, about 8 minutes on 4 H200s
  python experiments/figure8_overlap/run.py --links slow --jobs gpt3_xl --seconds 120
  python experiments/figure8_overlap/run.py --tiny        simulated devices, to see that it runs

Writes results.json, a table and plot.png here (--out for another folder). `slow` starts a second
process with NCCL_P2P_DISABLE=1: about 30 GB/s, like PCIe.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import speed  # noqa: E402

CONTROLS = ("comm.top", "comm.sc")
# With barriers the dense first layers are kernels, and so they are in those arms' ceiling.
CEILING = ("pos2.compute", "pos2.s1h.compute", *CONTROLS)
WIRINGS = ("top", "top.ch2", "shared", "pos1", "pos2")
JOBS = {
  "gpt3_xl": speed.Job(
    "slow",
    "gpt3_xl",
    "forward",
    (*WIRINGS, "pos2.s1", "pos2.s1h", "pos2.s2", "pos2.seq", *CEILING),
  ),
  "narrow": speed.Job(
    "slow",
    "narrow",
    "forward",
    ("top", "pos2", "pos2.s1", "pos3", "pos3.s2", "pos3.seq", "pos3.compute", *CONTROLS),
  ),
  "fine": speed.Job(
    "nvlink",
    "fine",
    "forward",
    ("top", "shared", "pos2", "pos2.s1", "pos2.s1h", "pos2.seq", *CEILING),
  ),
  "fine_ce": speed.Job(
    "copy_engines",
    "fine",
    "forward",
    ("top", "shared", "pos2", "pos2.s1", "pos2.seq", *CEILING),
  ),
}

if __name__ == "__main__":
  speed.main(JOBS, Path(__file__).parent, __doc__)
