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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.data.tokenizers import JsonTokenizer, prompt_ids
from scmoe.inference.decode import stream
from scmoe.inference.offload.model import Usage, allow_pinned_memory
from scmoe.inference.offload.plan import (
  OffloadRequest,
  Workload,
  bytes_of,
  expected,
  measured_bandwidth,
  needs,
)
from scmoe.inference.sampling import Sampling
from scmoe.offload.cache import POLICIES
from scmoe.pretrained.inference import InferenceFolder
from scmoe.run import benchmark, build
from scmoe.run.command_line import (
  HELP,
  SIMULATE,
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
from scmoe.run.opened import OpenRun, open_folder, open_model, open_run
from scmoe.run.programs import user_programs
from scmoe.training.restore import with_newest

OF_CONFIG = ("config", "config_json", "smoke", "allow_config_change", "allow_import")
SAMPLING_FLAGS = (
  Flag("temperature", float, 1.0, "divides the logits; 0 takes the most probable token"),
  Flag("top_k", int, 0, "draw from the k most probable tokens; 0: from all"),
  Flag("top_p", float, 1.0, "draw from the most probable tokens that make up this probability"),
  Flag("seed", int, 0, "of the draws"),
  Flag("mesh", str, "", "axes such as data=2,expert=2; training's, or one device, if not given"),
  SIMULATE,
)
OFFLOAD_FLAGS = (
  Flag(
    "offload",
    str,
    "auto",
    "experts in the host's memory: none, blocking, early, ring, or two of "
    "them for prefill,decode; auto: where they do not fit, as fits and is fastest",
  ),
  Flag(
    "gpu_memory", str, "", "bytes of each device that may be used, such as 8GiB; all if not given"
  ),
  Flag(
    "host_memory", str, "", "bytes of the host's memory that experts may take; all if not given"
  ),
  Flag("expert_cache", int, -1, "experts of every layer that a device keeps; -1: what is left"),
  Flag(
    "cache_policy",
    str,
    "lfu",
    "which expert makes room: lfu (fewest requests, the older ones worth less) or lru",
  ),
  Flag("ring_sections", int, 2, "layers of a ring that are on the device at once"),
  Flag(
    "int8_experts", bool, False, "experts in eight bits in the host's memory: half of the bytes"
  ),
)
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


def offload_request(values: dict[str, Any]) -> OffloadRequest:
  """Reads the offloading flags.

  Raises:
    ConfigError: one of them is out of range.
  """
  size = lambda name: bytes_of(values[name], name) if values[name] else 0
  if values["cache_policy"] not in POLICIES:
    raise ConfigError(
      f"--cache_policy={values['cache_policy']!r} is unknown; one of: {', '.join(POLICIES)}"
    )
  if values["ring_sections"] < 1:
    raise ConfigError(f"--ring_sections={values['ring_sections']} must be at least 1")
  return OffloadRequest(
    values["offload"],
    size("gpu_memory"),
    size("host_memory"),
    values["expert_cache"],
    values["cache_policy"],
    values["ring_sections"],
    values["int8_experts"],
  )


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


@dataclasses.dataclass(frozen=True)
class Piece:
  """A piece by which a continuation grows.

  Attributes:
    text: empty where a character is not yet whole.
    tokens: how many.
  """

  text: str
  tokens: int


class Session:
  """A model and its tokenizer, opened once for many prompts.

  Args:
    workdir: folder of the run.
    step: of the checkpoint; -1 for the newest.
    model: folder of `scmoe.convert --inference`, in place of a run's.
    mesh: see `scmoe.run.build.on_mesh`.
    allow_import: see `scmoe.base.extensions.check_allowed`.
    request: where experts may lie (`scmoe.inference.offload.plan`); by default on the devices, if
      they fit.
    rows, longest, max_new_tokens: prompts at once, tokens of the longest, and tokens to add to
      each, for which there has to be room.

  Attributes:
    plan: lines about where the experts lie; none where they lie on the devices.

  Raises:
    ConfigError: the model does not fit, and no way of offloading makes it.
  """

  def __init__(
    self,
    workdir: str = "",
    step: int = -1,
    *,
    model: str = "",
    mesh: str = "",
    allow_import: Sequence[str] = (),
    request: OffloadRequest = OffloadRequest(),
    rows: int = 1,
    longest: int = 0,
    max_new_tokens: int = 64,
  ):
    folder = InferenceFolder(model, allow_import) if model else None
    named = None if step < 0 else step

    def opened_step() -> OpenRun:
      stored = folder or open_run(workdir, named, allow_import)
      run = build.on_mesh(stored.run, mesh)
      load = Workload(rows, longest or run.model.context - max_new_tokens, max_new_tokens)
      options = {"request": request, "load": load}
      if folder is not None:
        return open_folder(folder, run, **options)
      return open_model(run, workdir, stored.step, **options)

    opened = with_newest(opened_step, named)
    self.model, self.tokenizer, self.plan = opened.model, opened.tokenizer, opened.plan
    self._usage = Usage()
    self._options = {
      "offload": opened.offload,
      "usage": self._usage,
      "router": opened.router,
      "mesh": opened.mesh,
      "eos_id": self.tokenizer.stop_ids,
      "prepare": opened.prepare,
    }

  def encode(self, prompt: str) -> list[int]:
    """Tokens of a prompt, with those that the model expects before it.

    As in training, a document follows an end-of-text token; of a released model, what its own
    tokenizer adds (`scmoe.data.conventions`).

    Raises:
      ConfigError: it is not valid UTF-8.
    """
    return prompt_ids(self.tokenizer, _valid(prompt))

  def tokens(
    self, prompts: list[list[int]], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[list[int]]]:
    """The next tokens of each prompt, as they are made: `scmoe.inference.decode.stream`."""
    return stream(self.model, prompts, sampling, **self._options, **options)

  def stream(
    self, prompts: Sequence[str], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[Piece]]:
    """Yields the next piece of every prompt's continuation, as it is made.

    Args:
      prompts: texts; each is read as the beginning of a document.
      sampling, options: `max_new_tokens`, `chunk` and `seed` of `scmoe.inference.decode.stream`.
    """
    yield from self._pieces([self.encode(prompt) for prompt in prompts], sampling, **options)

  def answer(
    self, messages: Sequence[Mapping[str, str]], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[Piece]]:
    """Yields the next piece of the model's answer to a conversation, as it is made.

    Args:
      messages: turns in order, each with `role` and `content`; the oldest are left out where all of
        them and the answer are longer than the model's context.
      sampling, options: as for `stream`.

    Raises:
      ConfigError: the model has no chat template, or jinja2 is not installed.
      DataError: the template fails.
    """
    if not isinstance(self.tokenizer, JsonTokenizer) or not self.tokenizer.can_chat:
      raise ConfigError("the model has no chat template; give prompts to continue")
    for message in messages:
      _valid(message["content"])
    room = self.model.config.context - options.get("max_new_tokens", 0)
    tokens = self.tokenizer.chat_ids(messages)
    while len(tokens) > room and len(messages) > 2:
      messages = messages[2:]
      tokens = self.tokenizer.chat_ids(messages)
    yield from self._pieces([tokens], sampling, **options)

  def _pieces(
    self, prompts: list[list[int]], sampling: Sampling, **options: Any
  ) -> Iterator[list[Piece]]:
    """The next piece of every row's text; a character comes when all of its bytes are there."""
    decode = self.tokenizer.decode
    rows: list[list[int]] = [[] for _ in prompts]
    shown = [""] * len(prompts)
    for new in self.tokens(prompts, sampling, **options):
      pieces = []
      for row, own in enumerate(new):
        rows[row] += own
        # The last character's bytes may still be to come.
        whole = decode(rows[row]).rstrip("\ufffd")
        pieces.append(Piece(whole[len(shown[row]) :], len(own)))
        shown[row] = whole
      yield pieces
    ends = [decode(row)[len(text) :] for row, text in zip(rows, shown)]
    if any(ends):
      yield [Piece(end, 0) for end in ends]

  def usage(self) -> dict[str, Any]:
    """Requests to the experts' caches so far and peak memory in bytes, JSON-able."""
    used = self._usage
    peak = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices())
    found: dict[str, Any] = {"peak_memory": peak, "requests": used.requests, "misses": used.misses}
    if used.requests:
      found["hit_rate"] = used.hit_rate
      if self._options["mesh"].size == 1:
        found["belady"] = used.hit_rate_of("belady")
    return found

  def texts(
    self, prompts: Sequence[str], sampling: Sampling = Sampling(), **options: Any
  ) -> list[str]:
    """The continuation of every prompt; arguments as for `stream`."""
    chunk = {"chunk": options["max_new_tokens"]}
    grown = list(self.stream(prompts, sampling, **options | chunk))
    return ["".join(piece.text for piece in row) for row in zip(*grown)]


def generate_texts(
  workdir: str,
  prompts: list[str],
  sampling: Sampling = Sampling(),
  *,
  step: int = -1,
  max_new_tokens: int = 64,
  seed: int = 0,
  mesh: str = "",
  allow_import: Sequence[str] = (),
) -> list[str]:
  """The continuation of every prompt, by the model of a run: `Session.texts` of a new session."""
  session = Session(workdir, step, mesh=mesh, allow_import=allow_import)
  return session.texts(prompts, sampling, max_new_tokens=max_new_tokens, seed=seed)


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


def _valid(prompt: str) -> str:
  try:
    prompt.encode("utf-8")
  except UnicodeEncodeError:
    raise ConfigError(f"--prompt={prompt!r} is not valid UTF-8") from None
  return prompt


if __name__ == "__main__":
  run_main(main)
