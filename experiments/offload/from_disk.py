"""Text from a model whose experts exceed the host's budget too: the rest is read from disk.

  python experiments/offload/from_disk.py --folder /tmp/large
  python experiments/offload/from_disk.py --folder /tmp/small --config quickstart \\
    --host_memory 512KiB --gpu_memory 3MiB

Writes a model of random bf16 weights as `scmoe.convert --inference` would, by default 4 pairs of
28 SwiGLU experts of width 4,096 and hidden width 14,336 (39 GB), and has scmoe.generate make text
of it within the given memory. Prints a JSON line, and writes it to --to. Needs as much disk; the
folder is deleted in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from larger import WIDE

from scmoe.data.tokenizers import ByteTokenizer
from scmoe.pretrained.inference_files import Part, inference_run, parts, write_folder
from scmoe.run.command_line import TRAIN_FLAGS, parse, run_config

LARGE = [*WIDE, "--config.model.num_layers=8", "--config.model.num_experts=28"]


def main() -> None:
  """Writes the folder, generates, says what it took."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--folder", type=Path, required=True)
  flags.add_argument("--host_memory", default="32GiB")
  flags.add_argument("--gpu_memory", default="24GiB")
  flags.add_argument("--prompt", default="A model that is larger than the host ")
  flags.add_argument("--max_new_tokens", type=int, default=17)
  flags.add_argument("--to", default="", help="file of the figures")
  given, rest = flags.parse_known_args()
  values, fields = parse(rest or LARGE, TRAIN_FLAGS, with_fields=True)
  vocabulary = ByteTokenizer().vocab_size
  run = run_config(values, fields).resolve(num_devices=1, vocab_size=vocabulary)
  run = inference_run(run, "bfloat16")
  begin = time.perf_counter()
  found = parts(run, "bfloat16")
  experts = 2 * sum(math.prod(part.shape) for part in found if part.layer is not None)
  write_folder(given.folder, run, random_values(found), dtype="bfloat16")
  made = time.perf_counter() - begin
  print(f"{experts / 1e9:.1f} GB of experts written in {made:.0f} s", file=sys.stderr, flush=True)
  used = given.folder.with_suffix(".json")
  command = [
    sys.executable, "-m", "scmoe.generate", "--model", str(given.folder),
    "--prompt", given.prompt, "--max_new_tokens", str(given.max_new_tokens),
    "--host_memory", given.host_memory, "--gpu_memory", given.gpu_memory, "--json", str(used),
  ]  # fmt: skip
  begin = time.perf_counter()
  try:
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    figures = json.loads(used.read_text("utf-8"))
  except subprocess.CalledProcessError as error:
    sys.exit(f"scmoe.generate ended with {error.returncode}:\n{error.stderr}")
  finally:
    shutil.rmtree(given.folder)
    used.unlink(missing_ok=True)
  result = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["scmoe.generate", *command[3:]]),
    "experts_bytes": experts,
    "written_seconds": made,
    "command_seconds": time.perf_counter() - begin,
    "said": done.stderr.splitlines(),
    "text": done.stdout,
    **figures,
  }
  print(json.dumps(result))
  if given.to:
    Path(given.to).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def random_values(found: Sequence[Part]) -> Iterator[np.ndarray]:
  """Values of the tensors: norms one; all others repeat one block of normal numbers, and are the
  same in every layer."""
  rng, made = np.random.default_rng(0), {}
  block = (0.02 * rng.standard_normal(2**24, np.float32)).astype(ml_dtypes.bfloat16)
  for part in found:
    if part.dtype != "BF16":
      yield np.full(part.shape, "norm" in part.name, np.float32)
      continue
    if part.shape not in made:
      made[part.shape] = np.resize(block, part.shape)
    yield made[part.shape]


if __name__ == "__main__":
  main()
