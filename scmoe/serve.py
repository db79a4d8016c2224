"""python -m scmoe.serve: answers requests as they come, many at a time.

  python -m scmoe.serve --model exports/a --max_new_tokens 32 < prompts.jsonl > answers.jsonl
  mkfifo ask; python -m scmoe.serve --model exports/a --input ask --output answers.jsonl

There is no network: your service writes requests to the input and reads the answers. Each line of
the input is a request: a JSON object with `prompt` (a text, or a list of token ids), and optionally
`id` (returned with the answer), `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop`,
`logprobs` and `prompt_logprobs`. Flags give the defaults of `max_new_tokens`, `temperature`,
`top_k`, `top_p` and `seed`. XLA compiles a program when a request first needs it, and all requests
wait meanwhile; --warm=flags or all compiles before the first request is read. Requests join the
running batch and leave it at any token (`scmoe.inference.serving.server`). Each line of the output
is an answer, in the order in which requests end, or with --in_order in their own: `id`, `text`,
`tokens` (their number), `finish` (end, stop or length), `seconds` to the last token and
`first_seconds` to the first one since the request was read, and log-probabilities if asked for; or
`id` and `error`. The command ends when its input has ended and all requests are answered. Exit
codes: 0, also if requests were refused; 2 a flag is wrong, or the model does not fit; 3 the input
or the model cannot be read; 6 the output cannot be written; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from scmoe.base.errors import ConfigError, DataError, StorageError, run_main
from scmoe.base.options import check_choice
from scmoe.base.stored import ends_a_line
from scmoe.inference.offload.needs import cached_bytes
from scmoe.inference.offload.plan import bytes_of
from scmoe.inference.sampling import Sampling
from scmoe.inference.serving.pool import FREE_SHARE, copied
from scmoe.inference.serving.requests import Answer, Request
from scmoe.inference.serving.server import MOST_SLOTS, MOST_TOKENS, Server
from scmoe.offload.memory import allow_pinned_memory
from scmoe.pretrained.inference import InferenceFolder
from scmoe.run import placement
from scmoe.run.command_line import ALLOW_IMPORT, HELP, Flag, help_text, parse, simulate
from scmoe.run.generation_flags import OFFLOAD_FLAGS, SAMPLING_FLAGS, offload_request
from scmoe.run.programs import user_programs
from scmoe.run.session import Session

FLAGS = (
  Flag("model", str, "", "folder that scmoe.convert --inference wrote", required=True),
  Flag("input", str, "-", "file or pipe with requests, one per line; -: stdin"),
  Flag("output", str, "-", "file to which answers are appended; -: stdout"),
  Flag("in_order", bool, False, "write answers in the order of the requests"),
  Flag("slots", int, 8, "most requests that are decoded together"),
  Flag("page_tokens", int, 64, "tokens of a page of the attention caches"),
  Flag(
    "cache_memory",
    str,
    "",
    "bytes of each device for pages, such as 8GiB; default: all slots at the model's context, or "
    "0.9 of what the model leaves free",
  ),
  Flag("prefill_tokens", int, 256, "most tokens of prompts that are read beside each new token"),
  Flag(
    "warm",
    str,
    "none",
    "compile before the first request is read, so that none waits for it: flags, the programs of "
    "requests that sample as the flags say; all, those of any request, which every turn then runs; "
    "or none",
  ),
  Flag("max_new_tokens", int, 64, "most tokens of an answer whose request does not say it"),
  *SAMPLING_FLAGS,
  *OFFLOAD_FLAGS,
  ALLOW_IMPORT,
  HELP,
)
# What to do in place of a flag that scmoe.generate has.
ELSEWHERE = {
  "--workdir": "name in --model the folder that python -m scmoe.convert --workdir RUN --inference "
  "FOLDER writes"
}
WARM = ("none", "flags", "all")
_OPTIONS = tuple(field.name for field in dataclasses.fields(Request) if field.name != "prompt")
_FIELDS = ("prompt", "id", *_OPTIONS)
MOST_LINE, MOST_ID = 2**24, 256  # most characters of a line, and of a request's id
MOST_HELD = 1024  # so many answers may wait for an older one before the next line is taken


@user_programs()
def main(argv: list[str]) -> None:
  """Answers the requests of the input, and prints statistics when it ends."""
  values, _ = parse(argv, FLAGS, elsewhere=ELSEWHERE)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  simulate(values["simulate"])
  allow_pinned_memory()
  _check_flags(values)
  with contextlib.ExitStack() as files:
    given = _opened(values["input"], "input", files)
    out = _opened(values["output"], "output", files)
    if _breaks_off(Path(values["output"])):  # an earlier answer that a full disk cut off
      out.write("\n")
    memory = bytes_of(values["cache_memory"], "--cache_memory") if values["cache_memory"] else 0
    session = _session(values, memory)
    names = ("slots", "page_tokens", "prefill_tokens")
    server = session.server(cache_bytes=memory, **{name: values[name] for name in names})
    context = session.model.config.context
    if values["max_new_tokens"] >= context:
      raise ConfigError(
        f"--max_new_tokens={values['max_new_tokens']} leaves no room for a prompt in model.context="
        f"{context}"
      )
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    defaults = {name: values[name] for name in names}
    if line := _warmed(server, values["warm"], defaults):
      print(line, file=sys.stderr)
    desk = Desk(session, server, defaults, in_order=values["in_order"])
    try:
      for answers in desk.answers(given):
        _write(answers, out, values["output"])
    except KeyboardInterrupt:
      raise SystemExit(130) from None
    finally:
      print(desk.report(), file=sys.stderr)


def _session(values: dict[str, Any], memory: int) -> Session:
  """Opens the model; prints where its experts lie if they are not on the devices.

  The planner, which decides where they lie, reserves memory for pages: `memory` bytes, but no more
  than all slots need for texts as long as the model's context, since the pool takes no more. If
  `memory` is 0, the pool takes what is left, and the planner reserves what leaves it one such text
  beside the copies that a step makes.
  Activations are those of one pass, of `prefill_tokens` and a token of each slot, not of all tokens
  in the pages.
  """
  run = placement.on_mesh(
    InferenceFolder(values["model"], values["allow_import"]).run, values["mesh"]
  )
  context, page = run.model.context, min(values["page_tokens"], run.model.context)
  longest = -(-context // page) * page
  most = values["slots"] * longest
  tokens = min(most, memory // cached_bytes(run.model, run.mesh.tensor))
  if not memory:
    tokens = math.ceil((longest + copied(most, run.model.num_layers)) / FREE_SHARE)
  session = Session(
    model=values["model"],
    mesh=values["mesh"],
    allow_import=values["allow_import"],
    request=offload_request(values),
    rows=values["slots"],
    longest=max(1, -(-tokens // values["slots"])),
    piece=min(values["prefill_tokens"], context) + values["slots"],
    max_new_tokens=1,
    deterministic=values["deterministic"],
  )
  if session.plan:
    print(*session.plan, sep="\n", file=sys.stderr)
  return session


def _warmed(server: Server, word: str, options: dict[str, Any]) -> str:
  """Compiles programs as `--warm` says; returns a line with their number and time, or nothing.

  Args:
    server: which is to run them.
    word: none, flags or all.
    options: of a request that says nothing but its prompt.
  """
  if word == "none":
    return ""
  options = {**options, "max_new_tokens": 1}
  if word == "all":
    options = {"temperature": 1.0, "top_k": 1, "logprobs": 0, "prompt_logprobs": True}
  began = time.perf_counter()
  count = server.warm(**options)
  return f"programs     {count} compiled and run once in {time.perf_counter() - began:.1f} s"


def _check_flags(values: dict[str, Any]) -> None:
  """Checks the numbers of the command line, and that input and output are different files."""
  most_of = {"slots": MOST_SLOTS, "max_new_tokens": 2**31 - 1}
  most_of |= dict.fromkeys(("page_tokens", "prefill_tokens"), MOST_TOKENS)
  for name, most in most_of.items():
    if not 1 <= values[name] <= most:
      raise ConfigError(f"--{name}={values[name]} must be at least 1, and at most {most}")
  check_choice("--warm", values["warm"], WARM)
  Sampling(values["temperature"], values["top_k"], values["top_p"])
  if abs(values["seed"]) >= 2**63:
    raise ConfigError(f"--seed={values['seed']} is too large; the most is {2**63 - 1}")
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
    with contextlib.suppress(OSError):  # closing tries once more to write the rest
      out.close()
    raise StorageError(f"--output={name!r} cannot be written: {error.strerror}") from None


def _opened(name: str, flag: str, files: contextlib.ExitStack) -> IO[str]:
  if name == "-":
    stream: IO[str] | None = sys.stdin if flag == "input" else sys.stdout
    if stream is None:  # the shell closed it (<&- or >&-)
      kind = DataError if flag == "input" else StorageError
      raise kind(f"--{flag}=- is a standard stream that is closed; give a file")
    # JSON is UTF-8, even if the terminal's encoding is another.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(encoding="utf-8", errors="replace")
    return stream
  try:
    if flag == "output":
      return files.enter_context(Path(name).open("a", encoding="utf-8", errors="replace"))
    # A line that is not UTF-8 must not end the command: U+FFFD stands for its wrong bytes.
    # Nothing closes a pipe: that would wait for the thread that waits for the pipe's next line.
    closing = files if Path(name).is_file() else contextlib.ExitStack()
    return closing.enter_context(Path(name).open(encoding="utf-8", errors="replace"))
  except OSError as error:
    kind = DataError if flag == "input" else StorageError
    raise kind(f"--{flag}={name!r} cannot be opened: {error.strerror}") from None


def _breaks_off(path: Path) -> bool:
  """Whether a file's last line has no end; a pipe and an empty file have no such line."""
  if not path.is_file() or not path.stat().st_size:
    return False
  with path.open("rb") as file:
    return not ends_a_line(file)


