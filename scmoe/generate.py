"""python -m scmoe.generate: text from a trained model.

  python -m scmoe.generate --workdir runs/quickstart --prompt "def main(" --max_new_tokens 200
  python -m scmoe.generate --workdir runs/a --prompt "import " --prompt "class " --temperature 0
  python -m scmoe.generate --workdir runs/a --chat
  python -m scmoe.generate --model exports/a --prompt "def main("
  python -m scmoe.generate --benchmark --config gpt2_moe_medium --compare top2,scmoe_pos2

Reads the configuration stored in the checkpoint. One prompt's text is printed as it is made, and
how fast that went, to stderr. An empty prompt begins a new document. With --benchmark: tokens per
second of prefill and decode, in turns, of a configuration's wirings.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.data.tokenizers import JsonTokenizer
from scmoe.inference.offload.model import allow_pinned_memory
from scmoe.inference.offload.plan import (
  OffloadRequest,
  Workload,
  expected,
  measured_bandwidth,
  needs,
)
from scmoe.inference.sampling import Sampling
from scmoe.run import benchmark, build
from scmoe.run.command_line import (
  HELP,
  TRAIN_FLAGS,
  Flag,
  at_least,
  compared,
  help_text,
  json_file,
  one_model,
  parse,
  run_config,
  simulate,
)
from scmoe.run.config import RunConfig
from scmoe.run.generation_flags import OFFLOAD_FLAGS, SAMPLING_FLAGS, offload_request
from scmoe.run.programs import user_programs
from scmoe.run.session import Piece, Session

OF_CONFIG = ("config", "config_json", "smoke", "allow_config_change", "allow_import")
FLAGS = (
  Flag("workdir", str, "", "folder of the run"),
  Flag("model", str, "", "folder of scmoe.convert --inference, in place of a run's"),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("prompt", str, "", "text to continue", repeat=True),
  Flag(
    "chat",
    bool,
    False,
    "answer every line of the input: as messages of one conversation where the model has a chat "
    "template, else each line is a document to continue",
  ),
  Flag("max_new_tokens", int, 64, "tokens to add"),
  *SAMPLING_FLAGS,
  *OFFLOAD_FLAGS,
  Flag("benchmark", bool, False, "tokens per second instead of text, on random weights"),
  Flag("compare", str, "", "benchmark: wirings in turns, by commas; the first is the base"),
  Flag(
    "ways",
    str,
    "",
    "benchmark: ways to hold experts, by semicolons, each with a cache of N "
    "experts of every layer after a +: 'none; blocking; early; ring,early+4'",
  ),
  Flag("batch", int, 8, "benchmark: prompts"),
  Flag("prompt_tokens", int, 1024, "benchmark: tokens of a prompt"),
  Flag("rounds", int, 5, "benchmark: turns of every wiring"),
  Flag("json", str, "", "also write the figures (speed, memory, copies) to this file"),
  *(flag for flag in TRAIN_FLAGS if flag.name in OF_CONFIG),
  HELP,
)


@user_programs()
def main(argv: list[str]) -> None:
  """Continues every prompt and prints it with its continuation."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  simulate(values["simulate"])
  at_least(values, 1, "rounds")
  if abs(values["seed"]) >= 2**63:
    raise ConfigError(f"--seed={values['seed']} is too large; the most is {2**63 - 1}")
  out = json_file(values["json"])
  allow_pinned_memory()
  if values["benchmark"]:
    return print(_benchmark(values, given))
  if given:
    raise ConfigError(f"--config.{given[0][0]} goes with --benchmark; a run has its configuration")
  one_model(values)
  for name in ("workdir", "prompt"):
    instead = values["model"] if name == "workdir" else values["chat"]
    if not values[name] and not instead:
      (flag,) = (flag for flag in FLAGS if flag.name == name)
      raise ConfigError(f"--{name} is missing: {flag.help}")
  if values["chat"] and values["prompt"]:
    raise ConfigError("--prompt goes without --chat, which reads prompts from the input")
  sampling = Sampling(values["temperature"], values["top_k"], values["top_p"])
  options = {name: values[name] for name in ("max_new_tokens", "seed")}
  session = Session(
    values["workdir"],
    values["step"],
    model=values["model"],
    mesh=values["mesh"],
    allow_import=values["allow_import"],
    request=offload_request(values),
    rows=max(1, len(values["prompt"])),
    longest=max((len(prompt.encode()) for prompt in values["prompt"]), default=0) + 1,
    max_new_tokens=values["max_new_tokens"],
    deterministic=values["deterministic"],
  )
  if session.plan:
    print(*session.plan, sep="\n", file=sys.stderr)
  figures: dict[str, Any] = {}  # an empty input has none
  if len(values["prompt"]) > 1:
    begin = time.perf_counter()
    texts = session.texts(values["prompt"], sampling, **options)
    for index, (prompt, text) in enumerate(zip(values["prompt"], texts)):
      print(f"--- prompt {index + 1}", prompt + text, sep="\n")
    figures = {"tokens": len(texts) * values["max_new_tokens"]}  # at most
    figures["seconds"] = time.perf_counter() - begin
  elif (
    values["chat"] and isinstance(session.tokenizer, JsonTokenizer) and (session.tokenizer.can_chat)
  ):
    figures = _converse(session, map(str.rstrip, sys.stdin), sampling, options)
  else:
    for prompt in map(str.rstrip, sys.stdin) if values["chat"] else values["prompt"]:
      figures = _show(prompt, session.stream([prompt], sampling, **options))
  figures |= session.usage()
  if session.plan and (line := _used(figures)):
    print(line, file=sys.stderr)
  if out is not None:
    write_json(out, figures)


