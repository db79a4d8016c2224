"""Continuous batching: requests join and leave a running batch, over a pool of pages.

A turn, which is a call of `Server.step`, runs one program unless it has none to run. The program
adds a token to all requests whose prompt has been read and that need more tokens, and reads pieces
of some other requests' prompts in the same pass; of a request that was put back, prompt and new
tokens are read like a prompt. The turn that reads the last piece of a prompt also draws the token
that follows it. A request that ends frees its slot and its pages for other requests. While the
device computes a turn, the host reads the tokens of the turn before. So the host may learn one turn
late that a request has drawn an end token or completed a stop; a token that the device has drawn
for it meanwhile is thrown away.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_callable, check_type, check_whole
from scmoe.inference.decode import Prepare, Static, taken_apart
from scmoe.inference.offload.model import Offload
from scmoe.inference.sampling import Sampling, end_tokens
from scmoe.inference.serving.draw import Drawn, Needs
from scmoe.inference.serving.jobs import Job, Part, Statistics, draws_of
from scmoe.inference.serving.pool import FREE_SHARE, copied, free_bytes, smallest, widths
from scmoe.inference.serving.programs import (
  Piece,
  Step,
  Turn,
  make_pool,
  make_step,
  make_turn,
  page_bytes,
  tokens_of_a_page,
)
from scmoe.inference.serving.requests import Answer, Ending, Request
from scmoe.layers.pages import NO_PAGE
from scmoe.models.gpt import GPT
from scmoe.parallel.mesh import TOKEN_AXES, make_mesh

# Largest `slots` of a server, and largest `page_tokens` and `prefill_tokens`.
MOST_SLOTS, MOST_TOKENS = 2**16, 2**20
# Some rows of a program, each as (number of the row, the request in it).
Rows = list[tuple[int, Job]]
# Pieces of prompts: (number of the row, request, position of the first token, number of tokens).
_Pieces = list[tuple[int, Job, int, int]]
# The least tokens of a piece and the fewest pages of a table for which programs are compiled,
# unless the largest piece or table is smaller.
_SHORTEST_PIECE, _FEWEST_PAGES = 16, 4


@dataclasses.dataclass(frozen=True)
class _Results:
  """The results of one turn, which the device may still be computing.

  Attributes:
    drawn: the drawn tokens of all rows.
    rows: the rows that draw for a request; the drawn tokens of the others mean nothing.
    logprob_RC: row r is about the piece that has the row r in `pieces`. [r, c] is the
      log-probability of the token that follows the piece's c-th token, counted from 0: of a piece
      that begins at position 16 of its prompt, [r, 0] is that of the token at position 17. Columns
      where a piece has no token, or its text none that follows, mean nothing. None if no request of
      `pieces` asked for them.
    pieces: the pieces of prompts that the turn reads.
  """

  drawn: Drawn
  rows: Rows
  logprob_RC: jax.Array | None
  pieces: _Pieces


class Server:
  """Answers requests, many at a time; see the module.

  Example:

    server = Server(model, slots=16, decode=tokenizer.decode)
    server.submit(tokenizer.encode("def "), temperature=0, stop=["\\n\\n"])
    for answer in server:
      print(answer.text)

  But for rounding, an answer to a request without `stop` has the tokens of
  `scmoe.inference.decode.generate` for its prompt alone, with the same options. The rounding of a
  sum depends on the order in which a kernel adds it up, and this order may change with the number
  of rows and pages of a program. Where the choice of a token or an expert hangs on this rounding,
  which is far more frequent with 16 bits than with float32, the answer may be another one.

  Args:
    model: a trained model.
    slots: most requests that are decoded together, on the whole mesh; rounded up to a multiple of
      the mesh's parts. A part is one index on all axes but `tensor`.
    page_tokens: tokens of a page; at most the model's context, but rounded up where a kernel needs
      it.
    pages: pages of each part; 0: as many as all its slots need for texts as long as the model's
      context, or fewer if `cache_bytes` holds fewer.
    cache_bytes: if `pages` is 0, memory of each device for pages. 0: 0.9 of what is free on the
      mesh's first device beside the caches of experts, less room for a copy of all slots' pages in
      two layers, which a step may make where no kernel reads pages in place; no limit if the device
      does not say what is free.
    prefill_tokens: most tokens of prompts that each turn reads on each part.
    eos_id: an end token, or several; None: no token ends a text.
    decode: makes text of token ids; None: answers have no text, and requests no texts to stop at.
    router, mesh, prepare, offload, deterministic: see `scmoe.inference.decode.stream`.

  Attributes:
    statistics: counts and times so far (`Statistics`).

  Raises:
    ConfigError: an argument but `router` is of another type or out of range; the pages do not hold
      one text of the model's context; the model chooses experts by a token's place in the batch
      (`router.compat.uniform`); or `offload` does not fit the memory that the experts are in.
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
    check_type("model", model, GPT)
    check_type("offload", offload, Offload)
    self.config, self._decode = model.config, decode
    if model.config.wiring_rule.taps and model.router.compat.uniform:
      raise ConfigError(
        "router.compat.uniform=True gives experts their tokens in turn, so an answer would depend "
        "on its neighbours; serve a model that was trained without it"
      )
    for name, value, most in (
      ("slots", slots, MOST_SLOTS),
      ("page_tokens", page_tokens, MOST_TOKENS),
      ("prefill_tokens", prefill_tokens, MOST_TOKENS),
    ):
      check_type(name, value, int)
      if not 1 <= value <= most:
        raise ConfigError(f"{name}={value} must be at least 1, and at most {most}")
    for name, value in (("pages", pages), ("cache_bytes", cache_bytes)):
      check_whole(name, value, 0)
    for name, value in (("decode", decode), ("prepare", prepare)):
      if value is not None:
        check_callable(name, value)
    check_type("deterministic", deterministic, bool)
    self._ends = end_tokens(eos_id)
    if mesh is not None:
      check_type("mesh", mesh, Mesh)
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    parts = mesh.size // mesh.shape["tensor"]
    graph, params = nnx.split(model)
    self._static = Static(graph, mesh, Sampling(), offload.checked(model), deterministic)
    self._params, self._router = taken_apart(self._static, params), router
    prepared = prepare or (lambda program: program)
    # A cache of its own, because a look-up in that of `make_step` hashes the model's whole graph.
    self._program = functools.cache(lambda make, *how: prepared(make(self._static, *how)))
    context = self.config.context
    self.page_tokens = tokens_of_a_page(self._static, params, min(page_tokens, context))
    longest = -(-context // self.page_tokens)
    self._slots = -(-slots // parts)  # number of slots of each part
    self.pages = self._count_pages(pages, cache_bytes, params, longest)
    self._tables = widths(longest, 3, 2, _FEWEST_PAGES)
    most = min(prefill_tokens, context)
    # As many pieces of a width as fit into `most` tokens, made as wide as they then can be: 70
    # tokens hold 3 pieces of 18, and so 3 of 23.
    self._pieces = [most // (most // width) for width in widths(most, 2, 4, _SHORTEST_PIECE)]
    self._parts = [Part(self._slots, self.pages) for _ in range(parts)]
    self._caches = make_pool(self._static, self.pages, self.page_tokens)(params)
    of_rows = NamedSharding(mesh, PartitionSpec(TOKEN_AXES))
    self._token: Any = jax.device_put(np.zeros(parts * self._slots, np.int32), of_rows)
    self._waiting: collections.deque[Job] = collections.deque()
    # The results of each turn that the host has not read yet, oldest turn first.
    self._unread: collections.deque[_Results] = collections.deque()
    self._finished: list[Answer] = []
    self._count, self._needs = 0, Needs()
    self.statistics = Statistics(parts * self._slots)

  def _count_pages(self, pages: int, cache_bytes: int, params: Any, longest: int) -> int:
    """The number of pages of each part; see `pages` and `cache_bytes` of the class.

    Args:
      pages, cache_bytes: as given to the class.
      params: the model's parameters.
      longest: pages of one text of the model's context.

    Raises:
      ConfigError: the pages do not hold one such text.
    """
    size, experts = page_bytes(self._static, params, self.page_tokens)
    every = self._slots * longest
    given = f"pages={pages}"
    remedy = f"use at least {longest}"
    if not pages and cache_bytes:
      pages = min(every, cache_bytes // size)
      given = f"cache_bytes={cache_bytes} (--cache_memory of scmoe.serve) holds {pages} pages"
      remedy = f"use at least {longest * size} bytes"
    elif not pages:
      pages, known = every, free_bytes(self._static.mesh.devices.flat[0])
      if known is not None:
        free = known - experts  # the caches of experts are made together with the pool
        room = int(FREE_SHARE * free) - copied(every * size, self.config.num_layers)
        pages = min(every, max(0, room) // size)
        given = f"a device's {free} free bytes leave room for {pages} pages"
        remedy = f"{longest} need {longest * size} bytes; use fewer slots, or a larger mesh.tensor"
    if pages < longest:
      raise ConfigError(
        f"{given} of {self.page_tokens} tokens, fewer than the {longest} of a text of "
        f"model.context={self.config.context}; {remedy}"
      )
    return pages

  def warm(self, **options: Any) -> int:
    """Compiles the programs of all requests with these options; returns their number.

    Without it XLA compiles a program when a turn first needs it, for example at the first text of
    more pages, and all requests wait. This method runs each program once, on rows without a
    request, for all numbers of pages and sizes of pieces: with 3 and 2 of these 3 steps and 6 turns
    that read prompts. With `prompt_logprobs` it runs each of these turns with and without the
    prompt's log-probabilities, 12 turns. From then on all turns can draw as the options ask.

    Args:
      options: fields of `Request` other than its prompt. `temperature`, `top_k`, `top_p`,
        `logprobs` and `prompt_logprobs` decide what the programs compute; a request that asks for
        more makes XLA compile again (`submit`).

    Raises:
      ConfigError: an option has a value that no request may have.
      TypeError: an option is no field of `Request`, or is `prompt`.
    """
    asked = Request([0], **{"max_new_tokens": 1, **options})
    asked = asked.checked(self.config.vocab_size, self.config.context)
    self._needs |= asked.needs
    kinds, most = sorted({False, asked.prompt_logprobs}), self._pieces[-1]
    for pages in self._tables:
      positions = pages * self.page_tokens
      step = self._step([], positions)
      self._call(step, None, [], scores=False)
      for size, scores in itertools.product(self._pieces, kinds):
        self._call(step, self._piece([], most // size, positions)[0], [], scores)
    jax.block_until_ready(self._token)
    return len(self._tables) * (1 + len(self._pieces) * len(kinds))

  # -- requests come in, answers go out -----------------------------------------------------------

  def submit(self, prompt: Any, **options: Any) -> int:
    """Adds a request; returns its number, which its answer has as `id`: 0 for the first request.

    The first request with a temperature above 0, the first that then uses top-k or top-p, and the
    first that wants log-probabilities of new tokens make XLA compile programs that do this, unless
    `warm` has. From then on all turns use these programs. The log-probabilities of a prompt's own
    tokens are computed only in turns that read the prompt of a request that wants them.

    Args:
      prompt: token ids.
      options: further fields of `Request`.

    Raises:
      ConfigError: a field of the request cannot be used. The request is not added, and the server
        can go on.
      TypeError: an option is no field of `Request`.
    """
    request = Request(prompt, **options).checked(self.config.vocab_size, self.config.context)
    if self._decode is None and any(isinstance(one, str) for one in request.stop):
      raise ConfigError("stop: a text needs a tokenizer (decode); use lists of token ids")
    self._needs |= request.needs
    number, self._count = self._count, self._count + 1
    ending = Ending(request, self._ends, self._decode)
    self._waiting.append(Job(number, request, ending, time.perf_counter()))
    return number

  @property
  def waiting(self) -> int:
    """Number of requests without a slot: new ones, and those that were put back."""
    return len(self._waiting)

  @property
  def busy(self) -> bool:
    """Whether `step` has work: a request without an answer, or results the host has not read."""
    return bool(self._waiting or self._unread or any(part.jobs for part in self._parts))

  def __iter__(self) -> Iterator[Answer]:
    """Yields answers as requests end, until `busy` is false; `submit` may be called meanwhile."""
    while self.busy:
      yield from self.step()

  def step(self) -> list[Answer]:
    """Runs one turn; returns the answers of the requests that it found ended, by rising `id`.

    Their last tokens were drawn in an earlier turn, and the host reads them in this one.
    """
    begin = time.perf_counter()
    self._admit()
    turn = self._run()
    if turn is not None:
      self._unread.append(turn)
    while len(self._unread) > (0 if turn is None else 1):
      self._take_results(self._unread.popleft())
    found, self._finished = sorted(self._finished, key=lambda answer: answer.id), []
    self.statistics.seconds += time.perf_counter() - begin
    return found

  # -- the parts of one turn ----------------------------------------------------------------------

  def _admit(self) -> None:
    """Gives waiting requests, oldest first, a slot and pages for their text, while there is room.

    The pages hold the text and one token more, if a step can read that token. At the first request
    for which no part has a slot and enough pages to spare, all others go on waiting too. A part
    keeps one free page back for every request of its own that may come to need another one; else
    the new request might soon be put back.
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

  def _run(self) -> _Results | None:
    """Runs the turn's program and returns its results; None if there is nothing to do."""
    # Slots come first, because `_make_room` may put a request back. The host must have read all
    # results of that request by then, and could not have read those of pieces of the same turn.
    slots = self._active()
    rows, pieces = self._next_pieces()
    if not slots and not pieces:
      return None
    positions = max(
      *(job.position + 1 for _, job in slots), *(start + count for *_, start, count in pieces), 0
    )
    step = self._step(slots, positions)
    # On each part the rows of the slots come first, then those of the pieces.
    at = lambda row, of_part: row // of_part * (self._slots + rows) + row % of_part
    known = [(at(row, self._slots), job) for row, job in slots]
    piece, scores = None, any(job.request.prompt_logprobs for _, job, *_ in pieces)
    if pieces:
      piece, ended = self._piece(pieces, rows, positions)
      known += [(at(row, rows) + self._slots, job) for row, job in ended]
    drawn, logprob = self._call(step, piece, known, scores)
    for _, job in known:
      job.sent += 1
    self.statistics.steps += bool(slots)
    self.statistics.rows += len(slots)
    self.statistics.pieces += bool(pieces)
    return _Results(drawn, known, logprob, pieces)

  def _call(
    self, step: Step, piece: Piece | None, known: Rows, scores: bool
  ) -> tuple[Drawn, jax.Array | None]:
    """Runs the program of a turn on its input; it changes the caches and the slots' last tokens.

    Args:
      step, piece: of the turn; without a piece it only decodes.
      known: the rows that draw a token, by their numbers in the program.
      scores: whether to compute the log-probabilities of the prompts' own tokens.

    Returns:
      The drawn tokens of all rows, and with `scores` those log-probabilities.
    """
    given = self._params, self._router, self._caches, self._token
    if piece is None:
      program = self._program(make_step, self._needs)
      draws = draws_of(len(step.active_B), known)
      self._caches, self._token, drawn = program(*given, step, draws)
      return drawn, None
    program = self._program(make_turn, self._needs, scores)
    draws = draws_of(len(step.active_B) + len(piece.count_R), known)
    self._caches, self._token, drawn, logprob = program(*given, Turn(step, piece), draws)
    return drawn, logprob if scores else None

  def _active(self) -> Rows:
    """The slots whose requests want a token, each with a page for it."""
    wanted = [job for part in self._parts for job in part.jobs if job.wants_token]
    for job in sorted(wanted, key=lambda job: job.number):
      self._make_room(job)
    return [
      (p * self._slots + job.slot, job)
      for p, part in enumerate(self._parts)
      for job in part.jobs
      if job.wants_token
    ]

  def _step(self, slots: Rows, positions: int) -> Step:
    """The input of a step that adds a token to these slots; see `_table` for `positions`."""
    shape = len(self._parts) * self._slots
    position, active = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, job in slots:
      position[row], active[row] = job.position, True
    return Step(position, active, self._table(shape, slots, positions))

  def _next_pieces(self) -> tuple[int, _Pieces]:
    """The number of rows for pieces of prompts on each part, and the pieces that this turn reads.

    The number is 0 if there are no pieces. The pieces of a turn have one width, the most tokens
    that each has, and a prompt can have several pieces. The turn takes the width at which it reads
    the most tokens, or the largest of several such widths, since each piece reads all keys before
    it. With 256 `prefill_tokens`, and a context of at least as many, the widths are 64 and 256, so
    that a part reads 256 / 64 = 4 pieces or one. If 40 tokens of the oldest prompt are left and 150
    of the next, 4 pieces of 40, 64, 64 and 22 tokens read more than one of 40. If 300 are left of
    the oldest, both widths read 256 tokens, and one piece of 256 is read.
    """
    most = self._pieces[-1]
    of_width = lambda width: [part.pieces(width, most // width) for part in self._parts]
    read = lambda width: sum(count for own in of_width(width) for *_, count in own)
    width = max(self._pieces, key=lambda width: (read(width), width))
    rows, found = most // width, of_width(width)
    pieces = [(p * rows + r, *one) for p, own in enumerate(found) for r, one in enumerate(own)]
    return (rows if pieces else 0), pieces

  def _piece(self, pieces: _Pieces, rows: int, positions: int) -> tuple[Piece, Rows]:
    """The input of a program that reads these pieces, and the rows whose prompts end with it.

    It counts the pieces' tokens as read (`Job.read`).

    Args:
      pieces, rows: from `_next_pieces`.
      positions: see `_table`.
    """
    shape, width = len(self._parts) * rows, self._pieces[-1] // rows
    tokens, following = np.zeros((2, shape, width), np.int32)
    start, count = np.zeros((2, shape), np.int32)
    slot = np.full(shape, self._slots, np.int32)
    ended: Rows = []
    for row, job, begin, size in pieces:
      text, after = job.text[begin : begin + size], job.text[begin + 1 : begin + size + 1]
      tokens[row, :size], following[row, : len(after)] = text, after
      start[row], count[row] = begin, size
      job.read += size
      if not job.unread:
        slot[row] = job.slot
        ended.append((row, job))
    table = self._table(shape, [(row, job) for row, job, *_ in pieces], positions)
    return Piece(tokens, start, count, slot, table, following), ended

  def _make_room(self, job: Job) -> None:
    """Gives a request the page of the position that the next step writes, if it has none yet.

    If no page is free, the host first reads the results of all turns, since a request may have
    ended. If still none is free, the youngest request of the part, perhaps this one, is put back:
    it waits again, in front of those that came later, and its prompt and new tokens are read anew.
    The oldest request can always go on, as the pool holds one text of the model's context.
    """
    part = next((part for part in self._parts if job in part.jobs), None)
    while part and job.is_running and job.position // self.page_tokens >= len(job.pages):
      page = part.free.take(1)
      if page is None and self._unread:
        while self._unread:
          self._take_results(self._unread.popleft())
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

  def _table(self, rows: int, jobs: Rows, positions: int) -> np.ndarray:
    """The page table int32 [rows, P] of a program that reads positions below `positions`.

    P is the smallest compiled width that holds them. Rows without a request have `NO_PAGE` only.
    """
    width = smallest(self._tables, -(-positions // self.page_tokens))
    table = np.full((rows, width), NO_PAGE, np.int32)
    for row, job in jobs:
      pages = job.pages[:width]
      table[row, : len(pages)] = pages
    return table

  def _take_results(self, results: _Results) -> None:
    """Waits for a turn's results, hands them to their requests, and ends the complete ones."""
    if results.logprob_RC is not None:
      logprob_RC = np.asarray(results.logprob_RC)
      for row, job, start, count in results.pieces:
        job.score(start, logprob_RC[row, :count])
    if not results.rows:
      return
    wants = any(job.request.logprobs is not None for _, job in results.rows)
    known = jax.device_get(results.drawn) if wants else None
    tokens = np.asarray(results.drawn.token_B).tolist()
    now = time.perf_counter()
    for row, job in results.rows:
      # If a token of an earlier turn has ended the request, the one drawn since is dropped.
      if job.is_running and (finish := job.take(tokens[row], known, row, now)):
        next(part for part in self._parts if job in part.jobs).release(job)
        self._finished.append(job.answer(finish))
        self.statistics.add(self._finished[-1])
