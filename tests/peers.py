"""The packages that tests compare with, where they are installed: torch and transformers."""

import os
from typing import Any

import pytest


def torch_and_transformers(major: int = 0, why: str = "") -> tuple[Any, Any]:
  """Both modules; skips the calling file where one is missing.

  Args:
    major: the least major version of transformers.
    why: the reason for it, which a skipped file gives.
  """
  os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it fetches nothing
  torch, transformers = (
    pytest.importorskip(name, reason=f"{name} is not installed (pip install {name})")
    for name in ("torch", "transformers")
  )
  if int(transformers.__version__.split(".")[0]) < major:
    pytest.skip(why, allow_module_level=True)
  return torch, transformers
