"""Text from a model whose experts take more memory than the GPU has, of random weights.

  python experiments/offload/larger.py
  python experiments/offload/larger.py --config quickstart --way early+2

By default 14 pairs of 32 SwiGLU experts of width 4,096 and hidden width 14,336: 158 GB in bf16. The
text is that of a model that has learned nothing; what counts is that it comes, and how fast. Prints
a JSON line, and writes it to --to.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scmoe.data.tokenizers import ByteTokenizer
from scmoe.inference.decode import stream
from scmoe.inference.offload.model import Usage, is_routed
from scmoe.inference.sampling import Sampling
from scmoe.offload.memory import allow_pinned_memory
from scmoe.run import build
from scmoe.run.benchmark import offload_request, random_model
from scmoe.run.command_line import TRAIN_FLAGS, parse, run_config
from scmoe.run.programs import Programs

WIDE = [
  "--config", "llama2_moe", "--config.model.wiring=scmoe_pos2", "--config.model.moe_every=2",
  "--config.model.width=4096", "--config.model.num_heads=32", "--config.model.num_kv_heads=8",
  "--config.model.mlp_hidden=14336", "--config.model.shared_hidden=14336",
  "--config.model.expert_hidden=14336", "--config.data.tokenizer=bytes",
]  # fmt: skip
LARGE = [
  *WIDE, "--config.model.num_layers=28", "--config.model.num_experts=32",
  "--config.model.dtype=bfloat16",
]  # fmt: skip


def main() -> None:
  """Makes the model, generates, says what it took."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--way", default="ring,early+2")
  flags.add_argument("--prompt", default="A model that is larger than the GPU ")
  flags.add_argument("--max_new_tokens", type=int, default=33)
  flags.add_argument("--to", default="", help="file of the figures")
  given, rest = flags.parse_known_args()
  allow_pinned_memory()
  tokenizer, way = ByteTokenizer(), offload_request(given.way)
  values, fields = parse(rest or LARGE, TRAIN_FLAGS, with_fields=True)
  run = run_config(values, fields).resolve(num_devices=1, vocab_size=tokenizer.vocab_size)
  built = build.build(run, jax.devices()[:1])
  flat, _ = jax.tree_util.tree_flatten_with_path(built.shapes)
  item = np.dtype(run.model.dtype).itemsize
  experts = sum(leaf.size * item for path, leaf in flat if is_routed(path, leaf))
  print(f"{experts / 1e9:.1f} GB of experts", file=sys.stderr, flush=True)
  begin = time.perf_counter()
  model = jax.block_until_ready(random_model(built, way))
  made = time.perf_counter() - begin
  print(f"made in {made:.0f} s", file=sys.stderr, flush=True)
  usage, times = Usage(), [time.perf_counter()]
  pieces: list[int] = []
  options = {"mesh": built.mesh, "offload": way.offload, "usage": usage, "chunk": 8}
  options |= {"prepare": Programs(built.overlap, Path(".")), "max_new_tokens": given.max_new_tokens}
  prompt = [tokenizer.eos_id, *tokenizer.encode(given.prompt)]
  for (new,) in stream(model, [prompt], Sampling(temperature=1.0), **options):
    pieces += new
    times.append(time.perf_counter())
    print(f"{len(pieces)} tokens after {times[-1] - times[0]:.1f} s", file=sys.stderr, flush=True)
  steady = (len(pieces) - 9) / (times[-1] - times[2]) if len(times) > 3 else 0.0
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  found = {
    "date": time.strftime("%Y-%m-%d"),
    "device": f"{device.device_kind}, jax {jax.__version__}",
    "way": given.way,
    "experts_bytes": experts,
    "device_bytes": stats.get("bytes_limit", 0),
    "peak_device_bytes": stats.get("peak_bytes_in_use", 0),
    "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "made_seconds": made,
    "first_token_seconds": times[1] - times[0],
    "tokens_per_second": steady,
    "requests": usage.requests,
    "misses": usage.misses,
    "text": tokenizer.decode(pieces),
  }
  print(json.dumps(found))
  if given.to:
    with open(given.to, "w", encoding="utf-8") as file:
      file.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  main()
