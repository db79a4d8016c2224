"""python -m scmoe.generate: continues prompts, or answers messages, with a trained model.

  python -m scmoe.generate --workdir runs/quickstart --prompt "def main(" --max_new_tokens 200
  python -m scmoe.generate --workdir runs/a --prompt "import " --prompt "class " --temperature 0
  python -m scmoe.generate --workdir runs/a --chat
  python -m scmoe.generate --workdir runs/tasks --task code --prompt "def main("
  python -m scmoe.generate --model exports/a --prompt "def main("
  python -m scmoe.generate --benchmark --config gpt2_moe_medium --compare top2,scmoe_pos2

Reads the configuration stored in the checkpoint. The text of a single prompt is printed while it is
generated; the speed goes to stderr. An empty prompt begins a new document. --benchmark measures the
tokens per second of prefill and decode of a configuration, for several wirings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, DataError, run_main
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.inference.offload.needs import Workload, needs
from scmoe.inference.offload.plan import (
  OffloadRequest,
  expected,
  measured_bandwidth,
)
from scmoe.inference.sampling import Sampling
from scmoe.offload.memory import allow_pinned_memory
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
from scmoe.training.card import environment, origin

OF_CONFIG = ("config", "config_json", "smoke", "allow_config_change", "allow_import")
USUAL = 64  # tokens that are added where --max_new_tokens is not given
FLAGS = (
  Flag("workdir", str, "", "folder of the run"),
  Flag("model", str, "", "folder that scmoe.convert --inference wrote, instead of --workdir"),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("task", str, "", "run of several tasks: the one whose gates route the text"),
  Flag("prompt", str, "", "text to continue", repeat=True),
  Flag(
    "chat",
    bool,
    False,
    "answer every line of the input: as messages of one conversation where the model has a chat "
    "template or was trained on conversations, else each line is a document to continue",
  ),
  Flag(
    "max_new_tokens",
    int,
    -1,
    f"tokens to add; -1: {USUAL}, or as many as prompt and model.context leave room for",
  ),
  *SAMPLING_FLAGS,
  *OFFLOAD_FLAGS,
  Flag("benchmark", bool, False, "tokens per second instead of text, on random weights"),
  Flag("compare", str, "", "benchmark: wirings in turns, by commas; the first is the base"),
  Flag(
    "ways",
    str,
    "",
    "benchmark: values of --offload to compare, separated by semicolons; +N adds a cache of N "
    "experts per layer: 'none; blocking; early; ring,early+4'",
  ),
  Flag("batch", int, 8, "benchmark: number of prompts"),
  Flag("prompt_tokens", int, 1024, "benchmark: tokens of a prompt"),
  Flag("rounds", int, 5, "benchmark: how often each wiring is timed"),
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
  variables = environment()
  simulate(values["simulate"])
  at_least(values, 1, "rounds")
  if abs(values["seed"]) >= 2**63:
    raise ConfigError(f"--seed={values['seed']} is too large; the most is {2**63 - 1}")
  out = json_file(values["json"])
  allow_pinned_memory()
  fits = values["max_new_tokens"] == -1
  if fits:
    values["max_new_tokens"] = USUAL
  if values["benchmark"]:
    whence = lambda: origin("scmoe.generate", argv, variables)
    return print(_benchmark(values, given, whence))
  if given:
    raise ConfigError(f"--config.{given[0][0]} needs --benchmark; a run has its own configuration")
  one_model(values)
  for name in ("workdir", "prompt"):
    instead = values["model"] if name == "workdir" else values["chat"]
    if not values[name] and not instead:
      (flag,) = (flag for flag in FLAGS if flag.name == name)
      raise ConfigError(f"--{name} is missing: {flag.help}")
  if values["chat"] and values["prompt"]:
    raise ConfigError("--prompt and --chat exclude each other: --chat reads prompts from the input")
  if values["chat"] and sys.stdin is None:  # the shell closed it (<&-)
    raise DataError("--chat reads standard input, which is closed; leave it open, or give --prompt")
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
    # A prompt that is not valid UTF-8 is refused where it is encoded, not where it is measured.
    longest=max((len(p.encode(errors="surrogatepass")) for p in values["prompt"]), default=0) + 1,
    max_new_tokens=values["max_new_tokens"],
    deterministic=values["deterministic"],
    task=values["task"],
  )
  if fits:
    options["max_new_tokens"] = _room(session, values["prompt"])
  if session.plan:
    print(*session.plan, sep="\n", file=sys.stderr)
  figures: dict[str, Any] = {}  # stays empty if the input is
  if len(values["prompt"]) > 1:
    begin = time.perf_counter()
    texts = session.texts(values["prompt"], sampling, **options)
    for index, (prompt, text) in enumerate(zip(values["prompt"], texts)):
      print(f"--- prompt {index + 1}", prompt + text, sep="\n")
    figures = {"tokens": len(texts) * options["max_new_tokens"]}  # at most
    figures["seconds"] = time.perf_counter() - begin
  elif values["chat"] and session.can_chat:
    figures = _converse(session, map(str.rstrip, sys.stdin), sampling, options)
  else:
    for prompt in map(str.rstrip, sys.stdin) if values["chat"] else values["prompt"]:
      figures = _show(prompt, session.stream([prompt], sampling, **options))
  figures |= session.usage()
  if session.plan and (line := _usage_line(figures)):
    print(line, file=sys.stderr)
  if out is not None:
    write_json(out, figures)


def _room(session: Session, prompts: Sequence[str]) -> int:
  """`USUAL`, or as many new tokens as the model's context has room for after the longest prompt.

  The prompts of --chat are not known yet. They get half of the context.
  """
  context = session.model.config.context
  longest = max((len(session.encode(prompt)) for prompt in prompts), default=context // 2)
  return max(1, min(USUAL, context - longest))


def _usage_line(figures: dict[str, Any]) -> str:
  """The line about an offloaded model's cache and memory; empty without either."""
  parts = []
  if figures["requests"]:
    parts.append(
      f"{figures['requests']:,} lookups of experts, {100 * figures['hit_rate']:.0f} % hit the cache"
    )
    if "belady" in figures:
      parts[0] += f" (Belady's rule: {100 * figures['belady']:.0f} %)"
  if figures["peak_memory"]:
    parts.append(f"peak memory {size_of(figures['peak_memory'])}")
  return "; ".join(parts)


