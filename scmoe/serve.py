"""python -m scmoe.serve: answers prompts in a loop, a batch of requests at a time.

  python -m scmoe.serve --model exports/a --max_new_tokens 32 < prompts.jsonl > answers.jsonl
  mkfifo ask; python -m scmoe.serve --model exports/a --input ask --output answers.jsonl

An example of a deployment, without a network: your service writes requests to the input and reads
the answers. Each line of the input is a request: a JSON object with `prompt`, and optionally `id`
(returned with the answer) and `max_new_tokens` (at most the flag's). Requests that come within
--max_wait seconds of the first are decoded together. Every batch is padded to the same number of
rows, so that programs are compiled once per prompt length, not per number of requests. Each line of
the output is an answer: `id`, `text`, `tokens`, `seconds` since the request was read, and `batch`,
the number of requests decoded together; or `id` and `error`. The command ends with its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from scmoe.base.errors import ConfigError, DataError, StorageError, run_main
from scmoe.inference.offload.model import allow_pinned_memory
from scmoe.inference.sampling import Sampling
from scmoe.run.command_line import ALLOW_IMPORT, HELP, Flag, help_text, parse, simulate
from scmoe.run.generation_flags import OFFLOAD_FLAGS, SAMPLING_FLAGS, offload_request
from scmoe.run.programs import user_programs
from scmoe.run.session import Session

FLAGS = (
  Flag("model", str, "", "folder that scmoe.convert --inference wrote", required=True),
  Flag("input", str, "-", "file or pipe with requests, one per line; -: stdin"),
  Flag("output", str, "-", "file to which answers are appended; -: stdout"),
  Flag("batch", int, 8, "most requests that are decoded together"),
  Flag("max_wait", float, 0.05, "seconds that a request waits for others"),
  Flag("max_new_tokens", int, 64, "most tokens of an answer"),
  *SAMPLING_FLAGS,
  *OFFLOAD_FLAGS,
  ALLOW_IMPORT,
  HELP,
)
_FIELDS = ("prompt", "id", "max_new_tokens")
MOST_LINE, MOST_ID = 2**24, 256  # characters of a request, and of its id
MOST_ROWS, MOST_WAIT = 2**16, 3600.0  # requests of a batch; seconds that one waits for others


@user_programs()
def main(argv: list[str]) -> None:
  """Answers the requests of the input."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  simulate(values["simulate"])
  allow_pinned_memory()
  _check_flags(values)
  sampling = Sampling(values["temperature"], values["top_k"], values["top_p"])
  with contextlib.ExitStack() as files:
    given = _opened(values["input"], "input", files)
    out = _opened(values["output"], "output", files)
    names = ("model", "mesh", "allow_import", "max_new_tokens", "deterministic")
    options = {name: values[name] for name in names}
    options |= {"request": offload_request(values), "rows": values["batch"]}
    rest = {"rows": values["batch"], "seed": values["seed"]}
    session = Session(**options)
    context = session.model.config.context
    if values["max_new_tokens"] >= context:
      raise ConfigError(
        f"--max_new_tokens={values['max_new_tokens']} leaves no room for a prompt in model.context="
        f"{context}"
      )
    server = Server(session, sampling, values["max_new_tokens"], **rest)
    try:
      for answers in server.answers(batches(given, values["batch"], values["max_wait"])):
        _write(answers, out, values["output"])
    except KeyboardInterrupt:
      raise SystemExit(130) from None
    finally:
      print(server.report(), file=sys.stderr)


def _check_flags(values: dict[str, Any]) -> None:
  """Checks the numbers of the command line, and that input and output are different files."""
  for name, most in (("batch", MOST_ROWS), ("max_new_tokens", 2**31 - 1)):
    if not 1 <= values[name] <= most:
      raise ConfigError(f"--{name}={values[name]} must be at least 1, and at most {most}")
  if not 0 <= values["max_wait"] <= MOST_WAIT:
    raise ConfigError(
      f"--max_wait={values['max_wait']} must be at least 0 seconds, and at most {MOST_WAIT}"
    )
  if values["input"] == values["output"] != "-":
    raise ConfigError(f"--input and --output are both {values['input']!r}; give two files")


def _write(answers: list[dict[str, Any]], out: IO[str], name: str) -> None:
  """Appends answers to the output, each as a line of JSON.

  Raises:
    StorageError: the disk is full, or gone.
  """
  try:
    out.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    out.flush()
  except BrokenPipeError:
    raise
  except OSError as error:
    with contextlib.suppress(OSError):  # closing writes the rest once more
      out.close()
    raise StorageError(f"--output={name!r} cannot be written: {error.strerror}") from None


