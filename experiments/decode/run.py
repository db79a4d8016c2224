"""Decoding of a few layers of a model: tokens a second beside what memory's speed allows.

  python experiments/decode/run.py --json OUT
  python experiments/decode/run.py --config quickstart --rows 1,2 --prompt_tokens 8 --new 4

Each number of rows is a process of its own, `scmoe.generate --benchmark`: random weights, the loop
of --new tokens after a prompt of --prompt_tokens, medians of --rounds turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def measured(given: argparse.Namespace, rows: int) -> dict[str, Any]:
  """The figures of `scmoe.generate --benchmark` for one number of rows."""
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "figures.json"
    command = [
      sys.executable, "-m", "scmoe.generate", "--benchmark", "--config", given.config,
      "--batch", str(rows), "--prompt_tokens", str(given.prompt_tokens),
      "--max_new_tokens", str(given.new), "--rounds", str(given.rounds), "--json", str(out),
      *given.rest,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(out.read_text("utf-8"))


def main() -> None:
  """Measures every number of rows, and writes --json."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--config", default="olmoe")
  flags.add_argument("--rows", default="1,8,64", help="sequences at once, by commas")
  flags.add_argument("--prompt_tokens", type=int, default=128)
  flags.add_argument("--new", type=int, default=64, help="tokens to add to each")
  flags.add_argument("--rounds", type=int, default=7)
  flags.add_argument("--json", type=Path)
  flags.add_argument("rest", nargs="*", help="further flags of scmoe.generate, behind --")
  given = flags.parse_args()
  if given.config == "olmoe" and not given.rest:
    given.rest = ["--config.model.num_layers=4"]
  result = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python experiments/decode/run.py", *sys.argv[1:]]),
    "rows": {rows: measured(given, int(rows)) for rows in given.rows.split(",")},
  }
  if given.json:
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
  main()
