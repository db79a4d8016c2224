"""The tokens with which a released model's texts begin and end, and its chat template.

A prompt must begin as the model's training texts did: Mixtral's begin with `<s>`, OLMoE's with no
special token, and an instruct model ends its answer with any of several tokens. `scmoe.convert`
reads these conventions from a model's folder (`scmoe.pretrained.conventions`) and writes them to a
file beside the run's tokenizer.json. Without that file the end-of-text token begins and ends every
document.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from scmoe.base.errors import DataError
from scmoe.base.stored import parse_json, read_text

FILE = "conventions.json"  # beside a tokenizer.json
TEMPLATE_BYTES = 2**20  # longer chat templates are refused
_BYTES = 2 * TEMPLATE_BYTES  # longer files are refused
_MOST_IDS = 256  # longest list of token ids


@dataclasses.dataclass(frozen=True)
class Conventions:
  """The rules of a released model for the beginning and end of texts.

  Attributes:
    begin_ids: tokens that the model's tokenizer puts before every prompt; () for none.
    bos_id: token that begins a document of training text, a scored text and an empty prompt; None
      for the end-of-text token.
    stop_ids: tokens, besides the end-of-text token, at which generation ends.
    chat_template: Jinja template of a conversation, or "".
  """

  begin_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  stop_ids: tuple[int, ...] = ()
  chat_template: str = ""

  def to_json(self) -> str:
    """The content of the file `conventions.json`."""
    return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

  def check(self, vocab_size: int, name: str) -> None:
    """Checks that every token id here is below `vocab_size`.

    Raises:
      DataError: an id is too large; `name` is the file's name in the message.
    """
    bos = () if self.bos_id is None else (self.bos_id,)
    worst = max((*self.begin_ids, *bos, *self.stop_ids), default=0)
    if worst >= vocab_size:
      raise DataError(f"{name} names token {worst}; the vocabulary has {vocab_size} tokens")


def conventions_from_json(text: str, name: str) -> Conventions:
  """Parses the output of `Conventions.to_json`.

  Args:
    text: the content of the file.
    name: the file's name in messages.

  Raises:
    DataError: the text is not JSON, lacks a field, or has a value of another type.
  """
  values = parse_json(text, name)
  fields = {field.name for field in dataclasses.fields(Conventions)}
  if set(values) != fields:
    raise DataError(f"{name} does not have the fields {', '.join(sorted(fields))}")
  bos, template = values["bos_id"], values["chat_template"]
  if bos is not None and not is_token_id(bos):
    raise DataError(f"{name}: bos_id={bos!r} is not a token id")
  if not isinstance(template, str) or len(template) > TEMPLATE_BYTES:
    raise DataError(f"{name}: chat_template is not a text of at most {TEMPLATE_BYTES} characters")
  begin, stop = (_ids(values[field], f"{name}: {field}") for field in ("begin_ids", "stop_ids"))
  return Conventions(begin, bos, stop, template)


def _ids(value: Any, name: str) -> tuple[int, ...]:
  if not isinstance(value, list) or len(value) > _MOST_IDS or not all(map(is_token_id, value)):
    raise DataError(f"{name} is not a list of at most {_MOST_IDS} token ids")
  return tuple(value)


def is_token_id(value: Any) -> bool:
  """True if a JSON value is an integer from 0 to 2^31 - 1."""
  return type(value) is int and 0 <= value < 2**31


def conventions_beside(tokenizer: Path) -> Conventions | None:
  """The conventions beside a tokenizer.json; None if that folder has no conventions.json.

  Raises:
    DataError: the file exists and cannot be read.
  """
  path = tokenizer.with_name(FILE)
  try:
    return conventions_from_json(read_text(path, _BYTES), str(path))
  except FileNotFoundError:
    return None