def _opened(name: str, flag: str, files: contextlib.ExitStack) -> IO[str]:
  if name == "-":
    stream = sys.stdin if flag == "input" else sys.stdout
    # JSON is UTF-8, even if the terminal's encoding is another.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(encoding="utf-8", errors="replace")
    return stream
  try:
    if flag == "output":
      return files.enter_context(Path(name).open("a", encoding="utf-8", errors="replace"))
    # A line that is not UTF-8 must fail alone, and not end the command.
    return files.enter_context(Path(name).open(encoding="utf-8", errors="replace"))
  except OSError as error:
    kind = DataError if flag == "input" else StorageError
    raise kind(f"--{flag}={name!r} cannot be opened: {error.strerror}") from None


@dataclasses.dataclass
class Request:
  """A line of the input.

  Attributes:
    line: its text.
    number: its number, from 1.
    since: when it was read, in seconds of `time.perf_counter`.
  """

  line: str
  number: int
  since: float


def batches(lines: Iterable[str], size: int, max_wait: float) -> Iterator[list[Request]]:
  """Yields requests in batches, in order: up to `size` within `max_wait` seconds of the first.

  A thread reads ahead, two batches at most. Empty lines are skipped.

  Args:
    lines: lines of the input; at their end the last batch is yielded.
    size: most requests of a batch.
    max_wait: seconds.

  Raises:
    DataError: the input cannot be read.
  """
  waiting: queue.Queue[Request | OSError | None] = queue.Queue(2 * size)

  def read() -> None:
    try:
      for number, line in enumerate(_short(lines), 1):
        if line.strip():
          waiting.put(Request(line, number, time.perf_counter()))
    except OSError as error:
      waiting.put(error)
    waiting.put(None)

  # A daemon thread, since a read that waits for a terminal's next line must not keep the process.
  threading.Thread(target=read, name="requests", daemon=True).start()
  ended = False
  while not ended:
    found: list[Request] = []
    until = None
    while len(found) < size:
      wait = None if until is None else max(0.0, until - time.perf_counter())
      try:
        got = waiting.get(timeout=wait)
      except queue.Empty:
        break
      if isinstance(got, OSError):
        raise DataError(f"--input cannot be read: {got}") from None
      if got is None:
        ended = True
        break
      found.append(got)
      until = until or time.perf_counter() + max_wait
    if found:
      yield found


def _short(lines: Iterable[str]) -> Iterator[str]:
  """Lines of a file or an iterable, each cut to `MOST_LINE` + 1 characters.

  The extra character shows that a line was too long. A file is read in pieces, since a line that
  never ends would otherwise fill the memory.
  """
  readline = getattr(lines, "readline", None)
  if readline is None:
    yield from (line[: MOST_LINE + 1] for line in lines)
    return
  while line := readline(MOST_LINE + 1):
    rest = line
    while len(rest) > MOST_LINE and not rest.endswith("\n"):
      rest = readline(MOST_LINE + 1)
    yield line


