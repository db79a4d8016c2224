"""Requests of mixed lengths: joined to a running batch, beside one whole batch at a time.

  python experiments/serve/run.py --json experiments/serve/results/olmoe.json
  python experiments/serve/run.py --tiny

Both arms answer the same --requests with the same random weights, in the order of their numbers,
with as many rows as --slots; all requests are there when the clock starts. Lengths are log-normal,
rounded and cut to their range: prompts have a median of 128 tokens (16 to 512), answers of 96 (8 to
256), each with a spread of 0.8 in the logarithm. No request ends before its length.

  continuous  `scmoe.inference.serving.server.Server`
  static      `scmoe.inference.decode.stream` on --slots requests at a time, until the last of them
              has its tokens; the host reads 8 tokens of each row at a time

Each arm answers all requests once untimed, so that its programs are compiled. --tiny shrinks model
and lengths, and checks the script on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from scmoe.inference.decode import stream
from scmoe.inference.sampling import Sampling
from scmoe.inference.serving.server import Server
from scmoe.models.gpt import GPT
from scmoe.run.benchmark import random_model
from scmoe.run.build import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.placement import single_device

SPREAD = 0.8  # standard deviation of a length's logarithm
CHUNK = 8  # tokens of each row that the static arm reads at a time


def lengths(count: int, median: int, least: int, most: int, seed: int) -> list[int]:
  """So many log-normal lengths, rounded and cut to their range."""
  drawn = np.random.default_rng(seed).lognormal(np.log(median), SPREAD, count)
  return np.clip(np.rint(drawn), least, most).astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class Load:
  """The requests.

  Attributes:
    prompts: token ids.
    new: number of tokens to add to each.
  """

  prompts: list[list[int]]
  new: list[int]

  @staticmethod
  def drawn(count: int, vocabulary: int, *, shrink: int) -> Load:
    """Random prompts; every length is divided by `shrink`."""
    cut = lambda values: [max(1, value // shrink) for value in values]
    rng = np.random.default_rng(2)
    prompts = cut(lengths(count, 128, 16, 512, 0))
    texts = [rng.integers(0, vocabulary, length).tolist() for length in prompts]
    return Load(texts, cut(lengths(count, 96, 8, 256, 1)))


def continuous(model: GPT, load: Load, given: argparse.Namespace) -> dict[str, Any]:
  """Tokens/s and the times to the first token with requests that join and leave."""
  options = {"slots": given.slots, "prefill_tokens": given.prefill_tokens}
  server = Server(model, page_tokens=given.page_tokens, **options)
  begin = time.perf_counter()
  for seed, (prompt, new) in enumerate(zip(load.prompts, load.new)):
    server.submit(prompt, max_new_tokens=new, seed=seed)
  answers = list(server)
  seconds = time.perf_counter() - begin
  assert sorted(len(answer.tokens) for answer in answers) == sorted(load.new)
  found = server.statistics
  counts = {"steps": found.steps, "pieces": found.pieces, "preemptions": found.preemptions}
  firsts = [answer.first_seconds for answer in answers]
  return _figures(load, seconds, firsts, found.occupancy) | counts | {"pages": server.pages}


def static(model: GPT, load: Load, given: argparse.Namespace) -> dict[str, Any]:
  """The same with one batch at a time."""
  most, firsts, steps, rows = max(load.new), [], 0, 0
  begin = time.perf_counter()
  for start in range(0, len(load.prompts), given.slots):
    some = slice(start, start + given.slots)
    prompts, new = load.prompts[some], load.new[some]
    filled = prompts + [prompts[-1]] * (given.slots - len(prompts))
    made = 0
    for pieces in stream(model, filled, Sampling(), max_new_tokens=most, chunk=CHUNK, seed=start):
      firsts += [time.perf_counter() - begin] * len(prompts) if not made else []
      rows += sum(min(max(own - made, 0), len(pieces[0])) for own in new) if made else 0
      steps += len(pieces[0]) if made else 0
      made += len(pieces[0])
      if made >= max(new):
        break
  seconds = time.perf_counter() - begin
  return _figures(load, seconds, firsts, rows / steps) | {"steps": steps}


def _figures(load: Load, seconds: float, firsts: list[float], occupancy: float) -> dict[str, Any]:
  return {
    "seconds": seconds,
    "tokens_per_second": sum(load.new) / seconds,
    "occupancy": occupancy,
    "first_median": statistics.median(firsts),
    "first_99": sorted(firsts)[min(len(firsts) - 1, int(0.99 * len(firsts)))],
  }


def main() -> None:
  """Measures both arms, prints a line for each, and writes --json."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--config", default="olmoe", help="a configuration, for its model alone")
  flags.add_argument("--layers", type=int, default=0, help="0: the configuration's")
  flags.add_argument("--requests", type=int, default=256)
  flags.add_argument("--slots", type=int, default=64)
  flags.add_argument("--page_tokens", type=int, default=64)
  flags.add_argument("--prefill_tokens", type=int, default=512)
  flags.add_argument("--tiny", action="store_true")
  flags.add_argument("--json", type=Path)
  given = flags.parse_args()
  run = load_config(find_config(given.config), "smoke" if given.tiny else "get_config")
  model, shrink = run.model, 1
  if given.tiny:
    given.requests, given.slots, given.page_tokens, given.prefill_tokens = 12, 4, 8, 16
    shrink = 16
  model = dataclasses.replace(model, num_layers=given.layers or model.num_layers)
  run = dataclasses.replace(run, model=model)
  run = single_device(run.resolve(num_devices=1, vocab_size=model.vocab_size or 256))
  # A shorter context than training's: the longest prompt and answer.
  run = dataclasses.replace(run, model=dataclasses.replace(run.model, context=768 // shrink))
  load = Load.drawn(given.requests, run.model.vocab_size, shrink=shrink)
  made = random_model(build(run))
  result: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python experiments/serve/run.py", *sys.argv[1:]]),
    "device": str(jax.devices()[0].device_kind),
    "jax": jax.__version__,
    "tokens": {"prompts": sum(map(len, load.prompts)), "new": sum(load.new)},
  }
  for name, arm in (("continuous", continuous), ("static", static)):
    begin = time.perf_counter()
    arm(made, load, given)
    warm = time.perf_counter() - begin
    result[name] = found = arm(made, load, given) | {"first_pass": warm}
    print(
      f"{name}: {found['tokens_per_second']:,.0f} tokens/s ({found['seconds']:.2f} s), "
      f"{found['occupancy']:.1f} of {given.slots} rows filled, first token: median "
      f"{found['first_median']:.2f} s, 99th percentile {found['first_99']:.2f} s; first pass with "
      f"compilation {warm:.1f} s",
      flush=True,
    )
  ratio = result["continuous"]["tokens_per_second"] / result["static"]["tokens_per_second"]
  result["ratio"] = ratio
  print(f"continuous over static: {ratio:.2f}x, {result['tokens']['new']:,} new tokens")
  if given.json:
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
  main()