class Lines:
  """Lines of the input, which a thread reads ahead; empty ones are skipped.

  Args:
    lines: a file or an iterable of lines.
    ahead: most lines that are read ahead.

  Attributes:
    ended: whether `take` has come to the end of the input.
  """

  def __init__(self, lines: Iterable[str], ahead: int):
    self._read: queue.Queue[tuple[int, str] | BaseException | None] = queue.Queue(ahead)
    self.ended = False

    def read() -> None:
      try:
        for number, line in enumerate(_short(lines), 1):
          if line.strip():
            self._read.put((number, line))
      except BaseException as error:  # `take` raises it; it would wait for ever for a dead thread
        self._read.put(error)
      self._read.put(None)

    # A daemon thread, since a read that waits for a terminal's next line must not keep the process.
    threading.Thread(target=read, name="requests", daemon=True).start()

  def take(self, *, wait: bool) -> tuple[int, str] | None:
    """The next line with text, and its number among all lines of the input, from 1; or None.

    None at the end, and without `wait` also if no line has come yet.

    Args:
      wait: whether to wait for the line.

    Raises:
      DataError: the input cannot be read.
      BaseException: what else the iterable raised.
    """
    try:
      found = self._read.get(wait)
    except queue.Empty:
      return None
    if isinstance(found, OSError):
      raise DataError(f"--input cannot be read: {found}") from None
    if isinstance(found, BaseException):
      raise found
    self.ended = found is None
    return found


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


