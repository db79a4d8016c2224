"""Two runs that differ in one thing: the loss of every step, beside each other.

  python experiments/losses/run.py --option model.dtype bfloat16 float16
  python experiments/losses/run.py --option optimizer.moments float32 bfloat16 --config quickstart
  python experiments/losses/run.py --before ../scmoe-2111eff -- --config.model.num_layers=4

The same initial weights and batches; the second value is the one that is asked about. --before: the
code of another checkout against this one's. What stands behind -- goes to scmoe.train. Writes
results.json (every step's losses), table.txt and losses.png into a folder of results/ that is named
by option and second value, or by the checkout; or into --to.
Metrics of runs that are there already are read with --metrics FIRST.jsonl SECOND.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Arm(NamedTuple):
  """One of the two runs: what it is called, its own flags, and the checkout whose code it runs."""

  name: str
  flags: list[str]
  code: Path


def main() -> None:
  """Trains twice, writes the three files."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  what = flags.add_mutually_exclusive_group(required=True)
  what.add_argument("--option", nargs=3, metavar=("FIELD", "FIRST", "SECOND"))
  what.add_argument("--before", type=Path, help="checkout of the code to compare with")
  flags.add_argument("--config", default="gpt2_moe_small")
  flags.add_argument("--steps", type=int, default=200)
  flags.add_argument("--batch", type=int, default=16)
  flags.add_argument("--tokens_per_step", type=int, default=65536)
  flags.add_argument("--metrics", nargs=2, type=Path, help="of runs that are there")
  flags.add_argument("--hardware", default="", help="of those runs")
  flags.add_argument("--to", type=Path)
  flags.add_argument("rest", nargs="*", help="further flags of scmoe.train")
  given = flags.parse_args()
  options = [
    "--config", given.config, "--config.data.tokenizer=bytes",
    f"--config.train.steps={given.steps}", f"--config.train.batch_size={given.batch}",
    f"--config.train.tokens_per_step={given.tokens_per_step}",
    "--config.train.log_every=1", f"--config.optimizer.warmup_steps={given.steps // 4}",
    "--config.train.sample_tokens=0", *given.rest,
  ]  # fmt: skip
  if given.before:
    kept = f"before-{given.before.resolve().name}"
    arms = [Arm("before", [], given.before.resolve()), Arm("now", [], ROOT)]
  else:
    field, *values = given.option
    kept = f"{field.rpartition('.')[2]}-{values[1]}"
    arms = [Arm(value, [f"--config.{field}={value}"], ROOT) for value in values]
  with tempfile.TemporaryDirectory() as folder:
    files = given.metrics or [trained(options, arm, Path(folder)) for arm in arms]
    records = [
      [json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files
    ]
  train = [[r for r in own if r["kind"] == "train"] for own in records]
  losses = [{r["step"]: r["loss"] for r in own} for own in train]
  steps = sorted(set(losses[0]) & set(losses[1]))
  names = [arm.name for arm in arms]
  differs = [f"--config.{given.option[0]}=..."] if given.option else []
  result = {
    "date": time.strftime("%Y-%m-%d"),
    "hardware": given.hardware or hardware(),
    "command": " ".join(["python -m scmoe.train", *options, *differs]),
    "code": {arm.name: commit(arm.code) for arm in arms},
    "losses": {name: [own[s] for s in steps] for name, own in zip(names, losses)},
    "evaluation": {
      name: {r["step"]: r["loss"] for r in own if r["kind"] == "eval"}
      for name, own in zip(names, records)
    },
    "skipped_steps": max(r["skipped"] for r in train[1]),
  }
  to = given.to or HERE / "results" / kept
  to.mkdir(parents=True, exist_ok=True)
  (to / "results.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
  text = table(result)
  (to / "table.txt").write_text(text + "\n", "utf-8")
  print(text)
  plot(result, to / "losses.png")


def trained(options: list[str], arm: Arm, folder: Path) -> Path:
  """The metrics of an arm's run."""
  command = [sys.executable, "-m", "scmoe.train", *options, *arm.flags]
  paths = [str(arm.code), *filter(None, [os.environ.get("PYTHONPATH")])]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  workdir = folder / arm.name
  subprocess.run([*command, "--workdir", str(workdir)], check=True, cwd=arm.code, env=environment)
  return workdir / "metrics.jsonl"


def commit(code: Path) -> str:
  """The commit that is checked out there."""
  command = ["git", "-C", str(code), "describe", "--always", "--dirty"]
  return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


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
  (first, wide), (second, half) = result["losses"].items()
  lines = [
    f"{result['date']}  {result['hardware']}",
    result["command"],
    f"{'steps':>10s}{first:>10s}{second:>10s}{'difference':>12s}{'deviation':>11s}",
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
  for name, losses in result["evaluation"].items():
    lines += [f"{name}: validation loss {loss:.4f} at step {at}" for at, loss in losses.items()]
  return "\n".join([*lines, f"steps that {second} skipped: {result['skipped_steps']:.0f}"])


def plot(result: dict[str, Any], file: Path) -> None:
  """Both losses by step, and their difference below."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (above, below) = plt.subplots(
    2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
  )
  for name, losses in result["losses"].items():
    above.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1)
  wide, half = result["losses"].values()
  below.plot(range(1, len(wide) + 1), [b - a for a, b in zip(wide, half)], linewidth=1)
  below.axhline(0, color="gray", linewidth=0.5)
  above.set(ylabel="loss")
  below.set(xlabel="step", ylabel="difference")
  above.legend()
  figure.savefig(file, dpi=120)


if __name__ == "__main__":
  main()
