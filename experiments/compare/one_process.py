"""MoE layers of two commits in one process, call by call in turns: the same clock, heat and arrays.

  python experiments/compare/one_process.py --before ../before --seconds 15 --json OUT

The arms of `run.py --tasks layer --gates gate16`, nearer to each other than two processes get: the
modules of both commits are loaded side by side. A call's median is over all its turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import AFTER, BEFORE, SHAPES, layer_arms

_SAMPLE = 0.05  # seconds of calls in a row


@contextlib.contextmanager
def modules_of(root: Path, kept: dict) -> Iterator[None]:
  """Imports `scmoe` from a folder; `kept` holds its modules while another commit's are in use."""
  own = lambda: [m for m in sys.modules if m == "scmoe" or m.startswith("scmoe.")]
  others = {m: sys.modules.pop(m) for m in own()}
  sys.modules.update(kept)
  sys.path.insert(0, str(root))
  try:
    yield
  finally:
    sys.path.remove(str(root))
    kept.update({m: sys.modules.pop(m) for m in own()})
    sys.modules.update(others)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--before", type=Path, required=True, help="a folder with the older commit")
  parser.add_argument("--shapes", default=SHAPES)
  parser.add_argument("--seconds", type=float, default=15.0, help="of turns, for each shape")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  import jax

  with modules_of(Path(__file__).resolve().parents[2], {}):
    from scmoe.profiling import timer
  roots = {BEFORE: args.before.resolve(), AFTER: Path(__file__).resolve().parents[2]}
  kept: dict[str, dict] = {side: {} for side in roots}
  report = {"date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind,
            "jax": jax.__version__, "command": " ".join(sys.argv), "arms": {}}  # fmt: skip
  for shape in args.shapes.split():
    arms: dict[Any, Any] = {}
    for side, root in roots.items():
      given = argparse.Namespace(shapes=shape, gates="gate16")
      with modules_of(root, kept[side]):
        found = layer_arms(side == BEFORE, given)
      arms |= {(name, side): arm for name, arm in found.items()}
    for arm in arms.values():
      arm(3)  # compiled, and warm
    calls = {key: timer.calls_in(arm, _SAMPLE) for key, arm in arms.items()}
    end = time.perf_counter() + args.seconds
    found: Any = timer.interleave(arms, rounds=10**6, calls=calls, deadline=end)
    for name in dict.fromkeys(name for name, _ in arms):
      before, after = found[name, BEFORE], found[name, AFTER]
      report["arms"][name] = {BEFORE: before.as_json(), AFTER: after.as_json()}
      print(f"{name:28s}{1e3 * before.median:9.3f}{1e3 * after.median:9.3f} ms"
            f"{after.median / before.median:8.3f}   spread {100 * after.spread:.1f} %",
            flush=True)  # fmt: skip
  if args.json:
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
  os.chdir(Path(__file__).resolve().parents[2])
  main()
