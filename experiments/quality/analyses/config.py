"""The small language model whose training the analyses follow; README.md has the commands.

It is the model of the studies at --scale cpu, trained longer and with more lines in its log, so
that the log shows how routers change over training.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

from scmoe.run.config import as_config_dict

_SHORT = study.language("cpu")
RUN = dataclasses.replace(
  _SHORT,
  name="analyses",
  train=dataclasses.replace(_SHORT.train, steps=300, eval_every=300),
  optimizer=dataclasses.replace(_SHORT.optimizer, warmup_steps=30),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)
