"""Reads conversations and prompt/completion pairs, and writes each as one text with its answers.

A row holds either `messages`, a list of {"role", "content"}, or a `prompt` and a `completion`. The
chat template of the model's folder writes messages; a plain one is used where the folder has none:

    System:
    Answer with a number.

    User:
    1+2?

    Assistant:
    3E

    User:
    ...

E is the end-of-text token. A prompt and its completion are joined as they stand.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.data.chat import Asked, render_all
from scmoe.data.config import DataConfig
from scmoe.data.document import Document, Learned
from scmoe.data.files import BadRows
from scmoe.data.tokenizers import JsonTokenizer, Tokenizer, load_json

ROLES = ("system", "user", "assistant", "tool")
NamedRow = tuple[str, str | None, str, dict[str, Any]]  # file:line, split, domain, columns
Messages = Sequence[Mapping[str, Any]]
_Text = tuple[str, tuple[tuple[int, int], ...], bool]  # text, spans, apart
BATCH = 128  # conversations that one process of `render_chat` writes
_ANSWER = "Assistant:\n"  # how the plain template introduces an answer
_BETWEEN = "\n\n"  # between two turns of the plain template


@dataclasses.dataclass(frozen=True)
class Completed:
  """A prompt and its completion, which no template writes."""

  prompt: str
  completion: str


class Refused(Exception):
  """The reason why a row is no conversation to train on."""


def read_conversations(
  rows: Iterable[NamedRow], config: DataConfig, bad: BadRows
) -> Iterator[Document]:
  """Documents of rows that hold conversations; a row that holds none is a bad row.

  Raises:
    ConfigError: `data.chat_template=model`, and the tokenizer's folder has no chat template.
    DataError: too many rows are bad.
  """
  alone = lambda row, plain: [_parsed(row, plain=plain)]
  for (where, split, domain), [(text, spans, apart)] in written_rows(rows, config, bad, alone):
    yield Document(text.encode(), domain, split, Learned(spans, apart, where))


def written_rows(
  rows: Iterable[NamedRow],
  config: DataConfig,
  bad: BadRows,
  parse: Callable[[dict[str, Any], bool], Sequence[Messages | Completed]],
) -> Iterator[tuple[tuple[str, str | None, str], list[_Text]]]:
  """Each row's file:line, split and domain, and the texts that it holds; others are bad rows.

  Args:
    rows: rows with their places.
    config: says which template writes them.
    bad: counts the rows that are left out.
    parse: (columns, whether the plain template writes them) -> what a row holds; raises `Refused`.

  Raises:
    ConfigError: `data.chat_template=model`, and the tokenizer's folder has no chat template.
    DataError: too many rows are bad.
  """
  tokenizer = with_template(config)
  rows = iter(rows)
  while batch := list(itertools.islice(rows, BATCH)):
    parsed = []
    for where, split, domain, row in batch:
      try:
        parsed.append(((where, split, domain), parse(row, tokenizer is None)))
      except Refused as refused:
        bad.skip(where, str(refused))
    texts = iter(written([text for _, held in parsed for text in held], tokenizer))
    for place, held in parsed:
      found = list(itertools.islice(texts, len(held)))
      if refused := next((x for x in found if isinstance(x, Refused)), None):
        bad.skip(place[0], str(refused))
      else:
        yield place, [x for x in found if not isinstance(x, Refused)]


def with_template(config: DataConfig) -> JsonTokenizer | None:
  """The tokenizer whose chat template writes the conversations; None for the plain template.

  Raises:
    ConfigError: `data.chat_template=model`, and there is no such template.
  """
  wanted = config.chat_template
  if wanted == "plain" or (wanted == "auto" and config.tokenizer in ("bytes", "bpe")):
    return None
  found = None
  if config.tokenizer not in ("bytes", "bpe"):
    found = load_json(config.tokenizer, config.eos_token)
  if found is not None and found.can_chat:
    return found
  if wanted == "model":
    raise ConfigError(
      f"data.chat_template='model': data.tokenizer={config.tokenizer!r} has no chat template; set "
      "data.chat_template=plain, or give the tokenizer of a folder that has one"
    )
  return None


# --- what a row holds -----------------------------------------------------------------------------


def _parsed(row: dict[str, Any], *, plain: bool) -> Messages | Completed:
  """The messages of a row, or its prompt and completion.

  Raises:
    Refused: it holds neither, or something else in their place.
  """
  if "messages" in row:
    if "completion" in row:
      raise Refused("both 'messages' and 'completion'; give one of them")
    return checked(row["messages"], plain=plain)
  if "prompt" not in row or "completion" not in row:
    has = ", ".join(map(str, row))[:100] or "no field"
    raise Refused(f"no field 'messages', nor both 'prompt' and 'completion'; it has: {has}")
  prompt, completion = (text_of(row[name], repr(name)) for name in ("prompt", "completion"))
  if not completion.strip():
    raise Refused("'completion' is empty: there is nothing to learn")
  return Completed(prompt, completion)


def checked(messages: Any, *, plain: bool) -> Messages:
  """The messages, if they are a conversation with an answer.

  Args:
    messages: the value of a row's field.
    plain: whether the plain template writes them.

  Raises:
    Refused: says what is wrong, and in which message.
  """
  if not isinstance(messages, list):
    raise Refused(f"'messages' holds {type(messages).__name__}, not a list of objects")
  for number, message in enumerate(messages, start=1):
    name = f"message {number}"
    if not isinstance(message, dict):
      raise Refused(f"{name} is {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
      raise Refused(f"{name}: unknown role {str(role)[:40]!r}; one of: {', '.join(ROLES)}")
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if calls and plain:
      raise Refused(f"{name} has 'tool_calls', which the plain chat template cannot write")
    if calls and message.get("content") in (None, ""):
      continue
    content = text_of(message.get("content"), f"{name}: 'content'")
    if role == "assistant" and not content.strip():
      raise Refused(f"{name}: the assistant's turn is empty: there is nothing to learn")
  if not messages:
    raise Refused("'messages' is an empty list; give a turn of the user and one of the assistant")
  roles = [message["role"] for message in messages]
  if "assistant" not in roles:
    raise Refused("no turn of the assistant: there is nothing to learn")
  if roles[0] == "assistant":
    raise Refused("message 1 is the assistant's; a conversation begins with system or user")
  return messages


def text_of(value: Any, name: str) -> str:
  """The value, if it is text that can be encoded; `name` is its field in the message.

  Raises:
    Refused: it is not.
  """
  if not isinstance(value, str):
    raise Refused(f"{name} holds {type(value).__name__}, not text")
  if "\0" in value:
    raise Refused(f"{name} holds a NUL byte")
  try:
    value.encode()
  except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
    raise Refused(f"{name} is not valid UTF-8") from None
  return value


# --- how it is written ----------------------------------------------------------------------------


def written(
  parsed: Sequence[Messages | Completed], tokenizer: JsonTokenizer | None
) -> Iterator[_Text | Refused]:
  """Yields the text of every row, or the reason why the template cannot write it.

  A text comes with the spans of its answers, and with `Learned.apart`.
  """
  chats = [found for found in parsed if not isinstance(found, Completed)]
  by_template = iter(() if tokenizer is None else _by_template(chats, tokenizer))
  for found in parsed:
    if isinstance(found, Completed):
      whole = found.prompt + found.completion
      yield whole, ((len(found.prompt), len(whole)),), True
    elif tokenizer is None:
      yield (*_plainly(found), True)
    else:
      yield next(by_template)


def _plainly(messages: Messages) -> tuple[str, tuple[tuple[int, int], ...]]:
  """The text of the plain template, and the spans of the answers."""
  text, spans = "", []
  for message in messages:
    text += _BETWEEN if text else ""
    text += f"{message['role'].capitalize()}:\n"
    begin = len(text)
    text += message["content"]
    if message["role"] == "assistant":
      spans.append((begin, len(text)))
  return text, tuple(spans)


def _by_template(chats: Sequence[Messages], tokenizer: JsonTokenizer) -> Iterator[_Text | Refused]:
  """Yields the texts that the model's chat template writes.

  The span of an answer is the difference of two texts: the conversation up to the prompt for the
  answer, and the conversation up to its end. So it includes the tokens that end the turn.
  """
  answers = [[i for i, m in enumerate(chat) if m["role"] == "assistant"] for chat in chats]
  asked: list[Asked] = []
  for chat, places in zip(chats, answers):
    asked.append((chat, False))
    for i in places:
      asked += [(chat[:i], True), (chat[: i + 1], False)]
  texts = iter(render_all(tokenizer.template, asked, **tokenizer.names_of_ends()))
  for places in answers:
    own = [next(texts) for _ in range(1 + 2 * len(places))]
    failed = next((text for text in own if not isinstance(text, str)), None)
    if failed is not None:
      yield Refused(str(failed))
      continue
    whole, *parts = (str(text) for text in own)
    spans = tuple((len(a), len(b)) for a, b in zip(parts[::2], parts[1::2]))
    if all(whole.startswith(part) for part in parts) and all(a < b for a, b in spans):
      yield whole, spans, False
    else:
      yield Refused(
        "the chat template of this model writes earlier turns differently once later ones follow, "
        "so where an answer lies is unknown; set data.chat_template=plain, or give one answer a row"
      )


# --- tokens ---------------------------------------------------------------------------------------


def ids_of(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
  """Token ids of a conversation, and which of them belong to an answer.

  The answer's tokens are those that begin within its span, and the tokens that end it.
  """
  assert document.learned is not None
  text, learned = document.text.decode(), document.learned
  if not learned.apart:
    assert isinstance(tokenizer, JsonTokenizer)
    ids, begins = tokenizer.encode_written(text)
    return ids, [any(a <= at < b for a, b in learned.spans) for at in begins]
  ids, counts, at = [*tokenizer.begin_ids], [False] * len(tokenizer.begin_ids), 0
  for begin, end in learned.spans:
    before, answer = tokenizer.encode(text[at:begin]), tokenizer.encode(text[begin:end])
    if not ids and not before:
      before = [tokenizer.bos_id]
    ids += [*before, *answer, tokenizer.eos_id]
    counts += [False] * len(before) + [True] * (len(answer) + 1)
    at = end
  rest = tokenizer.encode(text[at:])
  return ids + rest, counts + [False] * len(rest)


def plain_prompt(messages: Messages, tokenizer: Tokenizer) -> list[int]:
  """Ids of a conversation in the plain template, up to where the model's next answer begins."""
  text, spans = _plainly(messages)
  text += (_BETWEEN if text else "") + _ANSWER
  ids, _ = ids_of(Document(text.encode(), "", None, Learned(spans, True, "")), tokenizer)
  return ids


def chats_plainly(config: DataConfig, tokenizer: Tokenizer) -> bool:
  """True if a model that was trained on `config` knows conversations in the plain template."""
  if not config.reads_chats:
    return False
  has_own = isinstance(tokenizer, JsonTokenizer) and tokenizer.can_chat
  return config.chat_template == "plain" or not has_own
