"""Work directories of runs, written line by line: what the reports are compared with."""

from __future__ import annotations

import json
from pathlib import Path

from scmoe.run.config import RunConfig, to_dict
from scmoe.run.fields import with_field


def write_run(folder: Path, *, losses, seed=0, evals=None, done=True, fields=(), **line) -> Path:
  """A run that logged these training losses at steps 10, 20, ..., and these evaluations."""
  run = with_field(RunConfig(), "train.seed", str(seed))
  run = with_field(run, "train.steps", str(10 * len(losses)))
  for name, text in fields:
    run = with_field(run, name, text)
  folder.mkdir(parents=True)
  card = {"config": to_dict(run), "devices": {"count": 1, "kind": "cpu"}, "starts": []}
  card["parameters"] = {"total": 1000, "active": 400}
  (folder / "card.json").write_text(json.dumps(card))
  lines = [
    {"step": 10 * i, "kind": "train", "loss": loss, "tokens": 640 * i} | line
    for i, loss in enumerate(losses, 1)
  ]
  for step, loss in (evals or {}).items():
    bits = {"bits_per_byte": 2 * loss, "bits_per_byte/code": loss}
    lines.append({"step": step, "kind": "eval", "loss": loss} | bits)
  if done:
    lines.append({"step": 10 * len(losses), "kind": "end", "host_memory_bytes": 2**30})
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return folder
