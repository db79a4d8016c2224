"""Continuous batching: requests join and leave a running batch, over a pool of pages.

Each turn of `Server.step` runs one piece of waiting prompts and one step of decoding for all slots
that have read their prompt. A request that ends frees its slot and its pages, which the next turn
gives to another one. While the device computes a turn, the host reads the tokens of the turn
before; so a request whose end token the host has not read yet may be computed one turn too long,
and that token is thrown away.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scmoe.base.errors import ConfigError
from scmoe.inference.decode import Prepare, Static, taken_apart
from scmoe.inference.offload.model import Offload
from scmoe.inference.sampling import Sampling
from scmoe.inference.serving.draw import Draws
from scmoe.inference.serving.jobs import Job, Part, Statistics
from scmoe.inference.serving.pool import smallest, widths
from scmoe.inference.serving.programs import (
  Piece,
  Step,
  make_piece,
  make_pool,
  make_step,
  page_bytes,
  tokens_of_a_page,
)
from scmoe.inference.serving.requests import Answer, Ending, Request
from scmoe.layers.pages import NO_PAGE
from scmoe.models.gpt import GPT
from scmoe.parallel.mesh import TOKEN_AXES, make_mesh

MOST_SLOTS = 2**16
_SHORTEST_PIECE, _FEWEST_PAGES = 16, 4  # tokens of a piece, pages of a table
_FREE_SHARE = 0.9  # of the device's free memory, for pages, unless their number is given


class Server:
  """Answers requests, many at a time; see the module.

  Example:

    server = Server(model, slots=16, decode=tokenizer.decode)
    server.submit(tokenizer.encode("def "), temperature=0, stop=["\\n\\n"])
    for answer in server:
      print(answer.text)

  Each answer is that of `scmoe.inference.decode.generate` for the request alone: in float32 token
  for token. In 16 bits the rounding of a sum depends on the order in which a kernel adds it up, and
  this order may change with the number of rows and pages of a program. Where two tokens are equally
  probable up to this rounding, the answer may be another one.

  Args:
    model: a trained model.
    slots: requests that are decoded together; rounded up to a multiple of the mesh's parts.
    page_tokens: tokens of a page; rounded up where a kernel needs it.
    pages: pages of each part of the mesh; 0: as many as all slots need for the longest text, or as
      `cache_bytes` allows.
    cache_bytes: memory of each device for pages; 0: 0.9 of what is free, where the device says it.
    prefill_tokens: tokens of the prompts that each turn reads on each part.
    eos_id: an end token, or several.
    decode: makes text of token ids; None: answers have no text, and requests no texts to stop at.
    router, mesh, prepare, offload, deterministic: see `scmoe.inference.decode.stream`.

  Attributes:
    statistics: counts and times so far (`Statistics`).

  Raises:
    ConfigError: an argument is out of range, or the pages do not hold one text of the model's
      context.
  """

  def __init__(
    self,
    model: GPT,
    *,
    slots: int = 8,
    page_tokens: int = 64,
    pages: int = 0,
    cache_bytes: int = 0,
    prefill_tokens: int = 256,
    eos_id: int | Collection[int] | None = None,
    decode: Callable[[list[int]], str] | None = None,
    router: Any = None,
    mesh: Mesh | None = None,
    prepare: Prepare | None = None,
    offload: Offload = Offload(),
    deterministic: bool = False,
  ):
    self.config, self._decode = model.config, decode
    for name, value, most in (("slots", slots, MOST_SLOTS), ("page_tokens", page_tokens, 2**20),
                              ("prefill_tokens", prefill_tokens, 2**20)):  # fmt: skip
      if not 1 <= value <= most:
        raise ConfigError(f"{name}={value} must be at least 1, and at most {most}")
    ends = {eos_id} if eos_id is None or isinstance(eos_id, int) else set(eos_id)
    self._ends = frozenset(end for end in ends if end is not None)
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    parts = mesh.size // mesh.shape["tensor"]
    graph, params = nnx.split(model)
    self._static = Static(graph, mesh, Sampling(), offload.checked(model), deterministic)
    self._params, self._router = taken_apart(self._static, params), router
    self._prepared = functools.cache(prepare or (lambda program: program))
    context = self.config.context
    self.page_tokens = tokens_of_a_page(self._static, params, min(page_tokens, context))
    longest = -(-context // self.page_tokens)
    self._slots = -(-slots // parts)  # of each part
    self.pages = self._count_pages(pages, cache_bytes, params, longest)
    self._tables = widths(longest, 3, 2, _FEWEST_PAGES)
    self._pieces = widths(min(prefill_tokens, context), 2, 4, _SHORTEST_PIECE)
    self._parts = [Part(self._slots, self.pages) for _ in range(parts)]
    self._caches = make_pool(self._static, self.pages, self.page_tokens)(params)
    of_rows = NamedSharding(mesh, PartitionSpec(TOKEN_AXES))
    self._token: Any = jax.device_put(np.zeros(parts * self._slots, np.int32), of_rows)
    self._waiting: collections.deque[Job] = collections.deque()
    self._unread: collections.deque[list[tuple[Any, list[tuple[int, Job]]]]] = collections.deque()
    self._finished: list[Answer] = []
    self._count = 0
    self.statistics = Statistics(parts * self._slots)

  def _count_pages(self, pages: int, cache_bytes: int, params: Any, longest: int) -> int:
    """The number of pages of each part."""
    size = page_bytes(self._static, params, self.page_tokens)
    every = self._slots * longest
    if not pages:
      if not cache_bytes:
        device = self._static.mesh.devices.flat[0]
        known = device.memory_stats() or {}
        free = known.get("bytes_limit", 0) - known.get("bytes_in_use", 0)
        cache_bytes = int(_FREE_SHARE * free) if "bytes_limit" in known else every * size
      pages = min(every, cache_bytes // size)
    if pages < longest:
      raise ConfigError(
        f"{pages} pages of {self.page_tokens} tokens do not hold a text of model.context="
        f"{self.config.context}; use at least {longest} pages, {longest * size:,} bytes"
      )
    return pages

  # -- requests in, answers out -------------------------------------------------------------------

  def submit(self, prompt: Any, **options: Any) -> int:
    """Adds a request; returns its number, from 0, which its answer has as `id`.

    Args:
      prompt: token ids.
      options: further fields of `Request`.

    Raises:
      ConfigError: a field of the request cannot be used; the server goes on as if it had not come.
      TypeError: there is no such field.
    """
    request = Request(prompt, **options).checked(self.config.vocab_size, self.config.context)
    if self._decode is None and any(isinstance(one, str) for one in request.stop):
      raise ConfigError("stop: a text needs a tokenizer (decode); use lists of token ids")
    number, self._count = self._count, self._count + 1
    ending = Ending(request, self._ends, self._decode)
    self._waiting.append(Job(number, request, ending, time.perf_counter()))
    return number

  @property
  def waiting(self) -> int:
    """Number of requests without a slot."""
    return len(self._waiting)

  @property
  def busy(self) -> bool:
    """Whether a request has not been answered yet."""
    return bool(self._waiting or self._unread or any(part.jobs for part in self._parts))

  def __iter__(self) -> Iterator[Answer]:
    """Yields answers as requests end, until all are answered; `submit` may be called meanwhile."""
    while self.busy:
      yield from self.step()

  def step(self) -> list[Answer]:
    """Runs one turn; returns the answers of the requests that have ended, oldest first."""
    begin = time.perf_counter()
    self._admit()
    turn = [*self._add_tokens(), *self._read_pieces()]  # in this order: see `_make_room`
    if turn:
      self._unread.append(turn)
    while len(self._unread) > bool(turn):
      self._read(self._unread.popleft())
    found, self._finished = sorted(self._finished, key=lambda answer: answer.id), []
    self.statistics.seconds += time.perf_counter() - begin
    return found

  # -- one turn -----------------------------------------------------------------------------------

  def _admit(self) -> None:
    """Gives waiting requests, oldest first, a free slot and the pages of their prompt.

    A part keeps a free page for every request that will need another one; else a new request would
    be put back at once.
    """
    size = self.page_tokens
    while self._waiting:
      job = self._waiting[0]
      spare = lambda part: len(part.free) - sum(one.positions > size * len(one.pages)
                                                for one in part.jobs)  # fmt: skip
      part = max((part for part in self._parts if part.has_slot), key=spare, default=None)
      needed = -(-min(len(job.text) + 1, job.positions) // size)
      if part is None or spare(part) < needed:
        return
      part.admit(self._waiting.popleft(), part.free.take(needed) or [])

  def _read_pieces(self) -> list[tuple[Any, list[tuple[int, Job]]]]:
    """Runs one piece of the prompts that are not read yet; rows are those of one width.

    The oldest request of a part decides the width: the smallest one that holds the rest of its
    prompt. `prefill_tokens` over that width is the number of rows, for the requests after it.
    """
    reading = [part.reading for part in self._parts]
    if not any(reading):
      return []
    rest = max(job.unread for jobs in reading for job in jobs[:1])
    width = smallest(self._pieces, rest)
    rows = self._pieces[-1] // width
    chosen = [(p, r, job) for p, jobs in enumerate(reading) for r, job in enumerate(jobs[:rows])]
    last = max(job.read + min(job.unread, width) for *_, job in chosen)
    shape = len(self._parts) * rows
    tokens, following = np.zeros((2, shape, width), np.int32)
    start, count = np.zeros((2, shape), np.int32)
    slot = np.full(shape, self._slots, np.int32)
    at_row: list[tuple[int, Job]] = []
    ended: list[tuple[int, Job]] = []
    for p, r, job in chosen:
      row, size = p * rows + r, min(job.unread, width)
      begin, text = job.read, job.text
      tokens[row, :size] = text[begin : begin + size]
      following[row, : len(text[begin + 1 : begin + size + 1])] = text[begin + 1 : begin + size + 1]
      start[row], count[row] = begin, size
      job.read += size
      at_row.append((row, job))
      if not job.unread:
        slot[row] = job.slot
        ended.append((row, job))
    table = self._table(shape, at_row, last)
    piece = Piece(tokens, start, count, slot, table, following)
    scores = any(job.request.prompt_logprobs for _, job in at_row)
    program = self._prepared(make_piece(self._static, scores))
    given = self._params, self._router, self._caches, self._token, piece, _draws(shape, ended)
    self._caches, self._token, drawn, logprob = program(*given)
    for _, job in ended:
      job.sent += 1
    self.statistics.pieces += 1
    found: list[tuple[Any, list[tuple[int, Job]]]] = [(drawn, ended)] if ended else []
    if scores:
      places = [(row, job, int(start[row]), int(count[row])) for row, job in at_row]
      found.insert(0, (logprob, places))  # pyright: ignore[reportArgumentType]
    return found

  def _add_tokens(self) -> list[tuple[Any, list[tuple[int, Job]]]]:
    """Runs one step of decoding for the slots that have read their prompt."""
    wanted = [job for part in self._parts for job in part.jobs if job.wants_token]
    for job in sorted(wanted, key=lambda job: job.number):
      self._make_room(job)
    rows = [
      (p * self._slots + job.slot, job)
      for p, part in enumerate(self._parts)
      for job in part.jobs
      if job.wants_token
    ]
    if not rows:
      return []
    shape = len(self._parts) * self._slots
    position, active = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, job in rows:
      position[row], active[row] = job.position, True
    table = self._table(shape, rows, int(position.max()) + 1)
    program = self._prepared(make_step(self._static))
    given = self._params, self._router, self._caches, self._token, Step(position, active, table)
    self._caches, self._token, drawn = program(*given, _draws(shape, rows))
    for _, job in rows:
      job.sent += 1
    self.statistics.steps += 1
    self.statistics.rows += len(rows)
    return [(drawn, rows)]

  def _make_room(self, job: Job) -> None:
    """Gives a request the page of its next position.

    If there is none, the host first reads all turns, since a request may have ended. Then the
    youngest request of the part is put back: it waits again, in front of those that came later, and
    its prompt and new tokens are read anew. The oldest one can always go on, as the pool holds one
    text of the model's context.
    """
    part = next((part for part in self._parts if job in part.jobs), None)
    while part and job.is_running and job.position // self.page_tokens >= len(job.pages):
      page = part.free.take(1)
      if page is None and self._unread:
        while self._unread:
          self._read(self._unread.popleft())
      elif page is None:
        self._put_back(part, max(part.jobs, key=lambda other: other.number))
      else:
        job.pages += page

  def _put_back(self, part: Part, job: Job) -> None:
    part.release(job)
    job.restart()
    self.statistics.preemptions += 1
    place = sum(other.number < job.number for other in self._waiting)
    self._waiting.insert(place, job)

  def _table(self, rows: int, jobs: list[tuple[int, Job]], positions: int) -> np.ndarray:
    """The page table int32 [rows, P] of a program that reads so many positions."""
    width = smallest(self._tables, -(-positions // self.page_tokens))
    table = np.full((rows, width), NO_PAGE, np.int32)
    for row, job in jobs:
      pages = job.pages[:width]
      table[row, : len(pages)] = pages
    return table

  def _read(self, turn: list[tuple[Any, Any]]) -> None:
    """Reads a turn's results from the device, and ends the requests that are complete."""
    for result, rows in turn:
      if isinstance(result, jax.Array):  # log-probabilities of prompts
        logprob_RC = np.asarray(result)
        for row, job, start, count in rows:
          job.score(start, logprob_RC[row, :count])
        continue
      wants = any(job.request.logprobs is not None for _, job in rows)
      tokens, known = np.asarray(result.token_B).tolist(), jax.device_get(result) if wants else None
      now = time.perf_counter()
      for row, job in rows:
        if job.is_running and (finish := job.take(tokens[row], known, row, now)):
          next(part for part in self._parts if job in part.jobs).release(job)
          self._finished.append(job.answer(finish))
          self.statistics.add(self._finished[-1])


def _draws(shape: int, rows: list[tuple[int, Job]]) -> Draws:
  """How each row of a program draws; rows without a request take the most probable token."""
  keys = np.zeros((shape, *_key_shape()), np.uint32)
  temperature, top_p = np.zeros(shape, np.float32), np.ones(shape, np.float32)
  top_k, made = np.zeros((2, shape), np.int32)
  logprobs = np.zeros(shape, bool)
  for row, job in rows:
    own = job.request
    temperature[row], top_k[row], top_p[row] = own.temperature, own.top_k, own.top_p
    made[row], logprobs[row] = job.sent, own.logprobs is not None
    if job.key is not None:
      keys[row] = job.key
  return Draws(temperature, top_k, top_p, keys, made, logprobs)


@functools.cache
def _key_shape() -> tuple[int, ...]:
  return jnp.shape(jax.random.key_data(jax.random.key(0)))
