"""The address of version 0.2 for `python -m scmoe.bench.tune`."""

from scmoe.base.errors import run_main
from scmoe.bench.tune import main

if __name__ == "__main__":
  run_main(main)
