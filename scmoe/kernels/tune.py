"""Keeps version 0.2's command `python -m scmoe.kernels.tune`, which runs `scmoe.bench.tune`."""

from scmoe.base.errors import run_main
from scmoe.bench.tune import main

if __name__ == "__main__":
  run_main(main)
