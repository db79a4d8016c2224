"""Models larger than the GPU: every way to hold experts in the host's memory, beside none of it.

  python experiments/offload/run.py
  python experiments/offload/run.py --configs gpt2_moe_medium --prompt_tokens 512 --rounds 5

Decode at batch 1 and a long prefill of each configuration, all ways in turns in one process
(`scmoe.generate --benchmark --ways`), on random weights. Then some ways in a process of their own,
for the most memory that each holds. Writes results.json, table.txt and ways.png to results/ beside
this file, or to --to. The bandwidth from the host is measured in the same run, and what it would
allow (`scmoe.inference.offload.plan`) stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = ("none", "blocking", "early", "blocking+HALF", "early+HALF", "ring,early")


def main() -> None:
  """Measures, and writes the three files."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--configs", default="gpt2_moe_medium,gpt3_moe_xl")
  flags.add_argument("--wiring", default="scmoe_pos2")
  flags.add_argument("--ways", default=";".join(WAYS), help="HALF is half of the experts")
  flags.add_argument("--alone", default="none;early", help="ways with a process of their own")
  flags.add_argument("--prompt_tokens", type=int, default=128)
  flags.add_argument("--max_new_tokens", type=int, default=64)
  flags.add_argument("--rounds", type=int, default=5)
  flags.add_argument("--long_prefill", type=int, default=0, help="tokens; 0: not measured")
  flags.add_argument("--to", default=str(HERE / "results"))
  flags.add_argument("rest", nargs="*", help="further flags of scmoe.generate")
  given = flags.parse_args()
  folder = Path(given.to)
  folder.mkdir(parents=True, exist_ok=True)
  result: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python experiments/offload/run.py", *sys.argv[1:]]),
    "configs": {},
  }
  texts = []
  for name in given.configs.split(","):
    ways = given.ways.replace("HALF", str(experts_of(name, given.rest) // 2))
    text, figures = measured(given, name, ways, given.prompt_tokens, 1)
    for way in filter(None, given.alone.split(";")):
      _, alone = measured(given, name, way, given.prompt_tokens, 1, rounds=1)
      (arm,) = alone["arms"].values()
      found = figures["arms"].get(f"{given.wiring} {way.strip()}")
      if found is not None:
        found["peak_memory"] = alone["peak_memory"]
        found["memory_alone"] = arm["memory"]
    result["configs"][name] = {"decode": figures}
    texts.append(text)
    if given.long_prefill:
      long = "none; ring,early"
      text, figures = measured(given, name, long, given.long_prefill, 1)
      result["configs"][name]["long_prefill"] = figures
      texts.append(text)
  (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
  heads = [summary(name, result) for name in result["configs"]]
  table = "\n\n".join([f"{result['date']}  {result['command']}", *texts, *heads])
  (folder / "table.txt").write_text(table + "\n", "utf-8")
  print(table)
  plot(result, folder / "ways.png")


def experts_of(name: str, rest: list[str]) -> int:
  """Experts of a configuration."""
  code = (
    "import sys; from scmoe.run.command_line import *; from scmoe.generate import FLAGS; "
    "v, g = parse(sys.argv[1:], FLAGS, with_fields=True); print(run_config(v, g).model.num_experts)"
  )
  command = [sys.executable, "-c", code, "--benchmark", "--config", name, *rest]
  return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measured(
  given: argparse.Namespace, name: str, ways: str, prompt: int, batch: int, rounds: int = 0
) -> tuple[str, dict[str, Any]]:
  """The table and the figures of one process."""
  file = Path(given.to) / "part.json"
  command = [
    sys.executable, "-m", "scmoe.generate", "--benchmark", "--config", name,
    "--compare", given.wiring, "--ways", ways, "--batch", str(batch),
    "--prompt_tokens", str(prompt), "--max_new_tokens", str(given.max_new_tokens),
    "--rounds", str(rounds or given.rounds), "--json", str(file), *given.rest,
  ]  # fmt: skip
  text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
  figures = json.loads(file.read_text("utf-8"))
  file.unlink()
  return text.rstrip(), figures


def summary(name: str, result: dict[str, Any]) -> str:
  """Memory below `none`, and time beside it."""
  arms = result["configs"][name]["decode"]["arms"]
  none = next((arm for key, arm in arms.items() if key.endswith(" none")), None)
  lines = [f"{name}, beside none:"]
  for key, arm in arms.items():
    if none is None or arm is none:
      continue
    time_of = arm["decode"]["wall"]["ms"] / none["decode"]["wall"]["ms"]
    memory = 1 - arm["memory"]["device"] / none["memory"]["device"]
    lines.append(f"  {key:32s} decode {time_of:.2f} x, memory {100 * memory:.0f} % below")
  return "\n".join(lines)


def plot(result: dict[str, Any], file: Path) -> None:
  """Decode's time over the device's memory, a line for each configuration."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
  for name, found in result["configs"].items():
    arms = found["decode"]["arms"]
    memory = [arm["memory"]["device"] / 2**30 for arm in arms.values()]
    times = [arm["decode"]["wall"]["ms"] for arm in arms.values()]
    axes.scatter(memory, times, label=name)
    for key, x, y in zip(arms, memory, times):
      axes.annotate(
        key.split(" ", 1)[-1], (x, y), fontsize=8, xytext=(4, 3), textcoords="offset points"
      )
  axes.set(xlabel="device memory of the programs, GiB", ylabel="decode, ms for all new tokens")
  axes.set_ylim(bottom=0)
  axes.legend()
  figure.savefig(file, dpi=120)


if __name__ == "__main__":
  main()
