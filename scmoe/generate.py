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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scmoe import build
from scmoe.benchmark import Load, benchmark
from scmoe.command_line import (
  HELP,
  SIMULATE,
  TRAIN_FLAGS,
  Flag,
  compared,
  help_text,
  one_model,
  parse,
  run_config,
  simulate,
)
from scmoe.errors import ConfigError, run_main
from scmoe.inference.decode import stream
from scmoe.inference.sampling import Sampling
from scmoe.pretrained.inference import InferenceFolder
from scmoe.summary import open_folder, open_model, open_run
from scmoe.training.workdir import write_json

OF_CONFIG = ("config", "config_json", "smoke", "allow_config_change", "allow_import")
FLAGS = (
  Flag("workdir", str, "", "folder of the run"),
  Flag("model", str, "", "folder of scmoe.convert --inference, in place of a run's"),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("prompt", str, "", "text to continue", repeat=True),
  Flag("chat", bool, False, "continue every line of the input, each a document of its own"),
  Flag("max_new_tokens", int, 64, "tokens to add"),
  Flag("temperature", float, 1.0, "divides the logits; 0 takes the most probable token"),
  Flag("top_k", int, 0, "draw from the k most probable tokens; 0: from all"),
  Flag("top_p", float, 1.0, "draw from the most probable tokens that make up this probability"),
  Flag("seed", int, 0, "of the draws"),
  Flag("mesh", str, "", "axes such as data=2,expert=2; training's, or one device, if not given"),
  SIMULATE,
  Flag("benchmark", bool, False, "tokens per second instead of text, on random weights"),
  Flag("compare", str, "", "benchmark: wirings in turns, by commas; the first is the base"),
  Flag("batch", int, 8, "benchmark: prompts"),
  Flag("prompt_tokens", int, 1024, "benchmark: tokens of a prompt"),
  Flag("rounds", int, 5, "benchmark: turns of every wiring"),
  Flag("json", str, "", "benchmark: also write the figures to this file"),
  *(flag for flag in TRAIN_FLAGS if flag.name in OF_CONFIG),
  HELP,
)


def main(argv: list[str]) -> None:
  """Continues every prompt and prints it with its continuation."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  simulate(values["simulate"])
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
  sampling.check()
  source = {name: values[name] for name in ("model", "mesh", "allow_import")}
  session = Session(values["workdir"], values["step"], **source)
  options = {name: values[name] for name in ("max_new_tokens", "seed")}
  if len(values["prompt"]) > 1:
    texts = session.texts(values["prompt"], sampling, **options)
    for index, (prompt, text) in enumerate(zip(values["prompt"], texts)):
      print(f"--- prompt {index + 1}", prompt + text, sep="\n")
    return
  for prompt in map(str.rstrip, sys.stdin) if values["chat"] else values["prompt"]:
    _show(prompt, session.stream([prompt], sampling, **options))


def _show(prompt: str, pieces: Iterator[list[Piece]]) -> None:
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


@dataclasses.dataclass(frozen=True)
class Piece:
  """What a continuation grows by.

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
    mesh: see `scmoe.build.on_mesh`.
    allow_import: see `scmoe.extensions.check_allowed`.
  """

  def __init__(
    self,
    workdir: str = "",
    step: int = -1,
    *,
    model: str = "",
    mesh: str = "",
    allow_import: Sequence[str] = (),
  ):
    if model:
      folder = InferenceFolder(model, allow_import)
      opened = open_folder(folder, build.on_mesh(folder.run, mesh))
    else:
      stored = open_run(workdir, None if step < 0 else step, allow_import)
      opened = open_model(build.on_mesh(stored.run, mesh), workdir, stored.step)
    self.model, self.tokenizer = opened.model, opened.tokenizer
    self._options = {
      "router": opened.router,
      "mesh": opened.mesh,
      "eos_id": self.tokenizer.eos_id,
      "prepare": opened.prepare,
    }

  def encode(self, prompt: str) -> list[int]:
    """Tokens of a prompt; as in training, a document follows an end-of-text token.

    Raises:
      ConfigError: it is not valid UTF-8.
    """
    return [self.tokenizer.eos_id, *self.tokenizer.encode(_valid(prompt))]

  def tokens(
    self, prompts: list[list[int]], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[list[int]]]:
    """The next tokens of each prompt, as they are made: `scmoe.inference.decode.stream`."""
    return stream(self.model, prompts, sampling, **self._options, **options)

  def stream(
    self, prompts: Sequence[str], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[Piece]]:
    """What every prompt's continuation grows by, as it is made.

    Args:
      prompts: texts; each is read as the beginning of a document.
      sampling, options: `max_new_tokens`, `chunk` and `seed` of `scmoe.inference.decode.stream`.
    """
    decode, tokens = self.tokenizer.decode, [self.encode(prompt) for prompt in prompts]
    rows: list[list[int]] = [[] for _ in prompts]
    shown = [""] * len(prompts)
    for new in self.tokens(tokens, sampling, **options):
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
  load = Load(values["batch"], values["prompt_tokens"], values["max_new_tokens"])
  if min(dataclasses.astuple(load)) < 1:
    raise ConfigError("--batch, --prompt_tokens and --max_new_tokens must be at least 1")
  workdir = Path(values["workdir"] or "runs/benchmark")
  text, figures = benchmark(run, names, load, workdir, rounds=values["rounds"])
  if values["json"]:
    write_json(Path(values["json"]), figures)
  return text


def _valid(prompt: str) -> str:
  try:
    prompt.encode("utf-8")
  except UnicodeEncodeError:
    raise ConfigError(f"--prompt={prompt!r} is not valid UTF-8") from None
  return prompt


if __name__ == "__main__":
  run_main(main)