def _used(figures: dict[str, Any]) -> str:
  """The line about an offloaded model's experts."""
  parts = []
  if figures["requests"]:
    parts.append(
      f"{figures['requests']:,} experts asked for, {100 * figures['hit_rate']:.0f} % of them found"
    )
    if "belady" in figures:
      parts[0] += f" (Belady's rule: {100 * figures['belady']:.0f} %)"
  if figures["peak_memory"]:
    parts.append(f"peak memory {size_of(figures['peak_memory'])}")
  return "; ".join(parts)


def _show(prompt: str, pieces: Iterator[list[Piece]]) -> dict[str, Any]:
  """Prints a continuation as it comes, then how fast it was, to stderr."""
  begin, first, tokens = time.perf_counter(), None, 0
  for (piece,) in pieces:
    first = first or time.perf_counter() - begin
    print(prompt if not tokens else "", piece.text, sep="", end="", flush=True)
    tokens, prompt = tokens + piece.tokens, ""
  print(prompt)
  seconds = time.perf_counter() - begin
  print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} a second; the first after "
        f"{first or seconds:.2f} s (compilation counts)", file=sys.stderr)  # fmt: skip
  return {"tokens": tokens, "seconds": seconds, "first_token_seconds": first or seconds}


def _converse(
  session: Session, lines: Iterable[str], sampling: Sampling, options: dict[str, Any]
) -> dict[str, Any]:
  """Answers every line as the next message of one conversation; the figures of the last answer."""
  messages: list[dict[str, str]] = []
  figures: dict[str, Any] = {}
  for line in lines:
    messages.append({"role": "user", "content": line})
    said: list[str] = []
    figures = _show("", _noting(session.answer(messages, sampling, **options), said))
    messages.append({"role": "assistant", "content": "".join(said)})
  return figures


def _noting(pieces: Iterator[list[Piece]], said: list[str]) -> Iterator[list[Piece]]:
  """The same pieces; their texts are added to `said`."""
  for piece in pieces:
    said.append(piece[0].text)
    yield piece


def _benchmark(values: dict[str, Any], given: list[tuple[str, str]]) -> str:
  """The table of `--benchmark`; writes --json."""
  run = run_config(values, given)
  names = compared(values["compare"], run)
  load = Workload(values["batch"], values["prompt_tokens"], values["max_new_tokens"])
  if min(dataclasses.astuple(load)) < 1:
    raise ConfigError("--batch, --prompt_tokens and --max_new_tokens must be at least 1")
  workdir = Path(values["workdir"] or "runs/benchmark")
  request = offload_request(values)
  ways = [benchmark.offload_request(way, request) for way in (values["ways"] or "none").split(";")]
  options = {"rounds": values["rounds"], "ways": ways}
  text, figures = benchmark.benchmark(run, names, load, workdir, **options)
  if values["ways"]:
    text += "\n" + _expected(run, names, ways, load, figures)
  if values["json"]:
    write_json(Path(values["json"]), figures)
  return text


def _expected(
  run: RunConfig,
  names: Sequence[str],
  ways: Sequence[OffloadRequest],
  load: Workload,
  figures: dict[str, Any],
) -> str:
  """The rates that the cost model expects of every arm; adds them to `figures`."""
  rate = figures["host_bandwidth"] = measured_bandwidth()
  lines = [
    f"expected at {rate / 1e9:.1f} GB/s from the host, measured (tokens/s, prefill and decode)"
  ]
  for name in names:
    built = build.build(build.with_wiring(run, name).resolve(
      num_devices=jax.device_count(), vocab_size=build.vocab_size(run.data)))  # fmt: skip
    model = built.run.model
    for way in ways:
      arm = name if len(ways) == 1 else f"{name} {benchmark.name_of(way)}"
      needed = needs(model, built.shapes, load, int8=way.int8)
      found = expected(way.offload, model, needed, load, rate, devices=built.run.mesh.expert)
      figures["arms"][arm]["expected"] = {
        "prefill": found.prefill, "decode": found.decode, "device": found.device
      }  # fmt: skip
      size = size_of(found.device)
      lines.append(f"  {arm}: {found.prefill:,.0f} and {found.decode:,.0f}, {size} of the device")
  return "\n".join(lines)


if __name__ == "__main__":
  run_main(main)
