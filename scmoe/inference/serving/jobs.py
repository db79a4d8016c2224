"""Requests on their way through a server: what they have read and drawn, and where they run."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from scmoe.inference.serving.pool import FreePages
from scmoe.inference.serving.requests import Answer, Ending, Request, TokenLogprob


@functools.lru_cache(2**12)
def key_data(seed: int) -> np.ndarray:
  """The data of the random key of a seed, uint32 [W].

  The CPU makes it where jax has one, since a GPU would first finish the programs that it runs.
  """
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    device = None
  with jax.default_device(device):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


class Job:
  """A request that has not ended yet.

  Args:
    number: its number; older requests have smaller ones.
    request: what was asked, checked.
    ending: says when it ends.
    since: when it came, in seconds of `time.perf_counter`.

  Attributes:
    text: the tokens to read before the next one is drawn: the prompt, and after a restart also the
      new tokens of before.
    read: number of tokens of `text` that programs have been given.
    new: the new tokens that the host knows.
    sent: number of new tokens that programs have been asked for; at least `len(new)`.
    slot, pages: its slot and pages; slot is -1 while it waits.
    key: the data of its random key; None if it takes the most probable tokens.
  """

  def __init__(self, number: int, request: Request, ending: Ending, since: float):
    self.number, self.request, self._ending, self._since = number, request, ending, since
    self.text, self.read = list(request.prompt), 0
    self.new: list[int] = []
    self.sent, self.slot, self.preemptions = 0, -1, 0
    self.pages: list[int] = []
    self._first = self._last = math.nan
    self._logprobs: list[TokenLogprob] = []
    self._scores: list[float | None] = [None] * len(request.prompt)
    self.key = key_data(request.seed) if request.temperature > 0 else None

  @property
  def is_running(self) -> bool:
    """Whether it has a slot."""
    return self.slot >= 0

  @property
  def unread(self) -> int:
    """Number of tokens of `text` that no program has been given."""
    return len(self.text) - self.read

  @property
  def wants_token(self) -> bool:
    """Whether the next step should add a token: it has read its text, and asked for too few."""
    return self.is_running and not self.unread and self.sent < self.request.max_new_tokens

  @property
  def position(self) -> int:
    """The position of the last new token that programs have been asked for."""
    return len(self.request.prompt) + self.sent - 1

  @property
  def positions(self) -> int:
    """The most positions that it will read and write; the last new token needs none."""
    return len(self.request.prompt) + max(self.request.max_new_tokens - 1, 0)

  def restart(self) -> None:
    """Forgets what programs have computed; prompt and new tokens will be read anew."""
    self.text, self.read, self.sent = [*self.request.prompt, *self.new], 0, len(self.new)
    self.preemptions += 1

  def score(self, start: int, logprobs: np.ndarray) -> None:
    """Keeps the log-probabilities of the tokens after the positions from `start` on."""
    for place, value in enumerate(logprobs.tolist(), start + 1):
      if place < len(self._scores):
        self._scores[place] = value

  def take(self, token: int, known: Any, row: int, now: float) -> str:
    """Takes the next token; returns why the text ends with it, or "".

    Args:
      token: its id.
      known: the step's `Drawn` on the host; read only for `Request.logprobs`.
      row: its row there.
      now: in seconds of `time.perf_counter`.
    """
    self._first = now if math.isnan(self._first) else self._first
    self._last = now
    if not self.request.max_new_tokens:
      return "length"
    self.new.append(token)
    finish = self._ending.after(self.new)
    if finish == "end":
      self.new.pop()
    elif self.request.logprobs is not None:
      top = zip(known.top_token_BN[row].tolist(), known.top_logprob_BN[row].tolist())
      top = tuple(top)[: self.request.logprobs]
      self._logprobs.append(TokenLogprob(token, float(known.logprob_B[row]), top))
    return finish

  def answer(self, finish: str) -> Answer:
    """The answer, once `take` has returned why it ends."""
    asked = self.request
    return Answer(
      self.number,
      self.new,
      self._ending.text(self.new, finish),
      finish,
      None if asked.logprobs is None else self._logprobs,
      self._scores if asked.prompt_logprobs else None,
      self._last - self._since,
      self._first - self._since,
      self.preemptions,
    )


class Part:
  """The slots and pages of one index on the mesh's batch axes.

  Args:
    slots: number of its slots.
    pages: number of its pages.

  Attributes:
    free: its free pages.
    jobs: the requests in its slots.
  """

  def __init__(self, slots: int, pages: int):
    self.free, self.jobs = FreePages(pages), list[Job]()
    self._slots = list(range(slots - 1, -1, -1))

  @property
  def has_slot(self) -> bool:
    """Whether a slot is free."""
    return bool(self._slots)

  @property
  def reading(self) -> list[Job]:
    """Its requests that have not read their text, oldest first."""
    return sorted((job for job in self.jobs if job.unread), key=lambda job: job.number)

  def admit(self, job: Job, pages: list[int]) -> None:
    """Gives a request a slot, and these pages."""
    job.slot, job.pages = self._slots.pop(), pages
    self.jobs.append(job)

  def release(self, job: Job) -> None:
    """Takes a request's slot and pages back."""
    self.jobs.remove(job)
    self._slots.append(job.slot)
    self.free.free(job.pages)
    job.slot = -1


@dataclasses.dataclass
class Statistics:
  """Counts and times of a server.

  Attributes:
    slots: slots of all parts.
    answers, tokens: answered requests, and their new tokens.
    steps, rows, pieces: steps of decoding, tokens that they were to add, and pieces of prompts.
    preemptions: how often a request was put back because pages ran out.
    seconds: spent in `Server.step`, with compilation.
    first_seconds: for each answer the time to its first token.
  """

  slots: int
  answers: int = 0
  tokens: int = 0
  steps: int = 0
  rows: int = 0
  pieces: int = 0
  preemptions: int = 0
  seconds: float = 0.0
  first_seconds: list[float] = dataclasses.field(default_factory=list)

  def add(self, answer: Answer) -> None:
    """Counts an answer."""
    self.answers += 1
    self.tokens += len(answer.tokens)
    self.first_seconds.append(answer.first_seconds)

  @property
  def occupancy(self) -> float:
    """Mean number of slots that a step of decoding filled; 0 without steps."""
    return self.rows / self.steps if self.steps else 0.0

  def first_at(self, share: float) -> float:
    """The time to the first token that this share of the answers did not exceed, in seconds."""
    ordered = sorted(self.first_seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

  def line(self) -> str:
    """All of it in one line."""
    if not self.answers:
      return "no request answered"
    speed = self.tokens / self.seconds if self.seconds else 0.0
    return (
      f"{self.answers} requests answered; {self.tokens} tokens, {speed:.1f} a second (with "
      f"compilation); on average {self.occupancy:.1f} of {self.slots} slots filled; first token: "
      f"median {self.first_at(0.5):.3f} s, 99th percentile {self.first_at(0.99):.3f} s; "
      f"{self.preemptions} preemptions"
    )
