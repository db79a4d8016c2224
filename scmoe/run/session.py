"""A `Session` opens a model and its tokenizer once: to continue prompts, to answer, or to serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from scmoe.base.errors import ConfigError
from scmoe.data.conversations import chats_plainly, plain_prompt
from scmoe.data.tokenizers import JsonTokenizer, prompt_ids
from scmoe.inference.decode import stream
from scmoe.inference.offload.model import Usage
from scmoe.inference.offload.needs import Workload
from scmoe.inference.offload.plan import OffloadRequest
from scmoe.inference.sampling import Sampling
from scmoe.inference.serving.server import Server
from scmoe.pretrained.inference import InferenceFolder
from scmoe.run import placement
from scmoe.run.modality import needs_text
from scmoe.run.multitask import of_task
from scmoe.run.opened import OpenRun, open_folder, open_model, open_run
from scmoe.training.restore import with_newest


@dataclasses.dataclass(frozen=True)
class Piece:
  """The next part of a continuation.

  Attributes:
    text: its text, without a last character whose bytes have not all come; may be empty.
    tokens: number of its tokens.
  """

  text: str
  tokens: int


class Session:
  """A model and its tokenizer, opened once for many prompts.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; -1: the newest.
    model: folder that `scmoe.convert --inference` wrote, instead of a run's.
    mesh: see `scmoe.run.placement.on_mesh`.
    allow_import: see `scmoe.base.extensions.check_allowed`.
    request: where experts may lie (`scmoe.inference.offload.plan`); by default on the devices, if
      they fit.
    rows, longest, max_new_tokens: number of prompts at once, tokens of the longest, and tokens to
      generate for each; the planner reserves memory for them.
    piece: most tokens of a device in a pass that reads prompts; 0: all tokens of all prompts. The
      planner reserves memory for the activations of so many.
    deterministic: see `scmoe.inference.decode.Static`.
    task: of a run of several tasks, the one whose gates the model has.

  Attributes:
    plan: lines about where the experts lie; none if all lie on the devices.

  Raises:
    ConfigError: the model does not fit, even with its experts in the host's memory; or `task` is
      none of the run's tasks, or the run has tasks and none is named.
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
    piece: int = 0,
    deterministic: bool = False,
    task: str = "",
  ):
    folder = InferenceFolder(model, allow_import) if model else None
    named = None if step < 0 else step

    def opened_step() -> OpenRun:
      stored = folder or open_run(workdir, named, allow_import)
      own = of_task(stored.run, task)
      needs_text(own.run, "generation")
      run = placement.on_mesh(own.run, mesh)
      length = longest or run.model.context - max_new_tokens
      load = Workload(rows, length, max_new_tokens, piece)
      options = {"request": request, "load": load}
      if folder is not None:
        return open_folder(folder, run, **options)
      return open_model(run, workdir, stored.step, gate=own.gate, **options)

    opened = with_newest(opened_step, named)
    self.model, self.tokenizer, self.plan = opened.model, opened.tokenizer, opened.plan
    self._usage = Usage()
    self._chats_plainly = chats_plainly(opened.run.data, opened.tokenizer)
    self._options = {
      "offload": opened.offload,
      "usage": self._usage,
      "router": opened.router,
      "mesh": opened.mesh,
      "eos_id": self.tokenizer.stop_ids,
      "prepare": opened.prepare,
      "deterministic": deterministic,
    }

  def encode(self, prompt: str) -> list[int]:
    """Tokens of a prompt, behind the tokens with which every text of the training data began.

    The latter are an end-of-text token or, for a released model, the tokens that its own tokenizer
    adds (`scmoe.data.conventions`).

    Raises:
      ConfigError: the prompt is not valid UTF-8.
    """
    return prompt_ids(self.tokenizer, _valid(prompt))

  def tokens(
    self, prompts: list[list[int]], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[list[int]]]:
    """Yields the next tokens of each prompt; see `scmoe.inference.decode.stream`."""
    return stream(self.model, prompts, sampling, **self._options, **options)

  def server(self, **options: Any) -> Server:
    """A server of this model, with its tokenizer and end tokens.

    Args:
      options: `slots`, `page_tokens`, `pages`, `cache_bytes` and `prefill_tokens` of `Server`.

    Raises:
      ConfigError: see `Server`.
    """
    names = ("offload", "router", "mesh", "eos_id", "prepare", "deterministic")
    own = {name: self._options[name] for name in names}
    return Server(self.model, decode=self.tokenizer.decode, **own, **options)

  def stream(
    self, prompts: Sequence[str], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[Piece]]:
    """Yields the next piece of every prompt's continuation while it is generated.

    Args:
      prompts: texts; each is read as the beginning of a document.
      sampling, options: `max_new_tokens`, `chunk` and `seed` of `scmoe.inference.decode.stream`.
    """
    yield from self._pieces([self.encode(prompt) for prompt in prompts], sampling, **options)

  def answer(
    self, messages: Sequence[Mapping[str, str]], sampling: Sampling = Sampling(), **options: Any
  ) -> Iterator[list[Piece]]:
    """Yields the next piece of the model's answer to a conversation while it is generated.

    Args:
      messages: messages in order, each with `role` and `content`. The oldest are left out if all
        of them and the answer are longer than the model's context.
      sampling, options: see `stream`.

    Raises:
      ConfigError: the model knows no conversations (`can_chat`), or jinja2 is not installed.
      DataError: the template fails.
    """
    if not self.can_chat:
      raise ConfigError("the model has no chat template; give prompts to continue")
    for message in messages:
      _valid(message["content"])
    room = self.model.config.context - options.get("max_new_tokens", 0)
    tokens = self._chat_ids(messages)
    while len(tokens) > room and len(messages) > 2:
      messages = messages[2:]
      tokens = self._chat_ids(messages)
    yield from self._pieces([tokens], sampling, **options)

  @property
  def can_chat(self) -> bool:
    """True if the model's folder has a chat template, or its run was trained on conversations."""
    has_own = isinstance(self.tokenizer, JsonTokenizer) and self.tokenizer.can_chat
    return self._chats_plainly or has_own

  def _chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    if self._chats_plainly:
      return plain_prompt(messages, self.tokenizer)
    assert isinstance(self.tokenizer, JsonTokenizer)
    return self.tokenizer.chat_ids(messages)

  def _pieces(
    self, prompts: list[list[int]], sampling: Sampling, **options: Any
  ) -> Iterator[list[Piece]]:
    """Yields the next piece of every row's text; holds a character back until it has all bytes."""
    decode = self.tokenizer.decode
    rows: list[list[int]] = [[] for _ in prompts]
    shown = [""] * len(prompts)
    for new in self.tokens(prompts, sampling, **options):
      pieces = []
      for row, own in enumerate(new):
        rows[row] += own
        # An incomplete last character decodes to U+FFFD.
        complete = decode(rows[row]).rstrip("\ufffd")
        pieces.append(Piece(complete[len(shown[row]) :], len(own)))
        shown[row] = complete
      yield pieces
    ends = [decode(row)[len(text) :] for row, text in zip(rows, shown)]
    if any(ends):
      yield [Piece(end, 0) for end in ends]

  def usage(self) -> dict[str, Any]:
    """Lookups in the experts' caches so far and peak memory in bytes, JSON-able."""
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


def _valid(prompt: str) -> str:
  try:
    prompt.encode("utf-8")
  except UnicodeEncodeError:
    raise ConfigError(f"prompt={prompt[:80]!r} is not valid UTF-8; give other characters") from None
  return prompt
