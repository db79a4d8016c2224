"""A released model of full size: an OLMoE-1B-7B folder (13.8 GB) is made, converted and trained.

  python experiments/released/run.py --folder /tmp/released

The weights are random; names, shapes and types are the published ones. In every turn the folder is
dropped from the host's page cache before it is read, and again before scmoe.convert reads it, so
that both times are those of the disk. Writes results.json and table.txt to results/ beside this
file, or to --to. Needs 30 GB of disk and a GPU of 141 GB for the steps of training, which end by a
kill: their checkpoint would be 83 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scmoe.pretrained.families import read_config
from scmoe.pretrained.folder import Planned, write_weights
from scmoe.pretrained.names import tensors

HERE = Path(__file__).resolve().parent
OLMOE = {  # config.json of allenai/OLMoE-1B-7B-0924, what describes the architecture
  "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False,
  "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
  "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
  "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
  "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
  "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 50304,
}  # fmt: skip


def main() -> None:
  """Makes, reads, converts, trains; writes what it took."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--folder", default="/tmp/released")
  flags.add_argument("--layers", type=int, default=16)
  flags.add_argument("--turns", type=int, default=3, help="of reading and of converting")
  flags.add_argument("--steps", type=int, default=6, help="of training; 0: none")
  flags.add_argument("--batch", type=int, default=4, help="rows of 4096 tokens a step")
  flags.add_argument("--to", default=str(HERE / "results"))
  given = flags.parse_args()
  folder = Path(given.folder)
  shutil.rmtree(folder, ignore_errors=True)
  source, workdir = folder / "olmoe", folder / "run"
  source.mkdir(parents=True)
  config = OLMOE | {"num_hidden_layers": given.layers}
  begin = time.perf_counter()
  size = make(source, config)
  result: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python experiments/released/run.py", *sys.argv[1:]]),
    "bytes": size,
    "made_seconds": time.perf_counter() - begin,
    "turns": [],
  }
  said = ""
  for _ in range(given.turns):
    shutil.rmtree(workdir, ignore_errors=True)
    forget(source)
    turn = {"read": read(source)}
    forget(source)
    begin = time.perf_counter()
    said = run_module("scmoe.convert", "--from", source, "--workdir", workdir)
    turn["command"] = time.perf_counter() - begin
    turn["convert"] = float(re.findall(r" in ([\d.]+) s$", said, re.MULTILINE)[0])
    begin = time.perf_counter()
    os.sync()  # what conversion leaves to the system
    turn["synchronised_after"] = time.perf_counter() - begin
    result["turns"].append(turn)
    print(turn, flush=True)
  median = {
    name: statistics.median(turn[name] for turn in result["turns"]) for name in result["turns"][0]
  }
  result |= {"median": median, "convert_said": said.splitlines()}
  lines = [
    f"{result['date']}  {result['command']}",
    f"{size / 1e9:.1f} GB read from the disk in {median['read']:.1f} s; converted in "
    f"{median['convert']:.1f} s ({median['convert'] / median['read']:.2f} x), process and imports "
    f"{median['command']:.1f} s; on the disk {median['synchronised_after']:.1f} s later (medians "
    f"of {given.turns} turns)",
    *said.splitlines()[:2],
  ]
  if given.steps:
    result["steps"] = train(workdir, given.steps, given.batch)
    lines += result["steps"]
  to = Path(given.to)
  to.mkdir(parents=True, exist_ok=True)
  (to / "results.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
  (to / "table.txt").write_text("\n".join(lines) + "\n", "utf-8")
  print(*lines, sep="\n")
  shutil.rmtree(folder)


def make(folder: Path, config: dict[str, Any]) -> int:
  """Writes the folder; returns the bytes of its tensors."""
  model, router = read_config(config, "config.json")[1:]
  planned = [Planned(t.name, t.shape, "BF16") for t in tensors("olmoe", model, router)]

  def values() -> Iterator[np.ndarray]:
    import ml_dtypes

    rng = np.random.default_rng(0)
    block = (0.02 * rng.standard_normal(2**25, np.float32)).astype(ml_dtypes.bfloat16)
    for tensor in planned:
      count = int(np.prod(tensor.shape))
      if "norm" in tensor.name:
        yield np.ones(tensor.shape, block.dtype)
        continue
      start = int(rng.integers(0, 2**24))
      found = block[start : start + count]
      yield (found if found.size == count else np.resize(block, count)).reshape(tensor.shape)

  write_weights(folder, planned, values())
  (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
  return sum(tensor.size for tensor in planned)


def forget(folder: Path) -> None:
  """Drops a folder's files from the page cache."""
  for file in folder.iterdir():
    descriptor = os.open(file, os.O_RDONLY)
    try:
      os.fsync(descriptor)
      os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
      os.close(descriptor)


def read(folder: Path) -> float:
  """Seconds to read all files once, in order, in pieces of 16 MiB."""
  piece, begin = bytearray(2**24), time.perf_counter()
  for file in sorted(folder.iterdir()):
    with file.open("rb", buffering=0) as opened:
      while opened.readinto(piece):
        pass
  return time.perf_counter() - begin


def run_module(module: str, *args: object) -> str:
  """The output of a command."""
  command = [sys.executable, "-m", module, *map(str, args)]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return done.stdout


def train(workdir: Path, steps: int, batch: int) -> list[str]:
  """The first steps' lines."""
  command = [
    sys.executable, "-m", "scmoe.train", "--config_json", str(workdir / "config.json"),
    "--workdir", str(workdir), "--config.data.seq_len=4096", f"--config.train.steps={steps + 1}",
    f"--config.train.batch_size={batch}", f"--config.train.tokens_per_step={4096 * batch}",
    "--config.train.log_every=1", "--config.train.sample_tokens=0", "--config.train.remat=moe",
    "--config.train.eval_every=0", "--config.checkpoint.every=0",
  ]  # fmt: skip
  found = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    assert process.stdout is not None
    for line in process.stdout:
      print("|", line.rstrip())
      found += [line.rstrip()] * line.startswith("step ")
      if len(found) == steps:
        process.kill()
  if len(found) < steps:
    raise SystemExit(f"training ended after {len(found)} of {steps} steps")
  return found


if __name__ == "__main__":
  main()
