"""Text larger than memory: how soon a second start trains, in how much memory, and goes on exactly.

  python experiments/large_text/run.py --gigabytes 1
  python experiments/large_text/run.py --gigabytes 10 --json OUT

Makes a text of that size of the running Python's standard library, its paragraphs in random order,
then trains `--config` on it three times: once in a piece, once stopped halfway, and once more from
there. Says of every start when its first step was done, in seconds of the clock and of the
processors (another program on the machine changes only the first), the most memory that it held,
and whether the losses of the run in two pieces are bitwise those of the whole one. The text and all
that was made of it are deleted at the end.

Memory is that of the process (its largest resident set). To see that the page cache is not needed
either, run it in a control group with a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def make_text(path: Path, size: int) -> None:
  """Writes about so many bytes of paragraphs of the standard library, in random order."""
  draw, paragraphs = random.Random(0), []
  library = Path(sysconfig.get_path("stdlib"))
  for file in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
    try:
      text = file.read_text("utf-8")
    except UnicodeDecodeError:
      continue
    if "\0" not in text:
      paragraphs += [part.encode() for part in text.split("\n\n") if part.strip()]
  with open(path, "wb") as out:
    number = 0
    while out.tell() < size:
      number += 1
      chosen = draw.choices(paragraphs, k=400)
      out.write(b"\n\n".join([b"# part %d" % number, *chosen, b""]))


def processor_seconds(pid: int) -> float:
  """User and system time of a process and its threads; 0 when it is gone."""
  try:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
  except OSError:
    return 0.0
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(name: str, command: list[str], workdir: Path, text: Path) -> dict[str, Any]:
  """Runs the training command; when its first step was done, and what it took in all."""
  metrics = workdir / "metrics.jsonl"
  before = metrics.stat().st_size if metrics.exists() else 0
  began, first = time.perf_counter(), {}
  log = open(text.parent / f"{name}.log", "w")  # noqa: SIM115 - as long as the process
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

  def watch() -> None:
    while process.returncode is None:
      if metrics.exists() and metrics.stat().st_size > before:
        first["first_step_s"] = round(time.perf_counter() - began, 1)
        first["first_step_processor_s"] = round(processor_seconds(process.pid), 1)
        return
      time.sleep(0.05)

  watcher = threading.Thread(target=watch)
  watcher.start()
  _, status, used = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  watcher.join()
  log.close()
  if process.returncode not in (0, 75):
    sys.exit(
      f"{name}: exit {process.returncode}\n{(text.parent / f'{name}.log').read_text()[-3000:]}"
    )
  found = {"start": name, **first, "all_s": round(time.perf_counter() - began, 1)}
  found["processor_s"] = round(used.ru_utime + used.ru_stime, 1)
  found["largest_resident_mib"] = round(used.ru_maxrss / 1024)
  print(json.dumps(found), flush=True)
  return found


def losses(workdir: Path) -> list[tuple[int, float]]:
  """(step, loss) of every logged step, and of the evaluations."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def main() -> None:
  """Makes the text, trains three times, prints and keeps the figures."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--gigabytes", type=float, default=1.0)
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--config", default="quickstart")
  parser.add_argument("--folder", type=Path, default=None, help="for the text; a temporary one")
  parser.add_argument("--json", type=Path)
  args, fields = parser.parse_known_args()
  folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="large-text-"))
  text = folder / "text.txt"
  try:
    make_text(text, int(args.gigabytes * 1e9))
    half = args.steps // 2
    command = [sys.executable, "-m", "scmoe.train", "--config", args.config]
    command += [f"--config.data.path={text}", f"--config.data.cache_dir={folder / 'cache'}"]
    command += [f"--config.train.steps={args.steps}", "--config.train.log_every=1"]
    command += [f"--config.checkpoint.every={half}", *fields]
    stopped = [*command, f"--config.train.stop_after={half}"]
    parts, whole = folder / "parts", folder / "whole"
    starts = [
      start("first", [*stopped, "--workdir", str(parts)], parts, text),
      start("second", [*command, "--workdir", str(parts)], parts, text),
      start("another run", [*command, "--workdir", str(whole)], whole, text),
    ]
    stored = sum(f.stat().st_size for f in (folder / "cache").rglob("*") if f.is_file())
    figures = {
      "date": time.strftime("%Y-%m-%d"),
      "command": " ".join(["python", *sys.argv]),
      "machine": f"{os.cpu_count()} x {platform.machine()}",
      "text_bytes": text.stat().st_size,
      "cache_bytes": stored,
      "starts": starts,
      "losses": [loss for _, loss in losses(whole)],
      "exact": losses(parts) == losses(whole),
    }
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  print(json.dumps(figures, indent=1))
  if args.json:
    args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
  main()
