"""Requests on their way through a server: what they have read and drawn, and where they run.

A `Job` is one request. A `Part` has the slots and pages of a part of the mesh.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.inference.serving.draw import Draws
from scmoe.inference.serving.pool import FreePages
from scmoe.inference.serving.requests import Answer, Ending, Request, TokenLogprob

NEWEST = 4096  # `Statistics` keeps the time to the first token of this many last answers


@functools.lru_cache(2**12)
def key_data(seed: int) -> np.ndarray:
  """The random key that jax makes of a seed, as an array of its W words: uint32 [W].

  The CPU computes it if jax may use the CPU, since a GPU would first finish the programs that it
  runs.
  """
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    device = None
  with jax.default_device(device):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


class Job:
  """A request that waits or runs, and its new tokens so far.

  Args:
    number: its number; older requests have smaller ones.
    request: what was asked, checked.
    ending: says when it ends.
    since: when it came, in seconds of `time.perf_counter`.

  Attributes:
    text: the tokens to read before the next one is drawn: the prompt, and after `restart` also the
      new tokens that the host knew then.
    read: number of tokens of `text` that programs have been given.
    new: the new tokens that the host knows.
    sent: number of new tokens that programs have been asked for; at least `len(new)`.
    slot, pages: its slot and pages; slot is -1 and pages are empty while it has none.
    key: its random key (`key_data`); None at temperature 0.
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
    """Whether the request has a slot."""
    return self.slot >= 0

  @property
  def unread(self) -> int:
    """Number of tokens of `text` that no program has been given."""
    return len(self.text) - self.read

  @property
  def wants_token(self) -> bool:
    """Whether the next step should add a token to the request.

    So it is if the request has a slot, programs have been given all of its text, and they have been
    asked for fewer than `max_new_tokens` tokens.
    """
    return self.is_running and not self.unread and self.sent < self.request.max_new_tokens

  @property
  def position(self) -> int:
    """The position of the last token of the prompt and the `sent` tokens after it.

    A step that adds a token to the request reads this one.
    """
    return len(self.request.prompt) + self.sent - 1

  @property
  def positions(self) -> int:
    """Most positions of the caches that the request can need: all but that of its last new token.

    No step reads that token.
    """
    return len(self.request.prompt) + max(self.request.max_new_tokens - 1, 0)

  def restart(self) -> None:
    """Makes prompt and new tokens the `text` that is read anew, and counts a preemption.

    The request has lost its pages, and with them their keys and values.
    """
    self.text, self.read, self.sent = [*self.request.prompt, *self.new], 0, len(self.new)
    self.preemptions += 1

  def score(self, start: int, logprobs: np.ndarray) -> None:
    """Keeps the log-probabilities of a piece of `text`: of the tokens from `start` + 1 on.

    Those of tokens after the prompt are left out.

    Args:
      start: position of the first token of a piece.
      logprobs: for each token of the piece the log-probability of the token after it.
    """
    for place, value in enumerate(logprobs.tolist(), start + 1):
      if place < len(self._scores):
        self._scores[place] = value

  def take(self, token: int, known: Any, row: int, now: float) -> str:
    """Takes the next token; returns why the text ends with it (`Answer.finish`), "" if it goes on.

    It keeps the token in `new`, unless it returns "end" or `max_new_tokens` is 0.

    Args:
      token: its id.
      known: the `Drawn` of the program on the host; read only for `Request.logprobs`.
      row: the request's row there.
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
    """The answer to the request, after its text has ended for the reason `finish` (from `take`)."""
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


def draws_of(shape: int, rows: Iterable[tuple[int, Job]]) -> Draws:
  """How each row of a program draws; rows that are not in `rows` take the most probable token.

  Args:
    shape: number of rows.
    rows: numbers of rows, and the requests that draw there.
  """
  keys = np.zeros((shape, *_key_shape()), np.uint32)
  temperature, top_p = np.zeros(shape, np.float32), np.ones(shape, np.float32)
  top_k, made = np.zeros((2, shape), np.int32)
  for row, job in rows:
    own = job.request
    temperature[row], top_k[row], top_p[row] = own.temperature, own.top_k, own.top_p
    made[row] = job.sent
    if job.key is not None:
      keys[row] = job.key
  return Draws(temperature, top_k, top_p, keys, made)


@functools.cache
def _key_shape() -> tuple[int, ...]:
  return jnp.shape(key_data(0))


class Part:
  """The slots and pages of one part of the mesh: of the devices that differ only on axis `tensor`.

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
    """The part's requests with tokens of `text` that no program has been given, oldest first."""
    return sorted((job for job in self.jobs if job.unread), key=lambda job: job.number)

  def pieces(self, width: int, rows: int) -> list[tuple[Job, int, int]]:
    """The next pieces of the oldest requests' texts, for so many rows of `width` tokens each.

    What is left of a text can fill several rows. Each of them can attend to those before it,
    since every layer writes the keys and values of all rows before it reads any.

    Returns:
      For each piece its request, the position of its first token in `Job.text`, and its number of
      tokens.
    """
    every = (
      (job, start, min(width, len(job.text) - start))
      for job in self.reading
      for start in range(job.read, len(job.text), width)
    )
    return list(itertools.islice(every, rows))

  def admit(self, job: Job, pages: list[int]) -> None:
    """Gives a request a free slot, and these pages, which the caller has taken from `free`."""
    job.slot, job.pages = self._slots.pop(), pages
    self.jobs.append(job)

  def release(self, job: Job) -> None:
    """Takes a request's slot and pages from it; both are then free."""
    self.jobs.remove(job)
    self._slots.append(job.slot)
    self.free.free(job.pages)  # empties the list
    job.slot = -1


