"""Runs benchmarks of language models by EleutherAI's lm-evaluation-harness (the package lm_eval).

  python -m scmoe.evaluate --workdir runs/a --tasks hellaswag,arc_easy --limit 100
  python -m scmoe.evaluate --workdir runs/a --tasks mine --task_folder my_tasks

The harness has the tasks, their prompts and their metrics. This module gives it the model, under
the name "scmoe":

  import lm_eval, scmoe.run.tasks
  lm_eval.simple_evaluate("scmoe", "workdir=runs/a", tasks=["hellaswag"])

A context begins as the model's training texts did: after an end-of-text token, or, for a released
model, after the tokens that its own tokenizer adds (`scmoe.data.conventions`).
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
from scmoe.run import placement
from scmoe.run.modality import needs_text
from scmoe.run.opened import OpenRun, open_model, open_run
from scmoe.training.restore import with_newest

_INSTALLED = importlib.util.find_spec("lm_eval") is not None


def _harness(module: str = "") -> Any:
  """A module of lm_eval.

  Raises:
    ConfigError: it is not installed.
  """
  return need(f"lm_eval{module}", "a task of --tasks")


_CHUNK = 16  # tokens that are generated between two searches for a stop text
_SAMPLING = ("until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "seed")


# The module can be imported without the harness; its classes need it.
_Model: Any = _harness(".api.model").TemplateLM if _INSTALLED else object
_TaskManager: Any = _harness(".tasks").TaskManager if _INSTALLED else object


class ScmoeLM(_Model):
  """A run's model behind the harness's interface.

  The answer to a request does not depend on the others of its batch, since experts drop no token.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; -1: the newest.
    mesh: see `scmoe.run.placement.on_mesh`.
    batch_size: requests at a time; None or "auto": `train.batch_size`.
    max_length: longest sequence that the model reads; 0: `data.seq_len`, as in training.
    opened: a run that is open already, instead of `workdir`, `step` and `mesh`.
    max_batch_size, device: arguments of the harness that are not used.

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
      named = None if int(step) < 0 else int(step)

      def opened_step() -> OpenRun:
        stored = open_run(workdir, named)
        needs_text(stored.run, "--tasks")
        return open_model(placement.on_mesh(stored.run, mesh), workdir, stored.step)

      opened = with_newest(opened_step, named)
    run = opened.run
    self.opened, self.encoder = opened, opened.tokenizer
    self.max_length = int(max_length) or min(run.data.seq_len, run.model.context)
    given = None if batch_size in (None, "auto") else int(str(batch_size))
    self.batch_size = given or run.train.batch_size

  # -- facts that the harness reads ---------------------------------------------------------------

  @property
  def eot_token_id(self) -> int:
    """The id of the end-of-text token."""
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
    """Facts that the harness stores with its results."""
    opened = self.opened
    return {"workdir": opened.workdir, "step": opened.step, "max_length": self.max_length}

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Ids of a text, without special tokens."""
    del add_special_tokens
    return self.encoder.encode(string)

  # -- requests that the harness sends -----------------------------------------------------------

  def _loglikelihood_tokens(
    self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
  ) -> list[tuple[float, bool]]:
    """(log-likelihood, greedy) of every continuation, given its context."""
    continuations, begin = [], list(self.encoder.begin_ids)
    for _texts, context, continuation in requests:
      context = context if context[: len(begin)] == begin else [*begin, *context]
      continuations.append(Continuation([*context, *continuation], len(continuation)))
    found = [(answer.log_likelihood, answer.greedy) for answer in self._score(continuations)]
    for (texts, _context, _continuation), answer in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood", texts, answer)
    return found

  def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
    """Log-likelihood of whole texts, in windows of `max_length` tokens."""
    del disable_tqdm
    texts = [self.tok_encode(request.args[0]) for request in requests]
    continuations = [Continuation([self.encoder.bos_id, *tokens], len(tokens)) for tokens in texts]
    found = [answer.log_likelihood for answer in self._score(continuations)]
    for request, answer in zip(requests, found):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
    return found

  def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
    """The continuation of every context, cut before the first of the request's stop texts."""
    del disable_tqdm
    alike: dict[_Settings, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
      alike[_settings(request.args[1])].append(number)
    found = [""] * len(requests)
    for settings, numbers in alike.items():
      prompts = self._prompts([requests[n].args[0] for n in numbers], settings.tokens)
      order = sorted(range(len(numbers)), key=lambda i: -len(prompts[i]))
      for start in range(0, len(order), self.batch_size):
        batch = order[start : start + self.batch_size]
        for i, text in zip(batch, self._generate([prompts[i] for i in batch], settings)):
          found[numbers[i]] = text
    for request, text in zip(requests, found):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return found

  def _score(self, continuations: list[Continuation]) -> Iterator[Score]:
    empty = Score(0.0, True)  # of a continuation without tokens
    some = [one for one in continuations if one.asked]
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
    return (next(scores) if one.asked else empty for one in continuations)

  def _prompts(self, texts: Sequence[str], new: int) -> list[list[int]]:
    """Tokens of each text; a long text loses its beginning, to leave room for `new` tokens."""
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

  def _generate(self, prompts: list[list[int]], settings: _Settings) -> list[str]:
    opened, rows = self.opened, [[] for _ in prompts]
    pieces = stream(
      opened.model,
      prompts,
      settings.sampling,
      max_new_tokens=settings.tokens,
      chunk=_CHUNK,
      seed=settings.seed,
      eos_id=self.encoder.stop_ids,
      router=opened.router,
      mesh=opened.mesh,
      prepare=opened.prepare,
    )
    for new in pieces:
      for row, piece in zip(rows, new):
        row += piece
      texts = [self.encoder.decode(row) for row in rows]
      if all(any(stop in text for stop in settings.until) for text in texts):
        break
    return [_before(self.encoder.decode(row), settings.until) for row in rows]


if _INSTALLED:
  _harness(".api.registry").register_model("scmoe")(ScmoeLM)


@dataclasses.dataclass(frozen=True)
class _Settings:
  """How a text is generated; requests with equal settings share batches."""

  tokens: int
  until: tuple[str, ...]
  sampling: Sampling
  seed: int


def _settings(asked: dict[str, Any]) -> _Settings:
  """Reads a task's `generation_kwargs`.

  Raises:
    ConfigError: one of them is unknown.
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
  return _Settings(int(given["max_gen_toks"]), until, sampling, int(given.get("seed") or 0))


def _before(text: str, until: Sequence[str]) -> str:
  """The text before the first of the stop texts."""
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
  """Runs lm_eval.simple_evaluate.

  Args:
    opened: the run.
    names: tasks, groups or tags, or paths of task files.
    folder: a folder with the user's own tasks, which need no network if their data are local.
    fewshot: examples in a prompt; None: as each task says.
    limit: documents of a task, or, below 1, the share of them; None: all.
    gen_kwargs: replaces the tasks' own, e.g. "max_gen_toks=64,temperature=0".

  Returns:
    What lm_eval returns, made JSON-able; `results` has each task's figures.

  Raises:
    ConfigError: lm_eval is not installed, there is no such task, or a task needs a request that the
      model does not support.
    DataError: a task's data cannot be loaded.
  """
  harness = _harness()
  # Listing the harness's own 14,000 tasks takes long, so the user's folder is tried alone first.
  manager = _Tasks(include_path=folder, include_defaults=False) if folder else None
  if manager is None or not all(map(manager.knows, names)):
    manager = _Tasks(include_path=folder or None)
  for name in names:
    if not manager.knows(name):
      near = difflib.get_close_matches(name, manager.all_tasks, n=3)
      hint = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks prints them"
      raise ConfigError(f"--tasks={name!r} is not in lm_eval or --task_folder; {hint}")
  words = f"--tasks={','.join(names)}"
  try:
    manager.load(list(names))
  except Exception as error:  # each source of data raises errors of its own
    raise DataError(
      f"{words}: cannot be loaded ({_one_line(error)}); without a network give tasks whose data "
      "are files of this machine (docs/evaluating.md)"
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
  # The harness raises these if a task needs more than scores and text, or has unknown arguments.
  except (NotImplementedError, ValueError, TypeError) as error:
    raise ConfigError(f"{words}: lm_eval cannot use this model: {_one_line(error)}") from None
  return json.loads(json.dumps(found, default=_harness(".utils").handle_non_serializable))


class _Tasks(_TaskManager):
  """The harness's task manager, which here loads each list of tasks once."""

  def __init__(self, **options: Any):
    super().__init__(**options)
    self._loaded: dict[str, Any] = {}

  def knows(self, name: str) -> bool:
    """True if there is such a task, group, tag or task file."""
    return name in self.all_tasks or (name.endswith((".yaml", ".yml")) and Path(name).is_file())

  def load(self, task_list: Any) -> Any:
    """The harness's `load`; a list of tasks that was loaded before is returned as it is."""
    key = repr(task_list)
    if key not in self._loaded:
      self._loaded[key] = super().load(task_list)
    return self._loaded[key]


def _one_line(error: Exception) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def task_table(found: dict[str, Any]) -> str:
  """Results as the harness's own table, in Markdown."""
  make_table = _harness(".utils").make_table
  parts = [make_table(found)]
  if found.get("groups"):
    parts.append(make_table(found, "groups"))
  return "\n\n".join(part.strip() for part in parts)