class Server:
  """Answers batches of requests.

  Args:
    session: model and tokenizer.
    sampling: how tokens are drawn.
    max_new_tokens: most tokens of an answer.
    rows: rows to which every batch is padded; 0: as many as the largest batch so far has.
    seed: seed of the draws; every batch draws differently.
  """

  def __init__(
    self,
    session: Session,
    sampling: Sampling,
    max_new_tokens: int,
    *,
    rows: int = 0,
    seed: int = 0,
  ):
    self.session, self.sampling, self.max_new_tokens = session, sampling, max_new_tokens
    self.rows, self.seed = rows, seed
    self.tokens = self.failed = self.batches = 0
    self.seconds: list[float] = []
    self._busy = 0.0

  def answers(self, asked: Iterable[list[Request]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the answers of every batch, in the order of its requests."""
    for requests in asked:
      begin = time.perf_counter()
      found = self.answer(requests)
      self._busy += time.perf_counter() - begin
      yield found

  def answer(self, requests: list[Request]) -> list[dict[str, Any]]:
    """The answers of one batch; a wrong request gets its error, and the others are answered."""
    found: list[dict[str, Any]] = []
    good: list[tuple[int, list[int], int]] = []  # place, tokens, most new tokens
    for place, request in enumerate(requests):
      answer: dict[str, Any] = {"id": request.number}
      try:
        fields = _fields(request.line, self.max_new_tokens)
        answer["id"] = fields.get("id", request.number)
        good.append((place, *self._tokens(fields)))
      except (ConfigError, DataError) as error:
        answer["error"] = str(error)
        self.failed += 1
      found.append(answer)
    if good:
      self.batches += 1
      made = self._decode([tokens for _, tokens, _ in good], [most for _, _, most in good])
      for (place, _, _), new in zip(good, made):
        took = time.perf_counter() - requests[place].since
        text = self.session.tokenizer.decode(new)
        found[place] |= {"text": text, "tokens": len(new), "seconds": round(took, 4)}
        found[place]["batch"] = len(good)
        self.tokens += len(new)
        self.seconds.append(took)
    return found

  def report(self) -> str:
    """One line with the number of answers and their speed."""
    count = len(self.seconds)
    if not count:
      return f"no request answered, {self.failed} refused"
    ordered = sorted(self.seconds)
    at = lambda share: ordered[min(count - 1, int(share * count))]
    return (
      f"{count} requests answered, {self.failed} refused, in {self.batches} batches; {self.tokens} "
      f"tokens, {self.tokens / self._busy:.1f} a second (with compilation); latency: median "
      f"{at(0.5):.3f} s, 95th percentile {at(0.95):.3f} s"
    )

  def _tokens(self, fields: dict[str, Any]) -> tuple[list[int], int]:
    """A prompt's tokens, and the most tokens of its answer.

    Raises:
      ConfigError: both together are longer than the model's context.
    """
    tokens, most = self.session.encode(fields["prompt"]), fields["max_new_tokens"]
    context = self.session.model.config.context
    # Every row has room for --max_new_tokens, even if this request wants fewer.
    if len(tokens) + self.max_new_tokens > context:
      raise ConfigError(
        f"prompt has {len(tokens)} tokens, model.context={context} leaves room for "
        f"{context - self.max_new_tokens} before --max_new_tokens={self.max_new_tokens}"
      )
    return tokens, most

  def _decode(self, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
    """New tokens of every prompt; stops as soon as every request has its tokens."""
    self.rows = max(self.rows, len(prompts))
    rows = [[] for _ in prompts]
    # Rows without a request repeat the shortest prompt; their tokens are thrown away.
    filled = prompts + [min(prompts, key=len)] * (self.rows - len(prompts))
    options = {"max_new_tokens": self.max_new_tokens, "seed": self.seed + self.batches}
    over = [False] * len(prompts)
    for new in self.session.tokens(filled, self.sampling, **options):
      for i, own in enumerate(new[: len(rows)]):
        over[i] = over[i] or not own or len(rows[i]) + len(own) >= most[i]
        rows[i] = (rows[i] + own)[: most[i]]
      if all(over):
        break
    return rows


def _fields(line: str, max_new_tokens: int) -> dict[str, Any]:
  """A request's fields, with the default of `max_new_tokens` filled in.

  Raises:
    DataError: the line is not a valid request.
  """
  if len(line) > MOST_LINE:
    raise DataError(f"the line is longer than {MOST_LINE:,} characters")
  try:
    fields = json.loads(line, parse_constant=_no_number)
  except (ValueError, RecursionError) as error:
    raise DataError(f"the line is not JSON: {error}") from None
  if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
    raise DataError('the line is not an object with a text as prompt, such as {"prompt": "def "}')
  if unknown := [name for name in fields if name not in _FIELDS]:
    raise DataError(f"{unknown[0][:40]!r} is unknown; a request has: {', '.join(_FIELDS)}")
  if not isinstance(fields.get("id"), (str, int, float, type(None))):
    raise DataError(f"id={str(fields['id'])[:40]} must be a text or a number")
  if len(str(fields.get("id"))) > MOST_ID:
    raise DataError(f"id is longer than {MOST_ID} characters")
  most = fields.setdefault("max_new_tokens", max_new_tokens)
  if type(most) is not int or not 1 <= most <= max_new_tokens:
    shown = str(most)[:40]
    raise DataError(
      f"max_new_tokens={shown} must be a number from 1 to --max_new_tokens={max_new_tokens}"
    )
  return fields


def _no_number(word: str) -> Any:
  raise ValueError(f"{word} is not a JSON number")


if __name__ == "__main__":
  run_main(main)
