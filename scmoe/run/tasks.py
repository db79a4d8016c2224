"""Benchmarks of language models, by EleutherAI's lm-evaluation-harness (the package lm_eval).

  python -m scmoe.evaluate --workdir runs/a --tasks hellaswag,arc_easy --limit 100
  python -m scmoe.evaluate --workdir runs/a --tasks mine --task_folder my_tasks

The harness has the tasks, their prompts and their metrics; here is the model that it asks,
registered with it under the name "scmoe":

  import lm_eval, scmoe.run.tasks
  lm_eval.simple_evaluate("scmoe", "workdir=runs/a", tasks=["hellaswag"])

A context begins as the model's texts do: after an end-of-text token, as in training; of a released
model, with the tokens that its own tokenizer adds (`scmoe.data.conventions`).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.output import warn
from scmoe.data.packages import need
from scmoe.data.tokenizers import prompt_ids
from scmoe.inference.decode import stream
from scmoe.inference.sampling import Sampling
from scmoe.inference.scoring import Continuation, Score, score
from scmoe.run import build
from scmoe.run.opened import OpenRun, open_model, open_run

_INSTALLED = importlib.util.find_spec("lm_eval") is not None


def _harness(module: str = "") -> Any:
  """A module of lm_eval.

  Raises:
    ConfigError: it is not installed.
  """
  return need(f"lm_eval{module}", "a task of --tasks")


_CHUNK = 16  # tokens between two looks for a text at which to stop
_SAMPLING = ("until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "seed")


# This module can be imported everywhere; what it has can be used where the harness is installed.
_Model: Any = _harness(".api.model").TemplateLM if _INSTALLED else object
_TaskManager: Any = _harness(".tasks").TaskManager if _INSTALLED else object


class ScmoeLM(_Model):
  """A run's model as the harness asks it.

  What it says of one request does not depend on the others: experts have room for every token.

  Args:
    workdir: folder of the run.
    step: of the checkpoint; -1 for the newest.
    mesh: see `scmoe.run.build.on_mesh`.
    batch_size: requests at a time; None or "auto": `train.batch_size`.
    max_length: tokens that are read at a time; 0: `data.seq_len`, as the run was trained.
    opened: a run that is opened already, instead.
    max_batch_size, device: of the harness; not used.

  Raises:
    ConfigError, CheckpointError: see `scmoe.run.opened.open_run`.
  """

  def __init__(
    self,
    workdir: str = "",
    step: int = -1,
    mesh: str = "",
    batch_size: int | str | None = None,
    max_length: int = 0,
    *,
    opened: OpenRun | None = None,
    max_batch_size: Any = None,
    device: Any = None,
  ):
    del max_batch_size, device
    _harness()
    super().__init__()
    if opened is None:
      stored = open_run(workdir, None if int(step) < 0 else int(step))
      opened = open_model(build.on_mesh(stored.run, mesh), workdir, stored.step)
    run = opened.run
    self.opened, self.encoder = opened, opened.tokenizer
    self.max_length = int(max_length) or min(run.data.seq_len, run.model.context)
    given = None if batch_size in (None, "auto") else int(str(batch_size))
    self.batch_size = given or run.train.batch_size

  # -- what the harness asks about the model ----------------------------------------------------

  @property
  def eot_token_id(self) -> int:
    """The end of text."""
    return self.encoder.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token that stands for an empty context."""
    return self.encoder.bos_id

  @property
  def tokenizer_name(self) -> str:
    """Names the tokenizer in the harness's caches."""
    return self.encoder.digest

  def get_model_info(self) -> dict[str, Any]:
    """Facts about the model that the harness stores with its results."""
    opened = self.opened
    return {"workdir": opened.workdir, "step": opened.step, "max_length": self.max_length}

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Ids of a text; nothing is added."""
    del add_special_tokens
    return self.encoder.encode(string)

  # -- what it asks the model -------------------------------------------------------------------

  def _loglikelihood_tokens(
    self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
  ) -> list[tuple[float, bool]]:
    """(log-likelihood, greedy) of every continuation, given its context."""
    asked, begin = [], list(self.encoder.begin_ids)
    for _texts, context, continuation in requests:
      context = context if context[: len(begin)] == begin else [*begin, *context]
      asked.append(Continuation([*context, *continuation], len(continuation)))
    found = [(said.log_likelihood, said.greedy) for said in self._score(asked)]
    for (texts, _context, _continuation), said in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood", texts, said)
    return found

  def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
    """Log-likelihood of whole texts, in windows of `max_length` tokens."""
    del disable_tqdm
    texts = [self.tok_encode(request.args[0]) for request in requests]
    asked = [Continuation([self.encoder.bos_id, *tokens], len(tokens)) for tokens in texts]
    found = [said.log_likelihood for said in self._score(asked)]
    for request, said in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, said)
    return found

  def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
    """The continuation of every context, up to where it says one of the texts to stop at."""
    del disable_tqdm
    alike: dict[_Way, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
      alike[_way(request.args[1])].append(number)
    found = [""] * len(requests)
    for way, numbers in alike.items():
      prompts = self._prompts([requests[n].args[0] for n in numbers], way.tokens)
      order = sorted(range(len(numbers)), key=lambda i: -len(prompts[i]))
      for start in range(0, len(order), self.batch_size):
        batch = order[start : start + self.batch_size]
        for i, text in zip(batch, self._generate([prompts[i] for i in batch], way)):
          found[numbers[i]] = text
    for request, text in zip(requests, found):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return found

  def _score(self, asked: list[Continuation]) -> Iterator[Score]:
    empty = Score(0.0, True)  # of nothing
    some = [one for one in asked if one.asked]
    scores = iter(
      score(
        self.opened.model,
        some,
        length=self.max_length,
        batch_size=self.batch_size,
        mesh=self.opened.mesh,
        router=self.opened.router,
        prepare=self.opened.prepare,
      )
    )
    return (next(scores) if one.asked else empty for one in asked)

  def _prompts(self, texts: Sequence[str], new: int) -> list[list[int]]:
    """Tokens of each text, of a long one the last that leave room for so many new ones."""
    room = self.opened.run.model.context - new
    if room < 2:
      raise ConfigError(
        f"max_gen_toks={new} of a task leaves no room for its prompt in model.context="
        f"{self.opened.run.model.context}; give --gen_kwargs=max_gen_toks={max(1, new // 4)}"
      )
    prompts = [prompt_ids(self.encoder, text) for text in texts]
    cut = sum(len(prompt) > room for prompt in prompts)
    if cut:
      warn(f"{cut} of {len(prompts)} prompts are longer than {room} tokens: their ends are read")
    return [prompt[-room:] for prompt in prompts]

  def _generate(self, prompts: list[list[int]], way: _Way) -> list[str]:
    opened, rows = self.opened, [[] for _ in prompts]
    pieces = stream(
      opened.model,
      prompts,
      way.sampling,
      max_new_tokens=way.tokens,
      chunk=_CHUNK,
      seed=way.seed,
      eos_id=self.encoder.stop_ids,
      router=opened.router,
      mesh=opened.mesh,
      prepare=opened.prepare,
    )
    for new in pieces:
      for row, piece in zip(rows, new):
        row += piece
      texts = [self.encoder.decode(row) for row in rows]
      if all(any(stop in text for stop in way.until) for text in texts):
        break
    return [_before(self.encoder.decode(row), way.until) for row in rows]


if _INSTALLED:
  _harness(".api.registry").register_model("scmoe")(ScmoeLM)


@dataclasses.dataclass(frozen=True)
class _Way:
  """How a text is generated: requests that are alike in it share batches."""

  tokens: int
  until: tuple[str, ...]
  sampling: Sampling
  seed: int


def _way(asked: dict[str, Any]) -> _Way:
  """Reads a task's `generation_kwargs`.

  Raises:
    ConfigError: one of them means nothing here.
  """
  given = _harness(".models.utils").normalize_gen_kwargs(asked)
  if unknown := sorted(set(given) - set(_SAMPLING)):
    raise ConfigError(
      f"generation_kwargs {unknown[0]!r} of a task is unknown; one of: {', '.join(_SAMPLING)}"
    )
  drawn = bool(given["do_sample"])
  sampling = Sampling(
    float(given.get("temperature") or 1.0) if drawn else 0.0,
    int(given.get("top_k") or 0) if drawn else 0,
    float(given.get("top_p") or 1.0) if drawn else 1.0,
  )
  until = tuple(stop for stop in given["until"] if stop)
  return _Way(int(given["max_gen_toks"]), until, sampling, int(given.get("seed") or 0))


def _before(text: str, until: Sequence[str]) -> str:
  ends = [text.index(stop) for stop in until if stop in text]
  return text[: min(ends, default=len(text))]


def evaluate_tasks(
  opened: OpenRun,
  names: Sequence[str],
  *,
  folder: str = "",
  fewshot: int | None = None,
  limit: float | None = None,
  gen_kwargs: str = "",
) -> dict[str, Any]:
  """Runs lm_eval.simple_evaluate; its findings, JSON-able, with each task's figures in `results`.

  Args:
    opened: the run.
    names: of tasks, groups or tags, or paths of task files.
    folder: with tasks of one's own; there the network is not needed, if their data are local.
    fewshot: examples in a prompt; None: as each task has it.
    limit: documents of a task, or a share of them below 1; None: all.
    gen_kwargs: in place of tasks' own, e.g. "max_gen_toks=64,temperature=0".

  Raises:
    ConfigError: lm_eval is not installed, there is no such task, or it asks for what the model has
      not.
    DataError: a task's data cannot be had.
  """
  harness = _harness()
  # Without a need for them the harness's own 14,000 tasks are not looked through.
  manager = _Tasks(include_path=folder, include_defaults=False) if folder else None
  if manager is None or not all(map(manager.knows, names)):
    manager = _Tasks(include_path=folder or None)
  for name in names:
    if not manager.knows(name):
      near = difflib.get_close_matches(name, manager.all_tasks, n=3)
      hint = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks prints them"
      raise ConfigError(f"--tasks={name!r} is no task of lm_eval or of --task_folder; {hint}")
  words = f"--tasks={','.join(names)}"
  try:
    manager.load(list(names))
  except Exception as error:  # of as many kinds as there are ways to have data
    raise DataError(
      f"{words}: cannot be loaded ({_said(error)}); without a network give tasks whose data are "
      "files of this machine (docs/evaluating.md)"
    ) from None
  try:
    found = harness.simple_evaluate(
      ScmoeLM(opened=opened),
      tasks=list(names),
      task_manager=manager,
      num_fewshot=fewshot,
      limit=limit,
      gen_kwargs=gen_kwargs or None,
      log_samples=False,
    )
  # What the harness says of a task that asks for more than scores and text, or of words it does not
  # know; its reason stands in the line.
  except (NotImplementedError, ValueError, TypeError) as error:
    raise ConfigError(f"{words}: lm_eval cannot ask this model: {_said(error)}") from None
  return json.loads(json.dumps(found, default=_harness(".utils").handle_non_serializable))


class _Tasks(_TaskManager):
  """The harness's tasks, each loaded once."""

  def __init__(self, **options: Any):
    super().__init__(**options)
    self._loaded: dict[str, Any] = {}

  def knows(self, name: str) -> bool:
    """True if there is such a task, group, tag or task file."""
    return name in self.all_tasks or (name.endswith((".yaml", ".yml")) and Path(name).is_file())

  def load(self, task_list: Any) -> Any:
    """Loads as the harness does, but each list of tasks once."""
    key = repr(task_list)
    if key not in self._loaded:
      self._loaded[key] = super().load(task_list)
    return self._loaded[key]


def _said(error: Exception) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def task_table(found: dict[str, Any]) -> str:
  """The harness's own table of results, in Markdown."""
  make_table = _harness(".utils").make_table
  parts = [make_table(found)]
  if found.get("groups"):
    parts.append(make_table(found, "groups"))
  return "\n\n".join(part.strip() for part in parts)