def _show(prompt: str, pieces: Iterator[list[Piece]]) -> dict[str, Any]:
  """Prints a continuation while it is generated, then its speed to stderr."""
  begin, first, tokens = time.perf_counter(), None, 0
  for (piece,) in pieces:
    first = first or time.perf_counter() - begin
    print(prompt if not tokens else "", piece.text, sep="", end="", flush=True)
    tokens, prompt = tokens + piece.tokens, ""
  print(prompt)
  seconds = time.perf_counter() - begin
  print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} a second; the first after "
        f"{first or seconds:.2f} s (with compilation)", file=sys.stderr)  # fmt: skip
  return {"tokens": tokens, "seconds": seconds, "first_token_seconds": first or seconds}


def _converse(
  session: Session, lines: Iterable[str], sampling: Sampling, options: dict[str, Any]
) -> dict[str, Any]:
  """Answers each line as the next message of a conversation; returns the last answer's figures."""
  messages: list[dict[str, str]] = []
  figures: dict[str, Any] = {}
  for line in lines:
    messages.append({"role": "user", "content": line})
    answer: list[str] = []
    figures = _show("", _recorded(session.answer(messages, sampling, **options), answer))
    messages.append({"role": "assistant", "content": "".join(answer)})
  return figures


def _recorded(pieces: Iterator[list[Piece]], texts: list[str]) -> Iterator[list[Piece]]:
  """Yields the same pieces, and appends their texts to `texts`."""
  for piece in pieces:
    texts.append(piece[0].text)
    yield piece


def _benchmark(
  values: dict[str, Any], given: list[tuple[str, str]], whence: Callable[[], dict[str, Any]]
) -> str:
  """Runs `--benchmark`; returns its table, and writes figures and their origin to --json."""
  run = run_config(values, given)
  names = compared(values["compare"], run)
  load = Workload(values["batch"], values["prompt_tokens"], values["max_new_tokens"])
  if min(load.rows, load.prompt, load.new) < 1:
    raise ConfigError("--batch, --prompt_tokens and --max_new_tokens must be at least 1")
  workdir = Path(values["workdir"] or "runs/benchmark")
  request = offload_request(values)
  ways = [benchmark.offload_request(way, request) for way in (values["ways"] or "none").split(";")]
  options = {"rounds": values["rounds"], "ways": ways}
  text, figures = benchmark.benchmark(run, names, load, workdir, **options)
  if values["ways"]:
    text += "\n" + _expected(run, names, ways, load, figures)
  if values["json"]:
    write_json(Path(values["json"]), figures | whence())
  return text


def _expected(
  run: RunConfig,
  names: Sequence[str],
  ways: Sequence[OffloadRequest],
  load: Workload,
  figures: dict[str, Any],
) -> str:
  """Lines with the rates that the cost model predicts for every arm; adds them to `figures`."""
  rate = figures["host_bandwidth"] = measured_bandwidth()
  lines = [
    f"predicted tokens/s of prefill and decode, at the measured {rate / 1e9:.1f} GB/s from the host"
  ]
  for name in names:
    built = build.build(build.with_wiring(run, name).resolve(
      num_devices=jax.device_count(), vocab_size=build.vocab_size(run.data)))  # fmt: skip
    model = built.run.model
    for way in ways:
      arm = name if len(ways) == 1 else f"{name} {benchmark.name_of(way)}"
      needed = needs(model, built.shapes, load, int8=way.int8_experts)
      found = expected(way.named, model, needed, load, rate)
      figures["arms"][arm]["expected"] = {
        "prefill": found.prefill, "decode": found.decode, "device": found.device
      }  # fmt: skip
      size = size_of(found.device)
      lines.append(f"  {arm}: {found.prefill:,.0f} and {found.decode:,.0f}, {size} on the device")
  return "\n".join(lines)


if __name__ == "__main__":
  run_main(main)
