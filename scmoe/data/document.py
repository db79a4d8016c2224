"""A document: text, the domain it belongs to, and which of its characters training learns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Learned:
  """The part of a conversation's text that the loss counts.

  Attributes:
    spans: characters [begin, end) of the text, in order: the answers.
    apart: True: each span is tokenised by itself and followed by the end-of-text token, and the
      tokens of a prompt's beginning precede the text. False: a chat template wrote all of the text,
      special tokens included, and it is tokenised as a whole.
    where: file:line of the row, for messages.
  """

  spans: tuple[tuple[int, int], ...]
  apart: bool
  where: str


@dataclasses.dataclass(frozen=True)
class Document:
  """UTF-8 text, its domain, and the split that its file's name gives (None: split by hash).

  `learned` is None for plain text, of which the loss counts every token.
  """

  text: bytes
  domain: str
  split: str | None = None
  learned: Learned | None = None