@dataclasses.dataclass
class Statistics:
  """Counts and times of a server.

  Attributes:
    slots: slots of all parts.
    answers, tokens: numbers of answered requests, and of their new tokens.
    steps, rows: number of steps of decoding, and of tokens that they were to add in all.
    pieces: number of turns that read pieces of prompts, beside a step or without one.
    preemptions: how often a request was put back because pages ran out.
    seconds: time spent in `Server.step`, with compilation.
    first_seconds: for each of the `NEWEST` last answers the time to its first token.
  """

  slots: int
  answers: int = 0
  tokens: int = 0
  steps: int = 0
  rows: int = 0
  pieces: int = 0
  preemptions: int = 0
  seconds: float = 0.0
  first_seconds: collections.deque[float] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=NEWEST)
  )

  def add(self, answer: Answer) -> None:
    """Counts an answer and its tokens, and keeps its time to the first token."""
    self.answers += 1
    self.tokens += len(answer.tokens)
    self.first_seconds.append(answer.first_seconds)

  @property
  def occupancy(self) -> float:
    """Mean number of slots that a step of decoding filled; 0 without steps."""
    return self.rows / self.steps if self.steps else 0.0

  def first_at(self, share: float) -> float:
    """A quantile of `first_seconds`: at least `share` of them are no larger; NaN if empty."""
    ordered = sorted(self.first_seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

  def line(self) -> str:
    """The main figures in one line for people; without answers it says only that there are none."""
    if not self.answers:
      return "no request answered"
    speed = self.tokens / self.seconds if self.seconds else 0.0
    newest = f" of the last {NEWEST}" if self.answers > NEWEST else ""
    return (
      f"{self.answers} requests answered; {self.tokens} tokens, {speed:.1f} a second (with "
      f"compilation); on average {self.occupancy:.1f} of {self.slots} slots filled; first token"
      f"{newest}: median {self.first_at(0.5):.3f} s, 99th percentile {self.first_at(0.99):.3f} s; "
      f"{self.preemptions} preemptions"
    )
