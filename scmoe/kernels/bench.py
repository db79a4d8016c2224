"""Keeps version 0.2's command `python -m scmoe.kernels.bench`, which runs `scmoe.bench.layer`."""

from scmoe.base.errors import run_main
from scmoe.bench.layer import main

if __name__ == "__main__":
  run_main(main)
