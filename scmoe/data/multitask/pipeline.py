"""Batches of several tasks: a step has the rows of each task where its plan puts them.

A task is a part of `data.mixture`. Each task visits its text in an order of its own, and the number
of rows that it has visited is its position. So a run whose loads change goes on from the same rows:
the plan of the next steps is another, the positions are those of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from scmoe.base.batch import Batch
from scmoe.base.errors import DataError
from scmoe.data.multitask.config import Task
from scmoe.data.multitask.plan import EMPTY, Plan
from scmoe.data.pipeline import Data, Row, Validation, shuffled

_MOST_ROWS = 1 << 53  # grain divides a dataset's length in float64


class TaskData:
  """The data of a run of several tasks, with the interface of `scmoe.data.Data`.

  `Batch.domain` is the index of each row's task, and the domains are the tasks. A row holds
  `data.seq_len` / length sequences of its task, which are documents of their own: their segments
  are numbered one after the other, and positions begin anew.

  Args:
    data: of the whole mixture, one part for each task.
    tasks: in the order of the parts.
    planned: gives the plan of a step; called when training batches are asked for.
    microbatches: of a step.

  Raises:
    DataError: a task has no training text, or less than a row of it.
  """

  def __init__(
    self, data: Data, tasks: Sequence[Task], planned: Callable[[], Plan], microbatches: int
  ):
    self.whole, self.tasks = data, tuple(tasks)
    self._planned, self._microbatches = planned, microbatches
    self.config, self.corpus, self.tokenizer = data.config, data.corpus, data.tokenizer
    self.batch_size, self.seed = data.batch_size, data.seed
    self.process_index, self.process_count = data.process_index, data.process_count
    self.domains = tuple(task.name for task in tasks)
    self.masked = data.masked
    self.parts = tuple(self._part(index) for index in range(len(tasks)))

  def _part(self, index: int) -> Data:
    task, whole = self.tasks[index], self.whole
    own = tuple(domain for domain in whole.corpus.domains if domain.part == index)
    config = dataclasses.replace(whole.config, seq_len=task.length)
    corpus = dataclasses.replace(whole.corpus, domains=own)
    places = whole.process_index, whole.process_count
    return Data(config, corpus, whole.batch_size, whole.seed, *places)

  @functools.cached_property
  def plan(self) -> Plan:
    """The rows of a training step by device and task."""
    return self._planned()

  @functools.cached_property
  def layout_AB(self) -> np.ndarray:
    """The task of each place of a step, int32 [A, B]; see `Plan.layout`."""
    return self.plan.layout(self._microbatches)

  def together(self, task: int) -> int:
    """Number of a task's sequences in a row."""
    return self.config.seq_len // self.tasks[task].length

  @property
  def validation_domains(self) -> tuple[str, ...]:
    """The tasks that have validation text."""
    return tuple(n for n, part in zip(self.domains, self.parts) if part.validation_domains)

  def check_size(self) -> None:
    """Checks that every task has training text for a row.

    Raises:
      DataError: one has less.
    """
    for index, (task, part) in enumerate(zip(self.tasks, self.parts)):
      found, need = part.training_rows, self.together(index)
      if found < need:
        raise DataError(
          f"task {task.name!r} has {found} training sequences of {task.length} tokens, less than "
          f"the {need} of a row; give it more text"
        )

  # --- batches ------------------------------------------------------------------------------------

  def train(self) -> TaskIterator:
    """An endless iterator over training batches, microbatch after microbatch of every step."""
    return TaskIterator(self)

  def validation(self, domain: str | None = None, max_batches: int | None = None) -> TaskValidation:
    """Validation batches of one task or all, the same rows in the same order every time.

    Rows of weight 0 fill up the last batch. The order is a fixed shuffle, so the first
    `max_batches` batches are a fair sample.

    Raises:
      DataError: there is no such task, or it has no validation text.
    """
    if domain is not None and domain not in self.domains:
      raise DataError(f"no task {domain!r} in the data; one of: {', '.join(self.domains)}")
    wanted = range(len(self.tasks)) if domain is None else [self.domains.index(domain)]
    rows: list[tuple[int, list[int]]] = []
    for task in wanted:
      keys, size = self.parts[task].validation_keys(), self.together(task)
      rows += [(task, list(keys[i : i + size])) for i in range(0, len(keys), size)]
    if not rows:
      of = f"task {domain!r}" if domain else "the data"
      raise DataError(
        f"{of} has no validation text; raise data.validation_fraction="
        f"{self.config.validation_fraction} or give more than one document"
      )
    return TaskValidation(self, [rows[i] for i in shuffled(range(len(rows)))], max_batches)

  def row(self, task: int, rows: Sequence[Row]) -> Row:
    """One row of a batch, from the task's sequences; padding follows if there are too few."""
    length, domain = self.config.seq_len, np.int32(max(task, 0))
    kind_of = lambda name: np.float32 if name == "weights" else np.int32
    found = {name: np.zeros(length, kind_of(name)) for name in Batch.__dataclass_fields__}
    begin = segments = 0
    for own in rows:
      end = begin + len(own["inputs"])
      for name in ("inputs", "targets", "positions", "weights"):
        found[name][begin:end] = own[name]
      here = own["segment_ids"]
      found["segment_ids"][begin:end] = np.where(here > 0, here + segments, 0)
      begin, segments = end, segments + int(here.max(initial=0))
    return {**found, "domain": domain}  # pyright: ignore[reportReturnType]

  # --- identity and summary -----------------------------------------------------------------------

  def passes(self, rows: int) -> dict[str, float]:
    """How many times a run with `rows` places for rows reads each task's training text."""
    steps = rows / self.layout_AB.size
    found = {}
    for task, (name, part) in enumerate(zip(self.domains, self.parts)):
      visited = steps * self.plan.rows_T[task] * self.together(task)
      found[name] = visited / part.training_rows
    return found

  def fingerprint(self) -> dict[str, Any]:
    """Everything that decides the order and content of each task's rows, as values for JSON.

    Loads, plan and batch size are left out: positions count each task's rows, so that a run may go
    on with others.
    """
    own = self.whole.fingerprint()
    same = ("digest", "documents", "tokenizer", "vocab_size", "packing", "document_mask", "seed",
            "seq_len", "process_count")  # fmt: skip
    return {
      "source": own["source"],
      **{name: own[name] for name in same},
      "domains": list(self.domains),
      "lengths": [task.length for task in self.tasks],
      "rows": [part.training_rows for part in self.parts],
      "order": [part.fingerprint()["order"] for part in self.parts],
    }

  def summary(self) -> str:
    """Lines for the run's header: documents, the text of each task, and the plan of a step."""
    lines, total = [self.whole.summary().splitlines()[0]], sum(task.load for task in self.tasks)
    for task, part in zip(self.tasks, self.parts):
      domains = part.corpus.domains
      lines.append(
        f"  task {task.name}: {task.load / total:.1%} of rows, "
        f"{sum(d.train.size for d in domains):,} training tokens ({part.training_rows:,} sequences "
        f"of {task.length}), {sum(d.validation.size for d in domains):,} validation tokens"
      )
    return "\n".join([*lines, f"plan         {self.plan.words()}"])


