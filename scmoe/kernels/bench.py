"""The address of version 0.2 for `python -m scmoe.bench.layer`."""

import sys

from scmoe.bench.layer import main

if __name__ == "__main__":
  sys.exit(main())
