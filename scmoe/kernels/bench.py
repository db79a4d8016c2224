"""Keeps version 0.2's command `python -m scmoe.kernels.bench`, which runs `scmoe.bench.layer`."""

import sys

from scmoe.bench.layer import main

if __name__ == "__main__":
  sys.exit(main())