class Desk:
  """Takes lines with requests, and gives answers as dictionaries, one for each line.

  Args:
    session: encodes prompts.
    server: computes the answers.
    defaults: values of the fields that a request leaves out.
    in_order: whether answers are given in the order of their lines, else as they end.

  Attributes:
    refused: number of requests answered with an error.
  """

  def __init__(
    self, session: Session, server: Server, defaults: dict[str, Any], *, in_order: bool = False
  ):
    self._session, self._server, self._defaults = session, server, defaults
    self._in_order, self.refused = in_order, 0
    # The result of `Server.submit` -> (the request's place among all lines, from 0; its id).
    self._asked: dict[int, tuple[int, Any]] = {}
    self._ready: dict[int, dict[str, Any]] = {}  # place -> answer that has not been given
    self._places = self._given = 0

  def answers(self, given: Iterable[str]) -> Iterator[list[dict[str, Any]]]:
    """Yields lists of answers, until the lines end and all requests are answered.

    With `in_order` answers wait for older ones. While `MOST_HELD` of them do, no line is taken.
    """
    enough = 2 * self._server.statistics.slots  # so many requests may wait before the next is taken
    lines = Lines(given, enough)
    while not lines.ended or self._server.busy:
      while not lines.ended and self._server.waiting < enough and len(self._ready) < MOST_HELD:
        idle = not self._server.busy and not self._ready
        if (line := lines.take(wait=idle)) is None:
          break
        self._ask(*line)
      for answer in self._server.step() if self._server.busy else []:
        place, name = self._asked.pop(answer.id)
        self._ready[place] = {"id": name} | _shown(answer, self._session.tokenizer.decode)
      if found := self._take_ready():
        yield found

  def report(self) -> str:
    """One line with the server's figures (`Statistics.line`) and the number of refused requests."""
    return f"{self._server.statistics.line()}; {self.refused} refused"

  def _ask(self, number: int, line: str) -> None:
    place, self._places = self._places, self._places + 1
    name: Any = number
    try:
      fields = _fields(line)
      name = fields.get("id", number)
      prompt = fields["prompt"]
      prompt = self._session.encode(prompt) if isinstance(prompt, str) else prompt
      options = {key: value for key, value in fields.items() if key in _OPTIONS}
      asked = self._server.submit(prompt, **(self._defaults | options))
      self._asked[asked] = place, name
    except (ConfigError, DataError) as error:
      self.refused += 1
      self._ready[place] = {"id": name, "error": str(error)}

  def _take_ready(self) -> list[dict[str, Any]]:
    """Takes the answers that may be given now: all, or `in_order` those before the first gap."""
    if not self._in_order:
      found, self._ready = [self._ready[place] for place in sorted(self._ready)], {}
      return found
    found = []
    while self._given in self._ready:
      found.append(self._ready.pop(self._given))
      self._given += 1
    return found