class TaskIterator:
  """Training batches without end. Its position is the number of rows that each task has visited."""

  def __init__(self, data: TaskData):
    self._data = data
    self._visited = [0] * len(data.tasks)  # rows of each task before step `_first`
    self._first, self._next = 0, 0  # the microbatch with which this plan began, and the next one
    self._iterator = self._opened()

  def __iter__(self) -> TaskIterator:
    return self

  def __next__(self) -> Batch:
    self._next += 1
    return Batch(**next(self._iterator))

  def _opened(self) -> Iterator[Row]:
    import grain

    data = self._data
    source = _Places(data, self._visited)
    rows = grain.MapDataset.source(source).map(source.read).batch(source.share)
    options = grain.ReadOptions(
      num_threads=data.config.read_threads, prefetch_buffer_size=data.config.prefetch
    )
    iterator = iter(rows.to_iter_dataset(options))
    if self._next > self._first:
      iterator.set_state({"next_index": self._next - self._first})
    return iterator

  def state(self) -> dict[str, Any]:
    """The position after the last batch, as values for JSON; store `Data.fingerprint` beside it.

    `visited` has the rows of each task up to the last whole step, `into` the microbatches since. A
    position inside a step is one of this plan only; a run saves between steps.
    """
    data, microbatches = self._data, len(self._data.layout_AB)
    steps, into = divmod(self._next - self._first, microbatches)
    visited = [before + steps * rows for before, rows in zip(self._visited, data.plan.rows_T)]
    return {"next_index": self._next, "visited": visited, "into": into}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues after the batch at which `state` was taken, with this run's plan.

    Raises:
      DataError: `state` did not come from `state()` of as many tasks.
    """
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0
    visited: Any = state.get("visited") if isinstance(state, dict) else None
    fits = isinstance(visited, list) and len(visited) == len(self._data.tasks)
    if not fits or not all(map(whole, [*visited, state.get("next_index"), state.get("into")])):
      raise DataError(
        f"data position {state!r} is not one of {len(self._data.tasks)} tasks: needs next_index, "
        "into and visited, whole numbers >= 0"
      )
    self._visited, self._next = list(visited), state["next_index"]
    self._first = self._next - state["into"]
    self._iterator = self._opened()


class _Places:
  """The places of one process, step after step, as a data source for grain.

  Place i holds (task, keys): the sequences of the row that lies there. In every step the rows of a
  task are numbered in the order of their places, so their set does not depend on the plan.

  Args:
    data: of the run.
    visited: rows of each task before the first step.
  """

  def __init__(self, data: TaskData, visited: Sequence[int]):
    self._data, self._visited = data, visited
    layout = data.layout_AB
    number = np.zeros(layout.shape, np.int64)  # of each row among its task's rows of the step
    for task in range(len(data.tasks)):
      here = layout == task
      number[here] = np.arange(here.sum())
    self.share = layout.shape[1] // data.process_count
    own = slice(data.process_index * self.share, (data.process_index + 1) * self.share)
    self._tasks, self._number = layout[:, own].ravel(), number[:, own].ravel()
    self._orders = [part.training_order() for part in data.parts]

  def __len__(self) -> int:
    return _MOST_ROWS // self._tasks.size * self._tasks.size

  def __getitem__(self, index: int) -> tuple[int, list[int]]:
    step, place = divmod(int(index), self._tasks.size)
    task = int(self._tasks[place])
    if task == EMPTY:
      return EMPTY, []
    data, order = self._data, self._orders[task]
    row = self._visited[task] + step * data.plan.rows_T[task] + int(self._number[place])
    size = data.together(task)
    return task, [int(order[row * size + i]) for i in range(size)]

  def read(self, place: tuple[int, list[int]]) -> Row:
    """The row at a place."""
    task, keys = place
    data = self._data
    return data.row(task, [data.parts[task].training_row(key) for key in keys])


class TaskValidation(Validation):
  """A finite, repeatable sequence of validation batches of tasks; its keys are (task, keys)."""

  def _read(self, i: int) -> Row:
    task, keys = self._keys[i] if i < len(self._keys) else (EMPTY, [])
    return self._data.row(task, [self._data.parts[task].validation_row(key) for key in keys])
