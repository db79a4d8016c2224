"""Several tasks for the commands: their data, objective and figures, and one task's model alone.

The model of a run of tasks has a gate for each task in every layer. Training, evaluation and
inspection use all of them, each for its rows. The model of one task is the same with one gate a
layer, so a command that reads a single text loads just that one (`of_task`), and knows no tasks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.data import bigram_bits_per_byte, check_vocab, open_data
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.data.multitask.pipeline import TaskData
from scmoe.models.multitask import Multitask
from scmoe.run.config import RunConfig
from scmoe.run.text import Text

GATES = "router_gate"  # name of a layer's gates in the tree of its parameters


class Tasks(Text):
  """Text of several tasks; see `scmoe.run.modality.Modality`."""

  def make_objective(self, run: RunConfig, graph: nnx.GraphDef) -> Multitask:
    """See `Modality.make_objective`."""
    return Multitask(graph, run.router, run.multitask.task_names, remat=run.train.remat)

  def random_batch(self, run: RunConfig, rows: tuple[int, ...], seed: int) -> Batch:
    """See `Modality.random_batch`; the tasks take turns over the rows."""
    tasks = np.arange(rows[-1], dtype=np.int32) % run.router.tasks
    domain = np.ascontiguousarray(np.broadcast_to(tasks, rows))
    return dataclasses.replace(super().random_batch(run, rows, seed), domain=domain)

  def open_data(self, run: RunConfig, **options: Any) -> TaskData:
    """See `Modality.open_data`."""
    train = run.train
    whole = open_data(run.data, batch_size=train.batch_size, seed=train.seed, **options)
    check_vocab(whole, run.model.vocab_size)
    tasks, microbatches = run.multitask.tasks(run.data), train.microbatches(run.data.seq_len)
    data = TaskData(whole, tasks, run.plan, microbatches)
    if options.get("trained", True) and not options.get("evaluated"):
      data.check_size()
    return data

  def add_baseline(self, data: TaskData, figures: dict[str, Any]) -> None:
    """Adds `bigram_bits_per_byte`, in all and of each task; nothing if prompts are masked."""
    if data.masked:
      return
    bigram = bigram_bits_per_byte(data.whole)
    figures["bigram_bits_per_byte"] = bigram.total
    for name, part in zip(data.domains, data.parts):
      sizes = {d.name: d.validation.text_bytes for d in part.corpus.domains}
      bits = sum(bigram.domains[domain] * size for domain, size in sizes.items() if size)
      if name in figures["domains"]:
        figures["domains"][name]["bigram_bits_per_byte"] = bits / sum(sizes.values())

  def sampling(self, built: Any, data: TaskData) -> None:
    """There is nothing to sample: a sample has one gate a layer (scmoe.generate --task)."""

  def _which(self, data: Any) -> str:
    return f" --task {data.domains[0]}"


class OfTask(NamedTuple):
  """A run as one of its tasks sees it.

  Attributes:
    run: a plain run: the model has one gate a layer, the data are the task's part of the mixture.
    gate: index of the task, under which checkpoints store its gates (`stored_as`); None for a run
      without tasks, whose weights are read as they are.
  """

  run: RunConfig
  gate: int | None = None


def of_task(run: RunConfig, task: str) -> OfTask:
  """A resolved run, as the task named sees it; without tasks and without a name the run itself.

  Raises:
    ConfigError: the run has tasks and none is named, or it has no such task.
  """
  names = run.multitask.task_names
  if not task and not names:
    return OfTask(run)
  if not names:
    raise ConfigError(f"--task={task!r} names a task, the run {run.name!r} has none; leave it out")
  if task not in names:
    known = ", ".join(names)
    raise ConfigError(f"--task={task!r} is no task of the run {run.name!r}; name one of: {known}")
  index = names.index(task)
  part, length = run.data.parts()[index], run.multitask.tasks(run.data)[index].length
  data = dataclasses.replace(run.data, source=part.kind, path=part.path, mixture="", seq_len=length)
  router = dataclasses.replace(run.router, tasks=0)
  plain = dataclasses.replace(run, data=data, router=router, multitask=MultitaskConfig())
  return OfTask(plain, index)


def stored_as(tree: Any, gate: int | None) -> Any:
  """A tree like a task's parameters, with the names that they have in the run's checkpoint.

  Args:
    tree: nested dicts; each layer has one gate, number 0.
    gate: see `OfTask`; None: the names are the same.
  """
  return tree if gate is None else _renamed(tree, 0, gate)


def loaded_as(tree: Any, gate: int | None) -> Any:
  """The inverse of `stored_as`."""
  return tree if gate is None else _renamed(tree, gate, 0)


def stored_name(name: str, gate: int | None) -> str:
  """`stored_as` for the dotted name of one parameter."""
  return name if gate is None else name.replace(f".{GATES}.0.", f".{GATES}.{gate}.")


def _renamed(tree: Any, old: int, new: int) -> Any:
  """The tree with another number for the one gate of each layer."""
  if not isinstance(tree, dict):
    return tree
  return {
    name: {new: value[old]} if name == GATES else _renamed(value, old, new)
    for name, value in tree.items()
  }
