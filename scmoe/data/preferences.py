"""Reads pairs of answers to one prompt, of which one is preferred to the other.

A row holds either a `prompt`, a `chosen` and a `rejected` text, or `chosen` and `rejected` as two
lists of messages that differ in the last one alone. Each text is written like that of a
conversation (`scmoe.data.conversations`), and of both only the last answer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from scmoe.data.config import DataConfig
from scmoe.data.conversations import (
  Completed,
  Messages,
  NamedRow,
  Refused,
  checked,
  text_of,
  written_rows,
)
from scmoe.data.document import Document, Learned
from scmoe.data.files import BadRows

_Pair = tuple[Messages | Completed, Messages | Completed]
_ANSWERS = ("chosen", "rejected")


def read_preferences(
  rows: Iterable[NamedRow], config: DataConfig, bad: BadRows
) -> Iterator[Document]:
  """Documents of rows that hold a pair of answers (`Learned.second`); other rows are bad rows.

  Raises:
    ConfigError: `data.chat_template=model`, and the tokenizer's folder has no chat template.
    DataError: too many rows are bad.
  """
  pair = lambda row, plain: _parsed(row, plain=plain)
  for (where, split, domain), [chosen, rejected] in written_rows(rows, config, bad, pair):
    (first, (*_, better), apart), (second, (*_, worse), _) = chosen, rejected
    at = len(first)
    spans = (better, (worse[0] + at, worse[1] + at))
    yield Document((first + second).encode(), domain, split, Learned(spans, apart, where, at))


def _parsed(row: dict[str, Any], *, plain: bool) -> _Pair:
  """Both texts of a row as `written` reads them.

  Raises:
    Refused: the row holds no pair of answers.
  """
  for name in _ANSWERS:
    if name not in row:
      has = ", ".join(map(str, row))[:100] or "no field"
      raise Refused(f"no field '{name}'; it has: {has}")
  prompt, given = row.get("prompt"), [row[name] for name in _ANSWERS]
  if all(isinstance(answer, list) for answer in given):
    before = prompt if isinstance(prompt, list) else []
    better, worse = (
      _conversation([*before, *answer], name, plain=plain) for answer, name in zip(given, _ANSWERS)
    )
    if better[:-1] != worse[:-1]:
      raise Refused("'chosen' and 'rejected' differ before their last messages")
    if better == worse:
      raise Refused("'chosen' and 'rejected' are equal")
    return better, worse
  if prompt is None:
    raise Refused("no field 'prompt', and 'chosen' and 'rejected' are no lists of messages")
  asked = text_of(prompt, "'prompt'")
  better, worse = (text_of(answer, repr(name)) for answer, name in zip(given, _ANSWERS))
  for name, answer in zip(_ANSWERS, (better, worse)):
    if not answer.strip():
      raise Refused(f"'{name}' is empty: there is nothing to compare")
  if better == worse:
    raise Refused("'chosen' and 'rejected' are equal")
  return Completed(asked, better), Completed(asked, worse)


def _conversation(messages: Any, name: str, *, plain: bool) -> list[Any]:
  try:
    found = list(checked(messages, plain=plain))
  except Refused as refused:
    raise Refused(f"'{name}': {refused}") from None
  if found[-1]["role"] != "assistant":
    raise Refused(f"'{name}' does not end with the assistant's answer")
  return found
