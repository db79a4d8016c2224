"""float16 beside bfloat16: the same run in both types, loss by step.

  python experiments/float16/run.py
  python experiments/float16/run.py --steps 20 --config quickstart

The same initial weights and batches; float16 with its dynamic loss scale. Writes results.json
(every step's losses), table.txt and losses.png beside this file, or to --to. Metrics of runs that
are there already are read with --metrics BFLOAT16.jsonl FLOAT16.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DTYPES = ("bfloat16", "float16")


def main() -> None:
  """Trains twice, writes the three files."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--config", default="gpt2_moe_small")
  flags.add_argument("--steps", type=int, default=200)
  flags.add_argument("--metrics", nargs=2, type=Path, help="of runs that are there")
  flags.add_argument("--hardware", default="", help="of those runs")
  flags.add_argument("--to", type=Path, default=HERE)
  flags.add_argument("rest", nargs="*", help="further flags of scmoe.train")
  given = flags.parse_args()
  options = [
    "--config", given.config, "--config.data.tokenizer=bytes",
    f"--config.train.steps={given.steps}", "--config.train.batch_size=16",
    "--config.train.tokens_per_step=65536",
    "--config.train.log_every=1", f"--config.optimizer.warmup_steps={given.steps // 4}",
    "--config.train.sample_tokens=0", *given.rest,
  ]  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    files = given.metrics or [trained(options, dtype, Path(folder)) for dtype in DTYPES]
    records = [
      [json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files
    ]
  train = [[r for r in own if r["kind"] == "train"] for own in records]
  losses = [{r["step"]: r["loss"] for r in own} for own in train]
  steps = sorted(set(losses[0]) & set(losses[1]))
  result = {
    "date": time.strftime("%Y-%m-%d"),
    "hardware": given.hardware or hardware(),
    "command": " ".join(["python -m scmoe.train", *options, "--config.model.dtype=DTYPE"]),
    "losses": {dtype: [own[s] for s in steps] for dtype, own in zip(DTYPES, losses)},
    "evaluation": {
      dtype: {r["step"]: r["loss"] for r in own if r["kind"] == "eval"}
      for dtype, own in zip(DTYPES, records)
    },
    "skipped_steps": max(r["skipped"] for r in train[1]),
  }
  given.to.mkdir(parents=True, exist_ok=True)
  (given.to / "results.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
  text = table(result)
  (given.to / "table.txt").write_text(text + "\n", "utf-8")
  print(text)
  plot(result, given.to / "losses.png")


def trained(options: list[str], dtype: str, folder: Path) -> Path:
  """The metrics of a run in a type."""
  command = [sys.executable, "-m", "scmoe.train", *options, f"--config.model.dtype={dtype}"]
  subprocess.run([*command, "--workdir", str(folder / dtype)], check=True)
  return folder / dtype / "metrics.jsonl"


def hardware() -> str:
  """The devices and jax's version."""
  code = (
    "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind, 'jax', jax.__version__)"
  )
  return subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True
  ).stdout.strip()


def table(result: dict[str, Any]) -> str:
  """Mean difference of the losses in every quarter, beside how the steps scatter about it."""
  wide, half = (result["losses"][dtype] for dtype in DTYPES)
  lines = [
    f"{result['date']}  {result['hardware']}",
    result["command"],
    f"{'steps':>10s}{'bfloat16':>10s}{'float16':>10s}{'difference':>12s}{'deviation':>11s}",
  ]
  quarter = -(-len(wide) // 4)
  for begin in range(0, len(wide), quarter):
    part = slice(begin, begin + quarter)
    apart = [b - a for a, b in zip(wide[part], half[part])]
    lines.append(
      f"{begin + 1:>5d}-{begin + len(apart):<4d}{statistics.mean(wide[part]):>10.4f}"
      f"{statistics.mean(half[part]):>10.4f}{statistics.mean(apart):>12.4f}"
      f"{statistics.pstdev(apart):>11.4f}"
    )
  for dtype, losses in result["evaluation"].items():
    lines += [f"{dtype}: validation loss {loss:.4f} at step {at}" for at, loss in losses.items()]
  return "\n".join([*lines, f"steps that float16 skipped: {result['skipped_steps']:.0f}"])


def plot(result: dict[str, Any], file: Path) -> None:
  """Both losses by step, and their difference below."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (above, below) = plt.subplots(
    2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
  )
  for dtype, losses in result["losses"].items():
    above.plot(range(1, len(losses) + 1), losses, label=dtype, linewidth=1)
  wide, half = (result["losses"][dtype] for dtype in DTYPES)
  below.plot(range(1, len(wide) + 1), [b - a for a, b in zip(wide, half)], linewidth=1)
  below.axhline(0, color="gray", linewidth=0.5)
  above.set(ylabel="loss")
  below.set(xlabel="step", ylabel="difference")
  above.legend()
  figure.savefig(file, dpi=120)


if __name__ == "__main__":
  main()