def _shown(answer: Answer, decode: Any) -> dict[str, Any]:
  """An answer's fields as they are written, without its id."""
  shown: dict[str, Any] = {
    "text": answer.text,
    "tokens": len(answer.tokens),
    "finish": answer.finish,
    "seconds": round(answer.seconds, 4),
    "first_seconds": round(answer.first_seconds, 4),
  }
  # JSON has no infinity.
  number = lambda x: round(x, 6) if x is not None and math.isfinite(x) else None
  if answer.logprobs is not None:
    shown["logprobs"] = [
      {
        "token": one.token,
        "text": decode([one.token]),
        "logprob": number(one.logprob),
        "top": [[token, number(value)] for token, value in one.top],
      }
      for one in answer.logprobs
    ]
  if answer.prompt_logprobs is not None:
    shown["prompt_logprobs"] = [number(value) for value in answer.prompt_logprobs]
  return shown


def _fields(line: str) -> dict[str, Any]:
  """The fields of a line with a request; `Server.submit` checks the values of all but `id`.

  Raises:
    DataError: the line is not a request.
  """
  if len(line) > MOST_LINE:
    raise DataError(f"the line is longer than {MOST_LINE:,} characters")
  try:
    fields = json.loads(line, parse_constant=_no_number, object_pairs_hook=_once)
  except (ValueError, RecursionError) as error:
    raise DataError(f"the line is not JSON: {error}") from None
  if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), (str, list)):
    raise DataError('the line is not an object with a text as prompt, such as {"prompt": "def "}')
  name = fields.get("id")
  is_number = type(name) is int or (type(name) is float and math.isfinite(name))
  if not (is_number or isinstance(name, (str, type(None)))):
    raise DataError(f"id={str(name)[:40]} must be a text or a finite number")
  if len(str(name)) > MOST_ID:
    raise DataError(f"id is longer than {MOST_ID} characters")
  if unknown := [name for name in fields if name not in _FIELDS]:
    raise DataError(f"{unknown[0][:40]!r} is unknown; a request has: {', '.join(_FIELDS)}")
  return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """The fields of a JSON object; a name that is given twice is an error, not its last value."""
  found: dict[str, Any] = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f"{name[:40]!r} is given twice")
    found[name] = value
  return found


def _no_number(word: str) -> Any:
  raise ValueError(f"{word} is not a JSON number")


if __name__ == "__main__":
  run_main(main)
