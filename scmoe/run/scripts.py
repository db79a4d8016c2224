"""Console scripts: `scmoe-train` is `python -m scmoe.train`, and likewise for the other commands.

A script imports its command when it is called, and ends with the exit codes of
`scmoe.base.errors.run_main`. pyproject.toml names each function of this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from scmoe.base.errors import run_main


def _script(command: str) -> Callable[[], None]:
  def script() -> None:
    run_main(importlib.import_module(f"scmoe.{command}").main)

  script.__doc__ = f"python -m scmoe.{command}"
  return script


train = _script("train")
evaluate = _script("evaluate")
generate = _script("generate")
profile = _script("profile")
compare = _script("compare")
sweep = _script("sweep")
inspect = _script("inspect")
convert = _script("convert")
serve = _script("serve")
replay = _script("replay")
report = _script("report")
