"""Names what got slower since the last figures of the same hardware were committed.

  python experiments/bench_check/run.py                 run all that fits this machine, and compare
  python experiments/bench_check/run.py --only layer --keep

Runs the benchmarks of the step, the layer, the dispatch and the overlap, and compares every time
with `results/HARDWARE.json` beside this file. An arm is slower when it takes more time than before
by more than both spreads together, and by more than 1 %. Exit code 1 if one is. `--keep` stores
what was measured as the new baseline; a person commits it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASELINES = Path(__file__).resolve().parent / "results"
LEAST, UNKNOWN = 0.01, 0.03  # share of time that counts; spread of a figure that has none
STEP = (
  "--config gpt2_moe_medium --config.model.num_layers=8 --config.train.batch_size=16 "
  "--config.train.tokens_per_step=0 --compare top2,scmoe_pos2 --rounds 7"
)
SHAPES = "--shape OLMoE --shape Mixtral"  # many small experts, few large; a minute each to compile
# name -> (GPUs that it needs, command; OUT is the JSON)
BENCHMARKS = {
  "layer": (1, f"-m scmoe.bench.layer --rounds 5 --layer {SHAPES} --json OUT"),
  "step": (1, f"-m scmoe.profile {STEP} --workdir WORK --json OUT"),
  "dispatch": (
    2,
    "experiments/dispatch/run.py --layers 4 --mebibytes 16,64 --rounds 15 --json OUT",
  ),
  "overlap": (
    2,
    f"-m scmoe.profile {STEP} --config.mesh.expert=2 --workdir WORK --json OUT",
  ),
}


def times(value: Any, name: str = "") -> Iterator[tuple[str, tuple[float, float]]]:
  """(arm, (ms, spread)) of everything in a benchmark's JSON that has a time."""
  if isinstance(value, dict):
    found = next((value[key] for key in ("step_ms", "ms") if key in value), None)
    if isinstance(found, int | float) and found > 0:
      yield name, (float(found), float(value.get("spread") or UNKNOWN))
    for key, inner in value.items():
      yield from times(inner, f"{name} {key}".strip())
  elif isinstance(value, list):
    for index, inner in enumerate(value):
      yield from times(inner, f"{name} {_label(inner, index)}".strip())


def _label(value: Any, index: int) -> str:
  words = ("name", "label", "task", "what", "routing", "mebibytes")
  named = [str(value[key]) for key in words if isinstance(value, dict) and key in value]
  return " ".join(named) or str(index)


def compare(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
  """Lines of a table, and the arms that got slower.

  Args:
    before, now: arm -> [ms, spread].
  """
  lines, slower = [], []
  for arm in sorted({*before, *now}):
    if arm not in now or arm not in before:
      lines.append(f"{arm:60} {'not measured now' if arm in before else 'new'}")
      continue
    (old, spread), (new, own) = before[arm], now[arm]
    room = max(LEAST, spread + own)
    change = new / old - 1
    word = "SLOWER" if change > room else "faster" if change < -room else ""
    lines.append(
      f"{arm:60} {old:10.3f} {new:10.3f} ms {change:+7.1%} (±{room:.1%}) {word}".rstrip()
    )
    slower += [arm] if word == "SLOWER" else []
  return lines, slower


def hardware() -> tuple[str, int]:
  """A file's name for the devices that are here, and how many there are; asked of a process that
  ends, so that it holds no device."""
  ask = "import jax; d = jax.devices(); print(f'{len(d)}|{d[0].device_kind}')"
  out = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
  count, kind = out.stdout.strip().splitlines()[-1].split("|")
  return f"{count}-x-{re.sub(r'[^A-Za-z0-9]+', '-', kind).strip('-').lower()}", int(count)


def measure(name: str) -> dict[str, Any]:
  """One benchmark in a process of its own: arm -> [ms, spread]."""
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "out.json"
    words = BENCHMARKS[name][1].replace("OUT", str(out)).replace("WORK", f"{folder}/work")
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    return {f"{name}: {arm}": list(time) for arm, time in times(json.loads(out.read_text()))}


def main() -> int:
  """Measures, compares, prints."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
  parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks, by commas")
  parser.add_argument("--keep", action="store_true", help="store the figures as the baseline")
  options = parser.parse_args()
  place, devices = hardware()
  file = BASELINES / f"{place}.json"
  now: dict[str, Any] = {}
  for name in options.only.split(","):
    if BENCHMARKS[name][0] > devices:
      print(f"{name}: needs {BENCHMARKS[name][0]} devices, here are {devices}; left out")
      continue
    now |= measure(name)
  before = json.loads(file.read_text()) if file.exists() else {"arms": {}}
  measured = {name.partition(":")[0] for name in now}
  arms = {a: t for a, t in before["arms"].items() if a.partition(":")[0] in measured}
  lines, slower = compare(arms, now)
  print("\n".join(lines))
  if not before["arms"]:
    print(f"no figures of this hardware are committed ({file.name}); --keep stores these")
  if options.keep:
    file.parent.mkdir(exist_ok=True)
    stored = {"date": datetime.date.today().isoformat(), "arms": before["arms"] | now}
    file.write_text(json.dumps(stored, indent=1) + "\n")
  print(f"slower: {', '.join(slower)}" if slower else f"{len(now)} figures, none slower")
  return 1 if slower else 0


if __name__ == "__main__":
  raise SystemExit(main())
